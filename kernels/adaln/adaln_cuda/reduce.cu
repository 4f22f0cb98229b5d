// The second stage of sums over rows.
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
#include <algorithm>

#include "adaln_cuda/device_limits.cuh"
#include "adaln_cuda/reduce.cuh"
#include "kit/two_stage_reduction.cuh"
#include "kit/vectors.cuh"

namespace adaln {
namespace {

// Gradients that come from the same sums: indices of totals, or -1.
struct Family {
  int per_group;    // one row for each group
  int over_groups;  // one row, summed over all groups
};

struct Families {
  Reduction reduction;
  unsigned blocks_per_row;
  Family families[kMaxTotals];
};

// Loads an element without decoding it, so that nothing waits for it before it is used.
__device__ __forceinline__ uint32_t load_raw(const void* data, Type type, int64_t index) {
  return type == Type::float32 ? static_cast<const uint32_t*>(data)[index] : static_cast<const uint16_t*>(data)[index];
}
__device__ __forceinline__ float decode_raw(uint32_t raw, Type type) {
  if (type == Type::float16) return decode(__ushort_as_half(static_cast<unsigned short>(raw)));
  return __uint_as_float(type == Type::bfloat16 ? raw << 16 : raw);
}

// Launch configuration of a row of the table. A block has kColumns columns.
template <int kRow>
struct ReduceTypes {
  static constexpr ReduceConfig kConfig = kReduceTable[kRow];
  static constexpr int kColumnThreads = kConfig.columns, kColumns = kColumnThreads * kPartialWidth;
  static constexpr int kRowsPerWarp = kWarp / kColumnThreads;
  using Row = float[kColumns];
};

// The work of a block: the gradients of a family, and the sums that its threads exchange.
template <int kRow>
struct ReduceBlock {
  using Types = ReduceTypes<kRow>;
  using Row = typename Types::Row;

  const Reduction& reduction;
  const Total &per_group, &over_groups, &total;  // total: the one whose terms are summed
  bool has_per_group, has_over_groups;
  Row *row_sums, *group_sums, *scaled_sums;  // of rows of threads; of groups; of groups, times 1 + scale

  __device__ __forceinline__ ReduceBlock(const Families& problem, const Family& family, Row* memory, int rows)
      : reduction(problem.reduction),
        per_group(reduction.totals[max(family.per_group, 0)]),
        over_groups(reduction.totals[max(family.over_groups, 0)]),
        total(family.per_group >= 0 ? per_group : over_groups),
        has_per_group(family.per_group >= 0),
        has_over_groups(family.over_groups >= 0),
        row_sums(memory),
        group_sums(memory + rows),
        scaled_sums(group_sums + rows) {}
};

// The column that a thread finishes, of one group and of later groups.
template <int kRow>
struct FinishedColumn {
  const ReduceBlock<kRow>& block;
  int in_block, first_group, groups_at_once;  // groups: of those that the block has at a time
  int64_t column;
  bool in_row, scaled;

  __device__ __forceinline__ uint32_t load_factor(int term) const {
    const Parameter& factor = block.total.terms[term].factor;
    return factor.data != nullptr && in_row ? load_raw(factor.data, factor.type, column) : 0u;
  }
  __device__ __forceinline__ uint32_t load_scale(int64_t group) const {
    const Modulation& scale = block.reduction.scale;
    if (!scaled || !in_row || group >= block.reduction.sums.groups) return 0u;
    return load_raw(scale.rows.data, scale.type, scale.rows.offset(group) + column);
  }

