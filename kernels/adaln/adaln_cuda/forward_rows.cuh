// Modulated norms of rows that fit in registers, with and without a gated branch that is added before: modulations and
// parameters in any combination.
//
// Reads:    x and the branch, each once; scale, shift, weight and bias through shared memory; the gate.
// Writes:   `normed`, and `sum` when there is a branch, with streaming stores.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// A group of threads has a tile of one or two neighbouring rows of a span. 16-bit elements stay encoded, in half the
// registers, and are decoded again for each use. One pass sums differences from an element of the row and their
// squares. Rare combinations of options have separate code. Blocks prefetch the rows of later blocks into L2, and those
// of the first ones while the preceding kernel still runs.
//
// Included by forward_factor.cuh, which uses parts of it.
#pragma once

#include "adaln_cuda/forward_tiles.cuh"

namespace adaln {
namespace {

// Adds branch * gate to `words` and writes the sum.
template <typename T, int kRow, bool kFloat32Gate, bool kStepwise>
__device__ __forceinline__ void add_branch(const TiledForward& problem, const TilePosition<T, kRow>& position,
                                           const typename ForwardTypes<T, kRow>::Words& branch,
                                           const uint4 (&gates)[kForwardTable[kRow].vectors], const float* float32_gate,
                                           typename ForwardTypes<T, kRow>::Words& words) {
  constexpr ForwardConfig kConfig = kForwardTable[kRow];
#pragma unroll
  for (int i = 0; i < kConfig.vectors; ++i) {
    if (!position.has(i)) continue;
#pragma unroll
    for (int r = 0; r < kConfig.rows; ++r) {
      change_pairs<T>(words[r][i], [&](int pair, float2 x) {
        float2 factors;
        if constexpr (kFloat32Gate) {
          factors = reinterpret_cast<const float2*>(float32_gate + position.column + i * position.step)[pair];
        } else {
          factors = pair_of<T>(gates[i], pair);
        }
        const float2 product = pair_of<T>(branch[r][i], pair);
        if constexpr (!kStepwise) return multiply_add(product, factors, x);
        return add(x, round_pair<T>(multiply(product, factors)));
      });
      position.write(problem.sum, r, i, words[r][i]);
    }
  }
}

// The first elements of a tile's rows, from which differences are taken.
template <typename T, int kRow>
struct FirstElements {
  T x[kForwardTable[kRow].rows], branch[kForwardTable[kRow].rows], gate;
  float float32_gate;
};

// Loads the branch and its gate, stages the modulations, and adds the gated branch to `words`.
template <typename T, int kRow>
__device__ __forceinline__ void load_and_add_branch(const TiledForward& problem, const TilePosition<T, kRow>& position,
                                                    const StagedRows<T, kRow>& staged, FirstElements<T, kRow>& first,
                                                    typename ForwardTypes<T, kRow>::Words& words) {
  constexpr ForwardConfig kConfig = kForwardTable[kRow];
  constexpr bool kTwoByte = sizeof(T) < sizeof(float);
  const int64_t gate_row = position.span * problem.gate.stride;
  typename ForwardTypes<T, kRow>::Words branch;
  position.load_rows(problem.branch, branch);
  const T* gate = static_cast<const T*>(problem.gate.data) + gate_row;
  const float* float32_gate = static_cast<const float*>(problem.gate.data) + gate_row;
  uint4 gates[kConfig.vectors];
  if (!kTwoByte || !problem.float32_shared) {
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      if (position.has(i)) {
        gates[i] = load_word_nc(reinterpret_cast<const uint4*>(gate + position.column + i * position.step));
      }
    }
  }
  if (problem.centered) {
    if (kTwoByte && problem.float32_shared) {
      first.float32_gate = *float32_gate;
    } else {
      first.gate = *gate;
    }
    position.load_first(problem.branch, first.branch);
  }
  staged.stage_all();
  if (problem.prefetch_distance > 0) {
    prefetch_tile<T, kRow>(problem, position.hidden, blockIdx.x + problem.prefetch_distance);
  }
  if (kTwoByte && problem.float32_shared) {
    add_branch<T, kRow, true, false>(problem, position, branch, gates, float32_gate, words);
  } else if (kTwoByte && problem.stepwise) {
    add_branch<T, kRow, false, true>(problem, position, branch, gates, float32_gate, words);
  } else {
    add_branch<T, kRow, false, false>(problem, position, branch, gates, float32_gate, words);
  }
}

// Replaces each sum over the thread by the average over its row.
template <int kSums, int kMaxWarps>
__device__ __forceinline__ void average_over_row(const Average& average, float (&sums)[kSums],
                                                 float (&scratch)[kMaxWarps][kSums]) {
  const int group = blockDim.x;
  if (group > kWarp) {
    sum_over_block(sums, scratch);
  } else {
#pragma unroll 1
    for (int distance = group / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) sums[k] += shuffle_xor(sums[k], distance);
    }
  }
#pragma unroll
  for (int k = 0; k < kSums; ++k) sums[k] = average(sums[k]);
}

