// Linear layers of a number of rows, for one instruction set. linear.cpp includes this once per instruction set, in a
// namespace of its own.

// Sets `sums` from column `column` on to the products of kRows rows of x and kWeights rows of weights. kParts sums of
// each product are added up apart from each other, because a processor adds several at a time.
template <class T, int kRows, int kWeights, int kParts>
void multiply_tile(const Linear& problem, const float* x, const typename T::Storage* weights, int64_t stride,
                   Sums& sums, int64_t column) {
  Vector totals[kRows][kWeights][kParts];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int weight = 0; weight < kWeights; ++weight) {
#pragma GCC unroll 8
      for (int part = 0; part < kParts; ++part) totals[row][weight][part] = Vector::zeros();
    }
  }
  const int64_t inputs = problem.inputs;
  int64_t i = 0;
  for (; i + kLanes * kParts <= inputs; i += kLanes * kParts) {
#pragma GCC unroll 8
    for (int part = 0; part < kParts; ++part) {
      const int64_t at = i + part * kLanes;
      Vector multiplicands[kWeights];
#pragma GCC unroll 8
      for (int weight = 0; weight < kWeights; ++weight) {
        multiplicands[weight] = Vector::decode<T>(weights + weight * stride + at);
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const auto values = Vector::load(x + row * inputs + at);
#pragma GCC unroll 8
        for (int weight = 0; weight < kWeights; ++weight) {
          totals[row][weight][part].add_product(values, multiplicands[weight]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int weight = 0; weight < kWeights; ++weight) {
      Vector sum = totals[row][weight][0];
#pragma GCC unroll 8
      for (int part = 1; part < kParts; ++part) sum.lanes += totals[row][weight][part].lanes;
      float total = sum.sum();
      for (int64_t j = i; j < inputs; ++j) total += x[row * inputs + j] * T::decode(weights[weight * stride + j]);
      sums[row][column + weight] = total;
    }
  }
}

// Sets `sums` to the products of all rows of x and `count` rows of a layer's weights.
template <class T, int kRows>
void multiply(const Linear& problem, const float* x, const Weight& layer, int64_t first, int64_t count, Sums& sums) {
  // Sums, multiplicands and a vector of x fit in the 16 registers of AVX2.
  constexpr int kWeights = kRows <= 2 ? 4 : kRows <= 4 ? 2 : 1, kParts = kRows == 1 ? 2 : 1;
  const auto* weights = static_cast<const typename T::Storage*>(layer.data) + first * layer.stride;
  int64_t column = 0;
  for (; column + kWeights <= count; column += kWeights) {
    multiply_tile<T, kRows, kWeights, kParts>(problem, x, weights + column * layer.stride, layer.stride, sums, column);
  }
  for (; column < count; ++column) {
    multiply_tile<T, kRows, 1, kParts>(problem, x, weights + column * layer.stride, layer.stride, sums, column);
  }
}

template <class T>
INLINE void add_bias(Sums& sums, const Linear& problem, const Weight& layer, int64_t first, int64_t count) {
  if (layer.bias == nullptr) return;
  const auto* bias = static_cast<const typename T::Storage*>(layer.bias) + first;
  for (int64_t row = 0; row < problem.rows; ++row) {
    for (int64_t i = 0; i < count; ++i) sums[row][i] += T::decode(bias[i]);
  }
}

// Computes `count` columns of `out` from `column` on, which are those of the rows `first` and following of `layer`.
template <class T, int kRows>
void run_columns(const Linear& problem, const float* x, const Weight& layer, int64_t first, int64_t column,
                 int64_t count) {
  Sums sums;
  multiply<T, kRows>(problem, x, layer, first, count, sums);
  add_bias<T>(sums, problem, layer, first, count);
  if (problem.activation != Activation::none) {
    Sums projected;
    multiply<T, kRows>(problem, x, problem.weights[1], first, count, projected);
    add_bias<T>(projected, problem, problem.weights[1], first, count);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t i = 0; i < count; ++i) {
        sums[row][i] = activated(sums[row][i], problem.activation) * projected[row][i];
      }
    }
  }
  using Storage = typename T::Storage;
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t at = row * problem.outputs + column;
    if (problem.residual != nullptr) {
      const auto* residual = static_cast<const Storage*>(problem.residual) + at;
      for (int64_t i = 0; i < count; ++i) sums[row][i] += T::decode(residual[i]);
    }
    encode_all<T>(sums[row], count, static_cast<Storage*>(problem.out) + at);
  }
}

template <class T, int kRows>
void run_rows(const Linear& problem, const float* x, int64_t begin, int64_t end) {
  const int layers = problem.activation == Activation::none ? problem.count : 1;
  int64_t before = 0;  // columns of the layers before
  for (int i = 0; i < layers; ++i) {
    const Weight& layer = problem.weights[i];
    const int64_t stop = std::min(end, before + layer.rows);
    for (int64_t column = std::max(begin, before); column < stop; column += kColumns) {
      run_columns<T, kRows>(problem, x, layer, column - before, column, std::min(kColumns, stop - column));
    }
    before += layer.rows;
  }
}

template <class T>
void run(const Linear& problem, const float* x, int64_t begin, int64_t end) {
  switch (problem.rows) {
    case 1:
      return run_rows<T, 1>(problem, x, begin, end);
    case 2:
      return run_rows<T, 2>(problem, x, begin, end);
    case 3:
      return run_rows<T, 3>(problem, x, begin, end);
    case 4:
      return run_rows<T, 4>(problem, x, begin, end);
    case 5:
      return run_rows<T, 5>(problem, x, begin, end);
    case 6:
      return run_rows<T, 6>(problem, x, begin, end);
    case 7:
      return run_rows<T, 7>(problem, x, begin, end);
    case 8:
      return run_rows<T, 8>(problem, x, begin, end);
  }
}
