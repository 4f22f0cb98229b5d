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
#include <atomic>
#include <iterator>

#include "kit/launch.cuh"
#include "rmsnorm_cuda/device.cuh"
#include "rmsnorm_cuda/rmsnorm.h"

namespace rmsnorm {
namespace {

constexpr int kScalarLoads = 4;  // elements of a thread, of rows that are not read in vectors
constexpr int kRingLoads = 4;    // vectors of a thread, of rows that pass through a ring
constexpr int kRingThreads = 256;
constexpr int kRingSlots = 2;          // of a group; with more, memory is read further ahead than it likes
constexpr int kLeastRingVectors = 96;  // of a row
constexpr int kLeastRingTurns = 3;  // of a group; with fewer rows, the start of the rings takes longer than they save
constexpr int kMostGroups = 15;     // of more than a warp in a block, each of which has one of its 16 barriers

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

// Copies into shared memory that nobody waits for until what they bring is needed. A counter in shared memory knows
// when so many bytes are there, again and again; `turn` is 0 the first time, then 1, then 0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ unsigned shared_address(const void* data) {
  return static_cast<unsigned>(__cvta_generic_to_shared(data));
}
__device__ __forceinline__ void start_counting(uint64_t* counter) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(shared_address(counter))
      : "memory");
}
__device__ __forceinline__ void expect_bytes(uint64_t* counter, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(counter)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, uint64_t* counter) {
  // What is read here is not read again soon, and need not stay in the cache.
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(counter)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void wait_for_bytes(uint64_t* counter, unsigned turn) {
  unsigned there;
  do {
    asm volatile(
        "{\n\t.reg .pred there;\n\tmbarrier.try_wait.parity.shared::cta.b64 there, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, there;\n\t}"
        : "=r"(there)
        : "r"(shared_address(counter)), "r"(turn)
        : "memory");
  } while (there == 0);
}

#endif

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
                                                      const float (&factors)[kWidth], const Slope& slope, bool add,
                                                      const Vector<T, kWidth>& grad_sum, float (&weight_sums)[kWidth]) {
  float results[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float value = decode(x.elements[j]), own = decode(grad.elements[j]);
    weight_sums[j] += own * (value * slope.rstd);
    results[j] = slope.rstd * (own * factors[j] - value * slope.along);
  }
  if (add) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) results[j] += decode(grad_sum.elements[j]);
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
        Vector<T, kWidth> other{};
        if (grad_sum != nullptr) other = load_once<T, kWidth>(grad_sum + column);
        store_once(grad_x + column, gradient(x[i], grad[i], values, slope, grad_sum != nullptr, other, weight_sums[i]));
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

// The rows of each group pass through a ring in shared memory, which copies fill that need no registers while they are
// on their way: so that there are enough of them, and a row waits for none of its three tensors.
//
// For a weight like x, or none.
template <typename T, bool kAdd>
__global__ void __launch_bounds__(kRingThreads, 2) backward_ring_kernel(const __grid_constant__ Arguments arguments) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kWidth = kVectorBytes / sizeof(T);
  __shared__ GroupSums::Scratch scratch;
  __shared__ uint64_t filled[kRingThreads / kWarp * kRingSlots];
  extern __shared__ float4 ring[];
  const int group = arguments.group, groups = blockDim.x / group, index = threadIdx.x / group;
  const int thread = threadIdx.x - index * group, hidden = arguments.hidden;
  const int row_bytes = hidden * static_cast<int>(sizeof(T)), slot_bytes = row_bytes * (kAdd ? 3 : 2);
  GroupSums sum_over_group(scratch, group, index);
  char* const own_ring = reinterpret_cast<char*>(ring) + index * kRingSlots * slot_bytes;
  uint64_t* const own_filled = filled + index * kRingSlots;
  if (thread == 0) {
    for (int slot = 0; slot < kRingSlots; ++slot) start_counting(own_filled + slot);
  }
  __syncthreads();
  wait_for_previous();
  // The last rows come first, as above.
  const int64_t step = static_cast<int64_t>(gridDim.x) * groups;
  const int64_t first = arguments.rows - 1 - static_cast<int64_t>(blockIdx.x) - static_cast<int64_t>(gridDim.x) * index;
  const int count = first < 0 ? 0 : static_cast<int>(first / step) + 1;
  const auto fetch = [&](int number, int slot) {
    const Offsets offsets(arguments, first - step * number);
    char* const to = own_ring + slot * slot_bytes;
    expect_bytes(own_filled + slot, slot_bytes);
    copy_bytes(to, static_cast<const T*>(arguments.x) + offsets.x, row_bytes, own_filled + slot);
    copy_bytes(to + row_bytes, static_cast<const T*>(arguments.grad) + offsets.grad, row_bytes, own_filled + slot);
    if (kAdd) {
      copy_bytes(to + 2 * row_bytes, static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum, row_bytes,
                 own_filled + slot);
    }
  };
  if (thread == 0) {
    for (int slot = 0; slot < kRingSlots && slot < count; ++slot) fetch(slot, slot);
  }
  Factors<T, kWidth> factors[kRingLoads];
