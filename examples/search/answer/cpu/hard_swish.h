// Hard swish of a range of elements.
#pragma once

#include <cstdint>

// y[i] = x[i] * min(max(x[i] + 3, 0), 6) / 6 for begin <= i < end.
void hard_swish(const float* x, float* y, int64_t begin, int64_t end);
