// Modulated norms of rows of any length and alignment, with modulations and parameters of any dtypes, with and without
// a branch, gated or not, that is added before: the general kernel.
//
// Reads:    x and the branch, each once from global memory: a row stays in shared memory between its sums and its
//           result. Rows that do not fit there are read again. Parameters and modulations through the L1 cache.
// Writes:   `normed`, and `sum` when there is a branch.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// A block has one row. Its vectors are the aligned vectors of the output row. Where such a vector is unaligned in an
// input, it is assembled from the two aligned words that hold it, which takes a quarter of the L1 cache's time that
// single elements would take. A margin at each end of the row is read element by element, so that both words are within
// the row.
//
// Included by forward.cu: an object of its own would make the package 9 KB larger.
#pragma once

#include "adaln_cuda/device_limits.cuh"
#include "adaln_cuda/forward_sums.cuh"
#include "adaln_cuda/strided_rows.cuh"

namespace adaln {
namespace {

enum Input : int { kInputX, kInputBranch, kInputGate, kInputWeight, kInputBias, kInputScale, kInputShift, kInputs };

struct InputRows {
  Rows rows;
  bool is_float32;
  bool per_span;  // one row for each span
};

struct GeneralForward {
  InputRows inputs[kInputs];
  FirstRow first;
  int64_t hidden;
  void *normed, *sum;
  Average average;
  float eps;
  int slots;   // vectors of each of x and branch that shared memory holds; 0: rows are read again
  int margin;  // elements at each end of a row that are read one by one
  bool centered, stepwise;
};

// A row of an input, or none.
struct InputRow {
  const char* data;
  bool is_float32;
};

// A vector of any alignment, in flight: the one or two aligned words that hold it. Both must be within the tensor.
template <typename T>
struct UnalignedVector {
  uint4 low, high;
  unsigned misalignment;  // bytes

  __device__ __forceinline__ explicit UnalignedVector(const T* from) {
    const auto address = reinterpret_cast<uintptr_t>(from);
    const auto* words = reinterpret_cast<const uint4*>(address / kVectorBytes * kVectorBytes);
    misalignment = static_cast<unsigned>(address % kVectorBytes);
    low = load_word(words);
    high = make_uint4(0, 0, 0, 0);
    if (misalignment != 0) high = load_word(words + 1);
  }

