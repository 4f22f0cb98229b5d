// Modulated norms of rows that fit in registers, with and without a branch, gated or not, that is added before.
//
// Reads:    x and the branch, each once; scale, shift, weight and bias through shared memory; the gate.
// Writes:   `normed`, and `sum` when there is a branch, with streaming stores.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// A group of threads has a tile of one or two neighbouring rows of a span. 16-bit elements stay encoded, in half the
// registers, and are decoded again for each use. One pass sums differences from an element of the row and their
// squares; if that element is an outlier, a second one those from the mean. Blocks prefetch the rows of later blocks
// into L2, and those of the first ones while the preceding kernel still runs.
//
// The table above `Factors` in forward.cu shows which code takes a call. That for all combinations, norm_general, is
// small and slow, because registers and code must do for all.
#pragma once

#include "adaln_cuda/forward_tiles.cuh"

namespace adaln {
namespace {

// The first elements of a tile's rows, from which differences are taken.
template <typename T, int kRow>
struct FirstElements {
  T x[kForwardTable[kRow].rows], branch[kForwardTable[kRow].rows], gate;
  float float32_gate;
};

// Adds the branch to `words` and writes the sum.
template <typename T, int kRow, Arithmetic kGate>
__device__ __forceinline__ void add_branch(const TiledForward& problem, const TilePosition<T, kRow>& position,
                                           const typename ForwardTypes<T, kRow>::Words& branch,
                                           const FactorWords (&gates)[kForwardTable[kRow].vectors],
                                           typename ForwardTypes<T, kRow>::Words& words) {
  constexpr ForwardConfig kConfig = kForwardTable[kRow];
#pragma unroll
  for (int i = 0; i < kConfig.vectors; ++i) {
    if (!position.has(i)) continue;
#pragma unroll
    for (int r = 0; r < kConfig.rows; ++r) {
      change_pairs<T>(words[r][i], [&](int pair, float2 x) {
        if constexpr (kForwardTable[kRow].is(Branch::plain)) {
          return add(x, pair_of<T>(branch[r][i], pair));
        } else if constexpr (kGate == Arithmetic::stepwise) {
          return add(x, decode(rounded_product(packed_pair<T>(branch[r][i], pair), packed_pair<T>(gates[i][0], pair))));
        } else {
          constexpr bool kFloat32 = kGate == Arithmetic::float32;
          return multiply_add(pair_of<T>(branch[r][i], pair), factor_pair<T, kFloat32>(gates[i], pair), x);
        }
      });
      position.write(problem.sum, r, i, words[r][i]);
    }
  }
}

// Loads a span's gate.
template <typename T, int kRow>
__device__ __forceinline__ void load_gate(const TiledForward& problem, const TilePosition<T, kRow>& position,
                                          FirstElements<T, kRow>& first,
                                          FactorWords (&gates)[kForwardTable[kRow].vectors]) {
  const bool float32_gate = sizeof(T) < sizeof(float) && problem.float32_gate;
  const int64_t bytes = float32_gate ? sizeof(float) : sizeof(T);
  const char* const row = static_cast<const char*>(problem.gate.data) + position.span * problem.gate.stride * bytes;
#pragma unroll
  for (int i = 0; i < kForwardTable[kRow].vectors; ++i) {
    if (position.has(i)) {
      const auto* from = reinterpret_cast<const uint4*>(row + (position.column + i * position.step) * bytes);
      gates[i][0] = load_word(from);
      if (float32_gate) gates[i][1] = load_word(from + 1);
    }
  }
  if (!problem.centered) return;
  if (float32_gate) {
    first.float32_gate = *reinterpret_cast<const float*>(row);
  } else {
    first.gate = *reinterpret_cast<const T*>(row);
  }
}

// Replaces each sum over the thread by the average over its row.
template <int kSums, int kMaxWarps>
__device__ __forceinline__ void average_over_row(const Average& average, float (&sums)[kSums],
                                                 float (&scratch)[kMaxWarps][kSums]) {
  if (blockDim.x > kWarp) {
    sum_over_block(sums, scratch);
  } else {
    sum_over_lanes(sums, blockDim.x);
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
  if (problem.centered) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      pivots[r] = decode(first.x[r]);
      if constexpr (kForwardTable[kRow].is(Branch::gated)) {
        const float factor = kTwoByte && problem.float32_gate ? first.float32_gate : decode(first.gate);
        pivots[r] += decode(first.branch[r]) * factor;
      } else if constexpr (kForwardTable[kRow].is(Branch::plain)) {
        pivots[r] += decode(first.branch[r]);
      }
    }
    const auto find_averages = [&](int pass) {
      for_each_vector(position, words, [&](int r, const float (&x)[kWidth], bool has) {
        add_differences(x, has, pivots[r], sums[2 * r], sums[2 * r + 1]);
      });
      average_over_row(problem.average, sums, scratch[pass]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) means[r] = pivots[r] + sums[2 * r];
    };
    find_averages(0);
    // A second pass takes differences from the mean: in float32, for all digits of the mean; in 16 bits, in rows whose
    // first element is an outlier, 8 standard deviations away, since its square costs the variance its digits. Rows of
    // at most 512 elements, which have no more than a warp, go without: that adds 1 % at most to their mean error.
    if (!kTwoByte || blockDim.x > kWarp) {
      bool far = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (kTwoByte && !(65.0f / 64 * sums[2 * r] * sums[2 * r] > sums[2 * r + 1])) continue;
        pivots[r] = means[r];
        far = true;
      }
      if (far) {
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
        find_averages(1);
      }
    }
  } else {
    for_each_vector(position, words, [&](int r, const float (&x)[kWidth], bool) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[2 * r + 1] += x[j] * x[j];
    });
    average_over_row(problem.average, sums, scratch[0]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) rstds[r] = rsqrtf(variance_of(sums[2 * r], sums[2 * r + 1]) + problem.eps);
}

