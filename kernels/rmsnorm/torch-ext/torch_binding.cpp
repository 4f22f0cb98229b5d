// Binds the kernels to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, dtypes and devices of the arguments.
// Writes:   only tensors that it allocates, apart from add_rms_norm_, which writes x and residual.
// Must not: compute; call anything of Torch newer than 2.10.
#include <tuple>

#include "kit/tensors.h"
#include "registration.h"
#include "rmsnorm/problem.h"

const char* const kit::kProject = "rmsnorm";

namespace {

using namespace kit;

// Replaces the weight by a contiguous copy if its elements are not adjacent.
rmsnorm::Weight weight_of(MaybeTensor& weight, double offset, const Tensor& x) {
  // Without a weight there is none to add to.
  return {parameter_of(weight, "weight", x.size(x.dim() - 1), x), weight ? static_cast<float>(offset) : 0.0f};
}

// Checks x and weight, and returns the problem without its rows, which `run` adds.
rmsnorm::Forward forward_problem(const Tensor& x, MaybeTensor& weight, double eps, double offset,
                                 bool rounded_before_weight) {
  check_first(x, "x");
  rmsnorm::Forward problem{};
  problem.type = element_type(x, "x");
  problem.eps = static_cast<float>(eps);
  problem.weight = weight_of(weight, offset, x);
  problem.rounded_before_weight = rounded_before_weight;
  problem.normed_type = rounded_before_weight && problem.weight.data != nullptr ? problem.weight.type : problem.type;
  return problem;
}

void run(rmsnorm::Forward& problem, Tensor& x, MaybeTensor residual) {
  const int64_t elements = x.numel();
  if (elements == 0) return;
  problem.hidden = x.size(x.dim() - 1);
  problem.rows = elements / problem.hidden;
  problem.x = rows_of(x);
  if (residual.has_value()) problem.residual = rows_of(*residual);
  launch(problem, x, problem.rows, problem.hidden);
}

Tensor allocate_normed(const rmsnorm::Forward& problem, const Tensor& x) {
  return allocate(x.sizes(), problem.normed_type == problem.type ? dtype(x) : aoti_torch_dtype_float32(), x);
}

// Throws unless the rows of a tensor can be written in place.
void check_writable(const Tensor& tensor, const char* argument) {
  check_not_expanded(tensor, argument);
  Tensor rows = tensor;
  if (tensor.numel() > 0 && rows_of(rows).data != tensor.const_data_ptr()) {
    fail(argument, "must have adjacent elements in its last dimension, to be changed in place");
  }
}

// x * rstd * (offset + weight), contiguous, where rstd = 1 / sqrt(mean(x^2) + eps) over the last dimension. With
// `rounded_before_weight`, x * rstd is rounded to the dtype of x, and its product with the weight to the dtype to which
// Torch promotes both.
Tensor rms_norm(Tensor x, MaybeTensor weight, double eps, double offset, bool rounded_before_weight) {
  rmsnorm::Forward problem = forward_problem(x, weight, eps, offset, rounded_before_weight);
  [[maybe_unused]] const auto device = enter(x);
  Tensor normed = allocate_normed(problem, x);
  problem.normed = normed.mutable_data_ptr();
  run(problem, x, std::nullopt);
  return normed;
}

// (rms_norm(x + residual), x + residual), both contiguous.
std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, Tensor residual, MaybeTensor weight, double eps, double offset,
                                        bool rounded_before_weight) {
  rmsnorm::Forward problem = forward_problem(x, weight, eps, offset, rounded_before_weight);
  check_like(residual, "residual", x);
  [[maybe_unused]] const auto device = enter(x);
  Tensor normed = allocate_normed(problem, x), sum = allocate_like(x);
  problem.normed = normed.mutable_data_ptr();
  problem.sum = sum.mutable_data_ptr();
  run(problem, x, residual);
  return {normed, sum};
}

// add_rms_norm, written over x and residual.
void add_rms_norm_(Tensor x, Tensor residual, MaybeTensor weight, double eps, double offset,
                   bool rounded_before_weight) {
  rmsnorm::Forward problem = forward_problem(x, weight, eps, offset, rounded_before_weight);
  if (problem.normed_type != problem.type) {
    fail("weight", "must have the dtype of x, to be multiplied after the rounding in place");
  }
  check_like(residual, "residual", x);
  check_writable(x, "x");
  check_writable(residual, "residual");
  check_apart(residual, "residual", x, "x", problem.type);
  [[maybe_unused]] const auto device = enter(x);
  run(problem, x, residual);
}

// The gradients of rms_norm with respect to x (plus grad_sum, when given) and to the weight; the latter is undefined,
// in Python None, unless `weight_grad` asks for it. Both ignore the roundings.
std::tuple<Tensor, Tensor> rms_norm_backward(Tensor grad, Tensor x, MaybeTensor weight, MaybeTensor grad_sum,
                                             bool weight_grad, double eps, double offset) {
  check_first(x, "x");
  rmsnorm::Backward problem{};
  problem.type = element_type(x, "x");
  problem.eps = static_cast<float>(eps);
  problem.weight = weight_of(weight, offset, x);
  check_like(grad, "grad", x);
  if (grad_sum.has_value()) check_like(*grad_sum, "grad_sum", x);
  if (weight_grad && !weight.has_value()) fail("weight", "must be given for its gradient");

  [[maybe_unused]] const auto device = enter(x);
  Tensor grad_x = allocate_like(x);
  Tensor grad_weight = weight_grad ? allocate_like(*weight) : Tensor();
  const int64_t hidden = x.size(x.dim() - 1), elements = x.numel();
  if (elements == 0) {
    if (weight_grad && hidden > 0) fill_with_zeros(grad_weight);
    return {grad_x, grad_weight};
  }
  problem.hidden = hidden;
  problem.rows = elements / hidden;
  problem.grad = rows_of(grad);
  problem.x = rows_of(x);
  if (grad_sum.has_value()) problem.grad_sum = rows_of(*grad_sum);
  problem.grad_x = grad_x.mutable_data_ptr();
  check(rmsnorm::partial_sums(problem, &problem.parts));
  MaybeTensor partial;
  if (weight_grad) {
    const int64_t sizes[] = {problem.parts, hidden};
    partial = allocate({sizes, 2}, aoti_torch_dtype_float32(), x);
    problem.partial = static_cast<float*>(partial->mutable_data_ptr());
    problem.grad_weight = grad_weight.mutable_data_ptr();
  }
  launch(problem, x, problem.parts, problem.rows / problem.parts * hidden);
#if !KIT_ON_GPU
  if (weight_grad) run_parallel(problem, hidden, problem.parts, rmsnorm::reduce_weight_gradient);
#endif
  return {grad_x, grad_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  // Callers leave out options that have their default value: Torch takes 0.2 us to convert each one it is given.
  ops.def(
      "rms_norm(Tensor x, Tensor? weight, float eps, float offset=0.0, bool rounded_before_weight=False) -> Tensor");
  ops.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset=0.0,"
      " bool rounded_before_weight=False) -> (Tensor, Tensor)");
  ops.def(
      "add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float eps, float offset=0.0,"
      " bool rounded_before_weight=False) -> ()");
  ops.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor? grad_sum, bool weight_grad, float eps,"
      " float offset=0.0) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, KIT_BACKEND, ops) {
  ops.impl("rms_norm", TORCH_BOX(&rms_norm));
  ops.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  ops.impl("add_rms_norm_", TORCH_BOX(&add_rms_norm_));
  ops.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
