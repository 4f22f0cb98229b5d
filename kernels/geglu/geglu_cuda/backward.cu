// GEGLU, backward, on CUDA.
//
// Reads:    grad, gate and up, each element once.
// Writes:   `grad_gate` and `grad_up`: five times the size of an element moves for each of them.
// Must not: allocate, synchronize, or use another stream than the one given.
#include "geglu_cuda/device.cuh"
#include "geglu_cuda/geglu.h"

namespace geglu {
namespace {

// Replaces gate and up by their gradients.
template <typename T, class G>
__device__ __forceinline__ void differentiate(T grad, T& gate, T& up) {
  const float above = decode(grad);
  float value, slope;
  G::value_and_slope(decode(gate), value, slope);
  gate = encode<T>(above * decode(up) * slope);
  up = encode<T>(above * value);
}

template <typename T, int kWidth, class G>
__global__ void __launch_bounds__(kThreads)
    vectors_kernel(const __grid_constant__ Backward problem, const __grid_constant__ Vectors vectors) {
  const uint32_t vector = blockIdx.x * kThreads + threadIdx.x;
  const auto place = vectors.place<kWidth>(vector);
  wait_for_previous();
  if (vector >= vectors.count) return;
  const auto grad = load<T, kWidth>(row_of<T>(problem.grad, place.row) + place.column);
  auto gate = load<T, kWidth>(row_of<T>(problem.gate, place.row) + place.column);
  auto up = load<T, kWidth>(row_of<T>(problem.up, place.row) + place.column);
  let_next_begin();
#pragma unroll
  for (int i = 0; i < kWidth; ++i) differentiate<T, G>(grad.elements[i], gate.elements[i], up.elements[i]);
  const int64_t start = place.row * problem.stride + place.column;
  store(static_cast<T*>(problem.grad_gate) + start, gate);
  store(static_cast<T*>(problem.grad_up) + start, up);
}

template <typename T, class G>
__global__ void __launch_bounds__(kThreads)
    singles_kernel(const __grid_constant__ Backward problem, const __grid_constant__ Singles singles) {
  const auto place = singles.place();
  const int columns = singles.columns_from(place, problem.rows, problem.hidden);
  wait_for_previous();
  if (columns <= 0) return;
  const T* grad_row = row_of<T>(problem.grad, place.row) + place.column;
  const T* gate_row = row_of<T>(problem.gate, place.row) + place.column;
  const T* up_row = row_of<T>(problem.up, place.row) + place.column;
  const int64_t start = place.row * problem.stride + place.column;
  T* grad_gate_row = static_cast<T*>(problem.grad_gate) + start;
  T* grad_up_row = static_cast<T*>(problem.grad_up) + start;
  T grad[kSingles], gate[kSingles], up[kSingles];
#pragma unroll
  for (int i = 0; i < kSingles; ++i) {
    if (i * singles.group < columns) {
      grad[i] = grad_row[i * singles.group];
      gate[i] = gate_row[i * singles.group];
      up[i] = up_row[i * singles.group];
    }
  }
  let_next_begin();
#pragma unroll
  for (int i = 0; i < kSingles; ++i) {
    if (i * singles.group < columns) {
      differentiate<T, G>(grad[i], gate[i], up[i]);
      grad_gate_row[i * singles.group] = gate[i];
      grad_up_row[i * singles.group] = up[i];
    }
  }
}

template <typename T, class G>
void launch(const Backward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  if (problem.hidden % kWidth == 0 && problem.stride % kWidth == 0 && aligned(problem.grad, sizeof(T)) &&
      aligned(problem.gate, sizeof(T)) && aligned(problem.up, sizeof(T)) && aligned(problem.grad_gate) &&
      aligned(problem.grad_up)) {
    for_each_vectors<kWidth>(problem.rows, problem.hidden, [&](const Vectors& vectors, unsigned blocks) {
      launch_early(vectors_kernel<T, kWidth, G>, blocks, kThreads, 0, stream, problem, vectors);
    });
  } else {
    const Singles singles(problem.hidden);
    const auto blocks = static_cast<unsigned>(singles.blocks(problem.rows));
    launch_early(singles_kernel<T, G>, blocks, kThreads, 0, stream, problem, singles);
  }
}

}  // namespace

int backward(const Backward& problem, void* stream) {
  return with_type(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    with_gelu<T>(problem.approximate, [&](auto gelu) {
      launch<T, typename decltype(gelu)::Element>(problem, static_cast<cudaStream_t>(stream));
    });
  });
}

}  // namespace geglu