// Normalizes and writes the rows, with a factor and an offset; if `kWeighted`, the factor is multiplied by a weight.
template <Arithmetic kNorm, bool kWeighted, typename T, int kRow, int kRows>
__device__ __forceinline__ void norm_rows(const TiledForward& problem, const TilePosition<T, kRow>& position,
                                          const StagedRows<T, kRow>& staged,
                                          typename ForwardTypes<T, kRow>::Words& words, const float (&means)[kRows],
                                          const float (&rstds)[kRows]) {
#pragma unroll
  for (int i = 0; i < kForwardTable[kRow].vectors; ++i) {
    if (!position.has(i)) continue;
    FactorWords factor, offset, weight;
    staged.template read<kNorm == Arithmetic::float32>(kFactor, i, factor);
    staged.template read<kNorm == Arithmetic::float32>(kOffset, i, offset);
    if constexpr (kWeighted) staged.template read<false>(kSimpleWeight, i, weight);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // weight * rstd, or scale * rstd + rstd
      const float base = kForwardTable[kRow].is(FactorCount::one) && problem.weighted ? 0.0f : rstds[r];
      change_pairs<T>(words[r][i], [&](int pair, float2 x) {
        const float2 difference = make_float2(x.x - means[r], x.y - means[r]);
        if constexpr (kNorm == Arithmetic::stepwise) {
          using Pair = PairOf<T>;
          const auto normed = encode_pair<Pair>(make_float2(difference.x * rstds[r], difference.y * rstds[r]));
          const auto scale = rounded_sum(packed_pair<T>(factor[0], pair), encode_pair<Pair>(make_float2(1.0f, 1.0f)));
          return add(decode(rounded_product(normed, scale)), pair_of<T>(offset[0], pair));
        } else {
          constexpr bool kFloat32 = kNorm == Arithmetic::float32;
          const float2 rstd = make_float2(rstds[r], rstds[r]);
          float2 factors = factor_pair<T, kFloat32>(factor, pair);
          if constexpr (kWeighted) {
            const float2 weights = pair_of<T>(weight[0], pair);
            factors = multiply(multiply_add(factors, weights, weights), rstd);
          } else {
            factors = multiply_add(factors, rstd, make_float2(base, base));
          }
          return multiply_add(difference, factors, factor_pair<T, kFloat32>(offset, pair));
        }
      });
      position.write(problem.normed, r, i, words[r][i]);
    }
  }
}

// Normalizes and writes the rows with any options.
template <typename T, int kRow, int kRows>
__device__ __forceinline__ void norm_general(const TiledForward& problem, const TilePosition<T, kRow>& position,
                                             const StagedRows<T, kRow>& staged,
                                             typename ForwardTypes<T, kRow>::Words& words, const float (&means)[kRows],
                                             const float (&rstds)[kRows]) {
#pragma unroll
  for (int i = 0; i < kForwardTable[kRow].vectors; ++i) {
    if (!position.has(i)) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      change_pairs<T>(words[r][i], [&](int pair, float2 x) {
        const auto shared = [&](SharedRow which) { return staged.pair(problem.slots[which], i, pair); };
        float2 normed = make_float2((x.x - means[r]) * rstds[r], (x.y - means[r]) * rstds[r]);
        if (problem.slots[kWeight] >= 0) normed = multiply(normed, shared(kWeight));
        if (problem.slots[kBias] >= 0) normed = add(normed, shared(kBias));
        if (problem.slots[kScale] < 0) return normed;
        const float2 factors = add(shared(kScale), make_float2(1.0f, 1.0f));
        if (sizeof(T) == sizeof(float) || !problem.stepwise) return multiply_add(normed, factors, shared(kShift));
        return add(round_pair<T>(multiply(round_pair<T>(normed), round_pair<T>(factors))), shared(kShift));
      });
      position.write(problem.normed, r, i, words[r][i]);
    }
  }
}

