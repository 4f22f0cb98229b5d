// RMSNorm, backward, on CUDA.
//
// Reads:    grad, x, grad_sum and the weight, each once from memory: a row stays in shared memory between its sums and
//           its result. Rows too long for that are read twice. rstd is computed again, from x.
// Writes:   `grad_x`; and, when the gradient of the weight is asked for, `partial` and `grad_weight`.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// The gradient of the weight takes two kernels. The first runs `parts` blocks, one to three on each processor, in which
// several groups of threads take a row each, again and again, and add up what they meet of a column in registers; the
// second adds up what the blocks leave, if there are several. The order of both is fixed, so that equal inputs give
// equal bits.
#include <atomic>

#include "kit/launch.cuh"
#include "kit/two_stage_reduction.cuh"
#include "kit/unaligned_rows.cuh"
#include "rmsnorm_cuda/device.cuh"
#include "rmsnorm_cuda/rmsnorm.h"

namespace rmsnorm {
namespace {

constexpr int kScalarLoads = 2;  // elements of a thread, of rows that are not read in vectors
constexpr int kRingLoads = 4;    // vectors of a thread, of rows that pass through a ring
constexpr int kRingSlots = 2;    // of a group; with more, memory is read further ahead than it likes
constexpr int kSlotBytes = kRingLoads * kVectorBytes;    // of a thread and a tensor
constexpr int kRingBytes = kRingSlots * 3 * kSlotBytes;  // of a thread, at most
constexpr int kManyTurns = 8;                            // of a block: more leave time to begin the second kernel
constexpr int kFewRows = 8;                              // which one block may take
constexpr int kEdges = 2;                                // of a row: its part of a vector at either end
constexpr int kReservedBytes = 2048;                     // of shared memory for a block, beside its ring
constexpr int kPairThreads = 256;                        // of a block, of which a processor has two
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
  void* grad_weight;  // not null: like x, and written at once, since there is only one part
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

// Weights from any column, all on their way at once: float32, or like the rows; ones where there are none.
template <typename T, int kWidth>
__device__ __forceinline__ void read_weights(const Weight& weight, int column, bool read, float (&values)[kWidth]) {
  const bool like_rows = sizeof(T) == sizeof(float) || weight.type != Type::float32;
  T some[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    values[i] = 1.0f;
    some[i] = encode<T>(1.0f);
    if (read && like_rows) some[i] = static_cast<const T*>(weight.data)[column + i];
    if (read && !like_rows) values[i] = static_cast<const float*>(weight.data)[column + i];
  }
  if (!like_rows) return;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = decode(some[i]);
}

// The element of a row's edges that a thread takes, and what it has met of it.
struct Edge {
  int column = -1;  // negative: none
  float factor[1] = {}, weight_sum[1] = {};
};

// What the groups of a block have met of each column, added up in their order, in shared memory for a row of each: a
// few of them together first, so that no sum has many terms. Rows lie there as far behind a vector as in memory.
template <typename T, bool kShifted, int kWidth, int kLoads>
__device__ __forceinline__ void write_partial(const Arguments& arguments, float* shared, int index, int first_column,
                                              int step, int end, const float (&weight_sums)[kLoads][kWidth], int shift,
                                              const Edge& edge) {
  constexpr int kEach = kFloats<kWidth>, kTo = kShifted ? 1 : kEach, kTogether = 8;
  const int hidden = arguments.hidden, groups = blockDim.x / arguments.group;
  const int length = kShifted ? (shift + hidden + kEach - 1) / kEach * kEach : hidden;
  float* const own = shared + index * length + (kShifted ? shift : 0);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int column = first_column + i * step;
    if (column >= end) continue;
#pragma unroll
    for (int j = 0; j < kWidth; j += kEach) {
      using Some = Vector<float, kEach>;
      *reinterpret_cast<Some*>(own + column + j) = *reinterpret_cast<const Some*>(&weight_sums[i][j]);
    }
  }
  if (kShifted && edge.column >= 0) own[edge.column] = edge.weight_sum[0];
  __syncthreads();
  float* const partial = arguments.partial + static_cast<int64_t>(blockIdx.x) * hidden;
  const float* const from = shared + (kShifted ? shift : 0);
  for (int column = threadIdx.x * kTo; column < hidden; column += blockDim.x * kTo) {
    float sums[kTo] = {};
    for (int first = 0; first < groups; first += kTogether) {
      float some[kTo] = {};
      for (int group = first; group < first + kTogether && group < groups; ++group) {
        float more[kTo];
        load_floats(from + group * length + column, more);
#pragma unroll
        for (int i = 0; i < kTo; ++i) some[i] += more[i];
      }
#pragma unroll
      for (int i = 0; i < kTo; ++i) sums[i] += some[i];
    }
    if (kTo > 1 && arguments.grad_weight != nullptr) {
      store(static_cast<T*>(arguments.grad_weight) + column, encode_all<T>(sums));
    } else {
      store_floats(partial + column, sums);
    }
  }
}

// For rows that cannot be read in vectors. The last rows come first: they are what the cache still has, when the
// forward pass or what made grad has just ended.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) backward_scalar_kernel(const __grid_constant__ Arguments arguments) {
  __shared__ GroupSums::Scratch scratch;
  extern __shared__ float sums_of_block[];
  const int group = arguments.group, groups = blockDim.x / group, index = threadIdx.x / group;
  const int first_column = threadIdx.x - index * group, hidden = arguments.hidden;
  GroupSums sum_over_group(scratch, group, index);
  grid_wait();
  trigger_next_grid();
  float weight_sums[kScalarLoads][1] = {};
  for (int64_t base = arguments.rows - 1 - static_cast<int64_t>(blockIdx.x) * groups; base >= 0;
       base -= static_cast<int64_t>(gridDim.x) * groups) {
    const int64_t row = base - index;
    // A thread without a row still takes part in the sums of its warp.
    const int columns = row >= 0 ? hidden : 0;
    const Offsets offsets(arguments, row);
    Vector<T, 1> x[kScalarLoads], grad[kScalarLoads];
    float factors[kScalarLoads][1];
#pragma unroll
    for (int i = 0; i < kScalarLoads; ++i) {
      const int column = first_column + i * group;
      if (column < columns) {
        x[i] = load<T, 1>(static_cast<const T*>(arguments.x) + offsets.x + column);
        grad[i] = load<T, 1>(static_cast<const T*>(arguments.grad) + offsets.grad + column);
        Factors<T, 1>::read(arguments.weight, column, factors[i]);
      }
    }
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kScalarLoads; ++i) {
      if (first_column + i * group < columns) add_to_sums(x[i], grad[i], factors[i], sums);
    }
    sum_over_group(sums);
    const Slope slope(arguments, sums);
    T* const grad_x = static_cast<T*>(arguments.grad_x) + row * hidden;
    const bool add = arguments.grad_sum != nullptr;
    const T* const grad_sum = static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum;
#pragma unroll
    for (int i = 0; i < kScalarLoads; ++i) {
      const int column = first_column + i * group;
      if (column < columns) {
        Vector<T, 1> other{};
        if (add) other = load<T, 1>(grad_sum + column);
        store(grad_x + column, gradient(x[i], grad[i], factors[i], slope, add, other, weight_sums[i]));
      }
    }
  }
  if (arguments.partial != nullptr) {
    write_partial<T, false>(arguments, sums_of_block, index, first_column, group, hidden, weight_sums, 0, {});
  }
}

