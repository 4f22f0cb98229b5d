// RMSNorm, backward, on CUDA.
//
// Reads:    grad, x, grad_sum and the weight, each once from memory: a row stays in registers between its sums and its
//           result. Rows too long for that are read twice. rstd is computed again, from x.
// Writes:   `grad_x`; and, when the gradient of the weight is asked for, `partial` and `grad_weight`.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// The gradient of the weight takes two kernels. The first runs `parts` blocks, at most two on each processor, in which
// several groups of threads take a row each, again and again, and add up what they meet of a column in registers; the
// second adds up what the blocks leave. The order of both is fixed, so that equal inputs give equal bits.
#include <iterator>

#include "kit/launch.cuh"
#include "rmsnorm_cuda/device.cuh"
#include "rmsnorm_cuda/rmsnorm.h"

namespace rmsnorm {
namespace {

constexpr int kScalarLoads = 4;  // elements of a thread, of rows that are not read in vectors
constexpr int kMostGroups = 15;  // of more than a warp in a block, each of which has one of its 16 barriers

struct alignas(64) Arguments {
  const void *x, *grad;
  void* grad_x;
  Weight weight;
  int64_t rows;
  float inverse_of_hidden, eps;
  int hidden;    // of rows that registers hold
  int group;     // threads of a row
  bool strided;  // the rows of one of the three lie in more than one dimension
  int64_t x_stride, grad_stride, grad_sum_stride;
  const void* grad_sum;  // null: there is none
  float* partial;
  int64_t long_hidden;
  Rows x_rows, grad_rows, grad_sum_rows;
};

struct Offsets {
  int64_t x, grad, grad_sum;
  __device__ __forceinline__ Offsets(const Arguments& arguments, int64_t row) {
    x = row * arguments.x_stride;
    grad = row * arguments.grad_stride;
    grad_sum = row * arguments.grad_sum_stride;
    if (arguments.strided) {
      x = arguments.x_rows.offset(row);
      grad = arguments.grad_rows.offset(row);
      grad_sum = arguments.grad_sum_rows.offset(row);
    }
  }
};

// Sums over groups of threads: up to a warp of them, a power of two, or several warps, which then have a barrier of
// their own. All threads of a group call it together, and get the same sums.
class GroupSums {
 public:
  using Scratch = float2[2][kLongBlock / kWarp];

  __device__ __forceinline__ GroupSums(Scratch& scratch, int group, int index)
      : scratch_(scratch), group_(group), index_(index) {}

  __device__ __forceinline__ void operator()(float (&sums)[2]) {
    sum_over_lanes(sums, group_ < kWarp ? group_ : kWarp);
    if (group_ <= kWarp) return;
    const int warps = group_ / kWarp;
    float2* scratch = scratch_[half_];
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = make_float2(sums[0], sums[1]);
    // Barrier 0 is that of the whole block.
    asm volatile("bar.sync %0, %1;" ::"r"(index_ + 1), "r"(group_) : "memory");
    scratch += index_ * warps;
    sums[0] = sums[1] = 0.0f;
    for (int i = 0; i < warps; ++i) {
      sums[0] += scratch[i].x;
      sums[1] += scratch[i].y;
    }
    half_ ^= 1;  // the next call may write while a slow warp still reads
  }

 private:
  Scratch& scratch_;
  int group_, index_, half_ = 0;
};

// What is needed of the elements of a row for their gradient.
struct Slope {
  float rstd, along;
  __device__ __forceinline__ Slope(const Arguments& arguments, const float (&sums)[2]) {
    rstd = reciprocal_norm(sums[0], arguments.inverse_of_hidden, arguments.eps);
    along = rstd * rstd * (sums[1] * arguments.inverse_of_hidden);
  }
};

// Adds to the sums of x^2, and of x * grad * weight.
template <typename T, int kWidth>
__device__ __forceinline__ void add_to_sums(const Vector<T, kWidth>& x, const Vector<T, kWidth>& grad,
                                            const float (&factors)[kWidth], float (&sums)[2]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float value = decode(x.elements[j]);
    sums[0] += value * value;
    sums[1] += value * (decode(grad.elements[j]) * factors[j]);
  }
}

// The gradient of a vector of elements; adds theirs to that of their weights.
template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> gradient(const Vector<T, kWidth>& x, const Vector<T, kWidth>& grad,
                                                      const float (&factors)[kWidth], const Slope& slope,
                                                      const T* grad_sum, float (&weight_sums)[kWidth]) {
  float results[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float value = decode(x.elements[j]), own = decode(grad.elements[j]);
    weight_sums[j] += own * (value * slope.rstd);
    results[j] = slope.rstd * (own * factors[j] - value * slope.along);
  }
  if (grad_sum != nullptr) {
    const auto other = load_once<T, kWidth>(grad_sum);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) results[j] += decode(other.elements[j]);
  }
  return encode_all<T>(results);
}

