// One pass over the other points for each point: no distance but the least is written.
#include "cpu/nearest.h"

#include <algorithm>
#include <limits>

void nearest(const float* x, const float* y, int64_t others, float* distance, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    float least = std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < others; ++j) {
      const float a = x[3 * i] - y[3 * j], b = x[3 * i + 1] - y[3 * j + 1], c = x[3 * i + 2] - y[3 * j + 2];
      least = std::min(least, a * a + b * b + c * c);
    }
    distance[i] = least;
  }
}
