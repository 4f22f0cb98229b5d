// Binds the kernels to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, dtypes and devices of the arguments.
// Writes:   only tensors that it allocates.
// Must not: compute; call anything of Torch newer than 2.10.
#include <string>
#include <tuple>

#include "adaln/problem.h"
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "adaln";

namespace {

using namespace kit;

int64_t hidden_of(const Tensor& x) { return x.size(x.dim() - 1); }

// Checks the scale, shift and gate of one call, each of which has one row for every `span` rows of x.
class Modulations {
 public:
  Modulations(const Tensor& x, const char* x_name) : x_(x), x_name_(x_name) {
    for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) span_ *= x.size(dim);
  }

  adaln::Modulation operator()(MaybeTensor& tensor, const char* argument) {
    adaln::Modulation result;
    if (!tensor.has_value()) return result;
    check_device(*tensor, argument, x_, x_name_);
    const auto sizes = tensor->sizes(), x_sizes = x_.sizes();
    bool fits = !sizes.empty() && sizes.size() <= x_sizes.size() && sizes.back() == x_sizes.back();
    size_t leading = fits ? sizes.size() - 1 : 0;
    while (leading > 0 && sizes[leading - 1] == 1) --leading;
    int64_t span = 1;
    for (size_t dim = 0; dim + 1 < x_sizes.size(); ++dim) {
      if (dim < leading) {
        fits = fits && sizes[dim] == x_sizes[dim];
      } else {
        span *= x_sizes[dim];
      }
    }
    if (!fits) {
      fail(argument, std::string("must have the shape of ") + x_name_ + ", " + text(x_sizes) +
                         ", or 1 or nothing for dimensions between its first ones and the last, not " + text(sizes));
    }
    if (first_ == nullptr) {
      first_ = argument;
      span_ = span;
    } else if (span != span_) {
      fail(argument, std::string("must have as many rows as ") + first_);
    }
    result.type = type_beside(*tensor, argument, x_, x_name_);
    if (x_.numel() > 0) result.rows = rows_of(*tensor);
    return result;
  }

  // The number of rows of x that share one row of the modulations: all rows if there are no modulations.
  int64_t span() const { return span_; }

 private:
  const Tensor& x_;
  const char* x_name_;
  const char* first_ = nullptr;
  int64_t span_ = 1;
};

// Throws unless scale and shift are both given or both missing, and have one dtype.
void check_pair(const MaybeTensor& scale, const MaybeTensor& shift) {
  if (scale.has_value() != shift.has_value()) fail(scale.has_value() ? "shift" : "scale", "must be given, too");
  if (scale.has_value() && dtype(*scale) != dtype(*shift)) fail("shift", "must have the dtype of scale");
}

// Divides the rows of a problem into parts. Returns the partial sums, if they are needed; they must outlive the launch.
MaybeTensor prepare_sums(adaln::Backward& problem, bool needed, int count, const Tensor& x) {
  problem.sums.groups = problem.span == 1 ? 1 : problem.rows / problem.span;
  check(adaln::partial_sums(problem, &problem.sums.parts));
  if (!needed) return std::nullopt;
  problem.sums.count = count;
  const int64_t sizes[] = {problem.sums.groups, problem.sums.parts, count, problem.hidden};
  MaybeTensor partial = allocate({sizes, 4}, aoti_torch_dtype_float32(), x);
  problem.sums.partial = static_cast<float*>(partial->mutable_data_ptr());
  return partial;
}

// Allocates the gradient of a tensor; leaves it undefined if it is not wanted, or if there is no tensor.
Tensor gradient_of(const MaybeTensor& tensor, bool wanted, bool zero) {
  if (!wanted || !tensor.has_value()) return Tensor();
  Tensor gradient = allocate_like(*tensor);
  if (zero && gradient.numel() > 0) fill_with_zeros(gradient);
  return gradient;
}

void* data_of(Tensor& gradient) {
  return gradient.defined() && gradient.numel() > 0 ? gradient.mutable_data_ptr() : nullptr;
}

