// Modulated norms and gates on the CPU.
//
// Reads:    the rows, parameters and modulations of a problem; a row several times, from the cache after the first.
// Writes:   the results of a problem and its partial sums, nothing beside them.
// Must not: start threads, or keep anything between calls.
//
// Everything is computed on rows of float32: rows of another type are converted into a buffer that stays in the cache,
// and parameters and modulations once for all rows of a span that a call meets. The loops are plain, and `omp simd`
// lets the compiler vectorize their sums (-fopenmp-simd; there is no OpenMP runtime behind it). They are compiled once
// for each instruction set, and which one runs is found out when it runs. Results may differ between instruction sets
// in the last bit, because sums are split and products fused differently. With -fno-trapping-math the compiler may
// compute both sides of a choice, without which a rounding does not vectorize.
#include "adaln_cpu/adaln.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kit/cpu.h"

namespace adaln {
namespace {

using namespace kit;

#define ALWAYS_INLINE __attribute__((always_inline))

// A row is summed in float32 over this many elements at a time, and in float64 beyond: a longer float32 sum would be
// off by more than the roundings of a result, in the same direction for a whole row. A processor adds four sums side by
// side in the time of one.
constexpr int64_t kSumLength = 1024, kSums = 4;

template <class T>
INLINE void decode_all(const typename T::Storage* from, int64_t count, float* __restrict__ values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = T::decode(from[i]);
}

template <class T>
INLINE void encode_all(const float* values, int64_t count, typename T::Storage* __restrict__ to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = T::encode(values[i]);
}

#if defined(__x86_64__)
// Float16, where the processor converts it.
struct ConvertedFloat16 {
  using Storage = uint16_t;
};
template <>
INLINE void decode_all<ConvertedFloat16>(const uint16_t* from, int64_t count, float* __restrict__ values) {
  float16_to_floats(from, values, count);
}
template <>
INLINE void encode_all<ConvertedFloat16>(const float* values, int64_t count, uint16_t* __restrict__ to) {
  floats_to_float16(values, to, count);
}
#endif

// A row as float32: as it lies in memory, or converted into the buffer.
template <class T>
INLINE const float* read_row(const Rows& rows, int64_t row, int64_t hidden, float* buffer) {
  const auto* from = static_cast<const typename T::Storage*>(rows.data) + rows.offset(row);
  if constexpr (std::is_same_v<T, Float32>) {
    return from;
  } else {
    decode_all<T>(from, hidden, buffer);
    return buffer;
  }
}

// Where float32 results of a row go, and what brings them into the row from there.
template <class T>
INLINE float* row_target(void* data, int64_t row, int64_t hidden, float* buffer) {
  return std::is_same_v<T, Float32> ? static_cast<float*>(data) + row * hidden : buffer;
}
template <class T>
INLINE void write_row(void* data, int64_t row, int64_t hidden, const float* values) {
  if constexpr (!std::is_same_v<T, Float32>) {
    encode_all<T>(values, hidden, static_cast<typename T::Storage*>(data) + row * hidden);
  }
}

template <class T>
INLINE void read_as(const void* data, int64_t begin, int64_t count, float* values) {
  decode_all<T>(static_cast<const typename T::Storage*>(data) + begin, count, values);
}

template <class T>
INLINE void write_as(const float* values, void* data, int64_t begin, int64_t count) {
  encode_all<T>(values, count, static_cast<typename T::Storage*>(data) + begin);
}

// To T and back.
template <class T>
INLINE void round_row(float* values, int64_t count, std::vector<typename T::Storage>& buffer) {
  if (std::is_same_v<T, Float32>) return;
  buffer.resize(count);
  encode_all<T>(values, count, buffer.data());
  decode_all<T>(buffer.data(), count, values);
}

// What is of the type of the rows, T, or float32.
template <class T>
INLINE void read(const void* data, Type type, int64_t begin, int64_t count, float* values) {
  if (type == Type::float32) return read_as<Float32>(data, begin, count, values);
  read_as<T>(data, begin, count, values);
}

template <class T>
INLINE void write(const float* values, void* data, Type type, int64_t begin, int64_t count) {
  if (type == Type::float32) return write_as<Float32>(values, data, begin, count);
  write_as<T>(values, data, begin, count);
}

template <class T>
INLINE void read(const Parameter& parameter, int64_t begin, int64_t count, float otherwise, float* values) {
  if (parameter.data == nullptr) {
    std::fill_n(values, count, otherwise);
  } else {
    read<T>(parameter.data, parameter.type, begin, count, values);
  }
}

// Zeros where there is no such modulation.
template <class T>
INLINE void read(const Modulation& modulation, int64_t span, int64_t begin, int64_t count, float* values) {
  if (modulation.rows.data == nullptr) {
    std::fill_n(values, count, 0.0f);
  } else {
    read<T>(modulation.rows.data, modulation.type, modulation.rows.offset(span) + begin, count, values);
  }
}

// The span of a row, when it is another than that of the row before.
class Spans {
 public:
  explicit INLINE Spans(int64_t span) : span_(span) {}