  __device__ __forceinline__ uint4 word() const {
    return misalignment == 0 ? low : shift_words(low, high, misalignment);
  }
};

// Loads one element, or a vector of any alignment.
template <int kCount>
__device__ __forceinline__ void load_unaligned(const float* from, float (&values)[kCount]) {
  if constexpr (kCount > 1) {
    if (reinterpret_cast<uintptr_t>(from) % kVectorBytes == 0) {
#pragma unroll
      for (int i = 0; i < kCount; i += kVectorBytes / sizeof(float)) {
        const uint4 word = load_word(reinterpret_cast<const uint4*>(from + i));
        memcpy(&values[i], &word, sizeof(word));
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = __uint_as_float(load_element(reinterpret_cast<const uint32_t*>(from + i)));
  }
}
template <typename T, int kCount>
__device__ __forceinline__ void load_unaligned(const T* from, float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    const auto word = load_element(reinterpret_cast<const uint16_t*>(from));
    T element;
    memcpy(&element, &word, sizeof(element));
    values[0] = decode(element);
  } else {
    decode_all(vector_of<T>(UnalignedVector<T>(from).word()).elements, values);
  }
}
template <typename T, int kCount>
__device__ __forceinline__ void load_unaligned(const InputRow& row, int64_t column, float (&values)[kCount]) {
  if (sizeof(T) == sizeof(float) || row.is_float32) {
    load_unaligned(reinterpret_cast<const float*>(row.data) + column, values);
  } else {
    load_unaligned(reinterpret_cast<const T*>(row.data) + column, values);
  }
}
// Loads from two rows, with both loads in flight before the first is used.
template <typename T, int kCount>
__device__ __forceinline__ void load_unaligned(const InputRow& row, const InputRow& other_row, int64_t column,
                                               float (&values)[kCount], float (&others)[kCount]) {
  if constexpr (sizeof(T) < sizeof(float) && kCount > 1) {
    if (!row.is_float32 && !other_row.is_float32) {
      const UnalignedVector<T> vector(reinterpret_cast<const T*>(row.data) + column);
      const UnalignedVector<T> other(reinterpret_cast<const T*>(other_row.data) + column);
      decode_all(vector_of<T>(vector.word()).elements, values);
      decode_all(vector_of<T>(other.word()).elements, others);
      return;
    }
  }
  load_unaligned<T>(row, column, values);
  load_unaligned<T>(other_row, column, others);
}

// Finds the start of the block's row in each input, one thread per input, and prefetches x and the branch.
template <typename T>
__device__ __forceinline__ void find_inputs(const GeneralForward& problem, int64_t hidden, int64_t row,
                                            InputRow (&inputs)[kInputs]) {
  const int thread = threadIdx.x;
  if (thread < kInputs) {
    const InputRows& input = problem.inputs[thread];
    const auto* data = static_cast<const char*>(input.rows.data);
    if (data != nullptr) {
      data += input.rows.offset(input.per_span ? problem.first.span + problem.first.spans(blockIdx.x) : row) *
              static_cast<int64_t>(input.is_float32 ? sizeof(float) : sizeof(T));
      if (thread <= kInputBranch) prefetch_row_to_l2(reinterpret_cast<const T*>(data), hidden);
    }
    inputs[thread] = {data, input.is_float32};
  }
  __syncthreads();
}

// A thread's part of the block's row.
template <typename T>
struct GeneralForwardRow {
  static constexpr int kWidth = kVectorWidth<T>;

  const GeneralForward& problem;
  const InputRow (&inputs)[kInputs];
  uint4* const memory;  // [x and branch][slots]
  int thread, threads, slots;
  int64_t hidden;
  bool has_branch;
  T *sum_row, *normed_row;
  bool sum_aligned;             // like `normed`
  int64_t begin, vectors, end;  // columns of the row's vectors
  bool x_aligned, branch_aligned;
  int64_t edge_column;  // of an element before or after the vectors, which some threads have as well
  bool has_edge;
  InputRow gate_row;

  __device__ __forceinline__ GeneralForwardRow(const GeneralForward& problem, int64_t hidden, int64_t row, int threads,
                                               int slots, const InputRow (&inputs)[kInputs], uint4* memory)
      : problem(problem),
        inputs(inputs),
        memory(memory),
        thread(threadIdx.x),
        threads(threads),
        slots(slots),
        hidden(hidden) {
    has_branch = problem.sum != nullptr;
    sum_row = static_cast<T*>(problem.sum) + row * hidden;
    normed_row = static_cast<T*>(problem.normed) + row * hidden;
    const int misalignment = misalignment_of<kWidth>(normed_row);
    sum_aligned = misalignment_of<kWidth>(sum_row) == misalignment;
    begin = min(static_cast<int64_t>((kWidth - misalignment) % kWidth + problem.margin), hidden);
    vectors = max(hidden - begin - problem.margin, int64_t{0}) / kWidth;
    end = begin + vectors * kWidth;
    x_aligned = starts_aligned(inputs[kInputX]);
    branch_aligned = starts_aligned(inputs[kInputBranch]);
    edge_column = thread < begin ? thread : end + thread - begin;
    has_edge = thread < kWarp && edge_column < hidden;
    gate_row = inputs[kInputGate];
  }

  __device__ __forceinline__ bool starts_aligned(const InputRow& row) const {
    return reinterpret_cast<uintptr_t>(row.data + begin * sizeof(T)) % kVectorBytes == 0;
  }

  __device__ __forceinline__ void copy_row(const InputRow& from, uint4* to) const {
#pragma unroll 1
    for (int64_t vector = thread; vector < vectors; vector += threads) {
      cp_async(to + vector, from.data + begin * sizeof(T) + vector * kVectorBytes);
    }
  }

  // Copies aligned rows into shared memory.
  __device__ __forceinline__ void copy_aligned_rows() const {
    if (slots == 0) return;
    if (x_aligned) copy_row(inputs[kInputX], memory);
    if (has_branch && branch_aligned) copy_row(inputs[kInputBranch], memory + slots);
    cp_async_commit();
    cp_async_wait<0>();
  }

  template <int kCount>
  __device__ __forceinline__ void load_input(int index, int64_t column, float (&values)[kCount]) const {
    load_unaligned(reinterpret_cast<const T*>(inputs[index].data) + column, values);
  }

  // x += branch, times the gate if there is one; writes the sum and returns it as rounded.
  template <int kCount>
  __device__ __forceinline__ Vector<T, kCount> add_branch(float (&x)[kCount], float (&branch)[kCount],
                                                          float (&gate)[kCount], int64_t column) const {
    if (gate_row.data != nullptr) {
      load_unaligned<T>(gate_row, column, gate);
    } else {
#pragma unroll
      for (float& factor : gate) factor = 1.0f;
    }
    add_gated<T>(branch, gate, problem.stepwise, x);
    const auto sum = encode_all<T>(x);
    if (sum_aligned || kCount == 1) {
      store(sum_row + column, sum);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) sum_row[column + j] = sum.elements[j];
    }
    return sum;
  }

  __device__ __forceinline__ void load_edge(float (&edge)[1]) const {
    if (!has_edge) return;
    load_input(kInputX, edge_column, edge);
    if (has_branch) {
      float branch[1], gate[1];
      load_input(kInputBranch, edge_column, branch);
      decode_all(add_branch(edge, branch, gate, edge_column).elements, edge);
    }
  }

  // Reads a vector for the first time, and leaves it in shared memory for the next pass.
  __device__ __forceinline__ void read_first_time(uint4* slot, int64_t column, float (&x)[kWidth]) const {
    if (slots > 0 && x_aligned) {
      decode_all(vector_of<T>(*slot).elements, x);
    } else {
      load_input(kInputX, column, x);
    }
    if (has_branch) {
      float branch[kWidth], gate[kWidth];
      if (slots > 0 && branch_aligned) {
        decode_all(vector_of<T>(slot[slots]).elements, branch);
      } else {
        load_input(kInputBranch, column, branch);
      }
      const auto sum = add_branch(x, branch, gate, column);
      if (slots > 0) *slot = word_of<T>(sum);
      decode_all(sum.elements, x);
    } else if (slots > 0 && !x_aligned) {
      *slot = word_of<T>(encode_all<T>(x));
    }
  }

  // Calls `use` with each vector of the row and its column.
  template <typename Use>
  __device__ __forceinline__ void for_each_vector(bool first_time, const T* reread, Use&& use) const {
    uint4* slot = memory + thread;
    int64_t column = begin + static_cast<int64_t>(thread) * kWidth;
#pragma unroll 1
    for (; column < end; column += threads * kWidth, slot += threads) {
      float x[kWidth];
      if (first_time) {
        read_first_time(slot, column, x);
      } else if (slots > 0) {
        decode_all(vector_of<T>(*slot).elements, x);
      } else {
        load_unaligned(reread + column, x);
      }
      use(x, column);
    }
  }

  // The first element of the row, from which differences are taken.
  __device__ __forceinline__ float pivot() const {
    float pivot = 0.0f;
    if (problem.centered) {
      float values[1];
      load_input(kInputX, 0, values);
      pivot = values[0];
      if (has_branch) {
        load_input(kInputBranch, 0, values);
        const float branch = values[0];
        values[0] = 1.0f;
        if (gate_row.data != nullptr) load_unaligned<T>(gate_row, 0, values);
        pivot += branch * values[0];
      }
    }
    return pivot;
  }

  // Averages of differences from `from` and of their squares over the row.
  template <typename Scratch>
  __device__ __forceinline__ void average_differences(const float (&edge)[1], float from, bool first_time,
                                                      const T* reread, Scratch& scratch, float (&sums)[2]) const {
    sums[0] = sums[1] = 0.0f;
    add_differences(edge, has_edge, from, sums[0], sums[1]);
    for_each_vector(first_time, reread,
                    [&](const float (&x)[kWidth], int64_t) { add_differences(x, true, from, sums[0], sums[1]); });
    sum_over_block(sums, scratch);
    sums[0] = problem.average(sums[0]);
    sums[1] = problem.average(sums[1]);
  }
};

// Normalizes, modulates and writes elements of a row.
template <typename T>
struct GeneralNorm {
  T* normed_row;
  bool stepwise;
  float mean, rstd;
  InputRow weight_row, bias_row, scale_row, shift_row;

