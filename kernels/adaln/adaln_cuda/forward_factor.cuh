// Modulated norms of rows that fit in registers, with at most one factor and one offset, a scale and a shift or a
// weight and a bias, as in model blocks. A branch, gated or not, may be added before.
//
// Reads:    x and the branch, each once; factor and offset through shared memory; the gate.
// Writes:   `normed`, and `sum` when there is a branch, with streaming stores.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Rows, tiles, sums and prefetches are those of forward_rows.cuh. There, float32 modulations and rounded steps have
// small and slow code, because registers and code must do for all combinations. Here, each has code of its own.
//
// Included by forward.cu.
#pragma once

#include "adaln_cuda/forward_rows.cuh"

namespace adaln {
namespace {

enum FactorRow : int { kFactor, kOffset };

// The arithmetic of a factor or a gate: it has the rows' dtype, or float32, or the rows' dtype and its product is
// rounded.
enum class Arithmetic { rows, float32, stepwise };

// A vector of a modulation or parameter: eight float32 elements take two words.
using FactorWords = uint4[2];

template <typename T, bool kFloat32>
__device__ __forceinline__ float2 factor_pair(const FactorWords& words, int pair) {
  return kFloat32 ? pair_of<float>(words[pair / 2], pair % 2) : pair_of<T>(words[0], pair);
}

// A pair of 16-bit elements. Products and sums of pairs are rounded once, as those of float32 that are then rounded:
// the float32 products are exact, and so are the sums 1 + scale, except where they round to 1.
template <typename T>
struct Packed;
template <>
struct Packed<__half> {
  using Type = __half2;
  static __device__ __forceinline__ Type round(float2 pair) { return __floats2half2_rn(pair.x, pair.y); }
  static __device__ __forceinline__ float2 widen(Type pair) { return __half22float2(pair); }
};
template <>
struct Packed<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static __device__ __forceinline__ Type round(float2 pair) { return __float22bfloat162_rn(pair); }
  static __device__ __forceinline__ float2 widen(Type pair) { return __bfloat1622float2(pair); }
};

template <typename T>
__device__ __forceinline__ typename Packed<T>::Type packed_pair(uint4 word, int pair) {
  typename Packed<T>::Type packed;
  const uint32_t parts[4] = {word.x, word.y, word.z, word.w};
  memcpy(&packed, &parts[pair], sizeof(packed));
  return packed;
}

// Factor and offset, staged in shared memory as in StagedRows.
template <typename T, int kRow>
struct StagedFactor {
  static constexpr int kVectors = kForwardTable[kRow].vectors;

  const TilePosition<T, kRow>& position;
  SharedAddress memory;  // [factor and offset][vectors][words of a vector][threads]
  uint32_t step;         // from a word to the next one

  __device__ __forceinline__ StagedFactor(const TilePosition<T, kRow>& position, uint4* first) : position(position) {
    memory = shared_address(first + threadIdx.y * blockDim.x + threadIdx.x);
    step = blockDim.x * blockDim.y * kVectorBytes;
  }

  // Copies a row. Zeros replace a row that is missing.
  template <bool kFloat32>
  __device__ __forceinline__ void stage(FactorRow which, const Shared& shared) const {
    constexpr int kWords = kFloat32 ? 2 : 1, kBytes = kFloat32 ? sizeof(float) : sizeof(T);
    SharedAddress to = memory + which * kVectors * kWords * step;
    if (shared.data == nullptr) {
#pragma unroll
      for (int i = 0; i < kVectors * kWords; ++i, to += step) store_shared(to, uint4{});
      return;
    }
    const char* from = static_cast<const char*>(shared.data) +
                       (position.span * shared.stride + position.column) * static_cast<int64_t>(kBytes);
#pragma unroll
    for (int i = 0; i < kVectors; ++i, from += position.step * kBytes, to += kWords * step) {
      if (!position.has(i)) continue;
#pragma unroll
      for (int word = 0; word < kWords; ++word) cp_async<uint4, true>(to + word * step, from + word * kVectorBytes);
    }
  }

