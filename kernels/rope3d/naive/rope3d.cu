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
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "rope3d-naive";

namespace {

using namespace kit;

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

Tensor rope3d(Tensor x, int64_t frames, int64_t height, int64_t width, double theta) {
  check_backend(x, "x");
  if (x.dim() != 4 || x.size(1) != frames * height * width || x.size(3) % 2 != 0) {
    fail("x", "must have the dimensions samples, tokens of the grid, heads, and an even number of elements");
  }
  const auto device = enter(x);
  x = torch::stable::contiguous(x);
  Tensor out = allocate_like(x);
  if (x.numel() == 0) return out;
  const int64_t pairs = x.numel() / 2;
  const auto blocks = static_cast<unsigned>((pairs + kThreads - 1) / kThreads);
  check(dispatch_dtype(element_type(x, "x"), [&](auto tag) {
    using T = typename decltype(tag)::Element;
    rope3d_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(current_stream(x))>>>(
        static_cast<const T*>(x.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr()), pairs,
        static_cast<int>(frames), static_cast<int>(height), static_cast<int>(width), x.size(2), x.size(3), theta);
  }));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rope3d(Tensor x, int frames, int height, int width, float theta) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { ops.impl("rope3d", TORCH_BOX(&rope3d)); }

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
