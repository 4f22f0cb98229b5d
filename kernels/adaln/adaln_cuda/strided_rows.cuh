// The addresses of a problem's rows: evenly strided rows for the fast paths, and launches over parts of all rows for
// the general kernels.
//
// Reads:    nothing.
// Must not: depend on the operation of a kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "adaln/problem.h"
#include "adaln_cuda/division.cuh"
#include "kit/elements.cuh"

namespace adaln {

// Rows that are evenly strided within a span, of spans that are evenly strided. Strides are in elements.
struct StridedRows {
  const void* data = nullptr;
  int64_t span_stride = 0, row_stride = 0;

  template <typename T>
  __device__ __forceinline__ const T* at(uint32_t span, uint32_t row = 0) const {
    return static_cast<const T*>(data) + (span * span_stride + row * row_stride);
  }
};

// Returns false when the rows are not evenly strided.
inline bool as_strided(const Rows& rows, int64_t span, StridedRows* strided) {
  strided->data = rows.data;
  if (rows.dims <= 1) {
    strided->row_stride = rows.strides[0];
    strided->span_stride = span * rows.strides[0];
    return true;
  }
  strided->row_stride = rows.strides[1];
  strided->span_stride = rows.strides[0];
  return rows.dims == 2 && rows.sizes[1] == span;
}

inline bool as_strided(const Modulation& modulation, StridedRows* strided) {
  return as_strided(modulation.rows, 1, strided);
}

// The first row of a launch over fewer than 2^31 rows, and its span. The launch covers whole spans or part of one.
struct FirstRow {
  int64_t row, span;
  Divider spans;  // of a row of the launch
};

// Calls `launch` with one part of the rows after another.
template <typename Launch>
cudaError_t launch_in_parts(int64_t rows, int64_t span, Launch&& launch) {
  const int64_t most = INT32_MAX, divisor = std::min(span, most);
  FirstRow first{0, 0, Divider(static_cast<uint32_t>(divisor))};
  while (first.row < rows) {
    first.span = first.row / span;
    const int64_t whole = divisor < most ? most / span * span : (first.span + 1) * span - first.row;
    const int64_t part = std::min({rows - first.row, whole, most});
    const cudaError_t error = launch(static_cast<unsigned>(part), first);
    if (error != cudaSuccess) return error;
    first.row += part;
  }
  return cudaSuccess;
}

inline int64_t bytes_of(Type type) { return type == Type::float32 ? 4 : 2; }

using kit::aligned;
inline bool aligned(const Modulation& modulation) { return kit::aligned(modulation.rows, bytes_of(modulation.type)); }

// The dtype that a problem's modulations and parameters share.
class CommonType {
 public:
  explicit CommonType(Type rows) : type_(rows) {}  // the rows' dtype, until one is added

  void add(const void* data, Type type) {
    if (data == nullptr) return;
    unique_ = unique_ && (!added_ || type == type_);
    type_ = type;
    added_ = true;
  }
  void add(const Modulation& modulation) { add(modulation.rows.data, modulation.type); }
  void add(const Parameter& parameter) { add(parameter.data, parameter.type); }

  bool unique() const { return unique_; }
  Type type() const { return type_; }

 private:
  Type type_;
  bool added_ = false, unique_ = true;
};

}  // namespace adaln