// The rows of each group pass through a ring in shared memory, which copies fill that need no registers while they are
// on their way: so that there are enough of them, and a row waits for none of its tensors. Each thread has its own
// place in it for every vector, and no other reads there.
//
// The last rows come first: they are what the cache still has, when the forward pass or what made grad has just ended.
//
// kPlain: of rows that begin at multiples of a vector, with a weight that does, of their type, or none. Otherwise rows
// may begin anywhere, but those of a block all at the same place of a vector, in all tensors. What is of a vector in
// front of the first whole one and behind the last, its edges, takes a thread an element each.
template <typename T, bool kPlain>
__global__ void __launch_bounds__(kMostThreads) backward_ring_kernel(const __grid_constant__ Arguments arguments) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  __shared__ GroupSums::Scratch scratch;
  extern __shared__ float4 ring[];
  const bool add = arguments.grad_sum != nullptr;
  const int tensors = add ? 3 : 2;
  const int group = arguments.group, groups = blockDim.x / group, index = threadIdx.x / group;
  const int thread = threadIdx.x - index * group, hidden = arguments.hidden;
  const int64_t step = static_cast<int64_t>(gridDim.x) * groups;
  const int64_t first = arguments.rows - 1 - static_cast<int64_t>(blockIdx.x);  // of the block's rows
  int64_t next = first - static_cast<int64_t>(gridDim.x) * index;
  // How far behind a vector rows begin; their elements in front of the first whole vector, and where the last one ends.
  int shift = 0, before = 0, end = hidden;
  Edge edge;
  if constexpr (!kPlain) {
    const auto address = reinterpret_cast<uintptr_t>(static_cast<const T*>(arguments.x) + Offsets(arguments, first).x);
    shift = static_cast<int>(address / sizeof(T) % kWidth);
    before = min((kWidth - shift) % kWidth, hidden);
    end = before + (hidden - before) / kWidth * kWidth;
    if (thread < kWidth) {
      edge.column = thread - shift < before ? thread - shift : -1;
    } else if (thread < kEdges * kWidth) {
      edge.column = end + thread - kWidth < hidden ? end + thread - kWidth : -1;
    }
  }
  const int first_column = before + thread * kWidth, column_step = group * kWidth;
  GroupSums sum_over_group(scratch, group, index);
  float4* own = ring + threadIdx.x;
  const auto place = [&](int tensor, int i) {
    return reinterpret_cast<T*>(own + (tensor * kRingLoads + i) * blockDim.x);
  };
  int slot = 0;
  const auto edges = [&](int tensor) {
    float4* const all = ring + kRingSlots * tensors * kRingLoads * blockDim.x;
    return reinterpret_cast<T*>(all + ((slot * groups + index) * tensors + tensor) * kEdges);
  };
  if (thread == 0 && next >= 0) {
    const Offsets offsets(arguments, next);
    if constexpr (!kPlain) {
      prefetch_row_to_l2(static_cast<const T*>(arguments.x) + offsets.x, hidden);
      prefetch_row_to_l2(static_cast<const T*>(arguments.grad) + offsets.grad, hidden);
      if (add) prefetch_row_to_l2(static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum, hidden);
    } else {
      const int64_t bytes = hidden * sizeof(T);
      prefetch_to_l2(static_cast<const T*>(arguments.x) + offsets.x, bytes);
      prefetch_to_l2(static_cast<const T*>(arguments.grad) + offsets.grad, bytes);
      if (add) prefetch_to_l2(static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum, bytes);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && arguments.weight.data != nullptr) {
    if (!kPlain && arguments.weight.type == Type::float32) {
      prefetch_row_to_l2(static_cast<const float*>(arguments.weight.data), hidden);
    } else {
      prefetch_row_to_l2(static_cast<const T*>(arguments.weight.data), hidden);
    }
  }
  grid_wait();
  Factors<T, kWidth> factors[kRingLoads];
  float whole_factors[kRingLoads][kWidth];
#pragma unroll
  for (int i = 0; i < kRingLoads; ++i) {
    const int column = first_column + i * column_step;
    if constexpr (!kPlain) {
      read_weights<T>(arguments.weight, column, arguments.weight.data != nullptr && column < end, whole_factors[i]);
    } else {
      factors[i].start_plain(arguments.weight, column, arguments.weight.data != nullptr && column < hidden);
    }
  }
  if constexpr (!kPlain) {
    read_weights<T>(arguments.weight, edge.column, arguments.weight.data != nullptr && edge.column >= 0, edge.factor);
    edge.factor[0] += arguments.weight.offset;
  }
  const auto finish = [&](int i, float (&values)[kWidth]) {
    if constexpr (kPlain) {
      factors[i].forget();
      factors[i].finish_plain(arguments.weight, values);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = whole_factors[i][j] + arguments.weight.offset;
    }
  };
  float weight_sums[kRingLoads][kWidth] = {};
  int64_t row = next + step * kRingSlots;
  const int64_t last_turns = arguments.rows > kManyTurns * step ? 2 : 1;
  // All groups take as many turns, the first of which only fill the ring: their warps sum together.
  for (int64_t turn = -kRingSlots; turn * step < arguments.rows; ++turn, row -= step, next -= step) {
    // The second kernel may come beside the last turns. Allowed to come earlier, it costs wide rows up to a tenth, and
    // few turns up to 5%.
    if ((turn + last_turns) * step >= arguments.rows) trigger_next_grid();
    const int columns = turn >= 0 && row >= 0 ? end : 0;
    cp_async_wait<kRingSlots - 1>();
    float sums[2] = {0.0f, 0.0f};
    Vector<T, 1> edge_x, edge_grad, edge_sum{};
    const bool at_edge = !kPlain && turn >= 0 && row >= 0 && edge.column >= 0;
    if (!kPlain) __syncwarp();  // what one thread has copied, others read
    if (at_edge) {
      edge_x = load<T, 1>(edges(0) + thread);
      edge_grad = load<T, 1>(edges(1) + thread);
      if (add) edge_sum = load<T, 1>(edges(2) + thread);
      add_to_sums(edge_x, edge_grad, edge.factor, sums);
    }
#pragma unroll
    for (int i = 0; i < kRingLoads; ++i) {
      const int column = first_column + i * column_step;
      if (column < columns) {
        float values[kWidth];
        finish(i, values);
        add_to_sums(load<T, kWidth>(place(0, i)), load<T, kWidth>(place(1, i)), values, sums);
      }
    }
    if (turn >= 0) sum_over_group(sums);
    const Slope slope(arguments, sums);
    T* const grad_x = static_cast<T*>(arguments.grad_x) + row * hidden;
    if (at_edge) {
      store(grad_x + edge.column, gradient(edge_x, edge_grad, edge.factor, slope, add, edge_sum, edge.weight_sum));
    }
#pragma unroll
    for (int i = 0; i < kRingLoads; ++i) {
      const int column = first_column + i * column_step;
      if (column < columns) {
        float values[kWidth];
        finish(i, values);
        Vector<T, kWidth> other{};
        if (add) other = load<T, kWidth>(place(2, i));
        store(grad_x + column, gradient(load<T, kWidth>(place(0, i)), load<T, kWidth>(place(1, i)), values, slope, add,
                                        other, weight_sums[i]));
      }
    }
    if (!kPlain) __syncwarp();  // before others' edges are written over
    if (next >= 0) {
      const Offsets offsets(arguments, next);
      const T* const x = static_cast<const T*>(arguments.x) + offsets.x + first_column;
      const T* const grad = static_cast<const T*>(arguments.grad) + offsets.grad + first_column;
      const T* const grad_sum = static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum + first_column;
#pragma unroll
      for (int i = 0; i < kRingLoads; ++i) {
        if (first_column + i * column_step < end) {
          cp_async(reinterpret_cast<uint4*>(place(0, i)), x + i * column_step);
          cp_async(reinterpret_cast<uint4*>(place(1, i)), grad + i * column_step);
          if (add) cp_async(reinterpret_cast<uint4*>(place(2, i)), grad_sum + i * column_step);
        }
      }
      if constexpr (!kPlain) {
        const auto bring = [&](int tensor, const T* from) {
          if (next == arguments.rows - 1) {
            // Behind the last row there may be nothing to read.
            if (edge.column >= 0) edges(tensor)[thread] = from[edge.column - first_column];
          } else if (thread < kEdges && (thread == 0 ? before > 0 : end < hidden)) {
            cp_async(reinterpret_cast<uint4*>(edges(tensor) + thread * kWidth),
                     from - first_column + (thread == 0 ? -shift : end));
          }
        };
        bring(0, x);
        bring(1, grad);
        if (add) bring(2, grad_sum);
      }
    }
    cp_async_commit();
    own += tensors * kRingLoads * blockDim.x;
    if (++slot == kRingSlots) {
      slot = 0;
      own = ring + threadIdx.x;
    }
  }
  if (arguments.partial == nullptr) return;
  cp_async_wait<0>();
  write_partial<T, !kPlain>(arguments, reinterpret_cast<float*>(ring), index, first_column, column_step, end,
                            weight_sums, shift, edge);
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kLongBlock) backward_long_kernel(const __grid_constant__ Arguments arguments) {
  __shared__ GroupSums::Scratch scratch;
  GroupSums sum_over_block(scratch, kLongBlock, 0);
  const int64_t hidden = arguments.long_hidden, step = kLongBlock * kWidth;
  const int64_t first_column = static_cast<int64_t>(threadIdx.x) * kWidth;
  float* partial = arguments.partial == nullptr ? nullptr : arguments.partial + blockIdx.x * hidden;
  grid_wait();
  trigger_next_grid();
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
      if (grad_sum != nullptr) other = load<T, kWidth>(grad_sum + column);
      store(grad_x + column, gradient(load<T, kWidth>(x + column), load<T, kWidth>(grad + column), values, slope,
                                      grad_sum != nullptr, other, weight_sums));
      if (partial != nullptr) store_floats(partial + column, weight_sums);
    }
  }
}

