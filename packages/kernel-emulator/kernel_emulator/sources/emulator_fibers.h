// The threads of a block, as fibers: declarations for the emulator's own sources. EMULATED_WARP_SIZE is 32 or 64.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <string>
#include <vector>

#include "emulator.h"

namespace emulator {

#if defined(USE_ROCM)
constexpr size_t kSharedBytes = 64 << 10, kStaticBytes = 64 << 10;
#else
constexpr size_t kSharedBytes = 227 << 10, kStaticBytes = 48 << 10;
#endif
constexpr size_t kArena = 256 << 10;
constexpr unsigned kMostThreads = 1024;

enum class State { ready, in_barrier, in_collective, ended };

struct Fiber {
  ucontext_t context;
  jmp_buf resume;
  bool started = false;
  uint3 thread;
  unsigned number;
  State state;
  // The awaited operation; of a barrier, `value` is also the result.
  Site site;
  uint64_t mask, value;
};

extern std::vector<std::unique_ptr<Fiber>> fibers;
extern Fiber* self;  // null outside of a kernel
extern char* arena;  // shared memory
// They count barriers of the block and collectives of each warp.
extern uint64_t phase, warp_phases[kMostThreads / 32];
extern int last_error;

struct Warp {
  unsigned first, count;
  Fiber& lane(unsigned number) const { return *fibers[first + number]; }
};

// Lets the running fiber wait until something sets it to ready.
void wait(State state);

// Stops the launch, as `fail` does, from outside of a fiber. `self` is the thread to name.
[[noreturn]] void stop(const std::string& message);

// The words of messages. `shown` is the path in the project of a file that is compiled in a directory of the builder's.
const char* shown(const char* file);
std::string text(uint3 at);
std::string text(const Site& site);
std::string text(const Fiber& fiber);

bool same_line(const Fiber& fiber, const Fiber& other);

}  // namespace emulator
