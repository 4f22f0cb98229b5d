// GEGLU, forward, on CUDA.
//
// Reads:    gate and up, each element once.
// Writes:   `out`: three times the size of an element moves for each result. With 16 bits and 3 TB/s that leaves the
//           arithmetic of an H100 about 59 instructions for each; it takes about 20.
// Must not: allocate, synchronize, or use another stream than the one given.
#include "geglu_cuda/device.cuh"
#include "geglu_cuda/geglu.h"

namespace geglu {
namespace {

template <typename T, class G>
__device__ __forceinline__ T gated(T gate, T up) {
  return encode<T>(decode(up) * G::value(decode(gate)));
}

template <typename T, int kWidth, class G>
__global__ void __launch_bounds__(kThreads)
    vectors_kernel(const __grid_constant__ Forward problem, const __grid_constant__ Vectors vectors) {
  const uint32_t vector = blockIdx.x * kThreads + threadIdx.x;
  const auto place = vectors.place<kWidth>(vector);
  wait_for_previous();
  if (vector >= vectors.count) return;
  const auto gate = load<T, kWidth>(row_of<T>(problem.gate, place.row) + place.column);
  const auto up = load<T, kWidth>(row_of<T>(problem.up, place.row) + place.column);
  let_next_begin();
  Vector<T, kWidth> out;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) out.elements[i] = gated<T, G>(gate.elements[i], up.elements[i]);
  store(static_cast<T*>(problem.out) + place.row * problem.hidden + place.column, out);
}

template <typename T, class G>
__global__ void __launch_bounds__(kThreads)
    singles_kernel(const __grid_constant__ Forward problem, const __grid_constant__ Singles singles) {
  const auto place = singles.place();
  const int columns = singles.columns_from(place, problem.rows, problem.hidden);
  wait_for_previous();
  if (columns <= 0) return;
  const T* gate_row = row_of<T>(problem.gate, place.row) + place.column;
  const T* up_row = row_of<T>(problem.up, place.row) + place.column;
  T* out_row = static_cast<T*>(problem.out) + place.row * problem.hidden + place.column;
  T gate[kSingles], up[kSingles];
#pragma unroll
  for (int i = 0; i < kSingles; ++i) {
    if (i * singles.group < columns) {
      gate[i] = gate_row[i * singles.group];
      up[i] = up_row[i * singles.group];
    }
  }
  let_next_begin();
#pragma unroll
  for (int i = 0; i < kSingles; ++i) {
    if (i * singles.group < columns) out_row[i * singles.group] = gated<T, G>(gate[i], up[i]);
  }
}

template <typename T, class G>
void launch(const Forward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  if (problem.hidden % kWidth == 0 && aligned(problem.gate, sizeof(T)) && aligned(problem.up, sizeof(T)) &&
      aligned(problem.out)) {
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

int forward(const Forward& problem, void* stream) {
  return with_type(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    with_gelu<T>(problem.approximate, [&](auto gelu) {
      launch<T, typename decltype(gelu)::Element>(problem, static_cast<cudaStream_t>(stream));
    });
  });
}

}  // namespace geglu
