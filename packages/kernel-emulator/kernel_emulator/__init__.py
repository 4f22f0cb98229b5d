"""A C++ library that runs CUDA and HIP device code on a CPU, compiled by g++."""

from pathlib import Path

# The headers and sources: `-I DIRECTORY`, and `DIRECTORY/*.cpp` to compile with -DEMULATED_WARP_SIZE=32 or 64.
DIRECTORY = Path(__file__).with_name("sources")

# The options for device code. The library defines the functions that these sanitizers call, so compile its own sources
# and link without them. -ftrivial-auto-var-init=pattern would find uninitialized variables, but with it g++ 12 clears
# bytes of structures that functions return.
FLAGS = ("-O1", "-fsanitize=bounds,alignment,integer-divide-by-zero,thread")
