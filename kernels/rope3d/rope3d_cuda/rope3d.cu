// Rotary embedding on CUDA: chooses the launch configuration and launches.
//
// Beyond naive/rope3d.cu: tables of cosines and sines, vectorized loads, q and k in one launch, PDL, and any layout.
//
// Reads:    device attributes.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Bytes: q and k are read once and written once; the tables of a grid, some 10 KB, come from the caches. In bfloat16,
// 13 x 30 x 44 tokens with 16 heads of 128 elements in q and in k move 4 * 17,160 * 16 * 128 * 2 B = 281 MB. A copy of
// as many bytes takes 94.0 us (H100), and this kernel 1 % less.
#include "kit/elements.cuh"
#include "kit/launch.cuh"
#include "rope3d_cuda/launch_plan.h"
#include "rope3d_cuda/launch_table.h"
#include "rope3d_cuda/params.cuh"
#include "rope3d_cuda/rotate_kernel.cuh"

namespace rope3d {
namespace {

// Elements per vector of the general kernel, which takes heads at any alignment: one.
constexpr int kGeneralWidth = 1;

template <typename Index>
void set_tensors(const Rotation& problem, int64_t elements_of_vector, Params<Index>& params) {
  for (int i = 0; i < kMaxSides; ++i) {
    const Side& side = problem.sides[i];
    params.from[i] = tensor_layout<Index>(side.from, side.from_strides, elements_of_vector);
    params.to[i] = tensor_layout<Index>(side.to, side.to_strides, elements_of_vector);
    params.heads[i] = static_cast<uint32_t>(side.heads);
  }
}

template <typename Index>
void set_grid(const Grid& grid, Params<Index>& params) {
  const auto number = [](int64_t value) { return static_cast<int>(value); };
  const Axis(&axes)[kAxes] = grid.axes;
  const int64_t stride = 2 * grid.entries;
  params.grid = {grid.table,
                 fast_divisor(axes[2].size),
                 fast_divisor(axes[1].size),
                 number(stride),
                 number(axes[0].size * stride),
                 number((axes[0].size + axes[1].size) * stride),
                 number(axes[1].begin),
                 number(axes[2].begin),
                 number(axes[1].first),
                 number(axes[2].first)};
}

template <typename Index>
void set_rotation(const Rotation& problem, int64_t columns, Params<Index>& params) {
  params.sequences = static_cast<uint32_t>(problem.batch);
  params.tokens_per_sequence = static_cast<uint32_t>(problem.tokens);
  params.columns = static_cast<uint32_t>(columns);
  params.prefix = static_cast<uint32_t>(problem.prefix);
  params.pairs = static_cast<int>(problem.pairs);
  params.passthrough = static_cast<int>(problem.passthrough());
  params.first_rotated = static_cast<int>(problem.first_rotated);
  params.half = problem.half;
  params.sign = problem.inverse ? -1.0f : 1.0f;
}

template <typename Index>
void set_plan(const LaunchPlan& plan, int64_t sequences, Params<Index>& params) {
  const auto number = [](int64_t value) { return static_cast<uint32_t>(value); };
  for (int i = 0; i < kMaxSides; ++i) params.groups[i] = number(plan.groups[i]);
  params.first_k_block = number(plan.q_blocks);
  params.alternate_sides = plan.alternate_sides;
  params.early_trigger = plan.early_trigger;
  params.interleave_sequences = plan.interleave_sequences;
  params.token_mapping = {number(plan.tokens_per_block), plan.token_major, !plan.token_major};
  params.group_mapping = {number(plan.groups_per_block), !plan.token_major, plan.token_major};
  params.block_divisor = fast_divisor(plan.interleave_sequences ? sequences : plan.blocks_per_sequence);
}

// Lets blocks prefetch their tokens as contiguous pieces while the previous kernel still runs. More than the L2 cache
// holds is certain to come from memory. Smaller inputs may be L2-resident, where the prefetch costs up to 3 % (22 MB).
template <typename Index>
void set_prefetch(const Rotation& problem, int64_t l2_bytes, int64_t element_bytes, bool token_major,
                  Params<Index>& params) {
  const int64_t heads = problem.sides[0].heads + problem.sides[1].heads;
  const int64_t bytes = problem.batch * problem.tokens * heads * problem.width * element_bytes;
  if (bytes <= l2_bytes) return;
  for (int i = 0; i < kMaxSides; ++i) {
    const Side& side = problem.sides[i];
    const int64_t stride = token_major ? side.from_strides.token : side.from_strides.head;
    const int64_t piece = (token_major ? 1 : side.heads) * problem.width * element_bytes;
    params.prefetch_bytes[i] = stride == problem.width ? static_cast<uint32_t>(piece) : 0;
  }
}

template <typename T, int kWidth, int kRow, Source kSource, typename Index>
void launch(const Rotation& problem, const DeviceProperties& device, cudaStream_t stream) {
  constexpr LaunchConfig kConfig = kLaunchTable[kRow];
  constexpr bool kVectorized = std::is_same_v<Index, uint32_t>;
  const int64_t columns = problem.width / (kConfig.is(ColumnVectors::two) ? 2 * kWidth : kWidth);
  const LaunchPlan plan = plan_launch(problem, kConfig, kSource, columns, device.sms);
  Params<Index> params{};
  set_tensors(problem, kVectorized ? kWidth : 1, params);
  set_rotation(problem, columns, params);
  if constexpr (kSource == Source::tokens) {
    const Tokens& table = problem.table;
    params.tokens = {table.cos,         table.sin,    table.batch_stride, table.row_stride,
                     table.pair_stride, table.second, table.type};
    params.vectorized_table =
        is_table_vectorizable(table, problem.pairs, kConfig.is(ColumnVectors::two) ? kWidth : kWidth / 2);
  } else {
    set_grid(problem.grid, params);
  }
  set_plan(plan, problem.batch, params);
  if (kVectorized) set_prefetch(problem, device.l2_bytes, sizeof(T), plan.token_major, params);
  const auto dim = [](const int64_t (&sizes)[3]) {
    return dim3(static_cast<unsigned>(sizes[0]), static_cast<unsigned>(sizes[1]), static_cast<unsigned>(sizes[2]));
  };
  launch_with_pdl(rotate_kernel<T, kWidth, kRow, kSource, Index>, dim(plan.blocks), dim(plan.threads), 0, stream,
                  params);
}

template <typename T, int kWidth, ColumnVectors kVectors, typename Index>
void dispatch_source(const Rotation& problem, const DeviceProperties& device, cudaStream_t stream) {
  const int row = find_row(kLaunchTable, {compiled_capability(), problem.type, kVectors});
  with_row<kLaunchTable, dtype_bit(kTypeOf<T>), Variants(kVectors).bits>(row, [&](auto index) {
    if (problem.grid.table == nullptr)
      return launch<T, kWidth, index(), Source::tokens, Index>(problem, device, stream);
    if (problem.grid.interleaved_axes) {
      return launch<T, kWidth, index(), Source::interleaved_axes, Index>(problem, device, stream);
    }
    return launch<T, kWidth, index(), Source::contiguous_axes, Index>(problem, device, stream);
  });
}

template <typename T>
void launch_typed(const Rotation& problem, const DeviceProperties& device, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  bool vectors = problem.half ? problem.pairs % kWidth == 0 && problem.passthrough() % (2 * kWidth) == 0
                              : problem.width % kWidth == 0;
  for (const Side& side : problem.sides) {
    if (side.heads == 0) continue;
    vectors = vectors && is_vectorizable(problem, side.from, side.from_strides, side.heads, sizeof(T)) &&
              is_vectorizable(problem, side.to, side.to_strides, side.heads, sizeof(T));
  }
  if (!vectors) return dispatch_source<T, kGeneralWidth, ColumnVectors::two, uint64_t>(problem, device, stream);
  return problem.half ? dispatch_source<T, kWidth, ColumnVectors::two, uint32_t>(problem, device, stream)
                      : dispatch_source<T, kWidth, ColumnVectors::one, uint32_t>(problem, device, stream);
}

}  // namespace

int run(const Rotation& problem, void* stream) {
  DeviceProperties device;
  const cudaError_t error = current_device_properties(&device);
  if (error != cudaSuccess) return error;
  return dispatch_dtype(problem.type, [&](auto tag) {
    launch_typed<typename decltype(tag)::Element>(problem, device, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace rope3d
