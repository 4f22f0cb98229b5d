// RMSNorm, forward, on CUDA.
//
// Reads:    x, the residual and the weight, each once from memory: a row stays in registers between its sum and its
//           result. Rows too long for that are read twice.
// Writes:   `normed`, and `sum` when there is a residual.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Of a few rows, what a thread does before its first load, and the parameters that it waits for, are a good part of the
// time: hence no loop over rows, no division, and what every launch needs in one line of the cache.
#include <atomic>

#include "kit/launch.cuh"
#include "rmsnorm_cuda/device.cuh"
#include "rmsnorm_cuda/rmsnorm.h"

namespace rmsnorm {
namespace {

constexpr int kSharedBlock = 128;        // threads of a block with several rows
constexpr uint8_t kWholeBlock = 255;     // instead of a number of lanes
constexpr int kMostSharedVectors = 128;  // of a row; up to here several share a block
constexpr int kShiftedLoads = 4;         // vectors of a thread, of rows that start anywhere
// From so many on, the blocks of the next launch may come and wait as soon as the last ones of this have come. Those of
// several launches with fewer would wait at once, and crowd together on some processors.
constexpr unsigned kManyBlocks = 1024;
// So many come at once. The others find memory busy, and where x is in the cache, to ask for it twice takes time.
constexpr unsigned kFirstBlocks = 528;

// Of rows and results in one dimension, a weight like x, or none, and a result like x. What every launch needs fits in
// a line of the cache.
struct alignas(64) Plain {
  const void* x;
  void* normed;
  Weight weight;
  int64_t x_stride, normed_stride;
  float inverse_of_hidden, eps;
  int hidden;     // of rows that registers hold
  uint8_t shift;  // 2^shift lanes read a row, where a block has several
  bool rounded_before_weight;
  bool streams;  // as the function of this name says
  int64_t rows;
  void* sum;
  const void* residual;
  int64_t residual_stride, sum_stride;
};

struct Arguments : Plain {
  bool plain;     // they are
  bool strided;   // the rows of x or of the residual lie in more than one dimension
  bool wide;      // `normed` is float32 beside smaller elements
  bool in_place;  // results lie where x and the residual do
  int64_t long_hidden;
  Rows x_rows, residual_rows;
};

// Where the elements of a row start in each tensor.
template <bool kAdd>
struct Offsets {
  int64_t x, residual, normed, sum;
  __device__ __forceinline__ Offsets(const Plain& arguments, int64_t row) {
    x = row * arguments.x_stride;
    normed = row * arguments.normed_stride;
    if (kAdd) {
      residual = row * arguments.residual_stride;
      sum = row * arguments.sum_stride;
    }
  }
  __device__ __forceinline__ Offsets(const Arguments& arguments, int64_t row)
      : Offsets(static_cast<const Plain&>(arguments), row) {
    if (!arguments.strided) return;
    x = arguments.x_rows.offset(row);
    if (kAdd) residual = arguments.residual_rows.offset(row);
    if (kAdd && arguments.in_place) {
      normed = x;
      sum = residual;
    }
  }
};

template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> add(const Vector<T, kWidth>& a, const Vector<T, kWidth>& b) {
  float sums[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[i] = decode(a.elements[i]) + decode(b.elements[i]);
  return encode_all<T>(sums);
}

template <typename T, int kWidth>
__device__ __forceinline__ float sum_of_squares(const Vector<T, kWidth>& vector) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum += decode(vector.elements[i]) * decode(vector.elements[i]);
  return sum;
}

template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> norm(const Vector<T, kWidth>& vector, float rstd,
                                                  const float (&factors)[kWidth], bool rounded) {
  float values[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = decode(vector.elements[i]) * rstd;
  if (rounded) {
    const auto quotients = encode_all<T>(values);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = decode(quotients.elements[i]);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] *= factors[i];
  return encode_all<T>(values);
}

template <typename T, int kWidth>
__device__ __forceinline__ void put(const Plain& arguments, T* to, const Vector<T, kWidth>& vector) {
  if (arguments.streams) {
    store(to, vector);
  } else {
    store_streaming(to, vector);
  }
}

// As any arguments ask for.
template <typename T, int kWidth>
__device__ __forceinline__ void write_norm(const Arguments& arguments, int64_t offset, Vector<T, kWidth>& vector,
                                           float rstd, const float (&factors)[kWidth]) {
  const bool rounded = sizeof(T) < sizeof(float) && arguments.rounded_before_weight;
  if (sizeof(T) < sizeof(float) && arguments.wide) {
    float values[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = decode(vector.elements[i]) * rstd;
    const auto quotients = encode_all<T>(values);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = decode(quotients.elements[i]) * factors[i];
    store_floats(static_cast<float*>(arguments.normed) + offset, values);
  } else {
    put(arguments, static_cast<T*>(arguments.normed) + offset, norm(vector, rstd, factors, rounded));
  }
}

// Of a row that registers hold, in a block, or in part of one. Of a Plain one all loads are under way before the first
// is waited for, and nothing is decided for each vector: that is 2% of the time of large tensors, and a tenth of that
// of small ones.
template <typename Given, typename T, int kWidth, int kLoads, bool kAdd, bool kBlock>
__global__ void __launch_bounds__(!kBlock       ? kSharedBlock
                                  : kLoads == 2 ? kMostThreads
                                                : kLongBlock) forward_kernel(const __grid_constant__ Given arguments) {
  constexpr bool kPlain = std::is_same_v<Given, Plain>;
  constexpr int kWarps = (kLoads == 2 ? kMostThreads : kLongBlock) / kWarp;
  // Where a residual and a weight at once would take too many registers, the weight comes later.
  constexpr bool kLate = kAdd && kBlock && kLoads > 2;
  const int lanes = kBlock ? blockDim.x : 1 << arguments.shift;
  const int lane = kBlock ? threadIdx.x : threadIdx.x & (lanes - 1);
  const int64_t row =
      kBlock ? blockIdx.x : (static_cast<int64_t>(blockIdx.x) * kSharedBlock + threadIdx.x) >> arguments.shift;
  // A thread without a row still takes part in the sums of its warp.
  const int columns = kBlock || row < arguments.rows ? arguments.hidden : 0;
  const int weight_columns = arguments.weight.data != nullptr ? columns : 0;
  const Offsets<kAdd> offsets(arguments, row);
  const auto first_factors = [&](int column, Factors<T, kWidth>& factors) {
    if constexpr (kPlain) {
      factors.start_plain(arguments.weight, column, column < weight_columns);
    } else {
      if (column < columns) factors.start(arguments.weight, column);
    }
  };
  if (gridDim.x >= kManyBlocks) trigger_next_grid();
  const bool ahead = arguments.streams || blockIdx.x < kFirstBlocks;
  if (ahead && (kBlock ? threadIdx.x == 0 : lane == 0 && columns > 0)) {
    prefetch_to_l2(static_cast<const T*>(arguments.x) + offsets.x, columns * sizeof(T));
    if (kAdd) prefetch_to_l2(static_cast<const T*>(arguments.residual) + offsets.residual, columns * sizeof(T));
  }
  grid_wait();
  if (gridDim.x < kManyBlocks) trigger_next_grid();
  Vector<T, kWidth> x[kLoads], residual[kAdd ? kLoads : 1];
  Factors<T, kWidth> factors[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int column = (lane + i * lanes) * kWidth;
    x[i] = {};
    if (column < columns) x[i] = load<T, kWidth>(static_cast<const T*>(arguments.x) + offsets.x + column);
  }
  if constexpr (kAdd) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = (lane + i * lanes) * kWidth;
      residual[i] = {};
      if (column < columns) {
        residual[i] = load<T, kWidth>(static_cast<const T*>(arguments.residual) + offsets.residual + column);
      }
    }
  }
  if constexpr (!kLate) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) first_factors((lane + i * lanes) * kWidth, factors[i]);
  }
  if constexpr (kAdd) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = (lane + i * lanes) * kWidth;
      x[i] = add(x[i], residual[i]);
      if (column < columns) put(arguments, static_cast<T*>(arguments.sum) + offsets.sum + column, x[i]);
    }
  }
  if constexpr (kLate) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) first_factors((lane + i * lanes) * kWidth, factors[i]);
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) squares += sum_of_squares(x[i]);
  if constexpr (kBlock) {
    __shared__ float4 scratch[kWarps / 4];
    squares = sum_over_block<kWarps>(squares, scratch);
  } else {
    float sums[1] = {squares};
    sum_over_lanes(sums, lanes);
    squares = sums[0];
  }
  const float rstd = reciprocal_norm(squares, arguments.inverse_of_hidden, arguments.eps);
  const bool rounded = sizeof(T) < sizeof(float) && arguments.rounded_before_weight;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int column = (lane + i * lanes) * kWidth;
    if (column < columns) {
      forget(x[i]);
      factors[i].forget();
      float values[kWidth];
      if constexpr (kPlain) {
        factors[i].finish_plain(arguments.weight, values);
        put(arguments, static_cast<T*>(arguments.normed) + offsets.normed + column, norm(x[i], rstd, values, rounded));
      } else {
        factors[i].finish(arguments.weight, column, values);
        write_norm(arguments, offsets.normed + column, x[i], rstd, values);
      }
    }
  }
}

