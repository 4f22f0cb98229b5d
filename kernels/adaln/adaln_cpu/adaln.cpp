// Modulated norms and gates on the CPU.
//
// Reads:    the rows, parameters and modulations of a problem, each row once; modulations once for all rows of a span.
// Writes:   the results of a problem and its partial sums.
// Must not: start threads, or keep state between calls. The order of every sum is fixed.
//
// A row is converted to floats, which stay in the cache. The loops are plain; `omp simd` lets the compiler vectorize
// their sums (-fopenmp-simd, without an OpenMP runtime). They are compiled for several instruction sets, and the CPU's
// is selected at run time. Results may differ between instruction sets in the last bit, because sums are split
// differently. With -fno-trapping-math the compiler may compute both sides of a branch, without which rounding does not
// vectorize.
#include <algorithm>
#include <vector>

#include "adaln/problem.h"
#include "kit/cpu.h"

namespace adaln {
namespace {

using namespace kit;

// Reads `otherwise` where there is no such tensor.
template <class T>
INLINE void read(const Parameter& parameter, int64_t begin, float otherwise, Floats& values) {
  if (parameter.data == nullptr) return values.assign(values.size(), otherwise);
  read_as<T>(parameter.type, parameter.data, begin, static_cast<int64_t>(values.size()), values.data());
}
template <class T>
INLINE void read(const Modulation& modulation, int64_t span, int64_t begin, float otherwise, Floats& values) {
  const Rows& rows = modulation.rows;
  const Parameter row{rows.data, modulation.type};
  read<T>(row, rows.data == nullptr ? 0 : rows.offset(span) + begin, otherwise, values);
}
template <class T>
INLINE void read(const Rows& rows, int64_t row, Floats& values) {
  decode_all<T>(at<T>(rows, row), static_cast<int64_t>(values.size()), values.data());
}

// Writes value(i), rounded, for a row of T or float32.
template <class T, class Value>
INLINE void write_row(void* data, Type type, int64_t row, int64_t hidden, Value&& value) {
  if (type == Type::float32) return write_values<Float32>(row_at<Float32>(data, row, hidden), hidden, value);
  write_values<T>(row_at<T>(data, row, hidden), hidden, value);
}

// Whether modulations are read before a row.
INLINE bool enters_span(int64_t row, int64_t first, int64_t span) { return row == first || row % span == 0; }

// Writes a row of residual + branch * gate; if `stepwise`, the product is rounded, too.
template <class T>
INLINE void write_sum(const Forward& problem, int64_t row, const Floats& gate) {
  const auto *residual = at<T>(problem.x, row), *branch = at<T>(problem.branch, row);
  auto* sum = row_at<T>(problem.sum, row, problem.hidden);
  for_blocks(problem.hidden, [&](int64_t start, int64_t length) ALWAYS_INLINE {
    Block values, products;
    decode_all<T>(residual + start, length, values);
    decode_all<T>(branch + start, length, products);
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) products[i] *= gate[start + i];
    if (problem.stepwise) round_all<T>(products, length);
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) values[i] += products[i];
    encode_all<T>(values, length, sum + start);
  });
}

struct Moments {
  float mean, rstd;
};

template <class Problem>
INLINE Moments moments_of(const Problem& problem, const Floats& x) {
  const int64_t hidden = problem.hidden;
  const double sum = problem.centered ? sum_of(hidden, [&](int64_t i) ALWAYS_INLINE { return x[i]; }) : 0.0;
  const auto mean = static_cast<float>(sum / static_cast<double>(hidden));
  const double squares = sum_of(hidden, [&](int64_t i) ALWAYS_INLINE { return (x[i] - mean) * (x[i] - mean); });
  return {mean, reciprocal_norm(squares, hidden, problem.eps)};
}

template <class T>
INLINE void run_rows(const Forward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden;
  Floats x(hidden), gate(hidden), weight(hidden), bias(hidden), factor(hidden), offset(hidden);
  read<T>(problem.weight, 0, 1.0f, weight);
  read<T>(problem.bias, 0, 0.0f, bias);
  for (int64_t row = begin; row < end; ++row) {
    if (enters_span(row, begin, problem.span)) {
      const int64_t span = row / problem.span;
      read<T>(problem.gate, span, 0, 1.0f, gate);
      read<T>(problem.scale, span, 0, 0.0f, factor);
      read<T>(problem.shift, span, 0, 0.0f, offset);
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) factor[i] += 1.0f;
      if (problem.stepwise) {
        round_all<T>(factor.data(), hidden);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) {
          offset[i] += bias[i] * factor[i];
          factor[i] *= weight[i];
        }
      }
    }
    if (problem.branch.data != nullptr) {
      write_sum<T>(problem, row, gate);
      if (problem.normed == nullptr) continue;
      decode_all<T>(row_at<T>(problem.sum, row, hidden), hidden, x.data());
    } else {
      read<T>(problem.x, row, x);
    }
    const Moments moments = moments_of(problem, x);
    const float mean = moments.mean, rstd = moments.rstd;
    if (problem.stepwise) {
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) x[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
      round_all<T>(x.data(), hidden);
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) x[i] *= factor[i];
      round_all<T>(x.data(), hidden);
    }
    const bool stepwise = problem.stepwise;
    write_row<T>(problem.normed, problem.type, row, hidden, [&](int64_t i) ALWAYS_INLINE {
      return (stepwise ? x[i] : (x[i] - mean) * rstd * factor[i]) + offset[i];
    });
  }
}