constexpr int kReduceAcross = 8, kReduceRows = 32;             // threads of a block, side by side and below each other
constexpr int kReduceColumns = kReduceAcross * kPartialWidth;  // of a block
constexpr int kReduceThreads = kReduceAcross * kReduceRows;
// Parts that a thread asks for together: all of its own, where they come from two blocks on each of 144 processors.
constexpr int kReduceBatch = 9;

// A block adds up some columns: each row of threads some of the parts, then one thread a column. Most of the time is
// what it takes to begin, so that little is done after the first stage has ended.
template <typename W>
__global__ void __launch_bounds__(kReduceThreads, 1)
    reduce_kernel(const float* partial, int64_t parts, int64_t hidden, W* out) {
  __shared__ float of_warps[kReduceThreads / kWarp][kReduceColumns];
  const int across = threadIdx.x % kReduceAcross * kPartialWidth, row = threadIdx.x / kReduceAcross;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kReduceColumns, left = hidden - first_column - across;
  const float* from = partial + row * hidden + first_column + across;
  int64_t step = kReduceRows * hidden;
  trigger_next_grid();
  asm volatile("" : "+l"(from), "+l"(step));  // known before the wait
  grid_wait();
  float sums[kPartialWidth] = {};
  if (left > 0) {
    add_partials<kReduceBatch>(from, step, row, kReduceRows, static_cast<int>(parts), hidden, left, sums);
  }
#pragma unroll
  for (int far = kReduceAcross; far < kWarp; far *= 2) {
#pragma unroll
    for (int j = 0; j < kPartialWidth; ++j) sums[j] += __shfl_xor_sync(kAllLanes, sums[j], far);
  }
  if (threadIdx.x % kWarp < kReduceAcross) memcpy(&of_warps[threadIdx.x / kWarp][across], sums, sizeof(sums));
  __syncthreads();
  if (threadIdx.x >= kReduceColumns || first_column + threadIdx.x >= hidden) return;
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kReduceThreads / kWarp; ++warp) sum += of_warps[warp][threadIdx.x];
  out[first_column + threadIdx.x] = encode<W>(sum);
}

