// Rotation on CUDA, of both sides in one launch.
//
// Reads:    the tokens and the tables of a problem, each element of a token once from memory.
// Writes:   the tokens.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Bytes: q and k are read once and written once, and the table of a grid, of a few ten kilobytes, comes from the
// caches. In bfloat16, 13 x 30 x 44 tokens with 16 heads of 128 elements in q and k: 4 * 17,160 * 16 * 128 * 2 = 281
// MB, which a copy of as many bytes moves in 94.0 microseconds on an H100, and this in one percent less.
//
// A thread has one column of a token, the same in two heads, whose vectors it requests before it uses one. With more of
// them it would have less to find out for each, but memory is fastest when blocks are short, read from one place and
// write to one: so there are blocks of q and blocks of k, where a token has heads enough. What comes before the first
// request of a block delays it, above all in short launches: its numbers are counted in vectors and have 32 bits, and
// what a token needs of the tables is requested all at once.
#include <algorithm>
#include <type_traits>

#include "kit/async_copy.cuh"
#include "kit/elements.cuh"
#include "kit/launch.cuh"
#include "rope3d_cuda/rope3d.h"

namespace rope3d {
namespace {

using namespace kit;

// Threads of a block, at least, and at most: with columns of two vectors they have more registers.
constexpr int kBlock = 128;
template <bool kApart>
constexpr int kMost = kApart ? 256 : 512;

// Threads of a launch below which there is not enough for every processor: then a thread has one head of each tensor,
// and a block fewer tokens.
constexpr int64_t kFew = 65536;
constexpr int kOfFew = 64;

// Threads of a block where tokens lie closer together than heads.
constexpr int kNear = 256;

// Blocks of a launch that are so few that they run beside those of the next one.
constexpr int64_t kVeryFew = 64;

// So many blocks of q, then as many of k: the rows of a table that q has just needed are still in the cache when k
// does.
constexpr int64_t kChunk = 64;

// Bytes of q and k below which they fit into every second cache that matters.
constexpr int64_t kFits = int64_t{1} << 24;

// Sequences that have their tokens in turn, at most: memory is slower the more places are read at a time.
constexpr int64_t kMostInTurn = 4;

// Division by a number that is not known when the kernel is compiled, of numbers below 2^31, by a multiplication.
struct Divisor {
  uint32_t value, factor, shift;

  __device__ __forceinline__ uint32_t operator()(uint32_t number, uint32_t& rest) const {
    const uint32_t quotient = (__umulhi(number, factor) + number) >> shift;
    rest = number - quotient * value;
    return quotient;
  }
};

// By `number`, or by 1 where that is 0.
Divisor divisor(int64_t number) {
  Divisor result{static_cast<uint32_t>(std::max<int64_t>(number, 1)), 0, 0};
  while ((uint64_t{1} << result.shift) < result.value) ++result.shift;
  const uint64_t above = (uint64_t{1} << result.shift) - result.value;
  result.factor = static_cast<uint32_t>((above << 32) / result.value + 1);
  return result;
}

// Where angles come from.
enum class Source { axes, axes_in_turn, tokens };

// Heads that a thread has.
constexpr int kHeads = 2;

// Whether they are one of q and one of k; else both are of one of them.
template <Source kSource>
constexpr bool kOfBoth = kSource == Source::axes_in_turn;

// One of the tensors, in vectors: of one element where the Index is that of the largest tensors, and of 16 bytes where
// it is shorter.
template <typename Index>
struct Place {
  const void* from;
  void* to;
  Index from_batch, from_token, from_head, to_batch, to_token, to_head;
};

// How many there are in a block, and by how much they grow with y and with z: one of these is 1, the other 0.
struct Spread {
  uint32_t in_block, in_y, in_z;
};

// The problem in the numbers that a thread needs, and how tokens are laid over threads: x counts the columns of a head,
// y the groups of heads, and z tokens; or y counts tokens and z groups, where tokens lie closer together than heads.
template <typename Index>
struct Params {
  Place<Index> places[kMaxSides];
  uint32_t sequences, tokens_of_sequence;
  uint32_t columns;
  uint32_t heads[kMaxSides], groups[kMaxSides];  // a thread has the heads group, group + groups, ...
  uint32_t first_of_k;                           // where blocks, counted in z, have heads of one side: the first of k
  bool in_chunks;                                // or they have them in turn, counted in x
  bool very_few;
  bool sequences_in_turn;
  Spread tokens_spread, groups_spread;
  Divisor divisor;  // of blocks, by the sequences, or by the blocks of a sequence
  uint32_t prefix;
  int pairs, staying, first_turning;
  bool half, table_vectors;
  float sign;
  union {
    struct {
      const float* table;
      Divisor by_width, by_height;
      int stride, second_row, third_row;                         // in elements; of the first rows of the axes
      int second_begin, third_begin, second_first, third_first;  // pairs
    } grid;
    struct {
      const void* cos;
      const void* sin;
      int64_t batch_stride, row_stride, pair_stride;
      Type type;
    } tokens;
  };
  // Here, so that what the shortest launches need is in no more lines of a cache. Bytes that are asked for ahead: of a
  // token, or of a head of one where tokens lie closer together; or 0.
  uint32_t ahead[kMaxSides];
};

// What the elements of a column turn by.
template <int kPairs>
struct Angles {
  float cos[kPairs], sin[kPairs];
  uint32_t staying = 0;  // one bit for each pair
};

// The entries of as many pairs as a column has, as they lie one after another.
template <int kPairs>
struct Entries {
  static constexpr int kWidth = kPairs == 1 ? 2 : 4;
  Vector<float, kWidth> parts[2 * kPairs / kWidth] = {};

