// GEGLU, forward, on CUDA.
//
// Reads:    gate and up, each element once.
// Writes:   `out`: three times the size of an element moves for each result. With 16 bits and 3 TB/s that leaves the
//           arithmetic of an H100 about 59 instructions for each; it takes about 25.
// Must not: allocate, synchronize, or use another stream than the one given.
#include "geglu_cuda/device.cuh"
#include "geglu_cuda/geglu.h"

namespace geglu {
namespace {

template <typename T, int kWidth, int kLoads, class G>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ Forward problem, const __grid_constant__ Piece piece) {
  const uint32_t first = blockIdx.x * (kThreads * kLoads) + threadIdx.x;
  Vector<T, kWidth> gate[kLoads], up[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t vector = first + i * kThreads;
    if (vector < piece.count) {
      const auto place = piece.place<kWidth>(vector);
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
        gate[i].elements[j] = encode<T>(decode(up[i].elements[j]) * G::value(decode(gate[i].elements[j])));
      }
      store(static_cast<T*>(problem.out) + place.row * problem.hidden + place.column, gate[i]);
    }
  }
}

template <typename T, int kWidth, int kLoads, class G>
void launch(const Forward& problem, cudaStream_t stream) {
  for_each_piece<kWidth, kLoads>(problem.rows, problem.hidden, [&](const Piece& piece, unsigned blocks) {
    forward_kernel<T, kWidth, kLoads, G><<<blocks, kThreads, 0, stream>>>(problem, piece);
  });
}

template <typename T, class G>
void launch_aligned(const Forward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.gate, sizeof(T)) &&
                       aligned(problem.up, sizeof(T)) && aligned(problem.out);
  return vectors ? launch<T, kWidth, 2, G>(problem, stream) : launch<T, 1, 8, G>(problem, stream);
}

template <typename T>
void launch_typed(const Forward& problem, cudaStream_t stream) {
  return problem.approximate == Approximate::none ? launch_aligned<T, Gelu<MathFor<T>>>(problem, stream)
                                                  : launch_aligned<T, GeluTanh<MathFor<T>>>(problem, stream);
}

}  // namespace

int forward(const Forward& problem, void* stream) {
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
