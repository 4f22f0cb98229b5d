// ${computed} forward and backward on the CPU: loops without branches, which the compiler vectorizes.
//
// The caller splits the elements among threads; these functions compute one range in the calling thread. The loops are
// compiled twice, for any CPU and for AVX2, and selected at run time.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "${python_name}_cpu/${operator}.h"

#define INLINE inline __attribute__((always_inline))

namespace op {
namespace {

// How elements of a dtype are stored, and whether an element passes: if it is greater than 0 or NaN.
struct Float32 {
  using Storage = float;
  static INLINE bool passes(float value) { return !(value <= 0.0f); }
};

// 16-bit dtypes are compared by their bits, which takes half the instructions of a conversion to float. As integers,
// elements greater than 0 are positive, and a NaN with a sign is above -infinity. An operation with arithmetic has to
// convert; a project of `kernel-builder init --kit` shows how.
template <uint16_t kMinusInfinity>
struct Bits {
  using Storage = uint16_t;
  static INLINE bool passes(uint16_t bits) { return (static_cast<int16_t>(bits) > 0) | (bits > kMinusInfinity); }
};

Float32 access(const float*);
Bits<0xfc00> access(const torch::headeronly::Half*);
Bits<0xff80> access(const torch::headeronly::BFloat16*);

// `passing` is y, in the forward pass x; `from` is grad, in the forward pass x.
template <typename Element>
INLINE void select(const void* passing, const void* from, void* result, int64_t begin, int64_t end) {
  using Storage = typename Element::Storage;
  const auto *test = static_cast<const Storage*>(passing), *source = static_cast<const Storage*>(from);
  auto* __restrict__ out = static_cast<Storage*>(result);
  for (int64_t i = begin; i < end; ++i) {
    const Storage value = source[i];  // read in any case: a conditional read is a branch
    out[i] = Element::passes(test[i]) ? value : Storage(0);
  }
}

#if defined(__x86_64__)
template <typename Element>
__attribute__((target("avx2"))) void select_avx2(const void* passing, const void* from, void* result, int64_t begin,
                                                 int64_t end) {
  select<Element>(passing, from, result, begin, end);
}
#endif

template <typename T>
void run(const T* passing, const T* from, T* result, int64_t begin, int64_t end) {
  using Element = decltype(access(passing));
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return select_avx2<Element>(passing, from, result, begin, end);
#endif
  select<Element>(passing, from, result, begin, end);
}

}  // namespace

template <typename T>
void forward(const T* x, T* y, int64_t begin, int64_t end) {
  run(x, x, y, begin, end);
}

template <typename T>
void backward(const T* grad, const T* y, T* grad_x, int64_t begin, int64_t end) {
  run(y, grad, grad_x, begin, end);
}

#define INSTANTIATE(T)                                   \
  template void forward(const T*, T*, int64_t, int64_t); \
  template void backward(const T*, const T*, T*, int64_t, int64_t);
INSTANTIATE(float)
INSTANTIATE(torch::headeronly::Half)
INSTANTIATE(torch::headeronly::BFloat16)

}  // namespace op
