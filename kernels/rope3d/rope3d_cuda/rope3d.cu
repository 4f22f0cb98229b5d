// Rotation on CUDA, of both sides in one launch.
//
// Reads:    the tokens and the tables of a problem, each element of a token once from memory.
// Writes:   the tokens.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Bytes: q and k are read once and written once, and the tables, of a few ten kilobytes for a grid, come from the
// caches. In bfloat16, 13 x 30 x 44 tokens with 16 heads of 128 elements in q and k: 4 * 17,160 * 16 * 128 * 2 = 281
// MB, which a copy of as many bytes moves in 94.7 microseconds on an H100.
//
// A thread has one column of a token, the same in `kHeads` heads, whose vectors it requests all before it uses one.
// What it reads of the tables, and where its token stands on the grid, it finds out once for all of them, while they
// are on their way.
#include <algorithm>

#include "kit/elements.cuh"
#include "rope3d_cuda/rope3d.h"

namespace rope3d {
namespace {

using namespace kit;

constexpr int kWarp = 32;
constexpr int kBlock = 256;

// Division by a number that is not known when the kernel is compiled, of numbers below 2^31, by a multiplication.
class Divisor {
 public:
  explicit Divisor(uint32_t value) : value_(value) {
    while ((uint64_t{1} << shift_) < value) ++shift_;
    factor_ = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift_) - value)) / value + 1);
  }

  __device__ __forceinline__ uint32_t operator()(uint32_t number, uint32_t& rest) const {
    const uint32_t quotient = (__umulhi(number, factor_) + number) >> shift_;
    rest = number - quotient * value_;
    return quotient;
  }

 private:
  uint32_t value_, factor_, shift_ = 0;
};

// How the tokens are laid over threads. A token takes `units` threads: `columns` of them for each of `groups` heads.
struct Layout {
  uint32_t total;   // tokens of all sequences
  uint32_t units;   // columns * groups
  uint32_t groups;  // a thread has the heads group, group + groups, group + 2 * groups, ...
  uint32_t tokens_in_block;
  Divisor by_units, by_columns, by_chunks, by_tokens;
  Divisor by_rows[kMaxAxes];
};

// Where the elements of a column are in a head, and what they turn by.
template <int kPairs>
struct Column {
  int a, b;  // elements: the first of each pair, and, where they are apart, the second
  float cos[kPairs], sin[kPairs];
  uint32_t staying = 0;  // one bit for each pair
};

template <typename E, int kPairs>
__device__ __forceinline__ void look_up(const Rotation& problem, const int64_t (&rows)[kMaxAxes], int first_pair,
                                        Column<kPairs>& column) {
  const int second_axis = static_cast<int>(problem.tables[0].pairs);
  const int third_axis = second_axis + static_cast<int>(problem.tables[1].pairs);
  const float sign = problem.inverse ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = first_pair + i;
    column.cos[i] = 1.0f;
    column.sin[i] = 0.0f;
    if (pair < 0 || pair >= problem.pairs) {
      column.staying |= 1u << i;
      continue;
    }
    int axis = 0, entry = pair;
    if (problem.axes == kMaxAxes) {
      if (problem.in_turn) {
        entry = pair / kMaxAxes;
        axis = pair - entry * kMaxAxes;
      } else {
        axis = (pair >= second_axis) + (pair >= third_axis);
        entry -= axis == 0 ? 0 : axis == 1 ? second_axis : third_axis;
      }
    }
    const Table& table = problem.tables[axis];
    const int64_t at = (axis == 0 ? rows[0] : axis == 1 ? rows[1] : rows[2]) + entry * table.pair_stride;
    column.cos[i] = decode(static_cast<const E*>(table.cos)[at]);
    column.sin[i] = decode(static_cast<const E*>(table.sin)[at]) * sign;
  }
}

template <int kPairs>
__device__ __forceinline__ void look_up(const Rotation& problem, const Layout& layout, uint32_t sequence,
                                        uint32_t token, int first_pair, Column<kPairs>& column) {
  int64_t rows[kMaxAxes] = {};
  uint32_t rest = token;
#pragma unroll
  for (int axis = kMaxAxes - 1; axis >= 0; --axis) {
    if (axis >= problem.axes) continue;
    uint32_t row;
    rest = layout.by_rows[axis](rest, row);
    rows[axis] = sequence * problem.tables[axis].batch_stride + row * problem.tables[axis].row_stride;
  }
  // All tables have one type.
  switch (problem.tables[0].type) {
    case Type::float32:
      return look_up<float>(problem, rows, first_pair, column);
    case Type::float16:
      return look_up<__half>(problem, rows, first_pair, column);
    case Type::bfloat16:
      return look_up<__nv_bfloat16>(problem, rows, first_pair, column);
  }
}

template <typename T>
__device__ __forceinline__ void turn(T& a, T& b, float cos, float sin, bool staying) {
  const float first = decode(a), second = decode(b);
  if (staying) return;
  a = encode<T>(first * cos - second * sin);
  b = encode<T>(first * sin + second * cos);
}

__device__ __forceinline__ int64_t offset(const Strides& strides, uint32_t sequence, uint32_t token, uint32_t head) {
  return sequence * strides.batch + token * strides.token + head * strides.head;
}