// The last rows come first: they are what the cache still has, when the forward pass or what made grad has just ended.
template <typename T, int kWidth, int kLoads, int kThreads>
__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ Arguments arguments) {
  __shared__ GroupSums::Scratch scratch;
  extern __shared__ float4 sums_of_block[];
  const int group = arguments.group, groups = blockDim.x / group, index = threadIdx.x / group;
  const int first_column = (threadIdx.x - index * group) * kWidth, step = group * kWidth;
  const int hidden = arguments.hidden;
  GroupSums sum_over_group(scratch, group, index);
  wait_for_previous();
  let_next_begin();
  Factors<T, kWidth> factors[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int column = first_column + i * step;
    if (column < hidden) factors[i].start(arguments.weight, column);
  }
  float weight_sums[kLoads][kWidth] = {};
  for (int64_t base = arguments.rows - 1 - static_cast<int64_t>(blockIdx.x) * groups; base >= 0;
       base -= static_cast<int64_t>(gridDim.x) * groups) {
    const int64_t number = base - index;
    // A thread without a row still takes part in the sums of its warp.
    const int columns = number >= 0 ? hidden : 0;
    const Offsets offsets(arguments, number);
    Vector<T, kWidth> x[kLoads], grad[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * step;
      x[i] = {};
      grad[i] = {};
      if (column < columns) {
        x[i] = load_once<T, kWidth>(static_cast<const T*>(arguments.x) + offsets.x + column);
        grad[i] = load_once<T, kWidth>(static_cast<const T*>(arguments.grad) + offsets.grad + column);
      }
    }
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * step;
      if (column < hidden) {
        factors[i].forget();
        float values[kWidth];
        factors[i].finish(arguments.weight, column, values);
        add_to_sums(x[i], grad[i], values, sums);
      }
    }
    sum_over_group(sums);
    const Slope slope(arguments, sums);
    if (number < 0) continue;
    T* grad_x = static_cast<T*>(arguments.grad_x) + number * hidden;
    const T* grad_sum = static_cast<const T*>(arguments.grad_sum);
    if (grad_sum != nullptr) grad_sum += Offsets(arguments, number).grad_sum;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * step;
      if (column < hidden) {
        forget(x[i]);
        forget(grad[i]);
        factors[i].forget();
        float values[kWidth];
        factors[i].finish(arguments.weight, column, values);
        store_once(grad_x + column, gradient(x[i], grad[i], values, slope,
                                             grad_sum == nullptr ? nullptr : grad_sum + column, weight_sums[i]));
      }
    }
  }
  if (arguments.partial == nullptr) return;
  // The groups add theirs one after another.
  float* const shared = reinterpret_cast<float*>(sums_of_block);
  float* const partial = arguments.partial + static_cast<int64_t>(blockIdx.x) * hidden;
  for (int turn = 0; turn < groups; ++turn) {
    if (turn > 0) __syncthreads();
    if (turn != index) continue;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * step;
      if (column < hidden) {
        if (turn > 0) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) weight_sums[i][j] += shared[column + j];
        }
        if (turn + 1 == groups) {
          store_floats(partial + column, weight_sums[i]);
        } else {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) shared[column + j] = weight_sums[i][j];
        }
      }
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kLongBlock) backward_long_kernel(const __grid_constant__ Arguments arguments) {
  __shared__ GroupSums::Scratch scratch;
  GroupSums sum_over_block(scratch, kLongBlock, 0);
  const int64_t hidden = arguments.long_hidden, step = kLongBlock * kWidth;
  const int64_t first_column = static_cast<int64_t>(threadIdx.x) * kWidth;
  float* partial = arguments.partial == nullptr ? nullptr : arguments.partial + blockIdx.x * hidden;
  wait_for_previous();
  let_next_begin();
  for (int64_t row = blockIdx.x; row < arguments.rows; row += gridDim.x) {
    const Offsets offsets(arguments, row);
    const T* x = static_cast<const T*>(arguments.x) + offsets.x;
    const T* grad = static_cast<const T*>(arguments.grad) + offsets.grad;
    float sums[2] = {0.0f, 0.0f};
    for (int64_t column = first_column; column < hidden; column += step) {
      Factors<T, kWidth> factors;
      factors.start(arguments.weight, column);
      float values[kWidth];
      factors.finish(arguments.weight, column, values);
      add_to_sums(load<T, kWidth>(x + column), load<T, kWidth>(grad + column), values, sums);
    }
    sum_over_block(sums);
    const Slope slope(arguments, sums);
    T* grad_x = static_cast<T*>(arguments.grad_x) + row * hidden;
    const T* grad_sum =
        arguments.grad_sum == nullptr ? nullptr : static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum;
    for (int64_t column = first_column; column < hidden; column += step) {
      Factors<T, kWidth> factors;
      factors.start(arguments.weight, column);
      float values[kWidth], weight_sums[kWidth] = {};
      factors.finish(arguments.weight, column, values);
      // A thread meets the same columns in every row.
      if (partial != nullptr && row != blockIdx.x) load_floats(partial + column, weight_sums);
      store_once(grad_x + column, gradient(load<T, kWidth>(x + column), load<T, kWidth>(grad + column), values, slope,
                                           grad_sum == nullptr ? nullptr : grad_sum + column, weight_sums));
      if (partial != nullptr) store_floats(partial + column, weight_sums);
    }
  }
}

