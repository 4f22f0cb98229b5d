// The second stage of sums over rows: from partial sums to the gradients of modulations and parameters.
//
// Beyond naive/adaln.cu, which has no backward pass: all requested sums in one launch, in a fixed order, with PDL.
//
// Reads:    the partial sums, each once, which the first stage has just written, so they are in the L2 cache; scale,
//           weight and bias.
// Writes:   the requested gradients.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// The order of each sum is fixed, so that equal inputs give equal bits. Most of the time of so small a kernel is
// latency after the grid wait: each thread loads all of its parts at once, from addresses computed before. Factors are
// loaded before the wait, too: the first stage triggers this kernel after its own grid wait, so the data that it did
// not write is complete.
#pragma once

#include <algorithm>

#include "adaln_cuda/strided_rows.cuh"
#include "kit/two_stage_reduction.cuh"
#include "kit/vectors.cuh"

namespace adaln {
namespace {

// One of the sums, multiplied column by column.
struct Term {
  int sum;
  Parameter factor;  // data null: 1
};

// A gradient: the sum of its terms.
struct Total {
  void* data;
  Type type;
  bool over_groups;  // of one term, summed over the groups, each times 1 + its scale; else a row for each group
  int count;
  Term terms[2];
};

constexpr int kMaxTotals = 5;

struct Reduction {
  int64_t hidden;
  Sums sums;
  Modulation scale;  // data null: there is none, or it is in the sums already
  int count = 0;
  Total totals[kMaxTotals];

  void add(void* data, Type type, bool over_groups, Term first, Term second = {}, int terms = 1) {
    if (data != nullptr) totals[count++] = {data, type, over_groups, terms, {first, second}};
  }
};

// Loads an element without decoding it, so that nothing waits for it before it is used.
__device__ __forceinline__ uint32_t load_raw(const void* data, Type type, int64_t index) {
  return type == Type::float32 ? static_cast<const uint32_t*>(data)[index] : static_cast<const uint16_t*>(data)[index];
}
__device__ __forceinline__ float decode_raw(uint32_t raw, Type type) {
  if (type == Type::float16) return decode(__ushort_as_half(static_cast<unsigned short>(raw)));
  return __uint_as_float(type == Type::bfloat16 ? raw << 16 : raw);
}

constexpr int kColumns = kReduceAcross * kPartialWidth;  // of a block
constexpr int kRowsPerWarp = kWarp / kReduceAcross;
using SumRow = float[kColumns];

// The column that a thread finishes, of one group and of later groups.
struct FinishedColumn {
  const Reduction& reduction;
  const Total& total;
  SumRow *row_sums, *group_sums;              // of rows of threads; of groups
  int in_block, first_group, groups_at_once;  // groups: of those that the block has at a time
  int64_t column;
  bool in_row, scaled;

  __device__ __forceinline__ uint32_t load_factor(int term) const {
    const Parameter& factor = total.terms[term].factor;
    return factor.data != nullptr && in_row ? load_raw(factor.data, factor.type, column) : 0u;
  }
  __device__ __forceinline__ uint32_t load_scale(int64_t group) const {
    const Modulation& scale = reduction.scale;
    if (!scaled || !in_row || group >= reduction.sums.groups) return 0u;
    return load_raw(scale.rows.data, scale.type, scale.rows.offset(group) + column);
  }

  // Adds up a term of groups from `begin` on. After the last term, writes their gradients, or puts their shares of the
  // sum over groups into `group_sums`. `factor` is that of the first term, and `scale` that of the thread's first
  // group.
  __device__ __forceinline__ void finish_groups(int term, int64_t begin, int groups, int rows_per_group,
                                                uint32_t factor, uint32_t& scale) const {
#pragma unroll 1
    for (int group = first_group; group < groups; group += groups_at_once) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kReduceManyRows; i += kRowsPerWarp) {
        if (i < rows_per_group) sum += row_sums[group * rows_per_group + i][in_block];
      }
      const Parameter& by = total.terms[term].factor;
      float value = by.data == nullptr ? sum : sum * decode_raw(term == 0 ? factor : load_factor(term), by.type);
      if (term > 0) value += group_sums[group][in_block];
      if (scaled) {
        value *= 1.0f + decode_raw(scale, reduction.scale.type);
        scale = load_scale(begin + group + groups_at_once);
      }
      if (term + 1 < total.count || total.over_groups) {
        group_sums[group][in_block] = value;
      } else if (in_row) {
        store_as(total.type, total.data, (begin + group) * reduction.hidden + column, value);
      }
    }
  }
};

// The partial sums that a thread reads: some parts of one group, which has several rows of threads if there are enough.
struct PartialReader {
  int rows_per_group, row, group, first_part, column, parts;  // row: of threads; column: in the block
  int64_t hidden, columns_left, row_step;
  const float* from;

  __device__ __forceinline__ PartialReader(const Sums& sums, int64_t hidden, int rows, int groups, int64_t begin,
                                           int64_t first_column, int first_sum)
      : rows_per_group(rows), hidden(hidden) {
    while (rows_per_group * groups > rows) rows_per_group /= 2;
    row = threadIdx.x / kReduceAcross;
    group = row / rows_per_group;
    first_part = row % rows_per_group;
    column = threadIdx.x % kReduceAcross * kPartialWidth;
    parts = static_cast<int>(sums.parts);
    columns_left = hidden - first_column - column;
    const int64_t part_step = sums.count * hidden;
    row_step = rows_per_group * part_step;
    from =
        sums.partial + ((begin + group) * parts + first_part) * part_step + first_sum * hidden + first_column + column;
  }

