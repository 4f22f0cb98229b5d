// RMSNorm on the CPU.
//
// Reads:    the rows and the weight of a problem, each row twice; the second time it is still in the cache.
// Writes:   `normed` and `sum`, or `grad_x`, `partial` and `grad_weight`.
// Must not: start threads, allocate, or keep state between calls.
//
// Columns are processed in blocks of floats. The compiler vectorizes the loops: -fassociative-math (which needs
// -fno-signed-zeros and -fno-trapping-math) lets it split a sum over lanes, and -fno-trapping-math lets it compute both
// sides of a condition. They are compiled once per instruction set, and one is selected at run time. Results may differ
// between instruction sets in the last bit, since sums are split and products fused differently.
#include "rmsnorm_cpu/rmsnorm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kit/cpu.h"

namespace rmsnorm {
namespace {

using namespace kit;

constexpr int64_t kColumns = 256;  // of a tile at a time

// Elements of a float32 sum; the sums of longer rows are added in float64. A longer float32 sum would have a larger
// error than the rounding of a result, with the same sign for the whole row.
constexpr int64_t kSum = 2048;

// Rows of a tile, which share the decoded factors of a block of columns.
constexpr int64_t kTile = 4;

using Buffer = float[kColumns];

// Reads `count` elements as floats: through the buffer if T has instructions for several at a time.
template <class T>
class Reader {
 public:
  INLINE Reader(const typename T::Storage* from, float* buffer, int64_t count) : from_(from), floats_(buffer) {
    if constexpr (kLanes<T> > 1) decode_all<T>(from, count, buffer);
  }
  INLINE float operator[](int64_t i) const {
    if constexpr (kLanes<T> > 1) return floats_[i];
    return T::decode(from_[i]);
  }

 private:
  const typename T::Storage* from_;
  const float* floats_;
};

// Requests elements of 16 bits that are read later, so that they come from memory while the CPU computes. Rows of
// float32 push the present ones out of the L1 cache, which takes longer than it saves.
template <class T>
INLINE void prefetch(const typename T::Storage* from, int64_t count) {
  constexpr int64_t kSize = sizeof(typename T::Storage), kLine = 64 / kSize;
  if constexpr (kSize == 2) {
    for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + i);
  }
}

// Calls `work` with the beginning and the length of each part: blocks if elements are read through buffers.
template <class T, class Work>
INLINE void for_parts(int64_t count, Work work) {
  if constexpr (kLanes<T> > 1) {
    for_blocks(count, work);
  } else {
    work(0, count);
  }
}

// Writes `count` elements: value(i), rounded.
template <class T, class Value>
INLINE void write(typename T::Storage* to, int64_t count, Value&& value) {
  if constexpr (kLanes<T> > 1) {
    for_blocks(count, [&](int64_t start, int64_t length) ALWAYS_INLINE {
      Block values;
#pragma omp simd
      for (int64_t i = 0; i < length; ++i) values[i] = value(start + i);
      encode_all<T>(values, length, to + start);
    });
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = T::encode(value(i));
  }
}

// Returns the factors of a block of columns, null if all of them are 1. `buffer` may hold them.
template <class T>
INLINE const float* factors(const Weight& weight, int64_t start, float* buffer, int64_t count) {
  if (weight.data == nullptr) return nullptr;
  if (weight.type == Type::float32) {
    const float* values = static_cast<const float*>(weight.data) + start;
    if (weight.offset == 0.0f) return values;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) buffer[i] = values[i] + weight.offset;
  } else {
    Buffer decoded;
    const Reader<T> values(static_cast<const typename T::Storage*>(weight.data) + start, decoded, count);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) buffer[i] = values[i] + weight.offset;
  }
  return buffer;
}

// Returns the sum of term(i) for `count` elements.
template <class Term>
INLINE float sum_of(int64_t count, Term&& term) {
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += term(i);
  return sum;
}

INLINE float reciprocal_norm(double sum_of_squares, int64_t hidden, float eps) {
  return static_cast<float>(1.0 / std::sqrt(sum_of_squares / static_cast<double>(hidden) + static_cast<double>(eps)));
}

// Returns the address at which a row is written: in the contiguous `rows`, or over the row of `over` if `rows` is null.
template <class T>
INLINE typename T::Storage* destination(void* rows, const Rows& over, int64_t row, int64_t hidden) {
  using Storage = typename T::Storage;
  return rows == nullptr ? const_cast<Storage*>(at<T>(over, row)) : static_cast<Storage*>(rows) + row * hidden;
}

