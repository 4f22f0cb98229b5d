// Rotary embedding on CUDA: chooses the launch configuration and launches.
//
// Reads:    device attributes.
// Must not: allocate, synchronize, or use another stream than the one given.
#include <algorithm>

#include "rope3d_cuda/rope3d.h"
#include "rope3d_cuda/rotate_kernel.cuh"

namespace rope3d {
namespace {

// Fewest threads per block.
constexpr int kBlock = 128;

// With fewer threads a launch does not fill all SMs: then a thread has one head of each tensor, and blocks are smaller.
constexpr int64_t kFew = 65536;
constexpr int kOfFew = 64;

// Threads per block where the stride of a token is smaller than that of a head.
constexpr int kNear = 256;

// Up to so many blocks run beside the next kernel.
constexpr int64_t kVeryFew = 64;

// Bytes of q and k that fit into the L2 cache of every supported GPU of the data center.
constexpr int64_t kFits = int64_t{1} << 24;

// Most sequences that are interleaved: memory is slower the more places are read at a time.
constexpr int64_t kMostInTurn = 4;

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

template <typename T, int kWidth, bool kSplit, Source kSource, typename Index>
void launch(const Rotation& problem, cudaStream_t stream) {
  constexpr int64_t kUnit = std::is_same_v<Index, uint32_t> ? kWidth : 1;
  const int64_t columns = problem.width / (kSplit ? 2 * kWidth : kWidth);
  const int64_t total = problem.batch * problem.tokens;
  const auto parts = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  const auto number = [](int64_t value) { return static_cast<uint32_t>(value); };
  const auto whole = [](int64_t value) { return static_cast<int>(value); };
  constexpr int64_t kEach = kBothSides<kSource> ? 1 : kHeads;
  const int64_t heads[kMaxSides] = {problem.sides[0].heads, problem.sides[1].heads};
  const bool few = total * columns * (heads[0] + heads[1]) / kHeads < kFew;
  int64_t groups[kMaxSides];
  for (int i = 0; i < kMaxSides; ++i) groups[i] = few ? heads[i] : parts(heads[i], kEach);
  if (kBothSides<kSource>) groups[0] = std::max(groups[0], groups[1]);

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
    params.tensors[i] = {side.from,
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
    params.vectorized_table = vectors_of_table(table, problem.pairs, kSplit ? kWidth : kWidth / 2);
  } else {
    const Axis(&axes)[kAxes] = problem.grid.axes;
    const int64_t stride = 2 * problem.grid.entries;
    params.grid = {problem.grid.table,   fast_divisor(axes[2].size),   fast_divisor(axes[1].size),
                   whole(stride),        whole(axes[0].size * stride), whole((axes[0].size + axes[1].size) * stride),
                   whole(axes[1].begin), whole(axes[2].begin),         whole(axes[1].first),
                   whole(axes[2].first)};
  }

  // A block has whole tokens if they are small enough, else about equal parts of them, which run long after one
  // another: memory is read in longer pieces the more of a token a block has.
  const int64_t x = parts(columns, parts(columns, kMaxThreads<kSplit>));
  const auto rows_of_block = [=](int64_t threads) { return std::max<int64_t>(threads / x, 1); };
  const int64_t most = std::max(groups[0], groups[1]);
  const bool tokens_first = problem.sides[0].from_strides.token < problem.sides[0].from_strides.head;
  constexpr int64_t kElement = sizeof(T);
  if (kUnit > 1 && come_from_memory(total * (heads[0] + heads[1]) * problem.width * kElement)) {
    for (int i = 0; i < kMaxSides; ++i) {
      const Strides& strides = problem.sides[i].from_strides;
      const bool adjacent = (tokens_first ? strides.token : strides.head) == problem.width;
      params.prefetch_bytes[i] = adjacent ? number((tokens_first ? 1 : heads[i]) * problem.width * kElement) : 0;
    }
  }
  int64_t y, z;
  if (tokens_first) {
    y = std::min(rows_of_block(few ? kOfFew : kNear), problem.tokens);
    z = 1;
  } else {
    y = parts(most, parts(most, rows_of_block(few ? kOfFew : kMaxThreads<kSplit>)));
    z = std::min<int64_t>({std::max<int64_t>(kBlock / (x * y), 1), problem.tokens, 64});
  }
  const int64_t tokens_in_block = tokens_first ? y : z, groups_in_block = tokens_first ? z : y;
  params.token_mapping = {number(tokens_in_block), tokens_first, !tokens_first};
  params.group_mapping = {number(groups_in_block), !tokens_first, tokens_first};
  const int64_t blocks_of_q = parts(groups[0], groups_in_block);
  const int64_t blocks_of_k = kBothSides<kSource> ? 0 : parts(groups[1], groups_in_block);
  params.first_k_block = number(blocks_of_q);
  // A few sequences that share a table have their tokens in turn: its rows are still in the cache for the next one.
  const int64_t pieces = parts(problem.tokens, tokens_in_block);
  params.interleave_sequences =
      kSource == Source::tokens && problem.table.batch_stride == 0 && problem.batch <= kMostInTurn;
  params.block_divisor = fast_divisor(params.interleave_sequences ? problem.batch : pieces);
  int64_t along_x = problem.batch * pieces, along_z = blocks_of_q + blocks_of_k;
  if (kSource == Source::tokens && !tokens_first && heads[1] > 0 && along_x > kSideBlocks && along_x < INT32_MAX / 4) {
    params.alternate_sides = true;
    along_x = kMaxSides * kSideBlocks * parts(along_x, kSideBlocks);
    along_z = std::max(blocks_of_q, blocks_of_k);
  }
  const int64_t along_y = parts(columns, x);
  params.early_trigger = along_x * along_y * along_z <= kVeryFew;
  const dim3 block(number(x), number(y), number(z));
  const dim3 blocks(number(along_x), number(along_y), number(along_z));
  launch_with_pdl(rotate_kernel<T, kWidth, kSplit, kSource, Index>, blocks, block, 0, stream, params);
}

template <typename T, int kWidth, bool kSplit, typename Index>
void launch(const Rotation& problem, cudaStream_t stream) {
  if (problem.grid.table == nullptr) return launch<T, kWidth, kSplit, Source::tokens, Index>(problem, stream);
  if (problem.grid.in_turn) return launch<T, kWidth, kSplit, Source::interleaved_axes, Index>(problem, stream);
  return launch<T, kWidth, kSplit, Source::contiguous_axes, Index>(problem, stream);
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