// Calls `use` with each decoded vector of a tile.
template <typename T, int kRow, typename Use>
__device__ __forceinline__ void for_each_vector(const TilePosition<T, kRow>& position,
                                                typename ForwardTypes<T, kRow>::Words& words, Use&& use) {
#pragma unroll
  for (int r = 0; r < kForwardTable[kRow].rows; ++r) {
#pragma unroll
    for (int i = 0; i < kForwardTable[kRow].vectors; ++i) {
      float x[kVectorWidth<T>];
      decode_all(vector_of<T>(words[r][i]).elements, x);
      use(r, x, position.has(i));
      hide(words[r][i]);  // decoded again for the next use: the elements would take twice the registers
    }
  }
}

// Finds the mean (0 unless centered) and the reciprocal standard deviation of each row.
template <typename T, int kRow, int kRows, typename Scratch>
__device__ __forceinline__ void find_moments(const TiledForward& problem, const TilePosition<T, kRow>& position,
                                             const FirstElements<T, kRow>& first,
                                             typename ForwardTypes<T, kRow>::Words& words, Scratch (&scratch)[2],
                                             float (&means)[kRows], float (&rstds)[kRows]) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr bool kTwoByte = sizeof(T) < sizeof(float);
  float sums[2 * kRows] = {}, pivots[kRows];
  const auto add_differences_from = [&](const float (&from)[kRows]) {
    for_each_vector(position, words, [&](int r, const float (&x)[kWidth], bool has) {
      add_differences(x, has, from[r], sums[2 * r], sums[2 * r + 1]);
    });
  };
  if (problem.centered) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      pivots[r] = decode(first.x[r]);
      if constexpr (kForwardTable[kRow].is(Branch::gated)) {
        const bool float32_gate =
            kForwardTable[kRow].is(FactorCount::one) ? problem.float32_gate : problem.float32_shared;
        const float factor = kTwoByte && float32_gate ? first.float32_gate : decode(first.gate);
        pivots[r] += decode(first.branch[r]) * factor;
      } else if constexpr (kForwardTable[kRow].is(Branch::plain)) {
        pivots[r] += decode(first.branch[r]);
      }
    }
    add_differences_from(pivots);
  } else {
    for_each_vector(position, words, [&](int r, const float (&x)[kWidth], bool) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[2 * r + 1] += x[j] * x[j];
    });
  }
  average_over_row(problem.average, sums, scratch[0]);
  if (problem.centered) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) means[r] = pivots[r] + sums[2 * r];
    if constexpr (!kTwoByte) {  // all digits of a float32 mean need a second pass of differences from the mean
#pragma unroll
      for (int k = 0; k < 2 * kRows; ++k) sums[k] = 0.0f;
      add_differences_from(means);
      average_over_row(problem.average, sums, scratch[1]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) means[r] += sums[2 * r];
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) rstds[r] = rsqrtf(variance_of(sums[2 * r], sums[2 * r + 1]) + problem.eps);
}

// Normalizes and writes the rows, for the simple combinations of options.
template <bool kWeighted, typename T, int kRow, int kRows>
__device__ __forceinline__ void norm_simple(const TiledForward& problem, const TilePosition<T, kRow>& position,
                                            const StagedRows<T, kRow>& staged,
                                            typename ForwardTypes<T, kRow>::Words& words, const float (&means)[kRows],
                                            const float (&rstds)[kRows]) {
#pragma unroll
  for (int i = 0; i < kForwardTable[kRow].vectors; ++i) {
    if (!position.has(i)) continue;
    const uint4 scale = *staged.simple_slot_of(0, i), shift = *staged.simple_slot_of(1, i);
    uint4 weight;
    if constexpr (kWeighted) weight = *staged.simple_slot_of(2, i);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      change_pairs<T>(words[r][i], [&](int pair, float2 x) {
        const float2 scales = pair_of<T>(scale, pair), rstd = make_float2(rstds[r], rstds[r]);
        float2 factors;
        if constexpr (kWeighted) {
          const float2 weights = pair_of<T>(weight, pair);
          factors = multiply(multiply_add(scales, weights, weights), rstd);
        } else {
          factors = multiply_add(scales, rstd, rstd);
        }
        return multiply_add(make_float2(x.x - means[r], x.y - means[r]), factors, pair_of<T>(shift, pair));
      });
      position.write(problem.normed, r, i, words[r][i]);
    }
  }
}

