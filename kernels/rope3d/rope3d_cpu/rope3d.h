// Rotation on the CPU: a function over a range of tokens. Who calls it decides on the threads.
#pragma once

#include "rope3d/problem.h"

namespace rope3d {

// The tokens from `begin` to `end`, counted over all sequences of the batch.
void rotate(const Rotation& problem, int64_t begin, int64_t end);

}  // namespace rope3d
