// Binds the naive kernel to Torch through its stable ABI, as of Torch 2.10.
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "rope3d-naive";

// In rope3d.cu.
namespace naive {
int rope3d(kit::Type type, const void* x, void* out, int64_t elements, int frames, int height, int width, int64_t heads,
           int64_t dim, double theta, void* stream);
}

namespace {

using namespace kit;

Tensor rope3d(Tensor x, int64_t frames, int64_t height, int64_t width, double theta) {
  check_backend(x, "x");
  const Type type = element_type(x, "x");
  if (x.dim() != 4 || x.size(1) != frames * height * width || x.size(3) % 2 != 0) {
    fail("x", "must have the dimensions samples, tokens of the grid, heads, and an even number of elements");
  }
  const auto device = enter(x);
  x = torch::stable::contiguous(x);
  Tensor out = allocate_like(x);
  if (x.numel() == 0) return out;
  check(naive::rope3d(type, x.const_data_ptr(), out.mutable_data_ptr(), x.numel(), static_cast<int>(frames),
                      static_cast<int>(height), static_cast<int>(width), x.size(2), x.size(3), theta,
                      current_stream(x)));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rope3d(Tensor x, int frames, int height, int width, float theta) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { ops.impl("rope3d", TORCH_BOX(&rope3d)); }

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
