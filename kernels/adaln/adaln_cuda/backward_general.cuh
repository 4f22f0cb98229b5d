// Backward of modulated norms of rows of any length and alignment, with modulations and parameters of any dtypes, with
// and without a gated branch that was added before: the general kernel.
//
// Reads:    grad, x, grad_sum and the branch, and modulations that have a row for each row of x, each once from global
//           memory: a row stays in shared memory between its sums and its result. Rows that do not fit there are read
//           again, in pieces.
// Writes:   see backward.cu.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// A row has a group of threads, up to a warp or several warps. A block has several groups and loops over its rows.
// Inputs are copied in whole words into a ring buffer in shared memory. A row that begins within a word is then moved
// so that its vectors are words. A thread has the same columns of each row, and sums them without other threads.
// Unaligned results are moved in shared memory, too, and written to global memory in whole words.
//
// Included by backward.cu.
#pragma once

#include "adaln_cuda/device_limits.cuh"
#include "adaln_cuda/strided_rows.cuh"
#include "kit/async_copy.cuh"
#include "kit/group_sums.cuh"
#include "kit/vectors.cuh"

namespace adaln {
namespace {

constexpr size_t kGeneralStaticBytes = 2 * 1024;  // of shared memory, at most

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
  Rows rows;        // data null: there is none
  uint32_t offset;  // in bytes, in a stage of the ring or in the resident rows
  DynamicType type;
  bool per_row;   // one row for each row, not for each group of rows
  bool resident;  // the block has it in shared memory for all of its rows
};

// The mapping of rows to blocks.
struct GeneralLayout {
  int group, rows;   // threads of a row; rows of a block
  int vectors;       // of a thread and piece
  int pieces;        // of a row
  int stages;        // of the ring, each of a row or piece
  bool shared_sums;  // sums over rows are in shared memory, else in global memory
  uint32_t stage_bytes, ring_bytes, resident_bytes, sums_offset;
  size_t bytes;
};

struct GeneralBackward {
  Source sources[kOperands];
  GeneralLayout layout;
  int64_t rows, hidden;  // of a group
  uint32_t parts;
  int sum_count;
  float* partial;
  void* results[kOperands];  // each like an operand, whose shared memory it reuses; null: there is none
  Average average;
  float eps;
  bool centered, per_row_modulations;
  bool unaligned;  // some row, read or written, does not consist of whole words
};

// Copies the first `bytes` bytes of a word, an even number, to shared memory and fills the rest with zeros. For the end
// of a tensor, where the whole word must not be read.
__device__ __forceinline__ void copy_zero_filled(SharedAddress to, const void* from, uint32_t bytes) {
  auto* const halves = shared_pointer<uint16_t>(to);
#pragma unroll 1
  for (uint32_t i = 0; i < kVectorBytes / 2; ++i) {
    halves[i] = 2 * i < bytes ? static_cast<const uint16_t*>(from)[i] : uint16_t{0};
  }
}

// Copies the first `left` bytes of a word, and zeros the rest.
__device__ __forceinline__ void copy_tail(SharedAddress to, const char* from, int64_t left) {
  if (left >= kVectorBytes) {
    cp_async<uint4>(to, from);
  } else if (left <= 0) {
    store_shared(to, uint4{});
  } else {
    copy_zero_filled(to, from, static_cast<uint32_t>(left));
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

// Reads 16 bytes of shared memory, `misalignment` bytes after the start of an aligned word.
__device__ __forceinline__ uint4 load_shared_unaligned(SharedAddress from, unsigned misalignment) {
  const uint4 word = load_shared(from, uint4{});
  if (misalignment == 0) return word;
  return shift_words(word, load_shared(from + 16, uint4{}), misalignment);
}

// The values computed from a row's sums. The sums are of x - pivot.
struct GeneralMoments {
  float pivot = 0.0f, mean = 0.0f, mean_slope = 0.0f, rstd = 0.0f, projection = 0.0f;
};

// A thread's vectors of the rows of its group, and their copies into shared memory.
struct GeneralRows {
  static constexpr int kWidth = kDynamicWidth, kQuads = kWidth / 4;

  const GeneralBackward& problem;
  const GeneralLayout& layout;
  int64_t hidden;
  int group, thread, threads, number;  // threads of a row; thread in it; of the block
  int vectors;
  uint32_t rows_group;              // the group of rows, as of a span
  int64_t first, stride;            // the block's first row in its group; to its next one
  SharedAddress base, ring, moved;  // shared memory: of the block; of the group; where rows are moved to
  // The next copy.
  int64_t next_row;
  int next_piece = 0, next_pass = 0, next_stage = 0;
  int pieces, passes;

  __device__ __forceinline__ GeneralRows(const GeneralBackward& problem, SharedAddress memory)
      : problem(problem), layout(problem.layout), hidden(problem.hidden) {
    group = blockDim.x;
    thread = threadIdx.x;
    threads = blockDim.x * blockDim.y;
    number = threadIdx.y * group + thread;
    vectors = layout.vectors;
    rows_group = blockIdx.x / problem.parts;
    const uint32_t part = blockIdx.x - rows_group * problem.parts;
    first = static_cast<int64_t>(part) * blockDim.y;
    stride = static_cast<int64_t>(problem.parts) * blockDim.y;
    base = memory;
    ring = base + layout.resident_bytes + threadIdx.y * layout.ring_bytes;
    moved = ring + layout.stages * layout.stage_bytes;
    next_row = first;
    pieces = layout.pieces;
    passes = pieces == 1 ? 1 : (problem.centered ? 3 : 2);
  }

  // Rows of the problem, from the block's rows of the group.
  __device__ __forceinline__ int64_t row_of(int64_t block_row) const {
    return static_cast<int64_t>(rows_group) * problem.rows + block_row + threadIdx.y;
  }
  __device__ __forceinline__ const char* address_of(const Source& source, int64_t row) const {
    return static_cast<const char*>(source.rows.data) +
           source.rows.offset(source.per_row ? row : static_cast<int64_t>(rows_group)) * source.type.element_bytes();
  }
  __device__ __forceinline__ SharedAddress place_of(const Source& source, SharedAddress slot) const {
    return (source.resident ? base : slot) + source.offset;
  }

  // Starts the copies of an operand of the next piece.
  __device__ __forceinline__ void fetch_operand(const Source& source) const {
    const char* from = address_of(source, row_of(next_row));
    const auto misalignment = static_cast<unsigned>(reinterpret_cast<uintptr_t>(from) % kVectorBytes);
    const int words = source.type.words(), step = group * words * kVectorBytes, begin = thread * words * kVectorBytes;
    const int64_t skipped = static_cast<int64_t>(next_piece) * vectors * step + begin;
    const int64_t left = hidden * source.type.element_bytes() + misalignment - skipped;
    const SharedAddress to = place_of(source, ring + next_stage * layout.stage_bytes) + begin;
    from += skipped - misalignment;
    const int count = vectors * words + (problem.unaligned && thread == 0 ? 1 : 0);  // and the word after the last
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int offset = (words > 1 ? i / 2 * step + i % 2 * kVectorBytes : i * step);
      copy_tail(to + offset, from + offset, left - offset);
    }
  }

  // Starts the copies of the group's next piece; the first time, also of the resident operands.
  __device__ __forceinline__ void fetch(bool with_resident) {
#pragma unroll 1
    for (int k = 0; k < kOperands; ++k) {
      const Source& source = problem.sources[k];
      const bool wanted = source.resident ? with_resident && threadIdx.y == 0 : next_row + threadIdx.y < problem.rows;
      if (source.rows.data != nullptr && wanted) fetch_operand(source);
    }
    cp_async_commit();
    next_stage = next_stage + 1 == layout.stages ? 0 : next_stage + 1;
    if (++next_piece < pieces) return;
    next_piece = 0;
    if (++next_pass < passes) return;
    next_pass = 0;
    next_row += stride;
  }

  // Moves a row that begins within a word, so that it begins with a word; a resident row is moved in place.
  __device__ __forceinline__ void move(const Source& source, int64_t row, SharedAddress from, SharedAddress to) const {
    const auto misalignment =
        static_cast<unsigned>(reinterpret_cast<uintptr_t>(address_of(source, row)) % kVectorBytes);
    const int words = source.type.words();
    const bool own = !source.resident || threadIdx.y == 0;
#pragma unroll 1
    for (int i = 0; i < vectors; ++i) {
      const uint32_t place = (i * group + thread) * words * kVectorBytes;
      uint4 word{}, second_word{};
      if (own) word = load_shared_unaligned(from + place, misalignment);
      if (own && words > 1) second_word = load_shared_unaligned(from + place + kVectorBytes, misalignment);
      if (source.resident) synchronize_group();
      if (own) store_shared(to + place, word);
      if (own && words > 1) store_shared(to + place + kVectorBytes, second_word);
    }
  }

  // Waits for the next piece of the group's row, and returns its slot. `has_row`: the group has a row.
  __device__ __forceinline__ SharedAddress next_slot(int64_t row, bool has_row, int& stage, bool& started) {
    if (problem.unaligned) synchronize_group();
#pragma unroll 1
    for (int ahead = started ? 1 : layout.stages; ahead > 0; --ahead) fetch(!started && ahead == layout.stages);
    wait_for_all_but(layout.stages - 1);
    SharedAddress slot = ring + stage * layout.stage_bytes;
    stage = stage + 1 == layout.stages ? 0 : stage + 1;
    if (problem.unaligned) {
      synchronize_group();
#pragma unroll 1
      for (int k = 0; k < kOperands; ++k) {
        const Source& source = problem.sources[k];
        const bool wanted = source.resident ? !started : has_row;
        if (source.rows.data != nullptr && wanted) {
          move(source, row, place_of(source, slot), place_of(source, moved));
        }
      }
      slot = moved;
    }
    if (!started) __syncthreads();
    started = true;
    return slot;
  }
};

// One vector of a thread: its position, and its values in each operand.
struct GeneralVector {
  static constexpr int kWidth = kDynamicWidth;

  const GeneralRows& rows;
  SharedAddress slot;
  int index;       // of the thread's vectors of a piece
  int64_t column;  // of the row

  __device__ __forceinline__ SharedAddress place_of(Operand k) const {
    const Source& source = rows.problem.sources[ARGUMENT_INDEX(k)];
    return rows.place_of(source, slot) + (index * rows.group + rows.thread) * source.type.words() * kVectorBytes;
  }
  __device__ __forceinline__ void read(Operand k, float otherwise, float (&values)[kWidth]) const {
    const Source& source = rows.problem.sources[ARGUMENT_INDEX(k)];
    if (source.rows.data == nullptr) {
#pragma unroll
      for (float& value : values) value = otherwise;
      return;
    }
    read_shared(place_of(k), kVectorBytes, source.type, values);
  }
  // Writes to global memory, or, if rows are unaligned, to shared memory.
  __device__ __forceinline__ void write(Operand k, bool has_row, int64_t row_index,
                                        const float (&values)[kWidth]) const {
    const Source& source = rows.problem.sources[ARGUMENT_INDEX(k)];
    if (!rows.problem.unaligned) {
      if (has_row && column < rows.problem.hidden) {
        store_words(rows.problem.results[ARGUMENT_INDEX(k)], row_index + column, source.type, values);
      }
      return;
    }
    uint4 words[2];
    encode_words(values, source.type, words);
    store_shared(place_of(k), words[0]);
    if (source.type.is_float32) store_shared(place_of(k) + kVectorBytes, words[1]);
  }

  // Reads x - pivot; the gradient; and slope, the gradient of the normed row. slope is rounded in the same way wherever
  // it is used: in a row of one element it must cancel exactly, because rstd may be large.
  __device__ __forceinline__ void read_inputs(float pivot, float (&x)[kWidth], float (&grad)[kWidth],
                                              float (&slope)[kWidth]) const {
    float weight[kWidth];
    read(kFromX, 0.0f, x);
    read(kFromGrad, 0.0f, grad);
    read(kFromScale, 0.0f, slope);
    read(kFromWeight, 1.0f, weight);
    if (pivot != 0.0f) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) x[j] = column + j < rows.hidden ? x[j] - pivot : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) slope[j] = rounded_product(grad[j], weight[j] * (1.0f + slope[j]));
  }
};

