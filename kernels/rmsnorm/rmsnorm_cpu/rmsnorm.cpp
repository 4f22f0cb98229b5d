// RMSNorm on the CPU.
//
// Reads:    the rows and the weight of a problem, each row twice; the second time it is still in the cache.
// Writes:   `normed` and `sum`, or `grad_x`, `partial` and `grad_weight`, nothing beside them.
// Must not: start threads, allocate, or keep anything between calls.
//
// A row is worked on in blocks. float16 passes through buffers in the nearest cache, so that its
// conversion is a loop of its own: that is how the processor's own conversions of it are used. The loops are plain, for
// the compiler to vectorize: with -fassociative-math, for which signs of zeros and traps must not matter to it, a sum
// over lanes is a tree, and not one addition after another; with -fno-trapping-math it may compute both sides of a
// choice. They are compiled once for each instruction set, and which one runs is found out when it runs. Results may
// differ between instruction sets in the last bit, because sums are split and products fused differently.
#include "rmsnorm_cpu/rmsnorm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kit/cpu.h"

namespace rmsnorm {
namespace {

using namespace kit;

enum class Instructions { base, avx2, avx512 };

constexpr int64_t kBlock = 256;

// The length of a float32 sum, over many lanes: beyond it sums are float64, because a longer float32 sum would be off
// by more than the roundings of a result, in the same direction for a whole row.
constexpr int64_t kSum = 2048;

// Rows that take turns at a block, so that the factors of its columns are decoded once for all of them.
constexpr int64_t kTile = 4;

using Buffer = float[kBlock];

// Whether elements pass through a buffer of floats.
template <class T, Instructions kSet>
constexpr bool kBuffered = std::is_same_v<T, Float16> && kSet != Instructions::base;

// So many elements, to be read as floats.
template <class T, Instructions kSet>
class Reader {
 public:
  INLINE Reader(const typename T::Storage* from, float* buffer, int64_t count) : from_(from), floats_(buffer) {
    if constexpr (kBuffered<T, kSet>) float16_to_floats(from, buffer, count);
  }
  INLINE float operator[](int64_t i) const {
    if constexpr (kBuffered<T, kSet>) return floats_[i];
    return T::decode(from_[i]);
  }

