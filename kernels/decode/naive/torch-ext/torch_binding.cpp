// Binds the naive kernels to Torch through its stable ABI, as of Torch 2.10.
#include <optional>

#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "decode-naive";

// In decode.cu.
namespace naive {
int linear(kit::Type type, const void* x, const void* weight, const void* up, void* out, int64_t rows, int64_t inputs,
           int64_t outputs, void* stream);
int attention(kit::Type type, const void* query, const void* key, const void* value, void* out, int64_t heads,
              int64_t group, int64_t tokens, int64_t elements, float scale, void* stream);
}  // namespace naive

namespace {

using namespace kit;

void check_contiguous(const Tensor& tensor, const char* argument, int64_t dims) {
  check_backend(tensor, argument);
  if (tensor.dim() != dims || !tensor.is_contiguous() || tensor.numel() == 0) {
    fail(argument, "must be contiguous, with " + std::to_string(dims) + " dimensions");
  }
}

Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> up) {
  check_contiguous(x, "x", 2);
  check_contiguous(weight, "weight", 2);
  if (up.has_value()) check_like(*up, "up", weight, "weight");
  const auto device = enter(x);
  const int64_t sizes[] = {x.size(0), weight.size(0)};
  Tensor out = allocate({sizes, 2}, dtype(x), x);
  check(naive::linear(element_type(x, "x"), x.const_data_ptr(), weight.const_data_ptr(),
                      up.has_value() ? up->const_data_ptr() : nullptr, out.mutable_data_ptr(), x.size(0), x.size(1),
                      weight.size(0), current_stream(x)));
  return out;
}

Tensor attention(Tensor query, Tensor key, Tensor value, double scale) {
  check_contiguous(query, "query", 4);
  check_contiguous(key, "key", 4);
  check_contiguous(value, "value", 4);
  if (query.size(3) > 256) fail("query", "must have at most 256 elements per head");
  const auto device = enter(query);
  const int64_t sizes[] = {query.size(0), 1, query.size(1), query.size(3)};
  Tensor out = allocate({sizes, 4}, dtype(query), query);
  check(naive::attention(element_type(query, "query"), query.const_data_ptr(), key.const_data_ptr(),
                         value.const_data_ptr(), out.mutable_data_ptr(), query.size(0) * query.size(1),
                         query.size(1) / key.size(1), key.size(2), query.size(3), static_cast<float>(scale),
                         current_stream(query)));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("linear(Tensor x, Tensor weight, Tensor? up=None) -> Tensor");
  ops.def("attention(Tensor query, Tensor key, Tensor value, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("linear", TORCH_BOX(&linear));
  ops.impl("attention", TORCH_BOX(&attention));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
