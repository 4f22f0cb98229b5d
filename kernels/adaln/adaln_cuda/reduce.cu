// The second stage of sums over rows, on CUDA.
//
// Reads:    the partial sums, which the first stage just left in the L2 cache, each once; scale, weight and bias.
// Writes:   the gradients that are asked for.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// The order of each sum is fixed, so that equal inputs give equal bits. Most of the time is what it takes to begin, so
// that what is done after the first stage has ended is little: a thread asks for all of its parts at once, by addresses
// that are there already. Factors are asked for before: the first stage lets the blocks begin when what was in front of
// it has ended.
#include "adaln_cuda/device.cuh"
#include "adaln_cuda/reduce.cuh"
#include "kit/two_stage_reduction.cuh"

namespace adaln {
namespace {

constexpr int kWidth = kPartialWidth, kAcross = 8,
              kColumns = kAcross * kWidth;    // of a block: threads side by side, each of a vector
constexpr int kFewRows = 16, kManyRows = 64;  // of threads; the latter where there are more groups than the former
constexpr int kRowsOfWarp = kWarp / kAcross;
constexpr int kBatch = 9;  // parts that a thread asks for together: with 132 processors, all of its own

// Gradients that come from the same sums: which of the totals they are, or -1.
struct Family {
  int each;  // one for each group
  int all;   // of all groups
};

struct Families {
  Reduction reduction;
  unsigned blocks_in_a_row;
  Family families[kMostTotals];
};

// An element as it comes, so that nothing waits for it before it is needed, and as float32.
__device__ __forceinline__ uint32_t load_raw(const void* data, Type type, int64_t index) {
  return type == Type::float32 ? static_cast<const uint32_t*>(data)[index] : static_cast<const uint16_t*>(data)[index];
}
__device__ __forceinline__ float decode_raw(uint32_t raw, Type type) {
  if (type == Type::float16) return decode(__ushort_as_half(static_cast<unsigned short>(raw)));
  return __uint_as_float(type == Type::bfloat16 ? raw << 16 : raw);
}

__device__ __forceinline__ void write(const Total& total, int64_t index, float value) {
  if (total.type == Type::float16) {
    static_cast<__half*>(total.data)[index] = encode<__half>(value);
  } else if (total.type == Type::bfloat16) {
    static_cast<__nv_bfloat16*>(total.data)[index] = encode<__nv_bfloat16>(value);
  } else {
    static_cast<float*>(total.data)[index] = value;
  }
}

// A block has some columns of a family: of as many groups as it has rows of threads, or, where there are more and the
// gradient is of all, of so many after another.
__global__ void __launch_bounds__(kAcross* kManyRows, 1) reduce_kernel(const __grid_constant__ Families problem) {
  extern __shared__ float4 memory[];
  const int rows = blockDim.x / kAcross, together = blockDim.x / kColumns;  // groups that are finished at a time
  float (*const of_rows)[kColumns] = reinterpret_cast<float (*)[kColumns]>(memory);
  float (*const of_groups)[kColumns] = of_rows + rows, (*const of_all)[kColumns] = of_groups + rows;
  trigger_next_grid();
  const Reduction& reduction = problem.reduction;
  const Sums& sums = reduction.sums;
  const Family& family = problem.families[blockIdx.y];
  const bool has_each = family.each >= 0, has_all = family.all >= 0;
  const Total &each = reduction.totals[max(family.each, 0)], &all = reduction.totals[max(family.all, 0)];
  const Total& first = has_each ? each : all;
  const int64_t hidden = reduction.hidden;
  const unsigned round = blockIdx.x / problem.blocks_in_a_row;
  if (!has_each && round > 0) return;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x - round * problem.blocks_in_a_row) * kColumns;
  int64_t begin = static_cast<int64_t>(round) * rows;
  int groups = static_cast<int>(min(sums.groups - begin, static_cast<int64_t>(rows)));

  // What a thread reads: parts of a group, which has several rows of threads if there are enough.
  int of_group = rows;
  while (of_group * groups > rows) of_group /= 2;
  const int row = threadIdx.x / kAcross, own_group = row / of_group, first_part = row % of_group;
  const int across = threadIdx.x % kAcross * kWidth, parts = static_cast<int>(sums.parts);
  const int64_t left = hidden - first_column - across;  // columns
  const int64_t part_step = sums.count * hidden;
  int64_t row_step = of_group * part_step;
  const float* from = sums.partial + ((begin + own_group) * parts + first_part) * part_step +
                      first.terms[0].sum * hidden + first_column + across;