template <typename T, int kRow>
__device__ __forceinline__ float2 norm_pair(const TiledForward& problem, const StagedRows<T, kRow>& staged, int i,
                                            int pair, float2 x, float mean, float rstd) {
  float2 normed = make_float2((x.x - mean) * rstd, (x.y - mean) * rstd);
  if (problem.slots[kWeight] >= 0) normed = multiply(normed, staged.pair(problem.slots[kWeight], i, pair));
  if (problem.slots[kBias] >= 0) normed = add(normed, staged.pair(problem.slots[kBias], i, pair));
  if (problem.slots[kScale] < 0) return normed;
  float2 factors = staged.pair(problem.slots[kScale], i, pair);
  factors = make_float2(factors.x + 1.0f, factors.y + 1.0f);
  const float2 offsets = staged.pair(problem.slots[kShift], i, pair);
  if (sizeof(T) == sizeof(float) || !problem.stepwise) return multiply_add(normed, factors, offsets);
  normed = round_pair<T>(multiply(round_pair<T>(normed), round_pair<T>(factors)));
  return add(normed, offsets);
}

// Normalizes and writes the rows with any options, one vector after the other to keep the code small.
template <typename T, int kRow, int kRows>
__device__ __forceinline__ void norm_general(const TiledForward& problem, const TilePosition<T, kRow>& position,
                                             const StagedRows<T, kRow>& staged,
                                             const typename ForwardTypes<T, kRow>::Words& words,
                                             const float (&means)[kRows], const float (&rstds)[kRows]) {
  constexpr int kVectors = kForwardTable[kRow].vectors;
#pragma unroll 1
  for (int k = 0; k < kRows * kVectors; ++k) {
    const int r = k / kVectors, i = k % kVectors;
    if (!position.has(i)) continue;
    uint4 word = words[0][0];
    float mean = means[0], rstd = rstds[0];
#pragma unroll
    for (int other = 1; other < kRows * kVectors; ++other) {
      if (k != other) continue;
      word = words[other / kVectors][other % kVectors];
      mean = means[other / kVectors];
      rstd = rstds[other / kVectors];
    }
    change_pairs<T>(word, [&](int pair, float2 x) { return norm_pair(problem, staged, i, pair, x, mean, rstd); });
    position.write(problem.normed, r, i, word);
  }
}

template <typename T, int kRow>
__global__ void LAUNCH_BOUNDS(kForwardTable[kRow].max_threads, kForwardTable[kRow].blocks_per_sm)
    forward_kernel(const __grid_constant__ TiledForward problem) {
  if constexpr (!kInThisCode<kForwardTable, kRow>) return;
  using Types = ForwardTypes<T, kRow>;
  constexpr int kRows = Types::kRows;
  extern __shared__ uint4 memory[];
  __shared__ alignas(16) typename Types::Scratch scratch[2];
  const int hidden = problem.hidden, group = blockDim.x;
  if (blockIdx.x < problem.prefetch_distance) prefetch_tile<T, kRow>(problem, hidden, blockIdx.x);
  if (threadIdx.x == 0 && blockIdx.x < Types::kConfig.prefetch_spans &&
      static_cast<uint64_t>(blockIdx.x) * problem.tiles_per_span < problem.tiles) {
    const int64_t bytes = Types::kTwoByte && !problem.float32_shared ? sizeof(T) : sizeof(float);
    if (Types::kConfig.is(Branch::gated)) prefetch_shared<T>(problem.gate, hidden, bytes);
#pragma unroll 1
    for (int k = 0; k < problem.staged; ++k) prefetch_shared<T>(problem.shared[k], hidden, bytes);
  }
  grid_wait();
  const TilePosition<T, kRow> position(problem, hidden, group);
  typename Types::Words words;
  FirstElements<T, kRow> first;
  position.load_rows(problem.x, words);
  if (problem.centered) position.load_first(problem.x, first.x);
  trigger_next_grid();  // after the first loads, so that the next kernel's do not delay them
  const StagedRows<T, kRow> staged(problem, position, memory);
  if constexpr (Types::kConfig.is(Branch::gated)) {
    load_and_add_branch(problem, position, staged, first, words);
  } else {
    staged.stage_all();
    if (problem.prefetch_distance > 0) {
      prefetch_tile<T, kRow>(problem, position.hidden, blockIdx.x + problem.prefetch_distance);
    }
  }
  float means[kRows] = {}, rstds[kRows];
  find_moments(problem, position, first, words, scratch, means, rstds);
  cp_async_wait<0>();
  if (problem.simple) {
    if (problem.staged == 2) {
      norm_simple<false>(problem, position, staged, words, means, rstds);
    } else {
      norm_simple<true>(problem, position, staged, words, means, rstds);
    }
    return;
  }
  norm_general(problem, position, staged, words, means, rstds);
}

}  // namespace
}  // namespace adaln
