// RMSNorm on the CPU.
//
// Reads:    the rows and the weight of a problem, each row twice; the second time it is still in the cache.
// Writes:   `normed` and `sum`, or `grad_x`, `partial` and `grad_weight`, nothing beside them.
// Must not: start threads, allocate, or keep anything between calls.
//
// A row is worked on in blocks of kBlock elements, of which what is not float32 passes through buffers in the nearest
// cache, so that its conversion is a loop of its own: that is how the processor's own conversions of float16 are used.
// The loops are plain, and `omp simd` lets the compiler vectorize their sums (-fopenmp-simd; there is no OpenMP runtime
// behind it). They are compiled once for each instruction set, and which one runs is found out when it runs. Results
// may differ between instruction sets in the last bit, because sums are split and products fused differently. With
// -fno-trapping-math the compiler may compute both sides of a choice, without which float16 does not vectorize.
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

// Also the length of a float32 sum: beyond it sums are float64, because a longer float32 sum would be off by more than
// the roundings of a result, in the same direction for a whole row.
constexpr int64_t kBlock = 256;

// Rows that take turns at a block, so that the factors of its columns are decoded once for all of them.
constexpr int64_t kTile = 4;

using Buffer = float[kBlock];

// The elements as floats, in `buffer` unless they are that already.
template <class T, Instructions kSet>
INLINE const float* floats(const typename T::Storage* from, Buffer& buffer, int64_t count) {
  if constexpr (std::is_same_v<T, Float32>) {
    return from;
  } else {
    if constexpr (std::is_same_v<T, Float16> && kSet != Instructions::base) {
      float16_to_floats(from, buffer, count);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) buffer[i] = T::decode(from[i]);
    }
    return buffer;
  }
}

// Where to compute what `write` then writes to `to`.
template <class T>
INLINE float* place(typename T::Storage* to, Buffer& buffer) {
  if constexpr (std::is_same_v<T, Float32>) {
    return to;
  } else {
    return buffer;
  }
}

template <class T, Instructions kSet>
INLINE void write(const float* from, typename T::Storage* to, int64_t count) {
  if constexpr (std::is_same_v<T, Float32>) return;
  if constexpr (std::is_same_v<T, Float16> && kSet != Instructions::base) {
    floats_to_float16(from, to, count);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = T::encode(from[i]);
  }
}

// The factors of a block of columns: null when all of them are one.
template <class T, Instructions kSet>
INLINE const float* factors(const Weight& weight, int64_t start, Buffer& buffer, int64_t count) {
  if (weight.data == nullptr) return nullptr;
  const float* values =
      weight.type == Type::float32
          ? static_cast<const float*>(weight.data) + start
          : floats<T, kSet>(static_cast<const typename T::Storage*>(weight.data) + start, buffer, count);
  if (weight.offset == 0.0f) return values;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) buffer[i] = values[i] + weight.offset;
  return buffer;
}

// The sum of `term(i)` over a block, as four sums, so that the processor need not wait for one to go on with another.
template <class Term>
INLINE float sum_of_block(int64_t count, Term&& term) {
  const int64_t quarter = count / 4;
  float a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
#pragma omp simd reduction(+ : a, b, c, d)
  for (int64_t i = 0; i < quarter; ++i) {
    a += term(i);
    b += term(quarter + i);
    c += term(2 * quarter + i);
    d += term(3 * quarter + i);
  }
  for (int64_t i = 4 * quarter; i < count; ++i) a += term(i);
  return (a + b) + (c + d);
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
  for (int64_t start = 0; start < problem.hidden; start += kBlock) {
    const int64_t count = std::min(kBlock, problem.hidden - start);
    Buffer x_buffer, residual_buffer, total;
    const float* values = floats<T, kSet>(x + start, x_buffer, count);
    if (add) {
      const float* others = floats<T, kSet>(residual + start, residual_buffer, count);
      float* totals = place<T>(sum + start, total);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) totals[i] = values[i] + others[i];
      write<T, kSet>(totals, sum + start, count);
      values = floats<T, kSet>(sum + start, total, count);
    }
    squares += sum_of_block(count, [=](int64_t i) { return values[i] * values[i]; });
  }
  return squares;
}