  INLINE bool enter(int64_t row) {
    if (row < end_) return false;
    current_ = row / span_;
    end_ = (current_ + 1) * span_;
    return true;
  }
  INLINE int64_t current() const { return current_; }

 private:
  int64_t span_, current_ = 0, end_ = 0;
};

// The sum of term(i) for each i below `count`.
template <class Term>
INLINE double sum_of(int64_t count, Term term) {
  double total = 0.0;
  for (int64_t start = 0; start < count; start += kSumLength) {
    const int64_t length = std::min(count - start, kSumLength), part = length / kSums;
    float first = 0.0f, second = 0.0f, third = 0.0f, fourth = 0.0f;
#pragma omp simd reduction(+ : first, second, third, fourth)
    for (int64_t i = start; i < start + part; ++i) {
      first += term(i);
      second += term(i + part);
      third += term(i + 2 * part);
      fourth += term(i + 3 * part);
    }
    for (int64_t i = start + kSums * part; i < start + length; ++i) first += term(i);
    total += static_cast<double>(first) + second + (static_cast<double>(third) + fourth);
  }
  return total;
}

INLINE float mean_of(const float* values, int64_t hidden) {
  const double sum = sum_of(hidden, [=](int64_t i) ALWAYS_INLINE { return values[i]; });
  return static_cast<float>(sum / static_cast<double>(hidden));
}

INLINE float reciprocal_norm_of(const float* values, float mean, int64_t hidden, float eps) {
  const double squares =
      sum_of(hidden, [=](int64_t i) ALWAYS_INLINE { return (values[i] - mean) * (values[i] - mean); });
  return static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(hidden) + static_cast<double>(eps)));
}

INLINE void multiply(const float* first, const float* second, int64_t count, float* products) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) products[i] = first[i] * second[i];
}

template <class T>
INLINE void add_gated(const float* residual, const float* branch, const float* gate, int64_t hidden, bool stepwise,
                      float* sum, std::vector<typename T::Storage>& buffer) {
  if (stepwise) {
    multiply(branch, gate, hidden, sum);
    round_row<T>(sum, hidden, buffer);
#pragma omp simd
    for (int64_t i = 0; i < hidden; ++i) sum[i] += residual[i];
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < hidden; ++i) sum[i] = residual[i] + branch[i] * gate[i];
}

template <class T>
INLINE void run_rows(const Gate& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  std::vector<float> buffers(4 * hidden);
  float *gate = buffers.data(), *residual_buffer = gate + hidden, *branch_buffer = residual_buffer + hidden;
  std::vector<typename T::Storage> rounded;
  Spans spans(problem.span);
  for (int64_t row = begin; row < end; ++row) {
    if (spans.enter(row)) read<T>(problem.gate, spans.current(), 0, hidden, gate);
    const float* residual = read_row<T>(problem.residual, row, hidden, residual_buffer);
    const float* branch = read_row<T>(problem.branch, row, hidden, branch_buffer);
    float* sum = row_target<T>(problem.sum, row, hidden, branch_buffer + hidden);
    add_gated<T>(residual, branch, gate, hidden, problem.stepwise, sum, rounded);
    write_row<T>(problem.sum, row, hidden, sum);
  }
}

