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

template <typename T, int kWidth, bool kEven>
struct Tensors {
  Source<T, kWidth, kEven> gate, up;
  T* out;
};

template <typename T, int kWidth, int kLoads, bool kEven, class G>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ Tensors<T, kWidth, kEven> tensors, const __grid_constant__ Piece piece) {
  const uint32_t first = blockIdx.x * (kThreads * kLoads) + threadIdx.x;
  let_next_begin();
  wait_for_previous();
  Vector<T, kWidth> gate[kLoads], up[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t vector = piece.within(first + i * kThreads), row = piece.row(vector);
    gate[i] = load<T, kWidth>(tensors.gate.at(vector, row));
    up[i] = load<T, kWidth>(tensors.up.at(vector, row));
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    Vector<T, kWidth> out;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      out.elements[j] = encode<T>(decode(up[i].elements[j]) * G::value(decode(gate[i].elements[j])));
    }
    const uint32_t vector = first + i * kThreads;
    if (vector < piece.count) store(tensors.out + static_cast<int64_t>(vector) * kWidth, out);
  }
}

template <typename T, class G>
void launch(const Forward& problem, cudaStream_t stream) {
  const bool vectors = problem.hidden % (kVectorBytes / sizeof(T)) == 0 && aligned(problem.gate, sizeof(T)) &&
                       aligned(problem.up, sizeof(T)) && aligned(problem.out);
  const bool even = problem.gate.dims <= 1 && problem.up.dims <= 1;
  with_access<T>(vectors, even, [&](auto width, auto loads, auto is_even) {
    for_each_piece<width(), loads()>(problem.rows, problem.hidden, [&](const Piece& piece, unsigned blocks) {
      T* out = static_cast<T*>(problem.out) + piece.first_row * problem.hidden + piece.first_column;
      const Tensors<T, width(), is_even()> tensors{{problem.gate, piece}, {problem.up, piece}, out};
      launch_early(forward_kernel<T, width(), loads(), is_even(), G>, blocks, kThreads, 0, stream, tensors, piece);
    });
  });
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