  __device__ __forceinline__ void read(const float* from) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs / kWidth; ++i) parts[i] = load<float, kWidth>(from + i * kWidth);
  }

  __device__ __forceinline__ void add_to(Angles<kPairs>& angles) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      angles.cos[i] += parts[2 * i / kWidth].elements[2 * i % kWidth];
      angles.sin[i] += parts[2 * i / kWidth].elements[2 * i % kWidth + 1];
    }
  }
};

// The angles of the pairs from `pair` on, of a token on a grid. For pairs that do not turn, any of the table.
template <Source kSource, int kPairs, typename Index>
__device__ __forceinline__ void look_up_grid(const Params<Index>& params, uint32_t token, int pair,
                                             Angles<kPairs>& angles) {
  const auto& grid = params.grid;
  uint32_t x, y;
  const uint32_t t = grid.by_height(grid.by_width(token, x), y);
  // Rows in 32 bits: a table has fewer elements than that.
  const int rows[kAxes] = {static_cast<int>(t) * grid.stride, grid.second_row + static_cast<int>(y) * grid.stride,
                           grid.third_row + static_cast<int>(x) * grid.stride};
  if constexpr (kSource == Source::axes) {
    const auto axis_of = [&](int p) { return (p >= grid.second_begin) + (p >= grid.third_begin); };
    const auto at = [&](int axis) {
      const int row = axis == 0 ? rows[0] : axis == 1 ? rows[1] : rows[2];
      const int first = axis == 0 ? 0 : axis == 1 ? grid.second_first : grid.third_first;
      return grid.table + (row + 2 * (pair - first));
    };
    const int first = axis_of(pair), last = axis_of(min(pair + kPairs, params.pairs) - 1);
    // All of them are requested before one is used.
    Entries<kPairs> of_first, of_last;
    of_first.read(at(first));
    if (last != first) of_last.read(at(last));
#pragma unroll
    for (int i = 0; i < kPairs; ++i) angles.cos[i] = angles.sin[i] = 0.0f;
    of_first.add_to(angles);
    of_last.add_to(angles);
    if (last - first > 1) {
      of_first.read(at(1));
      of_first.add_to(angles);
    }
  } else {
    // The rows in the order in which the pairs need them, at the entry of the first pair of each.
    const int entry = pair < 0 ? -1 : static_cast<int>(static_cast<uint32_t>(pair) / kAxes);
    const int axis = pair - entry * kAxes;
    int at[kAxes];
#pragma unroll
    for (int i = 0; i < kAxes; ++i) {
      const int own = axis + i < kAxes ? axis + i : axis + i - kAxes;
      at[i] = (own == 0 ? rows[0] : own == 1 ? rows[1] : rows[2]) + 2 * (entry + (axis + i >= kAxes));
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      angles.cos[i] = 1.0f;
      angles.sin[i] = 0.0f;
      if (!(angles.staying >> i & 1)) {
        const auto one = load<float, 2>(grid.table + at[i % kAxes] + 2 * (i / kAxes));
        angles.cos[i] = one.elements[0];
        angles.sin[i] = one.elements[1];
      }
    }
  }
}