template <class T>
INLINE void run_rows(const Forward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  std::vector<float> buffers(7 * hidden);
  float* __restrict__ factor = buffers.data();  // of a normed row
  float* __restrict__ offset = factor + hidden;
  float *gate = offset + hidden, *weight = gate + hidden, *bias = weight + hidden;
  float *first_buffer = bias + hidden, *second_buffer = first_buffer + hidden;
  read<T>(problem.weight, 0, hidden, 1.0f, weight);
  read<T>(problem.bias, 0, hidden, 0.0f, bias);
  std::vector<typename T::Storage> rounded;
  Spans spans(problem.span);
  for (int64_t row = begin; row < end; ++row) {
    if (spans.enter(row)) {
      read<T>(problem.scale, spans.current(), 0, hidden, factor);
      read<T>(problem.shift, spans.current(), 0, hidden, offset);
      if (problem.branch.data != nullptr) read<T>(problem.gate, spans.current(), 0, hidden, gate);
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) factor[i] += 1.0f;
      if (problem.stepwise) {
        round_row<T>(factor, hidden, rounded);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) {
          offset[i] += bias[i] * factor[i];
          factor[i] *= weight[i];
        }
      }
    }
    const float* x = read_row<T>(problem.x, row, hidden, first_buffer);
    if (problem.branch.data != nullptr) {
      const float* branch = read_row<T>(problem.branch, row, hidden, second_buffer);
      float* sum = row_target<T>(problem.sum, row, hidden, second_buffer);
      add_gated<T>(x, branch, gate, hidden, problem.stepwise, sum, rounded);
      write_row<T>(problem.sum, row, hidden, sum);
      // As it was rounded.
      if (!std::is_same_v<T, Float32>) read_as<T>(problem.sum, row * hidden, hidden, sum);
      x = sum;
    }
    const float mean = problem.centered ? mean_of(x, hidden) : 0.0f;
    const float rstd = reciprocal_norm_of(x, mean, hidden, problem.eps);
    float* normed = row_target<T>(problem.normed, row, hidden, second_buffer);
    if (problem.stepwise) {
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) normed[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
      round_row<T>(normed, hidden, rounded);
      multiply(normed, factor, hidden, normed);
      round_row<T>(normed, hidden, rounded);
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) normed[i] += offset[i];
    } else {
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) normed[i] = (x[i] - mean) * rstd * factor[i] + offset[i];
    }
    write_row<T>(problem.normed, row, hidden, normed);
  }
}

struct Range {
  int64_t begin, end;
};

// The rows of a part.
template <class Problem>
INLINE Range rows_of_part(const Problem& problem, int64_t part_of_all) {
  const Sums& sums = problem.sums;
  const int64_t group = part_of_all / sums.parts, part = part_of_all % sums.parts;
  const int64_t rows = problem.rows / sums.groups, share = rows / sums.parts, longer = rows % sums.parts;
  const int64_t begin = group * rows + part * share + std::min(part, longer);
  return {begin, begin + share + (part < longer ? 1 : 0)};
}

INLINE void add_products(const float* first, const float* second, int64_t count, float* __restrict__ sums) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sums[i] += first[i] * second[i];
}

template <class T>
INLINE void run_rows(const GateBackward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  std::vector<float> buffers(4 * hidden);
  float *gate = buffers.data(), *grad_buffer = gate + hidden, *branch_buffer = grad_buffer + hidden;
  float* product_buffer = branch_buffer + hidden;
  for (int64_t part = begin; part < end; ++part) {
    const Range rows = rows_of_part(problem, part);
    float* sums = problem.sums.partial == nullptr ? nullptr : problem.sums.partial + part * hidden;
    if (sums != nullptr) std::memset(sums, 0, hidden * sizeof(float));
    Spans spans(problem.span);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (spans.enter(row)) read<T>(problem.gate, spans.current(), 0, hidden, gate);
      const float* grad = read_row<T>(problem.grad, row, hidden, grad_buffer);
      float* grad_branch = row_target<T>(problem.grad_branch, row, hidden, product_buffer);
      multiply(grad, gate, hidden, grad_branch);
      write_row<T>(problem.grad_branch, row, hidden, grad_branch);
      if (problem.grad_gate == nullptr) continue;
      const float* branch = read_row<T>(problem.branch, row, hidden, branch_buffer);
      if (sums != nullptr) {
        add_products(grad, branch, hidden, sums);
      } else {
        multiply(grad, branch, hidden, product_buffer);
        write<T>(product_buffer, problem.grad_gate, problem.gate.type, row * hidden, hidden);
      }
    }
  }
}

