// The tiles of rows of forward_rows.cuh, modulations and parameters in shared memory, and sums over the threads of a
// row in a fixed order.
//
// Reads:    rows of x and the branch; scale, shift, weight and bias.
// Writes:   rows of results, with streaming stores.
// Must not: allocate, synchronize, or use another stream than the one given.
#pragma once

#include "adaln_cuda/strided_rows.cuh"
#include "kit/group_sums.cuh"
#include "kit/vectors.cuh"

namespace adaln {
namespace {

// A modulation or parameter.
struct Shared {
  const void* data;
  int64_t stride;  // from one span to the next; 0 for parameters
};

enum SharedRow : int { kScale, kShift, kWeight, kBias, kSharedRows };

// Tiles of rows that registers hold. Each tile is within a span.
struct alignas(64) TiledForward {
  StridedRows x;
  void* normed = nullptr;
  uint32_t tiles = 0, tiles_per_span = 0, span = 0;
  FastDivisor spans{1, 0, 0};  // of tiles
  Average average;
  int hidden = 0;
  float eps = 0.0f;
  uint32_t prefetch_distance = 0;  // in tiles, of a block each; 0: no prefetch
  bool centered = false, stepwise = false;
  bool float32_shared = false;  // modulations and parameters are float32, rows are not
  bool simple = false;          // scale and shift, perhaps a weight, in the rows' dtype, and not stepwise
  uint8_t staged = 0;           // number of modulations and parameters, without the gate
  int8_t slots[kSharedRows] = {-1, -1, -1, -1};  // index of each in `shared`; negative: there is none
  Shared shared[kSharedRows] = {};
  void* sum = nullptr;  // null, like the branch, where there is no branch
  StridedRows branch;
  Shared gate{};
  bool float32_gate = false;   // the gate is float32, rows are not
  bool weighted = false;       // with one factor: it is a weight, else 1 + scale, or 1
  bool stepwise_norm = false;  // with one factor: the norm, 1 + scale and their product are rounded, too

  explicit TiledForward(int64_t hidden) : average(hidden) {}
};

// A pair of elements. clang passes a vector of 16-bit elements as so many values; a pair is taken from 32-bit parts.
template <typename T>
__device__ __forceinline__ float2 pair_of(uint4 word, int pair) {
  const uint32_t parts[4] = {word.x, word.y, word.z, word.w};
  Vector<T, 2> elements;
  memcpy(&elements, &parts[pair * sizeof(elements) / sizeof(uint32_t)], sizeof(elements));
  float values[2];
  decode_all(elements.elements, values);
  return make_float2(values[0], values[1]);
}

// Replaces each pair of elements by `change(index of the pair, pair)`. Pairs keep few float32 values in registers.
template <typename T, typename Change>
__device__ __forceinline__ void change_pairs(uint4& word, Change&& change) {
  uint32_t parts[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int pair = 0; pair < kVectorBytes / static_cast<int>(2 * sizeof(T)); ++pair) {
    const float2 changed = change(pair, pair_of<T>(word, pair));
    const float values[2] = {changed.x, changed.y};
    const auto encoded = encode_all<T>(values);
    memcpy(&parts[pair * sizeof(encoded) / sizeof(uint32_t)], &encoded, sizeof(encoded));
  }
  word = make_uint4(parts[0], parts[1], parts[2], parts[3]);
}

template <typename T>
__device__ __forceinline__ float2 round_pair(float2 pair) {
  float values[2] = {pair.x, pair.y};
  round_to<T>(values);
  return make_float2(values[0], values[1]);
}

__device__ __forceinline__ float2 multiply_add(float2 a, float2 b, float2 c) {
  return make_float2(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y));
}
__device__ __forceinline__ float2 multiply(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }

// Prefetches a tile. One thread of a block calls it with a uniform address, for which there are cheaper instructions.
template <typename T, int kRow>
__device__ __forceinline__ void prefetch_tile(const TiledForward& problem, int hidden, uint32_t tile) {
  constexpr ForwardConfig kConfig = kForwardTable[kRow];
  if (threadIdx.x != 0 || tile >= problem.tiles) return;
  const int64_t index = static_cast<int64_t>(tile) * (kConfig.rows * hidden);
  prefetch_row_to_l2(static_cast<const T*>(problem.x.data) + index, kConfig.rows * hidden);
  if (!kConfig.is(Branch::none)) {
    prefetch_row_to_l2(static_cast<const T*>(problem.branch.data) + index, kConfig.rows * hidden);
  }
}

// Prefetches the row of a modulation for the span with the index of the block.
template <typename T>
__device__ __forceinline__ void prefetch_shared(const Shared& shared, int hidden, int64_t bytes) {
  prefetch_row_to_l2(static_cast<const char*>(shared.data) + blockIdx.x * shared.stride * bytes, hidden * bytes);
}

// Constants derived from a row of the launch table.
template <typename T, int kRow>
struct ForwardTypes {
  static constexpr ForwardConfig kConfig = kForwardTable[kRow];
  static constexpr int kRows = kConfig.rows, kVectors = kConfig.vectors, kWidth = kVectorWidth<T>;
  static constexpr bool kTwoByte = sizeof(T) < sizeof(float);
  using Words = uint4[kRows][kVectors];
  using Scratch = float[kConfig.max_threads / kWarp][2 * kRows];
};

// The position of a thread's part of its tile.
template <typename T, int kRow>
struct TilePosition : ForwardTypes<T, kRow> {
  using Types = ForwardTypes<T, kRow>;
  using typename Types::Words;
  using Types::kRows, Types::kVectors, Types::kWidth;

