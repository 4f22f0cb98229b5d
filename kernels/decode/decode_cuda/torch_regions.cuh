// The calls for which an operation of Torch takes less time: on an H200 with Torch 2.11 and cold caches, of 307 calls
// of attention and 89 of linear layers, cuDNN takes up to 11 % less in its regions, cuBLAS up to 18 %.
//
// Reads:    sizes of the arguments, and the capability of the current device.
// Must not: depend on the contents of tensors, so that a CUDA graph holds for all.
#pragma once

#include "decode/problem.h"
#include "kit/launch.cuh"

namespace decode_step {

constexpr int64_t kLeastProducts = 160'000'000;  // of elements of queries and keys: about 0.06 ms

// Whether so many blocks of up to 8 heads of 96 elements ask for more than the memory delivers: a sixth less then.
inline bool is_too_much(const Attention& problem, int heads, int splits, int blocks, int slots) {
  return problem.elements > 64 && problem.elements < 128 && heads <= 8 && problem.mask == nullptr &&
         100 * blocks > 83 * slots && problem.tokens >= 1024 * splits;
}

// `slots`: the number of blocks that run at once.
inline bool is_for_torch(const Attention& problem, int slots) {
  if (kit::compiled_capability() != 90 || problem.mask != nullptr || problem.position != nullptr) return false;
  // Shorter calls gain less on the device than Torch's operation adds on the host: 0.04 ms.
  if (problem.batch * problem.query_heads * problem.tokens * problem.elements < kLeastProducts) return false;
  const int heads = problem.division.heads, splits = problem.division.splits;
  const int64_t caches = problem.batch * problem.key_heads, tokens = problem.tokens, all_tokens = caches * tokens;
  // Blocks of more than 8 heads compute longer than the memory takes; with 64 elements also those of many key heads.
  const bool is_wide = problem.query_heads > 8 * problem.key_heads;
  if (problem.elements <= 64 && is_wide && tokens >= 200 && (caches >= 7 || all_tokens >= 100000)) return true;
  if (problem.elements <= 64) return problem.key_heads >= 16 && all_tokens >= 400000;
  if (problem.elements > 96 && problem.elements <= 128 && is_wide && all_tokens >= 400000) return true;
  const auto blocks = static_cast<int>(caches * problem.division.head_blocks * splits), filled = 100 * blocks / slots;
  if (is_too_much(problem, heads, splits, blocks, slots)) return true;
  // Undivided blocks that leave SMs idle, where dividing their tokens takes longer.
  return problem.elements <= 128 && splits == 1 &&
         ((filled > 70 && filled <= 92 && tokens >= 1200) || (filled > 105 && filled <= 190 && tokens >= 200));
}

// Of a layer with `tiles` blocks: with five to eight per SM, some SMs are idle at the end. That takes longer than
// cuBLAS with many rows, and with inputs that are no multiple of what a block reads at once.
inline bool is_for_torch(const Linear& problem, int64_t tiles, int64_t sms) {
  return kit::compiled_capability() == 90 && problem.count == 1 && problem.activation == Activation::none &&
         problem.residual == nullptr && problem.type != Type::float32 && problem.inputs >= 3072 &&
         problem.inputs <= 7680 && tiles > 5 * sms && tiles <= 8 * sms &&
         (problem.inputs % 256 != 0 || (problem.rows > 4 && tiles > 6 * sms));
}

}  // namespace decode_step