// The cosines and sines of as many pairs as a column has, which lie kStride apart and may be read in vectors. All of
// them are requested before one is used.
template <typename E, int kStride, int kPairs>
__device__ __forceinline__ void read_vectors(const E* cos, const E* sin, Angles<kPairs>& angles) {
  constexpr int kEntries = kStride * kPairs, kFits = kVectorBytes / sizeof(E),
                kWidth = kEntries < kFits ? kEntries : kFits;
  Vector<E, kWidth> cosines[kEntries / kWidth], sines[kEntries / kWidth];
#pragma unroll
  for (int i = 0; i < kEntries / kWidth; ++i) {
    cosines[i] = load<E, kWidth>(cos + i * kWidth);
    sines[i] = load<E, kWidth>(sin + i * kWidth);
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    angles.cos[i] = decode(cosines[i * kStride / kWidth].elements[i * kStride % kWidth]);
    angles.sin[i] = decode(sines[i * kStride / kWidth].elements[i * kStride % kWidth]);
  }
}

// The same of `count` pairs at most, which lie anywhere.
template <typename E, int kPairs>
__device__ __forceinline__ void read_singles(const E* cos, const E* sin, int64_t stride, int count,
                                             Angles<kPairs>& angles) {
  E cosines[kPairs], sines[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int64_t at = min(i, count - 1) * stride;
    cosines[i] = cos[at];
    sines[i] = sin[at];
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    angles.cos[i] = decode(cosines[i]);
    angles.sin[i] = decode(sines[i]);
  }
}

// The angles of the pairs from `pair` on, of a token with a row of its own.
template <typename E, int kPairs, typename Index>
__device__ __forceinline__ void look_up_token(const Params<Index>& params, uint32_t sequence, uint32_t token, int pair,
                                              Angles<kPairs>& angles) {
  const auto& table = params.tokens;
  const int64_t at = sequence * table.batch_stride + token * table.row_stride + pair * table.pair_stride;
  const E *cos = static_cast<const E*>(table.cos) + at, *sin = static_cast<const E*>(table.sin) + at;
  if (kPairs == 1 || !params.table_vectors) {
    read_singles(cos, sin, table.pair_stride, params.pairs - pair, angles);
  } else if (table.pair_stride == 1) {
    read_vectors<E, 1>(cos, sin, angles);
  } else {
    read_vectors<E, 2>(cos, sin, angles);
  }
}

template <typename T>
__device__ __forceinline__ void turn(T& a, T& b, float cos, float sin) {
  const float first = decode(a), second = decode(b);
  a = encode<T>(first * cos - second * sin);
  b = encode<T>(first * sin + second * cos);
}

