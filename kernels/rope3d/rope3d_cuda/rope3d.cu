// Rotation on CUDA, of both sides in one launch.
//
// Reads:    the tokens and the tables of a problem, each element of a token once from memory.
// Writes:   the tokens.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Bytes: q and k are read once and written once, and the table of a grid, of a few ten kilobytes, comes from the
// caches. In bfloat16, 13 x 30 x 44 tokens with 16 heads of 128 elements in q and k: 4 * 17,160 * 16 * 128 * 2 = 281
// MB, which a copy of as many bytes moves in 94.7 microseconds on an H100.
//
// A thread has one column of a token, the same in `kHeads` heads, whose vectors it requests all before it uses one.
// What it reads of the tables, and where its token stands on the grid, it finds out once for all of them, while they
// are on their way.
#include <algorithm>

#include "kit/elements.cuh"
#include "kit/launch.cuh"
#include "rope3d_cuda/rope3d.h"

namespace rope3d {
namespace {

using namespace kit;

constexpr int kBlock = 128;

// Heads that a thread has of a column of one vector, and of two.
template <bool kApart>
constexpr int kHeads = kApart ? 2 : 4;

// Division by a number that is not known when the kernel is compiled, of numbers below 2^31, by a multiplication.
class Divisor {
 public:
  explicit Divisor(int64_t number) : value_(static_cast<uint32_t>(number)) {
    while ((uint64_t{1} << shift_) < value_) ++shift_;
    factor_ = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift_) - value_)) / value_ + 1);
  }

  __device__ __forceinline__ uint32_t operator()(uint32_t number, uint32_t& rest) const {
    const uint32_t quotient = (__umulhi(number, factor_) + number) >> shift_;
    rest = number - quotient * value_;
    return quotient;
  }

 private:
  uint32_t value_, factor_, shift_ = 0;
};

// The problem in the numbers that a thread needs, and how the tokens are laid over threads: x counts the columns of a
// head, y the groups of heads, and z tokens, of which a grid has its blocks in x.
struct Layout {
  uint32_t total;  // tokens of all sequences
  uint32_t columns, groups;
  uint32_t heads, all_heads;
  uint32_t prefix;
  int pairs, staying, first_turning, first_staying;
  Divisor by_tokens;
  Divisor by_width, by_height;  // of the grid
  int first_row[kAxes], begin[kAxes], first[kAxes], entries;
  bool table_vectors;  // whether the entries of a column, in a table of tokens, are aligned vectors
};

// Where the elements of a column are in a head, and what they turn by.
template <int kPairs>
struct Column {
  int a, b;  // elements: the first of each pair, and, where they are apart, the second
  float cos[kPairs], sin[kPairs];
  uint32_t staying = 0;  // one bit for each pair
};

// Adds the entries of as many pairs as a column has, as vectors of two.
template <int kPairs>
__device__ __forceinline__ void add_entries(const float* from, Column<kPairs>& column) {
  if constexpr (kPairs == 1) {
    const auto entry = load<float, 2>(from);
    column.cos[0] += entry.elements[0];
    column.sin[0] += entry.elements[1];
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) {
      const auto entries = load<float, 4>(from + 2 * i);
      column.cos[i] += entries.elements[0];
      column.sin[i] += entries.elements[1];
      column.cos[i + 1] += entries.elements[2];
      column.sin[i + 1] += entries.elements[3];
    }
  }
}

// The angles of the pairs from `pair` on, of a token on a grid. For pairs that do not turn, any of the table.
template <int kPairs>
__device__ __forceinline__ void look_up(const Grid& grid, const Layout& layout, uint32_t token, int pair,
                                        Column<kPairs>& column) {
  uint32_t x, y;
  const uint32_t t = layout.by_height(layout.by_width(token, x), y);
  const int stride = 2 * layout.entries;
  // Rows in 32 bits: a table has fewer elements than that.
  const int rows[kAxes] = {static_cast<int>(t) * stride, (layout.first_row[1] + static_cast<int>(y)) * stride,
                           (layout.first_row[2] + static_cast<int>(x)) * stride};
  if (!grid.in_turn) {
    const auto axis_of = [&](int p) { return (p >= layout.begin[1]) + (p >= layout.begin[2]); };
    const int last = axis_of(min(pair + kPairs, layout.pairs) - 1);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) column.cos[i] = column.sin[i] = 0.0f;
#pragma unroll 1
    for (int axis = axis_of(pair); axis <= last; ++axis) {
      const int row = axis == 0 ? rows[0] : axis == 1 ? rows[1] : rows[2];
      const int first = axis == 0 ? layout.first[0] : axis == 1 ? layout.first[1] : layout.first[2];
      add_entries<kPairs>(grid.table + row + 2 * (pair - first), column);
    }
    return;
  }
  // The rows in the order in which the pairs need them, at the entry of the first pair of each.
  const int entry = pair < 0 ? -1 : pair / kAxes;
  const int axis = pair - entry * kAxes;
  int at[kAxes];
