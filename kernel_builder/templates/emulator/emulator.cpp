// Runs the blocks of a launch one after the other, and the threads of a block as fibers on the thread that launches.
//
// A fiber runs until it waits for others. Between two barriers, threads run in ascending order in one block and in
// descending order in the next, so that results which depend on the order are wrong in one of them.
#undef _FORTIFY_SOURCE  // its longjmp refuses to leave a fiber

#include "emulator.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

const int warpSize = EMULATED_WARP_SIZE;

namespace emulator {

Current current;

namespace {

constexpr size_t kStackBytes = 256 << 10, kPage = 4096;
constexpr unsigned kMostThreads = 1024;
#if defined(USE_ROCM)
constexpr size_t kSharedBytes = 64 << 10, kStaticBytes = 64 << 10;
#else
constexpr size_t kSharedBytes = 227 << 10, kStaticBytes = 48 << 10;
#endif
constexpr size_t kArena = 256 << 10;
constexpr int kPoison = 0xff;  // NaN in all types of floating point

enum class State { ready, in_barrier, in_collective, ended };

struct Fiber {
  ucontext_t context;
  jmp_buf resume;
  char* stack = nullptr;
  bool started = false;
  uint3 thread;
  unsigned number;
  State state;
  // What it waits for, and the result.
  Site site;
  Collective which;
  uint64_t mask, value;
  int source;
};

struct Variable {
  const void* key;
  char* at;
};

// The last access of each kind to a byte of shared memory: the thread, and what it had synchronized with.
struct Access {
  uint64_t phase = 0, warp_phase = 0;
  unsigned thread = 0;
};
struct Accesses {
  Access read, write;
};

// The launch that runs, and what is kept from one to the next.
std::recursive_mutex running;
std::vector<std::unique_ptr<Fiber>> fibers;
std::map<const void*, Invoke> invokes;
unsigned threads;  // of a block
Fiber* self;       // null outside of a kernel
jmp_buf scheduler;
void (*kernel_call)(void*);
void* kernel_context;
const char* kernel_name;
char *arena, *static_end, *dynamic_begin;
std::vector<Variable> variables;
std::vector<Accesses> accesses(kArena);
uint64_t phase, warp_phases[kMostThreads / 32];  // they count barriers of the block and collectives of each warp
std::string failure;
unsigned long order;  // odd: threads run in descending order
int last_error;

char* guarded(size_t bytes) {
  auto* const at = static_cast<char*>(
      mmap(nullptr, bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (at == MAP_FAILED || mprotect(at + kPage, bytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  return at + kPage;
}

std::string text(uint3 at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

// The path in the project of a file that is compiled in a directory of the builder's.
const char* shown(const char* file) { return strncmp(file, "src/", 4) == 0 ? file + 4 : file; }

std::string text(const Site& site) {
  return std::string(site.intrinsic) + " (" + shown(site.file) + ":" + std::to_string(site.line) + ")";
}

std::string text(const Fiber& fiber) {
  const std::string name = "thread " + text(fiber.thread);
  if (fiber.state == State::ended) return name + " has ended";
  return name + " waits at " + text(fiber.site);
}

[[noreturn]] void stop(const std::string& what) {
  const Fiber* const fiber = self;
  self = nullptr;
  fibers.clear();  // their stacks are in use; new ones are made
  throw std::runtime_error(std::string(kernel_name ? kernel_name : "a kernel") + ", block " + text(current.block) +
                           (fiber ? ", thread " + text(fiber->thread) : "") + ": " + what);
}

void wait(State state) {
  self->state = state;
  if (_setjmp(self->resume) == 0) _longjmp(scheduler, 1);
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

// The threads of a warp.
struct Warp {
  unsigned first, count;
  Fiber& lane(unsigned number) const { return *fibers[first + number]; }
  bool has(unsigned number) const { return number < count; }
};

bool same_line(const Fiber& fiber, const Fiber& other) {
  return fiber.site.line == other.site.line && strcmp(fiber.site.file, other.site.file) == 0;
}

// The lanes that take part in what a lane waits for: those of its mask that have not ended, or, without a mask, those
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

bool waits_for_same(const Fiber& fiber, const Fiber& other) {
  return other.state == State::in_collective && other.which == fiber.which && other.mask == fiber.mask &&
         strcmp(other.site.intrinsic, fiber.site.intrinsic) == 0;
}

void complete(const Warp& warp, uint64_t group) {
  ++warp_phases[warp.first / EMULATED_WARP_SIZE];
  uint64_t values[64], results[64];
  uint64_t ballot = 0;
  for (unsigned i = 0; i < warp.count; ++i) {
    values[i] = warp.lane(i).value;
    if ((group >> i & 1) != 0 && values[i] != 0) ballot |= 1ull << i;
  }
  for (unsigned i = 0; i < warp.count; ++i) {
    if ((group >> i & 1) == 0) continue;
    Fiber& fiber = warp.lane(i);
    uint64_t result = values[i];
    switch (fiber.which) {
      case Collective::sync:
        break;
      case Collective::shuffle: {
        const auto source = static_cast<unsigned>(fiber.source);
        if (source >= 64 || (group >> source & 1) == 0) {
          self = &fiber;
          stop(text(fiber.site) + " reads lane " + std::to_string(fiber.source) + ", which does not take part: " +
               (warp.has(source) ? text(warp.lane(source)) : "the block has no such thread"));
        }
        result = values[source];
        break;
      }
      case Collective::ballot:
        result = ballot;
        break;
      default:
        if (fiber.which == Collective::match) result = 0;
        for (unsigned j = 0; j < warp.count; ++j) {
          if ((group >> j & 1) == 0) continue;
          const uint64_t other = values[j];
          const auto mine = static_cast<int64_t>(result), its = static_cast<int64_t>(other);
          if (fiber.which == Collective::match) result |= other == values[i] ? 1ull << j : 0;
          if (fiber.which == Collective::add && j != i) result += other;
          if (fiber.which == Collective::min) result = std::min(result, other);
          if (fiber.which == Collective::max) result = std::max(result, other);
          if (fiber.which == Collective::min_signed) result = static_cast<uint64_t>(std::min(mine, its));
          if (fiber.which == Collective::max_signed) result = static_cast<uint64_t>(std::max(mine, its));
          if (fiber.which == Collective::bit_and) result &= other;
          if (fiber.which == Collective::bit_or) result |= other;
          if (fiber.which == Collective::bit_xor && j != i) result ^= other;
        }
    }
    results[i] = result;
  }
  for (unsigned i = 0; i < warp.count; ++i) {
    if ((group >> i & 1) == 0) continue;
    warp.lane(i).value = results[i];
    warp.lane(i).state = State::ready;
  }
}

// Completes one collective operation of a warp of which no lane is ready. Returns whether there was one to complete.
bool complete_one(const Warp& warp) {
  const Fiber* without_mask = nullptr;
  uint64_t group_without_mask = 0;
  for (unsigned i = 0; i < warp.count; ++i) {
    const Fiber& fiber = warp.lane(i);
    if (fiber.state != State::in_collective) continue;
    const uint64_t group = group_of(warp, fiber);
    if (fiber.mask == 0) {
      // Lanes that diverge meet again further down.
      if (!without_mask || fiber.site.line < without_mask->site.line) without_mask = &fiber, group_without_mask = group;
      continue;
    }
    bool complete_group = true;
    for (unsigned j = 0; j < warp.count; ++j) {
      if ((group >> j & 1) != 0) complete_group = complete_group && waits_for_same(fiber, warp.lane(j));
    }
    if (complete_group) return complete(warp, group), true;
  }
  if (without_mask) complete(warp, group_without_mask);
  return without_mask != nullptr;
}

// Says which thread waits in vain, and for which.
[[noreturn]] void stop_deadlock(const std::vector<Warp>& warps) {
  for (const Warp& warp : warps) {
    for (unsigned i = 0; i < warp.count; ++i) {
      Fiber& fiber = warp.lane(i);
      if (fiber.state != State::in_collective) continue;
      for (unsigned j = 0; j < warp.count; ++j) {
        const Fiber& other = warp.lane(j);
        if ((fiber.mask >> j & 1) == 0 || other.state == State::ended || waits_for_same(fiber, other)) continue;
        self = &fiber;
        stop("waits at " + text(fiber.site) + " for lane " + std::to_string(j) + " of its mask, but " + text(other) +
             (other.state == State::in_collective ? " with another mask or operation" : ""));
      }
    }
  }
  Fiber* const first = [] {
    for (const auto& fiber : fibers) {
      if (fiber->state == State::in_barrier) return fiber.get();
    }
    return static_cast<Fiber*>(nullptr);
  }();
  for (unsigned i = 0; first && i < threads; ++i) {
    const Fiber& other = *fibers[i];
    if (other.state == State::in_barrier && same_line(other, *first)) continue;
    self = first;
    stop("waits at " + text(first->site) + ", which not all threads of the block reach: " + text(other));
  }
  stop("no thread can proceed");
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

// Finds a read and a write of two threads with no barrier between them. Two writes are none: they may be equal.
void access(const void* at, size_t bytes, bool writes) {
  const auto offset = static_cast<size_t>(static_cast<const char*>(at) - arena);
  if (!self || offset >= kArena) return;
  const unsigned thread = self->number, warp = thread / EMULATED_WARP_SIZE;
  for (size_t i = offset; i < offset + bytes && i < kArena; ++i) {
    const Access& other = writes ? accesses[i].read : accesses[i].write;
    if (other.phase == phase && other.thread != thread &&
        (other.thread / EMULATED_WARP_SIZE != warp || other.warp_phase == warp_phases[warp])) {
      const std::string name = text(fibers[other.thread]->thread);
      fail("%s shared memory that thread %s has %s, with no barrier between them", writes ? "writes" : "reads",
           name.c_str(), writes ? "read" : "written");
    }
    (writes ? accesses[i].write : accesses[i].read) = {phase, warp_phases[warp], thread};
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
  fail("%s at address %p", signal == SIGFPE ? "divides by zero" : "accesses memory that does not exist",
       information->si_addr);
}

// While it lives, faults in kernels are errors.
class FaultHandlers {
 public:
  FaultHandlers() {
    struct sigaction action = {};
    action.sa_sigaction = handle_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &before_[i]);
  }
  ~FaultHandlers() {
    for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction before_[3];
};

}  // namespace

void fail(const char* format, ...) {
  char what[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof(what), format, arguments);
  va_end(arguments);
  if (!self) throw std::runtime_error(what);
  failure = what;
  _longjmp(scheduler, 1);
}

void enter_kernel(const char* name) { kernel_name = name; }

int barrier(Site site, bool predicate) {
  self->site = site;
  self->value = predicate;
  wait(State::in_barrier);
  return static_cast<int>(self->value);
}

uint64_t collective(Collective which, Site site, uint64_t mask, uint64_t value, int source) {
  if (mask != 0 && (mask >> current.lane & 1) == 0) {
    fail("calls %s with the mask %#llx, which does not have its own lane %d", text(site).c_str(),
         static_cast<unsigned long long>(mask), current.lane);
  }
  self->which = which;
  self->site = site;
  self->mask = mask;
  self->value = value;
  self->source = source;
  wait(State::in_collective);
  return self->value;
}

uint64_t active_lanes() { return collective(Collective::ballot, {"__activemask", "", 0}, 0, 1); }

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

void remember(const void* kernel, Invoke invoke) {
  const std::lock_guard lock(running);
  invokes[kernel] = invoke;
}

Invoke recall(const void* kernel) {
  const std::lock_guard lock(running);
  const auto found = invokes.find(kernel);
  return found == invokes.end() ? nullptr : found->second;
}

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

}  // namespace emulator

// The runtime.

cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return emulator::last_error; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                     ? "no error"
         : error == cudaErrorInvalidConfiguration ? "invalid configuration argument"
                                                  : "an error of the emulated runtime";
}
// As many as on GPUs: kernels have that many partial sums, whose length decides how precise they are.
constexpr int kMultiprocessors = 108;
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"emulator",
                 "emulator",
                 9,
                 0,
                 kMultiprocessors,
                 EMULATED_WARP_SIZE,
                 1024,
                 2048,
                 32 << 20,
                 size_t{1} << 33,
                 emulator::kStaticBytes,
                 emulator::kSharedBytes,
                 emulator::kSharedBytes};
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp of;
  cudaGetDeviceProperties(&of, device);
  const int values[] = {of.maxThreadsPerBlock,
                        static_cast<int>(of.sharedMemPerBlock),
                        static_cast<int>(of.sharedMemPerBlockOptin),
                        static_cast<int>(of.sharedMemPerMultiprocessor),
                        of.maxThreadsPerMultiProcessor,
                        of.multiProcessorCount,
                        of.l2CacheSize,
                        of.warpSize,
                        of.major,
                        of.minor};
  *value = values[attribute];
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  const auto invoke = emulator::recall(kernel);
  if (!invoke) {
    throw std::runtime_error(
        "the emulator does not know the parameters of a kernel that is launched by a pointer to void; write it as "
        "reinterpret_cast<const void*>(kernel), or launch it by <<<>>> or cudaLaunchKernelEx");
  }
  auto with_arguments = [&] { invoke(kernel, arguments); };
  const emulator::Launch launch{config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream};
  return launch.run(emulator::call<decltype(with_arguments)>, &with_arguments);
}

// What -fsanitize calls: for an index out of the bounds of an array, and for an address that is not aligned.

namespace {
struct Location {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, information;
  char name[1];
};
struct OutOfBounds {
  Location location;
  const Type *array, *index;
};
struct Mismatch {
  Location location;
  const Type* type;
  unsigned char log_alignment, kind;
};
struct Overflow {
  Location location;
  const Type* type;
};
}  // namespace

extern "C" void __ubsan_handle_out_of_bounds(const OutOfBounds* data, uintptr_t index) {
  emulator::fail("index %zd is out of the bounds of %s (%s:%u)", static_cast<ptrdiff_t>(index), data->array->name,
                 emulator::shown(data->location.file), data->location.line);
}
extern "C" void __ubsan_handle_type_mismatch_v1(const Mismatch* data, uintptr_t address) {
  emulator::fail("accesses %s at the address %#zx, which is no multiple of %d (%s:%u)", data->type->name,
                 static_cast<size_t>(address), 1 << data->log_alignment, emulator::shown(data->location.file),
                 data->location.line);
}
extern "C" void __ubsan_handle_divrem_overflow(const Overflow* data, uintptr_t, uintptr_t) {
  emulator::fail("divides by zero (%s:%u)", emulator::shown(data->location.file), data->location.line);
}

// What -fsanitize=thread calls: each access to memory, and atomic operations, as of static variables.

#define EMULATOR_ACCESS(bytes)                                                                         \
  extern "C" void __tsan_read##bytes(const void* at) { emulator::access(at, bytes, false); }           \
  extern "C" void __tsan_write##bytes(const void* at) { emulator::access(at, bytes, true); }           \
  extern "C" void __tsan_unaligned_read##bytes(const void* at) { emulator::access(at, bytes, false); } \
  extern "C" void __tsan_unaligned_write##bytes(const void* at) { emulator::access(at, bytes, true); }
EMULATOR_ACCESS(1)
EMULATOR_ACCESS(2)
EMULATOR_ACCESS(4)
EMULATOR_ACCESS(8)
EMULATOR_ACCESS(16)
extern "C" void __tsan_read_range(const void* at, size_t bytes) { emulator::access(at, bytes, false); }
extern "C" void __tsan_write_range(const void* at, size_t bytes) { emulator::access(at, bytes, true); }
extern "C" void __tsan_vptr_read(void**) {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
#define EMULATOR_ATOMIC(bits, T)                                                                              \
  extern "C" T __tsan_atomic##bits##_load(const T* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); } \
  extern "C" void __tsan_atomic##bits##_store(T* at, T value, int) { __atomic_store_n(at, value, __ATOMIC_SEQ_CST); }
EMULATOR_ATOMIC(8, uint8_t)
EMULATOR_ATOMIC(32, uint32_t)
EMULATOR_ATOMIC(64, uint64_t)

// Torch's interface, as emulator_torch.h renames it.
extern "C" int32_t emulated_create_device_guard(int32_t, void** guard) { return *guard = nullptr, 0; }
extern "C" int32_t emulated_delete_device_guard(void*) { return 0; }
extern "C" int32_t emulated_device_guard_set_index(void*, int32_t) { return 0; }
extern "C" int32_t emulated_current_stream(int32_t, void** stream) { return *stream = nullptr, 0; }
extern "C" int32_t emulated_check_message(int32_t error, const char*, const char*, uint32_t, bool, char** message) {
  return *message = error == cudaSuccess ? nullptr : strdup(cudaGetErrorString(error)), 0;
}
extern "C" void emulated_free_message(char* message) { free(message); }
