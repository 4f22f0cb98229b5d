// Binds the naive kernel to Torch through its stable ABI, as of Torch 2.10.
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "geglu-naive";

// In geglu.cu.
namespace naive {
int gated(kit::Type type, const void* gate, const void* up, void* out, int64_t rows, int64_t hidden, int64_t stride,
          int activation, void* stream);
}

namespace {

using namespace kit;

Tensor gated(Tensor gate, Tensor up, int64_t activation) {
  check_backend(gate, "gate");
  const Type type = element_type(gate, "gate");
  if (gate.dim() != 2 || gate.stride(1) != 1) fail("gate", "must have two dimensions, and adjacent elements in a row");
  check_like(up, "up", gate, "gate");
  if (up.stride(0) != gate.stride(0) || up.stride(1) != 1) fail("up", "must have the strides of gate");
  const auto device = enter(gate);
  Tensor out = allocate_like(gate);
  if (gate.numel() == 0) return out;
  check(naive::gated(type, gate.const_data_ptr(), up.const_data_ptr(), out.mutable_data_ptr(), gate.size(0),
                     gate.size(1), gate.stride(0), static_cast<int>(activation), current_stream(gate)));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("gated(Tensor gate, Tensor up, int activation) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { ops.impl("gated", TORCH_BOX(&gated)); }

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
