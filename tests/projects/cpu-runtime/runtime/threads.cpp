#include <omp.h>

#include <vector>

#include "runtime.h"

#ifndef _OPENMP
#error "compile with -fopenmp"
#endif

int64_t threads(int64_t count) {
  std::vector<int> used(count);
  int64_t sum = 0;
#pragma omp parallel num_threads(count) reduction(+ : sum)
  {
    used[omp_get_thread_num()] = 1;
#pragma omp for schedule(dynamic, 7)
    for (int64_t i = 0; i < 1000; ++i) sum += i;
  }
  if (sum != 499500) return -__LINE__;
  int64_t ran = 0;
  for (int one : used) ran += one;
  return ran;
}
