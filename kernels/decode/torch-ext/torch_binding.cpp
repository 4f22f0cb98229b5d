// Binds the kernels to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, dtypes and devices of the arguments; on the CPU also the position.
// Writes:   only tensors that it allocates, apart from cached_attention, which writes one token of key and value.
// Must not: compute; call anything of Torch newer than 2.10.
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "decode/problem.h"
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "decode";

namespace {

using namespace kit;
using decode_step::Activation;
using decode_step::Attention;
using decode_step::Heads;
using decode_step::kMostElements;
using decode_step::Linear;
using decode_step::Rotary;

#if defined(CUDA_KERNEL)
// Calls an operation of Torch that returns a tensor.
template <typename... Arguments>
Tensor call_torch(const char* name, const Arguments&... arguments) {
  std::array stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}
#endif

// Returns whether the elements of each row are adjacent, and on CUDA rows start at 16-byte boundaries.
bool has_vectors(const Tensor& tensor) {
  bool all = adjacent(tensor);
#if defined(CUDA_KERNEL)
  const int64_t vector = element_type(tensor, "x") == Type::float32 ? 4 : 8;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) all &= tensor.size(dim) <= 1 || tensor.stride(dim) % vector == 0;
  all &= reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
#endif
  return all;
}

void replace_by_copy(Tensor& tensor) {
  Tensor copy = allocate_like(tensor);
  torch::stable::copy_(copy, tensor);
  tensor = copy;
}

// Returns the address of contiguous vectors. Replaces the tensor by a copy if they are not contiguous, or not aligned.
[[maybe_unused]] const void* vectors_of(Tensor& tensor) {
  if (!tensor.is_contiguous() || !has_vectors(tensor)) replace_by_copy(tensor);
  return tensor.const_data_ptr();
}

// --- linear layers ---------------------------------------------------------------------------------------------------

// Reads x, of which at most kMostRows rows are allowed. Replaces it by a contiguous copy if it is not contiguous.
Linear problem_of(Tensor& x) {
  check_first(x, "x");
  Linear problem{};
  problem.type = element_type(x, "x");
  problem.inputs = x.size(x.dim() - 1);
  if (problem.inputs == 0) fail("x", "must have at least one element in its last dimension");
  problem.rows = x.numel() / problem.inputs;
  if (problem.rows > decode_step::kMostRows) {
    fail("x", "must have at most " + to_string(decode_step::kMostRows) + " rows, not " + to_string(problem.rows));
  }
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  problem.x = x.const_data_ptr();
  return problem;
}

// Adds a layer. Replaces tensors by contiguous copies if their elements are not adjacent. Returns whether the weight is
// read in place.
bool add_layer(Linear& problem, Tensor& weight, const char* weight_name, MaybeTensor& bias, const char* bias_name,
               const Tensor& x) {
  check_dtype(weight, weight_name, x, "x");
  if (weight.dim() != 2 || weight.size(1) != problem.inputs) {
    fail(weight_name, "must have shape [outputs, " + to_string(problem.inputs) + "], not " + text(weight.sizes()));
  }
  const bool in_place = problem.norm == nullptr ? adjacent(weight) : has_vectors(weight);
  if (!in_place) replace_by_copy(weight);
  auto& layer = problem.weights[problem.count++];
  layer.data = weight.const_data_ptr();
  layer.rows = weight.size(0);
  layer.stride = layer.rows > 1 ? weight.stride(0) : problem.inputs;  // that of one row may be any number
  problem.outputs += layer.rows;
  if (!bias.has_value()) return in_place;
  check_dtype(*bias, bias_name, x, "x");
  check_shape(*bias, bias_name, {&layer.rows, 1});
  if (!adjacent(*bias)) bias = torch::stable::contiguous(*bias);
  layer.bias = bias->const_data_ptr();
  return in_place;
}

