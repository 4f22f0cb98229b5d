// Modulated norms, with and without a gated branch that is added before, on CUDA.
//
// Reads:    x and the branch, each once from memory: a row stays in registers between its sums and its result. Rows
//           that are too long for that, or lie unfavourably, are read again. Parameters and modulations from the
//           processor's cache, once for the rows that a thread has at a time.
// Writes:   `normed`, and `sum` when there is a branch.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Bytes, for elements of e bytes and modulations of m bytes: rows * hidden * 2e (4e with a branch), and beside them
// rows / span * hidden * 2m (3m). A copy's speed takes some 40 KB on their way to each processor, and not many more
// instructions than there are elements. Hence two rows for a thread, which share what the modulation takes; elements
// kept as they came, in half the registers, and decoded again; and one exchange between the warps of a row.
#include "adaln_cuda/adaln.h"
#include "adaln_cuda/device.cuh"

namespace adaln {
namespace {

constexpr int kMostWarps = 16;  // of a row that registers hold

// Threads of a block, at most, of which two fit on a processor.
template <int kLoads, int kRows>
constexpr int kMostThreads = kLoads * kRows < 4 ? 512 : 384;

// Rows that registers hold.
struct RowsForward {
  Lines x, branch, gate, scale, shift;  // branch and gate, scale and shift: data null where there are none
  const void *weight, *bias;
  void *normed, *sum;
  uint32_t rows, span;
  int hidden;
  Divider spans;
  Average average;
  float eps;
  bool centered;
};

// Blocks of (threads of a row, rows side by side), and kRows below one another, which lie in one span.
template <typename T, typename M, int kWidth, int kLoads, int kRows, bool kBranch, bool kStepwise>
__global__ void __launch_bounds__(kMostThreads<kLoads, kRows>, 2)
    forward_kernel(const __grid_constant__ RowsForward problem) {
  constexpr int kLast = kLoads - 1;
  __shared__ float2 of_warps[kRows][kMostWarps];
  wait_for_previous();
  let_next_begin();
  const int hidden = problem.hidden, group = blockDim.x;
  // The last vector of a thread may lie past the row's end. It is then read at the row's start, and does not count.
  const int first_column = threadIdx.x * kWidth, last_column = first_column + kLast * group * kWidth;
  const bool whole = last_column < hidden;
  const auto column_of = [&](int i) { return i < kLast ? first_column + i * group * kWidth : whole ? last_column : 0; };
  // A thread without rows still takes part in the sums of its warp: with the last ones, which it does not write.
  const uint32_t own_row = (blockIdx.x * blockDim.y + threadIdx.y) * kRows;
  const bool there = own_row < problem.rows;
  const uint32_t first_row = there ? own_row : problem.rows - kRows;
  const uint32_t span = problem.spans(first_row), row_of_span = first_row - span * problem.span;
  const auto index_of = [&](int row, int i) { return static_cast<int64_t>(first_row + row) * hidden + column_of(i); };

  Vector<T, kWidth> vectors[kRows][kLoads];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const T* x_row = problem.x.at<T>(span, row_of_span + r);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) vectors[r][i] = load_once<T, kWidth>(x_row + column_of(i));
  }
  if constexpr (kBranch) {
    Vector<T, kWidth> branch[kRows][kLoads];
    Elements<M, kWidth> gate[kLoads];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const T* branch_row = problem.branch.at<T>(span, row_of_span + r);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) branch[r][i] = load_once<T, kWidth>(branch_row + column_of(i));
    }
    const M* gate_row = problem.gate.at<M>(span);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) gate[i] = load_elements<M, kWidth>(gate_row + column_of(i));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float sum[kWidth], product[kWidth], factor[kWidth];
        decode_all(vectors[r][i].elements, sum);
        decode_all(branch[r][i].elements, product);
        decode_all(gate[i].values, factor);
        add_gated<T>(product, factor, kStepwise, sum);
        vectors[r][i] = encode_all<T>(sum);
        if (there && (i < kLast || whole)) store_once(static_cast<T*>(problem.sum) + index_of(r, i), vectors[r][i]);
      }
    }
  }

  const int lanes = min(group, kWarp), warps = group / kWarp, warp = threadIdx.x / kWarp;
  const auto count_in = [&](int of_warp) {
    constexpr int kFull = kWarp * kWidth;
    return kLast * kFull + min(max(hidden - (kLast * group + of_warp * kWarp) * kWidth, 0), kFull);
  };
  // Squares of deviations from the mean of the warp, and from these those from the mean of the row, so that a row far
  // from zero keeps its digits.
  float mean[kRows] = {}, squares[kRows] = {};
  if (problem.centered) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        float x[kWidth], sum = 0.0f;
        decode_all(vectors[r][i].elements, x);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum += x[j];
        mean[r] += i < kLast || whole ? sum : 0.0f;
        forget_decoded(vectors[r][i]);
      }
    }
    sum_over_lanes(mean, lanes);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      mean[r] = warps > 1 ? __fdividef(mean[r], static_cast<float>(count_in(warp))) : problem.average(mean[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float x[kWidth], sum = 0.0f;
      decode_all(vectors[r][i].elements, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += (x[j] - mean[r]) * (x[j] - mean[r]);
      squares[r] += i < kLast || whole ? sum : 0.0f;
      forget_decoded(vectors[r][i]);
    }
  }
  sum_over_lanes(squares, lanes);
  if (warps > 1) {
    const int lane = threadIdx.x % kWarp, other = lane % kMostWarps;
    if (lane == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) of_warps[r][warp] = make_float2(mean[r], squares[r]);
    }
    const float count_of_other = other < warps ? static_cast<float>(count_in(other)) : 0.0f;
    __syncthreads();
    float sums[2 * kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      mean[r] = of_warps[r][0].x;
      const float2 part = other < warps ? of_warps[r][other] : make_float2(mean[r], 0.0f);
      const float away = part.x - mean[r];
      sums[2 * r] = count_of_other * away;
      sums[2 * r + 1] = part.y + sums[2 * r] * away;
    }
    sum_over_lanes<kMostWarps>(sums);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float away = problem.average(sums[2 * r]);
      mean[r] += away;
      squares[r] = sums[2 * r + 1] - sums[2 * r] * away;
    }
  }
  float rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rstd[r] = rsqrtf(problem.average(squares[r]) + problem.eps);

  // Late: kept from the start, they would take registers, and with them rows from the processor.
  Elements<M, kWidth> scale[kLoads] = {}, shift[kLoads] = {};
  if (problem.scale.data != nullptr) {
    const M *scale_row = problem.scale.at<M>(span), *shift_row = problem.shift.at<M>(span);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      scale[i] = load_elements<M, kWidth>(scale_row + column_of(i));
      shift[i] = load_elements<M, kWidth>(shift_row + column_of(i));
    }
  }
  const auto *weight_row = static_cast<const M*>(problem.weight), *bias_row = static_cast<const M*>(problem.bias);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    float factor[kWidth], offset[kWidth];
    decode_all(scale[i].values, factor);
    decode_all(shift[i].values, offset);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) factor[j] += 1.0f;
    const auto normalize = [&](int r, float (&x)[kWidth]) {
      decode_all(vectors[r][i].elements, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) x[j] = (x[j] - mean[r]) * rstd[r];
    };
    const auto write = [&](int r, const float (&x)[kWidth]) {
      if (there && (i < kLast || whole)) {
        store_once(static_cast<T*>(problem.normed) + index_of(r, i), encode_all<T>(x));
      }
    };
    if constexpr (kStepwise) {
      round_all<T>(factor);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float x[kWidth];
        normalize(r, x);
        if (weight_row != nullptr) {
          float weight[kWidth];
          decode_all(load_elements<M, kWidth>(weight_row + column_of(i)).values, weight);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) x[j] *= weight[j];
        }
        if (bias_row != nullptr) {
          float bias[kWidth];
          decode_all(load_elements<M, kWidth>(bias_row + column_of(i)).values, bias);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) x[j] += bias[j];
        }
        round_all<T>(x);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) x[j] *= factor[j];
        round_all<T>(x);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) x[j] += offset[j];
        write(r, x);
      }
      continue;
    }
    if (bias_row != nullptr) {
      float bias[kWidth];
      decode_all(load_elements<M, kWidth>(bias_row + column_of(i)).values, bias);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) offset[j] += bias[j] * factor[j];
    }
    if (weight_row != nullptr) {
      float weight[kWidth];
      decode_all(load_elements<M, kWidth>(weight_row + column_of(i)).values, weight);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) factor[j] *= weight[j];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x[kWidth];
      normalize(r, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) x[j] = x[j] * factor[j] + offset[j];
      write(r, x);
    }
  }
}

