#pragma once
#include <cstdint>

// out[i] = factor * in[i], for `count` floats.
void scale(float* out, const float* in, float factor, int64_t count, void* stream);