// Returns the sum of x and the branch, times the gate if there is one, and the modulated norm of the sum; or, if there
// is no branch, the modulated norm of x. The norm is undefined unless it is `wanted`.
std::tuple<MaybeTensor, Tensor> forward(Tensor x, const char* x_name, MaybeTensor branch, MaybeTensor gate,
                                        MaybeTensor scale, MaybeTensor shift, MaybeTensor weight, MaybeTensor bias,
                                        double eps, bool centered, bool stepwise, bool wanted = true) {
  check_first(x, x_name);
  adaln::Forward problem{};
  problem.type = element_type(x, x_name);
  problem.eps = static_cast<float>(eps);
  problem.centered = centered;
  problem.stepwise = stepwise;
  if (branch.has_value()) check_like(*branch, "branch", x, x_name);
  [[maybe_unused]] const auto device = enter(x);
  Modulations modulation(x, x_name);
  problem.scale = modulation(scale, "scale");
  problem.shift = modulation(shift, "shift");
  check_pair(scale, shift);
  problem.gate = modulation(gate, "gate");
  problem.span = modulation.span();
  problem.weight = parameter_of(weight, "weight", hidden_of(x), x, x_name);
  problem.bias = parameter_of(bias, "bias", hidden_of(x), x, x_name);

  MaybeTensor sum;
  if (branch.has_value()) sum = allocate_like(x);
  Tensor normed = wanted ? allocate_like(x) : Tensor();
  const int64_t elements = x.numel();
  if (elements > 0) {
    problem.hidden = hidden_of(x);
    problem.rows = elements / problem.hidden;
    problem.x = rows_of(x);
    problem.normed = wanted ? normed.mutable_data_ptr() : nullptr;
    if (branch.has_value()) {
      problem.branch = rows_of(*branch);
      problem.sum = sum->mutable_data_ptr();
    }
    launch(problem, x, problem.rows, problem.hidden);
  }
  return {sum, normed};
}

// (n * weight + bias) * (1 + scale) + shift, contiguous, where n is x normalized over the last dimension: as LayerNorm
// does if `centered`, else as RMSNorm does. Computed in float32 and rounded once; or, if `stepwise`, rounded to the
// dtype of x also after n * weight + bias, after 1 + scale, and after their product.
//
// Here and below scale, shift and gate have one row for each row of x, or for each index of its first dimensions. They
// have the dtype of x or float32.
Tensor ada_norm(const Tensor& x, const MaybeTensor& scale, const MaybeTensor& shift, const MaybeTensor& weight,
                const MaybeTensor& bias, double eps, bool centered, bool stepwise) {
  return std::get<1>(forward(x, "x", std::nullopt, std::nullopt, scale, shift, weight, bias, eps, centered, stepwise));
}

// (gate_residual, ada_norm of it), both contiguous. Without a gate, the first is residual + branch.
std::tuple<Tensor, Tensor> gate_residual_ada_norm(const Tensor& residual, const Tensor& branch, const MaybeTensor& gate,
                                                  const MaybeTensor& scale, const MaybeTensor& shift, double eps,
                                                  bool centered, bool stepwise, const MaybeTensor& weight,
                                                  const MaybeTensor& bias) {
  const auto [sum, normed] =
      forward(residual, "residual", branch, gate, scale, shift, weight, bias, eps, centered, stepwise);
  return {*sum, normed};
}