template <class T, Instructions kSet>
INLINE void forward_rows(const Forward& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const int64_t hidden = problem.hidden;
  for (int64_t first = begin; first < end; first += kTile) {
    const int64_t tile = std::min(kTile, end - first);
    float rstd[kTile];
    const Storage* x[kTile];
    for (int64_t i = 0; i < tile; ++i) {
      const int64_t row = first + i;
      rstd[i] = reciprocal_norm(squares_of_row<T, kSet>(problem, row), hidden, problem.eps);
      x[i] = problem.residual.data == nullptr ? at<T>(problem.x, row)
                                              : destination<T>(problem.sum, problem.residual, row, hidden);
    }
    for (int64_t start = 0; start < hidden; start += kBlock) {
      const int64_t count = std::min(kBlock, hidden - start);
      Buffer weight_buffer;
      const float* weight = factors<T, kSet>(problem.weight, start, weight_buffer, count);
      for (int64_t i = 0; i < tile; ++i) {
        Buffer x_buffer, buffer;
        const float* values = floats<T, kSet>(x[i] + start, x_buffer, count);
        const bool wide = problem.normed_type != problem.type;
        Storage* to = wide ? nullptr : destination<T>(problem.normed, problem.x, first + i, hidden) + start;
        float* normed =
            wide ? static_cast<float*>(problem.normed) + (first + i) * hidden + start : place<T>(to, buffer);
        if (weight == nullptr) {
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) normed[j] = values[j] * rstd[i];
        } else if (problem.rounded_before_weight && !std::is_same_v<T, Float32>) {
          Storage rounded[kBlock];
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) normed[j] = values[j] * rstd[i];
          write<T, kSet>(normed, rounded, count);
          values = floats<T, kSet>(rounded, x_buffer, count);
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) normed[j] = values[j] * weight[j];
        } else {
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) normed[j] = values[j] * rstd[i] * weight[j];
        }
        if (!wide) write<T, kSet>(normed, to, count);
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
    double squares[kTile], products[kTile];
    for (int64_t i = 0; i < tile; ++i) {
      x[i] = at<T>(problem.x, first + i);
      grad[i] = at<T>(problem.grad, first + i);
      squares[i] = products[i] = 0.0;
    }
    Buffer weight_buffer, x_buffer, grad_buffer, grad_sum_buffer, result_buffer;
    for (int64_t start = 0; start < hidden; start += kBlock) {
      const int64_t count = std::min(kBlock, hidden - start);
      const float* weight = factors<T, kSet>(problem.weight, start, weight_buffer, count);
      for (int64_t i = 0; i < tile; ++i) {
        const float* values = floats<T, kSet>(x[i] + start, x_buffer, count);
        const float* slopes = floats<T, kSet>(grad[i] + start, grad_buffer, count);
        squares[i] += sum_of_block(count, [=](int64_t j) { return values[j] * values[j]; });
        products[i] += weight == nullptr
                           ? sum_of_block(count, [=](int64_t j) { return values[j] * slopes[j]; })
                           : sum_of_block(count, [=](int64_t j) { return values[j] * (slopes[j] * weight[j]); });
      }
    }
    float rstd[kTile], along[kTile];
    for (int64_t i = 0; i < tile; ++i) {
      rstd[i] = reciprocal_norm(squares[i], hidden, problem.eps);
      along[i] = rstd[i] * rstd[i] * static_cast<float>(products[i] / static_cast<double>(hidden));
    }
    for (int64_t start = 0; start < hidden; start += kBlock) {
      const int64_t count = std::min(kBlock, hidden - start);
      const float* weight = factors<T, kSet>(problem.weight, start, weight_buffer, count);
      for (int64_t i = 0; i < tile; ++i) {
        const float* values = floats<T, kSet>(x[i] + start, x_buffer, count);
        const float* slopes = floats<T, kSet>(grad[i] + start, grad_buffer, count);
        // Before the result is written: a load that follows a write to the same place in another page waits for it.
        if (partial != nullptr) {
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) partial[start + j] += slopes[j] * (values[j] * rstd[i]);
        }
        Storage* to = static_cast<Storage*>(problem.grad_x) + (first + i) * hidden + start;
        float* result = place<T>(to, result_buffer);
        if (weight == nullptr) {
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) result[j] = rstd[i] * (slopes[j] - values[j] * along[i]);
        } else {
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) result[j] = rstd[i] * (slopes[j] * weight[j] - values[j] * along[i]);
        }
        if (problem.grad_sum.data != nullptr) {
          const float* sums = floats<T, kSet>(at<T>(problem.grad_sum, first + i) + start, grad_sum_buffer, count);
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) result[j] += sums[j];
        }
        write<T, kSet>(result, to, count);
      }
    }
  }
}

// Writes over the first of the partial sums on its way.
template <class W>
void reduce_columns(const Backward& problem, int64_t begin, int64_t end) {
  float* __restrict__ sums = problem.partial;
  for (int64_t part = 1; part < problem.parts; ++part) {
    const float* partial = problem.partial + part * problem.hidden;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) sums[i] += partial[i];
  }
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

int64_t partial_sums(int64_t rows) { return std::min<int64_t>(64, (rows + 3) / 4); }

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