// kApart: a column is two vectors, with the first and the second elements of as many pairs as they have elements. Else
// it is one vector of whole pairs.
template <typename T, int kWidth, bool kApart>
__global__ void __launch_bounds__(kBlock)
    rotate_kernel(const __grid_constant__ Rotation problem, const __grid_constant__ Layout layout) {
  constexpr int kPairs = kApart ? kWidth : kWidth / 2;
  constexpr int kHeads = kApart ? 2 : 4;
  uint32_t chunk, unit, sequence, token, index;
  const uint32_t block = layout.by_chunks(blockIdx.x, chunk);
  index = block * layout.tokens_in_block + layout.by_units(chunk * blockDim.x + threadIdx.x, unit);
  // Beyond the tokens of the block there is one more where the block is a little larger, and beyond the last, none.
  if (index >= layout.total || index >= (block + 1) * layout.tokens_in_block) return;
  sequence = layout.by_tokens(index, token);
  uint32_t place;
  const uint32_t group = layout.by_columns(unit, place);

  Column<kPairs> column;
  int first_pair;
  const int pairs = static_cast<int>(problem.pairs);
  if (kApart) {
    // First the columns that turn, then those that stay.
    const int turning = pairs / kWidth;
    const bool turns = static_cast<int>(place) < turning;
    const int at = (turns ? place : place - turning) * kWidth;
    first_pair = turns ? at : pairs;
    if (!turns) {
      column.a = static_cast<int>(problem.first_staying()) + at;
      column.b = column.a + static_cast<int>(problem.staying() / 2);
    } else {
      column.a = static_cast<int>(problem.first_turning()) + (problem.half ? at : 2 * at);
      column.b = column.a + (problem.half ? pairs : 1);
    }
  } else {
    column.a = column.b = static_cast<int>(place) * kWidth;
    first_pair = (column.a - static_cast<int>(problem.first_turning())) / 2;
  }

  const auto heads = static_cast<uint32_t>(problem.sides[0].heads);
  const auto all_heads = heads + static_cast<uint32_t>(problem.sides[1].heads);
  Vector<T, kWidth> a[kHeads], b[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const uint32_t head = group + i * layout.groups;
    if (head < all_heads) {
      const Side& side = problem.sides[head >= heads];
      const T* from = static_cast<const T*>(side.from) +
                      offset(side.from_strides, sequence, token, head >= heads ? head - heads : head);
      a[i] = load<T, kWidth>(from + column.a);
      if (kApart) b[i] = load<T, kWidth>(from + column.b);
    }
  }
  const auto prefix = static_cast<uint32_t>(problem.prefix);
  if (token < prefix) {
    column.staying = ~0u;
  } else {
    look_up(problem, layout, sequence, token - prefix, first_pair, column);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const uint32_t head = group + i * layout.groups;
    if (head < all_heads) {
      const Side& side = problem.sides[head >= heads];
      T* to = static_cast<T*>(side.to) + offset(side.to_strides, sequence, token, head >= heads ? head - heads : head);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        T& first = kApart ? a[i].elements[j] : a[i].elements[2 * j];
        T& second = kApart ? b[i].elements[j] : a[i].elements[2 * j + 1];
        turn(first, second, column.cos[j], column.sin[j], (column.staying >> j & 1) != 0);
      }
      store(to + column.a, a[i]);
      if (kApart) store(to + column.b, b[i]);
    }
  }
}

template <typename T, int kWidth, bool kApart>
void launch(const Rotation& problem, cudaStream_t stream) {
  constexpr int64_t kHeads = kApart ? 2 : 4;
  const int64_t columns = problem.width / (kApart ? 2 * kWidth : kWidth);
  const int64_t groups = (problem.sides[0].heads + problem.sides[1].heads + kHeads - 1) / kHeads;
  const int64_t total = problem.batch * problem.tokens, units = columns * groups;
  // Several tokens to a block, or several blocks to a token.
  const int64_t tokens_in_block = std::min<int64_t>(std::max<int64_t>(1, kBlock / units), total);
  const int64_t chunks = (units + kBlock - 1) / kBlock;
  const int64_t threads = tokens_in_block > 1 ? tokens_in_block * units : (units + chunks - 1) / chunks;
  const auto number = [](int64_t value) { return static_cast<uint32_t>(value); };
  const auto divisor = [](int64_t value) { return Divisor(static_cast<uint32_t>(value)); };
  const Layout layout{
      number(total),
      number(units),
      number(groups),
      number(tokens_in_block),
      divisor(units),
      divisor(columns),
      divisor(chunks),
      divisor(problem.tokens),
      {divisor(problem.tables[0].rows), divisor(problem.tables[1].rows), divisor(problem.tables[2].rows)}};
  const int64_t blocks = (total + tokens_in_block - 1) / tokens_in_block * chunks;
  rotate_kernel<T, kWidth, kApart>
      <<<number(blocks), number((threads + kWarp - 1) / kWarp * kWarp), 0, stream>>>(problem, layout);
}

// Whether every head starts at a multiple of the vector size.
bool aligned(const void* data, const Strides& strides, int64_t element) {
  const auto whole = [=](int64_t stride) { return stride * element % kVectorBytes == 0; };
  return kit::aligned(data) && whole(strides.batch) && whole(strides.token) && whole(strides.head);
}

template <typename T>
void launch_typed(const Rotation& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  bool vectors =
      problem.half ? problem.pairs % kWidth == 0 && problem.staying() % (2 * kWidth) == 0 : problem.width % kWidth == 0;
  for (const Side& side : problem.sides) {
    if (side.heads == 0) continue;
    vectors =
        vectors && aligned(side.from, side.from_strides, sizeof(T)) && aligned(side.to, side.to_strides, sizeof(T));
  }
  if (!vectors) return launch<T, 1, true>(problem, stream);
  return problem.half ? launch<T, kWidth, true>(problem, stream) : launch<T, kWidth, false>(problem, stream);
}

}  // namespace

int rotate(const Rotation& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (problem.type) {
    case Type::float32:
      launch_typed<float>(problem, cuda_stream);
      break;
    case Type::float16:
      launch_typed<__half>(problem, cuda_stream);
      break;
    case Type::bfloat16:
      launch_typed<__nv_bfloat16>(problem, cuda_stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace rope3d