// The rows of a backward pass, one at a time.
template <class T>
class BackwardRow {
 public:
  INLINE explicit BackwardRow(const Backward& problem)
      : problem_(problem), hidden_(problem.hidden), own_modulations_(problem.span == 1) {
    for (Floats* floats : {&weight_, &bias_, &scale_, &gate_, &factor_, &x_, &grad_, &total_, &other_}) {
      floats->resize(hidden_);
    }
    read<T>(problem.weight, 0, 1.0f, weight_);
    read<T>(problem.bias, 0, 0.0f, bias_);
  }

  INLINE void load_span(int64_t span) {
    read<T>(problem_.scale, span, 0, 0.0f, scale_);
    read<T>(problem_.gate, span, 0, 1.0f, gate_);
#pragma omp simd
    for (int64_t i = 0; i < hidden_; ++i) factor_[i] = weight_[i] * (1.0f + scale_[i]);
  }

  // Writes the gradients of a row, and adds to the sums over rows.
  INLINE void run(int64_t row, float* partial) {
    if (problem_.x.data != nullptr) {
      differentiate_norm(row, partial);
    } else {
      read<T>(problem_.grad_sum, row, total_);
    }
    if (problem_.grad_branch != nullptr) write_grad_branch(row, partial);
  }

 private:
  INLINE void differentiate_norm(int64_t row, float* partial) {
    read<T>(problem_.x, row, x_);
    read<T>(problem_.grad, row, grad_);
    find_grad_x();  // x is then the normed row
    if (partial != nullptr) {
      float *slope_sums = partial + kSlope * hidden_, *product_sums = partial + kSlopeTimesNormed * hidden_;
#pragma omp simd
      for (int64_t i = 0; i < hidden_; ++i) {
        const float slope = own_modulations_ ? grad_[i] * (1.0f + scale_[i]) : grad_[i];
        slope_sums[i] += slope;
        product_sums[i] += slope * x_[i];
      }
    }
    if (own_modulations_ && problem_.grad_scale != nullptr) {
      write_row<T>(problem_.grad_scale, problem_.scale.type, row, hidden_,
                   [&](int64_t i) ALWAYS_INLINE { return grad_[i] * (x_[i] * weight_[i] + bias_[i]); });
    }
    if (problem_.grad_sum.data != nullptr) {
      read<T>(problem_.grad_sum, row, other_);
#pragma omp simd
      for (int64_t i = 0; i < hidden_; ++i) total_[i] += other_[i];
    }
    write_row<T>(problem_.grad_x, problem_.type, row, hidden_, [&](int64_t i) ALWAYS_INLINE { return total_[i]; });
  }

  INLINE void find_grad_x() {
    const Moments moments = moments_of(problem_, x_);
    const float mean = moments.mean, rstd = moments.rstd;
    // The slope, total, is rounded once for both uses: in a row of one element they must cancel exactly.
#pragma omp simd
    for (int64_t i = 0; i < hidden_; ++i) {
      total_[i] = grad_[i] * factor_[i];
      x_[i] = (x_[i] - mean) * rstd;
    }
    const auto hidden = static_cast<double>(hidden_);
    const double slopes = problem_.centered ? sum_of(hidden_, [&](int64_t i) ALWAYS_INLINE { return total_[i]; }) : 0.0;
    const double products = sum_of(hidden_, [&](int64_t i) ALWAYS_INLINE { return total_[i] * x_[i]; });
    const auto mean_slope = static_cast<float>(slopes / hidden), projection = static_cast<float>(products / hidden);
#pragma omp simd
    for (int64_t i = 0; i < hidden_; ++i) total_[i] = rstd * (total_[i] - mean_slope - x_[i] * projection);
  }

