#pragma once
#include <cstdint>

// Parts of the C++ library that are newer than GLIBCXX_3.4.24. Returns 0, or the line of the first wrong result.
int64_t library();

// Exceptions that cross threads. Returns 0, or the line of the first wrong result.
int64_t exceptions();

// Runs a loop with OpenMP on as many threads as asked for. Returns how many it ran on, or minus the line of a wrong
// result.
int64_t threads(int64_t count);
