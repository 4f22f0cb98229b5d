// Modulated norms and gates on the CPU.
//
// Reads:    the rows, parameters and modulations of a problem; a row several times, from the cache after the first.
// Writes:   the results of a problem and its partial sums, nothing beside them.
// Must not: start threads, or keep anything between calls.
//
// Everything is computed in float32, on some hundred elements of a row at a time: those of another type are converted
// into a buffer that stays in the first cache, and parameters and modulations once for all rows of a span that a call
// meets. The loops are plain, and `omp simd`
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

// Elements of a row at a time. They are summed in float32, and in float64 beyond: a longer float32 sum would be off by
// more than the roundings of a result, in the same direction for a whole row.
constexpr int64_t kChunk = 1024;

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

// Elements that a loop reads and writes where they lie, for a conversion is an instruction or two. Others are converted
// in a buffer, all at once.
template <class T>
constexpr bool kInPlace = std::is_same_v<T, Float32> || std::is_same_v<T, BFloat16>;

template <class T>
struct InPlace {
  const typename T::Storage* from;
  INLINE float operator[](int64_t i) const { return T::decode(from[i]); }
};

// Elements as float32, by index.
template <class T>
INLINE auto floats_of(const typename T::Storage* from, int64_t count, float* buffer) {
  if constexpr (kInPlace<T>) {
    return InPlace<T>{from};
  } else {
    decode_all<T>(from, count, buffer);
    return static_cast<const float*>(buffer);
  }
}

// Calls `value` with the index of each element, and writes what it returns.
template <class T, class Value>
INLINE void write_each(typename T::Storage* __restrict__ to, int64_t count, Value value) {
  if constexpr (kInPlace<T>) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = T::encode(value(i));
  } else {
    float buffer[kChunk];
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) buffer[i] = value(i);
    encode_all<T>(buffer, count, to);
  }
}

template <class T>
INLINE typename T::Storage* row_to(void* data, int64_t row, int64_t hidden) {
  return data == nullptr ? nullptr : static_cast<typename T::Storage*>(data) + row * hidden;
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
INLINE void round_all(float* values, int64_t count) {
  if constexpr (!std::is_same_v<T, Float32>) {
    typename T::Storage rounded[kChunk];
    encode_all<T>(values, count, rounded);
    decode_all<T>(rounded, count, values);
  }
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

// The sum of term(i) for each i below `count`, at most kChunk. A processor adds four sums side by side in the time of
// one.
template <class Term>
INLINE float sum_of(int64_t count, Term term) {
  const int64_t part = count / 4;
  float first = 0.0f, second = 0.0f, third = 0.0f, fourth = 0.0f;
#pragma omp simd reduction(+ : first, second, third, fourth)
  for (int64_t i = 0; i < part; ++i) {
    first += term(i);
    second += term(i + part);
    third += term(i + 2 * part);
    fourth += term(i + 3 * part);
  }
  for (int64_t i = 4 * part; i < count; ++i) first += term(i);
  return (first + second) + (third + fourth);
}

template <class Values>
INLINE float mean_of(Values values, int64_t count) {
  return sum_of(count, [=](int64_t i) ALWAYS_INLINE { return values[i]; }) / static_cast<float>(count);
}

template <class Values>
INLINE float squares_of(Values values, float mean, int64_t count) {
  return sum_of(count, [=](int64_t i) ALWAYS_INLINE { return (values[i] - mean) * (values[i] - mean); });
}

// Sums over a chunk: of squares of x, of slopes, and of their products, where x is counted from the mean.
struct Products {
  float squares, slopes, products;
};

template <class X, class Slope>
INLINE Products products_of(X x, Slope slope, float mean, int64_t count) {
  const int64_t part = count / 2;
  float squares = 0.0f, slopes = 0.0f, products = 0.0f;
  float more_squares = 0.0f, more_slopes = 0.0f, more_products = 0.0f;
#pragma omp simd reduction(+ : squares, slopes, products, more_squares, more_slopes, more_products)
  for (int64_t i = 0; i < part; ++i) {
    const float value = x[i] - mean, other = x[i + part] - mean;
    const float own = slope(i), others = slope(i + part);
    squares += value * value;
    slopes += own;
    products += own * value;
    more_squares += other * other;
    more_slopes += others;
    more_products += others * other;
  }
  if (count % 2 != 0) {
    const float value = x[count - 1] - mean;
    squares += value * value;
    slopes += slope(count - 1);
    products += slope(count - 1) * value;
  }
  return {squares + more_squares, slopes + more_slopes, products + more_products};
}

// The mean of a row and the squares of the deviations from it, from those of its chunks.
class Moments {
 public:
  // Of a chunk; its mean is zero when the row is not centered.
  INLINE void add(int64_t count, float mean, float squares) {
    const double away = static_cast<double>(mean) - mean_, both = static_cast<double>(count_ + count);
    mean_ += away * static_cast<double>(count) / both;
    squares_ += squares + away * away * static_cast<double>(count_) * static_cast<double>(count) / both;
    count_ += count;
  }

  INLINE double mean() const { return mean_; }
  INLINE float reciprocal_norm(float eps) const {
    return static_cast<float>(1.0 / std::sqrt(squares_ / static_cast<double>(count_) + static_cast<double>(eps)));
  }

 private:
  int64_t count_ = 0;
  double mean_ = 0.0, squares_ = 0.0;
};

INLINE void multiply(const float* first, const float* second, int64_t count, float* products) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) products[i] = first[i] * second[i];
}

