// Evenly strided rows, for the fast paths.
//
// Reads:    nothing.
// Must not: depend on the operation of a kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "adaln/problem.h"
#include "kit/division.cuh"
#include "kit/elements.cuh"

namespace adaln {

using kit::Average, kit::FastDivisor, kit::fast_divisor;

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