// Part of a row in a thread, wherever it starts.
template <typename T, int kWidth, bool kAdd>
struct Piece {
  int column;  // negative: nothing
  Vector<T, kWidth> x;

  __device__ __forceinline__ void read(const Plain& arguments, const Offsets<kAdd>& offsets) {
    x = {};
    if (column >= 0) x = load<T, kWidth>(static_cast<const T*>(arguments.x) + offsets.x + column);
  }

  __device__ __forceinline__ void add_residual(const Plain& arguments, const Offsets<kAdd>& offsets) {
    if (column < 0) return;
    x = add(x, load<T, kWidth>(static_cast<const T*>(arguments.residual) + offsets.residual + column));
    put(arguments, static_cast<T*>(arguments.sum) + offsets.sum + column, x);
  }

  __device__ __forceinline__ void write(const Plain& arguments, const Offsets<kAdd>& offsets, float rstd) {
    if (column < 0) return;
    forget(x);
    float factors[kWidth];
    const T* const weight = static_cast<const T*>(arguments.weight.data);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      factors[i] = (weight == nullptr ? 1.0f : decode(weight[column + i])) + arguments.weight.offset;
    }
    const bool rounded = sizeof(T) < sizeof(float) && arguments.rounded_before_weight;
    put(arguments, static_cast<T*>(arguments.normed) + offsets.normed + column, norm(x, rstd, factors, rounded));
  }
};

