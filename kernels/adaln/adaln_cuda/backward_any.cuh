// Backward of modulated norms of rows of any length, wherever they lie, with modulations and parameters of any types,
// with and without a gated branch that was added before, on CUDA.
//
// Reads:    grad, x, grad_sum and the branch, and modulations that every row has of its own, each once from memory: a
//           row waits in shared memory between its sums and its result. Rows too long for that come again, in pieces.
// Writes:   what backward.cu says.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// A row has a group of threads, up to a warp of them or several warps, and a block several groups, which stay for all
// of its rows. What a row is computed from comes in whole words into a ring in shared memory, also where the row begins
// within a word; it is moved there so that its vectors are words, and a thread has the same columns of each row, and
// adds up their sums by itself. Results that lie otherwise go to memory by the same way.
//
// Included by backward.cu.
#pragma once

#include "adaln_cuda/device.cuh"
#include "kit/unaligned_rows.cuh"

namespace adaln {
namespace {

constexpr int kAnyThreads = 512;  // of a block, of which a processor has one
constexpr int kMostStages = 3;
constexpr size_t kAnyOwnBytes = 2 * 1024;  // of shared memory, at most, besides the dynamic

// What rows are computed from.
enum Operand : int {
  kFromX,
  kFromGrad,
  kFromGradSum,
  kFromBranch,
  kFromScale,
  kFromGate,
  kFromWeight,
  kFromBias,
  kOperands
};

struct Source {
  Rows rows;    // data null: there is none
  uint32_t at;  // where it lies, in bytes: of the rows of a stage, or of what stays
  Kind kind;
  bool by_row;  // whether there is a row of it for each row, not for each group of rows
  bool stays;   // whether the block has it for all of its rows
};

// How rows lie over blocks.
struct AnyLayout {
  int group, rows;  // threads of a row; rows of a block
  int loads;        // vectors of a thread that wait in shared memory
  int pieces;       // of a row, each of so many vectors
  int stages;       // rows of a ring, or pieces
  bool sums;        // whether they are in shared memory
  uint32_t stage_bytes, ring_bytes, fixed_bytes, sums_at;
  size_t bytes;
};

struct AnyBackward {
  Source sources[kOperands];
  AnyLayout layout;
  int64_t rows, hidden;  // of a group
  uint32_t parts;
  int kinds;  // of sums
  float* partial;
  void* results[kOperands];  // each like an operand, whose place it takes in shared memory; null: there is none
  Average average;
  float eps;
  bool centered, own;
  bool shifted;  // whether there is a row, read or written, that does not consist of whole words
};

// The first `left` bytes of a word, and zeros behind them.
__device__ __forceinline__ void copy_part(uint32_t to, const char* from, int64_t left) {
  if (left >= kVectorBytes) {
    cp_async<uint4>(to, from);
  } else if (left <= 0) {
    store_shared(to, uint4{});
  } else {
    copy_zero_filled<uint4>(to, from, static_cast<uint32_t>(left));
  }
}

__device__ __forceinline__ void wait_for_all_but(int pending) {
  if (pending >= 2) {
    cp_async_wait<2>();
  } else if (pending == 1) {
    cp_async_wait<1>();
  } else {
    cp_async_wait<0>();
  }
}

__device__ __forceinline__ uint16_t load_half(uint32_t from) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(from) : "memory");
  return half;
}

// 16 bytes of shared memory, from the byte `shift` of a word on.
__device__ __forceinline__ uint4 word_at(uint32_t from, unsigned shift) {
  const uint4 word = load_shared(from, uint4{});
  if (shift == 0) return word;
  return word_from(word, load_shared(from + 16, uint4{}), shift);
}