// kApart: a column is two vectors, with the first and the second elements of as many pairs as they have elements. Else
// it is one vector of whole pairs.
template <typename T, int kWidth, bool kApart, Source kSource, typename Index>
__global__ void __launch_bounds__(kMost<kApart>) rotate_kernel(const __grid_constant__ Params<Index> params) {
  constexpr int kPairs = kApart ? kWidth : kWidth / 2;
  if (params.very_few) trigger_next_grid();
  const uint32_t column = blockIdx.y * blockDim.x + threadIdx.x;
  uint32_t x = blockIdx.x, z = blockIdx.z, only = 0;
  if (kSource == Source::tokens && params.in_chunks) {
    only = x / kChunk % kMaxSides;
    x = x / (kMaxSides * kChunk) * kChunk + x % kChunk;
  } else if (!kOfBoth<kSource> && z >= params.first_of_k) {
    only = 1;
    z -= params.first_of_k;
  }
  const Spread &tokens = params.tokens_spread, &groups = params.groups_spread;
  // By the whole block, not by each thread.
  uint32_t sequence, piece;
  if (params.sequences_in_turn) {
    piece = params.divisor(x, sequence);
  } else {
    sequence = params.divisor(x, piece);
  }
  const uint32_t token = piece * tokens.in_block + threadIdx.y * tokens.in_y + threadIdx.z * tokens.in_z;
  const uint32_t group = z * groups.in_block + threadIdx.y * groups.in_y + threadIdx.z * groups.in_z;
  if (sequence >= params.sequences || token >= params.tokens_of_sequence || column >= params.columns ||
      group >= params.groups[only]) {
    return;
  }

  Angles<kPairs> angles;
  int pair;
  uint32_t a_at, b_at = 0;  // in a head, in vectors
  if constexpr (kApart) {
    // First the columns that turn, then those that stay.
    pair = static_cast<int>(column) * kWidth;
    const auto vectors = [](int elements) { return static_cast<uint32_t>(elements) / kWidth; };
    if (pair >= params.pairs) {
      a_at = vectors(pair - params.pairs + (params.first_turning > 0 ? 0 : 2 * params.pairs));
      b_at = a_at + vectors(params.staying) / 2;
    } else {
      a_at = vectors(params.first_turning + (params.half ? pair : 2 * pair));
      b_at = a_at + (params.half ? vectors(params.pairs) : 1);
    }
  } else {
    a_at = column;
    pair = (static_cast<int>(column) * kWidth - params.first_turning) / 2;
  }

  // What a vector is counted in.
  using Unit = Vector<T, std::is_same_v<Index, uint32_t> ? kWidth : 1>;
  const auto side_of = [&](int slot) { return kOfBoth<kSource> ? slot % kMaxSides : only; };
  const auto head_of = [&](int slot) {
    return group + (kOfBoth<kSource> ? slot / kMaxSides : slot) * params.groups[kOfBoth<kSource> ? 0 : only];
  };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Into the second cache, which is also where the kernel in front writes: nothing old can come of it. One thread asks
  // for all heads of a token, or, where tokens lie closer together, for all tokens of a head.
  if (column == 0 && !params.very_few && (params.ahead[0] | params.ahead[1]) != 0) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const uint32_t head = head_of(i), bytes = params.ahead[side_of(i)];
      if (bytes > 0 && head < params.heads[side_of(i)] && (tokens.in_y ? threadIdx.y : head) == 0) {
        const Place<Index>& place = params.places[side_of(i)];
        const Index at = sequence * place.from_batch + token * place.from_token + head * place.from_head;
        const uint32_t pieces = tokens.in_y ? min(tokens.in_block, params.tokens_of_sequence - token) : 1;
        prefetch_to_l2(static_cast<const Unit*>(place.from) + at, pieces * bytes);
      }
    }
  }
#endif
  grid_wait();
  Vector<T, kWidth> a[kHeads], b[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const uint32_t head = head_of(i);
    if (head < params.heads[side_of(i)]) {
      const Place<Index>& place = params.places[side_of(i)];
      const Index at = sequence * place.from_batch + token * place.from_token + head * place.from_head;
      const auto* from = static_cast<const Unit*>(place.from);
      a[i] = load<T, kWidth>(reinterpret_cast<const T*>(from + (at + a_at)));
      if (kApart) b[i] = load<T, kWidth>(reinterpret_cast<const T*>(from + (at + b_at)));
    }
  }
  trigger_next_grid();
  constexpr uint32_t kAll = (1u << kPairs) - 1;
  if (token < params.prefix) {
    angles.staying = kAll;
  } else if (params.staying > 0) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) angles.staying |= (pair + i < 0 || pair + i >= params.pairs) << i;
  }
  if (angles.staying != kAll) {
    const uint32_t turning = token - params.prefix;
    if constexpr (kSource != Source::tokens) {
      look_up_grid<kSource>(params, turning, pair, angles);
    } else {
      switch (params.tokens.type) {
        case Type::float32:
          look_up_token<float>(params, sequence, turning, pair, angles);
          break;
        case Type::float16:
          look_up_token<__half>(params, sequence, turning, pair, angles);
          break;
        case Type::bfloat16:
          look_up_token<__nv_bfloat16>(params, sequence, turning, pair, angles);
          break;
      }
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) angles.sin[j] *= params.sign;
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const uint32_t head = head_of(i);
    if (head < params.heads[side_of(i)]) {
      const Place<Index>& place = params.places[side_of(i)];
      const Index at = sequence * place.to_batch + token * place.to_token + head * place.to_head;
      auto* to = static_cast<Unit*>(place.to);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        T& x = kApart ? a[i].elements[j] : a[i].elements[2 * j];
        T& y = kApart ? b[i].elements[j] : a[i].elements[2 * j + 1];
        if (!(angles.staying >> j & 1)) turn(x, y, angles.cos[j], angles.sin[j]);
      }
      store(reinterpret_cast<T*>(to + (at + a_at)), a[i]);
      if (kApart) store(reinterpret_cast<T*>(to + (at + b_at)), b[i]);
    }
  }
}

