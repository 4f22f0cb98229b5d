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

}  // namespace

void gate(const Gate& problem, int64_t begin, int64_t end) { run_on_cpu<OnRows>(problem.type, problem, begin, end); }

void forward(const Forward& problem, int64_t begin, int64_t end) {
  run_on_cpu<OnRows>(problem.type, problem, begin, end);
}

int64_t partial_sums(int64_t groups, int64_t rows) {
  constexpr int64_t kRows = 16;  // of a part, at least, so that the sums are the smaller part of the work
  return std::max<int64_t>(1, std::min(64 / groups, rows / groups / kRows));
}

void backward(const Backward& problem, int64_t begin, int64_t end) {
  run_on_cpu<OnRows>(problem.type, problem, begin, end);
}

void gate_backward(const GateBackward& problem, int64_t begin, int64_t end) {
  run_on_cpu<OnRows>(problem.type, problem, begin, end);
}

void reduce(const Backward& problem, int64_t begin, int64_t end) {
  run_on_cpu<OnColumns>(problem.type, problem, begin, end);
}

void reduce(const GateBackward& problem, int64_t begin, int64_t end) {
  run_on_cpu<OnColumns>(problem.type, problem, begin, end);
}

}  // namespace adaln