__global__ void __launch_bounds__(kAnyThreads) backward_any_kernel(const __grid_constant__ AnyBackward problem) {
  constexpr int kWidth = kAnyWidth, kQuads = kWidth / 4;
  extern __shared__ float4 memory[];
  __shared__ float4 of_warps[2][kAnyThreads / kWarp];
  const AnyLayout& layout = problem.layout;
  const int64_t hidden = problem.hidden;
  const int group = blockDim.x, thread = threadIdx.x, threads = blockDim.x * blockDim.y;
  const int number = threadIdx.y * group + thread;
  const int loads = layout.loads;
  const uint32_t rows_group = blockIdx.x / problem.parts, part = blockIdx.x - rows_group * problem.parts;
  const int64_t first = static_cast<int64_t>(part) * blockDim.y,
                stride = static_cast<int64_t>(problem.parts) * blockDim.y;
  const uint32_t base = shared_address(memory);
  const uint32_t ring = base + layout.fixed_bytes + threadIdx.y * layout.ring_bytes;
  const uint32_t moved = ring + layout.stages * layout.stage_bytes;
  float4* const sums_memory = memory + layout.sums_at / sizeof(float4);
  const auto row_at = [&](int64_t turn) {
    return static_cast<int64_t>(rows_group) * problem.rows + turn + threadIdx.y;
  };
  const auto words_of = [&](const Source& source) { return source.kind.words(); };  // of a vector
  const auto size_of = [&](const Source& source) { return source.kind.bytes(); };   // of an element
  const auto address_of = [&](const Source& source, int64_t row) {
    return static_cast<const char*>(source.rows.data) +
           source.rows.offset(source.by_row ? row : static_cast<int64_t>(rows_group)) * size_of(source);
  };
  // So that what begins within a word begins with one. Of what stays, in its place.
  const auto move = [&](const Source& source, int64_t row, uint32_t from, uint32_t to) {
    const auto shift = static_cast<unsigned>(reinterpret_cast<uintptr_t>(address_of(source, row)) % kVectorBytes);
    const int words = words_of(source);
    const bool own = !source.stays || threadIdx.y == 0;
#pragma unroll 1
    for (int load = 0; load < loads; ++load) {
      const uint32_t place = (load * group + thread) * words * kVectorBytes;
      uint4 word{}, more{};
      if (own) word = word_at(from + place, shift);
      if (own && words > 1) more = word_at(from + place + kVectorBytes, shift);
      if (source.stays) synchronize_group();
      if (own) store_shared(to + place, word);
      if (own && words > 1) store_shared(to + place + kVectorBytes, more);
    }
  };
  trigger_next_grid();
  grid_wait();

  int64_t next_turn = first;
  int next_piece = 0, next_pass = 0;
  int next_stage = 0;
  const int pieces = layout.pieces, passes = pieces == 1 ? 1 : (problem.centered ? 3 : 2);
  bool started = false;
  // What a group needs next, on its way into shared memory.
  const auto fetch = [&](bool with_all) {
#pragma unroll 1
    for (int k = 0; k < kOperands; ++k) {
      const Source& source = problem.sources[k];
      const bool wanted = source.stays ? with_all && threadIdx.y == 0 : next_turn + threadIdx.y < problem.rows;
      if (source.rows.data == nullptr || !wanted) continue;
      const char* from = address_of(source, row_at(next_turn));
      const auto shift = static_cast<unsigned>(reinterpret_cast<uintptr_t>(from) % kVectorBytes);
      const int words = words_of(source), step = group * words * kVectorBytes, begin = thread * words * kVectorBytes;
      const int64_t skipped = static_cast<int64_t>(next_piece) * loads * step + begin;
      const int64_t left = hidden * size_of(source) + shift - skipped;
      const uint32_t to = (source.stays ? base : ring + next_stage * layout.stage_bytes) + source.at + begin;
      from += skipped - shift;
      const int count = loads * words + (problem.shifted && thread == 0 ? 1 : 0);  // and the one behind the last
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const int offset = (words > 1 ? i / 2 * step + i % 2 * kVectorBytes : i * step);
        copy_part(to + offset, from + offset, left - offset);
      }
    }
    cp_async_commit();
    next_stage = next_stage + 1 == layout.stages ? 0 : next_stage + 1;
    if (++next_piece < pieces) return;
    next_piece = 0;
    if (++next_pass < passes) return;
    next_pass = 0;
    next_turn += stride;
  };

  // Of a thread: [kinds][vectors][quads][threads].
  const int all_loads = loads * pieces;
  const bool summed = problem.partial != nullptr;
  float* const partial = problem.partial + static_cast<int64_t>(blockIdx.x) * problem.kinds * problem.hidden;
  if (summed && layout.sums) {
#pragma unroll 1
    for (int i = 0; i < problem.kinds * all_loads * kQuads; ++i) sums_memory[i * threads + number] = float4{};
  }
  int half = 0;
  int stage = 0;