  int hidden;
  uint32_t span, first_row;  // row: within the span
  bool in_problem, has_second_row;
  int column, step;  // of the first vector; to the next one
  int64_t result;    // index of the first element that is written

  __device__ __forceinline__ TilePosition(const TiledForward& problem, int hidden, int group) : hidden(hidden) {
    // Threads without a tile take part in the sums of their warp, with the last tile, which they do not write.
    const uint32_t own_tile = blockIdx.x * blockDim.y + threadIdx.y, tile = min(own_tile, problem.tiles - 1);
    span = problem.spans(tile);
    first_row = (tile - span * problem.tiles_per_span) * kRows;
    // The second row of a tile may be past its span. It then repeats the first one, and is not written.
    in_problem = own_tile < problem.tiles;
    has_second_row = kRows == 2 && first_row + 1 < problem.span;
    column = static_cast<int>(threadIdx.x) * kWidth;
    step = group * kWidth;
    result = static_cast<int64_t>(span * problem.span + first_row) * hidden + column;
  }

  __device__ __forceinline__ bool has(int vector) const { return column + vector * step < hidden; }

  // Loads zeros past the row's end. Loads whole words: a vector would be assembled as soon as it arrives.
  __device__ __forceinline__ void load_rows(const StridedRows& rows, Words& words) const {
    const T* from = rows.at<T>(span, first_row) + column;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        words[r][i] = make_uint4(0, 0, 0, 0);
        if (has(i)) words[r][i] = load_word(reinterpret_cast<const uint4*>(from + i * step));
      }
      if (has_second_row) from += rows.row_stride;
    }
  }

  // Loads the first element of each row. They are decoded only when they are used, so that nothing waits for them.
  __device__ __forceinline__ void load_first(const StridedRows& rows, T (&elements)[kRows]) const {
    const T* from = rows.at<T>(span, first_row);
#pragma unroll
    for (int r = 0; r < kRows; ++r) elements[r] = from[has_second_row ? r * rows.row_stride : 0];
  }

  __device__ __forceinline__ void write(void* to, int r, int i, uint4 word) const {
    if (in_problem && (r == 0 || has_second_row) && has(i)) {
      store_word_streaming(reinterpret_cast<uint4*>(static_cast<T*>(to) + result + (r * hidden + i * step)), word);
    }
  }
};

// Rows in shared memory: with FactorCount::one, and in the simple combinations of FactorCount::any.
enum FactorRow : int { kFactor, kOffset, kSimpleWeight };

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
__device__ __forceinline__ PairOf<T> packed_pair(uint4 word, int pair) {
  PairOf<T> packed;
  const uint32_t parts[4] = {word.x, word.y, word.z, word.w};
  memcpy(&packed, &parts[pair], sizeof(packed));
  return packed;
}