  // Adds up this thread's parts if its group is one of `groups`; the first row of each warp gets the sums of the warp's
  // rows.
  __device__ __forceinline__ void add_parts(int groups, float (&totals)[kPartialWidth]) {
    if (group < groups && columns_left > 0) {
      add_partials<kReduceBatch>(from, row_step, first_part, rows_per_group, parts, hidden, columns_left, totals);
    }
#pragma unroll 1
    for (int distance = 1; distance < kRowsPerWarp && distance < rows_per_group; distance *= 2) {
#pragma unroll
      for (int j = 0; j < kPartialWidth; ++j) {
        totals[j] += shuffle_xor(totals[j], distance * kReduceAcross);
      }
    }
  }
};

// A block has some columns of a gradient, and as many groups as it has rows of threads. Where the gradient is a sum
// over more groups, the block loops over them. blockIdx.y: the gradient.
__global__ void LAUNCH_BOUNDS(kReduceAcross* kReduceManyRows, 1)
    reduce_kernel(const __grid_constant__ Reduction reduction, unsigned blocks_per_row) {
  extern __shared__ float4 memory[];
  const int rows = blockDim.x / kReduceAcross, groups_at_once = blockDim.x / kColumns;
  trigger_next_grid();
  const Total& total = reduction.totals[blockIdx.y];
  const Sums& sums = reduction.sums;
  const int64_t hidden = reduction.hidden;
  const unsigned round = blockIdx.x / blocks_per_row;
  if (total.over_groups && round > 0) return;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x - round * blocks_per_row) * kColumns;
  int64_t begin = static_cast<int64_t>(round) * rows;
  int groups = static_cast<int>(min(sums.groups - begin, static_cast<int64_t>(rows)));

  PartialReader reader(sums, hidden, rows, groups, begin, first_column, total.terms[0].sum);
  const int in_block = threadIdx.x % kColumns, first_group = threadIdx.x / kColumns;
  const int64_t column = first_column + in_block;
  const bool scaled = total.over_groups && reduction.scale.rows.data != nullptr;
  auto* const row_sums = reinterpret_cast<SumRow*>(memory);
  auto* const group_sums = row_sums + rows;
  const FinishedColumn finished{reduction,   total,          row_sums, group_sums,      in_block,
                                first_group, groups_at_once, column,   column < hidden, scaled};
  const uint32_t factor = finished.load_factor(0);
  uint32_t scale = finished.load_scale(begin + first_group);
  float result = 0.0f;
  hide(reader.from, reader.row_step);  // computed before the wait
  grid_wait();

  // Two loops in one: over rounds of groups, if the gradient is a sum over groups, and over the terms of a round.
#pragma unroll 1
  for (int term = 0;;) {
    float own_sums[kPartialWidth] = {};
    reader.add_parts(groups, own_sums);
    *reinterpret_cast<float4*>(&row_sums[reader.row][reader.column]) =
        make_float4(own_sums[0], own_sums[1], own_sums[2], own_sums[3]);
    __syncthreads();
    finished.finish_groups(term, begin, groups, reader.rows_per_group, factor, scale);
    if (++term < total.count) {
      reader.from += (total.terms[term].sum - total.terms[term - 1].sum) * hidden;
      __syncthreads();
      continue;
    }
    if (!total.over_groups) return;
    __syncthreads();
    if (first_group == 0) {
#pragma unroll 4
      for (int group = 0; group < groups; ++group) result += group_sums[group][in_block];
    }
    begin += groups;
    if (begin >= sums.groups) break;
    term = 0;
    reader.from += groups * sums.parts * sums.count * hidden;
    groups = static_cast<int>(min(sums.groups - begin, static_cast<int64_t>(groups)));
    scale = finished.load_scale(begin + first_group);
  }
  if (first_group == 0 && column < hidden) store_as(total.type, total.data, column, result);
}

// Launches the second stage. The kernel that writes the partial sums is the preceding one on the stream.
inline cudaError_t reduce(const Reduction& reduction, cudaStream_t stream) {
  if (reduction.count == 0) return cudaSuccess;
  const int64_t groups = reduction.sums.groups;
  int rows = groups > kReduceFewRows ? kReduceManyRows : kReduceFewRows;
  while (rows < kReduceManyRows && reduction.sums.parts > rows * kReduceBatch) rows *= 2;
  const auto blocks_per_row = static_cast<unsigned>((reduction.hidden + kColumns - 1) / kColumns);
  const auto rounds = static_cast<unsigned>((groups + rows - 1) / rows);
  return launch_with_pdl(reduce_kernel, dim3(blocks_per_row * rounds, static_cast<unsigned>(reduction.count)),
                         dim3(kReduceAcross * rows), 2 * rows * sizeof(SumRow), stream, reduction, blocks_per_row);
}

}  // namespace
}  // namespace adaln
