// SiLU on the CPU: elements `begin` to `end`. The caller splits the elements over threads.
#pragma once

#include "silu/silu.h"

namespace silu {

void run(const Problem& problem, int64_t begin, int64_t end);

}  // namespace silu
