// GEGLU and SwiGLU on CUDA: forward pass.
//
// Beyond naive/geglu.cu: vectorized loads, several in flight per thread, PDL, and rows at any strides and alignment.
//
// Reads:    gate and up, each element once.
// Writes:   `out`. Per result three elements move: two loads and one store.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// The kernels are memory-bound: at 3 TB/s and 16 bits an H100 can execute about 59 instructions per result, and they
// need about 20.
#include "geglu_cuda/device.cuh"
#include "geglu_cuda/geglu.h"

namespace geglu {
namespace {

template <typename T, class Config>
struct Tensors {
  typename Config::InputRows gate, up;
  T* out;
};

template <typename T, class Config, class G>
__global__ void __launch_bounds__(Config::kThreads)
    forward_kernel(const __grid_constant__ Tensors<T, Config> tensors, const __grid_constant__ Chunk chunk) {
  constexpr int kThreads = Config::kThreads, kLoads = Config::kLoads, kWidth = Config::kWidth;
  const uint32_t first = blockIdx.x * (kThreads * kLoads) + threadIdx.x;
  trigger_next_grid();
  grid_wait();
  Vector<T, kWidth> gate[kLoads], up[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t vector = chunk.clamped(first + i * kThreads), row = chunk.row(vector);
    gate[i] = load<T, kWidth>(tensors.gate.at(vector, row));
    up[i] = load<T, kWidth>(tensors.up.at(vector, row));
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    float out[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out[j] = decode(up[i], j) * G::value(decode(gate[i], j));
    const uint32_t vector = first + i * kThreads;
    if (vector < chunk.count) store(tensors.out + static_cast<int64_t>(vector) * kWidth, encode_all<T>(out));
  }
}

// One vector of elements at any alignment, assembled from the one or two aligned words that hold it.
template <typename T, int kWidth>
class UnalignedVector {
 public:
  // Loads the words. Only elements `first` to `last` are in the tensor: no word without one of them is loaded.
  __device__ __forceinline__ void load(const T* from, int first, int last) {
    static_assert(sizeof(T) * kWidth == sizeof(uint4));
    const auto aligned_word = [](const T* at) {
      return *reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(at) / sizeof(uint4) * sizeof(uint4));
    };
    byte_offset_ = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % sizeof(uint4));
    low_ = aligned_word(from + first);
    high_ = aligned_word(from + last);
  }

  __device__ __forceinline__ Vector<T, kWidth> vector() const {
    const uint4 word = shift_words(low_, high_, byte_offset_);
    Vector<T, kWidth> vector;
    memcpy(&vector, &word, sizeof(vector));
    return vector;
  }

 private:
  uint4 low_, high_;
  uint32_t byte_offset_;
};

// For rows that are not 16-byte aligned but at least one vector wide. The vectors of the contiguous output are numbered
// over all rows; one that spans two rows takes elements from both.
template <typename T, class Config, class G>
__global__ void __launch_bounds__(Config::kThreads)
    forward_unaligned_kernel(const __grid_constant__ Tensors<T, Config> tensors, const __grid_constant__ Chunk chunk) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const uint32_t first = (blockIdx.x * Config::kThreads + threadIdx.x) * kWidth, row = chunk.row(first);
  const int in_row = static_cast<int>(min((row + 1) * chunk.columns - first, static_cast<uint32_t>(kWidth)));
  const int count = static_cast<int>(min(chunk.count - first, static_cast<uint32_t>(kWidth)));
  trigger_next_grid();
  grid_wait();
  if (first >= chunk.count) return;
  UnalignedVector<T, kWidth> gate, up, next_gate, next_up;
  gate.load(tensors.gate.at(first, row), 0, in_row - 1);
  up.load(tensors.up.at(first, row), 0, in_row - 1);
  if (in_row < count) {
    next_gate.load(tensors.gate.at(first, row + 1), in_row, count - 1);
    next_up.load(tensors.up.at(first, row + 1), in_row, count - 1);
  }
  auto gates = gate.vector(), ups = up.vector();
  if (in_row < count) {
    const auto next_gates = next_gate.vector(), next_ups = next_up.vector();
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i >= in_row) {
        gates.elements[i] = next_gates.elements[i];
        ups.elements[i] = next_ups.elements[i];
      }
    }
  }
  float values[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = decode(ups, i) * G::value(decode(gates, i));
  const auto out = encode_all<T>(values);
  if (count == kWidth) {
    store(tensors.out + first, out);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i < count) tensors.out[first + i] = out.elements[i];
    }
  }
}