// Modulations and parameters, staged in shared memory: in registers they would limit the rows that an SM has in flight.
// Each thread reads only its own copies.
template <typename T, int kRow>
struct StagedRows : ForwardTypes<T, kRow> {
  using Types = ForwardTypes<T, kRow>;
  using Types::kVectors, Types::kTwoByte;

  const TiledForward& problem;
  const TilePosition<T, kRow>& position;
  SharedAddress memory;  // [modulations and parameters][vectors][words of a vector][threads]
  uint32_t step;         // from a word to the next one

  __device__ __forceinline__ StagedRows(const TiledForward& problem, const TilePosition<T, kRow>& position,
                                        uint4* first)
      : problem(problem), position(position) {
    memory = shared_address(first + threadIdx.y * blockDim.x + threadIdx.x);
    step = blockDim.x * blockDim.y * kVectorBytes;
  }

  // Copies a row. Zeros replace a row that is missing.
  template <bool kFloat32>
  __device__ __forceinline__ void stage(int which) const {
    constexpr int kWords = kFloat32 ? 2 : 1, kBytes = kFloat32 ? sizeof(float) : sizeof(T);
    const Shared& shared = problem.shared[which];
    SharedAddress to = memory + which * kVectors * kWords * step;
    if (Types::kConfig.is(FactorCount::one) && shared.data == nullptr) {
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

  __device__ __forceinline__ void stage_all() const {
    __syncwarp();  // the loads of the rows go first
    if (Types::kConfig.is(FactorCount::one) || problem.simple) {
      if (Types::kConfig.is(FactorCount::one) && kTwoByte && problem.float32_shared) {
        stage<kTwoByte>(kFactor);
        stage<kTwoByte>(kOffset);
      } else {
        stage<false>(kFactor);
        stage<false>(kOffset);
      }
      if (Types::kConfig.is(FactorCount::any) && problem.staged > kOffset + 1) stage<false>(kSimpleWeight);
    } else {
#pragma unroll 1
      for (int k = 0; k < problem.staged; ++k) {
        if (kTwoByte && problem.float32_shared) {
          stage<kTwoByte>(k);
        } else {
          stage<false>(k);
        }
      }
    }
    cp_async_commit();
  }

  template <bool kFloat32>
  __device__ __forceinline__ void read(int which, int vector, FactorWords& words) const {
    constexpr int kWords = kFloat32 ? 2 : 1;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      words[word] = load_shared(memory + ((which * kVectors + vector) * kWords + word) * step, uint4{});
    }
  }

  // Not volatile: the pairs of a word need one load.
  __device__ __forceinline__ float2 pair(int which, int vector, int pair) const {
    const int first = which * kVectors + vector;
    if (!kTwoByte || !problem.float32_shared) {
      return pair_of<T>(*shared_pointer<const uint4>(memory + first * step), pair);
    }
    return shared_pointer<const float2>(memory + (2 * first + pair / 2) * step)[pair % 2];
  }
};

// Adds differences from `pivot` and their squares.
template <int kWidth>
__device__ __forceinline__ void add_differences(const float (&x)[kWidth], bool has, float pivot, float& sum,
                                                float& sum_of_squares) {
  float differences = 0.0f, squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float away = x[j] - pivot;
    differences += away;
    squares += away * away;
  }
  sum += has ? differences : 0.0f;
  sum_of_squares += has ? squares : 0.0f;
}

// The variance from the averages of differences from a number and of their squares. A row far from zero keeps its
// digits if that number is near its mean, compared with the standard deviation.
__device__ __forceinline__ float variance_of(float difference, float square) {
  const float variance = square - difference * difference;
  return variance < 0.0f ? 0.0f : variance;  // NaN stays NaN
}

// Threads, in whole warps, that hold a row of the given number of vectors.
constexpr int threads_for(int64_t vectors, int vectors_per_thread) {
  return static_cast<int>((vectors + vectors_per_thread * kWarp - 1) / (vectors_per_thread * kWarp) * kWarp);
}

}  // namespace
}  // namespace adaln
