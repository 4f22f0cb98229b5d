// RMSNorm and rotary embedding in one pass, on the CPU.
//
// Reads:    q and k, or them and the gradients of the results; the weights, and the tables of cosines and sines.
// Writes:   the results, or the gradients and the partial sums of those of the weights.
// Must not: start threads, or keep state between calls.
//
// A row is converted to floats, which stay in the cache. The cosines and sines of a token are gathered once for all its
// heads, and the factors once for all tokens of a call. The loops over a row vectorize; they are compiled once per
// instruction set, and one is selected at run time.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "rope3d/problem.h"
#include "rope3d_cpu/rotate_pairs.h"

namespace rope3d {
namespace {

// The rows of one call, of either pass, and their buffers.
template <class T>
class Rows {
 public:
  using Storage = typename T::Storage;

  INLINE explicit Rows(const NormRotation& problem)
      : problem_(problem),
        rotation_(problem.rotation),
        angles_(rotation_),
        x_(std::max(problem.row_elements(0), problem.row_elements(1))),
        grad_(x_.size()),
        factors_{factors_of(0), factors_of(1)} {}

  // Calls `body` after setting the buffers to each row of the tokens [begin, end).
  template <class Body>
  INLINE void for_each_row(int64_t begin, int64_t end, Body&& body) {
    for (int64_t i = begin; i < end; ++i) {
      sequence_ = i / rotation_.tokens;
      token_ = i % rotation_.tokens;
      rotated_ = token_ >= rotation_.prefix;
      if (rotated_) gather_angles(rotation_, sequence_, token_, angles_);
      for (side_ = 0; side_ < kMaxSides; ++side_) {
        if (problem_.row_elements(side_) == 0) continue;
        for (row_ = 0; row_ < problem_.rows_per_token(side_); ++row_) body();
      }
    }
  }

  INLINE void forward_row() {
    const Side& side = rotation_.sides[side_];
    const int64_t elements = problem_.row_elements(side_);
    float *x = x_.data(), *factors = factors_[side_].data();
    load(side.from, side.from_strides, x);
    const double squares = sum_of(elements, [=](int64_t i) ALWAYS_INLINE { return x[i] * x[i]; });
    const float rstd = reciprocal_norm(squares, elements, problem_.eps);
    const bool rounded = problem_.rounded_before_weight && !std::is_same_v<T, Float32>;
#pragma omp simd
    for (int64_t i = 0; i < elements; ++i) x[i] *= rstd;
    if (rounded) round_all<T>(x, elements);
#pragma omp simd
    for (int64_t i = 0; i < elements; ++i) x[i] *= factors[i];
    round_all<T>(x, elements);
    rotate(x);
    store(x);
  }

  // Adds the terms of the weight's gradient to `sums`, if that is not null.
  INLINE void backward_row(double* __restrict__ sums) {
    const Side& side = rotation_.sides[side_];
    const SideNorm& norm = problem_.norms[side_];
    const int64_t elements = problem_.row_elements(side_);
    float *x = x_.data(), *grad = grad_.data(), *factors = factors_[side_].data();
    load(norm.x, norm.x_strides, x);
    load(side.from, side.from_strides, grad);
    rotate(grad);
    const double squares = sum_of(elements, [=](int64_t i) ALWAYS_INLINE { return x[i] * x[i]; });
    const float rstd = reciprocal_norm(squares, elements, problem_.eps);
    const double product = sum_of(elements, [=](int64_t i) ALWAYS_INLINE { return x[i] * (grad[i] * factors[i]); });
    const float projection = rstd * rstd * static_cast<float>(product / static_cast<double>(elements));
    if (sums != nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < elements; ++i) sums[i] += static_cast<double>(grad[i] * (x[i] * rstd));
    }
#pragma omp simd
    for (int64_t i = 0; i < elements; ++i) x[i] = rstd * (grad[i] * factors[i] - x[i] * projection);
    store(x);
  }

  INLINE int side() const { return side_; }

 private:
  INLINE Floats factors_of(int side) const {
    return load_factors<T>(problem_.norms[side].weight, problem_.offset, problem_.row_elements(side));
  }

  // The row's first head.
  INLINE int64_t offset(const Strides& strides) const {
    return token_offset(strides, sequence_, token_) + row_ * strides.head;
  }

  INLINE void load(const void* data, const Strides& strides, float* values) const {
    const auto* heads = static_cast<const Storage*>(data) + offset(strides);
    for (int64_t head = 0; head < problem_.heads_per_row(side_); ++head) {
      decode_all<T>(heads + head * strides.head, rotation_.width, values + head * rotation_.width);
    }
  }

  INLINE void rotate(float* values) const {
    if (!rotated_) return;
    for (int64_t head = 0; head < problem_.heads_per_row(side_); ++head) {
      rotate_pairs(angles_, rotation_.pairs, rotation_.half, values + head * rotation_.width);
    }
  }

  INLINE void store(const float* values) const {
    const Side& side = rotation_.sides[side_];
    auto* heads = static_cast<Storage*>(side.to) + offset(side.to_strides);
    for (int64_t head = 0; head < problem_.heads_per_row(side_); ++head) {
      encode_all<T>(values + head * rotation_.width, rotation_.width, heads + head * side.to_strides.head);
    }
  }

  const NormRotation& problem_;
  const Rotation& rotation_;
  Angles angles_;
  Floats x_, grad_, factors_[kMaxSides];
  int64_t sequence_ = 0, token_ = 0, row_ = 0;
  int side_ = 0;
  bool rotated_ = false;
};

template <class T>
INLINE void run_parts(const NormRotation& problem, int64_t begin, int64_t end) {
  const int64_t tokens = problem.rotation.batch * problem.rotation.tokens;
  Rows<T> rows(problem);
  std::vector<double> sums[kMaxSides];
  for (int64_t part = begin; part < end; ++part) {
    for (int side = 0; side < kMaxSides; ++side) {
      if (problem.norms[side].partial != nullptr) sums[side].assign(problem.row_elements(side), 0.0);
    }
    const auto [first, last] = part_of(tokens, problem.parts, part);
    rows.for_each_row(first, last, [&]() ALWAYS_INLINE {
      auto& of_side = sums[rows.side()];
      rows.backward_row(of_side.empty() ? nullptr : of_side.data());
    });
    for (int side = 0; side < kMaxSides; ++side) {
      std::copy(sums[side].begin(), sums[side].end(), problem.norms[side].partial + part * problem.row_elements(side));
    }
  }
}

}  // namespace

void run(const NormRotation& problem, int64_t begin, int64_t end) {
  run_on_cpu(problem.rotation.type, [&](auto type) ALWAYS_INLINE {
    Rows<decltype(type)> rows(problem);
    rows.for_each_row(begin, end, [&]() ALWAYS_INLINE { rows.forward_row(); });
  });
}

int norm_partial_sums(const NormRotation& problem, int64_t* parts) {
  *parts = std::min<int64_t>(problem.rotation.batch * problem.rotation.tokens, 64);
  return 0;
}

void norm_rotate_backward(const NormRotation& problem, int64_t begin, int64_t end) {
  run_on_cpu(problem.rotation.type, [&](auto type) ALWAYS_INLINE { run_parts<decltype(type)>(problem, begin, end); });
}

void reduce_norm_weight(const NormRotation& problem, int side, int64_t begin, int64_t end) {
  const SideNorm& norm = problem.norms[side];
  reduce_columns(norm.weight.type, norm.partial, problem.parts, problem.row_elements(side), begin, end,
                 norm.grad_weight);
}

}  // namespace rope3d