template <typename T, int kRow>
__global__ void LAUNCH_BOUNDS(kForwardTable[kRow].max_threads, kForwardTable[kRow].blocks_per_sm)
    forward_kernel(const __grid_constant__ TiledForward problem) {
  if constexpr (!kInThisCode<kForwardTable, kRow>) return;
  using Types = ForwardTypes<T, kRow>;
  constexpr int kRows = Types::kRows;
  constexpr bool kTwoByte = Types::kTwoByte, kBranch = !Types::kConfig.is(Branch::none);
  constexpr bool kGated = Types::kConfig.is(Branch::gated);
  extern __shared__ uint4 memory[];
  __shared__ alignas(16) typename Types::Scratch scratch[2];
  const int hidden = problem.hidden, group = blockDim.x;
  if (blockIdx.x < problem.prefetch_distance) prefetch_tile<T, kRow>(problem, hidden, blockIdx.x);
  if (threadIdx.x == 0 && blockIdx.x < Types::kConfig.prefetch_spans &&
      static_cast<uint64_t>(blockIdx.x) * problem.tiles_per_span < problem.tiles) {
    if (kGated) prefetch_shared<T>(problem.gate, hidden, problem.float32_gate ? sizeof(float) : sizeof(T));
#pragma unroll 1
    for (int k = 0; k < problem.staged; ++k) {
      if (problem.shared[k].data == nullptr) continue;
      prefetch_shared<T>(problem.shared[k], hidden, problem.float32_shared ? sizeof(float) : sizeof(T));
    }
  }
  grid_wait();
  const TilePosition<T, kRow> position(problem, hidden, group);
  typename Types::Words words, branch;
  FirstElements<T, kRow> first;
  FactorWords gates[Types::kVectors];
  position.load_rows(problem.x, words);
  if (problem.centered) position.load_first(problem.x, first.x);
  trigger_next_grid();  // after the first loads, so that the next kernel's do not delay them
  if constexpr (kBranch) {
    position.load_rows(problem.branch, branch);
    if (problem.centered) position.load_first(problem.branch, first.branch);
  }
  if constexpr (kGated) load_gate(problem, position, first, gates);
  const StagedRows<T, kRow> staged(problem, position, memory);
  staged.stage_all();
  if (problem.prefetch_distance > 0) {
    prefetch_tile<T, kRow>(problem, position.hidden, blockIdx.x + problem.prefetch_distance);
  }
  if constexpr (kGated && kTwoByte) {
    if (problem.float32_gate) {
      add_branch<T, kRow, Arithmetic::float32>(problem, position, branch, gates, words);
    } else if (problem.stepwise) {
      add_branch<T, kRow, Arithmetic::stepwise>(problem, position, branch, gates, words);
    } else {
      add_branch<T, kRow, Arithmetic::rows>(problem, position, branch, gates, words);
    }
  } else if constexpr (kBranch) {
    add_branch<T, kRow, Arithmetic::rows>(problem, position, branch, gates, words);
  }
  float means[kRows] = {}, rstds[kRows];
  find_moments(problem, position, first, words, scratch, means, rstds);
  cp_async_wait<0>();
  if constexpr (Types::kConfig.is(FactorCount::any)) {
    if (!problem.simple) {
      norm_general(problem, position, staged, words, means, rstds);
    } else if (problem.staged > kOffset + 1) {
      norm_rows<Arithmetic::rows, true>(problem, position, staged, words, means, rstds);
    } else {
      norm_rows<Arithmetic::rows, false>(problem, position, staged, words, means, rstds);
    }
  } else if (kTwoByte && problem.float32_shared) {
    norm_rows<kTwoByte ? Arithmetic::float32 : Arithmetic::rows, false>(problem, position, staged, words, means, rstds);
  } else if (kTwoByte && problem.stepwise_norm) {
    norm_rows<kTwoByte ? Arithmetic::stepwise : Arithmetic::rows, false>(problem, position, staged, words, means,
                                                                         rstds);
  } else {
    norm_rows<Arithmetic::rows, false>(problem, position, staged, words, means, rstds);
  }
}

}  // namespace
}  // namespace adaln
