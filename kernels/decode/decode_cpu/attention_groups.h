// Attention of groups of query heads, for one instruction set. attention.cpp includes this once per instruction set, in
// a namespace of its own.

template <class T, int kQueries>
INLINE void score(State<kQueries>& state, const Block<T>& block, int64_t elements) {
  for (int token = 0; token < block.count; ++token) {
    Vector products[kQueries];
#pragma GCC unroll 8
    for (int query = 0; query < kQueries; ++query) products[query] = Vector::zeros();
    for (int64_t i = 0; i < elements; i += kLanes) {
      const auto key = Vector::decode<T>(block.keys[token] + i);
#pragma GCC unroll 8
      for (int query = 0; query < kQueries; ++query) {
        products[query].add_product(Vector::load(state.queries[query] + i), key);
      }
    }
#pragma GCC unroll 8
    for (int query = 0; query < kQueries; ++query) state.weights[query][token] = products[query].sum();
  }
}

// Replaces the scores of a block by weights, relative to the largest score so far.
template <int kQueries>
INLINE void weigh(State<kQueries>& state, int count, int64_t elements) {
  for (int query = 0; query < kQueries; ++query) {
    float* weights = state.weights[query];
    float maximum = state.maxima[query], total = 0.0f;
    for (int token = 0; token < count; ++token) maximum = std::max(maximum, weights[token]);
    if (maximum > state.maxima[query]) {
      const float factor = exp2_of(state.maxima[query] - maximum);
      state.maxima[query] = maximum;
      state.totals[query] *= factor;
      for (int64_t i = 0; i < elements; ++i) state.sums[query][i] *= factor;
    }
#pragma omp simd
    for (int token = 0; token < count; ++token) weights[token] = exp2_of(weights[token] - maximum);
    for (int token = 0; token < count; ++token) total += weights[token];
    state.totals[query] += total;
  }
}

// Adds the weighted values of kVectors vectors from element `first` on.
template <class T, int kVectors, int kQueries>
INLINE void add_columns(State<kQueries>& state, const Block<T>& block, int64_t first) {
  Vector sums[kQueries][kVectors];
#pragma GCC unroll 8
  for (int query = 0; query < kQueries; ++query) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) sums[query][i] = Vector::load(state.sums[query] + first + i * kLanes);
  }
  for (int token = 0; token < block.count; ++token) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const auto value = Vector::decode<T>(block.values[token] + first + i * kLanes);
#pragma GCC unroll 8
      for (int query = 0; query < kQueries; ++query) sums[query][i].add_product(state.weights[query][token], value);
    }
  }
#pragma GCC unroll 8
  for (int query = 0; query < kQueries; ++query) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) sums[query][i].store(state.sums[query] + first + i * kLanes);
  }
}

template <class T, int kQueries>
INLINE void add_values(State<kQueries>& state, const Block<T>& block, int64_t elements) {
  constexpr int kVectors = kMostQueries / kQueries;  // as many sums at a time as there are in `score`
  int64_t i = 0;
  for (; i + kLanes * kVectors <= elements; i += kLanes * kVectors) add_columns<T, kVectors>(state, block, i);
  for (; i < elements; i += kLanes) add_columns<T, 1>(state, block, i);
}

template <class T>
INLINE void write_token(const Attention& problem, int64_t batch, int64_t head) {
  const size_t bytes = problem.elements * sizeof(typename T::Storage);
  std::memcpy(row_of<T>(problem.key, batch, head, *problem.position), row_of<T>(problem.new_key, batch, head), bytes);
  std::memcpy(row_of<T>(problem.value, batch, head, *problem.position), row_of<T>(problem.new_value, batch, head),
              bytes);
}

// Computes the query heads `first` to `first + count`; further ones of the kQueries are zeros.
template <class T, int kQueries>
INLINE void run_queries(const Attention& problem, int64_t batch, int64_t key_head, int64_t first, int64_t count) {
  const int64_t elements = problem.elements;
  State<kQueries> state;
  const float scale = problem.scale * 1.44269504f;  // log2(e)
#pragma GCC unroll 8
  for (int query = 0; query < kQueries; ++query) {
    state.maxima[query] = -std::numeric_limits<float>::infinity();
    if (query < count) {
      decode_all<T>(row_of<T>(problem.query, batch, first + query), elements, state.queries[query]);
      for (int64_t i = 0; i < elements; ++i) state.queries[query][i] *= scale;
    } else {
      std::fill_n(state.queries[query], elements, 0.0f);
    }
  }
  Block<T> block;
  for (int64_t token = 0; token < problem.tokens; token += kTokens) {
    collect(problem, batch, key_head, token, block);
    if (block.count == 0) continue;
    score<T>(state, block, elements);
    weigh(state, block.count, elements);
    add_values<T>(state, block, elements);
  }
  for (int64_t query = 0; query < count; ++query) {
    // Without tokens the sums are zeros.
    const float factor = 1.0f / (state.totals[query] == 0.0f ? 1.0f : state.totals[query]);
    for (int64_t i = 0; i < elements; ++i) state.sums[query][i] *= factor;
    encode_all<T>(
        state.sums[query], elements,
        static_cast<typename T::Storage*>(problem.out) + (batch * problem.query_heads + first + query) * elements);
  }
}

template <class T>
void run_groups(const Attention& problem, int64_t begin, int64_t end) {
  const int64_t queries = problem.query_heads / problem.key_heads, parts = parts_of(problem);
  for (int64_t group = begin; group < end; ++group) {
    const int64_t part = group % parts, head = group / parts % problem.key_heads;
    const int64_t batch = group / parts / problem.key_heads;
    if (part == 0 && problem.position != nullptr) write_token<T>(problem, batch, head);
    const int64_t first = head * queries + part * kMostQueries;
    const int64_t count = std::min<int64_t>(kMostQueries, queries - part * kMostQueries);
    if (count == 1) {
      run_queries<T, 1>(problem, batch, head, first, count);
    } else if (count == 2) {
      run_queries<T, 2>(problem, batch, head, first, count);
    } else if (count <= 4) {
      run_queries<T, 4>(problem, batch, head, first, count);
    } else {
      run_queries<T, 8>(problem, batch, head, first, count);
    }
  }
}