  INLINE void write_grad_branch(int64_t row, float* partial) {
    write_row<T>(problem_.grad_branch, problem_.type, row, hidden_,
                 [&](int64_t i) ALWAYS_INLINE { return total_[i] * gate_[i]; });
    if (problem_.grad_gate == nullptr) return;
    read<T>(problem_.branch, row, other_);
    if (own_modulations_) {
      write_row<T>(problem_.grad_gate, problem_.gate.type, row, hidden_,
                   [&](int64_t i) ALWAYS_INLINE { return total_[i] * other_[i]; });
    } else {
      float* sums = partial + problem_.sums.gate() * hidden_;
#pragma omp simd
      for (int64_t i = 0; i < hidden_; ++i) sums[i] += total_[i] * other_[i];
    }
  }

  const Backward& problem_;
  const int64_t hidden_;
  const bool own_modulations_;
  Floats weight_, bias_, scale_, gate_, factor_;  // factor: of the gradient of the normed row
  Floats x_, grad_, total_, other_;
};

template <class T>
INLINE void run_rows(const Backward& problem, int64_t begin, int64_t end) {
  const Sums& sums = problem.sums;
  const int64_t rows = problem.rows / sums.groups;
  BackwardRow<T> of_row(problem);
  for (int64_t part = begin; part < end; ++part) {  // counted over all groups
    const auto [first, last] = part_of(rows, sums.parts, part % sums.parts);
    const int64_t before = part / sums.parts * rows;
    float* partial = sums.partial == nullptr ? nullptr : sums.partial + part * sums.count * problem.hidden;
    if (partial != nullptr) std::fill_n(partial, sums.count * problem.hidden, 0.0f);
    for (int64_t row = before + first; row < before + last; ++row) {
      if (enters_span(row, before + first, problem.span)) of_row.load_span(row / problem.span);
      of_row.run(row, partial);
    }
  }
}

template <class T>
INLINE void run_columns(const Backward& problem, int64_t begin, int64_t end) {
  const int64_t hidden = problem.hidden, count = end - begin, width = problem.sums.count * hidden;
  const bool per_row = problem.span == 1;
  Floats weight(count), bias(count), scale(count), grad_scale(count), grad_weight(count), grad_bias(count);
  read<T>(problem.weight, begin, 1.0f, weight);
  read<T>(problem.bias, begin, 0.0f, bias);
  for (int64_t group = 0; group < problem.sums.groups; ++group) {
    const int64_t to = group * hidden + begin;
    float* sums = problem.sums.partial + group * problem.sums.parts * width;
    for (int k = 0; k < problem.sums.count; ++k) {
      add_parts(sums, problem.sums.parts, width, k * hidden + begin, k * hidden + end);
    }
    if (!per_row) {
      write_as<T>(problem.gate.type, sums + problem.sums.gate() * hidden + begin, problem.grad_gate, to, count);
    }
    if (problem.x.data == nullptr) continue;
    const float* slope = sums + kSlope * hidden + begin;
    const float* slope_times_normed = sums + kSlopeTimesNormed * hidden + begin;
    read<T>(per_row ? Modulation{} : problem.scale, group, begin, 0.0f, scale);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      grad_scale[i] = weight[i] * slope_times_normed[i] + bias[i] * slope[i];
      grad_weight[i] += (1.0f + scale[i]) * slope_times_normed[i];
      grad_bias[i] += (1.0f + scale[i]) * slope[i];
    }
    if (per_row) continue;
    write_as<T>(problem.scale.type, grad_scale.data(), problem.grad_scale, to, count);
    write_as<T>(problem.scale.type, slope, problem.grad_shift, to, count);
  }
  write_as<T>(problem.weight.type, grad_weight.data(), problem.grad_weight, begin, count);
  write_as<T>(problem.bias.type, grad_bias.data(), problem.grad_bias, begin, count);
}

}  // namespace

void run(const Forward& problem, int64_t begin, int64_t end) {
  run_on_cpu(problem.type, [&](auto type) ALWAYS_INLINE { run_rows<decltype(type)>(problem, begin, end); });
}
void run(const Backward& problem, int64_t begin, int64_t end) {
  run_on_cpu(problem.type, [&](auto type) ALWAYS_INLINE { run_rows<decltype(type)>(problem, begin, end); });
}
void reduce(const Backward& problem, int64_t begin, int64_t end) {
  run_on_cpu(problem.type, [&](auto type) ALWAYS_INLINE { run_columns<decltype(type)>(problem, begin, end); });
}

int partial_sums(const Backward& problem, int64_t* parts) {
  constexpr int64_t kRows = 16;  // of a part, at least, so that the sums are the smaller part of the work
  const int64_t groups = problem.sums.groups;
  *parts = std::max<int64_t>(1, std::min(64 / groups, problem.rows / groups / kRows));
  return 0;
}

}  // namespace adaln
