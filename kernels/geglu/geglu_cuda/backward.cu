// GEGLU and SwiGLU on CUDA: backward pass.
//
// Beyond naive/geglu.cu, which has no backward pass: both gradients in one launch, and the techniques of forward.cu.
//
// Reads:    grad, gate and up, each element once.
// Writes:   `grad_gate` and `grad_up`. Per pair of results five elements move: three loads and two stores.
// Must not: allocate, synchronize, or use another stream than the one given.
#include "geglu_cuda/device.cuh"

namespace geglu {
namespace {

template <class Config>
struct Tensors {
  typename Config::Rows grad, gate, up, grad_gate, grad_up;
};

template <typename T, class Config, class G>
__global__ void __launch_bounds__(Config::kThreads)
    backward_kernel(const __grid_constant__ Tensors<Config> tensors, const __grid_constant__ Chunk chunk) {
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
void launch(Backward problem, cudaStream_t stream) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(T);
  if (problem.stride == problem.hidden) {
    fold(problem.rows, problem.hidden, {&problem.grad, &problem.gate, &problem.up});
    problem.stride = problem.hidden;
  }
  const bool vectors = problem.hidden % kWidth == 0 && problem.stride % kWidth == 0 &&
                       aligned(problem.grad, sizeof(T)) && aligned(problem.gate, sizeof(T)) &&
                       aligned(problem.up, sizeof(T)) && aligned(problem.grad_gate) && aligned(problem.grad_up);
  dispatch_access<Pass::backward, T>(vectors, problem.hidden, [&](auto row) {
    using Row = KernelConfig<T, row()>;
    for_each_chunk<Row>(problem.rows, problem.hidden, [&](const Chunk& chunk, unsigned blocks) {
      const Tensors<Row> tensors{{problem.grad, chunk},
                                 {problem.gate, chunk},
                                 {problem.up, chunk},
                                 {problem.grad_gate, problem.stride, chunk},
                                 {problem.grad_up, problem.stride, chunk}};
      launch_with_pdl(backward_kernel<T, Row, G>, blocks, Row::kThreads, 0, stream, tensors, chunk);
    });
  });
}

}  // namespace

int run(const Backward& problem, void* stream) {
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    dispatch_activation<T>(problem.activation, [&](auto activation) {
      launch<T, typename decltype(activation)::Element>(problem, static_cast<cudaStream_t>(stream));
    });
  });
}

}  // namespace geglu