template <class First, class Second>
INLINE void add_products(First first, Second second, int64_t count, float* __restrict__ sums) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sums[i] += first[i] * second[i];
}

// Calls `work` with the beginning and the length of each chunk of a row.
template <class Work>
INLINE void for_chunks(int64_t hidden, Work work) {
  for (int64_t start = 0; start < hidden; start += kChunk) work(start, std::min(hidden - start, kChunk));
}

template <class T>
INLINE void add_gated(const typename T::Storage* residual, const typename T::Storage* branch, const float* gate,
                      int64_t count, bool stepwise, typename T::Storage* to) {
  float residual_buffer[kChunk], branch_buffer[kChunk];
  const auto added = floats_of<T>(residual, count, residual_buffer);
  const auto gated = floats_of<T>(branch, count, branch_buffer);
  if (stepwise) {
    float product[kChunk];
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) product[i] = gated[i] * gate[i];
    round_all<T>(product, count);
    write_each<T>(to, count, [&](int64_t i) ALWAYS_INLINE { return added[i] + product[i]; });
  } else {
    write_each<T>(to, count, [=](int64_t i) ALWAYS_INLINE { return added[i] + gated[i] * gate[i]; });
  }
}

template <class T>
INLINE void run_rows(const Gate& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  std::vector<float> gate(hidden);
  Spans spans(problem.span);
  for (int64_t row = begin; row < end; ++row) {
    if (spans.enter(row)) read<T>(problem.gate, spans.current(), 0, hidden, gate.data());
    const auto *residual = at<T>(problem.residual, row), *branch = at<T>(problem.branch, row);
    auto* sum = row_to<T>(problem.sum, row, hidden);
    for_chunks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
      add_gated<T>(residual + start, branch + start, gate.data() + start, count, problem.stepwise, sum + start);
    });
  }
}