// For rows that do not start at multiples of the vector, but all tensors alike: vectors, but for a few elements before
// the first and behind the last.
template <typename T, int kWidth, int kLoads, bool kAdd>
__global__ void __launch_bounds__(kMostThreads) forward_shifted_kernel(const __grid_constant__ Plain arguments) {
  __shared__ float4 scratch[kMostWarps / 4];
  const int hidden = arguments.hidden, thread = threadIdx.x;
  const Offsets<kAdd> offsets(arguments, blockIdx.x);
  const auto address = reinterpret_cast<uintptr_t>(static_cast<const T*>(arguments.x) + offsets.x) / sizeof(T);
  const int before = static_cast<int>(-address % kWidth);
  const int vectors = (hidden - before) / kWidth, behind = before + vectors * kWidth;
  if (gridDim.x >= kManyBlocks) trigger_next_grid();
  if (thread == 0 && (arguments.streams || blockIdx.x < kFirstBlocks)) {
    prefetch_to_l2(static_cast<const T*>(arguments.x) + offsets.x + before, vectors * kVectorBytes);
    if (kAdd)
      prefetch_to_l2(static_cast<const T*>(arguments.residual) + offsets.residual + before, vectors * kVectorBytes);
  }
  grid_wait();
  if (gridDim.x < kManyBlocks) trigger_next_grid();
  Piece<T, kWidth, kAdd> pieces[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int vector = thread + i * static_cast<int>(blockDim.x);
    pieces[i].column = vector < vectors ? before + vector * kWidth : -1;
    pieces[i].read(arguments, offsets);
  }
  // The first threads take an element before the first vector each, the next ones an element behind the last.
  Piece<T, 1, kAdd> element;
  element.column = thread < before ? thread : -1;
  if (thread >= kWidth && behind + thread - kWidth < hidden) element.column = behind + thread - kWidth;
  element.read(arguments, offsets);
  if (kAdd) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) pieces[i].add_residual(arguments, offsets);
    element.add_residual(arguments, offsets);
  }
  float squares = sum_of_squares(element.x);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) squares += sum_of_squares(pieces[i].x);
  squares = sum_over_block<kMostWarps>(squares, scratch);
  const float rstd = reciprocal_norm(squares, arguments.inverse_of_hidden, arguments.eps);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) pieces[i].write(arguments, offsets, rstd);
  element.write(arguments, offsets, rstd);
}

