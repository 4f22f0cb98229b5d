// The square of each point's distance to the nearest of other points.
#pragma once

#include <cstdint>

// distance[i] = min over j of |x[i] - y[j]|^2 for begin <= i < end; points have three coordinates each.
void nearest(const float* x, const float* y, int64_t others, float* distance, int64_t begin, int64_t end);
