// Modulated norms, with and without a gated branch that is added before, on CUDA.
//
// Reads:    x and the branch, each once from memory: a row stays in registers, or in shared memory, between its sums
//           and its result. Rows that are too long for that are read again. Parameters and modulations by way of the
//           processor's cache.
// Writes:   `normed`, and `sum` when there is a branch.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Bytes, for elements of e bytes and modulations of m bytes: rows * hidden * 2e (4e with a branch), and beside them
// rows / span * hidden * 2m (3m). A copy's speed leaves time for some ten instructions for each element: hence elements
// kept as they came, in half the registers, and decoded again; two rows to a thread, which decodes modulations once for
// both; one pass for both sums, of differences from an element of the row; and what few ask for apart from the rest.
// Memory is kept busy by asking for rows ahead of the blocks that read them, for the first ones while the kernel in
// front still runs.
#include "adaln_cuda/adaln.h"
#include "adaln_cuda/forward.cuh"
#include "adaln_cuda/forward_any.cuh"

namespace adaln {
namespace {

constexpr int kLoads = 2;              // vectors of a row in a thread
constexpr int64_t kAhead = 32 * 1024;  // bytes that are asked for ahead, for each processor
constexpr uint32_t kSpansAhead = 8;    // for which modulations are asked for ahead

// What all rows of a span share.
struct Shared {
  const void* data;
  int64_t stride;  // from one span to the next
};

// Rows that registers hold, in sets of neighbours, each within a span.
struct alignas(64) RowsForward {
  Lines x;
  void* normed;
  uint32_t sets, sets_of_span, span;
  Divider spans;  // of sets
  Average average;
  int hidden;
  float eps;
  uint32_t ahead;  // of how many sets, which have a block each; none where they do not follow one another, or are few
  bool centered, stepwise;
  bool wide;         // what rows share is float32 beside smaller elements
  bool only_shared;  // scale and shift alone, or with a weight, in steps of float32
  uint8_t staged;    // how many there are of scale, shift, weight and bias
  int8_t slots[4];   // where among them are scale, shift, weight and bias; negative where there is none
  Shared shared[4];  // those that there are
  // Null where there is no branch.
  void* sum;
  Lines branch;
  Shared gate;
};

// Keeps the compiler from keeping what was decoded of a vector until now: it is to be decoded again.
__device__ __forceinline__ void forget(uint4& word) {
  asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
}

// `change` gets each pair of a vector's elements, and where it is, and returns what becomes of it. In pairs, so that
// few elements are in registers as float32 at a time.
template <typename T, typename Change>
__device__ __forceinline__ void change_pairs(uint4& word, Change&& change) {
  auto vector = vector_of<T>(word);
#pragma unroll
  for (int pair = 0; pair < kVectorBytes / static_cast<int>(2 * sizeof(T)); ++pair) {
    float values[2];
    decode_all(&vector.elements[2 * pair], values);
    const float2 changed = change(pair, make_float2(values[0], values[1]));
    values[0] = changed.x;
    values[1] = changed.y;
    const auto encoded = encode_all<T>(values);
    memcpy(&vector.elements[2 * pair], &encoded, sizeof(encoded));
  }
  memcpy(&word, &vector, sizeof(word));
}

template <typename T>
__device__ __forceinline__ float2 pair_of(uint4 word, int pair) {
  const auto vector = vector_of<T>(word);
  float values[2];
  decode_all(&vector.elements[2 * pair], values);
  return make_float2(values[0], values[1]);
}

template <typename T>
__device__ __forceinline__ float2 round_pair(float2 pair) {
  float values[2] = {pair.x, pair.y};
  round_all<T>(values);
  return make_float2(values[0], values[1]);
}

__device__ __forceinline__ float2 multiply_add(float2 a, float2 b, float2 c) {
  return make_float2(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y));
}
__device__ __forceinline__ float2 multiply(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }

template <typename T, int kRows, bool kBranch>
__global__ void __launch_bounds__(kMostThreads, kBlocks) forward_kernel(const __grid_constant__ RowsForward problem) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  constexpr bool kSmall = sizeof(T) < sizeof(float);
  extern __shared__ uint4 memory[];
  __shared__ alignas(16) float scratch[2][kMostWarps][2 * kRows];
  const int hidden = problem.hidden, group = blockDim.x;
  // By one thread, and the same for all, for which there are cheaper instructions.
  const auto ask_for = [&](uint32_t set) {
    if (threadIdx.x != 0 || set >= problem.sets) return;
    const int64_t index = static_cast<int64_t>(set) * (kRows * hidden);
    prefetch_row_to_l2(static_cast<const T*>(problem.x.data) + index, kRows * hidden);
    if (kBranch) prefetch_row_to_l2(static_cast<const T*>(problem.branch.data) + index, kRows * hidden);
  };
  if (blockIdx.x < problem.ahead) ask_for(blockIdx.x);
  // Of the first spans, what their rows share.
  if (threadIdx.x == 0 && blockIdx.x < kSpansAhead &&
      static_cast<uint64_t>(blockIdx.x) * problem.sets_of_span < problem.sets) {
    const int64_t bytes = kSmall && !problem.wide ? sizeof(T) : sizeof(float);
    const auto ask_for_shared = [&](const Shared& shared) {
      prefetch_row_to_l2(static_cast<const char*>(shared.data) + blockIdx.x * shared.stride * bytes, hidden * bytes);
    };
    if (kBranch) ask_for_shared(problem.gate);
#pragma unroll 1
    for (int k = 0; k < problem.staged; ++k) ask_for_shared(problem.shared[k]);
  }
  grid_wait();
  // A thread without rows still takes part in the sums of its warp: with the last ones, which it does not write.
  const uint32_t own_set = blockIdx.x * blockDim.y + threadIdx.y, set = min(own_set, problem.sets - 1);
  const uint32_t span = problem.spans(set), first = (set - span * problem.sets_of_span) * kRows;
  // The second row of a set may lie past its span. It is then the first one again, and not written.
  const bool there = own_set < problem.sets, second = kRows == 2 && first + 1 < problem.span;
  const int own_column = static_cast<int>(threadIdx.x) * kWidth, step = group * kWidth;
  const auto has = [&](int i) { return own_column + i * step < hidden; };
  const int64_t written = static_cast<int64_t>(span * problem.span + first) * hidden + own_column;
  // Zero where there is nothing: whole words, for a vector would be put together as soon as it is there.
  const auto read = [&](const Lines& lines, uint4(&words)[kRows][kLoads]) {
    const T* from = lines.at<T>(span, first) + own_column;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        words[r][i] = make_uint4(0, 0, 0, 0);
        if (has(i)) words[r][i] = load_word_once(reinterpret_cast<const uint4*>(from + i * step));
      }
      if (second) from += lines.row_stride;
    }
  };
  const auto read_first = [&](const Lines& lines, T(&elements)[kRows]) {
    const T* from = lines.at<T>(span, first);
#pragma unroll
    for (int r = 0; r < kRows; ++r) elements[r] = from[second ? r * lines.row_stride : 0];
  };
  const auto write = [&](void* to, int r, int i, uint4 word) {
    if (there && (r == 0 || second) && has(i)) {
      store_word_streaming(reinterpret_cast<uint4*>(static_cast<T*>(to) + written + (r * hidden + i * step)), word);
    }
  };
  uint4 words[kRows][kLoads];
  T first_of_x[kRows], first_of_branch[kRows], first_of_gate;  // not decoded yet, which would wait for them
  float first_of_wide_gate;
  read(problem.x, words);
  if (problem.centered) read_first(problem.x, first_of_x);
  trigger_next_grid();  // behind the first loads, so as not to stand in their way
  // Scale, shift, weight and bias, on their way into shared memory, where each thread finds its own: in registers they
  // would keep rows from the processor.
  const int threads = group * blockDim.y, own = threadIdx.y * group + threadIdx.x;
  const int words_each = kSmall && problem.wide ? 2 : 1;
  const auto slot_of = [&](int k, int i) { return memory + (k * kLoads + i) * words_each * threads + own; };
  const auto only_slot_of = [&](int k, int i) { return memory + (k * kLoads + i) * threads + own; };  // of one word
  const auto stage_all = [&] {
    __syncwarp();  // the rows' own loads go first
    if (problem.only_shared) {
      const auto stage = [&](int k) {
        const T* from = static_cast<const T*>(problem.shared[k].data) + (span * problem.shared[k].stride + own_column);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (has(i)) cp_async<true>(only_slot_of(k, i), from + i * step);
        }
      };
      stage(0);
      stage(1);
      if (problem.staged > 2) stage(2);
    } else {
#pragma unroll 1
      for (int k = 0; k < problem.staged; ++k) {
        const int64_t bytes = kSmall && !problem.wide ? sizeof(T) : sizeof(float);
        const Shared& shared = problem.shared[k];
        const char* from = static_cast<const char*>(shared.data) + (span * shared.stride + own_column) * bytes;
#pragma unroll 1
        for (int i = 0; i < kLoads; ++i) {
          for (int word = 0; word < words_each && has(i); ++word) {
            cp_async<true>(slot_of(k, i) + word * threads, from + i * step * bytes + word * kVectorBytes);
          }
        }
      }
    }
    cp_async_commit();
  };
  // A pair of what was read into shared memory.
  const auto shared_pair = [&](int k, int i, int pair) {
    const uint4* slot = slot_of(k, i);
    if (!kSmall || !problem.wide) return pair_of<T>(*slot, pair);
    return reinterpret_cast<const float2*>(slot + pair / 2 * threads)[pair % 2];
  };
  if constexpr (kBranch) {
    const int64_t gate_row = span * problem.gate.stride;
    uint4 branch[kRows][kLoads];
    read(problem.branch, branch);
    const T* gate = static_cast<const T*>(problem.gate.data) + gate_row;
    const float* wide_gate = static_cast<const float*>(problem.gate.data) + gate_row;
    uint4 gates[kLoads];
    if (!kSmall || !problem.wide) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (has(i)) gates[i] = load_word_now(reinterpret_cast<const uint4*>(gate + own_column + i * step));
      }
    }
    if (problem.centered) {
      if (kSmall && problem.wide) {
        first_of_wide_gate = *wide_gate;
      } else {
        first_of_gate = *gate;
      }
      read_first(problem.branch, first_of_branch);
    }
    stage_all();
    if (problem.ahead > 0) ask_for(blockIdx.x + problem.ahead);
    const auto add_branch = [&](auto wide, auto stepwise) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (!has(i)) continue;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          change_pairs<T>(words[r][i], [&](int pair, float2 x) {
            float2 factors;
            if constexpr (decltype(wide)::value) {
              factors = reinterpret_cast<const float2*>(wide_gate + own_column + i * step)[pair];
            } else {
              factors = pair_of<T>(gates[i], pair);
            }
            const float2 product = pair_of<T>(branch[r][i], pair);
            if constexpr (!decltype(stepwise)::value) return multiply_add(product, factors, x);
            return add(x, round_pair<T>(multiply(product, factors)));
          });
          write(problem.sum, r, i, words[r][i]);
        }
      }
    };
    if (kSmall && problem.wide) {
      add_branch(std::true_type{}, std::false_type{});
    } else if (kSmall && problem.stepwise) {
      add_branch(std::false_type{}, std::true_type{});
    } else {
      add_branch(std::false_type{}, std::false_type{});
    }
  } else {
    stage_all();
    if (problem.ahead > 0) ask_for(blockIdx.x + problem.ahead);
  }

  float means[kRows] = {}, rstds[kRows], sums[2 * kRows] = {};
  const auto average_over_row = [&](float (&room)[kMostWarps][2 * kRows]) {
    if (group > kWarp) {
      sum_over_block(sums, room);
    } else {
#pragma unroll 1
      for (int distance = group / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int k = 0; k < 2 * kRows; ++k) sums[k] += __shfl_xor_sync(kAllLanes, sums[k], distance);
      }
    }
