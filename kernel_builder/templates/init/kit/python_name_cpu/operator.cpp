// SiLU on the CPU, forward and backward.
//
// Reads:    x, for the backward pass also grad; each element once.
// Writes:   `out`.
// Must not: start threads, allocate, or keep state between calls.
#include "${python_name}_cpu/${operator}.h"
#include "kit/cpu.h"

namespace op {
namespace {

template <class T, bool kBackward>
void run_range(const Problem& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const auto* x = static_cast<const Storage*>(problem.x);
  const auto* grad = static_cast<const Storage*>(problem.grad);
  auto* out = static_cast<Storage*>(problem.out);
  for (int64_t i = begin; i < end; ++i) {
    if constexpr (kBackward) {
      out[i] = T::encode(T::decode(grad[i]) * derivative(T::decode(x[i])));
    } else {
      out[i] = T::encode(value(T::decode(x[i])));
    }
  }
}

template <class T>
void run_pass(const Problem& problem, int64_t begin, int64_t end) {
  return problem.grad ? run_range<T, true>(problem, begin, end) : run_range<T, false>(problem, begin, end);
}

}  // namespace

void run(const Problem& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case kit::Type::float32:
      return run_pass<kit::Float32>(problem, begin, end);
    case kit::Type::float16:
      return run_pass<kit::Float16>(problem, begin, end);
    case kit::Type::bfloat16:
      return run_pass<kit::BFloat16>(problem, begin, end);
  }
}

}  // namespace op