// The mean of some elements and the squares of the deviations from it, from those of their parts.
struct Moments {
  float count, mean, squares;

  __device__ __forceinline__ void add(const Moments& other) {
    const float both = count + other.count, away = other.mean - mean;
    const float share = both > 0.0f ? __fdividef(other.count, both) : 0.0f;
    squares += other.squares + away * away * count * share;
    mean += away * share;
    count = both;
  }

  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      Moments other;
      other.count = __shfl_xor_sync(kAllLanes, count, distance);
      other.mean = __shfl_xor_sync(kAllLanes, mean, distance);
      other.squares = __shfl_xor_sync(kAllLanes, squares, distance);
      // In one order for both, so that both get the same.
      Moments lower = threadIdx.x & distance ? other : *this;
      lower.add(threadIdx.x & distance ? *this : other);
      *this = lower;
    }
  }
};

// A parameter, or the row of a modulation, of the type of the rows, T, or float32; or none.
class EitherRow {
 public:
  __device__ __forceinline__ explicit EitherRow(const Parameter& parameter)
      : data_(parameter.data), type_(parameter.type) {}
  __device__ __forceinline__ EitherRow(const Modulation& modulation, int64_t span)
      : data_(modulation.rows.data), type_(modulation.type) {
    if (data_ != nullptr) start_ = modulation.rows.offset(span);
  }

