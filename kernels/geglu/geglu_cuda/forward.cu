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

// Where rows that start anywhere are read in vectors: elements of a row, so that few vectors lie in two of them, and of
// all rows, so that there are threads enough.
constexpr int64_t kShortest = 512, kLongest = int64_t{1} << 24, kEnough = 65536;

template <typename T, int kWidth, bool kEven>
struct Tensors {
  Source<T, kWidth, kEven> gate, up;
  T* out;
};

template <typename T, int kWidth, int kLoads, bool kEven, class G>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ Tensors<T, kWidth, kEven> tensors, const __grid_constant__ Piece piece) {
  const uint32_t first = blockIdx.x * (kThreads * kLoads) + threadIdx.x;
  trigger_next_grid();
  grid_wait();
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

// As many elements as a vector has, from wherever they start: of the one or two vectors that they lie in.
template <typename T, int kWidth>
class Anywhere {
 public:
  // Of those elements, `first` to `last` are in the tensor: no vector is read that has none of them.
  __device__ __forceinline__ void read(const T* from, int first, int last) {
    static_assert(sizeof(T) * kWidth == sizeof(uint4));
    const auto whole = [](const T* at) {
      return *reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(at) / sizeof(uint4) * sizeof(uint4));
    };
    bytes_ = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % sizeof(uint4));
    low_ = whole(from + first);
    high_ = whole(from + last);
  }

  __device__ __forceinline__ Vector<T, kWidth> vector() const {
    uint32_t words[8] = {low_.x, low_.y, low_.z, low_.w, high_.x, high_.y, high_.z, high_.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = bytes_ & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = bytes_ & 4 ? words[i + 1] : words[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], bytes_ % 4 * 8);
    Vector<T, kWidth> vector;
    memcpy(&vector, words, sizeof(vector));
    return vector;
  }

 private:
  uint4 low_, high_;
  uint32_t bytes_;
};

// For rows that do not start at multiples of the vector, and have at least its elements: the vectors of the result are
// counted over all rows, and some of them have elements of two.
template <typename T, class G>
__global__ void __launch_bounds__(kThreads)
    forward_anywhere_kernel(const __grid_constant__ Tensors<T, 1, true> tensors, const __grid_constant__ Piece piece) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const uint32_t first = (blockIdx.x * kThreads + threadIdx.x) * kWidth, row = piece.row(first);
  const int left = static_cast<int>(min((row + 1) * piece.columns - first, static_cast<uint32_t>(kWidth)));
  const int all = static_cast<int>(min(piece.count - first, static_cast<uint32_t>(kWidth)));
  trigger_next_grid();
  grid_wait();
  if (first >= piece.count) return;
  Anywhere<T, kWidth> gate, up, next_gate, next_up;
  gate.read(tensors.gate.at(first, row), 0, left - 1);
  up.read(tensors.up.at(first, row), 0, left - 1);
  if (left < all) {
    next_gate.read(tensors.gate.at(first, row + 1), left, all - 1);
    next_up.read(tensors.up.at(first, row + 1), left, all - 1);
  }
  auto gates = gate.vector(), ups = up.vector();
  if (left < all) {
    const auto other_gates = next_gate.vector(), other_ups = next_up.vector();
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i >= left) {
        gates.elements[i] = other_gates.elements[i];
        ups.elements[i] = other_ups.elements[i];
      }
    }
  }
  Vector<T, kWidth> out;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    out.elements[i] = encode<T>(decode(ups.elements[i]) * G::value(decode(gates.elements[i])));
  }
  if (all == kWidth) {
    store(tensors.out + first, out);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i < all) tensors.out[first + i] = out.elements[i];
    }
  }
}

template <typename T, class G>
void launch_anywhere(const Forward& problem, cudaStream_t stream) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(T), kTile = kThreads * kWidth, kMost = int64_t{1} << 30;
  // Of whole vectors of the result, so that each piece of it starts with one.
  const int64_t step = kMost / problem.hidden / kWidth * kWidth;
  for (int64_t row = 0; row < problem.rows; row += step) {
    const auto hidden = static_cast<uint32_t>(problem.hidden);
    const auto count = static_cast<uint32_t>(std::min(step, problem.rows - row) * problem.hidden);
    const Piece piece{row, 0, count, hidden, Divider(hidden)};
    T* out = static_cast<T*>(problem.out) + row * problem.hidden;
    const Tensors<T, 1, true> tensors{{problem.gate, piece}, {problem.up, piece}, out};
    launch_with_pdl(forward_anywhere_kernel<T, G>, static_cast<unsigned>((count + kTile - 1) / kTile), kThreads, 0,
                    stream, tensors, piece);
  }
}

template <typename T, class G>
void launch(Forward problem, cudaStream_t stream) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(T);
  fold(problem.rows, problem.hidden, {&problem.gate, &problem.up});
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.gate, sizeof(T)) &&
                       aligned(problem.up, sizeof(T)) && aligned(problem.out);
  const bool even = problem.gate.dims <= 1 && problem.up.dims <= 1;
  if (!vectors && even && aligned(problem.out) && problem.hidden >= kShortest && problem.hidden <= kLongest &&
      problem.rows * problem.hidden >= kEnough) {
    return launch_anywhere<T, G>(problem, stream);
  }
  with_access<T>(vectors, even, [&](auto width, auto loads, auto is_even) {
    for_each_piece<width(), loads()>(problem.rows, problem.hidden, [&](const Piece& piece, unsigned blocks) {
      T* out = static_cast<T*>(problem.out) + piece.first_row * problem.hidden + piece.first_column;
      const Tensors<T, width(), is_even()> tensors{{problem.gate, piece}, {problem.up, piece}, out};
      launch_with_pdl(forward_kernel<T, width(), loads(), is_even(), G>, blocks, kThreads, 0, stream, tensors, piece);
    });
  });
}

}  // namespace

int forward(const Forward& problem, void* stream) {
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    with_gelu<T>(problem.approximate, [&](auto gelu) {
      launch<T, typename decltype(gelu)::Element>(problem, static_cast<cudaStream_t>(stream));
    });
  });
}

}  // namespace geglu