// The location of a thread's sums over rows.
struct GeneralSums {
  static constexpr int kWidth = kDynamicWidth, kQuads = kWidth / 4;

  const GeneralRows& rows;
  float4* shared;  // [sums][vectors of a row][quads][threads]; or, for sums in global memory, a vector a thread
  float* partial;  // null: no sums
  int vectors;     // of a thread and row

  __device__ __forceinline__ void add(int which, int vector, int64_t column, bool first_row,
                                      const float (&values)[kWidth]) const {
    if (rows.layout.shared_sums) {
      float4* to = shared + ((which * vectors + vector) * kQuads) * rows.threads + rows.number;
#pragma unroll
      for (int j = 0; j < kWidth; j += 4, to += rows.threads) {
        const float4 sum = *to;
        *to = make_float4(sum.x + values[j], sum.y + values[j + 1], sum.z + values[j + 2], sum.w + values[j + 3]);
      }
      return;
    }
    float* const own = reinterpret_cast<float*>(shared + rows.number * kQuads);
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      shared[rows.number * kQuads + j / 4] = make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
    }
    float* const to = partial + which * rows.hidden + column;
#pragma unroll 1
    for (int j = 0; j < kWidth && column + j < rows.hidden; ++j) to[j] = first_row ? own[j] : to[j] + own[j];
  }
};