template <class T>
INLINE void run_rows(const Forward& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const int64_t hidden = problem.hidden;
  std::vector<float> buffers(5 * hidden);
  float* __restrict__ factor = buffers.data();  // of a normed row
  float* __restrict__ offset = factor + hidden;
  float *gate = offset + hidden, *weight = gate + hidden, *bias = weight + hidden;
  read<T>(problem.weight, 0, hidden, 1.0f, weight);
  read<T>(problem.bias, 0, hidden, 0.0f, bias);
  Spans spans(problem.span);
  for (int64_t row = begin; row < end; ++row) {
    if (spans.enter(row)) {
      read<T>(problem.scale, spans.current(), 0, hidden, factor);
      read<T>(problem.shift, spans.current(), 0, hidden, offset);
      if (problem.branch.data != nullptr) read<T>(problem.gate, spans.current(), 0, hidden, gate);
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) factor[i] += 1.0f;
      if (problem.stepwise) {
        for_chunks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE { round_all<T>(factor + start, count); });
      } else {
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) {
          offset[i] += bias[i] * factor[i];
          factor[i] *= weight[i];
        }
      }
    }
    const Storage* x = at<T>(problem.x, row);
    const Storage* branch = problem.branch.data == nullptr ? nullptr : at<T>(problem.branch, row);
    Storage *sum = row_to<T>(problem.sum, row, hidden), *normed = row_to<T>(problem.normed, row, hidden);
    float buffer[kChunk];
    Moments moments;
    for_chunks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
      if (branch != nullptr) {
        add_gated<T>(x + start, branch + start, gate + start, count, problem.stepwise, sum + start);
      }
      const auto values = floats_of<T>((branch == nullptr ? x : sum) + start, count, buffer);
      const float mean = problem.centered ? mean_of(values, count) : 0.0f;
      moments.add(count, mean, squares_of(values, mean, count));
    });
    const auto mean = static_cast<float>(moments.mean());
    const float rstd = moments.reciprocal_norm(problem.eps);
    for_chunks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
      const auto values = floats_of<T>((branch == nullptr ? x : sum) + start, count, buffer);
      const float *factors = factor + start, *offsets = offset + start;
      if (problem.stepwise) {
        const float *weights = weight + start, *biases = bias + start;
        float result[kChunk];
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) result[i] = (values[i] - mean) * rstd * weights[i] + biases[i];
        round_all<T>(result, count);
        multiply(result, factors, count, result);
        round_all<T>(result, count);
        write_each<T>(normed + start, count, [&](int64_t i) ALWAYS_INLINE { return result[i] + offsets[i]; });
      } else {
        write_each<T>(normed + start, count,
                      [=](int64_t i) ALWAYS_INLINE { return (values[i] - mean) * rstd * factors[i] + offsets[i]; });
      }
    });
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

template <class T>
INLINE void run_rows(const GateBackward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  std::vector<float> gate(hidden);
  for (int64_t part = begin; part < end; ++part) {
    const Range rows = rows_of_part(problem, part);
    float* sums = problem.sums.partial == nullptr ? nullptr : problem.sums.partial + part * hidden;
    if (sums != nullptr) std::memset(sums, 0, hidden * sizeof(float));
    Spans spans(problem.span);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (spans.enter(row)) read<T>(problem.gate, spans.current(), 0, hidden, gate.data());
      const auto *grad_row = at<T>(problem.grad, row), *branch_row = at<T>(problem.branch, row);
      auto* grad_branch_row = row_to<T>(problem.grad_branch, row, hidden);
      for_chunks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
        float grad_buffer[kChunk], branch_buffer[kChunk];
        const auto grad = floats_of<T>(grad_row + start, count, grad_buffer);
        const float* gates = gate.data() + start;
        write_each<T>(grad_branch_row + start, count, [=](int64_t i) ALWAYS_INLINE { return grad[i] * gates[i]; });
        if (problem.grad_gate == nullptr) return;
        const auto branch = floats_of<T>(branch_row + start, count, branch_buffer);
        if (sums != nullptr) {
          add_products(grad, branch, count, sums + start);
        } else {
          float products[kChunk];
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) products[i] = grad[i] * branch[i];
          write<T>(products, problem.grad_gate, problem.gate.type, row * hidden + start, count);
        }
      });
    }
  }
}