  // Adds up a term of groups from `begin` on, and writes their gradients after the last term. `factor` is that of the
  // first term, and `scale` that of the thread's first group.
  __device__ __forceinline__ void finish_groups(int term, int64_t begin, int groups, int rows_per_group,
                                                uint32_t factor, uint32_t& scale) const {
    using Types = ReduceTypes<kRow>;
    const Total& total = block.total;
#pragma unroll 1
    for (int group = first_group; group < groups; group += groups_at_once) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < Types::kConfig.many_rows; i += Types::kRowsPerWarp) {
        if (i < rows_per_group) sum += block.row_sums[group * rows_per_group + i][in_block];
      }
      if (term == 0) {
        block.scaled_sums[group][in_block] =
            scaled ? sum * (1.0f + decode_raw(scale, block.reduction.scale.type)) : sum;
        scale = load_scale(begin + group + groups_at_once);
      }
      const Parameter& by = total.terms[term].factor;
      float value = by.data == nullptr ? sum : sum * decode_raw(term == 0 ? factor : load_factor(term), by.type);
      if (term > 0) value += block.group_sums[group][in_block];
      if (term + 1 < total.count) {
        block.group_sums[group][in_block] = value;
      } else if (block.has_per_group && in_row) {
        store_as(block.per_group.type, block.per_group.data, (begin + group) * block.reduction.hidden + column, value);
      }
    }
  }
};

// The partial sums that a thread reads: some parts of one group, which has several rows of threads if there are enough.
template <int kRow>
struct PartialReader {
  using Types = ReduceTypes<kRow>;

  int rows_per_group, row, group, first_part, column, parts;  // row: of threads; column: in the block
  int64_t hidden, columns_left, row_step;
  const float* from;

  __device__ __forceinline__ PartialReader(const Sums& sums, int64_t hidden, int rows, int groups, int64_t begin,
                                           int64_t first_column, int first_sum)
      : rows_per_group(rows), hidden(hidden) {
    while (rows_per_group * groups > rows) rows_per_group /= 2;
    row = threadIdx.x / Types::kColumnThreads;
    group = row / rows_per_group;
    first_part = row % rows_per_group;
    column = threadIdx.x % Types::kColumnThreads * kPartialWidth;
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
      add_partials<Types::kConfig.batch>(from, row_step, first_part, rows_per_group, parts, hidden, columns_left,
                                         totals);
    }
#pragma unroll 1
    for (int distance = 1; distance < Types::kRowsPerWarp && distance < rows_per_group; distance *= 2) {
#pragma unroll
      for (int j = 0; j < kPartialWidth; ++j) {
        totals[j] += shuffle_xor(totals[j], distance * Types::kColumnThreads);
      }
    }
  }
};

// A block has some columns of a family, and as many groups as it has rows of threads. Where a gradient sums over more
// groups, the block loops over them.
template <int kRow>
__global__ void LAUNCH_BOUNDS(kReduceTable[kRow].columns* kReduceTable[kRow].many_rows, 1)
    reduce_kernel(const __grid_constant__ Families problem) {
  if constexpr (!kInThisCode<kReduceTable, kRow>) return;
  using Types = ReduceTypes<kRow>;
  constexpr int kColumnThreads = Types::kColumnThreads, kColumns = Types::kColumns;
  extern __shared__ float4 memory[];
  const int rows = blockDim.x / kColumnThreads, groups_at_once = blockDim.x / kColumns;
  trigger_next_grid();
  const ReduceBlock<kRow> block(problem, problem.families[blockIdx.y], reinterpret_cast<typename Types::Row*>(memory),
                                rows);
  const Reduction& reduction = problem.reduction;
  const Sums& sums = reduction.sums;
  const int64_t hidden = reduction.hidden;
  const unsigned round = blockIdx.x / problem.blocks_per_row;
  if (!block.has_per_group && round > 0) return;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x - round * problem.blocks_per_row) * kColumns;
  int64_t begin = static_cast<int64_t>(round) * rows;
  int groups = static_cast<int>(min(sums.groups - begin, static_cast<int64_t>(rows)));

  PartialReader<kRow> reader(sums, hidden, rows, groups, begin, first_column, block.total.terms[0].sum);
  const int in_block = threadIdx.x % kColumns, first_group = threadIdx.x / kColumns;
  const int64_t column = first_column + in_block;
  const bool scaled = block.has_over_groups && reduction.scale.rows.data != nullptr;
  const FinishedColumn<kRow> finished{block, in_block, first_group, groups_at_once, column, column < hidden, scaled};
  const uint32_t factor = finished.load_factor(0);
  uint32_t scale = finished.load_scale(begin + first_group);
  float result = 0.0f;
  hide(reader.from, reader.row_step);  // computed before the wait
  grid_wait();

