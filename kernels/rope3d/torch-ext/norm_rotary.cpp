// Binds RMSNorm with rotary embedding to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, dtypes and devices of the arguments.
// Writes:   only tensors that it allocates.
// Must not: compute; call anything of Torch newer than 2.10.
#include <string>
#include <tuple>

#include "kit/tensors.h"
#include "registration.h"
#include "rope3d/problem.h"
#include "torch-ext/arguments.h"

namespace {

using namespace rope3d;

// How q and k are normalized and laid out.
struct NormForm {
  double eps;
  bool per_token;
  double offset;
  bool rounded_before_weight;
  int64_t rotary_dim;
  Form form;
};

// Checks all arguments but the gradients. The caller adds the tensors that are read and written.
NormRotation norm_problem(const Tensor& q, const MaybeTensor& k, MaybeTensor& q_weight, MaybeTensor& k_weight,
                          Tensor& cos, Tensor& sin, const NormForm& form, bool inverse) {
  NormRotation problem{};
  problem.rotation = by_tokens(q, k, cos, sin, form.rotary_dim, form.form, inverse);
  problem.per_token = form.per_token;
  problem.rounded_before_weight = form.rounded_before_weight;
  problem.eps = static_cast<float>(form.eps);
  problem.offset = static_cast<float>(form.offset);
  if (k_weight.has_value() && !k.has_value()) fail("k_weight", "must be None without k");
  problem.norms[0].weight = parameter_of(q_weight, "q_weight", problem.row_elements(0), q, "q");
  problem.norms[1].weight = parameter_of(k_weight, "k_weight", problem.row_elements(1), q, "q");
  return problem;
}

int64_t token_elements(const Rotation& rotation) {
  return (rotation.sides[0].heads + rotation.sides[1].heads) * rotation.width;
}

void launch_backward(const NormRotation& problem, [[maybe_unused]] const Tensor& q) {
#if KIT_ON_GPU
  check(norm_rotate_backward(problem, current_stream(q)));
#else
  const Rotation& rotation = problem.rotation;
  const int64_t tokens = rotation.batch * rotation.tokens;
  run_parallel(problem, problem.parts, tokens / problem.parts * token_elements(rotation),
               [](auto&&... given) { norm_rotate_backward(given...); });
  for (int side = 0; side < kMaxSides; ++side) {
    if (problem.norms[side].partial == nullptr) continue;
    run_parallel(
        problem, problem.row_elements(side), problem.parts,
        [side](const NormRotation& of, int64_t begin, int64_t end) { reduce_norm_weight(of, side, begin, end); });
  }
#endif
}

// Sets the backward pass's inputs of one side. Replaces x by a contiguous copy if the elements of its heads are not
// adjacent. Without a gradient of the result the side is left out.
Tensor set_gradient(MaybeTensor& grad, const char* argument, Tensor& x, const char* name, NormRotation& problem,
                    int number, const Form& form) {
  Side& side = problem.rotation.sides[number];
  if (!grad.has_value()) {
    side.heads = 0;
    return Tensor();
  }
  check_like(*grad, argument, x, name);
  Tensor result = result_for(*grad, side, problem.rotation, form);
  if (!adjacent(x)) x = torch::stable::contiguous(x);
  SideNorm& norm = problem.norms[number];
  norm.x = x.const_data_ptr();
  norm.x_strides = strides_of(x, form, problem.rotation.width);
  return result;
}

// Allocates the gradient of a weight.
Tensor weight_gradient(bool wanted, const MaybeTensor& weight, const char* argument, const MaybeTensor& grad,
                       SideNorm& norm) {
  if (!wanted) return Tensor();
  if (!weight.has_value()) fail(argument, "must be given for its gradient");
  if (!grad.has_value()) fail(argument, "has a gradient only with that of the result");
  Tensor result = allocate_like(*weight);
  norm.grad_weight = result.mutable_data_ptr();
  return result;
}

// Allocates the partial sums of a weight's gradient.
MaybeTensor partials_of(NormRotation& problem, int side, const Tensor& q) {
  if (problem.norms[side].grad_weight == nullptr) return std::nullopt;
  const int64_t sizes[] = {problem.parts, problem.row_elements(side)};
  Tensor partial = allocate({sizes, 2}, aoti_torch_dtype_float32(), q);
  problem.norms[side].partial = static_cast<float*>(partial.mutable_data_ptr());
  return partial;
}

// q and k, RMSNorm'd and then rotated by `cos` and `sin`, contiguous; the latter is undefined, in Python None, without
// k. The norm is over each head, or over all heads of a token if `per_token`; rope3d/problem.h has the formula and
// its roundings. Weights have one entry for each element that is normalized together. The other arguments are those of
// rotate_tokens.
std::tuple<Tensor, Tensor> norm_rotate_op(Tensor q, MaybeTensor k, MaybeTensor q_weight, MaybeTensor k_weight,
                                          Tensor cos, Tensor sin, double eps, bool per_token, double offset,
                                          bool rounded_before_weight, int64_t rotary_dim, int64_t prefix,
                                          int64_t head_dim, bool half, bool heads_first) {
  const Form form{prefix, head_dim, half, heads_first};
  NormRotation problem = norm_problem(q, k, q_weight, k_weight, cos, sin,
                                      {eps, per_token, offset, rounded_before_weight, rotary_dim, form}, false);
  [[maybe_unused]] const auto device = enter(q);
  Rotation& rotation = problem.rotation;
  Tensor to_q = result_for(q, rotation.sides[0], rotation, form);
  Tensor to_k = k.has_value() ? result_for(*k, rotation.sides[1], rotation, form) : Tensor();
  const int64_t tokens = rotation.batch * rotation.tokens, elements = token_elements(rotation);
  if (tokens * elements > 0) launch(problem, q, tokens, elements);
  return {to_q, to_k};
}

// The gradients with respect to q, k and their weights. Those of q and k are undefined, in Python None, without the
// gradient of the result; those of the weights unless `of_q_weight` or `of_k_weight` asks for them, which takes the
// gradient of the result.
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_rotate_backward_op(
    MaybeTensor grad_q, MaybeTensor grad_k, bool of_q_weight, bool of_k_weight, Tensor q, MaybeTensor k,
    MaybeTensor q_weight, MaybeTensor k_weight, Tensor cos, Tensor sin, double eps, bool per_token, double offset,
    bool rounded_before_weight, int64_t rotary_dim, int64_t prefix, int64_t head_dim, bool half, bool heads_first) {
  const Form form{prefix, head_dim, half, heads_first};
  NormRotation problem = norm_problem(q, k, q_weight, k_weight, cos, sin,
                                      {eps, per_token, offset, rounded_before_weight, rotary_dim, form}, true);
  if (grad_k.has_value() && !k.has_value()) fail("grad_k", "must be None without k");
  [[maybe_unused]] const auto device = enter(q);
  Tensor to_q = set_gradient(grad_q, "grad_q", q, "q", problem, 0, form);
  Tensor to_k = k.has_value() ? set_gradient(grad_k, "grad_k", *k, "k", problem, 1, form) : Tensor();
  Tensor of_q = weight_gradient(of_q_weight, q_weight, "q_weight", grad_q, problem.norms[0]);
  Tensor of_k = weight_gradient(of_k_weight, k_weight, "k_weight", grad_k, problem.norms[1]);
  if (problem.rotation.batch * problem.rotation.tokens * token_elements(problem.rotation) == 0) {
    if (of_q_weight) fill_with_zeros(of_q);
    if (of_k_weight) fill_with_zeros(of_k);
    return {to_q, to_k, of_q, of_k};
  }
  check(norm_partial_sums(problem, &problem.parts));
  const MaybeTensor q_partials = partials_of(problem, 0, q), k_partials = partials_of(problem, 1, q);
  launch_backward(problem, q);
  return {to_q, to_k, of_q, of_k};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, KIT_BACKEND, ops) {
  ops.impl("norm_rotate", TORCH_BOX(&norm_rotate_op));
  ops.impl("norm_rotate_backward", TORCH_BOX(&norm_rotate_backward_op));
}