template <typename T, class Config, class G>
void launch_unaligned(const Forward& problem, cudaStream_t stream) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(T), kTile = Config::kThreads * kWidth;
  constexpr int64_t kMaxElements = int64_t{1} << 30;
  static_assert(Config::kConfig.min_hidden >= kWidth && Config::kConfig.max_hidden <= kMaxElements / kWidth,
                "a vector spans at most two rows, and a chunk holds at least a vector's width of whole rows");
  static_assert(Config::kLoads == 1, "the unaligned kernel loads one vector per thread");
  // A multiple of the vector's width, so that the output of each chunk starts aligned.
  const int64_t step = kMaxElements / problem.hidden / kWidth * kWidth;
  for (int64_t row = 0; row < problem.rows; row += step) {
    const auto hidden = static_cast<uint32_t>(problem.hidden);
    const auto count = static_cast<uint32_t>(std::min(step, problem.rows - row) * problem.hidden);
    const Chunk chunk{row, 0, count, hidden, FastDivisor(hidden)};
    T* out = static_cast<T*>(problem.out) + row * problem.hidden;
    const Tensors<T, Config> tensors{{problem.gate, chunk}, {problem.up, chunk}, out};
    launch_with_pdl(forward_unaligned_kernel<T, Config, G>, static_cast<unsigned>((count + kTile - 1) / kTile),
                    Config::kThreads, 0, stream, tensors, chunk);
  }
}

// Launches the unaligned kernel if the launch table has a row for the call, and returns whether it has.
template <typename T, class G>
bool try_unaligned(const Forward& problem, cudaStream_t stream) {
  const auto capability = [](auto row) {
    return compiled_capability(reinterpret_cast<const void*>(forward_unaligned_kernel<T, KernelConfig<T, row()>, G>));
  };
  return dispatch_launch_config<Pass::forward, Access::unaligned, sizeof(T)>(
      problem.rows, problem.hidden, capability,
      [&](auto row) { launch_unaligned<T, KernelConfig<T, row()>, G>(problem, stream); });
}

template <typename T, class G>
void launch(Forward problem, cudaStream_t stream) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(T);
  fold(problem.rows, problem.hidden, {&problem.gate, &problem.up});
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.gate, sizeof(T)) &&
                       aligned(problem.up, sizeof(T)) && aligned(problem.out);
  const bool strided = problem.gate.dims <= 1 && problem.up.dims <= 1;
  if (!vectors && strided && aligned(problem.out) && try_unaligned<T, G>(problem, stream)) return;
  const auto capability = [](auto row) {
    return compiled_capability(reinterpret_cast<const void*>(forward_kernel<T, KernelConfig<T, row()>, G>));
  };
  dispatch_access<Pass::forward, T>(vectors, strided, problem.rows, problem.hidden, capability, [&](auto row) {
    using Row = KernelConfig<T, row()>;
    for_each_chunk<Row>(problem.rows, problem.hidden, [&](const Chunk& chunk, unsigned blocks) {
      T* out = static_cast<T*>(problem.out) + chunk.first_row * problem.hidden + chunk.first_column;
      const Tensors<T, Row> tensors{{problem.gate, chunk}, {problem.up, chunk}, out};
      launch_with_pdl(forward_kernel<T, Row, G>, blocks, Row::kThreads, 0, stream, tensors, chunk);
    });
  });
}

}  // namespace

int forward(const Forward& problem, void* stream) {
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    dispatch_activation<T>(problem.activation, [&](auto activation) {
      launch<T, typename decltype(activation)::Element>(problem, static_cast<cudaStream_t>(stream));
    });
  });
}

}  // namespace geglu