// Computes and writes a vector of the gradients of a row, and adds it to the sums over rows with `add_up`.
template <typename AddUp>
__device__ __forceinline__ void finish_vector(const GeneralVector& vector, const GeneralMoments& moments, int64_t row,
                                              bool has_row, float (&x)[kDynamicWidth], float (&grad)[kDynamicWidth],
                                              float (&total)[kDynamicWidth], AddUp&& add_up) {
  constexpr int kWidth = kDynamicWidth;
  const GeneralBackward& problem = vector.rows.problem;
  const int64_t row_index = row * vector.rows.hidden;
  float values[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    x[j] -= moments.mean;
    total[j] = moments.rstd * (total[j] - moments.mean_slope - x[j] * moments.projection);
    x[j] *= moments.rstd;
  }
  if (problem.sources[ARGUMENT_INDEX(kFromGradSum)].rows.data != nullptr) {
    vector.read(kFromGradSum, 0.0f, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) total[j] += values[j];
  }
  vector.write(kFromX, has_row, row_index, total);
  if (problem.per_row_modulations) {
    float factor[kWidth], scale[kWidth];
    vector.read(kFromScale, 0.0f, scale);
    if (problem.results[ARGUMENT_INDEX(kFromScale)] != nullptr) {
      vector.read(kFromWeight, 1.0f, factor);
      vector.read(kFromBias, 0.0f, values);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = grad[j] * (x[j] * factor[j] + values[j]);
      vector.write(kFromScale, has_row, row_index, values);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) grad[j] *= 1.0f + scale[j];
  }
  if (problem.results[ARGUMENT_INDEX(kFromBias)] != nullptr) vector.write(kFromBias, has_row, 0, grad);
  add_up(kSlope, grad);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) grad[j] *= x[j];
  if (problem.results[ARGUMENT_INDEX(kFromWeight)] != nullptr) vector.write(kFromWeight, has_row, 0, grad);
  add_up(kSlopeTimesNormed, grad);
  if (problem.results[ARGUMENT_INDEX(kFromGrad)] == nullptr) return;
  vector.read(kFromGate, 0.0f, values);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] *= total[j];
  vector.write(kFromGrad, has_row, row_index, values);
  if (problem.sources[ARGUMENT_INDEX(kFromBranch)].rows.data == nullptr) return;
  vector.read(kFromBranch, 0.0f, values);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] *= total[j];
  add_up(kGate, values);
  if (problem.per_row_modulations) vector.write(kFromGate, has_row, row_index, values);
}

