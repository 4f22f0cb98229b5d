// Functions that the compiler's sanitizers call in device code. Their libraries are not linked.
#include "emulator_fibers.h"

namespace emulator {

namespace {

// The last access of each kind to a byte of shared memory: the thread, and its last synchronization.
struct Access {
  uint64_t phase = 0, warp_phase = 0;
  unsigned thread = 0;
};
struct Accesses {
  Access read, write;
};

std::vector<Accesses> accesses(kArena);

// Finds a read and a write of two threads with no barrier between them. Two writes are none: they may be equal.
void access(const void* at, size_t bytes, bool writes) {
  const auto offset = static_cast<size_t>(static_cast<const char*>(at) - arena);
  if (offset >= kArena || !self) return;
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

}  // namespace

}  // namespace emulator

// Called by -fsanitize: for an index out of the bounds of an array, and for an address that is not aligned.

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
  emulator::fail("accesses %s at the address %#zx, which is not a multiple of %d (%s:%u)", data->type->name,
                 static_cast<size_t>(address), 1 << data->log_alignment, emulator::shown(data->location.file),
                 data->location.line);
}
extern "C" void __ubsan_handle_divrem_overflow(const Overflow* data, uintptr_t, uintptr_t) {
  emulator::fail("divides by zero (%s:%u)", emulator::shown(data->location.file), data->location.line);
}

// Called by -fsanitize=thread: each access to memory, and atomic operations, as of static variables.

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
#define EMULATOR_FETCH(bits, T, operation)                              \
  extern "C" T __tsan_atomic##bits##_##operation(T* at, T value, int) { \
    return __atomic_##operation(at, value, __ATOMIC_SEQ_CST);           \
  }
#define EMULATOR_ATOMIC(bits, T)                                                                                      \
  extern "C" T __tsan_atomic##bits##_load(const T* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }         \
  extern "C" void __tsan_atomic##bits##_store(T* at, T value, int) { __atomic_store_n(at, value, __ATOMIC_SEQ_CST); } \
  EMULATOR_FETCH(bits, T, fetch_add)                                                                                  \
  EMULATOR_FETCH(bits, T, fetch_and)                                                                                  \
  EMULATOR_FETCH(bits, T, fetch_or)
EMULATOR_ATOMIC(8, uint8_t)
EMULATOR_ATOMIC(32, uint32_t)
EMULATOR_ATOMIC(64, uint64_t)
