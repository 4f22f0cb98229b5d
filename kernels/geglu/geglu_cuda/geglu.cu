// GEGLU and SwiGLU on CUDA, forward and backward.
//
// Beyond naive/geglu.cu: a backward pass with both gradients in one launch, vectorized loads, several in flight per
// thread, PDL, and rows at any strides and alignment.
//
// Reads:    gate and up, for the backward pass also grad; each element once.
// Writes:   `out`; or `grad_gate` and `grad_up`. Per result three elements move, per pair of gradients five.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// The kernels are memory-bound: at 3 TB/s and 16 bits an H100 can execute about 59 instructions per result, and the
// forward pass needs about 20.
#include "geglu_cuda/device.cuh"

namespace geglu {
namespace {

template <typename T, class Config>
struct ForwardTensors {
  typename Config::Rows gate, up;
  T* out;
};

template <typename T, class Config, class G>
__global__ void __launch_bounds__(Config::kThreads)
    forward_kernel(const __grid_constant__ ForwardTensors<T, Config> tensors, const __grid_constant__ Chunk chunk) {
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

template <class Config>
struct BackwardTensors {
  typename Config::Rows grad, gate, up, grad_gate, grad_up;
};

template <typename T, class Config, class G>
__global__ void __launch_bounds__(Config::kThreads)
    backward_kernel(const __grid_constant__ BackwardTensors<Config> tensors, const __grid_constant__ Chunk chunk) {
  constexpr int kThreads = Config::kThreads, kLoads = Config::kLoads, kWidth = Config::kWidth;
  const uint32_t first = blockIdx.x * (kThreads * kLoads) + threadIdx.x;
  trigger_next_grid();
  grid_wait();
  Vector<T, kWidth> grad[kLoads], gate[kLoads], up[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t vector = chunk.clamped(first + i * kThreads), row = chunk.row(vector);
    grad[i] = load<T, kWidth>(tensors.grad.at(vector, row));
    gate[i] = load<T, kWidth>(tensors.gate.at(vector, row));
    up[i] = load<T, kWidth>(tensors.up.at(vector, row));
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    float of_gate[kWidth], of_up[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float upstream = decode(grad[i], j);
      float value, derivative;
      G::value_and_derivative(decode(gate[i], j), value, derivative);
      of_gate[j] = upstream * decode(up[i], j) * derivative;
      of_up[j] = upstream * value;
    }
    const uint32_t vector = first + i * kThreads;
    if (vector < chunk.count) {
      const uint32_t row = chunk.row(vector);
      store(tensors.grad_gate.at(vector, row), encode_all<T>(of_gate));
      store(tensors.grad_up.at(vector, row), encode_all<T>(of_up));
    }
  }
}

template <typename T, class G>
void launch(const Forward& problem, cudaStream_t stream) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.gate, sizeof(T)) &&
                       aligned(problem.up, sizeof(T)) && aligned(problem.out);
  for_each_chunk<T>(vectors, problem.rows, problem.hidden, [&](auto config, const Chunk& chunk, unsigned blocks) {
    using Config = decltype(config);
    T* out = static_cast<T*>(problem.out) + chunk.first_row * problem.hidden + chunk.first_column;
    const ForwardTensors<T, Config> tensors{{problem.gate, chunk}, {problem.up, chunk}, out};
    launch_with_pdl(forward_kernel<T, Config, G>, blocks, Config::kThreads, 0, stream, tensors, chunk);
  });
}

template <typename T, class G>
void launch(const Backward& problem, cudaStream_t stream) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && problem.stride % kWidth == 0 &&
                       aligned(problem.grad, sizeof(T)) && aligned(problem.gate, sizeof(T)) &&
                       aligned(problem.up, sizeof(T)) && aligned(problem.grad_gate) && aligned(problem.grad_up);
  for_each_chunk<T>(vectors, problem.rows, problem.hidden, [&](auto config, const Chunk& chunk, unsigned blocks) {
    using Config = decltype(config);
    const BackwardTensors<Config> tensors{{problem.grad, chunk},
                                          {problem.gate, chunk},
                                          {problem.up, chunk},
                                          {problem.grad_gate, problem.stride, chunk},
                                          {problem.grad_up, problem.stride, chunk}};
    launch_with_pdl(backward_kernel<T, Config, G>, blocks, Config::kThreads, 0, stream, tensors, chunk);
  });
}

template <class Problem>
int launch_typed(const Problem& problem, void* stream) {
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    with_activation<MathFor<T>>(problem.activation, [&](auto activation) {
      launch<T, decltype(activation)>(problem, static_cast<cudaStream_t>(stream));
    });
  });
}

}  // namespace

int run(const Forward& problem, void* stream) { return launch_typed(problem, stream); }
int run(const Backward& problem, void* stream) { return launch_typed(problem, stream); }

}  // namespace geglu