#pragma unroll
    for (int k = 0; k < 2 * kRows; ++k) sums[k] = problem.average(sums[k]);
  };
  const auto add_all = [&](auto&& each) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        float x[kWidth];
        decode_all(vector_of<T>(words[r][i]).elements, x);
        each(r, x, has(i));
        forget(words[r][i]);
      }
    }
  };
  const auto add_differences_from = [&](const float (&from)[kRows]) {
    add_all([&](int r, const float (&x)[kWidth], bool has) {
      add_differences(x, has, from[r], sums[2 * r], sums[2 * r + 1]);
    });
  };
  float pivots[kRows];
  if (problem.centered) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      pivots[r] = decode(first_of_x[r]);
      if constexpr (kBranch) {
        const float factor = kSmall && problem.wide ? first_of_wide_gate : decode(first_of_gate);
        pivots[r] += decode(first_of_branch[r]) * factor;
      }
    }
    add_differences_from(pivots);
  } else {
    add_all([&](int r, const float (&x)[kWidth], bool) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[2 * r + 1] += x[j] * x[j];
    });
  }
  average_over_row(scratch[0]);
  if (problem.centered) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) means[r] = pivots[r] + sums[2 * r];
    if constexpr (!kSmall) {  // whose digits are all there only where differences are those from the mean
#pragma unroll
      for (int k = 0; k < 2 * kRows; ++k) sums[k] = 0.0f;
      add_differences_from(means);
      average_over_row(scratch[1]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) means[r] += sums[2 * r];
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) rstds[r] = rsqrtf(variance_of(sums[2 * r], sums[2 * r + 1]) + problem.eps);

  cp_async_wait<0>();
  if (problem.only_shared) {
    const auto norm = [&](auto weighted) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (!has(i)) continue;
        const uint4 scale = *only_slot_of(0, i), shift = *only_slot_of(1, i);
        uint4 weight;
        if constexpr (decltype(weighted)::value) weight = *only_slot_of(2, i);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          change_pairs<T>(words[r][i], [&](int pair, float2 x) {
            const float2 scales = pair_of<T>(scale, pair), rstd = make_float2(rstds[r], rstds[r]);
            float2 factors;
            if constexpr (decltype(weighted)::value) {
              const float2 weights = pair_of<T>(weight, pair);
              factors = multiply(multiply_add(scales, weights, weights), rstd);
            } else {
              factors = multiply_add(scales, rstd, rstd);
            }
            return multiply_add(make_float2(x.x - means[r], x.y - means[r]), factors, pair_of<T>(shift, pair));
          });
          write(problem.normed, r, i, words[r][i]);
        }
      }
    };
    if (problem.staged == 2) {
      norm(std::false_type{});
    } else {
      norm(std::true_type{});
    }
    return;
  }
  // Whatever else there may be, one vector after the other.
