// RMSNorm, backward, on CUDA: chooses kernels and their launch configuration.
//
// Beyond naive/rmsnorm.cu, which has no backward pass: rows pass through a ring buffer in shared memory, the gradient
// of the weight in two stages without atomics, PDL, and rows at any strides.
//
// Reads:    grad, x, grad_sum and the weight, each once from memory: a row stays in shared memory between its reduction
//           and its result. Rows too long for that are read twice. rstd is computed again, from x.
// Writes:   `grad_x`; and, when the gradient of the weight is requested, `partial` and `grad_weight`.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// The gradient of the weight is a two-stage reduction. The first kernel runs `parts` blocks, one to three per SM; each
// of their groups of threads loops over rows and sums its columns in registers. The second kernel adds up the blocks'
// partial sums, if there are several. The order of both is fixed: equal inputs give equal bits.
#include <algorithm>
#include <atomic>
#include <iterator>

#include "kit/two_stage_reduction.cuh"
#include "rmsnorm_cuda/backward_ring.cuh"
#include "rmsnorm_cuda/launch_table.h"

namespace rmsnorm {
namespace {

constexpr int kNamedBarriers = 15;  // of a block, besides that of __syncthreads; a group of several warps needs one

// The mapping of rows to threads.
struct Grid {
  int row;         // of kBackwardLaunches
  int group;       // threads per row; 0: the general kernel's whole block
  int groups;      // per block
  int64_t blocks;  // each loops over rows until none are left
  int blocks_per_sm;
};

// Bytes of a thread's share of the ring buffer, at most.
int ring_bytes(const BackwardLaunch& launch) {
  constexpr int kTensors = 3;
  return launch.stages * kTensors * launch.held * kVectorBytes;
}

// Returns the number of threads of a group: a power of two up to a warp, else whole warps.
int group_of(int64_t threads) {
  if (threads > kWarp) return static_cast<int>((threads + kWarp - 1) / kWarp * kWarp);
  int group = 1;
  while (group < threads) group *= 2;
  return group;
}

// Two blocks per SM if two have room, so that one works while the other starts or ends; three if two would leave room
// for another group. With few rows, more blocks are preferred to larger ones. `most_threads`: of an SM.
Grid grid_of_groups(int row, int64_t rows, int group, int most_threads, const DeviceProperties& device) {
  const BackwardLaunch& launch = kBackwardLaunches[row];
  const int blocks_per_sm =
      2 * group > most_threads ? 1 : (4 * group > most_threads && 3 * group <= most_threads ? 3 : 2);
  const int threads = most_threads / std::max(blocks_per_sm, 2);
  const int64_t most_blocks = blocks_per_sm * static_cast<int64_t>(device.sms);
  const int most = std::max(1, group > kWarp ? std::min(threads / group, kNamedBarriers) : threads / group);
  const int whole = group < kWarp ? kWarp / group : 1;  // groups that fill a warp
  const auto wanted = static_cast<int>(std::min<int64_t>((rows + most_blocks - 1) / most_blocks, most));
  const bool single_block = rows <= launch.single_block_rows && rows * group <= most_threads;
  const int groups = ((single_block ? static_cast<int>(rows) : wanted) + whole - 1) / whole * whole;
  return {row, group, groups, std::min(most_blocks, (rows + groups - 1) / groups), blocks_per_sm};
}

// The threads that a row of the table has on an SM, and those that a row of `units` needs.
struct Threads {
  int most;
  int64_t wanted;
};

Threads threads_of(const BackwardLaunch& launch, int64_t rows, int64_t units, const DeviceProperties& device) {
  const int share = (device.shared_bytes_per_sm - 2 * kReservedBytes) / ring_bytes(launch);
  const int most = std::min(share / kWarp * kWarp, launch.threads);
  const int min_threads = rows == 1 ? std::min(most, launch.single_row_threads) : launch.min_threads;
  const int64_t wanted =
      std::max<int64_t>((units + launch.units - 1) / launch.units, std::min<int64_t>(units, min_threads));
  return {most, wanted};
}

// For rows of `units` vectors. Without `vectors`, rows are read element by element.
Grid grid_of(int64_t rows, int64_t units, bool vectors, Type type, const DeviceProperties& device) {
  Threads threads{};
  const int row =
      find_row(kBackwardLaunches, {compiled_capability(), type, {}, units}, [&](const BackwardLaunch& launch) {
        if (launch.general) return true;
        threads = threads_of(launch, rows, units, device);
        return vectors && threads.wanted <= threads.most;
      });
  const BackwardLaunch& launch = kBackwardLaunches[row];
  if (!launch.general) {
    const int most_threads = std::min(threads.most, launch.threads_per_sm);
    return grid_of_groups(row, rows, group_of(threads.wanted), most_threads, device);
  }
  const int blocks_per_sm = launch.threads_per_sm / launch.threads;
  return {row, 0, 1, std::min(rows, blocks_per_sm * static_cast<int64_t>(device.sms)), blocks_per_sm};
}

template <int kRow, typename T, bool kFast>
void launch_ring(const BackwardArguments& arguments, const Grid& grid, const DeviceProperties& device,
                 cudaStream_t stream) {
  static std::atomic<uint64_t> known{0};
  const auto kernel = backward_ring_kernel<kRow, T, kFast>;
  const int threads = grid.group * grid.groups;
  allow_shared_memory(kernel, device, known);
  const int bytes = threads * kBackwardLaunches[kRow].held * kVectorBytes;
  const int tensors = arguments.grad_sum != nullptr ? 3 : 2;
  // Too much for one block more on an SM. Else an SM on which the previous kernel ends early would take more than its
  // share, and others would have no block at all: short rows took a third longer.
  const int share = device.shared_bytes_per_sm / (grid.blocks_per_sm + 1);
  launch_with_pdl(kernel, static_cast<unsigned>(grid.blocks), static_cast<unsigned>(threads),
                  static_cast<size_t>(std::max(kBackwardLaunches[kRow].stages * tensors * bytes, share)), stream,
                  arguments);
}

// all_aligned: the rows and the weight are aligned. row_dtype: the weight has the dtype of the rows, or is absent.
template <typename T>
void launch_row(const BackwardArguments& arguments, const Grid& grid, bool all_aligned, bool row_dtype,
                const DeviceProperties& device, cudaStream_t stream) {
  with_row<kBackwardLaunches, dtype_bit(kTypeOf<T>)>(grid.row, [&](auto row) {
    if constexpr (kBackwardLaunches[row()].general) {
      constexpr int kWidth = kVectorBytes / sizeof(T);
      const auto kernel = all_aligned ? backward_general_kernel<T, kWidth> : backward_general_kernel<T, 1>;
      launch_with_pdl(kernel, static_cast<unsigned>(grid.blocks), kMaxBlockThreads, 0, stream, arguments);
    } else {
      const auto launch = all_aligned && row_dtype ? launch_ring<row(), T, true> : launch_ring<row(), T, false>;
      launch(arguments, grid, device, stream);
    }
  });
}

void launch_reduce(const Backward& problem, cudaStream_t stream) {
  constexpr int kLast = static_cast<int>(std::size(kReduceLaunches)) - 1;
  const int row = find_row(kReduceLaunches, {compiled_capability(), problem.type},
                           [&](const ReduceLaunch& launch) { return problem.parts <= launch.down * launch.batch; });
  const Reductions<1> reductions{{{problem.partial, problem.hidden, problem.grad_weight, problem.weight.type}},
                                 static_cast<int>(problem.parts)};
  with_row<kReduceLaunches>(row < 0 ? kLast : row, [&](auto index) {
    constexpr ReduceLaunch kLaunch = kReduceLaunches[index()];
    launch_reductions<kLaunch.across, kLaunch.down, kLaunch.batch>(reductions, stream);
  });
}

BackwardArguments arguments_of(const Backward& problem) {
  BackwardArguments arguments{};
  arguments.x = problem.x.data;
  arguments.grad = problem.grad.data;
  arguments.grad_sum = problem.grad_sum.data;
  arguments.grad_x = problem.grad_x;
  arguments.weight = problem.weight;
  arguments.rows = problem.rows;
  arguments.inverse_of_hidden = static_cast<float>(1.0 / static_cast<double>(problem.hidden));
  arguments.eps = problem.eps;
  arguments.hidden = static_cast<int>(problem.hidden);
  arguments.strided = problem.x.dims > 1 || problem.grad.dims > 1 || problem.grad_sum.dims > 1;
  arguments.x_stride = problem.x.strides[0];
  arguments.grad_stride = problem.grad.strides[0];
  arguments.grad_sum_stride = problem.grad_sum.strides[0];
  arguments.partial = problem.partial;
  arguments.long_hidden = problem.hidden;
  if (arguments.strided) {
    arguments.x_rows = problem.x;
    arguments.grad_rows = problem.grad;
    arguments.grad_sum_rows = problem.grad_sum;
  }
  return arguments;
}

template <typename T>
void launch(const Backward& problem, const DeviceProperties& device, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool aligned_rows = problem.hidden % kWidth == 0 && aligned(problem.x, sizeof(T)) &&
                            aligned(problem.grad, sizeof(T)) && aligned(problem.grad_sum, sizeof(T)) &&
                            aligned(problem.grad_x);
  const bool all_aligned = aligned_rows && aligned(problem.weight.data);
  const bool row_dtype =
      sizeof(T) == sizeof(float) || problem.weight.data == nullptr || problem.weight.type == problem.type;
  Grid grid = grid_of(problem.rows, problem.hidden / kWidth, aligned_rows, problem.type, device);
  if (problem.partial != nullptr) grid.blocks = problem.parts;
  BackwardArguments arguments = arguments_of(problem);
  arguments.group = grid.group;
  if (!kBackwardLaunches[grid.row].general && all_aligned && row_dtype && problem.parts == 1) {
    arguments.grad_weight = problem.grad_weight;
  }
  launch_row<T>(arguments, grid, all_aligned, row_dtype, device, stream);
  if (problem.partial == nullptr || arguments.grad_weight != nullptr) return;
  launch_reduce(problem, stream);
}

}  // namespace

int partial_sums(const Backward& problem, int64_t* parts) {
  DeviceProperties device;
  const cudaError_t error = current_device_properties(&device);
  if (error != cudaSuccess) return error;
  const int width = kVectorBytes / (problem.type == Type::float32 ? 4 : 2);
  *parts = grid_of(problem.rows, problem.hidden / width, problem.hidden % width == 0, problem.type, device).blocks;
  return cudaSuccess;
}

int run(const Backward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  DeviceProperties device;
  const cudaError_t error = current_device_properties(&device);
  if (error != cudaSuccess) return error;
  return dispatch_dtype(problem.type,
                        [&](auto type) { launch<typename decltype(type)::Element>(problem, device, cuda_stream); });
}

}  // namespace rmsnorm
