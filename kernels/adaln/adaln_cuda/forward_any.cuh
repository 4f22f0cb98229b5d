// Modulated norms of rows of any length, wherever they lie, with modulations and parameters of any types, with and
// without a gated branch that is added before, on CUDA.
//
// Reads:    x and the branch, each once from memory: a row waits in shared memory between its sums and its result. Rows
//           that are too long for that are read again. Parameters and modulations by way of the processor's cache.
// Writes:   `normed`, and `sum` when there is a branch.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// A block has a row. Its vectors are those of the row that is written. What lies otherwise is put together from the two
// words that hold a vector, which takes a quarter of the cache's time that elements would; so that both are of the row,
// a few elements at its ends are read one by one.
//
// Included by forward.cu: an object of its own would make the package 9 KB larger.
#pragma once

#include "adaln_cuda/forward.cuh"

namespace adaln {
namespace {

constexpr int kLoadsOfAny = 4;  // vectors of a row in a thread, if the row is short enough

// What is read.
enum Reads : int { kX, kBranch, kGate, kWeight, kBias, kScale, kShift, kReads };

struct Read {
  Rows rows;
  bool wide;     // whether it is float32
  bool of_span;  // whether there is a row of it for each span
};

struct AnyForward {
  Read reads[kReads];
  First first;
  int64_t hidden;
  void *normed, *sum;
  Average average;
  float eps;
  int slots;   // vectors of each of x and branch that shared memory has room for; 0: rows do not wait there
  int margin;  // elements at each end of a row that are read one by one
  bool centered, stepwise;
};

// A row, or none.
struct AnyRow {
  const char* data;
  bool wide;
};

// From global memory, which the compiler cannot know of an address that comes from shared memory.
__device__ __forceinline__ uint32_t load_element(const uint32_t* from) {
  uint32_t word;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ uint16_t load_element(const uint16_t* from) {
  uint16_t word;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(word) : "l"(from) : "memory");
  return word;
}

template <typename T>
__device__ __forceinline__ uint4 word_of(const VectorOf<T>& vector) {
  uint4 word;
  memcpy(&word, &vector, sizeof(word));
  return word;
}

// A vector on its way that begins at any element, within a row that goes on for another vector at both sides unless it
// is aligned: the two words that hold it.
template <typename T>
struct Shifted {
  uint4 low, high;
  unsigned shift;

  __device__ __forceinline__ explicit Shifted(const T* from) {
    const auto address = reinterpret_cast<uintptr_t>(from);
    const auto* words = reinterpret_cast<const uint4*>(address / kVectorBytes * kVectorBytes);
    shift = static_cast<unsigned>(address % kVectorBytes);
    low = load_word_once(words);
    high = make_uint4(0, 0, 0, 0);
    if (shift != 0) high = load_word_once(words + 1);
  }