// Writes a piece of a row's unaligned results from shared memory to global memory: aligned words of the result, and
// single elements at its ends.
__device__ __forceinline__ void write_unaligned(const GeneralRows& rows, SharedAddress slot, int64_t row, bool has_row,
                                                int piece) {
  const GeneralBackward& problem = rows.problem;
  const int width = kDynamicWidth, group = rows.group;
  synchronize_group();
  const int64_t skipped = static_cast<int64_t>(piece) * rows.vectors * group * width;
  const auto columns =
      static_cast<int>(min(problem.hidden - skipped, static_cast<int64_t>(rows.vectors) * group * width));
#pragma unroll 1
  for (int k = 0; k < kOperands; ++k) {
    const Source& source = problem.sources[k];
    if (!has_row || problem.results[k] == nullptr) continue;
    const int size = source.type.element_bytes(), bytes = columns * size;
    char* const to =
        static_cast<char*>(problem.results[k]) + ((source.per_row ? row * problem.hidden : 0) + skipped) * size;
    const SharedAddress from = rows.place_of(source, slot);
    const auto misalignment = static_cast<int>(reinterpret_cast<uintptr_t>(to) % kVectorBytes);
#pragma unroll 1
    for (int begin = rows.thread * kVectorBytes - misalignment; begin < bytes; begin += group * kVectorBytes) {
      if (begin >= 0 && begin + kVectorBytes <= bytes) {
        store_word_streaming(reinterpret_cast<uint4*>(to + begin),
                             load_shared_unaligned(from + begin / kVectorBytes * kVectorBytes, begin % kVectorBytes));
        continue;
      }
#pragma unroll 1
      for (int i = max(begin, 0); i < min(begin + kVectorBytes, bytes); i += 2) {
        *reinterpret_cast<uint16_t*>(to + i) = load_shared(from + i, uint16_t{});
      }
    }
  }
}

