// `${operator}` on the CPU: elements `begin` to `end`. The caller splits the elements over threads.
#pragma once

#include "${operator}/${operator}.h"

namespace op {

void run(const Problem& problem, int64_t begin, int64_t end);

}  // namespace op