  // What it finishes: a column of a group, and of others behind it.
  const int own = threadIdx.x % kColumns, first_group = threadIdx.x / kColumns;
  const int64_t column = first_column + own;
  const auto factor_of = [&](int term) {
    const Parameter& factor = first.terms[term].factor;
    return factor.data != nullptr && column < hidden ? load_raw(factor.data, factor.type, column) : 0u;
  };
  const Modulation& modulation = reduction.scale;
  const bool scaled = has_all && modulation.rows.data != nullptr;
  const auto scale_of = [&](int64_t group) {
    if (!scaled || column >= hidden || group >= sums.groups) return 0u;
    return load_raw(modulation.rows.data, modulation.type, modulation.rows.offset(group) + column);
  };
  const uint32_t factor = factor_of(0);
  uint32_t scale = scale_of(begin + first_group);
  float result = 0.0f;
  asm volatile("" : "+l"(from), "+l"(row_step));  // known before the wait
  grid_wait();

#pragma unroll 1
  for (int term = 0;;) {
    float own_sums[kWidth] = {};
    if (own_group < groups && left > 0) {
      add_partials<kBatch>(from, row_step, first_part, of_group, parts, hidden, left, own_sums);
    }
    // Of a group, the first row of each warp gets the sums over its rows.
#pragma unroll 1
    for (int far = 1; far < kRowsOfWarp && far < of_group; far *= 2) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) own_sums[j] += __shfl_xor_sync(kAllLanes, own_sums[j], far * kAcross);
    }
    memcpy(&of_rows[row][across], own_sums, sizeof(own_sums));
    __syncthreads();
#pragma unroll 1
    for (int group = first_group; group < groups; group += together) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kManyRows; i += kRowsOfWarp) {
        if (i < of_group) sum += of_rows[group * of_group + i][own];
      }
      if (term == 0) {
        of_all[group][own] = scaled ? sum * (1.0f + decode_raw(scale, modulation.type)) : sum;
        scale = scale_of(begin + group + together);
      }
      const Parameter& by = first.terms[term].factor;
      float value = by.data == nullptr ? sum : sum * decode_raw(term == 0 ? factor : factor_of(term), by.type);
      if (term > 0) value += of_groups[group][own];
      if (term + 1 < first.count) {
        of_groups[group][own] = value;
      } else if (has_each && column < hidden) {
        write(each, (begin + group) * hidden + column, value);
      }
    }
    if (++term < first.count) {
      from += (first.terms[term].sum - first.terms[term - 1].sum) * hidden;
      __syncthreads();
      continue;
    }
    if (!has_all) return;
    __syncthreads();
    if (first_group == 0) {
#pragma unroll 4
      for (int group = 0; group < groups; ++group) result += of_all[group][own];
    }
    begin += groups;
    if (has_each || begin >= sums.groups) break;
    term = 0;
    from += groups * parts * part_step;
    groups = static_cast<int>(min(sums.groups - begin, static_cast<int64_t>(groups)));
    scale = scale_of(begin + first_group);
  }
  if (first_group == 0 && column < hidden) write(all, column, result);
}

}  // namespace

cudaError_t reduce(const Reduction& reduction, cudaStream_t stream) {
  if (reduction.count == 0) return cudaSuccess;
  const int64_t groups = reduction.sums.groups;
  const int rows = groups > kFewRows ? kManyRows : kFewRows;
  Families problem{reduction, static_cast<unsigned>((reduction.hidden + kColumns - 1) / kColumns), {}};
  unsigned families = 0;
  for (int i = 0; i < reduction.count; ++i) {
    const Total& total = reduction.totals[i];
    Family* family = nullptr;
    // With more groups than a block has at once, those that are one for each group are finished by more blocks.
    for (unsigned j = 0; j < families && groups <= rows; ++j) {
      Family& other = problem.families[j];
      if (reduction.totals[std::max(other.each, other.all)].terms[0].sum == total.terms[0].sum) family = &other;
    }
    if (family == nullptr) {
      family = &problem.families[families++];
      *family = {-1, -1};
    }
    (total.of_all_groups ? family->all : family->each) = i;
  }
  const auto rounds = static_cast<unsigned>((groups + rows - 1) / rows);
  return launch_with_pdl(reduce_kernel, dim3(problem.blocks_in_a_row * rounds, families), dim3(kAcross * rows),
                         3 * rows * kColumns * sizeof(float), stream, problem);
}

}  // namespace adaln