// Computes the moments from a row's sums. Returns whether the sums are computed again, from differences from the mean:
// the squares of a row far from zero have lost digits, and a row of several pieces is read again in any case.
__device__ __forceinline__ bool find_moments(const GeneralRows& rows, int pass, const float (&totals)[4],
                                             GeneralMoments& moments) {
  const GeneralBackward& problem = rows.problem;
  moments.mean = problem.centered ? problem.average(totals[0]) : 0.0f;
  const float variance = problem.average(totals[1]) - moments.mean * moments.mean;
  moments.mean_slope = problem.centered ? problem.average(totals[2]) : 0.0f;
  moments.rstd = rsqrtf(variance + problem.eps);
  moments.projection = moments.rstd * moments.rstd * problem.average(totals[3] - totals[2] * moments.mean);
  if (pass == 1) return false;
  bool again = problem.centered && !(4.0f * moments.mean * moments.mean <= variance);
  if (again) moments.pivot = moments.mean;
  if (rows.group <= kWarp) again = any_lane(again);
  if (rows.pieces > 1) again = problem.centered;
  return again;
}

// Processes the vectors of a piece of a row: in pass 0 and 1 adds to the row's sums, in pass 2 writes its gradients.
__device__ __forceinline__ void visit_piece(const GeneralRows& rows, const GeneralSums& sums, SharedAddress slot,
                                            int piece, int pass, int64_t row, bool has_row, bool first_row,
                                            const GeneralMoments& moments, float (&totals)[4]) {
  constexpr int kWidth = kDynamicWidth;
#pragma unroll 1
  for (int i = 0; i < rows.vectors; ++i) {
    const int64_t column = ((static_cast<int64_t>(piece) * rows.vectors + i) * rows.group + rows.thread) * kWidth;
    const GeneralVector vector{rows, slot, i, column};
    float x[kWidth], grad[kWidth], slope[kWidth];
    vector.read_inputs(moments.pivot, x, grad, slope);
    if (pass < 2) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        totals[0] += x[j];
        totals[1] += x[j] * x[j];
        totals[2] += slope[j];
        totals[3] += slope[j] * x[j];
      }
      continue;
    }
    finish_vector(vector, moments, row, has_row, x, grad, slope, [&](int which, const float (&values)[kWidth]) {
      if (rows.problem.partial == nullptr || which >= rows.problem.sum_count || !has_row) return;
      sums.add(which, piece * rows.vectors + i, column, first_row, values);
    });
  }
}