#pragma unroll
  for (int i = 0; i < kAxes; ++i) {
    const int own = axis + i < kAxes ? axis + i : axis + i - kAxes;
    at[i] = (own == 0 ? rows[0] : own == 1 ? rows[1] : rows[2]) + 2 * (entry + (axis + i >= kAxes));
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const bool turns = !(column.staying >> i & 1);
    column.cos[i] = 1.0f;
    column.sin[i] = 0.0f;
    if (turns) {
      const auto one = load<float, 2>(grid.table + at[i % kAxes] + 2 * (i / kAxes));
      column.cos[i] = one.elements[0];
      column.sin[i] = one.elements[1];
    }
  }
}

// The entries of a token's row that belong to `count` pairs, or to as many as a column has, which then may be read in
// vectors.
template <typename E, int kPairs>
__device__ __forceinline__ void read_entries(const E* from, int64_t stride, bool vectors, int count,
                                             float (&values)[kPairs]) {
  constexpr int kElements = kPairs * sizeof(E) > kVectorBytes ? kVectorBytes / sizeof(E) : kPairs;
  if (kPairs > 1 && vectors) {
    if (stride == 1) {
#pragma unroll
      for (int i = 0; i < kPairs; i += kElements) {
        const auto vector = load<E, kElements>(from + i);
#pragma unroll
        for (int j = 0; j < kElements; ++j) values[i + j] = decode(vector.elements[j]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kPairs; i += kElements) {
        const auto vector = load<E, kElements>(from + i);
#pragma unroll
        for (int j = 0; j < kElements; j += 2) values[(i + j) / 2] = decode(vector.elements[j]);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) values[i] = i < count ? decode(from[i * stride]) : 0.0f;
}

// The angles of the pairs from `pair` on, of a token with a row of its own.
template <typename E, int kPairs>
__device__ __forceinline__ void look_up(const Tokens& table, const Layout& layout, uint32_t sequence, uint32_t token,
                                        int pair, Column<kPairs>& column) {
  const int64_t at = sequence * table.batch_stride + token * table.row_stride + pair * table.pair_stride;
  const int count = layout.pairs - pair;
  read_entries(static_cast<const E*>(table.cos) + at, table.pair_stride, layout.table_vectors, count, column.cos);
  read_entries(static_cast<const E*>(table.sin) + at, table.pair_stride, layout.table_vectors, count, column.sin);
}

template <typename T>
__device__ __forceinline__ void turn(T& a, T& b, float cos, float sin) {
  const float first = decode(a), second = decode(b);
  a = encode<T>(first * cos - second * sin);
  b = encode<T>(first * sin + second * cos);
}

__device__ __forceinline__ int64_t offset(const Strides& strides, uint32_t sequence, uint32_t token, uint32_t head) {
  return sequence * strides.batch + token * strides.token + head * strides.head;
}

struct Params {
  Side sides[kMaxSides];
  Grid grid;
  Tokens table;
  Layout layout;
  bool half;
  float sign;
};

// kApart: a column is two vectors, with the first and the second elements of as many pairs as they have elements. Else
// it is one vector of whole pairs.
template <typename T, int kWidth, bool kApart>
__global__ void __launch_bounds__(kBlock) rotate_kernel(const __grid_constant__ Params problem) {
  constexpr int kPairs = kApart ? kWidth : kWidth / 2;
  const Layout& layout = problem.layout;
  const uint32_t index = blockIdx.x * blockDim.z + threadIdx.z;
  const uint32_t place = blockIdx.y * blockDim.x + threadIdx.x;
  const uint32_t group = blockIdx.z * blockDim.y + threadIdx.y;
  if (index >= layout.total || place >= layout.columns || group >= layout.groups) return;
  uint32_t token;
  const uint32_t sequence = layout.by_tokens(index, token);

  Column<kPairs> column;
  int pair;
  if constexpr (kApart) {
    // First the columns that turn, then those that stay.
    pair = static_cast<int>(place) * kWidth;
    const int stays = pair - layout.pairs;
    if (stays >= 0) {
      column.a = layout.first_staying + stays;
      column.b = column.a + layout.staying / 2;
    } else {
      column.a = layout.first_turning + (problem.half ? pair : 2 * pair);
      column.b = column.a + (problem.half ? layout.pairs : 1);
    }
  } else {
    column.a = column.b = static_cast<int>(place) * kWidth;
    pair = (column.a - layout.first_turning) / 2;
  }

  Vector<T, kWidth> a[kHeads<kApart>], b[kHeads<kApart>];
#pragma unroll
  for (int i = 0; i < kHeads<kApart>; ++i) {
    const uint32_t head = group + i * layout.groups;
    if (head < layout.all_heads) {
      const bool second = head >= layout.heads;
      const Side& side = problem.sides[second];
      const T* from = static_cast<const T*>(side.from) +
                      offset(side.from_strides, sequence, token, second ? head - layout.heads : head);
      a[i] = load<T, kWidth>(from + column.a);
      if (kApart) b[i] = load<T, kWidth>(from + column.b);
    }
  }
  if (token < layout.prefix) {
    column.staying = ~0u;
  } else if (layout.staying > 0) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) column.staying |= (pair + i < 0 || pair + i >= layout.pairs) << i;
  }
  constexpr uint32_t kAll = (1u << kPairs) - 1;
  if ((column.staying & kAll) != kAll) {
    const uint32_t turning = token - layout.prefix;
    if (problem.grid.table != nullptr) {
      look_up(problem.grid, layout, turning, pair, column);
    } else {
      switch (problem.table.type) {
        case Type::float32:
          look_up<float>(problem.table, layout, sequence, turning, pair, column);
          break;
        case Type::float16:
          look_up<__half>(problem.table, layout, sequence, turning, pair, column);
          break;
        case Type::bfloat16:
          look_up<__nv_bfloat16>(problem.table, layout, sequence, turning, pair, column);
          break;
      }
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) column.sin[j] *= problem.sign;
  }
#pragma unroll
  for (int i = 0; i < kHeads<kApart>; ++i) {
    const uint32_t head = group + i * layout.groups;
    if (head < layout.all_heads) {
      const bool second_side = head >= layout.heads;
      const Side& side = problem.sides[second_side];
      T* to =
          static_cast<T*>(side.to) + offset(side.to_strides, sequence, token, second_side ? head - layout.heads : head);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        T& first = kApart ? a[i].elements[j] : a[i].elements[2 * j];
        T& second = kApart ? b[i].elements[j] : a[i].elements[2 * j + 1];
        if (!(column.staying >> j & 1)) turn(first, second, column.cos[j], column.sin[j]);
      }
      store(to + column.a, a[i]);
      if (kApart) store(to + column.b, b[i]);
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

template <typename T, int kWidth, bool kApart>
void launch(const Rotation& problem, cudaStream_t stream) {
  constexpr int64_t kEach = kHeads<kApart>;
  const int64_t heads = problem.sides[0].heads, all_heads = heads + problem.sides[1].heads;
  const int64_t columns = problem.width / (kApart ? 2 * kWidth : kWidth);
  const int64_t groups = (all_heads + kEach - 1) / kEach;
  const int64_t total = problem.batch * problem.tokens;
  const auto parts = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  // A block has whole heads and whole tokens if they are small enough, else about equal parts of them.
  const int64_t x = parts(columns, parts(columns, kBlock));
  const int64_t y = parts(groups, parts(groups, kBlock / x));
  const int64_t z = std::min<int64_t>({kBlock / (x * y), total, 64});
  const auto number = [](int64_t value) { return static_cast<uint32_t>(value); };
  const auto whole = [](int64_t value) { return static_cast<int>(value); };
  const Axis(&axes)[kAxes] = problem.grid.axes;
  const Params params{{problem.sides[0], problem.sides[1]},
                      problem.grid,
                      problem.table,
                      {number(total),
                       number(columns),
                       number(groups),
                       number(heads),
                       number(all_heads),
                       number(problem.prefix),
                       whole(problem.pairs),
                       whole(problem.staying()),
                       whole(problem.first_turning),
                       whole(problem.first_staying()),
                       Divisor(problem.tokens),
                       Divisor(std::max<int64_t>(axes[2].size, 1)),
                       Divisor(std::max<int64_t>(axes[1].size, 1)),
                       {0, whole(axes[0].size), whole(axes[0].size + axes[1].size)},
                       {0, whole(axes[1].begin), whole(axes[2].begin)},
                       {whole(axes[0].first), whole(axes[1].first), whole(axes[2].first)},
                       whole(problem.grid.entries),
                       vectors_of_table(problem.table, problem.pairs, kApart ? kWidth : kWidth / 2)},
                      problem.half,
                      problem.inverse ? -1.0f : 1.0f};
  const dim3 blocks(number(parts(total, z)), number(parts(columns, x)), number(parts(groups, y)));
  rotate_kernel<T, kWidth, kApart><<<blocks, dim3(number(x), number(y), number(z)), 0, stream>>>(params);
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
  return with_type(problem.type, [&](auto tag) {
    launch_typed<typename decltype(tag)::Element>(problem, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace rope3d