// For rows that registers do not hold, and for those of single elements: a row is read twice, the second time from a
// cache. Lanes share a row, or a whole block does.
template <typename T, int kWidth, bool kAdd>
__global__ void __launch_bounds__(kLongBlock) forward_twice_kernel(const __grid_constant__ Arguments arguments) {
  __shared__ float4 scratch[kLongBlock / kWarp / 4];
  const bool block = arguments.shift == kWholeBlock;
  const int lanes = block ? blockDim.x : 1 << arguments.shift;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = block ? blockIdx.x : thread >> arguments.shift;
  const int64_t hidden = row < arguments.rows ? arguments.long_hidden : 0, step = static_cast<int64_t>(lanes) * kWidth;
  const int64_t first_column = static_cast<int64_t>(block ? threadIdx.x : threadIdx.x & (lanes - 1)) * kWidth;
  const Offsets<kAdd> offsets(arguments, row);
  const T* x = static_cast<const T*>(arguments.x) + offsets.x;
  grid_wait();
  trigger_next_grid();
  float squares = 0.0f;
  if (kAdd) {
    const T* residual = static_cast<const T*>(arguments.residual) + offsets.residual;
    T* sum = static_cast<T*>(arguments.sum) + offsets.sum;
#pragma unroll 2
    for (int64_t column = first_column; column < hidden; column += step) {
      const auto vector = add(load<T, kWidth>(x + column), load<T, kWidth>(residual + column));
      squares += sum_of_squares(vector);
      store(sum + column, vector);
    }
    x = sum;  // each thread reads again what it wrote itself
  } else {
#pragma unroll 4
    for (int64_t column = first_column; column < hidden; column += step) {
      squares += sum_of_squares(load<T, kWidth>(x + column));
    }
  }
  if (block) {
    squares = sum_over_block<kLongBlock / kWarp>(squares, scratch);
  } else {
    float sums[1] = {squares};
    sum_over_lanes(sums, lanes);
    squares = sums[0];
  }
  const float rstd = reciprocal_norm(squares, arguments.inverse_of_hidden, arguments.eps);
#pragma unroll 2
  for (int64_t column = first_column; column < hidden; column += step) {
    auto vector = load<T, kWidth>(x + column);
    Factors<T, kWidth> factors;
    factors.start(arguments.weight, column);
    float values[kWidth];
    factors.finish(arguments.weight, column, values);
    write_norm(arguments, offsets.normed + column, vector, rstd, values);
  }
}