// Whether every row of a table starts at a multiple of the vector size, and whole columns turn.
bool vectors_of_table(const Tokens& table, int64_t pairs, int64_t column) {
  const int64_t element = table.type == Type::float32 ? 4 : 2;
  const auto whole = [=](int64_t stride) { return stride * element % kVectorBytes == 0; };
  return (table.pair_stride == 1 || table.pair_stride == 2) && pairs % column == 0 && kit::aligned(table.cos) &&
         kit::aligned(table.sin) && whole(table.batch_stride) && whole(table.row_stride);
}

// Whether the second cache does not hold so many bytes, so that some of them are certain to come from memory: then each
// block asks for its tokens as wholes, before the kernel in front has ended. Where that kernel may just have written
// all of them, asking twice takes longer: up to 3% with 22 MB.
bool come_from_memory(int64_t bytes) {
  int device, cache;
  return bytes > kFits && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device) == cudaSuccess && bytes > cache;
}

template <typename T, int kWidth, bool kApart, Source kSource, typename Index>
void launch(const Rotation& problem, cudaStream_t stream) {
  constexpr int64_t kUnit = std::is_same_v<Index, uint32_t> ? kWidth : 1;
  const int64_t columns = problem.width / (kApart ? 2 * kWidth : kWidth);
  const int64_t total = problem.batch * problem.tokens;
  const auto parts = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  const auto number = [](int64_t value) { return static_cast<uint32_t>(value); };
  const auto whole = [](int64_t value) { return static_cast<int>(value); };
  constexpr int64_t kEach = kOfBoth<kSource> ? 1 : kHeads;
  const int64_t heads[kMaxSides] = {problem.sides[0].heads, problem.sides[1].heads};
  const bool few = total * columns * (heads[0] + heads[1]) / kHeads < kFew;
  int64_t groups[kMaxSides];
  for (int i = 0; i < kMaxSides; ++i) groups[i] = few ? heads[i] : parts(heads[i], kEach);
  if (kOfBoth<kSource>) groups[0] = std::max(groups[0], groups[1]);

  Params<Index> params{{},
                       number(problem.batch),
                       number(problem.tokens),
                       number(columns),
                       {number(heads[0]), number(heads[1])},
                       {number(groups[0]), number(groups[1])},
                       0,
                       false,
                       false,
                       false,
                       {},
                       {},
                       {},
                       number(problem.prefix),
                       whole(problem.pairs),
                       whole(problem.staying()),
                       whole(problem.first_turning),
                       problem.half,
                       false,
                       problem.inverse ? -1.0f : 1.0f,
                       {},
                       {}};
  for (int i = 0; i < kMaxSides; ++i) {
    const Side& side = problem.sides[i];
    const auto units = [](int64_t stride) { return static_cast<Index>(stride / kUnit); };
    params.places[i] = {side.from,
                        side.to,
                        units(side.from_strides.batch),
                        units(side.from_strides.token),
                        units(side.from_strides.head),
                        units(side.to_strides.batch),
                        units(side.to_strides.token),
                        units(side.to_strides.head)};
  }
  if constexpr (kSource == Source::tokens) {
    const Tokens& table = problem.table;
    params.tokens = {table.cos, table.sin, table.batch_stride, table.row_stride, table.pair_stride, table.type};
    params.table_vectors = vectors_of_table(table, problem.pairs, kApart ? kWidth : kWidth / 2);
  } else {
    const Axis(&axes)[kAxes] = problem.grid.axes;
    const int64_t stride = 2 * problem.grid.entries;
    params.grid = {problem.grid.table,   divisor(axes[2].size),        divisor(axes[1].size),
                   whole(stride),        whole(axes[0].size * stride), whole((axes[0].size + axes[1].size) * stride),
                   whole(axes[1].begin), whole(axes[2].begin),         whole(axes[1].first),
                   whole(axes[2].first)};
  }

  // A block has whole tokens if they are small enough, else about equal parts of them, which run long after one
  // another: memory is read in longer pieces the more of a token a block has.
  const int64_t x = parts(columns, parts(columns, kMost<kApart>));
  const auto rows_of_block = [=](int64_t threads) { return std::max<int64_t>(threads / x, 1); };
  const int64_t most = std::max(groups[0], groups[1]);
  const bool tokens_first = problem.sides[0].from_strides.token < problem.sides[0].from_strides.head;
  constexpr int64_t kElement = sizeof(T);
  if (kUnit > 1 && come_from_memory(total * (heads[0] + heads[1]) * problem.width * kElement)) {
    for (int i = 0; i < kMaxSides; ++i) {
      const Strides& strides = problem.sides[i].from_strides;
      const bool adjacent = (tokens_first ? strides.token : strides.head) == problem.width;
      params.ahead[i] = adjacent ? number((tokens_first ? 1 : heads[i]) * problem.width * kElement) : 0;
    }
  }
  int64_t y, z;
  if (tokens_first) {
    y = std::min(rows_of_block(few ? kOfFew : kNear), problem.tokens);
    z = 1;
  } else {
    y = parts(most, parts(most, rows_of_block(few ? kOfFew : kMost<kApart>)));
    z = std::min<int64_t>({std::max<int64_t>(kBlock / (x * y), 1), problem.tokens, 64});
  }
  const int64_t tokens_in_block = tokens_first ? y : z, groups_in_block = tokens_first ? z : y;
  params.tokens_spread = {number(tokens_in_block), tokens_first, !tokens_first};
  params.groups_spread = {number(groups_in_block), !tokens_first, tokens_first};
  const int64_t blocks_of_q = parts(groups[0], groups_in_block);
  const int64_t blocks_of_k = kOfBoth<kSource> ? 0 : parts(groups[1], groups_in_block);
  params.first_of_k = number(blocks_of_q);
  // A few sequences that share a table have their tokens in turn: its rows are still in the cache for the next one.
  const int64_t pieces = parts(problem.tokens, tokens_in_block);
  params.sequences_in_turn =
      kSource == Source::tokens && problem.table.batch_stride == 0 && problem.batch <= kMostInTurn;
  params.divisor = divisor(params.sequences_in_turn ? problem.batch : pieces);
  int64_t along_x = problem.batch * pieces, along_z = blocks_of_q + blocks_of_k;
  if (kSource == Source::tokens && !tokens_first && heads[1] > 0 && along_x > kChunk && along_x < INT32_MAX / 4) {
    params.in_chunks = true;
    along_x = kMaxSides * kChunk * parts(along_x, kChunk);
    along_z = std::max(blocks_of_q, blocks_of_k);
  }
  const int64_t along_y = parts(columns, x);
  params.very_few = along_x * along_y * along_z <= kVeryFew;
  const dim3 block(number(x), number(y), number(z));
  const dim3 blocks(number(along_x), number(along_y), number(along_z));
  launch_with_pdl(rotate_kernel<T, kWidth, kApart, kSource, Index>, blocks, block, 0, stream, params);
}

