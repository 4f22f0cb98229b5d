// Cross entropy and its gradient on the CPU.
//
// Reads:    each logit three times, each target once.
// Writes:   gradients in place of the logits, and a loss for each row.
// Must not: start threads, allocate, or keep state between calls.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kit/cpu.h"
#include "loss/problem.h"

namespace loss {
namespace {

using namespace kit;

INLINE float capped(float logit, float softcap) {
  return softcap > 0.0f ? softcap * std::tanh(logit / softcap) : logit;
}

template <class T>
INLINE void run_row(const CrossEntropy& problem, int64_t row) {
  const int64_t count = problem.vocabulary, target = problem.targets[row];
  auto* const logits = static_cast<typename T::Storage*>(problem.logits) + row * count;
  if (target == problem.ignored) {
    problem.losses[row] = 0.0f;
    std::fill_n(logits, count, T::encode(0.0f));
    return;
  }
  const auto logit = [=](int64_t i) ALWAYS_INLINE { return capped(T::decode(logits[i]), problem.softcap); };
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, logit(i));
  const double exponentials = sum_of(count, [=](int64_t i) ALWAYS_INLINE { return std::exp(logit(i) - largest); });
  const float lse = largest + static_cast<float>(std::log(exponentials));
  const bool is_class = target >= 0 && target < count;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float value = is_class ? (1.0f - problem.smoothing) * (lse - logit(target)) : nan;
  if (problem.smoothing > 0.0f) {
    const double mean = sum_of(count, logit) / static_cast<double>(count);
    value += problem.smoothing * (lse - static_cast<float>(mean));
  }
  problem.losses[row] = value + problem.z_loss * lse * lse;
  const float scale = is_class ? *problem.scale : nan;
  const float of_lse = 1.0f + 2.0f * problem.z_loss * lse, smooth = problem.smoothing / static_cast<float>(count);
  for (int64_t i = 0; i < count; ++i) {
    const float s = logit(i);
    float grad = of_lse * std::exp(s - lse) - smooth;
    if (i == target) grad -= 1.0f - problem.smoothing;
    if (problem.softcap > 0.0f) grad *= 1.0f - (s / problem.softcap) * (s / problem.softcap);
    logits[i] = T::encode(scale * grad);
  }
}

}  // namespace

void run(const CrossEntropy& problem, int64_t begin, int64_t end) {
  run_on_cpu(problem.type, [&](auto type) ALWAYS_INLINE {
    for (int64_t row = begin; row < end; ++row) run_row<decltype(type)>(problem, row);
  });
}

}  // namespace loss