template <class T>
INLINE void run_rows(const Backward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  const bool own = problem.span == 1;  // every row has modulations of its own
  std::vector<float> buffers(11 * hidden);
  float* weight = buffers.data();
  float *bias = weight + hidden, *gate = bias + hidden, *scale = gate + hidden;
  float* __restrict__ factor = scale + hidden;  // of the gradient of the normed row
  float* __restrict__ slope = factor + hidden;  // that gradient
  float* __restrict__ normed = slope + hidden;
  float *grad_buffer = normed + hidden, *x_buffer = grad_buffer + hidden;
  float *total_buffer = x_buffer + hidden, *product = total_buffer + hidden;
  read<T>(problem.weight, 0, hidden, 1.0f, weight);
  read<T>(problem.bias, 0, hidden, 0.0f, bias);
  for (int64_t part = begin; part < end; ++part) {
    const Range rows = rows_of_part(problem, part);
    const Sums& sums = problem.sums;
    float* partial = sums.partial == nullptr ? nullptr : sums.partial + part * sums.count * hidden;
    if (partial != nullptr) std::memset(partial, 0, sums.count * hidden * sizeof(float));
    Spans spans(problem.span);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (spans.enter(row)) {
        read<T>(problem.scale, spans.current(), 0, hidden, scale);
        if (problem.grad_branch != nullptr) read<T>(problem.gate, spans.current(), 0, hidden, gate);
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) factor[i] = weight[i] * (1.0f + scale[i]);
      }
      const float* grad = read_row<T>(problem.grad, row, hidden, grad_buffer);
      const float* x = read_row<T>(problem.x, row, hidden, x_buffer);
      multiply(grad, factor, hidden, slope);
      const float mean = problem.centered ? mean_of(x, hidden) : 0.0f;
      const float mean_slope = problem.centered ? mean_of(slope, hidden) : 0.0f;
      const float rstd = reciprocal_norm_of(x, mean, hidden, problem.eps);
      const double products = sum_of(hidden, [=](int64_t i) ALWAYS_INLINE { return slope[i] * (x[i] - mean); });
      const float along = rstd * rstd * static_cast<float>(products / static_cast<double>(hidden));
      float* __restrict__ total = row_target<T>(problem.grad_x, row, hidden, total_buffer);
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = x[i] - mean;
        normed[i] = value * rstd;
        total[i] = rstd * (slope[i] - mean_slope - value * along);
      }
      if (problem.grad_sum.data != nullptr) {
        const float* grad_sum = read_row<T>(problem.grad_sum, row, hidden, product);
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) total[i] += grad_sum[i];
      }
      write_row<T>(problem.grad_x, row, hidden, total);
      if (partial != nullptr) {
        const float* summed = grad;
        if (own) {
#pragma omp simd
          for (int64_t i = 0; i < hidden; ++i) product[i] = grad[i] * (1.0f + scale[i]);
          summed = product;
        }
        float* __restrict__ slope_times_normed_sums = partial + kSlopeTimesNormed * hidden;
        float* __restrict__ slope_sums = partial + kSlope * hidden;
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) {
          slope_times_normed_sums[i] += summed[i] * normed[i];
          slope_sums[i] += summed[i];
        }
      }
      if (own && problem.grad_scale != nullptr) {
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) product[i] = grad[i] * (normed[i] * weight[i] + bias[i]);
        write<T>(product, problem.grad_scale, problem.scale.type, row * hidden, hidden);
      }
      if (problem.grad_branch == nullptr) continue;
      float* grad_branch = row_target<T>(problem.grad_branch, row, hidden, product);
      multiply(total, gate, hidden, grad_branch);
      write_row<T>(problem.grad_branch, row, hidden, grad_branch);
      if (problem.grad_gate == nullptr) continue;
      const float* branch = read_row<T>(problem.branch, row, hidden, x_buffer);
      if (own) {
        multiply(total, branch, hidden, product);
        write<T>(product, problem.grad_gate, problem.gate.type, row * hidden, hidden);
      } else {
        add_products(total, branch, hidden, partial + kGate * hidden);
      }
    }
  }
}

// Adds the other parts' sums of a group to those of its first part, and returns these.
INLINE float* sum_of_parts(const Sums& sums, int64_t group, int64_t hidden, int64_t begin, int64_t end) {
  float* first = sums.partial + group * sums.parts * sums.count * hidden;
  for (int64_t part = 1; part < sums.parts; ++part) {
    for (int k = 0; k < sums.count; ++k) {
      const float* from = first + (part * sums.count + k) * hidden;
      float* __restrict__ to = first + k * hidden;
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) to[i] += from[i];
    }
  }
  return first;
}

