// How rows move past registers and caches: copies into shared memory, what is asked for early, and what leaves first.
//
// Reads:    nothing.
// Must not: depend on what a kernel computes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kit/elements.cuh"

namespace kit {

// Begins to bring what is going to be read from memory into the last cache, also while the kernel in front may still
// run: that is where other processors write to, so that nothing old is read there later. Of a large tensor it is 1% of
// the time, and of a small one up to a fifth. `bytes` and the address are multiples of 16.
__device__ __forceinline__ void prefetch_to_l2([[maybe_unused]] const void* from, [[maybe_unused]] uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Of a row that may lie anywhere, with what it shares a vector with.
template <typename T>
__device__ __forceinline__ void prefetch_row_to_l2(const T* row, int64_t elements) {
  const auto from = reinterpret_cast<uintptr_t>(row) / kVectorBytes * kVectorBytes;
  const auto end = (reinterpret_cast<uintptr_t>(row + elements) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  prefetch_to_l2(reinterpret_cast<const void*>(from), static_cast<uint32_t>(end - from));
}

// Shared memory by its own addresses, which take half the registers.
__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Copies into shared memory that take no register and wait for nothing until what they bring is needed. A thread that
// waits knows of its own copies only. Before capability 8.0 they are there at once.
// kKept: what others read, too, by way of the processor's cache.
template <typename Word, bool kKept = false>
__device__ __forceinline__ void cp_async(uint32_t to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(Word) == 16 && !kKept) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(sizeof(Word)) : "memory");
  }
#else
  *static_cast<Word*>(__cvta_shared_to_generic(to)) = *static_cast<const Word*>(from);
#endif
}

template <bool kKept = false, typename Word>
__device__ __forceinline__ void cp_async(Word* to, const void* from) {
  cp_async<Word, kKept>(shared_address(to), from);
}

// Closes a group of copies: those since the last call.
__device__ __forceinline__ void cp_async_commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of copies but the last kPending.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Words that are the first to leave the last cache again, where they are not in the way of what is read.
__device__ __forceinline__ void store_word_streaming(uint16_t* to, uint16_t word) {
  asm volatile("st.global.cs.u16 [%0], %1;" ::"l"(to), "h"(word) : "memory");
}
__device__ __forceinline__ void store_word_streaming(uint32_t* to, uint32_t word) {
  asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_word_streaming(uint2* to, uint2 word) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(word.x), "r"(word.y) : "memory");
}
__device__ __forceinline__ void store_word_streaming(uint4* to, uint4 word) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x), "r"(word.y), "r"(word.z),
               "r"(word.w)
               : "memory");
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_streaming(T* to, const Vector<T, kWidth>& vector) {
  using Whole = typename Word<sizeof(T) * kWidth>::Type;
  Whole whole;
  memcpy(&whole, &vector, sizeof(whole));
  store_word_streaming(reinterpret_cast<Whole*>(to), whole);
}

}  // namespace kit