// Returns the sum of squares of a row, after adding the residual and writing their sum.
template <class T>
INLINE double squares_of_row(const Forward& problem, int64_t row) {
  const auto* x = at<T>(problem.x, row);
  const bool add = problem.residual.data != nullptr;
  const auto* residual = add ? at<T>(problem.residual, row) : x;
  auto* sum = add ? destination<T>(problem.sum, problem.residual, row, problem.hidden) : nullptr;
  double squares = 0.0;
  for (int64_t start = 0; start < problem.hidden; start += kSum) {
    const int64_t count = std::min(kSum, problem.hidden - start);
    float buffer[kSum];
    if (add) {
      for_parts<T>(count, [&](int64_t first, int64_t length) ALWAYS_INLINE {
        Block values, others;
        const Reader<T> of_x(x + start + first, values, length), of_residual(residual + start + first, others, length);
        write<T>(sum + start + first, length, [&](int64_t i) ALWAYS_INLINE { return of_x[i] + of_residual[i]; });
      });
    }
    const Reader<T> values((add ? sum : x) + start, buffer, count);
    squares += sum_of(count, [&](int64_t i) ALWAYS_INLINE { return values[i] * values[i]; });
  }
  return squares;
}

// Writes `count` elements of a normalized row. `weight` is null if all factors are 1.
template <class T>
INLINE void write_normed(const typename T::Storage* x, float rstd, bool rounded, const float* weight, int64_t count,
                         typename T::Storage* to) {
  Block buffer;
  const Reader<T> values(x, buffer, count);
  if (weight == nullptr || rounded) {
    write<T>(to, count, [=](int64_t i) ALWAYS_INLINE { return values[i] * rstd; });
  } else {
    write<T>(to, count, [=](int64_t i) ALWAYS_INLINE { return values[i] * rstd * weight[i]; });
  }
  if (weight != nullptr && rounded) {
    const Reader<T> results(to, buffer, count);
    write<T>(to, count, [=](int64_t i) ALWAYS_INLINE { return results[i] * weight[i]; });
  }
}

// Writes `count` elements of a normalized row in float32: rounded quotients times the weight.
template <class T>
INLINE void write_wide(const typename T::Storage* x, float rstd, const float* weight, int64_t count, float* to) {
  typename T::Storage quotients[kColumns];
  Block buffer;
  const Reader<T> values(x, buffer, count);
  write<T>(quotients, count, [=](int64_t i) ALWAYS_INLINE { return values[i] * rstd; });
  const Reader<T> results(quotients, buffer, count);
  write<Float32>(to, count, [=](int64_t i) ALWAYS_INLINE { return results[i] * weight[i]; });
}

template <class T>
INLINE void forward_rows(const Forward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  const bool rounded = problem.rounded_before_weight && !std::is_same_v<T, Float32>;
  for (int64_t first = begin; first < end; first += kTile) {
    const int64_t tile = std::min(kTile, end - first);
    float rstds[kTile];
    const typename T::Storage* x[kTile];
    for (int64_t i = 0; i < tile; ++i) {
      const int64_t row = first + i;
      rstds[i] = reciprocal_norm(squares_of_row<T>(problem, row), hidden, problem.eps);
      x[i] = problem.residual.data == nullptr ? at<T>(problem.x, row)
                                              : destination<T>(problem.sum, problem.residual, row, hidden);
    }
    for (int64_t start = 0; start < hidden; start += kColumns) {
      const int64_t count = std::min(kColumns, hidden - start);
      Buffer buffer;
      const float* weight = factors<T>(problem.weight, start, buffer, count);
      for (int64_t i = 0; i < tile; ++i) {
        const int64_t next = first + kTile + i;
        if (next < end) prefetch<T>(at<T>(problem.x, next) + start, count);
        if (next < end && problem.residual.data != nullptr) prefetch<T>(at<T>(problem.residual, next) + start, count);
        for_parts<T>(count, [&](int64_t part, int64_t length) ALWAYS_INLINE {
          const auto* from = x[i] + start + part;
          const float* of_part = weight == nullptr ? nullptr : weight + part;
          if (problem.normed_type != problem.type) {
            auto* to = static_cast<float*>(problem.normed) + (first + i) * hidden + start + part;
            write_wide<T>(from, rstds[i], of_part, length, to);
          } else {
            auto* to = destination<T>(problem.normed, problem.x, first + i, hidden) + start + part;
            write_normed<T>(from, rstds[i], rounded, of_part, length, to);
          }
        });
      }
    }
  }
}

// Rows of the backward pass, and the two values per row that their gradients need: grad_x = rstd * (grad * factor - x *
// projection).
template <class T>
struct BackwardTile {
  int64_t first, rows;
  const typename T::Storage *x[kTile], *grad[kTile];
  float rstd[kTile], projection[kTile];
};

