// Chunks of rows on the CPU: modulations and parameters as float32, prefetches, and sums.
//
// Reads:    the elements it is given.
// Must not: depend on the operation of a kernel, or keep state between calls.
//
// Included by adaln.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "adaln/problem.h"
#include "kit/cpu.h"

namespace adaln {
namespace {

using namespace kit;

// Elements of a chunk of a row. A chunk is summed in float32, and chunks in float64: the error of a longer float32 sum
// would exceed the rounding of a result, in the same direction for a whole row.
constexpr int64_t kChunk = 1024;

template <class T>
INLINE typename T::Storage* result_row(void* data, int64_t row, int64_t hidden) {
  return data == nullptr ? nullptr : static_cast<typename T::Storage*>(data) + row * hidden;
}

template <class T>
INLINE void read_elements(const void* data, int64_t begin, int64_t count, float* values) {
  decode_all<T>(static_cast<const typename T::Storage*>(data) + begin, count, values);
}

template <class T>
INLINE void write_elements(const float* values, void* data, int64_t begin, int64_t count) {
  encode_all<T>(values, count, static_cast<typename T::Storage*>(data) + begin);
}

// Reads and writes T or float32, as the dtype of a modulation or parameter is.
template <class T>
INLINE void read(const void* data, Type type, int64_t begin, int64_t count, float* values) {
  if (type == Type::float32) return read_elements<Float32>(data, begin, count, values);
  read_elements<T>(data, begin, count, values);
}

template <class T>
INLINE void write(const float* values, void* data, Type type, int64_t begin, int64_t count) {
  if (type == Type::float32) return write_elements<Float32>(values, data, begin, count);
  write_elements<T>(values, data, begin, count);
}

template <class T>
INLINE void read(const Parameter& parameter, int64_t begin, int64_t count, float otherwise, float* values) {
  if (parameter.data == nullptr) {
    std::fill_n(values, count, otherwise);
  } else {
    read<T>(parameter.data, parameter.type, begin, count, values);
  }
}

// Reads zeros where there is no modulation.
template <class T>
INLINE void read(const Modulation& modulation, int64_t span, int64_t begin, int64_t count, float* values) {
  if (modulation.rows.data == nullptr) {
    std::fill_n(values, count, 0.0f);
  } else {
    read<T>(modulation.rows.data, modulation.type, modulation.rows.offset(span) + begin, count, values);
  }
}

// Requests a block of a row that is read later, so that it comes from memory while the CPU computes. Does nothing if
// `row` is null.
template <class T>
INLINE void prefetch(const typename T::Storage* row, int64_t start, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(typename T::Storage);
  if (row == nullptr) return;
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(row + start + i);
}

// Returns a row, or null if there are no such rows, or not this one.
template <class T>
INLINE const typename T::Storage* row_or_null(const Rows& rows, int64_t row, int64_t end) {
  return rows.data == nullptr || row >= end ? nullptr : at<T>(rows, row);
}

// Finds the spans of consecutive rows without a division for each.
class Spans {
 public:
  explicit INLINE Spans(int64_t span) : span_(span) {}

  // Returns whether the row is in another span than the preceding one.
  INLINE bool enter(int64_t row) {
    if (row < end_) return false;
    current_ = row / span_;
    end_ = (current_ + 1) * span_;
    return true;
  }
  INLINE int64_t current() const { return current_; }

 private:
  int64_t span_, current_ = 0, end_ = 0;
};

// Returns the sum of term(i) for each i below `count`, at most kChunk. A CPU adds four independent sums in the time of
// one.
template <class Term>
INLINE float sum_of(int64_t count, Term term) {
  const int64_t part = count / 4;
  float first = 0.0f, second = 0.0f, third = 0.0f, fourth = 0.0f;
#pragma omp simd reduction(+ : first, second, third, fourth)
  for (int64_t i = 0; i < part; ++i) {
    first += term(i);
    second += term(i + part);
    third += term(i + 2 * part);
    fourth += term(i + 3 * part);
  }
  for (int64_t i = 4 * part; i < count; ++i) first += term(i);
  return (first + second) + (third + fourth);
}

INLINE float mean_of(const float* values, int64_t count) {
  return sum_of(count, [=](int64_t i) ALWAYS_INLINE { return values[i]; }) / static_cast<float>(count);
}

INLINE float squares_of(const float* values, float mean, int64_t count) {
  return sum_of(count, [=](int64_t i) ALWAYS_INLINE { return (values[i] - mean) * (values[i] - mean); });
}

// Sums over a chunk: of squares of x - mean, of slopes, and of slopes * (x - mean).
struct Products {
  float squares, slopes, products;
};

INLINE Products products_of(const float* x, const float* slope, float mean, int64_t count) {
  const int64_t part = count / 2;
  float squares = 0.0f, slopes = 0.0f, products = 0.0f;
  float more_squares = 0.0f, more_slopes = 0.0f, more_products = 0.0f;
#pragma omp simd reduction(+ : squares, slopes, products, more_squares, more_slopes, more_products)
  for (int64_t i = 0; i < part; ++i) {
    const float value = x[i] - mean, other = x[i + part] - mean;
    squares += value * value;
    slopes += slope[i];
    products += slope[i] * value;
    more_squares += other * other;
    more_slopes += slope[i + part];
    more_products += slope[i + part] * other;
  }
  if (count % 2 != 0) {
    const float value = x[count - 1] - mean;
    squares += value * value;
    slopes += slope[count - 1];
    products += slope[count - 1] * value;
  }
  return {squares + more_squares, slopes + more_slopes, products + more_products};
}

// The mean of a row and the sum of squared deviations from it, combined from those of its chunks.
class Moments {
 public:
  // Adds a chunk. Its mean is 0 when the row is not centered.
  INLINE void add(int64_t count, float mean, float squares) {
    const double delta = static_cast<double>(mean) - mean_, both = static_cast<double>(count_ + count);
    mean_ += delta * static_cast<double>(count) / both;
    squares_ += squares + delta * delta * static_cast<double>(count_) * static_cast<double>(count) / both;
    count_ += count;
  }

  INLINE double mean() const { return mean_; }
  INLINE float reciprocal_norm(float eps) const {
    return static_cast<float>(1.0 / std::sqrt(squares_ / static_cast<double>(count_) + static_cast<double>(eps)));
  }

 private:
  int64_t count_ = 0;
  double mean_ = 0.0, squares_ = 0.0;
};

INLINE void add(const float* values, int64_t count, float* __restrict__ sums) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sums[i] += values[i];
}

INLINE void multiply(const float* first, const float* second, int64_t count, float* products) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) products[i] = first[i] * second[i];
}

INLINE void add_products(const float* first, const float* second, int64_t count, float* __restrict__ sums) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sums[i] += first[i] * second[i];
}

// Calls `work` with the beginning and the length of each chunk of a row.
template <class Work>
INLINE void for_chunks(int64_t hidden, Work work) {
  for (int64_t start = 0; start < hidden; start += kChunk) work(start, std::min(hidden - start, kChunk));
}

}  // namespace
}  // namespace adaln