#pragma unroll 1
  for (int term = 0;;) {
    float own_sums[kPartialWidth] = {};
    reader.add_parts(groups, own_sums);
    *reinterpret_cast<float4*>(&block.row_sums[reader.row][reader.column]) =
        make_float4(own_sums[0], own_sums[1], own_sums[2], own_sums[3]);
    __syncthreads();
    finished.finish_groups(term, begin, groups, reader.rows_per_group, factor, scale);
    if (++term < block.total.count) {
      reader.from += (block.total.terms[term].sum - block.total.terms[term - 1].sum) * hidden;
      __syncthreads();
      continue;
    }
    if (!block.has_over_groups) return;
    __syncthreads();
    if (first_group == 0) {
#pragma unroll 4
      for (int group = 0; group < groups; ++group) result += block.scaled_sums[group][in_block];
    }
    begin += groups;
    if (block.has_per_group || begin >= sums.groups) break;
    term = 0;
    reader.from += groups * sums.parts * sums.count * hidden;
    groups = static_cast<int>(min(sums.groups - begin, static_cast<int64_t>(groups)));
    scale = finished.load_scale(begin + first_group);
  }
  if (first_group == 0 && column < hidden) store_as(block.over_groups.type, block.over_groups.data, column, result);
}

// Puts the gradients into families. With more groups than a block has at a time, gradients of each group have families
// of their own, of more blocks.
unsigned find_families(const Reduction& reduction, int rows, Families* problem) {
  unsigned families = 0;
  for (int i = 0; i < reduction.count; ++i) {
    const Total& total = reduction.totals[i];
    Family* family = nullptr;
    for (unsigned j = 0; j < families && reduction.sums.groups <= rows; ++j) {
      Family& other = problem->families[j];
      const Total& other_total = reduction.totals[std::max(other.per_group, other.over_groups)];
      if (other_total.terms[0].sum == total.terms[0].sum) family = &other;
    }
    if (family == nullptr) {
      family = &problem->families[families++];
      *family = {-1, -1};
    }
    (total.over_groups ? family->over_groups : family->per_group) = i;
  }
  return families;
}

template <int kRow>
cudaError_t launch(const Reduction& reduction, cudaStream_t stream) {
  using Types = ReduceTypes<kRow>;
  const int64_t groups = reduction.sums.groups;
  constexpr ReduceConfig kConfig = Types::kConfig;
  int rows = groups > kConfig.few_rows ? kConfig.many_rows : kConfig.few_rows;
  while (rows < kConfig.many_rows && reduction.sums.parts > rows * kConfig.batch) rows *= 2;
  Families problem{reduction, static_cast<unsigned>((reduction.hidden + Types::kColumns - 1) / Types::kColumns), {}};
  const unsigned families = find_families(reduction, rows, &problem);
  const auto rounds = static_cast<unsigned>((groups + rows - 1) / rows);
  return launch_with_pdl(reduce_kernel<kRow>, dim3(problem.blocks_per_row * rounds, families),
                         dim3(Types::kColumnThreads * rows), 3 * rows * sizeof(typename Types::Row), stream, problem);
}

}  // namespace

cudaError_t reduce(const Reduction& reduction, cudaStream_t stream) {
  if (reduction.count == 0) return cudaSuccess;
  // One row for all dtypes: the sums are float32.
  return launch_row<kReduceTable>(find_row(kReduceTable, {compiled_capability(), Type::float32}),
                                  [&](auto row) { return launch<row()>(reduction, stream); });
}

}  // namespace adaln