template <typename T, int kWidth, bool kApart, typename Index>
void launch(const Rotation& problem, cudaStream_t stream) {
  if (problem.grid.table == nullptr) return launch<T, kWidth, kApart, Source::tokens, Index>(problem, stream);
  if (problem.grid.in_turn) return launch<T, kWidth, kApart, Source::axes_in_turn, Index>(problem, stream);
  return launch<T, kWidth, kApart, Source::axes, Index>(problem, stream);
}

// Whether every head starts at a multiple of the vector size, and vectors up to the last can be counted in 32 bits.
bool vectors(const Rotation& problem, const void* data, const Strides& strides, int64_t heads, int64_t element) {
  const auto whole = [=](int64_t stride) { return stride * element % kVectorBytes == 0; };
  const int64_t last = (problem.batch - 1) * strides.batch + (problem.tokens - 1) * strides.token +
                       (heads - 1) * strides.head + problem.width;
  return kit::aligned(data) && whole(strides.batch) && whole(strides.token) && whole(strides.head) &&
         last * element / kVectorBytes <= UINT32_MAX;
}

template <typename T>
void launch_typed(const Rotation& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  bool whole =
      problem.half ? problem.pairs % kWidth == 0 && problem.staying() % (2 * kWidth) == 0 : problem.width % kWidth == 0;
  for (const Side& side : problem.sides) {
    if (side.heads == 0) continue;
    whole = whole && vectors(problem, side.from, side.from_strides, side.heads, sizeof(T)) &&
            vectors(problem, side.to, side.to_strides, side.heads, sizeof(T));
  }
  if (!whole) return launch<T, 1, true, uint64_t>(problem, stream);
  return problem.half ? launch<T, kWidth, true, uint32_t>(problem, stream)
                      : launch<T, kWidth, false, uint32_t>(problem, stream);
}

}  // namespace

int rotate(const Rotation& problem, void* stream) {
  return dispatch_dtype(problem.type, [&](auto tag) {
    launch_typed<typename decltype(tag)::Element>(problem, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace rope3d