#pragma unroll 1
  for (int64_t turn = first; turn < problem.rows; turn += stride) {
    const int64_t row = row_at(turn);
    const bool has = turn + threadIdx.y < problem.rows;
    // x counted from the pivot; the gradient as it came and as that of the normed row, which is rounded alike wherever
    // it is needed: of a row of one element nothing may be left, and rstd is large.
    float pivot = 0.0f, mean = 0.0f, mean_slope = 0.0f, rstd = 0.0f, along = 0.0f;
    uint32_t slot = 0;
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
      float totals[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of x, its squares, slopes, and their products with x
#pragma unroll 1
      for (int piece = 0; piece < pieces; ++piece) {
        if (pass == 0 || pieces > 1) {
          if (problem.shifted) synchronize_group();
#pragma unroll 1
          for (int ahead = started ? 1 : layout.stages; ahead > 0; --ahead) fetch(!started && ahead == layout.stages);
          wait_for_all_but(layout.stages - 1);
          slot = ring + stage * layout.stage_bytes;
          stage = stage + 1 == layout.stages ? 0 : stage + 1;
          if (problem.shifted) {
            synchronize_group();
#pragma unroll 1
            for (int k = 0; k < kOperands; ++k) {
              const Source& source = problem.sources[k];
              const bool wanted = source.stays ? !started : has;
              if (source.rows.data != nullptr && wanted) {
                move(source, row, (source.stays ? base : slot) + source.at, (source.stays ? base : moved) + source.at);
              }
            }
            slot = moved;
          }
          if (!started) __syncthreads();
          started = true;
        }
#pragma unroll 1
        for (int load = 0; load < loads; ++load) {
          const int64_t column = ((static_cast<int64_t>(piece) * loads + load) * group + thread) * kWidth;
          const auto place_of = [&](Operand k) {
            const Source& source = problem.sources[k];
            return (source.stays ? base : slot) + source.at + (load * group + thread) * words_of(source) * kVectorBytes;
          };
          const auto read = [&](Operand k, float otherwise, float (&values)[kWidth]) {
            const Source& source = problem.sources[k];
            if (source.rows.data == nullptr) {
#pragma unroll
              for (float& value : values) value = otherwise;
              return;
            }
            read_words(place_of(k), kVectorBytes, source.kind, values);
          };
          float x[kWidth], grad[kWidth], total[kWidth], more[kWidth];
          read(kFromX, 0.0f, x);
          read(kFromGrad, 0.0f, grad);
          read(kFromScale, 0.0f, total);
          read(kFromWeight, 1.0f, more);
          if (pivot != 0.0f) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) x[j] = column + j < hidden ? x[j] - pivot : 0.0f;
          }
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            total[j] = __fmul_rn(grad[j], more[j] * (1.0f + total[j]));
          }
          if (pass < 2) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
              totals[0] += x[j];
              totals[1] += x[j] * x[j];
              totals[2] += total[j];
              totals[3] += total[j] * x[j];
            }
            continue;
          }
          // At once, or to where it is moved from.
          const auto write = [&](Operand k, int64_t index, const float (&values)[kWidth]) {
            const Source& source = problem.sources[k];
            if (!problem.shifted) {
              if (has && column < hidden) store_words(problem.results[k], index + column, source.kind, values);
              return;
            }
            uint4 words[2];
            encode_words(values, source.kind, words);
            store_shared(place_of(k), words[0]);
            if (source.kind.wide) store_shared(place_of(k) + kVectorBytes, words[1]);
          };
          const auto add_up = [&](int kind, const float (&values)[kWidth]) {
            if (!summed || kind >= problem.kinds || !has) return;
            if (layout.sums) {
              float4* to = sums_memory + ((kind * all_loads + piece * loads + load) * kQuads) * threads + number;
#pragma unroll
              for (int j = 0; j < kWidth; j += 4, to += threads) {
                const float4 sum = *to;
                *to =
                    make_float4(sum.x + values[j], sum.y + values[j + 1], sum.z + values[j + 2], sum.w + values[j + 3]);
              }
            } else {
              float* const own = reinterpret_cast<float*>(sums_memory + number * kQuads);
#pragma unroll
              for (int j = 0; j < kWidth; j += 4) {
                sums_memory[number * kQuads + j / 4] =
                    make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
              }
              float* const to = partial + kind * hidden + column;
#pragma unroll 1
              for (int j = 0; j < kWidth && column + j < hidden; ++j) to[j] = turn == first ? own[j] : to[j] + own[j];
            }
          };
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            x[j] -= mean;
            total[j] = rstd * (total[j] - mean_slope - x[j] * along);
            x[j] *= rstd;
          }
          if (problem.sources[kFromGradSum].rows.data != nullptr) {
            read(kFromGradSum, 0.0f, more);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) total[j] += more[j];
          }
          write(kFromX, row * hidden, total);
          if (problem.own) {
            float factor[kWidth], scale[kWidth];
            read(kFromScale, 0.0f, scale);
            if (problem.results[kFromScale] != nullptr) {
              read(kFromWeight, 1.0f, factor);
              read(kFromBias, 0.0f, more);
#pragma unroll
              for (int j = 0; j < kWidth; ++j) more[j] = grad[j] * (x[j] * factor[j] + more[j]);
              write(kFromScale, row * hidden, more);
            }
#pragma unroll
            for (int j = 0; j < kWidth; ++j) grad[j] *= 1.0f + scale[j];
          }
          if (problem.results[kFromBias] != nullptr) write(kFromBias, 0, grad);
          add_up(kSlope, grad);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) grad[j] *= x[j];
          if (problem.results[kFromWeight] != nullptr) write(kFromWeight, 0, grad);
          add_up(kSlopeTimesNormed, grad);
          if (problem.results[kFromGrad] == nullptr) continue;
          read(kFromGate, 0.0f, more);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) more[j] *= total[j];
          write(kFromGrad, row * hidden, more);
          if (problem.sources[kFromBranch].rows.data == nullptr) continue;
          read(kFromBranch, 0.0f, more);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) more[j] *= total[j];
          add_up(kGate, more);
          if (problem.own) write(kFromGate, row * hidden, more);
        }
        if (pass < 2 || !problem.shifted) continue;
        synchronize_group();
        const int64_t skipped = static_cast<int64_t>(piece) * loads * group * kWidth;
        const auto columns =
            static_cast<int>(min(problem.hidden - skipped, static_cast<int64_t>(loads) * group * kWidth));