struct Device {
  int number, processors, shared;  // bytes of shared memory of a processor
};

cudaError_t current_device(Device* device) {
  cudaError_t error = cudaGetDevice(&device->number);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device->processors, cudaDevAttrMultiProcessorCount, device->number);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device->shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device->number);
  }
  return error;
}

// How rows are laid over threads.
struct Plan {
  int group;       // threads of a row; 0: it takes a block several turns
  int groups;      // of a block
  int64_t blocks;  // which take rows until there are none
};

// Up to a warp a power of two, and then whole warps.
int group_of(int64_t threads) {
  if (threads > kWarp) return static_cast<int>((threads + kWarp - 1) / kWarp * kWarp);
  int group = 1;
  while (group < threads) group *= 2;
  return group;
}

// Two blocks to a processor where two have room, so that one works while the other begins or ends, or three if two
// would leave room for another group; with few rows, rather more blocks than larger ones. The rows of a block lie
// alike, which they do after `period` of them, unless it has only one.
Plan plan_of_groups(int64_t rows, int64_t period, int group, int room, const Device& device) {
  const int pair = std::min(room, 2 * kPairThreads);
  const int of_processor = 2 * group > pair ? 1 : (4 * group > pair && 3 * group <= pair ? 3 : 2);
  const int threads = pair / std::max(of_processor, 2);
  const int64_t most_blocks = of_processor * static_cast<int64_t>(device.processors);
  const int most = std::max(1, group > kWarp ? std::min(threads / group, kMostGroups) : threads / group);
  const int whole = group < kWarp ? kWarp / group : 1;  // groups that fill a warp
  const auto wanted = static_cast<int>(std::min<int64_t>((rows + most_blocks - 1) / most_blocks, most));
  // A few rows are sooner done by one block than the sums of several by a second kernel.
  const bool alone = period == 1 && rows <= kFewRows && rows * group <= pair;
  const int groups = ((alone ? static_cast<int>(rows) : wanted) + whole - 1) / whole * whole;
  const int64_t blocks = std::min(most_blocks, (rows + groups - 1) / groups + period - 1);
  return {group, groups, std::min(rows, std::max(period, blocks / period * period))};
}