template <int kRow>
__global__ void __launch_bounds__(kBackwardGeneralTable[kRow].max_threads)
    backward_general_kernel(const __grid_constant__ GeneralBackward problem) {
  if constexpr (!kInThisCode<kBackwardGeneralTable, kRow>) return;
  static_assert(kBackwardGeneralTable[kRow].max_stages <= 3, "wait_for_all_but knows up to 2 pending stages");
  constexpr int kQuads = kDynamicWidth / 4;
  extern __shared__ float4 memory[];
  __shared__ float4 scratch[2][kBackwardGeneralTable[kRow].max_threads / kWarp];
  const GeneralLayout& layout = problem.layout;
  GeneralRows rows(problem, shared_address(memory));
  trigger_next_grid();
  grid_wait();
  const GeneralSums sums{rows, memory + layout.sums_offset / sizeof(float4),
                         problem.partial + static_cast<int64_t>(blockIdx.x) * problem.sum_count * problem.hidden,
                         rows.vectors * rows.pieces};
  const bool shared_sums = problem.partial != nullptr && layout.shared_sums;
  if (shared_sums) {
#pragma unroll 1
    for (int i = 0; i < problem.sum_count * sums.vectors * kQuads; ++i) {
      sums.shared[i * rows.threads + rows.number] = float4{};
    }
  }
  bool started = false;
  int half = 0, stage = 0;
#pragma unroll 1
  for (int64_t block_row = rows.first; block_row < problem.rows; block_row += rows.stride) {
    const int64_t row = rows.row_of(block_row);
    const bool has_row = block_row + threadIdx.y < problem.rows;
    GeneralMoments moments;
    SharedAddress slot{};
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
      float totals[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of x, its squares, slopes, and their products with x
#pragma unroll 1
      for (int piece = 0; piece < rows.pieces; ++piece) {
        if (pass == 0 || rows.pieces > 1) slot = rows.next_slot(row, has_row, stage, started);
        visit_piece(rows, sums, slot, piece, pass, row, has_row, block_row == rows.first, moments, totals);
        if (pass == 2 && problem.unaligned) write_unaligned(rows, slot, row, has_row, piece);
      }
      if (pass == 2) break;
      sum_over_group(totals, scratch[half]);
      half ^= 1;  // a slow warp may still read this half while the next sums are written
      if (!find_moments(rows, pass, totals, moments) && pass == 0) ++pass;
    }
  }
  if (shared_sums) {
    store_partial_sums<kQuads>(sums.shared, sums.vectors, problem.sum_count, static_cast<int>(rows.hidden),
                               sums.partial);
  }
}

// Lists the operands of a problem.
inline void list_sources(const Backward& problem, Source (&sources)[kOperands]) {
  const bool per_row = problem.span == 1;
  const auto list = [&](Operand k, const Rows& rows, Type type, bool per_row) {
    sources[k] = {rows, 0, dynamic_type(type), per_row, !per_row};
  };
  list(kFromX, problem.x, problem.type, true);
  list(kFromGrad, problem.grad, problem.type, true);
  list(kFromGradSum, problem.grad_sum, problem.type, true);
  list(kFromBranch, problem.branch, problem.type, true);
  list(kFromScale, problem.scale.rows, problem.scale.type, per_row);
  list(kFromGate, problem.gate.rows, problem.gate.type, per_row);
  list(kFromWeight, {problem.weight.data}, problem.weight.type, false);
  list(kFromBias, {problem.bias.data}, problem.bias.type, false);
  if (problem.grad_gate == nullptr) sources[kFromBranch].rows.data = nullptr;
  if (!per_row || (problem.grad_scale == nullptr && problem.rows > 1)) sources[kFromBias].rows.data = nullptr;
}

// Lays out sources and sums in shared memory for the given rows of a block and stages of a ring, and returns the bytes.
inline size_t lay_out(GeneralLayout& layout, Source (&sources)[kOperands], bool unaligned, int sum_count, int rows,
                      int stages) {
  layout.rows = rows;
  layout.stages = stages;
  layout.resident_bytes = layout.stage_bytes = 0;
  for (Source& source : sources) {
    if (source.rows.data == nullptr) continue;
    uint32_t& end = source.resident ? layout.resident_bytes : layout.stage_bytes;
    source.offset = end;
    end += (layout.vectors * layout.group * source.type.words() + 1) * kVectorBytes;
  }
  layout.ring_bytes = layout.stage_bytes * (stages + (unaligned ? 1 : 0));
  const size_t ring = layout.resident_bytes + static_cast<size_t>(layout.ring_bytes) * rows;
  const size_t vector_bytes = kDynamicWidth * sizeof(float);
  const size_t sums =
      static_cast<size_t>(sum_count) * layout.vectors * layout.pieces * layout.group * rows * vector_bytes;
  layout.sums_offset = static_cast<uint32_t>(ring);
  layout.bytes = ring + (layout.shared_sums ? sums : static_cast<size_t>(layout.group) * vector_bytes);
  return layout.bytes;
}

// Computes a layout for rows that are too long to stay in shared memory.
template <typename LayOut>
GeneralLayout layout_in_pieces(const BackwardGeneralConfig& config, GeneralLayout layout, int64_t vectors,
                               size_t max_bytes, LayOut&& lay_out) {
  for (const bool shared_sums : {true, false}) {
    layout.shared_sums = shared_sums;
    for (int piece = config.max_piece; piece >= config.min_piece; piece /= 2) {
      layout.group = std::min(piece, config.max_threads);
      layout.vectors = piece / layout.group;
      layout.pieces = static_cast<int>((vectors + piece - 1) / piece);
      for (int stages = config.max_stages; stages > 0; --stages) {
        if (lay_out(layout, 1, stages) <= max_bytes) return layout;
      }
    }
  }
  return layout;
}