#pragma unroll 1
        for (int k = 0; k < kOperands; ++k) {
          const Source& source = problem.sources[k];
          if (!has || problem.results[k] == nullptr) continue;
          const int size = size_of(source), bytes = columns * size;
          char* const to =
              static_cast<char*>(problem.results[k]) + ((source.by_row ? row * problem.hidden : 0) + skipped) * size;
          const uint32_t from = (source.stays ? base : slot) + source.at;
          const auto shift = static_cast<int>(reinterpret_cast<uintptr_t>(to) % kVectorBytes);
#pragma unroll 1
          for (int begin = thread * kVectorBytes - shift; begin < bytes; begin += group * kVectorBytes) {
            if (begin >= 0 && begin + kVectorBytes <= bytes) {
              store_word_streaming(reinterpret_cast<uint4*>(to + begin),
                                   word_at(from + begin / kVectorBytes * kVectorBytes, begin % kVectorBytes));
              continue;
            }
#pragma unroll 1
            for (int i = max(begin, 0); i < min(begin + kVectorBytes, bytes); i += 2) {
              *reinterpret_cast<uint16_t*>(to + i) = load_half(from + i);
            }
          }
        }
      }
      if (pass == 2) break;
      sum_over_group(totals, of_warps[half]);
      half ^= 1;  // a slow warp may still read the one half while the next sums are written
      mean = problem.centered ? problem.average(totals[0]) : 0.0f;
      const float variance = problem.average(totals[1]) - mean * mean;
      mean_slope = problem.centered ? problem.average(totals[2]) : 0.0f;
      rstd = rsqrtf(variance + problem.eps);
      along = rstd * rstd * problem.average(totals[3] - totals[2] * mean);
      if (pass == 1) continue;
      // A row far from zero has lost digits: its sums are taken again, of what it is beside its mean.
      bool again = problem.centered && !(4.0f * mean * mean <= variance);
      if (again) pivot = mean;
      if (group <= kWarp) again = __any_sync(kAllLanes, again);
      if (pieces > 1) again = problem.centered;
      if (!again) ++pass;
    }
  }

  if (summed && layout.sums) {
    store_sums<kQuads>(sums_memory, all_loads, problem.kinds, static_cast<int>(hidden), partial);
  }
}

