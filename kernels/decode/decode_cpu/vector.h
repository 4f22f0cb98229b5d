// A vector of kLanes floats. A file that includes this defines kLanes, and selects the instruction set by a pragma: g++
// splits vectors of more bytes than the target has where the function is written, before it is inlined.
//
// Loops over arrays of vectors are unrolled, or the compiler keeps the arrays in memory.

struct Vector {
  typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
  typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
  typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
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
    if constexpr (std::is_same_v<T, kit::Float32>) {
      return load(from);
    } else if constexpr (std::is_same_v<T, kit::BFloat16>) {
      Halves halves;
      std::memcpy(&halves, from, sizeof(halves));
      const Words words = __builtin_convertvector(halves, Words) << 16;
      Vector vector;
      std::memcpy(&vector, &words, sizeof(vector));
      return vector;
    } else {
      float values[kLanes];
      kit::decode_all<T>(from, kLanes, values);
      return load(values);
    }
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