#pragma unroll 1
  for (int k = 0; k < kRows * kLoads; ++k) {
    const int r = k / kLoads, i = k % kLoads;
    if (!has(i)) continue;
    uint4 word = words[0][0];
    float mean = means[0], rstd = rstds[0];
#pragma unroll
    for (int other = 1; other < kRows * kLoads; ++other) {
      if (k != other) continue;
      word = words[other / kLoads][other % kLoads];
      mean = means[other / kLoads];
      rstd = rstds[other / kLoads];
    }
    change_pairs<T>(word, [&](int pair, float2 x) {
      float2 normed = make_float2((x.x - mean) * rstd, (x.y - mean) * rstd);
      if (problem.slots[2] >= 0) normed = multiply(normed, shared_pair(problem.slots[2], i, pair));
      if (problem.slots[3] >= 0) normed = add(normed, shared_pair(problem.slots[3], i, pair));
      if (problem.slots[0] < 0) return normed;
      float2 factors = shared_pair(problem.slots[0], i, pair);
      factors = make_float2(factors.x + 1.0f, factors.y + 1.0f);
      const float2 offsets = shared_pair(problem.slots[1], i, pair);
      if (!kSmall || !problem.stepwise) return multiply_add(normed, factors, offsets);
      normed = round_pair<T>(multiply(round_pair<T>(normed), round_pair<T>(factors)));
      return add(normed, offsets);
    });
    write(problem.normed, r, i, word);
  }
}