// `width` elements of each row are read at a time.
Plan plan_of(int64_t rows, int64_t hidden, int width, const Device& device) {
  if (width == 1 && hidden <= kMostThreads * kScalarLoads) {
    // A warp reads together, rather than a few threads many elements each.
    const int64_t threads = std::max(std::min<int64_t>(hidden, kWarp), (hidden + kScalarLoads - 1) / kScalarLoads);
    return plan_of_groups(rows, 1, group_of(threads), 2 * kMostThreads, device);
  }
  const int64_t vectors = hidden / width, period = alignment_period(hidden, width);
  const int bytes = kRingBytes + (period > 1 ? kRingSlots * 3 * kVectorBytes / width : 0);
  const int room = std::min((device.shared - 2 * kReservedBytes) / bytes / kWarp * kWarp, kMostThreads);
  // More threads than that need them read a short row in fewer pieces of a line, and one that is alone sooner.
  const int64_t loads = vectors > kWarp ? kRingLoads : 2;
  int64_t threads = (vectors + loads - 1) / loads;
  if (rows == 1) threads = std::max(threads, std::min<int64_t>(vectors, std::min(room, kPairThreads)));
  if (period > 1) threads = std::max<int64_t>(threads, kEdges * width);
  if (width > 1 && threads <= room) return plan_of_groups(rows, period, group_of(threads), room, device);
  return {0, 1, std::min<int64_t>(rows, device.processors)};
}