  template <bool kFloat32>
  __device__ __forceinline__ void read(FactorRow which, int vector, FactorWords& words) const {
    constexpr int kWords = kFloat32 ? 2 : 1;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      words[word] = load_shared(memory + ((which * kVectors + vector) * kWords + word) * step, uint4{});
    }
  }
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
          return add(x, Packed<T>::widen(
                            rounded_product(packed_pair<T>(branch[r][i], pair), packed_pair<T>(gates[i][0], pair))));
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
  const int64_t bytes = problem.float32_gate ? sizeof(float) : sizeof(T);
  const char* const row = static_cast<const char*>(problem.gate.data) + position.span * problem.gate.stride * bytes;
#pragma unroll
  for (int i = 0; i < kForwardTable[kRow].vectors; ++i) {
    if (position.has(i)) {
      const auto* from = reinterpret_cast<const uint4*>(row + (position.column + i * position.step) * bytes);
      gates[i][0] = load_word_nc(from);
      if (problem.float32_gate) gates[i][1] = load_word_nc(from + 1);
    }
  }
  if (!problem.centered) return;
  if (problem.float32_gate) {
    first.float32_gate = *reinterpret_cast<const float*>(row);
  } else {
    first.gate = *reinterpret_cast<const T*>(row);
  }
}

// Normalizes and writes the rows.
template <Arithmetic kNorm, typename T, int kRow, int kRows>
__device__ __forceinline__ void norm_rows(const TiledForward& problem, const TilePosition<T, kRow>& position,
                                          const StagedFactor<T, kRow>& staged,
                                          typename ForwardTypes<T, kRow>::Words& words, const float (&means)[kRows],
                                          const float (&rstds)[kRows]) {
#pragma unroll
  for (int i = 0; i < kForwardTable[kRow].vectors; ++i) {
    if (!position.has(i)) continue;
    FactorWords factor, offset;
    staged.template read<kNorm == Arithmetic::float32>(kFactor, i, factor);
    staged.template read<kNorm == Arithmetic::float32>(kOffset, i, offset);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float base = problem.weighted ? 0.0f : rstds[r];  // weight * rstd, or scale * rstd + rstd
      change_pairs<T>(words[r][i], [&](int pair, float2 x) {
        const float2 difference = make_float2(x.x - means[r], x.y - means[r]);
        if constexpr (kNorm == Arithmetic::stepwise) {
          const auto normed = Packed<T>::round(make_float2(difference.x * rstds[r], difference.y * rstds[r]));
          const auto scale = rounded_sum(packed_pair<T>(factor[0], pair), Packed<T>::round(make_float2(1.0f, 1.0f)));
          return add(Packed<T>::widen(rounded_product(normed, scale)), pair_of<T>(offset[0], pair));
        } else {
          constexpr bool kFloat32 = kNorm == Arithmetic::float32;
          const float2 factors = multiply_add(factor_pair<T, kFloat32>(factor, pair), make_float2(rstds[r], rstds[r]),
                                              make_float2(base, base));
          return multiply_add(difference, factors, factor_pair<T, kFloat32>(offset, pair));
        }
      });
      position.write(problem.normed, r, i, words[r][i]);
    }
  }
}

template <typename T, int kRow>
__global__ void LAUNCH_BOUNDS(kForwardTable[kRow].max_threads, kForwardTable[kRow].blocks_per_sm)
    forward_factor_kernel(const __grid_constant__ TiledForward problem) {
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
  const StagedFactor<T, kRow> staged(position, memory);
  __syncwarp();  // the loads of the rows go first
  if (kTwoByte && problem.float32_shared) {
    staged.template stage<kTwoByte>(kFactor, problem.shared[kFactor]);
    staged.template stage<kTwoByte>(kOffset, problem.shared[kOffset]);
  } else {
    staged.template stage<false>(kFactor, problem.shared[kFactor]);
    staged.template stage<false>(kOffset, problem.shared[kOffset]);
  }
  cp_async_commit();
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
  if constexpr (kTwoByte) {
    if (problem.float32_shared) {
      return norm_rows<Arithmetic::float32>(problem, position, staged, words, means, rstds);
    }
    if (problem.stepwise_norm) {
      return norm_rows<Arithmetic::stepwise>(problem, position, staged, words, means, rstds);
    }
  }
  norm_rows<Arithmetic::rows>(problem, position, staged, words, means, rstds);
}

}  // namespace
}  // namespace adaln
