#include <omp.h>

#include <vector>

#include "runtime.h"

#ifndef _OPENMP
#error "compile with -fopenmp"
#endif

thread_local int64_t visits = 0;

int64_t threads(int64_t count) {
  std::vector<int> used(count);
  int64_t sum = 0, locked = 0;
  omp_nest_lock_t lock;
  omp_init_nest_lock(&lock);
#pragma omp parallel num_threads(count) reduction(+ : sum)
  {
    visits = 0;
    used[omp_get_thread_num()] = 1;
#pragma omp for schedule(dynamic, 7)
    for (int64_t i = 0; i < 1000; ++i) {
      sum += i;
      ++visits;
    }
    omp_set_nest_lock(&lock);
    omp_set_nest_lock(&lock);
    locked += visits;
    omp_unset_nest_lock(&lock);
    omp_unset_nest_lock(&lock);
  }
  omp_destroy_nest_lock(&lock);
  if (sum != 499500 || locked != 1000) return -__LINE__;
  int64_t ran = 0;
  for (int one : used) ran += one;
  return ran;
}