template <typename T>
void launch_scalar(const Arguments& arguments, const Plan& plan, cudaStream_t stream) {
  const size_t shared = arguments.partial != nullptr ? plan.groups * arguments.hidden * sizeof(float) : 0;
  launch_with_pdl(backward_scalar_kernel<T>, static_cast<unsigned>(plan.blocks),
                  static_cast<unsigned>(plan.group * plan.groups), shared, stream, arguments);
}

template <typename T, bool kPlain>
void launch_ring(const Arguments& arguments, const Plan& plan, const Device& device, cudaStream_t stream) {
  static std::atomic<uint64_t> known{0};  // devices on which the kernel may have so much shared memory
  const uint64_t known_if_this = device.number < 64 ? uint64_t{1} << device.number : 0;
  const auto kernel = backward_ring_kernel<T, kPlain>;
  const int threads = plan.group * plan.groups;
  if ((known.load(std::memory_order_relaxed) & known_if_this) == 0 &&
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared - kReservedBytes) ==
          cudaSuccess) {
    known.fetch_or(known_if_this, std::memory_order_relaxed);
  }
  const bool edges = arguments.hidden % (kVectorBytes / static_cast<int>(sizeof(T))) != 0;
  const int bytes = threads * kSlotBytes + (edges ? plan.groups * kEdges * kVectorBytes : 0);
  launch_with_pdl(kernel, static_cast<unsigned>(plan.blocks), static_cast<unsigned>(threads),
                  static_cast<size_t>(kRingSlots) * (arguments.grad_sum != nullptr ? 3 : 2) * bytes, stream, arguments);
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

