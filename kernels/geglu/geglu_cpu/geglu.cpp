// GEGLU on the CPU.
//
// Reads:    gate and up, and grad; each element once.
// Writes:   `out`, or `grad_gate` and `grad_up`, nothing beside them.
// Must not: start threads, allocate, or keep anything between calls.
//
// The loops are plain, and `omp simd` lets the compiler vectorize them (-fopenmp-simd; there is no OpenMP runtime
// behind it). They are compiled once for each instruction set, and which one runs is found out when it runs. Results
// may differ between instruction sets in the last bit, because products are fused differently. With -fno-trapping-math
// the compiler may compute both sides of a choice, without which nothing here vectorizes.
#include "geglu_cpu/geglu.h"

#include <algorithm>

#include "geglu/gelu.h"
#include "kit/cpu.h"

namespace geglu {
namespace {

using namespace kit;

// The part of a row between two elements, counted over all rows.
struct Part {
  int64_t row, column, count;
};

INLINE Part part_at(int64_t begin, int64_t end, int64_t hidden) {
  const int64_t row = begin / hidden, column = begin % hidden;
  return {row, column, std::min(hidden - column, end - begin)};
}

template <class T, class G>
INLINE void run_range(const Forward& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  while (begin < end) {
    const Part part = part_at(begin, end, problem.hidden);
    const Storage* gate = at<T>(problem.gate, part.row) + part.column;
    const Storage* up = at<T>(problem.up, part.row) + part.column;
    Storage* __restrict__ out = static_cast<Storage*>(problem.out) + begin;
#pragma omp simd
    for (int64_t i = 0; i < part.count; ++i) out[i] = T::encode(T::decode(up[i]) * G::value(T::decode(gate[i])));
    begin += part.count;
  }
}

template <class T, class G>
INLINE void run_range(const Backward& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  while (begin < end) {
    const Part part = part_at(begin, end, problem.hidden);
    const Storage* grad = at<T>(problem.grad, part.row) + part.column;
    const Storage* gate = at<T>(problem.gate, part.row) + part.column;
    const Storage* up = at<T>(problem.up, part.row) + part.column;
    const int64_t start = part.row * problem.stride + part.column;
    Storage* __restrict__ grad_gate = static_cast<Storage*>(problem.grad_gate) + start;
    Storage* __restrict__ grad_up = static_cast<Storage*>(problem.grad_up) + start;
#pragma omp simd
    for (int64_t i = 0; i < part.count; ++i) {
      float value, slope;
      G::value_and_slope(T::decode(gate[i]), value, slope);
      grad_gate[i] = T::encode(T::decode(grad[i]) * T::decode(up[i]) * slope);
      grad_up[i] = T::encode(T::decode(grad[i]) * value);
    }
    begin += part.count;
  }
}

#if defined(__x86_64__)
template <class T, class G, class Problem>
__attribute__((target("avx2,fma"))) void run_avx2(const Problem& problem, int64_t begin, int64_t end) {
  run_range<T, G>(problem, begin, end);
}
template <class T, class G, class Problem>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void run_avx512(
    const Problem& problem, int64_t begin, int64_t end) {
  run_range<T, G>(problem, begin, end);
}
#endif

template <class T, class G, class Problem>
void run(const Problem& problem, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (has_avx512()) return run_avx512<T, G>(problem, begin, end);
  if (has_avx2()) return run_avx2<T, G>(problem, begin, end);
#endif
  run_range<T, G>(problem, begin, end);
}

template <class T, class Problem>
void run_with_approximate(const Problem& problem, int64_t begin, int64_t end) {
  switch (problem.approximate) {
    case Approximate::none:
      return run<T, Gelu<Accurate>>(problem, begin, end);
    case Approximate::tanh:
      return run<T, GeluTanh<Accurate>>(problem, begin, end);
  }
}

template <class Problem>
void run_with_type(const Problem& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case Type::float32:
      return run_with_approximate<Float32>(problem, begin, end);
    case Type::float16:
      return run_with_approximate<Float16>(problem, begin, end);
    case Type::bfloat16:
      return run_with_approximate<BFloat16>(problem, begin, end);
  }
}

}  // namespace

void forward(const Forward& problem, int64_t begin, int64_t end) { run_with_type(problem, begin, end); }

void backward(const Backward& problem, int64_t begin, int64_t end) { run_with_type(problem, begin, end); }

}  // namespace geglu