  // The elements from `column` on, or `otherwise` where there is none.
  template <typename T, int kWidth>
  __device__ __forceinline__ void load(int64_t column, float otherwise, float (&values)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = otherwise;
    if (data_ != nullptr) load_either<T, kWidth>(data_, type_, start_ + column, values);
  }

 private:
  const void* data_;
  Type type_;
  int64_t start_ = 0;
};

// Rows of any length, wherever they lie, with modulations and parameters of any types: a block for each.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kLongBlock) forward_long_kernel(const __grid_constant__ Forward problem) {
  constexpr int kAtOnce = kWidth == 1 ? 2 : 1;
  __shared__ Moments of_warps[kWarp];
  const int64_t hidden = problem.hidden;
  const int64_t first_column = static_cast<int64_t>(threadIdx.x) * kWidth, step = blockDim.x * kWidth;
  for (int64_t row = blockIdx.x; row < problem.rows; row += gridDim.x) {
    const int64_t span = span_of(row, problem.span);
    const T* x_row = row_of<T>(problem.x, row);
    const T* branch_row = problem.branch.data == nullptr ? nullptr : row_of<T>(problem.branch, row);
    T* sum_row = static_cast<T*>(problem.sum) + row * hidden;
    const EitherRow gate_row(problem.gate, span);
    // Sums of differences from the thread's first element.
    float first = 0.0f, sum = 0.0f, squares = 0.0f, count = 0.0f;
#pragma unroll kAtOnce
    for (int64_t column = first_column; column < hidden; column += step) {
      float x[kWidth];
      decode_all(load<T, kWidth>(x_row + column).elements, x);
      if (branch_row != nullptr) {
        float branch[kWidth], gate[kWidth];
        decode_all(load<T, kWidth>(branch_row + column).elements, branch);
        gate_row.load<T>(column, 0.0f, gate);
        add_gated<T>(branch, gate, problem.stepwise, x);
        const auto rounded = encode_all<T>(x);
        store(sum_row + column, rounded);
        decode_all(rounded.elements, x);
      }
      if (problem.centered && column == first_column) first = x[0];
      count += kWidth;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sum += x[j] - first;
        squares += (x[j] - first) * (x[j] - first);
      }
    }
    if (branch_row != nullptr) x_row = sum_row;  // each thread reads again what it wrote itself
    float mean = 0.0f, rstd;
    {
      const float away = problem.centered && count > 0.0f ? sum / count : 0.0f;
      Moments moments{count, first + away, problem.centered ? squares - away * sum : squares};
      moments.add_lanes();
      __syncthreads();
      if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = moments;
      __syncthreads();
      const int lane = threadIdx.x % kWarp;
      moments = lane < static_cast<int>(blockDim.x) / kWarp ? of_warps[lane] : Moments{0.0f, 0.0f, 0.0f};
      moments.add_lanes();
      if (problem.centered) mean = moments.mean;
      rstd = rsqrtf(moments.squares / static_cast<float>(hidden) + problem.eps);
    }
    T* normed_row = static_cast<T*>(problem.normed) + row * hidden;
    const EitherRow scale_row(problem.scale, span), shift_row(problem.shift, span);
    const EitherRow weight_row(problem.weight), bias_row(problem.bias);
