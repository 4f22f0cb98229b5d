// RMSNorm, forward, on CUDA: chooses a kernel and its launch configuration.
//
// Beyond naive/rmsnorm.cu: rows stay in registers, vectorized loads, PDL, a residual, and rows at any strides.
//
// Reads:    x, the residual and the weight, each once from memory: a row stays in registers between its reduction and
//           its result, and long ones pass through shared memory. Rows too long for that are read twice.
// Writes:   `normed`, and `sum` when there is a residual.
// Must not: allocate, synchronize, or use another stream than the one given.
#include <algorithm>
#include <atomic>
#include <climits>

#include "rmsnorm_cuda/forward_ring.cuh"
#include "rmsnorm_cuda/launch_table.h"

namespace rmsnorm {
namespace {

struct Grid {
  unsigned blocks, threads, cluster = 1;
  int64_t shared_bytes = 0;
  int row = 0;  // of kForwardLaunches
  bool aligned = false;
};

// Returns the warps of a ring kernel's block for its share of a row.
int64_t warps_of(const ForwardLaunch& launch, int64_t vectors) {
  return (vectors + launch.vectors * kWarp - 1) / (launch.vectors * kWarp);
}

// GPCs have 16 or 18 SMs, so that clusters of four or eight blocks leave some idle.
int64_t sms_for(int64_t cluster, int64_t sms) { return cluster > 2 ? sms * 15 / 16 : sms; }

// Returns the fewest blocks that can hold a row of so many vectors.
int64_t cluster_of_many(const ForwardLaunch& launch, int64_t vectors) {
  int64_t cluster = 1;
  while (cluster * launch.threads * launch.vectors < vectors) cluster *= 2;
  return cluster;
}

// Returns the most blocks of a row for which those of all rows run at once, several on an SM, or 0. Their loads,
// exchanges and stores overlap: 140 rows of 18,432 bfloat16 elements take 20 % less time than in turn. With a residual,
// rows that fill five eighths of the clusters are faster in turn: 64 rows of 32,768 elements take 26 % less (H200).
int64_t cluster_of_few(const ForwardLaunch& launch, int64_t rows, int64_t width, int64_t tensors, int64_t sms) {
  const int64_t of_many = cluster_of_many(launch, tensors * width), most = sms_for(of_many, sms) / of_many;
  const int64_t held = (rows + most - 1) / most * most * of_many * launch.threads * launch.vectors;
  if (tensors > 1 && 8 * rows * tensors * width > 5 * held) return 0;
  for (int64_t cluster = 8; cluster > 1; cluster /= 2) {
    const int64_t blocks = kRingWarpsPerSm / warps_of(launch, (width + cluster - 1) / cluster);
    if (blocks > 1 && 16 * rows * cluster <= (16 - cluster / 4) * blocks * sms) return cluster;
  }
  return 0;
}

// Maps rows to the ring kernel's clusters. Of many rows, each has as few blocks as can hold it; with a residual, a
// block then holds half as many vectors.
Grid grid_of_ring(const ForwardLaunch& launch, int64_t width, const DeviceProperties& device,
                  ForwardArguments& arguments) {
  const int64_t rows = arguments.rows, tensors = arguments.residual == nullptr ? 1 : 2;
  int64_t cluster = cluster_of_few(launch, rows, width, tensors, device.sms);
  const bool few = cluster > 0;
  if (!few) cluster = cluster_of_many(launch, tensors * width);
  const int64_t most = few ? rows : sms_for(cluster, device.sms) / cluster;
  const int64_t first = std::min(rows, most), each = (rows + first - 1) / first;
  arguments.first_rows = static_cast<int>(each < 16 ? each : rows * 7 / 8 / first);
  arguments.prefetch_blocks = static_cast<unsigned>(first * cluster);
  const int64_t others = std::max<int64_t>(rows - first * arguments.first_rows, 0);
  const int64_t clusters = first + (others + launch.next_rows - 1) / launch.next_rows;
  const int64_t chunk = (width + cluster - 1) / cluster, stage = tensors * chunk * kVectorBytes;
  // Of two tensors, more threads shorten the latency, as long as the next kernel has SMs of its own.
  const bool spread = tensors == 2 && 2 * rows * cluster <= device.sms;
  const int64_t warps =
      spread ? std::min<int64_t>((chunk + kWarp - 1) / kWarp, launch.threads / kWarp) : warps_of(launch, chunk);
  arguments.chunk = static_cast<int>(chunk);
  // Too much for a second block on the SM, which would take more than its share of the rows.
  const int64_t bytes = few ? stage : std::max<int64_t>(2 * stage, device.shared_bytes_per_sm / 2);
  return {static_cast<unsigned>(clusters * cluster), static_cast<unsigned>(warps * kWarp),
          static_cast<unsigned>(cluster), bytes};
}

// Maps rows of `width` vectors to threads, and sets arguments.log2_lanes.
Grid grid_of_rows(const ForwardLaunch& launch, int64_t width, ForwardArguments& arguments) {
  if (launch.row_per_block) {
    arguments.log2_lanes = kWholeBlock;
    const int64_t warps = (threads_of_row(launch, width) + kWarp - 1) / kWarp;
    return {static_cast<unsigned>(arguments.rows), static_cast<unsigned>(warps * kWarp)};
  }
  arguments.log2_lanes = static_cast<uint8_t>(log2_lanes(launch, width));
  const int64_t rows_per_block = launch.threads >> arguments.log2_lanes;
  return {static_cast<unsigned>((arguments.rows + rows_per_block - 1) / rows_per_block),
          static_cast<unsigned>(launch.threads)};
}

template <typename T, bool kAdd>
void launch(const ForwardArguments& arguments, const Grid& grid, const DeviceProperties& device, cudaStream_t stream) {
  constexpr unsigned kOther = kAdd ? static_cast<unsigned>(Reads::many) : 0;
  void (*fast)(FastForwardArguments) = nullptr;
  void (*other)(ForwardArguments) = nullptr;
  with_row<kForwardLaunches, dtype_bit(kTypeOf<T>), ~kOther>(grid.row, [&](auto index) {
    constexpr ForwardLaunch kLaunch = kForwardLaunches[index()];
    if constexpr (kLaunch.is(ForwardLayout::general)) {
      other =
          grid.aligned ? forward_general_kernel<T, kVectorBytes / sizeof(T), kAdd> : forward_general_kernel<T, 1, kAdd>;
    } else if constexpr (kLaunch.next_rows > 0) {
      fast = forward_ring_kernel<index(), T, kAdd>;
      static std::atomic<uint64_t> known{0};
      allow_shared_memory(fast, device, known);
    } else if constexpr (kLaunch.is(ForwardLayout::fast)) {
      fast = forward_aligned_kernel<index(), FastForwardArguments, T, kAdd>;
    } else {
      other = forward_aligned_kernel<index(), ForwardArguments, T, kAdd>;
    }
  });
  if (fast != nullptr) {
    launch_clusters_with_pdl<FastForwardArguments>(fast, grid.blocks, grid.cluster, grid.threads, grid.shared_bytes,
                                                   stream, arguments);
  } else {
    launch_with_pdl(other, grid.blocks, grid.threads, 0, stream, arguments);
  }
}

// Chooses the launch configuration, and sets the arguments that depend on it.
Grid grid_of(const Forward& problem, const DeviceProperties& device, ForwardArguments& arguments) {
  const bool add = problem.residual.data != nullptr;
  const int element = problem.type == Type::float32 ? 4 : 2, vector = kVectorBytes / element;
  const bool all_aligned = problem.hidden % vector == 0 && aligned(problem.x, element) &&
                           aligned(problem.residual, element) && aligned(problem.weight.data) &&
                           aligned(problem.normed) && aligned(problem.sum);
  const int64_t width = all_aligned ? problem.hidden / vector : problem.hidden;
  const int64_t bytes = problem.rows * problem.hidden * element * (add ? 4 : 2);
  const auto find = [&](ForwardLayout layout) {
    const Variants variants{layout, !add && bytes >= kManyBytesPerSm * device.sms ? Reads::many : Reads::other};
    return find_row(kForwardLaunches, {compiled_capability(), problem.type, variants, width}, [&](const auto& launch) {
      return launch.next_rows == 0 || width > kRegisterWidth ||
             (problem.rows >= device.sms && (!add || cluster_of_few(launch, problem.rows, width, 2, device.sms) > 0));
    });
  };
  int row = all_aligned ? find(arguments.fast ? ForwardLayout::fast : ForwardLayout::aligned) : -1;
  if (row < 0) row = find(ForwardLayout::general);
  const ForwardLaunch& launch = kForwardLaunches[row];
  arguments.exceeds_l2 = bytes > launch.l2_multiple * static_cast<int64_t>(device.l2_bytes);
  arguments.prefetch_blocks = arguments.exceeds_l2 ? UINT_MAX : launch.prefetch_blocks_per_sm * device.sms;
  Grid grid =
      launch.next_rows > 0 ? grid_of_ring(launch, width, device, arguments) : grid_of_rows(launch, width, arguments);
  grid.row = row;
  grid.aligned = all_aligned;
  // With a residual, prefetching ahead costs 1 to 3 % on an H100 and gains at most 1 % on an H200.
  if (arguments.exceeds_l2 && !add && launch.next_rows == 0) {
    const int64_t row_bytes = problem.hidden * element;
    arguments.prefetch_distance = device.sms * std::max<int64_t>(launch.prefetch_bytes_per_sm / row_bytes, 1);
  }
  return grid;
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
  const Grid grid = grid_of(problem, device, arguments);
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    const auto start = problem.residual.data == nullptr ? launch<T, false> : launch<T, true>;
    start(arguments, grid, device, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace rmsnorm