// Adds a norm of x. Replaces x and the norm's weight by copies if the kernels cannot read their vectors.
void add_norm(Linear& problem, MaybeTensor& weight, double eps, double offset, Tensor& x) {
  if (!weight.has_value()) return;
#if defined(CUDA_KERNEL)
  check_dtype(*weight, "norm_weight", x, "x");
  check_shape(*weight, "norm_weight", {&problem.inputs, 1});
  if (problem.type != Type::bfloat16 || problem.inputs % 8 != 0 || x.numel() > decode_step::kMostNormed) {
    fail("norm_weight", "is for bfloat16, and few inputs, a multiple of 8");
  }
  problem.x = vectors_of(x);
  problem.norm = vectors_of(*weight);
  problem.eps = static_cast<float>(eps);
  problem.offset = static_cast<float>(offset);
#else
  fail("norm_weight", "is for CUDA alone");
#endif
}

// Allocates the result and computes it. Replaces the residual by a contiguous copy if it is not contiguous.
Tensor run(Linear& problem, const Tensor& x, MaybeTensor& residual, [[maybe_unused]] bool constant_weights) {
  const std::vector<int64_t> sizes = sizes_with_last(x, problem.outputs);
  if (residual.has_value()) {
    check_dtype(*residual, "residual", x, "x");
    check_shape(*residual, "residual", sizes);
    if (!residual->is_contiguous()) residual = torch::stable::contiguous(*residual);
    problem.residual = residual->const_data_ptr();
  }
  Tensor out = allocate(sizes, dtype(x), x);
  if (problem.rows == 0 || problem.outputs == 0) return out;
  problem.out = out.mutable_data_ptr();
#if defined(CUDA_KERNEL)
  check(decode_step::run(problem, constant_weights, current_stream(x)));
#else
  // A gate costs as much as its projection: both are counted in `outputs` of the problem's weights.
  const int64_t cost = problem.inputs * (problem.activation == Activation::none ? 1 : 2);
  run_parallel(problem, problem.outputs, cost);
#endif
  return out;
}

// x @ weight.T + bias + residual, and the same with weight2 and weight3 next to it in the last dimension.
Tensor linear(Tensor x, Tensor weight, MaybeTensor bias, MaybeTensor residual, MaybeTensor weight2, MaybeTensor bias2,
              MaybeTensor weight3, MaybeTensor bias3, bool constant_weights, MaybeTensor norm_weight, double eps,
              double offset) {
  Linear problem = problem_of(x);
  if (!weight2.has_value() && (bias2.has_value() || weight3.has_value())) {
    fail("weight2", "is required by the arguments after it");
  }
  if (!weight3.has_value() && bias3.has_value()) fail("weight3", "is required by the arguments after it");
  [[maybe_unused]] const auto device = enter(x);
  add_norm(problem, norm_weight, eps, offset, x);
  constant_weights &= add_layer(problem, weight, "weight", bias, "bias", x);
  if (weight2.has_value()) constant_weights &= add_layer(problem, *weight2, "weight2", bias2, "bias2", x);
  if (weight3.has_value()) constant_weights &= add_layer(problem, *weight3, "weight3", bias3, "bias3", x);
#if defined(CUDA_KERNEL)
  if (!residual.has_value() && problem.norm == nullptr && decode_step::is_for_torch(problem, constant_weights)) {
    return call_torch("aten::linear", x, weight, bias);
  }
#endif
  return run(problem, x, residual, constant_weights);
}

