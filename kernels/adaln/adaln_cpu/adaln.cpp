// Modulated norms and gates on the CPU: selects the instruction set and the dtype.
//
// Reads:    the rows, parameters and modulations of a problem; a row several times, from the cache after the first.
// Writes:   the results of a problem and its partial sums.
// Must not: start threads, or keep state between calls.
//
// Everything is computed in float32, a block of a row at a time; a row is read from memory once, while the preceding
// one is computed. The loops are plain; `omp simd` lets the compiler vectorize their sums (-fopenmp-simd, without an
// OpenMP runtime). They are compiled for several instruction sets, and the CPU's is selected at run time. Results may
// differ between instruction sets in the last bit, because sums are split differently. With -fno-trapping-math the
// compiler may compute both sides of a branch, without which rounding does not vectorize.
// -fno-tree-loop-distribute-patterns keeps it from copying blocks of float32 by memcpy. -ffp-contract=off rounds a
// product the same way wherever it is used.
#include "adaln_cpu/adaln.h"

#include <algorithm>

#include "adaln_cpu/backward_rows.h"
#include "adaln_cpu/chunks.h"
#include "adaln_cpu/forward_rows.h"

namespace adaln {
namespace {

// The functions over rows and over columns, as types.
struct OnRows {
  template <class T, class Problem>
  static INLINE void run(const Problem& problem, int64_t begin, int64_t end) {
    run_rows<T>(problem, begin, end);
  }
};
struct OnColumns {
  template <class T, class Problem>
  static INLINE void run(const Problem& problem, int64_t begin, int64_t end) {
    reduce_columns<T>(problem, begin, end);
  }
};

#if defined(__x86_64__)
template <class Work, class T, class Problem>
__attribute__((target("avx2,fma,f16c"))) void run_avx2(const Problem& problem, int64_t begin, int64_t end) {
  Work::template run<T>(problem, begin, end);
}
template <class Work, class T, class Problem>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void run_avx512(
    const Problem& problem, int64_t begin, int64_t end) {
  Work::template run<T>(problem, begin, end);
}
#endif

template <class Work, class T, class Problem>
void run_on_cpu(const Problem& problem, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (has_avx512()) return run_avx512<Work, ForAvx512<T>>(problem, begin, end);
  if (has_avx2()) return run_avx2<Work, ForAvx2<T>>(problem, begin, end);
#endif
  Work::template run<T>(problem, begin, end);
}

template <class Work, class Problem>
void run(const Problem& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case Type::float32:
      return run_on_cpu<Work, Float32>(problem, begin, end);
    case Type::float16:
      return run_on_cpu<Work, Float16>(problem, begin, end);
    case Type::bfloat16:
      return run_on_cpu<Work, BFloat16>(problem, begin, end);
  }
}

}  // namespace

void gate(const Gate& problem, int64_t begin, int64_t end) { run<OnRows>(problem, begin, end); }

void forward(const Forward& problem, int64_t begin, int64_t end) { run<OnRows>(problem, begin, end); }

int64_t partial_sums(int64_t groups, int64_t rows) {
  constexpr int64_t kRows = 16;  // of a part, at least, so that the sums are the smaller part of the work
  return std::max<int64_t>(1, std::min(64 / groups, rows / groups / kRows));
}

void backward(const Backward& problem, int64_t begin, int64_t end) { run<OnRows>(problem, begin, end); }

void gate_backward(const GateBackward& problem, int64_t begin, int64_t end) { run<OnRows>(problem, begin, end); }

void reduce(const Backward& problem, int64_t begin, int64_t end) { run<OnColumns>(problem, begin, end); }

void reduce(const GateBackward& problem, int64_t begin, int64_t end) { run<OnColumns>(problem, begin, end); }

}  // namespace adaln