// Whether a call reads and writes so much more than the last cache holds that nothing of it needs to stay there. Of
// less, what is read is likely to be there, or to be read again soon, and what is written makes room for it.
bool streams(int64_t bytes) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // bytes of the cache; 0: not yet known
  int device;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  int cache = known[device].load(std::memory_order_relaxed);
  if (cache == 0) {
    if (cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device) != cudaSuccess) return false;
    known[device].store(cache, std::memory_order_relaxed);
  }
  return bytes > 2 * static_cast<int64_t>(cache);
}

int power_of_two_from(int64_t count) {
  int shift = 0;
  while (int64_t{1} << shift < count) ++shift;
  return shift;
}

unsigned threads_for(int64_t vectors, int loads) {
  return static_cast<unsigned>((vectors + loads * kWarp - 1) / (loads * kWarp) * kWarp);
}

template <typename T, int kWidth, int kLoads, bool kAdd>
void launch_block(const Plain& arguments, int64_t vectors, cudaStream_t stream) {
  launch_with_pdl(forward_kernel<Plain, T, kWidth, kLoads, kAdd, true>, static_cast<unsigned>(arguments.rows),
                  threads_for(vectors, kLoads), 0, stream, arguments);
}

template <typename T, int kWidth, int kLoads, bool kAdd>
void launch_shared(Arguments& arguments, int64_t lanes, cudaStream_t stream) {
  arguments.shift = static_cast<uint8_t>(power_of_two_from(lanes));
  const int64_t rows_of_block = kSharedBlock >> arguments.shift;
  const auto blocks = static_cast<unsigned>((arguments.rows + rows_of_block - 1) / rows_of_block);
  if (arguments.plain) {
    launch_with_pdl(forward_kernel<Plain, T, kWidth, kLoads, kAdd, false>, blocks, kSharedBlock, 0, stream,
                    static_cast<const Plain&>(arguments));
  } else {
    launch_with_pdl(forward_kernel<Arguments, T, kWidth, kLoads, kAdd, false>, blocks, kSharedBlock, 0, stream,
                    arguments);
  }
}

template <typename T, int kWidth, bool kAdd>
void launch_twice(Arguments& arguments, int64_t vectors, cudaStream_t stream) {
  unsigned blocks = static_cast<unsigned>(arguments.rows);
  unsigned threads = std::min<unsigned>(kLongBlock, threads_for(std::min<int64_t>(vectors, 4 * kLongBlock), 4));
  arguments.shift = kWholeBlock;
  if (vectors <= kWarp * 8) {
    arguments.shift = static_cast<uint8_t>(power_of_two_from(std::min<int64_t>(vectors, kWarp)));
    const int64_t rows_of_block = kSharedBlock >> arguments.shift;
    blocks = static_cast<unsigned>((arguments.rows + rows_of_block - 1) / rows_of_block);
    threads = kSharedBlock;
  }
  launch_with_pdl(forward_twice_kernel<T, kWidth, kAdd>, blocks, threads, 0, stream, arguments);
}

// As many threads as share a row well: too many rows at a time on a processor, and memory finds their addresses too far
// apart; too few, and it is not kept busy.
template <typename T, int kWidth, bool kAdd>
void launch_vectors(Arguments& arguments, int64_t vectors, cudaStream_t stream) {
  if (vectors <= kMostSharedVectors) {
    launch_shared<T, kWidth, 4, kAdd>(arguments, std::max((vectors + 3) / 4, std::min<int64_t>(vectors, 4)), stream);
  } else if (!arguments.plain || vectors > kLongBlock * 4) {
    launch_twice<T, kWidth, kAdd>(arguments, vectors, stream);
  } else if (vectors <= kMostThreads * 2) {
    launch_block<T, kWidth, 2, kAdd>(arguments, vectors, stream);
  } else {
    launch_block<T, kWidth, 4, kAdd>(arguments, vectors, stream);
  }
}