// Chooses the mapping of rows to blocks, and the location of operands in shared memory.
inline GeneralLayout general_layout(const Backward& problem, const BackwardGeneralConfig& config, bool unaligned,
                                    Source (&sources)[kOperands]) {
  const int width = kDynamicWidth, sum_count = problem.grad_branch == nullptr ? 2 : 3;
  const int64_t vectors = (problem.hidden + width - 1) / width;
  list_sources(problem, sources);
  GeneralLayout layout{};
  layout.pieces = layout.vectors = 1;
  layout.shared_sums = true;
  const auto bytes_of_layout = [&](GeneralLayout& one, int rows, int stages) {
    return lay_out(one, sources, unaligned, sum_count, rows, stages);
  };
  const size_t max_bytes = max_shared_bytes_per_block() - kGeneralStaticBytes;
  int step = 1;  // rows of a warp
  if (vectors <= kWarp) {
    layout.group = 1;
    while (layout.group < vectors) layout.group *= 2;
    step = kWarp / layout.group;
  } else {
    layout.vectors = static_cast<int>(
        std::min<int64_t>((vectors + config.max_threads - 1) / config.max_threads, config.max_vectors));
    const int64_t warps = (vectors + layout.vectors * kWarp - 1) / (layout.vectors * kWarp);
    layout.group = static_cast<int>(std::min<int64_t>(warps * kWarp, config.max_threads));
  }
  const bool whole = static_cast<int64_t>(layout.vectors) * layout.group >= vectors;
  int sms = 1;
  sm_count(&sms);
  const int64_t groups = problem.sums.groups, blocks = std::max<int64_t>(1, sms / groups);
  const int64_t useful = (problem.rows / groups + blocks - 1) / blocks;  // rows, where there are few
  int rows = static_cast<int>(std::min<int64_t>(config.max_threads / layout.group, (useful + step - 1) / step * step));
  rows = rows_with_barriers(rows, layout.group);
  for (; whole && rows > 0; rows -= step) {
    for (int stages = config.max_stages; stages > (rows > step ? 1 : 0); --stages) {
      if (bytes_of_layout(layout, rows, stages) <= max_bytes) return layout;
    }
  }
  for (Source& source : sources) source.resident = false;
  return layout_in_pieces(config, layout, vectors, max_bytes, bytes_of_layout);
}

// The row of the launch table for the current device.
inline int general_row(Type type) { return find_row(kBackwardGeneralTable, {compiled_capability(), type}); }

inline cudaError_t launch_general(const Backward& problem, cudaStream_t stream) {
  GeneralBackward general{{},
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
                          problem.hidden % kDynamicWidth != 0};
  if (general.per_row_modulations) {
    general.results[kFromScale] = problem.grad_scale;
    general.results[kFromGate] = problem.grad_gate;
  }
  if (problem.rows == 1) {
    general.partial = nullptr;
    general.results[kFromWeight] = problem.grad_weight;
    general.results[kFromBias] = problem.grad_bias;
  }
  list_sources(problem, general.sources);
  for (int k = 0; k < kOperands; ++k) {
    const Source& source = general.sources[k];
    general.unaligned =
        general.unaligned || !aligned(general.results[k]) || !aligned(source.rows, source.type.element_bytes());
  }
  const int row = general_row(problem.type);
  general.layout = general_layout(problem, kBackwardGeneralTable[row], general.unaligned, general.sources);
  return launch_row<kBackwardGeneralTable>(row, [&](auto index) {
    const auto kernel = backward_general_kernel<index()>;
    const cudaError_t error = allow_shared_bytes(kernel, general.layout.bytes, kGeneralStaticBytes);
    if (error != cudaSuccess) return error;
    return launch_with_pdl(kernel, dim3(static_cast<unsigned>(problem.sums.groups * problem.sums.parts)),
                           dim3(general.layout.group, general.layout.rows), general.layout.bytes, stream, general);
  });
}

}  // namespace
}  // namespace adaln