#pragma unroll kAtOnce
    for (int64_t column = first_column; column < hidden; column += step) {
      float x[kWidth], scale[kWidth], shift[kWidth], weight[kWidth], bias[kWidth];
      decode_all(load<T, kWidth>(x_row + column).elements, x);
      scale_row.load<T>(column, 0.0f, scale);
      shift_row.load<T>(column, 0.0f, shift);
      weight_row.load<T>(column, 1.0f, weight);
      bias_row.load<T>(column, 0.0f, bias);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        x[j] = (x[j] - mean) * rstd * weight[j] + bias[j];
        scale[j] += 1.0f;
      }
      if (problem.stepwise) {
        round_all<T>(x);
        round_all<T>(scale);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) x[j] *= scale[j];
        round_all<T>(x);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) x[j] += shift[j];
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) x[j] = x[j] * scale[j] + shift[j];
      }
      store(normed_row + column, encode_all<T>(x));
    }
  }
}

template <typename T, typename M, int kWidth, int kLoads, int kRows, bool kBranch, bool kStepwise = false>
cudaError_t launch_rows(const RowsForward& problem, int group, cudaStream_t stream) {
  const int rows = group > kWarp ? 1 : kSharedBlock / group;  // of a block side by side
  const uint32_t rows_of_block = static_cast<uint32_t>(rows) * kRows;
  const uint32_t blocks = (problem.rows + rows_of_block - 1) / rows_of_block;
  return launch_early(forward_kernel<T, M, kWidth, kLoads, kRows, kBranch, kStepwise>, dim3(blocks), dim3(group, rows),
                      0, stream, problem);
}

// How many threads for so many vectors of a row.
inline int group_for(int vectors, int loads) {
  const int threads = (vectors + loads - 1) / loads;
  if (threads > kWarp) return (threads + kWarp - 1) / kWarp * kWarp;
  int group = 1;
  while (group < threads) group *= 2;
  return group;
}

template <typename T, typename M, bool kBranch>
cudaError_t launch_fitting(const RowsForward& problem, bool stepwise, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const int vectors = problem.hidden / kWidth, group = group_for(vectors, 2);
  if constexpr (std::is_same_v<T, M> && !std::is_same_v<T, float>) {
    if (stepwise) return launch_rows<T, M, kWidth, 2, 1, kBranch, true>(problem, group, stream);
  }
  if constexpr (!kBranch) {
    if (problem.span % 2 == 0 && group <= kMostThreads<2, 2>) {
      // Modulations of another type are not worth kernels of their own for what is rare.
      if constexpr (std::is_same_v<T, M>) {
        if (vectors <= kWarp) return launch_rows<T, M, kWidth, 1, 2, false>(problem, group_for(vectors, 1), stream);
      }
      if constexpr (std::is_same_v<T, M> && kWidth == 8) {
        // Where vectors of half the width leave fewer threads without one.
        const int narrow = group_for(2 * vectors, 3);
        if (narrow >= kWarp && narrow <= kMostThreads<3, 2> && vectors >= narrow && 33 * narrow < 40 * group) {
          return launch_rows<T, M, 4, 3, 2, false>(problem, narrow, stream);
        }
      }
      return launch_rows<T, M, kWidth, 2, 2, false>(problem, group, stream);
    }
  }
  return launch_rows<T, M, kWidth, 2, 1, kBranch>(problem, group, stream);
}

