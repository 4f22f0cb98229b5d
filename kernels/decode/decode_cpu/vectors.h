// Vectors of floats on the CPU, of the length that an instruction set has.
//
// Reads:    nothing of its own; the callers pass the addresses.
// Must not: depend on what a kernel computes.
//
// g++ and clang turn arithmetic of these types into that of the instruction set for which a function is compiled. Sums
// that must stay in registers are written so, because loops over arrays of sums keep them in memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "kit/cpu.h"

namespace decode_step {

template <int kLanes>
struct Vector {
  typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
  Lanes lanes;

  static INLINE Vector zeros() { return {Lanes{}}; }

  static INLINE Vector load(const float* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
  }

  // Converts kLanes elements of T.
  template <class T>
  static INLINE Vector decode(const typename T::Storage* from) {
    float values[kLanes];
    kit::decode_all<T>(from, kLanes, values);
    return load(values);
  }

  INLINE void store(float* to) const { std::memcpy(to, &lanes, sizeof(lanes)); }

  INLINE void add_product(const Vector& a, const Vector& b) { lanes += a.lanes * b.lanes; }
  INLINE void add_product(float a, const Vector& b) { lanes += a * b.lanes; }

  INLINE float sum() const {
    float values[kLanes], total = 0.0f;
    store(values);
    for (const float value : values) total += value;
    return total;
  }
};

}  // namespace decode_step