 private:
  const typename T::Storage* from_;
  const float* floats_;
};

// Writes `value(i)`, rounded, for each of so many elements.
template <class T, Instructions kSet, class Value>
INLINE void write(typename T::Storage* to, int64_t count, Value&& value) {
  if constexpr (kBuffered<T, kSet>) {
    for (int64_t start = 0; start < count; start += kBlock) {
      const int64_t part = std::min(kBlock, count - start);
      Buffer buffer;
#pragma omp simd
      for (int64_t i = 0; i < part; ++i) buffer[i] = value(start + i);
      floats_to_float16(buffer, to + start, part);
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = T::encode(value(i));
  }
}

// The factors of a block of columns: null when all of them are one.
template <class T, Instructions kSet>
INLINE const float* factors(const Weight& weight, int64_t start, float* buffer, int64_t count) {
  if (weight.data == nullptr) return nullptr;
  if (weight.type == Type::float32) {
    const float* values = static_cast<const float*>(weight.data) + start;
    if (weight.offset == 0.0f) return values;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) buffer[i] = values[i] + weight.offset;
  } else {
    Buffer decoded;
    const Reader<T, kSet> values(static_cast<const typename T::Storage*>(weight.data) + start, decoded, count);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) buffer[i] = values[i] + weight.offset;
  }
  return buffer;
}

// The sum of `term(i)` over so many elements.
template <class Term>
INLINE float sum_of(int64_t count, Term&& term) {
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += term(i);
  return sum;
}

INLINE float reciprocal_norm(double sum_of_squares, int64_t hidden, float eps) {
  return static_cast<float>(1.0 / std::sqrt(sum_of_squares / static_cast<double>(hidden) + static_cast<double>(eps)));
}

// Where a row is written: to `rows` without gaps, or over `over`, whose data this may change.
template <class T>
INLINE typename T::Storage* destination(void* rows, const Rows& over, int64_t row, int64_t hidden) {
  using Storage = typename T::Storage;
  return rows == nullptr ? const_cast<Storage*>(at<T>(over, row)) : static_cast<Storage*>(rows) + row * hidden;
}

// The sum of the squares of a row, to which the residual is added first.
template <class T, Instructions kSet>
INLINE double squares_of_row(const Forward& problem, int64_t row) {
  const auto* x = at<T>(problem.x, row);
  const bool add = problem.residual.data != nullptr;
  const auto* residual = add ? at<T>(problem.residual, row) : x;
  auto* sum = add ? destination<T>(problem.sum, problem.residual, row, problem.hidden) : nullptr;
  double squares = 0.0;
  for (int64_t start = 0; start < problem.hidden; start += kSum) {
    const int64_t count = std::min(kSum, problem.hidden - start);
    float buffer[kSum], residual_buffer[kSum];
    if (add) {
      const Reader<T, kSet> values(x + start, buffer, count), others(residual + start, residual_buffer, count);
      write<T, kSet>(sum + start, count, [&](int64_t i) { return values[i] + others[i]; });
    }
    const Reader<T, kSet> values((add ? sum : x) + start, buffer, count);
    squares += sum_of(count, [&](int64_t i) { return values[i] * values[i]; });
  }
  return squares;
}

template <class T, Instructions kSet>
INLINE void forward_rows(const Forward& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const int64_t hidden = problem.hidden;
  const bool rounded = problem.rounded_before_weight && !std::is_same_v<T, Float32>;
  for (int64_t first = begin; first < end; first += kTile) {
    const int64_t tile = std::min(kTile, end - first);
    float rstds[kTile];
    const Storage* x[kTile];
    for (int64_t i = 0; i < tile; ++i) {
      const int64_t row = first + i;
      rstds[i] = reciprocal_norm(squares_of_row<T, kSet>(problem, row), hidden, problem.eps);
      x[i] = problem.residual.data == nullptr ? at<T>(problem.x, row)
                                              : destination<T>(problem.sum, problem.residual, row, hidden);
    }
    for (int64_t start = 0; start < hidden; start += kBlock) {
      const int64_t count = std::min(kBlock, hidden - start);
      Buffer weight_buffer, buffer;
      const float* weight = factors<T, kSet>(problem.weight, start, weight_buffer, count);
      for (int64_t i = 0; i < tile; ++i) {
        const float rstd = rstds[i];
        const Reader<T, kSet> values(x[i] + start, buffer, count);
        if (problem.normed_type != problem.type) {  // float32, of a quotient that is rounded before
          Storage quotients[kBlock];
          write<T, kSet>(quotients, count, [&](int64_t j) { return values[j] * rstd; });
          const Reader<T, kSet> results(quotients, buffer, count);
          write<Float32, kSet>(static_cast<float*>(problem.normed) + (first + i) * hidden + start, count,
                               [&](int64_t j) { return results[j] * weight[j]; });
          continue;
        }
        Storage* to = destination<T>(problem.normed, problem.x, first + i, hidden) + start;
        if (weight == nullptr || rounded) {
          write<T, kSet>(to, count, [&](int64_t j) { return values[j] * rstd; });
        } else {
          write<T, kSet>(to, count, [&](int64_t j) { return values[j] * rstd * weight[j]; });
        }
        if (weight != nullptr && rounded) {
          const Reader<T, kSet> results(to, buffer, count);
          write<T, kSet>(to, count, [&](int64_t j) { return results[j] * weight[j]; });
        }
      }
    }
  }
}

template <class T, Instructions kSet>
INLINE void backward_rows(const Backward& problem, float* __restrict__ partial, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const int64_t hidden = problem.hidden;
  for (int64_t first = begin; first < end; first += kTile) {
    const int64_t tile = std::min(kTile, end - first);
    const Storage *x[kTile], *grad[kTile];
    double squares[kTile] = {}, products[kTile] = {};
    for (int64_t i = 0; i < tile; ++i) {
      x[i] = at<T>(problem.x, first + i);
      grad[i] = at<T>(problem.grad, first + i);
    }
    Buffer weight_buffer, x_buffer, grad_buffer, grad_sum_buffer, tile_sums;
    for (int64_t start = 0; start < hidden; start += kBlock) {
      const int64_t count = std::min(kBlock, hidden - start);
      const float* weight = factors<T, kSet>(problem.weight, start, weight_buffer, count);
      for (int64_t i = 0; i < tile; ++i) {
        const Reader<T, kSet> values(x[i] + start, x_buffer, count), slopes(grad[i] + start, grad_buffer, count);
        squares[i] += sum_of(count, [&](int64_t j) { return values[j] * values[j]; });
        products[i] += weight == nullptr
                           ? sum_of(count, [&](int64_t j) { return values[j] * slopes[j]; })
                           : sum_of(count, [&](int64_t j) { return values[j] * (slopes[j] * weight[j]); });
      }
    }
    float rstds[kTile], alongs[kTile];
    for (int64_t i = 0; i < tile; ++i) {
      rstds[i] = reciprocal_norm(squares[i], hidden, problem.eps);
      alongs[i] = rstds[i] * rstds[i] * static_cast<float>(products[i] / static_cast<double>(hidden));
    }
    for (int64_t start = 0; start < hidden; start += kBlock) {
      const int64_t count = std::min(kBlock, hidden - start);
      const float* weight = factors<T, kSet>(problem.weight, start, weight_buffer, count);
      for (int64_t i = 0; i < tile; ++i) {
        const float rstd = rstds[i], along = alongs[i];
        const Reader<T, kSet> values(x[i] + start, x_buffer, count), slopes(grad[i] + start, grad_buffer, count);
        // Before the result is written: a load that follows a write to the same place in another page waits for it.
        // The rows of a tile first, so that a long sum does not round for each of them.
        if (partial != nullptr) {
          float* const sums = i + 1 < tile ? tile_sums : partial + start;
          const auto term = [&](int64_t j) { return slopes[j] * (values[j] * rstd); };
          if (i == 0) {
            const bool only = tile == 1;
#pragma omp simd
            for (int64_t j = 0; j < count; ++j) sums[j] = only ? sums[j] + term(j) : term(j);
          } else if (i + 1 < tile) {
#pragma omp simd
            for (int64_t j = 0; j < count; ++j) sums[j] += term(j);
          } else {
#pragma omp simd
            for (int64_t j = 0; j < count; ++j) sums[j] += tile_sums[j] + term(j);
          }
        }
        Storage* to = static_cast<Storage*>(problem.grad_x) + (first + i) * hidden + start;
        const auto result = [&](int64_t j) {
          return rstd * ((weight == nullptr ? slopes[j] : slopes[j] * weight[j]) - values[j] * along);
        };
        if (problem.grad_sum.data == nullptr) {
          write<T, kSet>(to, count, result);
        } else {
          const Reader<T, kSet> sums(at<T>(problem.grad_sum, first + i) + start, grad_sum_buffer, count);
          write<T, kSet>(to, count, [&](int64_t j) { return result(j) + sums[j]; });
        }
      }
    }
  }
}

// Adds the partial sums by pairs, then pairs of pairs, and writes over them on its way.
template <class W>
void reduce_columns(const Backward& problem, int64_t begin, int64_t end) {
  for (int64_t distance = 1; distance < problem.parts; distance *= 2) {
    for (int64_t part = 0; part + distance < problem.parts; part += 2 * distance) {
      float* __restrict__ sums = problem.partial + part * problem.hidden;
      const float* __restrict__ others = sums + distance * problem.hidden;
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) sums[i] += others[i];
    }
  }
  const float* sums = problem.partial;
  auto* __restrict__ out = static_cast<typename W::Storage*>(problem.grad_weight);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) out[i] = W::encode(sums[i]);
}