// Reads a tile's rows and computes their rstd and projection.
template <class T>
INLINE void reduce_tile(const Backward& problem, BackwardTile<T>& tile) {
  const int64_t hidden = problem.hidden;
  double squares[kTile] = {}, products[kTile] = {};
  for (int64_t i = 0; i < tile.rows; ++i) {
    tile.x[i] = at<T>(problem.x, tile.first + i);
    tile.grad[i] = at<T>(problem.grad, tile.first + i);
  }
  Buffer weight_buffer, x_buffer, grad_buffer;
  for (int64_t start = 0; start < hidden; start += kColumns) {
    const int64_t count = std::min(kColumns, hidden - start);
    const float* weight = factors<T>(problem.weight, start, weight_buffer, count);
    for (int64_t i = 0; i < tile.rows; ++i) {
      const Reader<T> x(tile.x[i] + start, x_buffer, count), grad(tile.grad[i] + start, grad_buffer, count);
      squares[i] += sum_of(count, [&](int64_t j) { return x[j] * x[j]; });
      products[i] += weight == nullptr ? sum_of(count, [&](int64_t j) { return x[j] * grad[j]; })
                                       : sum_of(count, [&](int64_t j) { return x[j] * (grad[j] * weight[j]); });
    }
  }
  for (int64_t i = 0; i < tile.rows; ++i) {
    tile.rstd[i] = reciprocal_norm(squares[i], hidden, problem.eps);
    tile.projection[i] = tile.rstd[i] * tile.rstd[i] * static_cast<float>(products[i] / static_cast<double>(hidden));
  }
}

// Adds row i's terms of the weight's gradient, for a block of columns. `tile_sums` collects them for all rows of the
// tile but the last, which adds them to `sums`: a long float32 sum then rounds once per tile, not once per row.
template <class Term>
INLINE void add_weight_terms(int64_t i, int64_t rows, int64_t count, float* tile_sums, float* sums, Term&& term) {
  float* const to = i + 1 < rows ? tile_sums : sums;
  if (i == 0) {
    const bool only = rows == 1;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) to[j] = only ? to[j] + term(j) : term(j);
  } else if (i + 1 < rows) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) to[j] += term(j);
  } else {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) to[j] += tile_sums[j] + term(j);
  }
}

// Computes the rows [begin, end) of grad_x, and adds their terms of the weight's gradient to `partial`.
template <class T>
INLINE void backward_rows(const Backward& problem, float* __restrict__ partial, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const int64_t hidden = problem.hidden;
  for (int64_t first = begin; first < end; first += kTile) {
    BackwardTile<T> tile;
    tile.first = first;
    tile.rows = std::min(kTile, end - first);
    reduce_tile<T>(problem, tile);
    Buffer weight_buffer, x_buffer, grad_buffer, grad_sum_buffer, tile_sums;
    for (int64_t start = 0; start < hidden; start += kColumns) {
      const int64_t count = std::min(kColumns, hidden - start);
      const float* weight = factors<T>(problem.weight, start, weight_buffer, count);
      for (int64_t i = 0; i < tile.rows; ++i) {
        const float rstd = tile.rstd[i], projection = tile.projection[i];
        const Reader<T> x(tile.x[i] + start, x_buffer, count), grad(tile.grad[i] + start, grad_buffer, count);
        // This runs before grad_x is written: a load waits for an earlier store to the same offset of another page.
        if (partial != nullptr) {
          add_weight_terms(i, tile.rows, count, tile_sums, partial + start,
                           [&](int64_t j) { return grad[j] * (x[j] * rstd); });
        }
        Storage* to = static_cast<Storage*>(problem.grad_x) + (first + i) * hidden + start;
        const auto result = [&](int64_t j) {
          return rstd * ((weight == nullptr ? grad[j] : grad[j] * weight[j]) - x[j] * projection);
        };
        if (problem.grad_sum.data == nullptr) {
          write<T>(to, count, result);
        } else {
          const Reader<T> sums(at<T>(problem.grad_sum, first + i) + start, grad_sum_buffer, count);
          write<T>(to, count, [&](int64_t j) { return result(j) + sums[j]; });
        }
      }
    }
  }
}

// Adds the partial sums as a binary tree, in place, and writes the columns [begin, end) of the gradient.
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

struct OnRows {
  template <class T>
  static INLINE void run(const Forward& problem, int64_t begin, int64_t end) {
    forward_rows<T>(problem, begin, end);
  }
  template <class T>
  static INLINE void run(const Backward& problem, float* partial, int64_t begin, int64_t end) {
    backward_rows<T>(problem, partial, begin, end);
  }
};

}  // namespace

void forward(const Forward& problem, int64_t begin, int64_t end) {
  run_on_cpu<OnRows>(problem.type, problem, begin, end);
}

// A part has about 32 rows at most, which are added tile by tile; the parts are added as a binary tree.
int64_t partial_sums(int64_t rows) { return std::min<int64_t>((rows + 3) / 4, std::max<int64_t>(rows / 32, 64)); }

void backward(const Backward& problem, int64_t begin, int64_t end) {
  const int64_t share = problem.rows / problem.parts, longer = problem.rows % problem.parts;
  for (int64_t part = begin; part < end; ++part) {
    float* partial = problem.partial == nullptr ? nullptr : problem.partial + part * problem.hidden;
    if (partial != nullptr) std::memset(partial, 0, problem.hidden * sizeof(float));
    const int64_t first = part * share + std::min(part, longer);
    run_on_cpu<OnRows>(problem.type, problem, partial, first, first + share + (part < longer ? 1 : 0));
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