template <class T>
INLINE void run_rows(const Backward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  const bool own = problem.span == 1;  // every row has modulations of its own
  std::vector<float> buffers(5 * hidden);
  float* weight = buffers.data();
  float *bias = weight + hidden, *gate = bias + hidden, *scale = gate + hidden;
  float* __restrict__ factor = scale + hidden;  // of the gradient of the normed row
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
      const auto *grad_row = at<T>(problem.grad, row), *x_row = at<T>(problem.x, row);
      auto* grad_x_row = row_to<T>(problem.grad_x, row, hidden);
      auto* grad_branch_row = row_to<T>(problem.grad_branch, row, hidden);
      float grad_buffer[kChunk], x_buffer[kChunk], other_buffer[kChunk], values[kChunk];
      Moments moments;
      double slopes = 0.0, products = 0.0;  // products: of slopes and of x
      for_chunks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
        const auto grad = floats_of<T>(grad_row + start, count, grad_buffer);
        const auto x = floats_of<T>(x_row + start, count, x_buffer);
        const float* factors = factor + start;
        const float chunk_mean = problem.centered ? mean_of(x, count) : 0.0f;
        const Products of_chunk =
            products_of(x, [=](int64_t i) ALWAYS_INLINE { return grad[i] * factors[i]; }, chunk_mean, count);
        moments.add(count, chunk_mean, of_chunk.squares);
        slopes += of_chunk.slopes;
        products += of_chunk.products + static_cast<double>(of_chunk.slopes) * chunk_mean;
      });
      products -= slopes * moments.mean();
      const auto mean = static_cast<float>(moments.mean());
      const float rstd = moments.reciprocal_norm(problem.eps);
      const float mean_slope = problem.centered ? static_cast<float>(slopes / static_cast<double>(hidden)) : 0.0f;
      const float along = rstd * rstd * static_cast<float>(products / static_cast<double>(hidden));
      for_chunks(hidden, [&](int64_t start, int64_t count) ALWAYS_INLINE {
        const auto grad = floats_of<T>(grad_row + start, count, grad_buffer);
        const auto x = floats_of<T>(x_row + start, count, x_buffer);
        const float* factors = factor + start;
        // By itself, and rounded as it was when it was summed: of a row of one element nothing may be left.
        float slope[kChunk];
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) slope[i] = grad[i] * factors[i];
        const auto total_of = [=, &slope](int64_t i)
                                  ALWAYS_INLINE { return rstd * (slope[i] - mean_slope - (x[i] - mean) * along); };
        if (partial != nullptr) {
          float* __restrict__ slope_times_normed_sums = partial + kSlopeTimesNormed * hidden + start;
          float* __restrict__ slope_sums = partial + kSlope * hidden + start;
          const float* scales = scale + start;
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) {
            const float summed = own ? grad[i] * (1.0f + scales[i]) : grad[i];
            slope_times_normed_sums[i] += summed * ((x[i] - mean) * rstd);
            slope_sums[i] += summed;
          }
        }
        if (own && problem.grad_scale != nullptr) {
          const float *weights = weight + start, *biases = bias + start;
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) {
            values[i] = grad[i] * ((x[i] - mean) * rstd * weights[i] + biases[i]);
          }
          write<T>(values, problem.grad_scale, problem.scale.type, row * hidden + start, count);
        }
        if (problem.grad_sum.data == nullptr && problem.grad_branch == nullptr) {
          return write_each<T>(grad_x_row + start, count, total_of);
        }
        float total[kChunk];
        if (problem.grad_sum.data != nullptr) {
          const auto grad_sum = floats_of<T>(at<T>(problem.grad_sum, row) + start, count, other_buffer);
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) total[i] = total_of(i) + grad_sum[i];
        } else {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) total[i] = total_of(i);
        }
        write_each<T>(grad_x_row + start, count, [&](int64_t i) ALWAYS_INLINE { return total[i]; });
        if (problem.grad_branch == nullptr) return;
        const float* gates = gate + start;
        write_each<T>(grad_branch_row + start, count, [&](int64_t i) ALWAYS_INLINE { return total[i] * gates[i]; });
        if (problem.grad_gate == nullptr) return;
        const auto branch = floats_of<T>(at<T>(problem.branch, row) + start, count, other_buffer);
        if (own) {
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) values[i] = total[i] * branch[i];
          write<T>(values, problem.grad_gate, problem.gate.type, row * hidden + start, count);
        } else {
          add_products(static_cast<const float*>(total), branch, count, partial + kGate * hidden + start);
        }
      });
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
  constexpr int64_t kRows = 16;  // of a part, at least, so that its sums are the lesser part of the work
  return std::max<int64_t>(1, std::min(64 / groups, rows / groups / kRows));
}

void backward(const Backward& problem, int64_t begin, int64_t end) { run<OnRows>(problem, begin, end); }

void gate_backward(const GateBackward& problem, int64_t begin, int64_t end) { run<OnRows>(problem, begin, end); }

void reduce(const Backward& problem, int64_t begin, int64_t end) { run<OnColumns>(problem, begin, end); }

void reduce(const GateBackward& problem, int64_t begin, int64_t end) { run<OnColumns>(problem, begin, end); }

}  // namespace adaln
