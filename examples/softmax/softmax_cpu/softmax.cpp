// Softmax of rows on the CPU, forward and backward.
//
// Reads:    the rows, from memory once, and then from the cache.
// Writes:   `out`.
// Must not: start threads, allocate, or keep state between calls.
//
// A row is reduced lane by lane, in as many lanes as a block has elements: loops over lanes vectorize, as those over a
// single maximum or sum do not. The lanes are reduced once, at the end of the row.
#include "softmax_cpu/softmax.h"

#include <algorithm>
#include <limits>

#include "kit/cpu.h"

namespace op {
namespace {

using kit::Block, kit::kBlockElements;

// Rows of at most this many elements keep their exponentials in the cache; those of longer rows are computed twice.
constexpr int64_t kHeld = 8192;

// e^x for x <= 0, within 2e-7, in arithmetic that compilers vectorize, as they do not a call of std::exp: 2^n * e^r
// with |r| <= ln(2) / 2, and e^r by the polynomial of degree 6 with the least relative error, 4e-9. 0 below -87.
INLINE float exponential(float x) {
  constexpr float kMagic = 0x1.8p23f;  // adding it rounds to an integer, which then stands in the low bits
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * 1.44269504f + kMagic;
  const float n = shifted - kMagic;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts
  const float power = kit::bit_cast<float>((kit::bit_cast<uint32_t>(shifted) + 127u) << 23);
  float series = 0.00138145953f * r + 0.00836871658f;
  series = series * r + 0.041668389f;
  series = series * r + 0.166665211f;
  series = series * r + 0.49999994f;
  series = (series * r) * r + r;
  return x < -87.0f ? 0.0f : (series + 1.0f) * power;
}

// In float64: an error here is one of the whole row.
INLINE double sum_of(const Block& lanes) {
  double sum = 0.0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

template <class T>
INLINE void forward_row(const typename T::Storage* x, int64_t columns, typename T::Storage* y) {
  Block most, sums = {};
  std::fill_n(most, kBlockElements, -std::numeric_limits<float>::infinity());
  kit::for_blocks(columns, [&](int64_t start, int64_t count) ALWAYS_INLINE {
    Block values;
    kit::decode_all<T>(x + start, count, values);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) most[i] = values[i] > most[i] ? values[i] : most[i];
  });
  const float largest = *std::max_element(most, most + kBlockElements);

  float held[kHeld];
  const auto exponentials = [&](int64_t start, int64_t count, float* __restrict__ to) ALWAYS_INLINE {
    Block values;
    kit::decode_all<T>(x + start, count, values);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = exponential(values[i] - largest);
  };
  kit::for_blocks(columns, [&](int64_t start, int64_t count) ALWAYS_INLINE {
    float* to = held + (columns <= kHeld ? start : 0);
    exponentials(start, count, to);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) sums[i] += to[i];
  });
  const float factor = static_cast<float>(1.0 / sum_of(sums));
  kit::for_blocks(columns, [&](int64_t start, int64_t count) ALWAYS_INLINE {
    Block results;
    if (columns > kHeld) exponentials(start, count, held);
    const float* from = held + (columns <= kHeld ? start : 0);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) results[i] = from[i] * factor;
    kit::encode_all<T>(results, count, y + start);
  });
}

// grad_x = y * (grad - sum(grad * y))
template <class T>
INLINE void backward_row(const typename T::Storage* y, const typename T::Storage* grad, int64_t columns,
                         typename T::Storage* grad_x) {
  Block sums = {};
  const auto decode = [&](int64_t start, int64_t count, float* ys, float* grads) ALWAYS_INLINE {
    kit::decode_all<T>(y + start, count, ys);
    kit::decode_all<T>(grad + start, count, grads);
  };
  kit::for_blocks(columns, [&](int64_t start, int64_t count) ALWAYS_INLINE {
    Block ys, grads;
    decode(start, count, ys, grads);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) sums[i] += ys[i] * grads[i];
  });
  const auto projection = static_cast<float>(sum_of(sums));
  kit::for_blocks(columns, [&](int64_t start, int64_t count) ALWAYS_INLINE {
    Block ys, grads, results;
    decode(start, count, ys, grads);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) results[i] = ys[i] * (grads[i] - projection);
    kit::encode_all<T>(results, count, grad_x + start);
  });
}

template <class T>
INLINE void run_rows(const Problem& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row * problem.columns;
    const auto* from = static_cast<const Storage*>(problem.from) + offset;
    auto* out = static_cast<Storage*>(problem.out) + offset;
    if (problem.grad == nullptr) {
      forward_row<T>(from, problem.columns, out);
    } else {
      backward_row<T>(from, static_cast<const Storage*>(problem.grad) + offset, problem.columns, out);
    }
  }
}

}  // namespace

void run(const Problem& problem, int64_t begin, int64_t end) {
  kit::run_on_cpu(problem.type, [&](auto type) ALWAYS_INLINE { run_rows<decltype(type)>(problem, begin, end); });
}

}  // namespace op
