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

// As kit's, without its provision for a NaN whose low bits would carry into the others: every NaN here has zeros there,
// since it comes from a bfloat16 or from the processor.
struct RoundedBFloat16 : BFloat16 {
  static INLINE uint16_t encode(float value) {
    const auto bits = bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

// How a loop meets elements of type T: as they lie in memory, decoded and encoded by `Element` as it goes.
template <class T>
struct Access {
  using Element = T;
  using Storage = typename T::Storage;
  struct Block {};
  static constexpr int64_t kMost = INT64_MAX;  // elements at a time
  static INLINE const Storage* read(const Storage* from, Block&, int64_t) { return from; }
  static INLINE Storage* target(Storage* to, Block&) { return to; }
  static INLINE void write(Block&, Storage*, int64_t) {}
};

#if defined(__x86_64__)
// Or converted before and after it, a block at a time, which stays in the cache.
struct ConvertedFloat16 {
  using Storage = uint16_t;
};
template <>
struct Access<ConvertedFloat16> {
  using Element = Float32;
  static constexpr int64_t kMost = 512;
  using Block = float[kMost];
  static INLINE const float* read(const uint16_t* from, Block& block, int64_t count) {
    float16_to_floats(from, block, count);
    return block;
  }
  static INLINE float* target(uint16_t*, Block& block) { return block; }
  static INLINE void write(Block& block, uint16_t* to, int64_t count) { floats_to_float16(block, to, count); }
};
#endif

// Some elements of a row, the first of those from `begin` to `end`, which count over all rows.
struct Part {
  int64_t row, column, count;
};

INLINE Part part_at(int64_t begin, int64_t end, int64_t hidden, int64_t most) {
  const int64_t row = begin / hidden, column = begin % hidden;
  return {row, column, std::min({hidden - column, end - begin, most})};
}

template <class T, class G>
INLINE void run_range(const Forward& problem, int64_t begin, int64_t end) {
  using Way = Access<T>;
  using Element = typename Way::Element;
  typename Way::Block gate_block, up_block, out_block;
  while (begin < end) {
    const auto [row, column, count] = part_at(begin, end, problem.hidden, Way::kMost);
    const auto* gate = Way::read(at<T>(problem.gate, row) + column, gate_block, count);
    const auto* up = Way::read(at<T>(problem.up, row) + column, up_block, count);
    auto* result = static_cast<typename T::Storage*>(problem.out) + begin;
    auto* __restrict__ out = Way::target(result, out_block);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      out[i] = Element::encode(Element::decode(up[i]) * G::value(Element::decode(gate[i])));
    }
    Way::write(out_block, result, count);
    begin += count;
  }
}

template <class T, class G>
INLINE void run_range(const Backward& problem, int64_t begin, int64_t end) {
  using Way = Access<T>;
  using Element = typename Way::Element;
  typename Way::Block grad_block, gate_block, up_block, grad_gate_block, grad_up_block;
  while (begin < end) {
    const auto [row, column, count] = part_at(begin, end, problem.hidden, Way::kMost);
    const auto* grad = Way::read(at<T>(problem.grad, row) + column, grad_block, count);
    const auto* gate = Way::read(at<T>(problem.gate, row) + column, gate_block, count);
    const auto* up = Way::read(at<T>(problem.up, row) + column, up_block, count);
    const int64_t start = row * problem.stride + column;
    auto* gate_result = static_cast<typename T::Storage*>(problem.grad_gate) + start;
    auto* up_result = static_cast<typename T::Storage*>(problem.grad_up) + start;
    auto* __restrict__ grad_gate = Way::target(gate_result, grad_gate_block);
    auto* __restrict__ grad_up = Way::target(up_result, grad_up_block);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float above = Element::decode(grad[i]);
      float value, slope;
      G::value_and_slope(Element::decode(gate[i]), value, slope);
      grad_gate[i] = Element::encode(above * Element::decode(up[i]) * slope);
      grad_up[i] = Element::encode(above * value);
    }
    Way::write(grad_gate_block, gate_result, count);
    Way::write(grad_up_block, up_result, count);
    begin += count;
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

template <class T, class Math, class Problem>
void run_with_approximate(const Problem& problem, int64_t begin, int64_t end) {
  switch (problem.approximate) {
    case Approximate::none:
      return run<T, Gelu<Math>>(problem, begin, end);
    case Approximate::tanh:
      return run<T, GeluTanh<Math>>(problem, begin, end);
  }
}

template <class Problem>
void run_with_type(const Problem& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case Type::float32:
      return run_with_approximate<Float32, Accurate>(problem, begin, end);
    case Type::float16:
#if defined(__x86_64__)
      if (has_avx2()) return run_with_approximate<ConvertedFloat16, Brief>(problem, begin, end);
#endif
      return run_with_approximate<Float16, Brief>(problem, begin, end);
    case Type::bfloat16:
      return run_with_approximate<RoundedBFloat16, Brief>(problem, begin, end);
  }
}

}  // namespace

void forward(const Forward& problem, int64_t begin, int64_t end) { run_with_type(problem, begin, end); }

void backward(const Backward& problem, int64_t begin, int64_t end) { run_with_type(problem, begin, end); }

}  // namespace geglu