constexpr int kSharedBlock = 128;  // threads of a block of several sets

// How sets of rows are laid over blocks, and what a block takes of shared memory.
struct Sets {
  int group;  // threads of a set
  int side;   // sets of a block
  size_t bytes;
};

Sets sets_for(int vectors, int words_staged) {
  int group = threads_for(vectors, kLoads);
  while (group <= kWarp && group / 2 * kLoads >= vectors) group /= 2;
  const int side = group > kWarp ? 1 : kSharedBlock / group;
  return {group, side, size_t{kVectorBytes} * kLoads * group * side * words_staged};
}

template <typename T, int kRows, bool kBranch>
cudaError_t launch_rows(RowsForward& problem, int64_t rows, const Sets& sets, cudaStream_t stream) {
  int processors;
  cudaError_t error = sm_count(&processors);
  if (error != cudaSuccess) return error;
  problem.sets_of_span = (problem.span + kRows - 1) / kRows;
  problem.sets = static_cast<uint32_t>(rows / problem.span) * problem.sets_of_span;
  problem.spans = Divider(problem.sets_of_span);
  const auto follow = [&](const Lines& lines) {
    return lines.row_stride == problem.hidden && lines.span_stride == int64_t{problem.span} * problem.hidden;
  };
  const int64_t bytes_of_row = int64_t{problem.hidden} * sizeof(T) * (kBranch ? 2 : 1);  // that are read
  if (sets.side == 1 && problem.span % kRows == 0 && follow(problem.x) && (!kBranch || follow(problem.branch)) &&
      ask_early(2 * rows * bytes_of_row)) {
    const int64_t bytes = bytes_of_row * kRows;
    problem.ahead = static_cast<uint32_t>(processors * std::max<int64_t>(kAhead / bytes, 1));
  }
  const auto kernel = forward_kernel<T, kRows, kBranch>;
  if (sets.bytes + kStaticBytes > kUsualBytes) {
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    error = cudaFuncSetAttribute(kernel, attribute, static_cast<int>(sets.bytes));
    if (error != cudaSuccess) return error;
  }
  return launch_with_pdl(kernel, dim3((problem.sets + sets.side - 1) / sets.side), dim3(sets.group, sets.side),
                         sets.bytes, stream, problem);
}