// Where the operands lie, and how rows lie over blocks.
inline AnyLayout any_layout(const Backward& problem, bool shifted, Source (&sources)[kOperands]) {
  const int width = kAnyWidth, kinds = problem.grad_branch == nullptr ? 2 : 3;
  const int64_t vectors = (problem.hidden + width - 1) / width;
  const bool own = problem.span == 1;
  const auto source = [&](Operand k, const Rows& rows, Type type, bool by_row) {
    sources[k] = {rows, 0, kind_of(type), by_row, !by_row};
  };
  source(kFromX, problem.x, problem.type, true);
  source(kFromGrad, problem.grad, problem.type, true);
  source(kFromGradSum, problem.grad_sum, problem.type, true);
  source(kFromBranch, problem.branch, problem.type, true);
  source(kFromScale, problem.scale.rows, problem.scale.type, own);
  source(kFromGate, problem.gate.rows, problem.gate.type, own);
  source(kFromWeight, {problem.weight.data}, problem.weight.type, false);
  source(kFromBias, {problem.bias.data}, problem.bias.type, false);
  if (problem.grad_gate == nullptr) sources[kFromBranch].rows.data = nullptr;
  if (!own || (problem.grad_scale == nullptr && problem.rows > 1)) sources[kFromBias].rows.data = nullptr;

  AnyLayout layout{};
  layout.pieces = layout.loads = 1;
  layout.sums = true;
  const auto lay = [&](int rows, int stages) {
    layout.rows = rows;
    layout.stages = stages;
    layout.fixed_bytes = layout.stage_bytes = 0;
    for (Source& one : sources) {
      if (one.rows.data == nullptr) continue;
      uint32_t& end = one.stays ? layout.fixed_bytes : layout.stage_bytes;
      one.at = end;
      end += (layout.loads * layout.group * one.kind.words() + 1) * kVectorBytes;
    }
    layout.ring_bytes = layout.stage_bytes * (stages + (shifted ? 1 : 0));
    const size_t ring = layout.fixed_bytes + static_cast<size_t>(layout.ring_bytes) * rows;
    const size_t sums = static_cast<size_t>(kinds) * layout.loads * layout.pieces * layout.group * rows * width * 4;
    layout.sums_at = static_cast<uint32_t>(ring);
    layout.bytes = ring + (layout.sums ? sums : static_cast<size_t>(layout.group) * width * 4);
    return layout.bytes;
  };
  const size_t most = most_shared_bytes() - kAnyOwnBytes;
  int step = 1;
  if (vectors <= kWarp) {
    layout.group = 1;
    while (layout.group < vectors) layout.group *= 2;
    step = kWarp / layout.group;
  } else {
    layout.loads = static_cast<int>(std::min<int64_t>((vectors + kAnyThreads - 1) / kAnyThreads, 64));
    layout.group = static_cast<int>(
        std::min<int64_t>((vectors + layout.loads * kWarp - 1) / (layout.loads * kWarp) * kWarp, kAnyThreads));
  }
  const bool whole = static_cast<int64_t>(layout.loads) * layout.group >= vectors;
  int processors = 1;
  sm_count(&processors);
  const int64_t groups = problem.sums.groups, each = std::max<int64_t>(1, processors / groups);
  const int64_t useful = (problem.rows / groups + each - 1) / each;  // rows of a block at a time, if there are few
  int rows = static_cast<int>(std::min<int64_t>(kAnyThreads / layout.group, (useful + step - 1) / step * step));
  for (; whole && rows > 0; rows -= step) {
    for (int stages = kMostStages; stages > (rows > step ? 1 : 0); --stages) {
      if (lay(rows, stages) <= most) return layout;
    }
  }
  // Rows are too long to wait.
  for (Source& one : sources) one.stays = false;
  for (const bool sums : {true, false}) {
    layout.sums = sums;
    for (int waiting = 4 * kAnyThreads; waiting >= 2 * kWarp; waiting /= 2) {
      layout.group = std::min(waiting, kAnyThreads);
      layout.loads = waiting / layout.group;
      layout.pieces = static_cast<int>((vectors + waiting - 1) / waiting);
      for (int stages = kMostStages; stages > 0; --stages) {
        if (lay(1, stages) <= most) return layout;
      }
    }
  }
  return layout;
}

