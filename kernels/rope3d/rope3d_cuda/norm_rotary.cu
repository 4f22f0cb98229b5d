// RMSNorm with rotary embedding on CUDA: chooses kernels and their launch configuration.
//
// Beyond naive/rope3d.cu, which has no norm: heads stay in registers between norm and rotation, vectorized loads, q and
// k in one launch, PDL, and any layout.
//
// Reads:    device attributes.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Bytes: q and k are read once and written once, and the tables are read once; backward, the gradients are read as
// well. With one float32 entry per element, as LTX-Video has them, the tables are as many bytes as q and k together.
#include <algorithm>

#include "kit/launch.cuh"
#include "kit/two_stage_reduction.cuh"
#include "rope3d_cuda/launch_table.h"
#include "rope3d_cuda/norm_backward.cuh"
#include "rope3d_cuda/norm_forward.cuh"
#include "rope3d_cuda/norm_general.cuh"

namespace rope3d {
namespace {

// The mapping of rows to threads.
struct NormPlan {
  int row = -1;  // of kNormLaunches; -1: the general kernel
  int log2_lanes = 0;
  int64_t groups, columns;  // of a token, and of a row
  int64_t units = 0;
  int64_t threads, blocks;
};

// Whether the fast kernels can read all tensors in vectors.
bool is_norm_vectorizable(const NormRotation& problem, int64_t element_bytes) {
  const Rotation& rotation = problem.rotation;
  const int64_t width = norm_width(rotation.half, static_cast<int>(element_bytes));
  const bool whole = rotation.half ? rotation.pairs % width == 0 && rotation.passthrough() % (2 * width) == 0
                                   : rotation.width % width == 0 && 2 * rotation.pairs % width == 0;
  const Type table = rotation.table.type;
  if (!whole || (table != Type::float32 && table != rotation.type) ||
      !is_table_vectorizable(rotation.table, rotation.pairs, rotation.half ? width : width / 2)) {
    return false;
  }
  for (int i = 0; i < kMaxSides; ++i) {
    const Side& side = rotation.sides[i];
    const SideNorm& norm = problem.norms[i];
    const auto fits = [&](const void* data, const Strides& strides) {
      return is_vectorizable(rotation, data, strides, side.heads, element_bytes, width * element_bytes);
    };
    if (side.heads == 0) continue;
    if (!fits(side.from, side.from_strides) || !fits(side.to, side.to_strides) || !kit::aligned(norm.weight.data) ||
        (norm.x != nullptr && !fits(norm.x, norm.x_strides))) {
      return false;
    }
  }
  return true;
}

int64_t columns_of_head(const Rotation& rotation) {
  const int width = norm_width(rotation.half, static_cast<int>(kit::bytes_of(rotation.type)));
  return rotation.width / (rotation.half ? 2 * width : width);
}

NormPlan plan_norm(const NormRotation& problem, bool backward, int sms) {
  const Rotation& rotation = problem.rotation;
  const int64_t heads = std::max(rotation.sides[0].heads, rotation.sides[1].heads);
  const int64_t all_tokens = rotation.batch * rotation.tokens;
  NormPlan plan;
  if (is_norm_vectorizable(problem, kit::bytes_of(rotation.type))) {
    plan.columns = (problem.per_token ? heads : 1) * columns_of_head(rotation);
    const Variants variants{backward ? Pass::backward : Pass::forward,
                            rotation.half ? ColumnVectors::two : ColumnVectors::one};
    plan.row = find_row(kNormLaunches, {compiled_capability(), rotation.type, variants}, [&](const NormLaunch& launch) {
      const int64_t most = launch.row_per_block ? launch.threads * launch.columns : kWarp;
      plan.groups = problem.per_token ? 1 : ceil_div(heads, launch.heads);
      return (launch.row_per_block || !problem.per_token) && plan.columns <= most &&
             all_tokens * plan.groups <= INT32_MAX;
    });
  }
  if (plan.row >= 0) {
    const NormLaunch& launch = kNormLaunches[plan.row];
    plan.units = all_tokens * plan.groups;
    plan.threads = launch.threads;
    if (launch.row_per_block) {
      plan.threads = ceil_div(ceil_div(plan.columns, launch.columns), kWarp) * kWarp;
      plan.blocks = plan.units;
    } else {
      while ((1 << plan.log2_lanes) < plan.columns) ++plan.log2_lanes;
      plan.blocks = ceil_div(plan.units, plan.threads >> plan.log2_lanes);
    }
    if (backward) {
      plan.blocks = std::min(plan.blocks, sms * std::max<int64_t>(1, launch.threads_per_sm / plan.threads));
    }
  } else {
    const int64_t elements = std::max(problem.row_elements(0), problem.row_elements(1));
    const int64_t rows = all_tokens * (problem.per_token ? 1 : heads);
    plan.threads = std::min<int64_t>(ceil_div(elements, kWarp) * kWarp, kGeneralThreads);
    plan.blocks = std::min<int64_t>(rows, backward ? sms * kGeneralBlocksPerSm : INT32_MAX);
  }
  return plan;
}

NormParams norm_params(const NormRotation& problem, const NormPlan& plan) {
  const Rotation& rotation = problem.rotation;
  const int64_t width = norm_width(rotation.half, static_cast<int>(kit::bytes_of(rotation.type)));
  NormParams params{};
  for (int i = 0; i < kMaxSides; ++i) {
    const Side& side = rotation.sides[i];
    const SideNorm& norm = problem.norms[i];
    params.sides[i] = {tensor_layout<uint32_t>(side.from, side.from_strides, width),
                       tensor_layout<uint32_t>(norm.x, norm.x_strides, width),
                       tensor_layout<uint32_t>(side.to, side.to_strides, width),
                       norm.weight.data,
                       norm.weight.data != nullptr && norm.weight.type != rotation.type,
                       norm.weight.data != nullptr ? problem.offset : 0.0f,
                       static_cast<uint32_t>(side.heads),
                       static_cast<float>(1.0 / static_cast<double>(std::max<int64_t>(problem.row_elements(i), 1))),
                       static_cast<uint32_t>(problem.row_elements(i)),
                       norm.partial};
  }
  const int64_t all_tokens = rotation.batch * rotation.tokens;
  const Strides& strides = rotation.sides[rotation.sides[0].heads == 0].from_strides;
  params.units = static_cast<uint32_t>(plan.units);
  params.groups = static_cast<uint32_t>(plan.groups);
  params.tokens_fastest = plan.groups > 1 && strides.token < strides.head;
  params.by_inner = fast_divisor(params.tokens_fastest ? all_tokens : plan.groups);
  params.by_tokens = fast_divisor(rotation.tokens);
  params.by_columns = fast_divisor(problem.per_token ? columns_of_head(rotation) : INT32_MAX);
  params.row_columns = static_cast<uint32_t>(plan.columns);
  params.log2_lanes = plan.log2_lanes;
  params.prefix = static_cast<uint32_t>(std::min(rotation.prefix, rotation.tokens));
  params.width = static_cast<int>(rotation.width);
  params.pairs = static_cast<int>(rotation.pairs);
  params.passthrough = static_cast<int>(rotation.passthrough());
  params.half = rotation.half;
  params.per_token = problem.per_token;
  params.rounded_before_weight = problem.rounded_before_weight;
  params.eps = problem.eps;
  params.cos = rotation.table.cos;
  params.sin = rotation.table.sin;
  params.table_batch = rotation.table.batch_stride;
  params.table_row = rotation.table.row_stride;
  params.table_second = static_cast<int>(rotation.table.second);
  params.float32_table = rotation.table.type != rotation.type;
  return params;
}

template <typename T, bool kBackward>
void launch_norm(const NormRotation& problem, const NormPlan& plan, cudaStream_t stream) {
  constexpr Variants kVariants{kBackward ? Pass::backward : Pass::forward, ColumnVectors::one, ColumnVectors::two};
  const auto blocks = static_cast<unsigned>(plan.blocks), threads = static_cast<unsigned>(plan.threads);
  if (plan.row < 0) {
    launch_with_pdl(norm_general_kernel<T, kBackward>, dim3(blocks, kMaxSides), threads, 0, stream, problem);
    return;
  }
  const NormParams params = norm_params(problem, plan);
  with_row<kNormLaunches, dtype_bit(kTypeOf<T>), kVariants.bits>(plan.row, [&](auto row) {
    const bool pairs = problem.rotation.table.second == 0;
    if constexpr (kBackward) {
      launch_with_pdl(pairs ? norm_rotate_backward_kernel<T, row(), 1> : norm_rotate_backward_kernel<T, row(), 2>,
                      blocks, threads, 0, stream, params);
    } else {
      launch_with_pdl(pairs ? norm_rotate_kernel<T, row(), 1> : norm_rotate_kernel<T, row(), 2>, blocks, threads, 0,
                      stream, params);
    }
  });
}

void launch_reduction(const NormRotation& problem, cudaStream_t stream) {
  Reductions<kMaxSides> reductions{{}, static_cast<int>(problem.parts)};
  for (int i = 0; i < kMaxSides; ++i) {
    const SideNorm& norm = problem.norms[i];
    reductions.sums[i] = {norm.partial, problem.row_elements(i), norm.grad_weight, norm.weight.type};
  }
  launch_reductions<kReduceAcross, kReduceDown, kReduceBatch>(reductions, stream);
}

}  // namespace

int run(const NormRotation& problem, void* stream) {
  const NormPlan plan = plan_norm(problem, false, 0);
  const cudaError_t error = dispatch_dtype(problem.rotation.type, [&](auto tag) {
    using T = typename decltype(tag)::Element;
    launch_norm<T, false>(problem, plan, static_cast<cudaStream_t>(stream));
  });
  if (error != cudaSuccess || plan.row >= 0) return error;
  Rotation in_place = problem.rotation;
  for (Side& side : in_place.sides) {
    side.from = side.to;
    side.from_strides = side.to_strides;
  }
  return run(in_place, stream);
}

int norm_partial_sums(const NormRotation& problem, int64_t* parts) {
  DeviceProperties device;
  const cudaError_t error = current_device_properties(&device);
  if (error == cudaSuccess) *parts = plan_norm(problem, true, device.sms).blocks;
  return error;
}

int norm_rotate_backward(const NormRotation& problem, void* stream) {
  DeviceProperties device;
  const cudaError_t error = current_device_properties(&device);
  if (error != cudaSuccess) return error;
  const NormPlan plan = plan_norm(problem, true, device.sms);
  return dispatch_dtype(problem.rotation.type, [&](auto tag) {
    using T = typename decltype(tag)::Element;
    launch_norm<T, true>(problem, plan, static_cast<cudaStream_t>(stream));
    launch_reduction(problem, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace rope3d