#pragma unroll
  for (int i = 0; i < kRingLoads; ++i) {
    const int column = (thread + i * group) * kWidth;
    factors[i].start_plain(arguments.weight, column, arguments.weight.data != nullptr && column < hidden);
  }
  float weight_sums[kRingLoads][kWidth] = {};
  int slot = 0;
  unsigned turn = 0;
  for (int number = 0; number < count; ++number) {
    const T* const x = reinterpret_cast<const T*>(own_ring + slot * slot_bytes);
    const T* const grad = x + hidden;
    wait_for_bytes(own_filled + slot, turn);
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kRingLoads; ++i) {
      const int column = (thread + i * group) * kWidth;
      if (column < hidden) {
        factors[i].forget();
        float values[kWidth];
        factors[i].finish_plain(arguments.weight, values);
        add_to_sums(load<T, kWidth>(x + column), load<T, kWidth>(grad + column), values, sums);
      }
    }
    sum_over_group(sums);
    // Now the whole group has done with the row before this one.
    if (thread == 0 && number > 0 && number - 1 + kRingSlots < count) {
      fetch(number - 1 + kRingSlots, slot == 0 ? kRingSlots - 1 : slot - 1);
    }
    const Slope slope(arguments, sums);
    T* const grad_x = static_cast<T*>(arguments.grad_x) + (first - step * number) * hidden;
#pragma unroll
    for (int i = 0; i < kRingLoads; ++i) {
      const int column = (thread + i * group) * kWidth;
      if (column < hidden) {
        factors[i].forget();
        float values[kWidth];
        factors[i].finish_plain(arguments.weight, values);
        Vector<T, kWidth> other{};
        if (kAdd) other = load<T, kWidth>(grad + hidden + column);
        store_once(grad_x + column, gradient(load<T, kWidth>(x + column), load<T, kWidth>(grad + column), values, slope,
                                             kAdd, other, weight_sums[i]));
      }
    }
    if (++slot == kRingSlots) {
      slot = 0;
      turn ^= 1;
    }
  }
  let_next_begin();
  if (arguments.partial == nullptr) return;
  __syncthreads();
  // In the order in which neighbouring threads meet no bank twice.
  constexpr int kParts = kWidth / 4;
#pragma unroll
  for (int i = 0; i < kRingLoads; ++i) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float* const sums = weight_sums[i] + part * 4;
      ring[((index * kRingLoads + i) * kParts + part) * group + thread] =
          make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
  }
  __syncthreads();
  float* const partial = arguments.partial + static_cast<int64_t>(blockIdx.x) * hidden;
  const int of_group = kRingLoads * kParts * group;
  for (int number = threadIdx.x; number < of_group; number += blockDim.x) {
    const int row = number / group, column = (number - row * group + row / kParts * group) * kWidth + row % kParts * 4;
    if (column >= hidden) continue;
    float4 sum = ring[number];
    for (int other = 1; other < groups; ++other) {
      const float4 more = ring[other * of_group + number];
      sum.x += more.x;
      sum.y += more.y;
      sum.z += more.z;
      sum.w += more.w;
    }
    *reinterpret_cast<float4*>(partial + column) = sum;
  }