// activation(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias). `activation`: the number of a
// decode_step::Activation.
Tensor gated_linear(Tensor x, Tensor gate_weight, Tensor up_weight, int64_t activation, MaybeTensor gate_bias,
                    MaybeTensor up_bias, bool constant_weights, MaybeTensor norm_weight, double eps, double offset) {
  if (activation <= static_cast<int64_t>(Activation::none) ||
      activation > static_cast<int64_t>(Activation::gelu_tanh)) {
    fail("activation", "must be the number of a decode_step::Activation but `none`, not " + to_string(activation));
  }
  Linear problem = problem_of(x);
  [[maybe_unused]] const auto device = enter(x);
  problem.activation = static_cast<Activation>(activation);
  add_norm(problem, norm_weight, eps, offset, x);
  constant_weights &= add_layer(problem, gate_weight, "gate_weight", gate_bias, "gate_bias", x);
  constant_weights &= add_layer(problem, up_weight, "up_weight", up_bias, "up_bias", x);
  check_shape(up_weight, "up_weight", gate_weight.sizes());
  problem.outputs = problem.weights[0].rows;
  MaybeTensor no_residual;
  return run(problem, x, no_residual, constant_weights);
}

// --- attention -------------------------------------------------------------------------------------------------------

Heads heads_of(const Tensor& tensor, const void* data) {
  Heads heads;
  heads.data = const_cast<void*>(data);  // the kernels write to the cache alone
  heads.batch_stride = tensor.stride(0);
  heads.head_stride = tensor.stride(1);
  heads.token_stride = tensor.stride(2);
  return heads;
}

// Replaces the tensor by a contiguous copy if the kernel cannot read its heads.
Heads read_heads(Tensor& tensor) {
  if (tensor.numel() > 0 && !has_vectors(tensor)) replace_by_copy(tensor);
  return heads_of(tensor, tensor.const_data_ptr());
}

// Throws unless a token can be written in place.
Heads written_heads(Tensor& tensor, const char* argument) {
  if (tensor.numel() > 0 && !has_vectors(tensor)) {
    fail(argument,
         "must have adjacent elements in its last dimension, and on CUDA heads that start at 16-byte boundaries, to be "
         "changed in place");
  }
  check_not_expanded(tensor, argument);
  return heads_of(tensor, tensor.mutable_data_ptr());
}

// Checks query, key, value and mask. Replaces the mask by a contiguous copy if its tokens are not adjacent.
Attention problem_of(const Tensor& query, const Tensor& key, const Tensor& value, MaybeTensor& mask, double scale) {
  check_backend(query, "query");
  if (query.dim() != 4 || query.size(2) != 1) {
    fail("query", "must have shape [batch, query_heads, 1, elements], not " + text(query.sizes()));
  }
  Attention problem{};
  problem.type = element_type(query, "query");
  problem.batch = query.size(0);
#if defined(CUDA_KERNEL)
  if (problem.batch > UINT16_MAX) fail("query", "must have at most 65535 sequences, not " + to_string(problem.batch));
#endif
  problem.query_heads = query.size(1);
  problem.elements = query.size(3);
  if (problem.elements == 0 || problem.elements > kMostElements || problem.elements % 8 != 0) {
    fail("query", "must have a multiple of 8 elements per head, at most " + to_string(kMostElements) + ", not " +
                      to_string(problem.elements));
  }
  check_dtype(key, "key", query, "query");
  if (key.dim() != 4 || key.size(0) != problem.batch || key.size(3) != problem.elements) {
    fail("key", "must have shape [" + to_string(problem.batch) + ", key_heads, tokens, " + to_string(problem.elements) +
                    "], not " + text(key.sizes()));
  }
  problem.key_heads = key.size(1);
  problem.tokens = key.size(2);
  if (problem.key_heads == 0 || problem.query_heads % problem.key_heads != 0) {
    fail("query", "must have a multiple of the " + to_string(problem.key_heads) + " heads of key, not " +
                      to_string(problem.query_heads));
  }
  check_like(value, "value", key, "key");
  problem.scale = static_cast<float>(scale);
  if (!mask.has_value()) return problem;

  check_device(*mask, "mask", query, "query");
  if (dtype(*mask) != aoti_torch_dtype_bool()) fail("mask", "must be bool");
  if (mask->dim() != 4 || (mask->size(0) != 1 && mask->size(0) != problem.batch) || mask->size(1) != 1 ||
      mask->size(2) != 1 || mask->size(3) != problem.tokens) {
    fail("mask", "must have shape [" + to_string(problem.batch) + " or 1, 1, 1, " + to_string(problem.tokens) +
                     "], not " + text(mask->sizes()));
  }
  if (!adjacent(*mask)) mask = torch::stable::contiguous(*mask);
  problem.mask = static_cast<const bool*>(mask->const_data_ptr());
  problem.mask_stride = mask->size(0) == 1 ? 0 : mask->stride(0);
  return problem;
}

