// Binds the naive kernel to Torch through its stable ABI, as of Torch 2.10.
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "adaln-naive";

// In adaln.cu.
namespace naive {
int ada_layer_norm(kit::Type type, const void* x, const void* scale, const void* shift, void* normed, int64_t samples,
                   int64_t tokens, int64_t hidden, int64_t modulation_stride, float eps, void* stream);
}

namespace {

using namespace kit;

void check_modulation(const Tensor& tensor, const char* argument, const Tensor& x) {
  check_device(tensor, argument, x);
  if (dtype(tensor) != dtype(x)) fail(argument, "must have the dtype of x");
  const int64_t expected[] = {x.size(0), 1, x.size(2)};
  const auto sizes = tensor.sizes();
  if (!sizes.equals({expected, 3})) fail(argument, "must have shape " + text({expected, 3}) + ", not " + text(sizes));
  if (tensor.stride(2) != 1) fail(argument, "must have adjacent elements in its last dimension");
}

Tensor ada_layer_norm(Tensor x, Tensor scale, Tensor shift, double eps) {
  check_backend(x, "x");
  const Type type = element_type(x, "x");
  if (x.dim() != 3) fail("x", "must have three dimensions: samples, tokens, elements");
  check_modulation(scale, "scale", x);
  check_modulation(shift, "shift", x);
  if (shift.stride(0) != scale.stride(0)) fail("shift", "must have the strides of scale");
  const auto device = enter(x);
  x = torch::stable::contiguous(x);
  Tensor normed = allocate_like(x);
  if (x.numel() == 0) return normed;
  check(naive::ada_layer_norm(type, x.const_data_ptr(), scale.const_data_ptr(), shift.const_data_ptr(),
                              normed.mutable_data_ptr(), x.size(0), x.size(1), x.size(2), scale.stride(0),
                              static_cast<float>(eps), current_stream(x)));
  return normed;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("ada_layer_norm(Tensor x, Tensor scale, Tensor shift, float eps) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("ada_layer_norm", TORCH_BOX(&ada_layer_norm));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
