// Runs the blocks of a launch one after the other, and the threads of a block as fibers on the thread that launches.
//
// A fiber runs until it waits for others. Between two barriers, threads run in ascending order in one block and in
// descending order in the next, so that results which depend on the order are wrong in one of them.
#undef _FORTIFY_SOURCE  // its longjmp refuses to leave a fiber

#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>

#include <mutex>
#include <stdexcept>

#include "emulator_fibers.h"

const int warpSize = EMULATED_WARP_SIZE;

namespace emulator {

Current current;
std::vector<std::unique_ptr<Fiber>> fibers;
Fiber* self;
char* arena;
uint64_t phase, warp_phases[kMostThreads / 32];
int last_error;

namespace {

constexpr size_t kStackBytes = 256 << 10, kPage = 4096;
constexpr int kPoison = 0xff;  // NaN in all types of floating point

struct Variable {
  const void* key;
  char* at;
};

// The running launch, and the state that launches share.
std::recursive_mutex running;
unsigned threads;  // of a block
jmp_buf scheduler;
void (*kernel_call)(void*);
void* kernel_context;
const char* kernel_name;
char *static_end, *dynamic_begin;
std::vector<Variable> variables;
std::string failure;
unsigned long order;  // odd: threads run in descending order

// Collective operations: the waits of a warp's lanes, and the lanes that take part.

// The lanes that take part in the operation of a lane: those of its mask that have not ended, or, without a mask, those
// that wait at the same line.
uint64_t group_of(const Warp& warp, const Fiber& fiber) {
  uint64_t group = 0;
  for (unsigned i = 0; i < warp.count; ++i) {
    const Fiber& other = warp.lane(i);
    const bool beside = other.state == State::in_collective && other.mask == 0 && same_line(other, fiber);
    if (fiber.mask == 0 ? beside : (fiber.mask >> i & 1) != 0 && other.state != State::ended) group |= 1ull << i;
  }
  return group;
}

Lanes lanes;

void complete(const Warp& warp, uint64_t group) {
  ++warp_phases[warp.first / EMULATED_WARP_SIZE];
  lanes.group = group;
  for (unsigned i = 0; i < warp.count; ++i) {
    if ((group >> i & 1) == 0) continue;
    lanes.values[i] = warp.lane(i).value;
    warp.lane(i).state = State::ready;
  }
}

bool waits_for_same(const Fiber& fiber, const Fiber& other) {
  return other.state == State::in_collective && other.mask == fiber.mask &&
         strcmp(other.site.intrinsic, fiber.site.intrinsic) == 0;
}

// Completes one collective operation of a warp of which no lane is ready. Returns whether there was one to complete.
bool complete_one(const Warp& warp) {
  const Fiber* without_mask = nullptr;
  for (unsigned i = 0; i < warp.count; ++i) {
    const Fiber& fiber = warp.lane(i);
    if (fiber.state != State::in_collective) continue;
    if (fiber.mask == 0) {
      // Lanes that diverge meet again further down.
      if (!without_mask || fiber.site.line < without_mask->site.line) without_mask = &fiber;
      continue;
    }
    const uint64_t group = group_of(warp, fiber);
    bool complete_group = true;
    for (unsigned j = 0; j < warp.count; ++j) {
      if ((group >> j & 1) != 0) complete_group = complete_group && waits_for_same(fiber, warp.lane(j));
    }
    if (complete_group) return complete(warp, group), true;
  }
  if (without_mask) complete(warp, group_of(warp, *without_mask));
  return without_mask != nullptr;
}

char* guarded(size_t bytes) {
  auto* const at = static_cast<char*>(
      mmap(nullptr, bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (at == MAP_FAILED || mprotect(at + kPage, bytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  return at + kPage;
}

void body() {
  for (;;) {
    kernel_call(kernel_context);
    wait(State::ended);
  }
}

// Runs a fiber until it waits or ends.
void proceed(Fiber& fiber, int lane) {
  self = &fiber;
  current.thread = fiber.thread;
  current.lane = lane;
  if (_setjmp(scheduler) == 0) {
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    setcontext(&fiber.context);
  }
  if (!failure.empty()) stop(std::exchange(failure, {}));
  self = nullptr;
}

// Names a thread that waits in vain, and the thread that it waits for.
[[noreturn]] void stop_deadlock(const std::vector<Warp>& warps) {
  for (const Warp& warp : warps) {
    for (unsigned i = 0; i < warp.count * warp.count; ++i) {
      const Fiber &fiber = warp.lane(i / warp.count), &other = warp.lane(i % warp.count);
      if (fiber.state != State::in_collective || (fiber.mask >> i % warp.count & 1) == 0) continue;
      if (other.state == State::ended || waits_for_same(fiber, other)) continue;
      self = &warp.lane(i / warp.count);
      stop("waits at " + text(fiber.site) + " for lane " + std::to_string(i % warp.count) + " of its mask, but " +
           text(other) + (other.state == State::in_collective ? " with another mask or operation" : ""));
    }
  }
  const auto waits = [](const auto& fiber) { return fiber->state == State::in_barrier; };
  self = std::find_if(fibers.begin(), fibers.begin() + threads, waits)->get();
  const auto reaches = [&](const auto& fiber) { return waits(fiber) && same_line(*fiber, *self); };
  const Fiber& other = **std::find_if_not(fibers.begin(), fibers.begin() + threads, reaches);
  stop("waits at " + text(self->site) + ", which not all threads of the block reach: " + text(other));
}

void run_block(const std::vector<Warp>& warps, size_t shared_bytes) {
  variables.clear();
  static_end = arena;
  dynamic_begin = arena + kArena - (shared_bytes + 15) / 16 * 16;
  memset(dynamic_begin, kPoison, static_cast<size_t>(arena + kArena - dynamic_begin));
  for (unsigned i = 0; i < threads; ++i) fibers[i]->state = State::ready;
  ++phase;
  const bool descending = order++ % 2 != 0;
  const auto nth = [&](unsigned i, size_t count) { return descending ? static_cast<unsigned>(count) - 1 - i : i; };
  for (;;) {
    for (unsigned w = 0; w < warps.size(); ++w) {
      const Warp& warp = warps[nth(w, warps.size())];
      do {
        for (unsigned i = 0; i < warp.count; ++i) {
          const unsigned lane = nth(i, warp.count);
          if (warp.lane(lane).state == State::ready) proceed(warp.lane(lane), static_cast<int>(lane));
        }
      } while (complete_one(warp));
    }
    const Fiber& first = *fibers[0];
    unsigned ended = 0, waiting = 0;
    uint64_t agree = 0;
    for (unsigned i = 0; i < threads; ++i) {
      const Fiber& fiber = *fibers[i];
      ended += fiber.state == State::ended;
      if (fiber.state == State::in_barrier && same_line(fiber, first)) {
        ++waiting;
        agree += fiber.value;
      }
    }
    if (ended == threads) return;
    if (waiting != threads) stop_deadlock(warps);
    for (unsigned i = 0; i < threads; ++i) fibers[i]->value = agree, fibers[i]->state = State::ready;
    ++phase;
  }
}

void handle_fault(int signal, siginfo_t* information, void*) {
  if (!self) {  // not of a kernel
    ::signal(signal, SIG_DFL);
    return;
  }
  const auto* const at = static_cast<const char*>(information->si_addr);
  if (arena - kPage <= at && at < arena + kArena + kPage) {
    const char* const begin = dynamic_begin < arena + kArena ? dynamic_begin : arena;
    fail("accesses shared memory out of bounds: byte %td of %td", at - begin, arena + kArena - begin);
  }
  fail("accesses memory that does not exist at address %p", information->si_addr);
}

// While it lives, faults in kernels are errors.
class FaultHandlers {
 public:
  FaultHandlers() {
    struct sigaction action = {};
    action.sa_sigaction = handle_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &action, &before_[i]);
  }
  ~FaultHandlers() {
    for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS};
  struct sigaction before_[2];
};

}  // namespace

std::string text(uint3 at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

const char* shown(const char* file) { return strncmp(file, "src/", 4) == 0 ? file + 4 : file; }

std::string text(const Site& site) {
  return std::string(site.intrinsic) + " (" + shown(site.file) + ":" + std::to_string(site.line) + ")";
}

std::string text(const Fiber& fiber) {
  const std::string name = "thread " + text(fiber.thread);
  if (fiber.state == State::ended) return name + " has ended";
  return name + " waits at " + text(fiber.site);
}

[[noreturn]] void stop(const std::string& message) {
  const Fiber* const fiber = self;
  self = nullptr;
  fibers.clear();  // their stacks are in use; new ones are made
  throw std::runtime_error(std::string(kernel_name ? kernel_name : "a kernel") + ", block " + text(current.block) +
                           (fiber ? ", thread " + text(fiber->thread) : "") + ": " + message);
}

void wait(State state) {
  self->state = state;
  if (_setjmp(self->resume) == 0) _longjmp(scheduler, 1);
}

bool same_line(const Fiber& fiber, const Fiber& other) {
  return fiber.site.line == other.site.line &&
         (fiber.site.file == other.site.file || strcmp(fiber.site.file, other.site.file) == 0);
}

void fail(const char* format, ...) {
  char message[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  if (!self) throw std::runtime_error(message);
  failure = message;
  _longjmp(scheduler, 1);
}

void enter_kernel(const char* name) { kernel_name = name; }

int barrier(Site site, bool predicate) {
  self->site = site;
  self->value = predicate;
  wait(State::in_barrier);
  return static_cast<int>(self->value);
}

void* static_shared(const void* key, size_t bytes, size_t alignment) {
  for (const Variable& variable : variables) {
    if (variable.key == key) return variable.at;
  }
  const size_t offset = (static_cast<size_t>(static_end - arena) + alignment - 1) / alignment * alignment;
  if (offset + bytes > kStaticBytes || arena + offset + bytes > dynamic_begin) {
    fail("declares %zu bytes of shared memory; a block has %zu", offset + bytes, kStaticBytes);
  }
  static_end = arena + offset + bytes;
  memset(arena + offset, kPoison, bytes);
  variables.push_back({key, arena + offset});
  return arena + offset;
}

void* dynamic_shared() { return dynamic_begin; }

int Launch::run(void (*call)(void*), void* context) const {
  const std::lock_guard lock(running);
  threads = block.x * block.y * block.z;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  if (threads == 0 || threads > kMostThreads || blocks == 0 || shared_bytes > kSharedBytes) {
    return last_error = cudaErrorInvalidConfiguration;
  }
  if (!arena) arena = guarded(kArena);
  const FaultHandlers handlers;
  kernel_call = call;
  kernel_context = context;
  kernel_name = nullptr;
  current.block_dim = block;
  current.grid_dim = grid;
  static std::vector<char*> stacks;
  while (stacks.size() < threads) stacks.push_back(guarded(kStackBytes));
  while (fibers.size() < threads) {
    auto fiber = std::make_unique<Fiber>();
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stacks[fibers.size()];
    fiber->context.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber->context, body, 0);
    fibers.push_back(std::move(fiber));
  }
  for (unsigned i = 0; i < threads; ++i) {
    fibers[i]->number = i;
    fibers[i]->thread = {i % block.x, i / block.x % block.y, i / block.x / block.y};
  }
  std::vector<Warp> warps;
  for (unsigned first = 0; first < threads; first += EMULATED_WARP_SIZE) {
    warps.push_back({first, std::min<unsigned>(threads - first, EMULATED_WARP_SIZE)});
  }
  for (uint64_t b = 0; b < blocks; ++b) {
    current.block = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                     static_cast<unsigned>(b / grid.x / grid.y)};
    run_block(warps, shared_bytes);
  }
  return cudaSuccess;
}

const Lanes& exchange(Site site, uint64_t mask, uint64_t value) {
  if (mask != 0 && (mask >> current.lane & 1) == 0) {
    fail("calls %s with the mask %#llx, which does not have its own lane %d", text(site).c_str(),
         static_cast<unsigned long long>(mask), current.lane);
  }
  self->site = site;
  self->mask = mask;
  self->value = value;
  wait(State::in_collective);
  return lanes;
}

uint64_t value_of(const Lanes& lanes, Site site, int lane) {
  if (lane < 0 || lane >= 64 || (lanes.group >> lane & 1) == 0) {
    const unsigned other = self->number - static_cast<unsigned>(current.lane - lane);
    const dim3 block = current.block_dim;
    fail("%s reads lane %d, which does not take part: %s", text(site).c_str(), lane,
         other < block.x * block.y * block.z ? text(*fibers[other]).c_str() : "the block has no such thread");
  }
  return lanes.values[lane];
}

}  // namespace emulator
