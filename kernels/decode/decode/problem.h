// The arguments of a kernel call in plain C++, so that device code is compiled without Torch and once for all versions.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// Strides and sizes are in elements. The arithmetic is float32, and each result is rounded once.
#pragma once

#include <cmath>
#include <cstdint>

#include "kit/rows.h"

// Not `decode`, which is the name of a function of the kit.
namespace decode_step {

using kit::Type;

// The most rows of x for which a linear layer reads its weights at the speed of the memory.
constexpr int64_t kMostRows = 8;
// The most elements of x that a kernel normalizes on CUDA: shared memory holds them.
constexpr int64_t kMostNormed = 18432;
// The most layers of one call.
constexpr int kMostWeights = 3;
// The most elements of a head.
constexpr int kMostElements = 256;

enum class Activation : int { none, silu, gelu, gelu_tanh };  // the ops take its number

// The activation of a gate. There are so few gates that accurate functions of the math library cost no time.
KIT_HOST_DEVICE float activated(float x, Activation activation) {
  if (activation == Activation::gelu) return 0.5f * x * erfcf(-0.707106781f * x);
  // That of gelu_tanh, x / 2 * (1 + tanh(y)), is x * sigmoid(2 * y), which does not cancel.
  const float y = activation == Activation::silu ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
  return x / (1.0f + expf(-y));
}

// The weights of a linear layer: [rows, inputs], each row contiguous.
struct Weight {
  const void* data = nullptr;
  const void* bias = nullptr;  // [rows] or null
  int64_t rows = 0;
  int64_t stride = 0;  // from a row to the next
};

// Layers of the same x, whose outputs are next to each other in the rows of `out`:
//
//     out[r][first[i] + n] = x[r] . weights[i][n] + bias[i][n] + residual[r][first[i] + n]
//
// where first[i] is the number of rows of the weights before i. With an activation there are two weights of the same
// number of rows, the gate and the projection that it gates, and no residual:
//
//     out[r][n] = activation(x[r] . weights[0][n] + bias[0][n]) * (x[r] . weights[1][n] + bias[1][n])
//
// With a norm, on CUDA and of bfloat16, each row of x is first divided by the root of the mean of its squares, plus
// eps, and multiplied with the norm's weight plus the offset.
//
// x, residual and out are contiguous.
struct Linear {
  Type type;  // of all tensors
  int64_t rows, inputs, outputs;
  const void* x;
  Weight weights[kMostWeights];
  int count;  // of weights
  Activation activation;
  const void* residual;  // [rows, outputs] or null
  void* out;             // [rows, outputs]
  const void* norm;      // its weight, [inputs], or null
  float eps, offset;
};

// Of a tensor [batch, heads, tokens, elements], whose elements are adjacent.
struct Heads {
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;
};

// The first operations on query and new_key, on CUDA alone: RMSNorm of each head if there are weights, rounded to the
// dtype and, with `rounded_before_weight`, before the weight, too; then the rotation of elements p and p + elements / 2
// by the angle of entry p of the tables, rounded. The factor of a normalized element is its weight plus the offset.
struct Rotary {
  const void* cos = nullptr;  // [batch or 1, elements / 2 or more]; null: no norm and no rotation
  const void* sin = nullptr;
  int64_t batch_stride = 0;            // of the tables
  const void* query_weight = nullptr;  // [elements]; both or none
  const void* key_weight = nullptr;
  float eps = 0.0f, offset = 0.0f;
  bool rounded_before_weight = false;
};

// How a call of attention is divided among blocks, on CUDA: `divide` sets it.
struct Division {
  int heads;          // query heads per block
  int head_blocks;    // blocks for the query heads of a key head
  int splits;         // of the tokens
  int warps;          // of a block
  bool is_cluster;    // of the blocks of all splits, which add up their sums; else a second kernel does
  bool in_step;       // the warps of a block read their next tiles at the same time
  bool is_for_torch;  // Torch's operation takes less time
};

// Attention of one token per sequence over a cache. Query head h reads key head h / (query_heads / key_heads):
//
//     out[b][h] = sum over t of softmax(scale * query[b][h] . key[b][t] + mask[b][t]) * value[b][t]
//
// `new_key` and `new_value` are those of the token itself. They are written to the cache at `*position`, and read from
// there; without them the cache has them already. A row whose mask excludes every token gives zeros.
struct Attention {
  Type type;                                                // of all tensors but position and mask
  int64_t batch, query_heads, key_heads, tokens, elements;  // tokens: of the cache
  float scale;
  Heads query, new_key, new_value, key, value;  // token_stride of the first three is unused
  const int64_t* position;                      // one number, below `tokens`; null without new_key
  const bool* mask;                             // [batch or 1, tokens]: the tokens that are read; null: all
  int64_t mask_stride;                          // of a sequence; 0: one mask for all
  void* out;                                    // [batch, query_heads, elements], contiguous
  Rotary rotary;                                // with new_key only
  Division division;
  float* parts;  // scratch memory on CUDA, of the size that `divide` returns
};

// CUDA: launch on the current device, and return a cudaError_t, 0 on success. `constant_weights`, `constant_cache`:
// whether no kernel that may still run writes the weights, or key and value. Reading them begins immediately then.
// Attention is for 16-bit dtypes, from capability 8.0 on; heads of at most 256 elements that start at 16-byte
// boundaries.
int run(const Linear& problem, bool constant_weights, void* stream);
int run(const Attention& problem, bool constant_cache, void* stream);

// Before `run`: sets the division, and *floats to the size of `parts`.
int divide(Attention& problem, int64_t* floats);

// Whether Torch's operation takes less time.
bool is_for_torch(const Linear& problem, bool constant_weights);

// The CPU: compute the columns of `out`, or the groups of query heads that read the same keys, over all sequences, from
// `begin` to `end`. The caller divides them among threads.
void run(const Linear& problem, int64_t begin, int64_t end);
void run(const Attention& problem, int64_t begin, int64_t end);

}  // namespace decode_step
