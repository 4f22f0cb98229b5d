// Rotary embedding by the positions of tokens on a grid, forward: the readable statement of `rope3d`.
//
//   out[2 i]     = x[2 i] * cos(angle) - x[2 i + 1] * sin(angle)
//   out[2 i + 1] = x[2 i] * sin(angle) + x[2 i + 1] * cos(angle)
//   angle        = position * theta^(-j / n)
//
// for the pairs i of each head, where pair i is the j-th of the n pairs of its axis, and `position` is the token's
// index on that axis. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021),
// https://arxiv.org/abs/2104.09864; the axes are those of Wan 2.1, https://arxiv.org/abs/2503.20314: frames have the
// first pairs of a head, then height and width dim / 6 pairs each (rounded down), the last ones.
//
// x and out are [batch, frames * height * width, heads, dim], contiguous and of one dtype; dim is even. The angles are
// float64, since a float32 angle of 100 is off by up to 4e-6. The rotation is float32, and the result is rounded once.
//
// One thread computes one pair: it loads two adjacent elements and stores two. Neighbouring threads take neighbouring
// pairs. It computes its angle, which all heads and samples of a token have in common; a kernel that is as fast as the
// memory looks cosines and sines up.
#include "kit/launch.cuh"

namespace naive {
namespace {

constexpr int kThreads = 256;

// Returns the angle of a pair of the head of a token.
__device__ double angle_of(int64_t token, int64_t pair, int height, int width, int64_t dim, double theta) {
  const int64_t side = dim / 6, front = dim / 2 - 2 * side;  // pairs of height and of width; pairs of frames
  if (pair < front) {
    return static_cast<double>(token / width / height) * pow(theta, -static_cast<double>(pair) / front);
  }
  if (pair < front + side) {
    return static_cast<double>(token / width % height) * pow(theta, -static_cast<double>(pair - front) / side);
  }
  return static_cast<double>(token % width) * pow(theta, -static_cast<double>(pair - front - side) / side);
}

template <typename T>
__global__ void rope3d_kernel(const T* x, T* out, int64_t pairs, int frames, int height, int width, int64_t heads,
                              int64_t dim, double theta) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= pairs) return;
  const int64_t pair = index % (dim / 2);
  const int64_t token = index / (dim / 2) / heads % (static_cast<int64_t>(frames) * height * width);
  const double angle = angle_of(token, pair, height, width, dim, theta);
  const auto cosine = static_cast<float>(cos(angle)), sine = static_cast<float>(sin(angle));
  const auto a = static_cast<float>(x[2 * index]), b = static_cast<float>(x[2 * index + 1]);
  out[2 * index] = static_cast<T>(a * cosine - b * sine);
  out[2 * index + 1] = static_cast<T>(a * sine + b * cosine);
}

}  // namespace

// Launches on the current device and returns a cudaError_t. `type` is the dtype of x and out.
int rope3d(kit::Type type, const void* x, void* out, int64_t elements, int frames, int height, int width, int64_t heads,
           int64_t dim, double theta, void* stream) {
  const int64_t pairs = elements / 2;
  const auto blocks = static_cast<unsigned>((pairs + kThreads - 1) / kThreads);
  return kit::dispatch_dtype(type, [&](auto tag) {
    using T = typename decltype(tag)::Element;
    rope3d_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(x), static_cast<T*>(out), pairs, frames, height, width, heads, dim, theta);
  });
}

}  // namespace naive
