// GEGLU, backward, on CUDA.
//
// Reads:    grad, gate and up, each element once.
// Writes:   `grad_gate` and `grad_up`: five times the size of an element moves for each of them.
// Must not: allocate, synchronize, or use another stream than the one given.
#include "geglu_cuda/device.cuh"
#include "geglu_cuda/geglu.h"

namespace geglu {
namespace {

template <typename T, int kWidth, bool kEven>
struct Tensors {
  Source<T, kWidth, kEven> grad, gate, up;
  Even<T, kWidth> grad_gate, grad_up;
};

template <typename T, int kWidth, int kLoads, bool kEven, class G>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const __grid_constant__ Tensors<T, kWidth, kEven> tensors, const __grid_constant__ Piece piece) {
  const uint32_t first = blockIdx.x * (kThreads * kLoads) + threadIdx.x;
  trigger_next_grid();
  grid_wait();
  Vector<T, kWidth> grad[kLoads], gate[kLoads], up[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t vector = piece.within(first + i * kThreads), row = piece.row(vector);
    grad[i] = load<T, kWidth>(tensors.grad.at(vector, row));
    gate[i] = load<T, kWidth>(tensors.gate.at(vector, row));
    up[i] = load<T, kWidth>(tensors.up.at(vector, row));
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float above = decode(grad[i].elements[j]);
      float value, slope;
      G::value_and_slope(decode(gate[i].elements[j]), value, slope);
      gate[i].elements[j] = encode<T>(above * decode(up[i].elements[j]) * slope);
      up[i].elements[j] = encode<T>(above * value);
    }
    const uint32_t vector = first + i * kThreads;
    if (vector < piece.count) {
      const uint32_t row = piece.row(vector);
      store(tensors.grad_gate.at(vector, row), gate[i]);
      store(tensors.grad_up.at(vector, row), up[i]);
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
  const bool even = problem.grad.dims <= 1 && problem.gate.dims <= 1 && problem.up.dims <= 1;
  with_access<T>(vectors, even, [&](auto width, auto loads, auto is_even) {
    for_each_piece<width(), loads()>(problem.rows, problem.hidden, [&](const Piece& piece, unsigned blocks) {
      const Tensors<T, width(), is_even()> tensors{{problem.grad, piece},
                                                   {problem.gate, piece},
                                                   {problem.up, piece},
                                                   {problem.grad_gate, problem.stride, piece},
                                                   {problem.grad_up, problem.stride, piece}};
      launch_with_pdl(backward_kernel<T, width(), loads(), is_even(), G>, blocks, kThreads, 0, stream, tensors, piece);
    });
  });
}

}  // namespace

int backward(const Backward& problem, void* stream) {
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    with_gelu<T>(problem.approximate, [&](auto gelu) {
      launch<T, typename decltype(gelu)::Element>(problem, static_cast<cudaStream_t>(stream));
    });
  });
}

}  // namespace geglu