// A block adds up kWarp columns: each warp some of the parts, then one column each.
template <typename W>
__global__ void __launch_bounds__(kWarp* kWarp)
    reduce_kernel(const float* partial, int64_t parts, int64_t hidden, W* out) {
  __shared__ float sums[kWarp][kWarp + 1];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kWarp, column = first_column + lane;
  wait_for_previous();
  let_next_begin();
  float sum = 0.0f;
  if (column < hidden) {
#pragma unroll 8
    for (int64_t part = warp; part < parts; part += kWarp) sum += partial[part * hidden + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  float total[1] = {sums[lane][warp]};
  sum_over_lanes(total, kWarp);
  if (lane == 0 && first_column + warp < hidden) out[first_column + warp] = encode<W>(total[0]);
}

// How rows are laid over threads.
struct Plan {
  int loads;        // vectors of a thread; 0: the row does not fit in registers
  int group;        // threads of a row
  int groups;       // of a block
  unsigned blocks;  // which take rows until there are none
};

// The most threads of a processor whose threads have so many vectors, so that what they have fits in registers.
constexpr int most_threads(int loads) { return loads == 1 ? 1024 : loads == 2 ? 768 : 512; }

// The most vectors of a row of which a thread has so many.
constexpr int most_vectors(int loads) { return loads == 1 ? 64 : loads == 2 ? 384 : 512 * loads; }

Plan plan_of(int64_t rows, int64_t hidden, int width, int processors) {
  const int64_t vectors = (hidden + width - 1) / width;
  Plan plan{0, kLongBlock, 1, 0};
  const int choices[] = {1, 2, 4}, scalar_choices[] = {kScalarLoads};
  for (const int* loads = width > 1 ? std::begin(choices) : std::begin(scalar_choices);
       loads != (width > 1 ? std::end(choices) : std::end(scalar_choices)) && plan.loads == 0; ++loads) {
    if (vectors <= most_vectors(*loads)) plan.loads = *loads;
  }
  int64_t blocks = processors;
  if (plan.loads > 0) {
    const int threads = static_cast<int>((vectors + plan.loads - 1) / plan.loads);
    plan.group = 1;
    // Single elements are read by a warp, together, rather than many by each of a few threads.
    const int lanes = width > 1 ? threads : static_cast<int>(std::min<int64_t>(vectors, kWarp));
    while (plan.group < lanes && plan.group < kWarp) plan.group *= 2;
    if (threads > kWarp) plan.group = (threads + kWarp - 1) / kWarp * kWarp;
    // Two blocks to a processor, so that one works while the other begins or ends; with few rows, rather more blocks
    // than larger ones.
    const int most = most_threads(plan.loads) / plan.group;
    const int each = most > 1 ? most / 2 : 1;
    const int64_t wanted = (rows + 2 * processors - 1) / (2 * processors);
    plan.groups = static_cast<int>(std::min<int64_t>(wanted, plan.group > kWarp ? std::min(each, kMostGroups) : each));
    plan.groups = std::max(plan.groups, kWarp / plan.group);
    if (most > 1) blocks *= 2;
  }
  plan.blocks = static_cast<unsigned>(std::min<int64_t>((rows + plan.groups - 1) / plan.groups, blocks));
  return plan;
}

template <typename T, int kWidth, int kLoads>
void launch_kernel(Arguments& arguments, const Plan& plan, cudaStream_t stream) {
  arguments.group = plan.group;
  const size_t shared = arguments.partial != nullptr && plan.groups > 1 ? arguments.hidden * sizeof(float) : 0;
  launch_early(backward_kernel<T, kWidth, kLoads, most_threads(kLoads)>, plan.blocks,
               static_cast<unsigned>(plan.group * plan.groups), shared, stream, arguments);
}

template <typename T, int kWidth>
void launch(Arguments& arguments, const Plan& plan, cudaStream_t stream) {
  if (plan.loads == 0) {
    launch_early(backward_long_kernel<T, kWidth>, plan.blocks, kLongBlock, 0, stream, arguments);
  } else if constexpr (kWidth == 1) {
    launch_kernel<T, 1, kScalarLoads>(arguments, plan, stream);
  } else if (plan.loads == 1) {
    launch_kernel<T, kWidth, 1>(arguments, plan, stream);
  } else if (plan.loads == 2) {
    launch_kernel<T, kWidth, 2>(arguments, plan, stream);
  } else {
    launch_kernel<T, kWidth, 4>(arguments, plan, stream);
  }
}

Arguments arguments_of(const Backward& problem) {
  Arguments arguments{};
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
void launch_aligned(const Backward& problem, int processors, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.x, sizeof(T)) &&
                       aligned(problem.grad, sizeof(T)) && aligned(problem.grad_sum, sizeof(T)) &&
                       aligned(problem.weight.data) && aligned(problem.grad_x);
  Arguments arguments = arguments_of(problem);
  Plan plan = plan_of(problem.rows, problem.hidden, vectors ? kWidth : 1, processors);
  if (problem.partial != nullptr) plan.blocks = static_cast<unsigned>(problem.parts);
  return vectors ? launch<T, kWidth>(arguments, plan, stream) : launch<T, 1>(arguments, plan, stream);
}

template <typename W>
void launch_reduce(const Backward& problem, cudaStream_t stream) {
  launch_early(reduce_kernel<W>, static_cast<unsigned>((problem.hidden + kWarp - 1) / kWarp), kWarp * kWarp, 0, stream,
               static_cast<const float*>(problem.partial), problem.parts, problem.hidden,
               static_cast<W*>(problem.grad_weight));
}

}  // namespace

int partial_sums(int64_t rows, int64_t hidden, Type type, int64_t* parts) {
  int processors;
  const cudaError_t error = processors_of_device(&processors);
  if (error != cudaSuccess) return error;
  *parts = plan_of(rows, hidden, type == Type::float32 ? 4 : 8, processors).blocks;
  return cudaSuccess;
}

int backward(const Backward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  int processors;
  cudaError_t error = processors_of_device(&processors);
  if (error != cudaSuccess) return error;
  error = with_type(problem.type, [&](auto type) {
    launch_aligned<typename decltype(type)::Element>(problem, processors, cuda_stream);
  });
  if (error != cudaSuccess || problem.partial == nullptr) return error;
  return with_type(problem.weight.type,
                   [&](auto type) { launch_reduce<typename decltype(type)::Element>(problem, cuda_stream); });
}

}  // namespace rmsnorm