template <typename T>
cudaError_t launch(const Forward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  CommonType common(problem.type);
  for (const Modulation* modulation : {&problem.gate, &problem.scale, &problem.shift}) common.add(*modulation);
  for (const Parameter* parameter : {&problem.weight, &problem.bias}) common.add(*parameter);
  const bool wide = common.type() != problem.type;
  // Without modulations, any division of the rows will do.
  const bool modulated = problem.scale.rows.data != nullptr || problem.gate.rows.data != nullptr;
  const int64_t span = !modulated && problem.x.dims == 2 ? problem.x.sizes[1] : problem.span;
  Lines x, branch;
  if (problem.hidden % kWidth != 0 || problem.hidden > kMostThreads * kLoads * kWidth || !common.one() ||
      (problem.stepwise && wide) || problem.rows >= INT32_MAX || !aligned(problem.x, sizeof(T)) ||
      !aligned(problem.branch, sizeof(T)) || !aligned(problem.gate) || !aligned(problem.scale) ||
      !aligned(problem.shift) || !aligned(problem.weight.data) || !aligned(problem.bias.data) ||
      !aligned(problem.normed) || !aligned(problem.sum) || problem.gate.rows.dims > 1 || problem.scale.rows.dims > 1 ||
      problem.shift.rows.dims > 1 || !lines_of(problem.x, span, &x) || !lines_of(problem.branch, span, &branch)) {
    return launch_any<T>(problem, stream);
  }
  const Shared shared[] = {{problem.scale.rows.data, problem.scale.rows.strides[0]},
                           {problem.shift.rows.data, problem.shift.rows.strides[0]},
                           {problem.weight.data, 0},
                           {problem.bias.data, 0}};
  RowsForward rows{x,
                   problem.normed,
                   0,
                   0,
                   static_cast<uint32_t>(span),
                   Divider(1),
                   Average(problem.hidden),
                   static_cast<int>(problem.hidden),
                   problem.eps,
                   0,
                   problem.centered,
                   problem.stepwise,
                   wide,
                   shared[0].data != nullptr && shared[3].data == nullptr && !problem.stepwise && !wide,
                   0,
                   {-1, -1, -1, -1},
                   {},
                   problem.sum,
                   branch,
                   {problem.gate.rows.data, problem.gate.rows.strides[0]}};
  for (int k = 0; k < 4; ++k) {
    if (shared[k].data == nullptr) continue;
    rows.slots[k] = static_cast<int8_t>(rows.staged);
    rows.shared[rows.staged++] = shared[k];
  }
  const Sets sets = sets_for(rows.hidden / kWidth, rows.staged * (wide ? 2 : 1));
  if (sets.bytes + kStaticBytes > kUsualBytes && sets.bytes + kStaticBytes > most_shared_bytes()) {
    return launch_any<T>(problem, stream);
  }
  return problem.branch.data == nullptr ? launch_rows<T, 2, false>(rows, problem.rows, sets, stream)
                                        : launch_rows<T, 1, true>(rows, problem.rows, sets, stream);
}

}  // namespace

int forward(const Forward& problem, void* stream) {
  cudaError_t error = cudaSuccess;
  dispatch_dtype(problem.type, [&](auto tag) {
    error = launch<typename decltype(tag)::Element>(problem, static_cast<cudaStream_t>(stream));
  });
  return error;
}

}  // namespace adaln