template <typename W>
void launch_reduce(const Backward& problem, cudaStream_t stream) {
  launch_with_pdl(reduce_kernel<W>, static_cast<unsigned>((problem.hidden + kReduceColumns - 1) / kReduceColumns),
                  kReduceThreads, 0, stream, static_cast<const float*>(problem.partial), problem.parts, problem.hidden,
                  static_cast<W*>(problem.grad_weight));
}

template <typename T>
void launch(const Backward& problem, const Device& device, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.x, sizeof(T)) &&
                       aligned(problem.grad, sizeof(T)) && aligned(problem.grad_sum, sizeof(T)) &&
                       aligned(problem.grad_x);
  const auto alike = [&](const Rows& rows) { return same_alignment(rows, problem.grad_x, problem.hidden, sizeof(T)); };
  // With a row for each processor, what a block of the ring prepares for other rows takes longer than it saves.
  const bool ring = vectors || (problem.hidden % kWidth != 0 && problem.rows > device.processors && alike(problem.x) &&
                                alike(problem.grad) && alike(problem.grad_sum));
  const bool weight_vectors = aligned(problem.weight.data);
  const bool like_rows =
      sizeof(T) == sizeof(float) || problem.weight.data == nullptr || problem.weight.type == problem.type;
  Plan plan = plan_of(problem.rows, problem.hidden, ring ? kWidth : 1, device);
  if (problem.partial != nullptr) plan.blocks = problem.parts;
  Arguments arguments = arguments_of(problem);
  arguments.group = plan.group;
  if (plan.group == 0) {
    const auto kernel = vectors && weight_vectors ? backward_long_kernel<T, kWidth> : backward_long_kernel<T, 1>;
    launch_with_pdl(kernel, static_cast<unsigned>(plan.blocks), kLongBlock, 0, stream, arguments);
  } else if (!ring) {
    launch_scalar<T>(arguments, plan, stream);
  } else if (vectors && weight_vectors && like_rows) {
    if (problem.parts == 1) arguments.grad_weight = problem.grad_weight;
    launch_ring<T, true>(arguments, plan, device, stream);
  } else {
    launch_ring<T, false>(arguments, plan, device, stream);
  }
  if (problem.partial == nullptr || arguments.grad_weight != nullptr) return;
  if (like_rows) {
    launch_reduce<T>(problem, stream);
  } else {
    launch_reduce<float>(problem, stream);
  }
}

}  // namespace

int partial_sums(int64_t rows, int64_t hidden, Type type, int64_t* parts) {
  Device device;
  const cudaError_t error = current_device(&device);
  if (error != cudaSuccess) return error;
  const int width = type == Type::float32 ? 4 : 8;
  *parts = plan_of(rows, hidden, width, device).blocks;
  return cudaSuccess;
}

int backward(const Backward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  Device device;
  const cudaError_t error = current_device(&device);
  if (error != cudaSuccess) return error;
  return dispatch_dtype(problem.type,
                        [&](auto type) { launch<typename decltype(type)::Element>(problem, device, cuda_stream); });
}

}  // namespace rmsnorm
