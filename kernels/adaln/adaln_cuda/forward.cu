// Modulated norms, with and without a gated branch that is added before, on CUDA.
//
// Reads:    x and the branch, each once from memory: a row stays in registers between its sums and its result. Rows
//           that are too long for that, or lie unfavourably, are read again. Parameters and modulations by way of the
//           processor's cache, once for the rows that a thread has at a time.
// Writes:   `normed`, and `sum` when there is a branch.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Bytes, for elements of e bytes and modulations of m bytes: rows * hidden * 2e (4e with a branch), and beside them
// rows / span * hidden * 2m (3m). A copy's speed takes some 40 KB on their way to each processor, and not many more
// instructions than there are elements. Hence elements kept as they came, in half the registers, and decoded again;
// modulations on their way into shared memory from the start, which takes none; a warp for each row that it can hold,
// for it waits for no other; and for longer ones two rows for a thread, with one exchange between the warps of both.
#include "adaln_cuda/adaln.h"
#include "adaln_cuda/device.cuh"

namespace adaln {
namespace {

constexpr int kMostWarps = 16;  // of a row that registers hold

// Loads of a thread where a warp has a row to itself.
constexpr int kWarpLoads = 5, kMostWarpLoads = 8;
// With fewer rows than this a warp for each would leave most of the device without work.
constexpr uint32_t kManyRows = 512;

// Threads of a block, at most, and blocks that fit on a processor.
constexpr int most_threads(int loads, int rows) {
  if (loads > 2) return kSharedBlock;
  return loads * rows < 4 ? 512 : 384;
}
constexpr int blocks_of_processor(int loads, int rows, bool branch) {
  if (loads > kWarpLoads) return 4;
  if (loads > 2) return 6;
  return loads == 2 && rows == 1 && !branch ? 3 : 2;
}

// Rows that registers hold.
struct RowsForward {
  Lines x, branch, gate;  // branch and gate: data null where there are none
  void *normed, *sum;
  Lines shared[4];  // of scale, shift, weight and bias those that there are, each for all rows of a span
  int staged;       // how many of these there are
  int slots[4];     // where among them are scale, shift, weight and bias; negative where there is none
  uint32_t rows, span;
  int hidden;
  Divider spans;
  Average average;
  float eps;
  bool centered;
};

// Blocks of (threads of a row, rows side by side), and kRows below one another, which lie in one span.
template <typename T, typename M, int kWidth, int kLoads, int kRows, bool kBranch, bool kStepwise>
__global__ void __launch_bounds__(most_threads(kLoads, kRows), blocks_of_processor(kLoads, kRows, kBranch))
    forward_kernel(const __grid_constant__ RowsForward problem) {
  // So many vectors every thread has. The others may lie past the row's end. They are then read at the row's start, and
  // do not count.
  constexpr int kSure = kLoads > 2 ? 0 : kLoads - 1;
  extern __shared__ uint4 memory[];
  __shared__ float2 of_warps[kRows][kMostWarps];
  wait_for_previous();
  const int hidden = problem.hidden, group = kLoads > 2 ? kWarp : blockDim.x;
  const int first_column = threadIdx.x * kWidth;
  const auto has = [&](int i) { return i < kSure || first_column + i * group * kWidth < hidden; };
  const auto column_of = [&](int i) { return has(i) ? first_column + i * group * kWidth : 0; };
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
  // Scale, shift, weight and bias, on their way into shared memory, where each thread finds its own: in registers they
  // would keep rows from the processor.
  constexpr int kWords = sizeof(M) * kWidth / sizeof(uint4);
  const int threads = blockDim.x * blockDim.y;
  const auto slot = [&](int k, int i) {
    return memory + (k * kLoads + i) * kWords * threads + threadIdx.y * group + threadIdx.x;
  };
  const auto stage_all = [&] {
    __syncwarp();  // the rows' own loads go first
#pragma unroll 1
    for (int k = 0; k < problem.staged; ++k) {
      const M* row = problem.shared[k].at<M>(span);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          copy_word<true>(slot(k, i) + word * threads, reinterpret_cast<const uint4*>(row + column_of(i)) + word);
        }
      }
    }
    close_copies();
  };
  const auto read_staged = [&](int k, int i, float (&values)[kWidth]) {
    Elements<M, kWidth> elements;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const uint4 whole = slot(problem.slots[k], i)[word * threads];
      memcpy(&elements.values[word * kWidth / kWords], &whole, sizeof(whole));
    }
    decode_all(elements.values, values);
  };
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
    stage_all();
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
        if (there && has(i)) store_once(static_cast<T*>(problem.sum) + index_of(r, i), vectors[r][i]);
      }
    }
  }
  if constexpr (!kBranch) stage_all();

  const int lanes = kLoads > 2 ? kWarp : min(group, kWarp), warps = kLoads > 2 ? 1 : group / kWarp;
  const int warp = threadIdx.x / kWarp;
  const auto count_in = [&](int of_warp) {
    constexpr int kFull = kWarp * kWidth, kLast = kLoads - 1;
    return kLast * kFull + min(max(hidden - (kLast * group + of_warp * kWarp) * kWidth, 0), kFull);
  };
  // Squares of deviations from the mean of the warp, and from these those from the mean of the row, so that a row far
  // from zero keeps its digits. Long sums lose some, too.
  constexpr int kSums = kLoads < 4 ? kLoads : 4;
  float mean[kRows] = {}, squares[kRows] = {};
  if (problem.centered) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sums[kSums] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        float x[kWidth], sum = 0.0f;
        decode_all(vectors[r][i].elements, x);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum += x[j];
        sums[i % kSums] += has(i) ? sum : 0.0f;
        forget_decoded(vectors[r][i]);
      }
      mean[r] = sum_of(sums);
    }
    sum_over_lanes(mean, lanes);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      mean[r] = warps > 1 ? __fdividef(mean[r], static_cast<float>(count_in(warp))) : problem.average(mean[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float sums[kSums] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float x[kWidth], sum = 0.0f;
      decode_all(vectors[r][i].elements, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += (x[j] - mean[r]) * (x[j] - mean[r]);
      sums[i % kSums] += has(i) ? sum : 0.0f;
      forget_decoded(vectors[r][i]);
    }
    squares[r] = sum_of(sums);
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
  let_next_begin();
  float rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rstd[r] = rsqrtf(problem.average(squares[r]) + problem.eps);

  wait_for_copies<0>();
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    float factor[kWidth] = {}, offset[kWidth] = {};
    if (problem.slots[0] >= 0) {
      read_staged(0, i, factor);
      read_staged(1, i, offset);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) factor[j] += 1.0f;
    const auto normalize = [&](int r, float (&x)[kWidth]) {
      decode_all(vectors[r][i].elements, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) x[j] = (x[j] - mean[r]) * rstd[r];
    };
    const auto write = [&](int r, const float (&x)[kWidth]) {
      if (there && has(i)) {
        store_once(static_cast<T*>(problem.normed) + index_of(r, i), encode_all<T>(x));
      }
    };
    if constexpr (kStepwise) {
      round_all<T>(factor);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float x[kWidth];
        normalize(r, x);
        if (problem.slots[2] >= 0) {
          float weight[kWidth];
          read_staged(2, i, weight);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) x[j] *= weight[j];
        }
        if (problem.slots[3] >= 0) {
          float bias[kWidth];
          read_staged(3, i, bias);
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
    if (problem.slots[3] >= 0) {
      float bias[kWidth];
      read_staged(3, i, bias);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) offset[j] += bias[j] * factor[j];
    }
    if (problem.slots[2] >= 0) {
      float weight[kWidth];
      read_staged(2, i, weight);
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

// Rows of any length, wherever they lie, with modulations and parameters of any types: a block for each. Its vectors
// are those of `normed`.
template <typename T>
__global__ void __launch_bounds__(kLongBlock) forward_long_kernel(const __grid_constant__ Forward problem) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  __shared__ Moments of_warps[kWarp];
  wait_for_previous();
  let_next_begin();
  const int64_t hidden = problem.hidden, step = static_cast<int64_t>(blockDim.x) * kWidth;
  for (int64_t row = blockIdx.x; row < problem.rows; row += gridDim.x) {
    const int64_t span = span_of(row, problem.span);
    const T* x_row = row_of<T>(problem.x, row);
    const T* branch_row = problem.branch.data == nullptr ? nullptr : row_of<T>(problem.branch, row);
    T* sum_row = static_cast<T*>(problem.sum) + row * hidden;
    T* normed_row = static_cast<T*>(problem.normed) + row * hidden;
    const EitherRow gate_row(problem.gate, span);
    const int64_t start = static_cast<int64_t>(threadIdx.x) * kWidth - before<kWidth>(normed_row);
    // Sums of differences from one of the thread's elements.
    float first = 0.0f, sum = 0.0f, squares = 0.0f, count = 0.0f;
#pragma unroll 1
    for (int64_t column = start; column < hidden; column += step) {
      const Part<kWidth> part(column, hidden);
      auto vector = load_part(x_row, part);
      float x[kWidth];
      decode_all(vector.elements, x);
      if (branch_row != nullptr) {
        float branch[kWidth], gate[kWidth];
        decode_all(load_part(branch_row, part).elements, branch);
        gate_row.load<T>(part, 0.0f, gate);
        add_gated<T>(branch, gate, problem.stepwise, x);
        vector = encode_all<T>(x);
        store_part(sum_row, part, vector);
        decode_all(vector.elements, x);
      }
      if (problem.centered && column == start) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) first = part.has(j) ? x[j] : first;
      }
      if (!part.whole()) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) x[j] = part.has(j) ? x[j] : first;
      }
      count += static_cast<float>(part.end - part.begin);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float away = x[j] - first;
        sum += away;
        squares += away * away;
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
#pragma unroll 1
    for (int64_t column = start; column < hidden; column += step) {
      const Part<kWidth> part(column, hidden);
      float x[kWidth];
      decode_all(load_part(x_row, part).elements, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) x[j] = (x[j] - mean) * rstd;
      // First weight and bias, then scale and shift.
#pragma unroll 1
      for (int modulated = problem.weight.data == nullptr && problem.bias.data == nullptr; modulated < 2; ++modulated) {
        const EitherRow factor_row = modulated ? EitherRow(problem.scale, span) : EitherRow(problem.weight);
        const EitherRow offset_row = modulated ? EitherRow(problem.shift, span) : EitherRow(problem.bias);
        float factor[kWidth], offset[kWidth];
        factor_row.load<T>(part, modulated ? 0.0f : 1.0f, factor);
        offset_row.load<T>(part, 0.0f, offset);
        if (modulated) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) factor[j] += 1.0f;
        }
        if (problem.stepwise && modulated) {
          round_all<T>(x);
          round_all<T>(factor);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) x[j] *= factor[j];
          round_all<T>(x);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) x[j] += offset[j];
        } else {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) x[j] = x[j] * factor[j] + offset[j];
        }
      }
      store_part(normed_row, part, encode_all<T>(x));
    }
  }
}