template <typename T, bool kAdd>
void launch(Arguments& arguments, const Forward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  arguments.streams = streams(problem.rows * problem.hidden * static_cast<int64_t>(sizeof(T)) * (kAdd ? 4 : 2));
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.x, sizeof(T)) &&
                       aligned(problem.residual, sizeof(T)) && aligned(problem.weight.data) &&
                       aligned(problem.normed) && aligned(problem.sum);
  if (vectors) return launch_vectors<T, kWidth, kAdd>(arguments, problem.hidden / kWidth, stream);
  // Where the rows of x start, seen from a multiple of the vector, and how far they are from one another.
  const auto alike = [&](const void* data, int64_t stride) {
    return (reinterpret_cast<uintptr_t>(data) - reinterpret_cast<uintptr_t>(arguments.x)) % kVectorBytes == 0 &&
           (stride - arguments.x_stride) % kWidth == 0;
  };
  const bool shifted =
      arguments.plain && alike(arguments.normed, arguments.in_place ? arguments.x_stride : problem.hidden) &&
      (!kAdd || (alike(arguments.residual, arguments.residual_stride) &&
                 alike(arguments.sum, arguments.in_place ? arguments.residual_stride : problem.hidden)));
  const int64_t whole_vectors = problem.hidden / kWidth;
  if (shifted && whole_vectors > kWarp && whole_vectors <= kMostThreads * kShiftedLoads) {
    // Of short rows a thread takes less: a block of a warp or two keeps too little under way.
    const int loads = whole_vectors <= 8 * kWarp ? 2 : kShiftedLoads;
    launch_with_pdl(forward_shifted_kernel<T, kWidth, kShiftedLoads, kAdd>, static_cast<unsigned>(arguments.rows),
                    std::max(2u * kWarp, threads_for(whole_vectors, loads)), 0, stream,
                    static_cast<const Plain&>(arguments));
  } else {
    launch_twice<T, 1, kAdd>(arguments, problem.hidden, stream);
  }
}

Arguments arguments_of(const Forward& problem) {
  Arguments arguments{};
  arguments.in_place = problem.normed == nullptr;
  arguments.x = problem.x.data;
  arguments.normed = arguments.in_place ? const_cast<void*>(problem.x.data) : problem.normed;
  arguments.weight = problem.weight;
  arguments.rows = problem.rows;
  arguments.x_stride = problem.x.strides[0];
  arguments.hidden = static_cast<int>(problem.hidden);
  arguments.inverse_of_hidden = static_cast<float>(1.0 / static_cast<double>(problem.hidden));
  arguments.eps = problem.eps;
  arguments.wide = problem.normed_type != problem.type;
  arguments.rounded_before_weight = problem.rounded_before_weight && problem.weight.data != nullptr;
  arguments.strided = problem.x.dims > 1 || problem.residual.dims > 1;
  arguments.long_hidden = problem.hidden;
  arguments.normed_stride = arguments.in_place ? arguments.x_stride : problem.hidden;
  arguments.sum_stride = arguments.in_place ? problem.residual.strides[0] : problem.hidden;
  arguments.plain =
      !arguments.strided && !arguments.wide && (problem.weight.data == nullptr || problem.weight.type == problem.type);
  if (arguments.strided) {
    arguments.x_rows = problem.x;
    arguments.residual_rows = problem.residual;
  }
  if (problem.residual.data != nullptr) {
    arguments.residual = problem.residual.data;
    arguments.residual_stride = problem.residual.strides[0];
    arguments.sum = arguments.in_place ? const_cast<void*>(problem.residual.data) : problem.sum;
  }
  return arguments;
}

}  // namespace

int forward(const Forward& problem, void* stream) {
  Arguments arguments = arguments_of(problem);
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    return problem.residual.data == nullptr ? launch<T, false>(arguments, problem, cuda_stream)
                                            : launch<T, true>(arguments, problem, cuda_stream);
  });
}

}  // namespace rmsnorm
