// GEGLU, backward, on CUDA.
//
// Reads:    grad, gate and up, each element once.
// Writes:   `grad_gate` and `grad_up`: five times the size of an element moves for each of them.
// Must not: allocate, synchronize, or use another stream than the one given.
#include "geglu_cuda/device.cuh"
#include "geglu_cuda/geglu.h"

namespace geglu {
namespace {

template <typename T, int kWidth, int kLoads, class G>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const __grid_constant__ Backward problem, const __grid_constant__ Piece piece) {
  const uint32_t first = blockIdx.x * (kThreads * kLoads) + threadIdx.x;
  Vector<T, kWidth> grad[kLoads], gate[kLoads], up[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t vector = first + i * kThreads;
    if (vector < piece.count) {
      const auto place = piece.place<kWidth>(vector);
      grad[i] = load<T, kWidth>(row_of<T>(problem.grad, place.row) + place.column);
      gate[i] = load<T, kWidth>(row_of<T>(problem.gate, place.row) + place.column);
      up[i] = load<T, kWidth>(row_of<T>(problem.up, place.row) + place.column);
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t vector = first + i * kThreads;
    if (vector < piece.count) {
      const auto place = piece.place<kWidth>(vector);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float above = decode(grad[i].elements[j]);
        float value, slope;
        G::value_and_slope(decode(gate[i].elements[j]), value, slope);
        gate[i].elements[j] = encode<T>(above * decode(up[i].elements[j]) * slope);
        up[i].elements[j] = encode<T>(above * value);
      }
      const int64_t start = place.row * problem.stride + place.column;
      store(static_cast<T*>(problem.grad_gate) + start, gate[i]);
      store(static_cast<T*>(problem.grad_up) + start, up[i]);
    }
  }
}

template <typename T, int kWidth, int kLoads, class G>
void launch(const Backward& problem, cudaStream_t stream) {
  for_each_piece<kWidth, kLoads>(problem.rows, problem.hidden, [&](const Piece& piece, unsigned blocks) {
    backward_kernel<T, kWidth, kLoads, G><<<blocks, kThreads, 0, stream>>>(problem, piece);
  });
}

template <typename T, class G>
void launch_aligned(const Backward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && problem.stride % kWidth == 0 &&
                       aligned(problem.grad, sizeof(T)) && aligned(problem.gate, sizeof(T)) &&
                       aligned(problem.up, sizeof(T)) && aligned(problem.grad_gate) && aligned(problem.grad_up);
  return vectors ? launch<T, kWidth, 1, G>(problem, stream) : launch<T, 1, 4, G>(problem, stream);
}

template <typename T>
void launch_typed(const Backward& problem, cudaStream_t stream) {
  return problem.approximate == Approximate::none ? launch_aligned<T, Gelu<MathFor<T>>>(problem, stream)
                                                  : launch_aligned<T, GeluTanh<MathFor<T>>>(problem, stream);
}

}  // namespace

int backward(const Backward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (problem.type) {
    case Type::float32:
      launch_typed<float>(problem, cuda_stream);
      break;
    case Type::float16:
      launch_typed<__half>(problem, cuda_stream);
      break;
    case Type::bfloat16:
      launch_typed<__nv_bfloat16>(problem, cuda_stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace geglu