#endif
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
      Vector<T, kWidth> other{};
      if (grad_sum != nullptr) other = load_once<T, kWidth>(grad_sum + column);
      store_once(grad_x + column, gradient(load<T, kWidth>(x + column), load<T, kWidth>(grad + column), values, slope,
                                           grad_sum != nullptr, other, weight_sums));
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

// Bytes of shared memory that each of two blocks of a processor can have for its rings; 0: the device has no such
// copies, or the code that runs on it does not use them.
template <typename T, bool kAdd>
int ring_bytes() {
  constexpr int kDevices = 64, kReserved = 1024;
  static std::atomic<int> known[kDevices];  // one more; 0: not yet known
  const auto kernel = backward_ring_kernel<T, kAdd>;
  int device;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return 0;
  int bytes = known[device].load(std::memory_order_relaxed) - 1;
  if (bytes >= 0) return bytes;
  bytes = 0;
  cudaFuncAttributes attributes;
  int shared;
  if (waits_for_previous(reinterpret_cast<const void*>(kernel)) &&
      cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
      cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) == cudaSuccess) {
    shared = shared / 2 - kReserved - static_cast<int>(attributes.sharedSizeBytes);
    shared -= shared % kVectorBytes;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared) == cudaSuccess)
      bytes = shared;
  }
  known[device].store(bytes + 1, std::memory_order_relaxed);
  return bytes;
}

// How rows are laid over rings; no groups where there are too few rows to fill them, or where the rows do not fit.
Plan ring_plan(int64_t rows, int64_t vectors, int processors) {
  Plan plan{kRingLoads, kWarp, 0, static_cast<unsigned>(2 * processors)};
  if (vectors < kLeastRingVectors || vectors > kRingThreads * kRingLoads) return plan;
  while (plan.group * kRingLoads < vectors) plan.group += kWarp;
  const int groups = kRingThreads / plan.group;
  if (rows >= static_cast<int64_t>(kLeastRingTurns) * groups * plan.blocks) plan.groups = groups;
  return plan;
}

// Whether the rows were laid over rings.
template <typename T, bool kAdd>
bool launch_ring(Arguments& arguments, const Backward& problem, int processors, cudaStream_t stream) {
  if (problem.weight.data != nullptr && problem.weight.type != problem.type) return false;
  const int64_t vectors = problem.hidden * static_cast<int64_t>(sizeof(T)) / kVectorBytes;
  const Plan plan = ring_plan(problem.rows, vectors, processors);
  if (plan.groups == 0) return false;
  const int bytes = plan.groups * static_cast<int>(vectors) * kVectorBytes * (kAdd ? 3 : 2);
  arguments.group = plan.group;
  if (kRingSlots * bytes > ring_bytes<T, kAdd>()) return false;
  launch_early(backward_ring_kernel<T, kAdd>, plan.blocks, static_cast<unsigned>(plan.group * plan.groups),
               static_cast<size_t>(bytes) * kRingSlots, stream, arguments);
  return true;
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
  if (vectors && (problem.grad_sum.data == nullptr ? launch_ring<T, false>(arguments, problem, processors, stream)
                                                   : launch_ring<T, true>(arguments, problem, processors, stream))) {
    return;
  }
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
  const int width = type == Type::float32 ? 4 : 8;
  const bool rings = hidden % width == 0 && ring_plan(rows, hidden / width, processors).groups > 0;
  *parts = rings ? 2 * processors : plan_of(rows, hidden, width, processors).blocks;
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