template <class T, Instructions kSet>
INLINE void run_rows(int64_t begin, int64_t end, const Forward& problem) {
  forward_rows<T, kSet>(problem, begin, end);
}

template <class T, Instructions kSet>
INLINE void run_rows(int64_t begin, int64_t end, const Backward& problem, float* partial) {
  backward_rows<T, kSet>(problem, partial, begin, end);
}

#if defined(__x86_64__)
template <class T, class... Arguments>
__attribute__((target("avx2,fma"))) void run_avx2(int64_t begin, int64_t end, const Arguments&... arguments) {
  run_rows<T, Instructions::avx2>(begin, end, arguments...);
}
template <class T, class... Arguments>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void run_avx512(
    int64_t begin, int64_t end, const Arguments&... arguments) {
  run_rows<T, Instructions::avx512>(begin, end, arguments...);
}
#endif

template <class T, class... Arguments>
void run_with_type(int64_t begin, int64_t end, const Arguments&... arguments) {
#if defined(__x86_64__)
  if (has_avx512()) return run_avx512<T>(begin, end, arguments...);
  if (has_avx2()) return run_avx2<T>(begin, end, arguments...);
#endif
  run_rows<T, Instructions::base>(begin, end, arguments...);
}

// The rows from `begin` to `end`.
template <class... Arguments>
void run(Type type, int64_t begin, int64_t end, const Arguments&... arguments) {
  switch (type) {
    case Type::float32:
      return run_with_type<Float32>(begin, end, arguments...);
    case Type::float16:
      return run_with_type<Float16>(begin, end, arguments...);
    case Type::bfloat16:
      return run_with_type<BFloat16>(begin, end, arguments...);
  }
}

}  // namespace

void forward(const Forward& problem, int64_t begin, int64_t end) { run(problem.type, begin, end, problem); }

// Each of some 32 rows at most, which are added one tile after another; the parts are added by pairs.
int64_t partial_sums(int64_t rows) { return std::min<int64_t>((rows + 3) / 4, std::max<int64_t>(rows / 32, 64)); }

void backward(const Backward& problem, int64_t begin, int64_t end) {
  const int64_t share = problem.rows / problem.parts, longer = problem.rows % problem.parts;
  for (int64_t part = begin; part < end; ++part) {
    float* partial = problem.partial == nullptr ? nullptr : problem.partial + part * problem.hidden;
    if (partial != nullptr) std::memset(partial, 0, problem.hidden * sizeof(float));
    const int64_t first = part * share + std::min(part, longer);
    run(problem.type, first, first + share + (part < longer ? 1 : 0), problem, partial);
  }
}

void reduce_weight_gradient(const Backward& problem, int64_t begin, int64_t end) {
  switch (problem.weight.type) {
    case Type::float32:
      return reduce_columns<Float32>(problem, begin, end);
    case Type::float16:
      return reduce_columns<Float16>(problem, begin, end);
    case Type::bfloat16:
      return reduce_columns<BFloat16>(problem, begin, end);
  }
}

}  // namespace rmsnorm