// Checks the arguments of the rotation of query and new_key.
Rotary rotary_of(const Attention& problem, const Tensor& query, MaybeTensor& cos, MaybeTensor& sin,
                 MaybeTensor& query_weight, MaybeTensor& key_weight) {
  Rotary rotary;
  if (!cos.has_value() && !sin.has_value() && !query_weight.has_value() && !key_weight.has_value()) return rotary;
#if defined(CUDA_KERNEL)
  if (!cos.has_value() || !sin.has_value()) fail("cos", "must be given together with sin, and with weights");
  if (query_weight.has_value() != key_weight.has_value())
    fail("query_weight", "must be given together with key_weight");
  if (problem.elements != 64 && problem.elements != 128 && problem.elements != 256) {
    fail("query", "must have 64, 128 or 256 elements per head to be rotated, not " + to_string(problem.elements));
  }
  check_dtype(*cos, "cos", query, "query");
  check_dtype(*sin, "sin", query, "query");
  if (cos->dim() != 2 || (cos->size(0) != 1 && cos->size(0) != problem.batch) ||
      (cos->size(1) != problem.elements && 2 * cos->size(1) != problem.elements)) {
    fail("cos", "must have shape [" + to_string(problem.batch) + " or 1, " + to_string(problem.elements / 2) + " or " +
                    to_string(problem.elements) + "], not " + text(cos->sizes()));
  }
  check_shape(*sin, "sin", cos->sizes());
  rotary.cos = vectors_of(*cos);
  rotary.sin = vectors_of(*sin);
  rotary.batch_stride = cos->size(0) == 1 ? 0 : cos->size(1);
  if (!query_weight.has_value()) return rotary;
  const int64_t sizes[] = {problem.elements};
  for (auto [weight, name] : {std::pair{&query_weight, "query_weight"}, std::pair{&key_weight, "key_weight"}}) {
    check_dtype(**weight, name, query, "query");
    check_shape(**weight, name, {sizes, 1});
  }
  rotary.query_weight = vectors_of(*query_weight);
  rotary.key_weight = vectors_of(*key_weight);
#else
  fail("cos", "is for CUDA alone: the op does not rotate on the CPU");
#endif
  return rotary;
}

// Allocates the result, [batch, 1, query_heads, elements], and computes it.
Tensor run(Attention& problem, const Tensor& query, [[maybe_unused]] const Tensor& key,
           [[maybe_unused]] const Tensor& value, [[maybe_unused]] bool constant_cache) {
  const int64_t sizes[] = {problem.batch, 1, problem.query_heads, problem.elements};
  Tensor out = allocate({sizes, 4}, dtype(query), query);
  if (out.numel() == 0) return out;
  if (problem.tokens == 0) {
    fill_with_zeros(out);
    return out;
  }
  problem.out = out.mutable_data_ptr();
#if defined(CUDA_KERNEL)
  int64_t floats = 0;
  check(decode_step::divide(problem, &floats));
  if (problem.division.is_for_torch) {
    const std::optional<double> scale(problem.scale);
    out = call_torch("aten::scaled_dot_product_attention", query, key, value, MaybeTensor(), 0.0, false, scale, true);
    return torch::stable::contiguous(torch::stable::transpose(out, 1, 2));
  }
  Tensor parts;
  if (floats > 0) {
    parts = allocate({&floats, 1}, aoti_torch_dtype_float32(), query);
    problem.parts = static_cast<float*>(parts.mutable_data_ptr());
  }
  check(decode_step::run(problem, constant_cache, current_stream(query)));
#else
  const int64_t cost = problem.tokens * problem.elements * 2;
  run_parallel(problem, problem.batch * problem.key_heads, cost);
#endif
  return out;
}