template <typename T, bool kBranch>
cudaError_t launch_typed(const RowsForward& problem, Type type, bool stepwise, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, float>) {
    if (type != Type::float32) return launch_fitting<T, T, kBranch>(problem, stepwise, stream);
  }
  return launch_fitting<T, float, kBranch>(problem, stepwise, stream);
}

template <typename T>
cudaError_t launch(const Forward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.x, sizeof(T)) &&
                       aligned(problem.branch, sizeof(T)) && aligned(problem.gate) && aligned(problem.scale) &&
                       aligned(problem.shift) && aligned(problem.weight.data) && aligned(problem.bias.data) &&
                       aligned(problem.normed) && aligned(problem.sum);
  CommonType common(problem.type);
  for (const Modulation* modulation : {&problem.gate, &problem.scale, &problem.shift}) common.add(*modulation);
  for (const Parameter* parameter : {&problem.weight, &problem.bias}) common.add(*parameter);
  // Without modulations, any division of the rows will do.
  const bool modulated = problem.scale.rows.data != nullptr || problem.gate.rows.data != nullptr;
  const int64_t span = !modulated && problem.x.dims == 2 ? problem.x.sizes[1] : problem.span;
  Lines x, branch, gate, scale, shift;
  if (vectors && common.one() && !(problem.stepwise && common.type() != problem.type) &&
      problem.hidden <= 2 * kWidth * kMostThreads<2, 1> && problem.rows < INT32_MAX && lines_of(problem.x, span, &x) &&
      lines_of(problem.branch, span, &branch) && lines_of(problem.gate, &gate) && lines_of(problem.scale, &scale) &&
      lines_of(problem.shift, &shift)) {
    const RowsForward rows{x,
                           branch,
                           gate,
                           scale,
                           shift,
                           problem.weight.data,
                           problem.bias.data,
                           problem.normed,
                           problem.sum,
                           static_cast<uint32_t>(problem.rows),
                           static_cast<uint32_t>(span),
                           static_cast<int>(problem.hidden),
                           Divider(static_cast<uint32_t>(span)),
                           Average(problem.hidden),
                           problem.eps,
                           problem.centered};
    return problem.branch.data == nullptr ? launch_typed<T, false>(rows, common.type(), problem.stepwise, stream)
                                          : launch_typed<T, true>(rows, common.type(), problem.stepwise, stream);
  }
  // Some vectors for each thread, so that the sums between threads are the lesser part of the work.
  constexpr int64_t kLoads = 16;
  const int64_t warps = (problem.hidden / (vectors ? kWidth : 1) + kLoads * kWarp - 1) / (kLoads * kWarp);
  const Shape shape{static_cast<int>(std::min<int64_t>(warps * kWarp, kLongBlock)), 1};
  const unsigned blocks = blocks_for(problem.rows, shape);
  if (vectors) {
    forward_long_kernel<T, kWidth><<<blocks, shape.block(), 0, stream>>>(problem);
  } else {
    forward_long_kernel<T, 1><<<blocks, shape.block(), 0, stream>>>(problem);
  }
  return cudaGetLastError();
}

}  // namespace

int forward(const Forward& problem, void* stream) {
  cudaError_t error = cudaSuccess;
  with_type(problem.type, [&](auto tag) {
    error = launch<typename decltype(tag)::Element>(problem, static_cast<cudaStream_t>(stream));
  });
  return error;
}

}  // namespace adaln