// residual + branch * gate, contiguous; if `stepwise`, the product is rounded, too.
Tensor gate_residual(const Tensor& residual, const Tensor& branch, const Tensor& gate, bool stepwise) {
  const MaybeTensor none;
  return *std::get<0>(forward(residual, "residual", branch, gate, none, none, none, none, 0.0, false, stepwise, false));
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The gradients of ada_norm with respect to x (plus grad_sum, when given), scale, shift, weight and bias. Of
// gate_residual_ada_norm, x is the new residual, and the gradient of x is the residual's; with a gate, branch and gate
// have gradients as well; without one, the branch has the gradient of the residual. A gradient that is not requested,
// or does not exist, is undefined, in Python None. So is that of a shift with a row for each row of x: it equals
// `grad`.
//
// Without `grad` they are those of gate_residual, and x only has its shape and dtype.
Gradients ada_norm_backward(MaybeTensor grad, Tensor x, MaybeTensor scale, MaybeTensor weight, MaybeTensor bias,
                            double eps, bool centered, bool modulation_grad, bool parameter_grad, MaybeTensor grad_sum,
                            MaybeTensor branch, MaybeTensor gate, bool gate_grad) {
  check_first(x, "x");
  adaln::Backward problem{};
  problem.type = element_type(x, "x");
  problem.eps = static_cast<float>(eps);
  problem.centered = centered;
  if (grad.has_value()) check_like(*grad, "grad", x);
  if (grad_sum.has_value()) check_like(*grad_sum, "grad_sum", x);
  if (branch.has_value()) check_like(*branch, "branch", x);
  if (branch.has_value() != gate.has_value()) fail(gate.has_value() ? "branch" : "gate", "must be given, too");
  [[maybe_unused]] const auto device = enter(x);
  Modulations modulation(x, "x");
  problem.scale = modulation(scale, "scale");
  problem.gate = modulation(gate, "gate");
  problem.span = modulation.span();
  problem.weight = parameter_of(weight, "weight", hidden_of(x), x);
  problem.bias = parameter_of(bias, "bias", hidden_of(x), x);

  const bool own = problem.span == 1, zero = x.numel() == 0;
  Tensor grad_x = grad.has_value() ? allocate_like(x) : Tensor();
  Tensor grad_branch = gradient_of(branch, true, false);
  Tensor grad_scale = gradient_of(scale, modulation_grad, zero);
  Tensor grad_shift = gradient_of(scale, modulation_grad && !own, zero);
  Tensor grad_gate = gradient_of(gate, gate_grad, zero);
  Tensor grad_weight = gradient_of(weight, parameter_grad, zero);
  Tensor grad_bias = gradient_of(bias, parameter_grad, zero);
  if (!zero) {
    problem.hidden = hidden_of(x);
    problem.rows = x.numel() / problem.hidden;
    if (grad.has_value()) {
      problem.grad = rows_of(*grad);
      problem.x = rows_of(x);
      problem.grad_x = grad_x.mutable_data_ptr();
    }
    if (grad_sum.has_value()) problem.grad_sum = rows_of(*grad_sum);
    if (branch.has_value()) problem.branch = rows_of(*branch);
    problem.grad_branch = data_of(grad_branch);
    problem.grad_scale = data_of(grad_scale);
    problem.grad_shift = data_of(grad_shift);
    problem.grad_gate = data_of(grad_gate);
    problem.grad_weight = data_of(grad_weight);
    problem.grad_bias = data_of(grad_bias);
    const bool of_parameters = problem.grad_weight != nullptr || problem.grad_bias != nullptr;
    const bool of_modulations = problem.grad_scale != nullptr || problem.grad_gate != nullptr;
    // The CUDA kernels write the gradients of a single row directly, without partial sums.
    const bool summed = (of_parameters && (!KIT_ON_GPU || problem.rows > 1)) || (of_modulations && !own);
    const int count = (grad.has_value() ? 2 : 0) + (problem.grad_gate != nullptr && !own ? 1 : 0);
    [[maybe_unused]] const auto partial = prepare_sums(problem, summed, count, x);
    const int64_t parts = problem.sums.groups * problem.sums.parts;
    launch(problem, x, parts, (problem.rows + parts - 1) / parts * problem.hidden);
#if !KIT_ON_GPU
    if (summed) run_parallel(problem, problem.hidden, parts * count, adaln::reduce);
#endif
  }
  return {grad_x, grad_scale, grad_shift, grad_weight, grad_bias, grad_branch, grad_gate};
}

// The gradients of gate_residual with respect to branch and gate; the latter is undefined, in Python None, unless
// `gate_grad` asks for it.
std::tuple<Tensor, Tensor> gate_residual_backward(const Tensor& grad, const Tensor& branch, const Tensor& gate,
                                                  bool gate_grad) {
  const MaybeTensor none;
  const Gradients all =
      ada_norm_backward(none, branch, none, none, none, 0.0, false, false, false, grad, branch, gate, gate_grad);
  return {std::get<5>(all), std::get<6>(all)};
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  // Callers leave out arguments that have their default value: Torch takes 0.2 us to convert each one it is given.
  ops.def(
      "ada_norm(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, bool centered,"
      " bool stepwise) -> Tensor");
  ops.def("gate_residual(Tensor residual, Tensor branch, Tensor gate, bool stepwise) -> Tensor");
  ops.def(
      "gate_residual_ada_norm(Tensor residual, Tensor branch, Tensor? gate, Tensor? scale, Tensor? shift, float eps,"
      " bool centered, bool stepwise, Tensor? weight=None, Tensor? bias=None) -> (Tensor, Tensor)");
  ops.def(
      "ada_norm_backward(Tensor? grad, Tensor x, Tensor? scale, Tensor? weight, Tensor? bias, float eps,"
      " bool centered, bool modulation_grad, bool parameter_grad, Tensor? grad_sum=None, Tensor? branch=None,"
      " Tensor? gate=None, bool gate_grad=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  ops.def("gate_residual_backward(Tensor grad, Tensor branch, Tensor gate, bool gate_grad) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, KIT_BACKEND, ops) {
  ops.impl("ada_norm", TORCH_BOX(&ada_norm));
  ops.impl("gate_residual", TORCH_BOX(&gate_residual));
  ops.impl("gate_residual_ada_norm", TORCH_BOX(&gate_residual_ada_norm));
  ops.impl("ada_norm_backward", TORCH_BOX(&ada_norm_backward));
  ops.impl("gate_residual_backward", TORCH_BOX(&gate_residual_backward));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