  template <int kCount>
  __device__ __forceinline__ void operator()(float (&x)[kCount], int64_t column) const {
    float factor[kCount], offset[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = (x[j] - mean) * rstd;
    if (weight_row.data != nullptr || bias_row.data != nullptr) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        factor[j] = 1.0f;
        offset[j] = 0.0f;
      }
      if (weight_row.data != nullptr) load_unaligned<T>(weight_row, column, factor);
      if (bias_row.data != nullptr) load_unaligned<T>(bias_row, column, offset);
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = fmaf(x[j], factor[j], offset[j]);
    }
    if (scale_row.data != nullptr) {
      load_unaligned<T>(scale_row, shift_row, column, factor, offset);
      if (stepwise) {
        round_to<T>(x);
#pragma unroll
        for (int j = 0; j < kCount; ++j) factor[j] += 1.0f;
        round_to<T>(factor);
#pragma unroll
        for (int j = 0; j < kCount; ++j) x[j] *= factor[j];
        round_to<T>(x);
#pragma unroll
        for (int j = 0; j < kCount; ++j) x[j] += offset[j];
      } else {
#pragma unroll
        for (int j = 0; j < kCount; ++j) x[j] = fmaf(x[j], factor[j], x[j] + offset[j]);
      }
    }
    store(normed_row + column, encode_all<T>(x));
  }
};

// The threads of an SM. ptxas ignores launch bounds of more, with a warning.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMostThreadsPerSm = 1024;
#else
constexpr int kMostThreadsPerSm = 1536;
#endif

template <int kRow>
constexpr int kGeneralBlocksPerSm =
    std::min(kForwardGeneralTable[kRow].blocks_per_sm, kMostThreadsPerSm / kForwardGeneralTable[kRow].max_threads);

template <typename T, int kRow>
__global__ void LAUNCH_BOUNDS(kForwardGeneralTable[kRow].max_threads, kGeneralBlocksPerSm<kRow>)
    forward_general_kernel(const __grid_constant__ GeneralForward problem) {
  constexpr ForwardGeneralConfig kConfig = kForwardGeneralTable[kRow];
  if constexpr (!kInThisCode<kForwardGeneralTable, kRow>) return;
  constexpr int kWidth = kVectorWidth<T>;
  extern __shared__ uint4 memory[];
  __shared__ alignas(16) float scratch[2][kConfig.max_threads / kWarp][2];
  __shared__ InputRow inputs[kInputs];
  const int threads = blockDim.x, slots = problem.slots;
  const int64_t hidden = problem.hidden, index = problem.first.row + blockIdx.x;
  find_inputs<T>(problem, hidden, index, inputs);
  const GeneralForwardRow<T> row(problem, hidden, index, threads, slots, inputs, memory);
  trigger_next_grid();
  grid_wait();
  row.copy_aligned_rows();
  float edge[1] = {};
  row.load_edge(edge);
  const T* const reread = row.has_branch ? row.sum_row : reinterpret_cast<const T*>(inputs[kInputX].data);
  const float pivot = row.pivot();
  float sums[2], mean = 0.0f;
  row.average_differences(edge, pivot, true, reread, scratch[0], sums);
  if (problem.centered) {
    mean = pivot + sums[0];
    if constexpr (sizeof(T) == sizeof(float)) {  // all digits of a float32 mean need a second pass
      row.average_differences(edge, mean, false, reread, scratch[1], sums);
      mean += sums[0];
    }
  } else {
    sums[0] = 0.0f;
  }
  const float rstd = rsqrtf(variance_of(sums[0], sums[1]) + problem.eps);
  const GeneralNorm<T> norm{
      row.normed_row,      problem.stepwise,   mean, rstd, inputs[kInputWeight], inputs[kInputBias],
      inputs[kInputScale], inputs[kInputShift]};
  row.for_each_vector(false, reread, [&](float (&x)[kWidth], int64_t column) { norm(x, column); });
  if (row.has_edge) norm(edge, row.edge_column);
}

template <typename T, int kRow>
cudaError_t launch_general_row(const Forward& problem, cudaStream_t stream) {
  constexpr ForwardGeneralConfig kConfig = kForwardGeneralTable[kRow];
  constexpr int kWidth = kVectorWidth<T>;
  const bool is_float32 = problem.type == Type::float32;
  const auto modulation = [](const Modulation& one) { return InputRows{one.rows, one.type == Type::float32, true}; };
  const auto parameter = [](const Parameter& one) { return InputRows{{one.data}, one.type == Type::float32, true}; };
  GeneralForward general{{{problem.x, is_float32, false},
                          {problem.branch, is_float32, false},
                          modulation(problem.gate),
                          parameter(problem.weight),
                          parameter(problem.bias),
                          modulation(problem.scale),
                          modulation(problem.shift)},
                         {0, 0, Divider(1)},
                         problem.hidden,
                         problem.normed,
                         problem.sum,
                         Average(problem.hidden),
                         problem.eps,
                         0,
                         0,
                         problem.centered,
                         problem.stepwise};
  const int64_t vectors = (problem.hidden + kWidth - 1) / kWidth;
  const int threads = threads_for(std::min<int64_t>(vectors, kConfig.max_threads * kConfig.vectors), kConfig.vectors);
  const int64_t slots = (vectors + threads - 1) / threads * threads;
  const size_t bytes = slots * kVectorBytes * (problem.branch.data == nullptr ? 1 : 2);
  const bool fits = bytes + kStaticSharedBytes <= kDefaultSharedBytes;
  if (fits) general.slots = static_cast<int>(slots);
  bool all_aligned = problem.hidden % kWidth == 0 && aligned(problem.normed) && aligned(problem.sum);
  for (const InputRows& input : general.inputs) {
    all_aligned = all_aligned && aligned(input.rows, input.is_float32 ? sizeof(float) : sizeof(T));
  }
  if (!all_aligned) general.margin = kWidth;
  return launch_in_parts(problem.rows, problem.span, [&](unsigned rows, const FirstRow& first) {
    general.first = first;
    return launch_with_pdl(forward_general_kernel<T, kRow>, dim3(rows), dim3(threads), fits ? bytes : 0, stream,
                           general);
  });
}

template <typename T>
cudaError_t launch_general(const Forward& problem, cudaStream_t stream) {
  return launch_row<kForwardGeneralTable>(find_row(kForwardGeneralTable, {compiled_capability(), problem.type}),
                                          [&](auto row) { return launch_general_row<T, row()>(problem, stream); });
}

}  // namespace
}  // namespace adaln