inline cudaError_t launch_any(const Backward& problem, cudaStream_t stream) {
  AnyBackward any{{},
                  {},
                  problem.rows / problem.sums.groups,
                  problem.hidden,
                  static_cast<uint32_t>(problem.sums.parts),
                  problem.sums.count,
                  problem.sums.partial,
                  {problem.grad_x, problem.grad_branch},
                  Average(problem.hidden),
                  problem.eps,
                  problem.centered,
                  problem.span == 1,
                  problem.hidden % kAnyWidth != 0};
  if (any.own) {
    any.results[kFromScale] = problem.grad_scale;
    any.results[kFromGate] = problem.grad_gate;
  }
  if (problem.rows == 1) {
    any.partial = nullptr;
    any.results[kFromWeight] = problem.grad_weight;
    any.results[kFromBias] = problem.grad_bias;
  }
  any_layout(problem, false, any.sources);
  for (int k = 0; k < kOperands; ++k) {
    const Source& source = any.sources[k];
    any.shifted = any.shifted || !aligned(any.results[k]) || !aligned(source.rows, source.kind.bytes());
  }
  any.layout = any_layout(problem, any.shifted, any.sources);
  if (any.layout.bytes + kAnyOwnBytes > kUsualBytes) {
    const cudaError_t error = cudaFuncSetAttribute(backward_any_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(any.layout.bytes));
    if (error != cudaSuccess) return error;
  }
  return launch_with_pdl(backward_any_kernel, dim3(static_cast<unsigned>(problem.sums.groups * problem.sums.parts)),
                         dim3(any.layout.group, any.layout.rows), any.layout.bytes, stream, any);
}

}  // namespace
}  // namespace adaln