  __device__ __forceinline__ uint4 word() const { return shift == 0 ? low : word_from(low, high, shift); }
};

template <int kCount>
__device__ __forceinline__ void load_anywhere(const float* from, float (&values)[kCount]) {
  if constexpr (kCount > 1) {
    if (reinterpret_cast<uintptr_t>(from) % kVectorBytes == 0) {
#pragma unroll
      for (int i = 0; i < kCount; i += kVectorBytes / sizeof(float)) {
        const uint4 word = load_word_once(reinterpret_cast<const uint4*>(from + i));
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
__device__ __forceinline__ void load_anywhere(const T* from, float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    const auto word = load_element(reinterpret_cast<const uint16_t*>(from));
    T element;
    memcpy(&element, &word, sizeof(element));
    values[0] = decode(element);
  } else {
    decode_all(vector_of<T>(Shifted<T>(from).word()).elements, values);
  }
}
template <typename T, int kCount>
__device__ __forceinline__ void load_anywhere(const AnyRow& row, int64_t column, float (&values)[kCount]) {
  if (sizeof(T) == sizeof(float) || row.wide) {
    load_anywhere(reinterpret_cast<const float*>(row.data) + column, values);
  } else {
    load_anywhere(reinterpret_cast<const T*>(row.data) + column, values);
  }
}
// Two at once, both on their way before the first is used.
template <typename T, int kCount>
__device__ __forceinline__ void load_anywhere(const AnyRow& row, const AnyRow& other_row, int64_t column,
                                              float (&values)[kCount], float (&others)[kCount]) {
  if constexpr (sizeof(T) < sizeof(float) && kCount > 1) {
    if (!row.wide && !other_row.wide) {
      const Shifted<T> shifted(reinterpret_cast<const T*>(row.data) + column);
      const Shifted<T> other(reinterpret_cast<const T*>(other_row.data) + column);
      decode_all(vector_of<T>(shifted.word()).elements, values);
      decode_all(vector_of<T>(other.word()).elements, others);
      return;
    }
  }
  load_anywhere<T>(row, column, values);
  load_anywhere<T>(other_row, column, others);
}

template <typename T>
__global__ void __launch_bounds__(kMostThreads, kBlocks)
    forward_any_kernel(const __grid_constant__ AnyForward problem) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  extern __shared__ uint4 memory[];
  __shared__ alignas(16) float scratch[2][kMostWarps][2];
  __shared__ AnyRow reads[kReads];
  const int thread = threadIdx.x, threads = blockDim.x, slots = problem.slots;
  const int64_t hidden = problem.hidden, row = problem.first.row + blockIdx.x;
  // Where what is read begins: a thread finds one of them for all.
  if (thread < kReads) {
    const Read& read = problem.reads[thread];
    const auto* data = static_cast<const char*>(read.rows.data);
    if (data != nullptr) {
      data += read.rows.offset(read.of_span ? problem.first.span + problem.first.spans(blockIdx.x) : row) *
              static_cast<int64_t>(read.wide ? sizeof(float) : sizeof(T));
      if (thread <= kBranch) prefetch_row_to_l2(reinterpret_cast<const T*>(data), hidden);
    }
    reads[thread] = {data, read.wide};
  }
  __syncthreads();
  const bool branched = problem.sum != nullptr;
  T* const sum_row = static_cast<T*>(problem.sum) + row * hidden;
  T* const normed_row = static_cast<T*>(problem.normed) + row * hidden;
  const int begin = before<kWidth>(normed_row);
  const bool sum_whole = before<kWidth>(sum_row) == begin;
  const int64_t first = min(static_cast<int64_t>((kWidth - begin) % kWidth + problem.margin), hidden);
  const int64_t vectors = max(hidden - first - problem.margin, int64_t{0}) / kWidth, behind = first + vectors * kWidth;
  const auto starts_whole = [&](const AnyRow& one) {
    return reinterpret_cast<uintptr_t>(one.data + first * sizeof(T)) % kVectorBytes == 0;
  };
  const bool x_whole = starts_whole(reads[kX]), branch_whole = starts_whole(reads[kBranch]);
  // The first threads have an element before or behind the vectors each.
  const int64_t single = thread < first ? thread : behind + thread - first;
  const bool has_single = thread < kWarp && single < hidden;
  const AnyRow gate_row = reads[kGate];
  trigger_next_grid();
  grid_wait();
  if (slots > 0) {
    const auto fetch = [&](const AnyRow& from, uint4* to) {
#pragma unroll 1
      for (int64_t vector = thread; vector < vectors; vector += threads) {
        cp_async(to + vector, from.data + first * sizeof(T) + vector * kVectorBytes);
      }
    };
    if (x_whole) fetch(reads[kX], memory);
    if (branched && branch_whole) fetch(reads[kBranch], memory + slots);
    cp_async_commit();
    cp_async_wait<0>();
  }
  float only[1] = {};
  const auto load_row = [&](int index, int64_t column, auto& values) {
    load_anywhere(reinterpret_cast<const T*>(reads[index].data) + column, values);
  };
  const auto add_branch = [&](auto& x, auto& branch, auto& gate, int64_t column) {
    constexpr int kCount = sizeof(x) / sizeof(float);
    load_anywhere<T>(gate_row, column, gate);
    add_gated<T>(branch, gate, problem.stepwise, x);
    const auto sum = encode_all<T>(x);
    if (sum_whole || kCount == 1) {
      store(sum_row + column, sum);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) sum_row[column + j] = sum.elements[j];
    }
    return sum;
  };
  if (has_single) {
    load_row(kX, single, only);
    if (branched) {
      float branch[1], gate[1];
      load_row(kBranch, single, branch);
      decode_all(add_branch(only, branch, gate, single).elements, only);
    }
  }
  const T* const later = branched ? sum_row : reinterpret_cast<const T*>(reads[kX].data);
  // The vectors of the row, from where they are after the first pass over them.
  const auto visit = [&](bool first_time, auto&& use) {
    uint4* slot = memory + thread;
    int64_t column = first + static_cast<int64_t>(thread) * kWidth;
#pragma unroll 1
    for (; column < behind; column += threads * kWidth, slot += threads) {
      float x[kWidth];
      if (first_time) {
        if (slots > 0 && x_whole) {
          decode_all(vector_of<T>(*slot).elements, x);
        } else {
          load_row(kX, column, x);
        }
        if (branched) {
          float branch[kWidth], gate[kWidth];
          if (slots > 0 && branch_whole) {
            decode_all(vector_of<T>(slot[slots]).elements, branch);
          } else {
            load_row(kBranch, column, branch);
          }
          const auto sum = add_branch(x, branch, gate, column);
          if (slots > 0) *slot = word_of(sum);
          decode_all(sum.elements, x);
        } else if (slots > 0 && !x_whole) {
          *slot = word_of(encode_all<T>(x));
        }
      } else if (slots > 0) {
        decode_all(vector_of<T>(*slot).elements, x);
      } else {
        load_anywhere(later + column, x);
      }
      use(x, column);
    }
  };
  float pivot = 0.0f;
  if (problem.centered) {
    float values[1];
    load_row(kX, 0, values);
    pivot = values[0];
    if (branched) {
      load_row(kBranch, 0, values);
      const float branch = values[0];
      load_anywhere<T>(gate_row, 0, values);
      pivot += branch * values[0];
    }
  }
  float sums[2], mean = 0.0f;
  const auto average_of = [&](float from, int pass) {
    sums[0] = sums[1] = 0.0f;
    add_differences(only, has_single, from, sums[0], sums[1]);
    visit(pass == 0, [&](const float (&x)[kWidth], int64_t) { add_differences(x, true, from, sums[0], sums[1]); });
    sum_over_block(sums, scratch[pass]);
    sums[0] = problem.average(sums[0]);
    sums[1] = problem.average(sums[1]);
  };
  average_of(pivot, 0);
  if (problem.centered) {
    mean = pivot + sums[0];
    if constexpr (sizeof(T) == sizeof(float)) {
      average_of(mean, 1);
      mean += sums[0];
    }
  } else {
    sums[0] = 0.0f;
  }
  const float rstd = rsqrtf(variance_of(sums[0], sums[1]) + problem.eps);
  const AnyRow weight_row = reads[kWeight], bias_row = reads[kBias], scale_row = reads[kScale];
  const AnyRow shift_row = reads[kShift];
  const auto norm = [&](auto& x, auto& factor, auto& offset, int64_t column) {
    constexpr int kCount = sizeof(x) / sizeof(float);
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = (x[j] - mean) * rstd;
    if (weight_row.data != nullptr || bias_row.data != nullptr) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        factor[j] = 1.0f;
        offset[j] = 0.0f;
      }
      if (weight_row.data != nullptr) load_anywhere<T>(weight_row, column, factor);
      if (bias_row.data != nullptr) load_anywhere<T>(bias_row, column, offset);
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = fmaf(x[j], factor[j], offset[j]);
    }
    if (scale_row.data != nullptr) {
      load_anywhere<T>(scale_row, shift_row, column, factor, offset);
      if (problem.stepwise) {
        round_all<T>(x);
#pragma unroll
        for (int j = 0; j < kCount; ++j) factor[j] += 1.0f;
        round_all<T>(factor);
#pragma unroll
        for (int j = 0; j < kCount; ++j) x[j] *= factor[j];
        round_all<T>(x);
#pragma unroll
        for (int j = 0; j < kCount; ++j) x[j] += offset[j];
      } else {
#pragma unroll
        for (int j = 0; j < kCount; ++j) x[j] = fmaf(x[j], factor[j], x[j] + offset[j]);
      }
    }
    store(normed_row + column, encode_all<T>(x));
  };
  visit(false, [&](float (&x)[kWidth], int64_t column) {
    float factor[kWidth], offset[kWidth];
    norm(x, factor, offset, column);
  });
  if (has_single) {
    float factor[1], offset[1];
    norm(only, factor, offset, single);
  }
}

template <typename T>
cudaError_t launch_any(const Forward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool wide = problem.type == Type::float32;
  const auto modulation = [](const Modulation& one) { return Read{one.rows, one.type == Type::float32, true}; };
  const auto parameter = [](const Parameter& one) { return Read{{one.data}, one.type == Type::float32, true}; };
  AnyForward any{{{problem.x, wide, false},
                  {problem.branch, wide, false},
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
  const int threads = threads_for(std::min<int64_t>(vectors, kMostThreads * kLoadsOfAny), kLoadsOfAny);
  const int64_t slots = (vectors + threads - 1) / threads * threads;
  const size_t bytes = slots * kVectorBytes * (problem.branch.data == nullptr ? 1 : 2);
  const bool held = bytes + kStaticBytes <= kUsualBytes;
  if (held) any.slots = static_cast<int>(slots);
  bool all_aligned = problem.hidden % kWidth == 0 && aligned(problem.normed) && aligned(problem.sum);
  for (const Read& read : any.reads) {
    all_aligned = all_aligned && aligned(read.rows, read.wide ? sizeof(float) : sizeof(T));
  }
  if (!all_aligned) any.margin = kWidth;
  return launch_in_parts(problem.rows, problem.span, [&](unsigned rows, const First& first) {
    any.first = first;
    return launch_with_pdl(forward_any_kernel<T>, dim3(rows), dim3(threads), held ? bytes : 0, stream, any);
  });
}

}  // namespace
}  // namespace adaln
