// RMSNorm, forward, on CUDA: chooses a kernel and its launch configuration.
//
// Beyond naive/rmsnorm.cu: rows stay in registers, vectorized loads, PDL, a residual, and rows at any strides.
//
// Reads:    x, the residual and the weight, each once from memory: a row stays in registers between its reduction and
//           its result. Rows too long for that are read twice.
// Writes:   `normed`, and `sum` when there is a residual.
// Must not: allocate, synchronize, or use another stream than the one given.
#include <algorithm>
#include <climits>

#include "rmsnorm_cuda/forward.cuh"
#include "rmsnorm_cuda/launch_table.h"

namespace rmsnorm {
namespace {

struct Grid {
  unsigned blocks, threads, cluster;
};

// Maps rows of `width` vectors to threads, and sets arguments.log2_lanes.
Grid grid_of(const ForwardLaunch& launch, int64_t width, ForwardArguments& arguments) {
  if (launch.row_per_block) {
    arguments.log2_lanes = kWholeBlock;
    const int64_t threads = threads_of_row(launch, width), cluster = (threads + launch.threads - 1) / launch.threads;
    const int64_t warps = (threads + cluster * kWarp - 1) / (cluster * kWarp);
    return {static_cast<unsigned>(arguments.rows * cluster), static_cast<unsigned>(warps * kWarp),
            static_cast<unsigned>(cluster)};
  }
  arguments.log2_lanes = static_cast<uint8_t>(log2_lanes(launch, width));
  const int64_t rows_per_block = launch.threads >> arguments.log2_lanes;
  return {static_cast<unsigned>((arguments.rows + rows_per_block - 1) / rows_per_block),
          static_cast<unsigned>(launch.threads), 1};
}

template <typename T, bool kAdd>
void launch_row(int row, const ForwardArguments& arguments, const Grid& grid, bool aligned, cudaStream_t stream) {
  constexpr unsigned kOther = kAdd ? static_cast<unsigned>(Reads::many) : 0;
  void (*fast)(FastForwardArguments) = nullptr;
  void (*other)(ForwardArguments) = nullptr;
  with_row<kForwardLaunches, dtype_bit(kTypeOf<T>), ~kOther>(row, [&](auto index) {
    constexpr ForwardLaunch kLaunch = kForwardLaunches[index()];
    if constexpr (kLaunch.is(ForwardLayout::general)) {
      other = aligned ? forward_general_kernel<T, kVectorBytes / sizeof(T), kAdd> : forward_general_kernel<T, 1, kAdd>;
    } else if constexpr (kLaunch.is(ForwardLayout::fast)) {
      fast = forward_aligned_kernel<index(), FastForwardArguments, T, kAdd>;
    } else {
      other = forward_aligned_kernel<index(), ForwardArguments, T, kAdd>;
    }
  });
  const dim3 blocks(grid.blocks), cluster(grid.cluster), threads(grid.threads);
  if (fast != nullptr) {
    launch_clusters_with_pdl<FastForwardArguments>(fast, blocks, cluster, threads, 0, stream, arguments);
  } else {
    launch_clusters_with_pdl(other, blocks, cluster, threads, 0, stream, arguments);
  }
}

template <typename T, bool kAdd>
void launch(ForwardArguments& arguments, const Forward& problem, const DeviceProperties& device, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T), kBytes = sizeof(T);
  const bool all_aligned = problem.hidden % kWidth == 0 && aligned(problem.x, kBytes) &&
                           aligned(problem.residual, kBytes) && aligned(problem.weight.data) &&
                           aligned(problem.normed) && aligned(problem.sum);
  const int64_t width = all_aligned ? problem.hidden / kWidth : problem.hidden;
  const int64_t bytes = problem.rows * problem.hidden * kBytes * (kAdd ? 4 : 2);
  const auto find = [&](ForwardLayout layout) {
    const Variants variants{layout, !kAdd && bytes >= kManyBytesPerSm * device.sms ? Reads::many : Reads::other};
    return find_row(kForwardLaunches, {compiled_capability(), problem.type, variants, width}, [&](const auto& launch) {
      return launch.blocks == 1 || width > kBlockWidth || bytes <= kClusterL2 * static_cast<int64_t>(device.l2_bytes);
    });
  };
  int row = all_aligned ? find(arguments.fast ? ForwardLayout::fast : ForwardLayout::aligned) : -1;
  if (row < 0) row = find(ForwardLayout::general);
  const ForwardLaunch& launch = kForwardLaunches[row];
  const Grid grid = grid_of(launch, width, arguments);
  arguments.exceeds_l2 = bytes > launch.l2_multiple * static_cast<int64_t>(device.l2_bytes);
  arguments.prefetch_blocks = arguments.exceeds_l2 ? UINT_MAX : launch.prefetch_blocks_per_sm * device.sms;
  // With a residual, prefetching ahead costs 1 to 3 % on an H100 and gains at most 1 % on an H200.
  if (arguments.exceeds_l2 && !kAdd) {
    const int64_t row_bytes = problem.hidden * kBytes;
    arguments.prefetch_distance =
        device.sms * std::max<int64_t>(launch.prefetch_bytes_per_sm / row_bytes, 1) / grid.cluster;
  }
  launch_row<T, kAdd>(row, arguments, grid, all_aligned, stream);
}

ForwardArguments arguments_of(const Forward& problem) {
  ForwardArguments arguments{};
  arguments.in_place = problem.normed == nullptr;
  arguments.x = problem.x.data;
  arguments.normed = arguments.in_place ? const_cast<void*>(problem.x.data) : problem.normed;
  arguments.weight = problem.weight;
  arguments.rows = problem.rows;
  arguments.x_stride = problem.x.strides[0];
  arguments.hidden = static_cast<int>(problem.hidden);
  arguments.inverse_of_hidden = static_cast<float>(1.0 / static_cast<double>(problem.hidden));
  arguments.eps = problem.eps;
  arguments.float32_results = problem.normed_type != problem.type;
  arguments.rounded_before_weight = problem.rounded_before_weight && problem.weight.data != nullptr;
  arguments.strided = problem.x.dims > 1 || problem.residual.dims > 1;
  arguments.long_hidden = problem.hidden;
  arguments.normed_stride = arguments.in_place ? arguments.x_stride : problem.hidden;
  arguments.sum_stride = arguments.in_place ? problem.residual.strides[0] : problem.hidden;
  arguments.fast = !arguments.strided && !arguments.float32_results &&
                   (problem.weight.data == nullptr || problem.weight.type == problem.type);
  if (arguments.strided) {
    arguments.x_rows = problem.x;
    arguments.residual_rows = problem.residual;
  }
  if (problem.residual.data != nullptr) {
    arguments.residual = problem.residual.data;
    arguments.residual_stride = problem.residual.strides[0];
    arguments.sum = arguments.in_place ? const_cast<void*>(problem.residual.data) : problem.sum;
  }
  return arguments;
}

}  // namespace

int run(const Forward& problem, void* stream) {
  DeviceProperties device;
  const cudaError_t error = current_device_properties(&device);
  if (error != cudaSuccess) return error;
  ForwardArguments arguments = arguments_of(problem);
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    return problem.residual.data == nullptr ? launch<T, false>(arguments, problem, device, cuda_stream)
                                            : launch<T, true>(arguments, problem, device, cuda_stream);
  });
}

}  // namespace rmsnorm