template <class T>
INLINE void reduce_columns(const Backward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden, count = end - begin;
  const bool own = problem.span == 1;
  std::vector<float> buffers(6 * count);
  float* weight = buffers.data();
  float *bias = weight + count, *scale = bias + count, *__restrict__ grad_scale = scale + count;
  float* __restrict__ grad_weight = grad_scale + count, * __restrict__ grad_bias = grad_weight + count;
  read<T>(problem.weight, begin, count, 1.0f, weight);
  read<T>(problem.bias, begin, count, 0.0f, bias);
  for (int64_t group = 0; group < problem.sums.groups; ++group) {
    const float* sums = sum_of_parts(problem.sums, group, hidden, begin, end);
    const float* slope = sums + kSlope * hidden + begin;
    const float* slope_times_normed = sums + kSlopeTimesNormed * hidden + begin;
    read<T>(own ? Modulation{} : problem.scale, group, begin, count, scale);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      grad_scale[i] = weight[i] * slope_times_normed[i] + bias[i] * slope[i];
      grad_weight[i] += (1.0f + scale[i]) * slope_times_normed[i];
      grad_bias[i] += (1.0f + scale[i]) * slope[i];
    }
    if (own) continue;
    const int64_t to = group * hidden + begin;
    if (problem.grad_scale != nullptr) write<T>(grad_scale, problem.grad_scale, problem.scale.type, to, count);
    if (problem.grad_shift != nullptr) write<T>(slope, problem.grad_shift, problem.scale.type, to, count);
    if (problem.grad_gate != nullptr) {
      write<T>(sums + kGate * hidden + begin, problem.grad_gate, problem.gate.type, to, count);
    }
  }
  if (problem.grad_weight != nullptr) write<T>(grad_weight, problem.grad_weight, problem.weight.type, begin, count);
  if (problem.grad_bias != nullptr) write<T>(grad_bias, problem.grad_bias, problem.bias.type, begin, count);
}

template <class T>
INLINE void reduce_columns(const GateBackward& problem, int64_t begin, int64_t end) {
  for (int64_t group = 0; group < problem.sums.groups; ++group) {
    const float* sums = sum_of_parts(problem.sums, group, problem.hidden, begin, end);
    write<T>(sums + begin, problem.grad_gate, problem.gate.type, group * problem.hidden + begin, end - begin);
  }
}

// The functions above by what they work on.
struct OnRows {
  template <class T, class Problem>
  static INLINE void run(const Problem& problem, int64_t begin, int64_t end) {
    run_rows<T>(problem, begin, end);
  }
};
struct OnColumns {
  template <class T, class Problem>
  static INLINE void run(const Problem& problem, int64_t begin, int64_t end) {
    reduce_columns<T>(problem, begin, end);
  }
};

#if defined(__x86_64__)
template <class Work, class T, class Problem>
__attribute__((target("avx2,fma,f16c"))) void run_avx2(const Problem& problem, int64_t begin, int64_t end) {
  Work::template run<T>(problem, begin, end);
}
template <class Work, class T, class Problem>
__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))) void run_avx512(const Problem& problem,
                                                                                            int64_t begin,
                                                                                            int64_t end) {
  Work::template run<T>(problem, begin, end);
}
#endif

template <class Work, class T, class Problem>
void run_on_processor(const Problem& problem, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  using Fast = std::conditional_t<std::is_same_v<T, Float16>, ConvertedFloat16, T>;
  if (has_avx512()) return run_avx512<Work, Fast>(problem, begin, end);
  if (has_avx2()) return run_avx2<Work, Fast>(problem, begin, end);
#endif
  Work::template run<T>(problem, begin, end);
}

template <class Work, class Problem>
void run(const Problem& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case Type::float32:
      return run_on_processor<Work, Float32>(problem, begin, end);
    case Type::float16:
      return run_on_processor<Work, Float16>(problem, begin, end);
    case Type::bfloat16:
      return run_on_processor<Work, BFloat16>(problem, begin, end);
  }
}

}  // namespace

void gate(const Gate& problem, int64_t begin, int64_t end) { run<OnRows>(problem, begin, end); }

void forward(const Forward& problem, int64_t begin, int64_t end) { run<OnRows>(problem, begin, end); }

int64_t partial_sums(int64_t groups, int64_t rows) {
  return std::max<int64_t>(1, std::min(64 / groups, (rows / groups + 3) / 4));
}

void backward(const Backward& problem, int64_t begin, int64_t end) { run<OnRows>(problem, begin, end); }

void gate_backward(const GateBackward& problem, int64_t begin, int64_t end) { run<OnRows>(problem, begin, end); }

void reduce(const Backward& problem, int64_t begin, int64_t end) { run<OnColumns>(problem, begin, end); }

void reduce(const GateBackward& problem, int64_t begin, int64_t end) { run<OnColumns>(problem, begin, end); }

}  // namespace adaln