// softmax(scale * query @ key.T, where the mask is true) @ value
Tensor attention(Tensor query, Tensor key, Tensor value, MaybeTensor mask, double scale) {
  Attention problem = problem_of(query, key, value, mask, scale);
  [[maybe_unused]] const auto device = enter(query);
  problem.query = read_heads(query);
  problem.key = read_heads(key);
  problem.value = read_heads(value);
  return run(problem, query, key, value, false);
}

// The same, after new_key and new_value are written to key and value at the token `position`.
Tensor cached_attention(Tensor query, Tensor new_key, Tensor new_value, Tensor key, Tensor value, Tensor position,
                        MaybeTensor mask, double scale, bool constant_cache, MaybeTensor cos, MaybeTensor sin,
                        MaybeTensor query_weight, MaybeTensor key_weight, double eps, double offset,
                        bool rounded_before_weight) {
  Attention problem = problem_of(query, key, value, mask, scale);
  const int64_t sizes[] = {problem.batch, problem.key_heads, 1, problem.elements};
  check_dtype(new_key, "new_key", query, "query");
  check_shape(new_key, "new_key", {sizes, 4});
  check_like(new_value, "new_value", new_key, "new_key");
  check_device(position, "position", query, "query");
  if (dtype(position) != aoti_torch_dtype_int64() || position.numel() != 1) {
    fail("position", "must be one int64");
  }
  [[maybe_unused]] const auto device = enter(query);
  problem.query = read_heads(query);
  problem.rotary = rotary_of(problem, query, cos, sin, query_weight, key_weight);
  problem.rotary.eps = static_cast<float>(eps);
  problem.rotary.offset = static_cast<float>(offset);
  problem.rotary.rounded_before_weight = rounded_before_weight;
  problem.new_key = read_heads(new_key);
  problem.new_value = read_heads(new_value);
  problem.key = written_heads(key, "key");
  problem.value = written_heads(value, "value");
  problem.position = static_cast<const int64_t*>(position.const_data_ptr());
#if !defined(CUDA_KERNEL)
  if (*problem.position < 0 || *problem.position >= problem.tokens) {
    fail("position",
         "must be a token of the " + to_string(problem.tokens) + " of key, not " + to_string(*problem.position));
  }
#endif
  return run(problem, query, key, value, constant_cache);
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  // Callers leave out options that have their default value: Torch takes 0.2 us to convert each one it is given.
  ops.def(
      "linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, Tensor? weight2=None,"
      " Tensor? bias2=None, Tensor? weight3=None, Tensor? bias3=None, bool constant_weights=False,"
      " Tensor? norm_weight=None, float eps=0.0, float offset=0.0) -> Tensor");
  ops.def(
      "gated_linear(Tensor x, Tensor gate_weight, Tensor up_weight, int activation, Tensor? gate_bias=None,"
      " Tensor? up_bias=None, bool constant_weights=False, Tensor? norm_weight=None, float eps=0.0,"
      " float offset=0.0) -> Tensor");
  ops.def("attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor");
  ops.def(
      "cached_attention(Tensor query, Tensor new_key, Tensor new_value, Tensor(a!) key, Tensor(b!) value,"
      " Tensor position, Tensor? mask, float scale, bool constant_cache=False, Tensor? cos=None,"
      " Tensor? sin=None, Tensor? query_weight=None, Tensor? key_weight=None, float eps=0.0, float offset=0.0,"
      " bool rounded_before_weight=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, KIT_BACKEND, ops) {
  ops.impl("linear", TORCH_BOX(&linear));
  ops.impl("gated_linear", TORCH_BOX(&gated_linear));
  ops.impl("attention", TORCH_BOX(&attention));
  ops.impl("cached_attention", TORCH_BOX(&cached_attention));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
