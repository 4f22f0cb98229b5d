// Rotation on the CPU: a range of tokens. The caller splits the tokens over threads.
#pragma once

#include "rope3d/problem.h"

namespace rope3d {

// Rotates the tokens `begin` to `end`, counted over all sequences of the batch.
void rotate(const Rotation& problem, int64_t begin, int64_t end);

}  // namespace rope3d