template <typename T, typename M, int kWidth, int kLoads, int kRows, bool kBranch, bool kStepwise = false>
cudaError_t launch_rows(const RowsForward& problem, int group, cudaStream_t stream) {
  const int rows = group > kWarp ? 1 : kSharedBlock / group;  // of a block side by side
  const uint32_t rows_of_block = static_cast<uint32_t>(rows) * kRows;
  const uint32_t blocks = (problem.rows + rows_of_block - 1) / rows_of_block;
  const auto kernel = forward_kernel<T, M, kWidth, kLoads, kRows, kBranch, kStepwise>;
  const size_t shared = sizeof(M) * kWidth * kLoads * group * rows * problem.staged;
  if (shared + kStaticBytes > kUsualBytes) {
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t error = cudaFuncSetAttribute(kernel, attribute, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  return launch_early(kernel, dim3(blocks), dim3(group, rows), shared, stream, problem);
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
    // Modulations of another type are not worth kernels of their own for what is rare.
    if constexpr (std::is_same_v<T, M>) {
      if (vectors <= kWarp && problem.span % 2 == 0) {
        return launch_rows<T, M, kWidth, 1, 2, false>(problem, group_for(vectors, 1), stream);
      }
      if (problem.rows >= kManyRows && vectors > kWarp) {
        if (vectors <= kWarp * kWarpLoads) {
          return launch_rows<T, M, kWidth, kWarpLoads, 1, false>(problem, kWarp, stream);
        }
        // Without a mean there is one exchange between warps less to save.
        if (vectors <= kWarp * kMostWarpLoads && problem.centered) {
          return launch_rows<T, M, kWidth, kMostWarpLoads, 1, false>(problem, kWarp, stream);
        }
      }
    }
    if (problem.span % 2 == 0 && group <= most_threads(2, 2)) {
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
  const bool has[] = {problem.scale.rows.data != nullptr, problem.shift.rows.data != nullptr,
                      problem.weight.data != nullptr, problem.bias.data != nullptr};
  int staged = 0;
  for (const bool one : has) staged += one;
  constexpr int64_t kWarpRows = int64_t{kSharedBlock} * kMostWarpLoads * kWidth;
  const int64_t elements = std::max<int64_t>(problem.hidden + 2 * kWarp * kWidth, kWarpRows) * staged;
  const auto shared = static_cast<size_t>(elements * bytes_of(common.type()));
  const bool fits = shared + kStaticBytes <= kUsualBytes || shared + kStaticBytes <= most_shared_bytes();
  Lines x, branch, gate, shared_by_rows[4];
  shared_by_rows[2].data = problem.weight.data;
  shared_by_rows[3].data = problem.bias.data;
  if (vectors && fits && common.one() && !(problem.stepwise && common.type() != problem.type) &&
      problem.hidden <= 2 * kWidth * most_threads(2, 1) && problem.rows < INT32_MAX && lines_of(problem.x, span, &x) &&
      lines_of(problem.branch, span, &branch) && lines_of(problem.gate, &gate) &&
      lines_of(problem.scale, &shared_by_rows[0]) && lines_of(problem.shift, &shared_by_rows[1])) {
    RowsForward rows{x,
                     branch,
                     gate,
                     problem.normed,
                     problem.sum,
                     {},
                     0,
                     {-1, -1, -1, -1},
                     static_cast<uint32_t>(problem.rows),
                     static_cast<uint32_t>(span),
                     static_cast<int>(problem.hidden),
                     Divider(static_cast<uint32_t>(span)),
                     Average(problem.hidden),
                     problem.eps,
                     problem.centered};
    for (int k = 0; k < 4; ++k) {
      if (!has[k]) continue;
      rows.slots[k] = rows.staged;
      rows.shared[rows.staged++] = shared_by_rows[k];
    }
    return problem.branch.data == nullptr ? launch_typed<T, false>(rows, common.type(), problem.stepwise, stream)
                                          : launch_typed<T, true>(rows, common.type(), problem.stepwise, stream);
  }
  // Some vectors for each thread, so that the sums between threads are the lesser part of the work.
  constexpr int64_t kLoads = 16, kElements = kLoads * kWarp * kWidth;
  const int64_t warps = (problem.hidden + kElements - 1) / kElements;
  const Shape shape{static_cast<int>(std::min<int64_t>(warps * kWarp, kLongBlock)), 1};
  return launch_early(forward_long_kernel<T>, dim3(blocks_for(problem.rows, shape)), dim3(shape.block()), 0, stream,
                      problem);
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
