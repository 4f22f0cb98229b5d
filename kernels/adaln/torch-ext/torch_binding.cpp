// Binds the kernels to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, types and devices of the arguments.
// Writes:   tensors that it allocates itself.
// Must not: compute; call anything of Torch newer than 2.10.
#include "torch_binding.h"

#include <string>

#include "adaln/problem.h"
#include "kit/direct.h"
#include "kit/tensors.h"
#include "registration.h"
#if defined(CUDA_KERNEL)
#include "adaln_cuda/adaln.h"
#else
#include "adaln_cpu/adaln.h"
#endif

const char* const kit::kProject = "adaln";

namespace {

using namespace kit;
using direct::Borrowed;
using direct::Results;

template <class T>
void check_x(const T& x, const char* name = "x") {
  check_here(x, name);
  if (x.dim() == 0) fail(name, "must have at least one dimension");
}

template <class T>
int64_t hidden_of(const T& x) {
  return x.size(x.dim() - 1);
}

template <class T>
Type type_beside(const T& tensor, const char* argument, const T& x, const char* x_name) {
  const Type type = element_type(tensor, argument);
  if (type != Type::float32 && dtype(tensor) != dtype(x)) {
    fail(argument, std::string("must have the dtype of ") + x_name + ", or float32");
  }
  return type;
}

// Replaces the parameter by a contiguous copy where its elements are not adjacent.
template <class T>
adaln::Parameter parameter_of(std::optional<T>& parameter, const char* argument, const T& x, const char* x_name) {
  adaln::Parameter result;
  if (!parameter.has_value()) return result;
  check_device(*parameter, argument, x, x_name);
  if (parameter->dim() != 1 || parameter->size(0) != hidden_of(x)) {
    fail(argument, "must have shape [" + std::to_string(hidden_of(x)) + "], not " + text(parameter->sizes()));
  }
  result.type = type_beside(*parameter, argument, x, x_name);
  if (!parameter->is_contiguous()) parameter = contiguous_copy(*parameter);
  result.data = parameter->const_data_ptr();
  return result;
}

// Scale, shift and gate of one call, which have a row for each span of rows. All checks come before anything is read.
template <class T>
class Modulations {
 public:
  Modulations(const T& x, const char* x_name) : x_(x), x_name_(x_name) {
    for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) span_ *= x.size(dim);
  }

  adaln::Modulation operator()(std::optional<T>& tensor, const char* argument) {
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

  // How many rows of x share one of these; all of them when there are none.
  int64_t span() const { return span_; }

 private:
  const T& x_;
  const char* x_name_;
  const char* first_ = nullptr;
  int64_t span_ = 1;
};

// Scale and shift come together, in one dtype.
template <class T>
void check_pair(const std::optional<T>& scale, const std::optional<T>& shift) {
  if (scale.has_value() != shift.has_value()) fail(scale.has_value() ? "shift" : "scale", "must be given, too");
  if (scale.has_value() && dtype(*scale) != dtype(*shift)) fail("shift", "must have the dtype of scale");
}

#if defined(CUDA_KERNEL)

template <class T>
void run(const adaln::Gate& problem, const T& x) {
  [[maybe_unused]] const auto unlocked = running(x);
  check(adaln::gate(problem, current_stream(x)));
}
template <class T>
void run(const adaln::Forward& problem, const T& x) {
  [[maybe_unused]] const auto unlocked = running(x);
  check(adaln::forward(problem, current_stream(x)));
}

template <class T>
void run(const adaln::Backward& problem, const T& x) {
  [[maybe_unused]] const auto unlocked = running(x);
  check(adaln::backward(problem, current_stream(x)));
}

template <class T>
void run(const adaln::GateBackward& problem, const T& x) {
  [[maybe_unused]] const auto unlocked = running(x);
  check(adaln::gate_backward(problem, current_stream(x)));
}

constexpr bool kOneRowIsSummed = false;  // its gradients are written at once

template <class Problem>
int64_t partial_sums(const Problem& problem) {
  int64_t parts;
  check(adaln::partial_sums(problem, &parts));
  return parts;
}

#else

template <class T>
void run(const adaln::Gate& problem, const T& x) {
  [[maybe_unused]] const auto unlocked = running(x);
  torch::stable::parallel_for(0, problem.rows, grain(problem.hidden),
                              [&](int64_t begin, int64_t end) { adaln::gate(problem, begin, end); });
}

template <class T>
void run(const adaln::Forward& problem, const T& x) {
  [[maybe_unused]] const auto unlocked = running(x);
  torch::stable::parallel_for(0, problem.rows, grain(problem.hidden),
                              [&](int64_t begin, int64_t end) { adaln::forward(problem, begin, end); });
}

constexpr bool kOneRowIsSummed = true;

template <class Problem>
int64_t partial_sums(const Problem& problem) {
  return adaln::partial_sums(problem.sums.groups, problem.rows);
}

template <class Problem, class Function, class T>
void run_parts(const Problem& problem, Function rows, const T& x) {
  [[maybe_unused]] const auto unlocked = running(x);
  const int64_t parts = problem.sums.groups * problem.sums.parts;
  torch::stable::parallel_for(0, parts, grain((problem.rows + parts - 1) / parts * problem.hidden),
                              [&](int64_t begin, int64_t end) { rows(problem, begin, end); });
  if (problem.sums.partial == nullptr) return;
  torch::stable::parallel_for(0, problem.hidden, grain(parts * problem.sums.count),
                              [&](int64_t begin, int64_t end) { adaln::reduce(problem, begin, end); });
}

template <class T>
void run(const adaln::Backward& problem, const T& x) {
  run_parts(problem, adaln::backward, x);
}

template <class T>
void run(const adaln::GateBackward& problem, const T& x) {
  run_parts(problem, adaln::gate_backward, x);
}

#endif

// Divides the rows of a problem into parts, and allocates their sums where they are asked for.
template <class Problem, class T, class Make>
std::optional<T> prepare_sums(Make& make, Problem& problem, bool asked_for, int count, const T& x) {
  problem.sums.groups = problem.span == 1 ? 1 : problem.rows / problem.span;
  problem.sums.parts = partial_sums(problem);
  if (!asked_for) return std::nullopt;
  problem.sums.count = count;
  const int64_t sizes[] = {problem.sums.groups, problem.sums.parts, count, problem.hidden};
  std::optional<T> partial = make({sizes, 4}, aoti_torch_dtype_float32(), x);
  problem.sums.partial = static_cast<float*>(partial->mutable_data_ptr());
  return partial;
}

// A tensor for the gradient of another, where it is asked for.
template <class T, class Make>
T gradient_of(Make& make, const std::optional<T>& tensor, bool asked_for, bool zero, const T& x) {
  if (!asked_for || !tensor.has_value()) return make.nothing(dtype(tensor.has_value() ? *tensor : x), x);
  T gradient = make(tensor->sizes(), dtype(*tensor), x);
  if (zero && gradient.numel() > 0) fill_with_zeros(gradient);
  return gradient;
}

template <class T>
void* data_of(T& gradient) {
  return gradient.numel() > 0 ? gradient.mutable_data_ptr() : nullptr;
}

// The norm of x, or, with a branch, of x + branch * gate, which it then returns before it; in tensors that `make`
// gives.
template <class T, class Make>
std::tuple<std::optional<T>, T> forward(Make& make, T x, const char* x_name, std::optional<T> branch,
                                        std::optional<T> gate, std::optional<T> scale, std::optional<T> shift,
                                        std::optional<T> weight, std::optional<T> bias, double eps, bool centered,
                                        bool stepwise) {
  check_x(x, x_name);
  adaln::Forward problem{};
  problem.type = element_type(x, x_name);
  problem.eps = static_cast<float>(eps);
  problem.centered = centered;
  problem.stepwise = stepwise;
  if (branch.has_value()) check_like(*branch, "branch", x, x_name);
  [[maybe_unused]] const auto device = make.enter(x);
  Modulations modulation(x, x_name);
  problem.scale = modulation(scale, "scale");
  problem.shift = modulation(shift, "shift");
  check_pair(scale, shift);
  problem.gate = modulation(gate, "gate");
  problem.span = modulation.span();
  problem.weight = parameter_of(weight, "weight", x, x_name);
  problem.bias = parameter_of(bias, "bias", x, x_name);

  std::optional<T> sum;
  if (branch.has_value()) sum = make(x.sizes(), dtype(x), x);
  T normed = make(x.sizes(), dtype(x), x);
  const int64_t elements = x.numel();
  if (elements > 0) {
    problem.hidden = hidden_of(x);
    problem.rows = elements / problem.hidden;
    problem.x = rows_of(x);
    problem.normed = normed.mutable_data_ptr();
    if (branch.has_value()) {
      problem.branch = rows_of(*branch);
      problem.sum = sum->mutable_data_ptr();
    }
    run(problem, x);
  }
  return {sum, normed};
}

// residual + branch * gate, in a tensor that `make` gives.
template <class T, class Make>
T gated(Make& make, T residual, T branch, std::optional<T> gate, bool stepwise) {
  check_x(residual, "residual");
  adaln::Gate problem{};
  problem.type = element_type(residual, "residual");
  problem.stepwise = stepwise;
  check_like(branch, "branch", residual, "residual");
  [[maybe_unused]] const auto device = make.enter(residual);
  Modulations modulation(residual, "residual");
  problem.gate = modulation(gate, "gate");
  problem.span = modulation.span();
  T sum = make(residual.sizes(), dtype(residual), residual);
  const int64_t elements = residual.numel();
  if (elements == 0) return sum;
  problem.hidden = hidden_of(residual);
  problem.rows = elements / problem.hidden;
  problem.residual = rows_of(residual);
  problem.branch = rows_of(branch);
  problem.sum = sum.mutable_data_ptr();
  run(problem, residual);
  return sum;
}

template <class T>
using Gradients = std::tuple<T, T, T, T, T, T, T>;

// The gradients of x, scale, shift, weight, bias, branch and gate, in tensors that `make` gives.
template <class T, class Make>
Gradients<T> backward(Make& make, T grad, T x, std::optional<T> scale, std::optional<T> weight, std::optional<T> bias,
                      std::optional<T> grad_sum, std::optional<T> branch, std::optional<T> gate, double eps,
                      bool centered, bool modulation_grad, bool parameter_grad, bool gate_grad) {
  check_x(x);
  adaln::Backward problem{};
  problem.type = element_type(x, "x");
  problem.eps = static_cast<float>(eps);
  problem.centered = centered;
  check_like(grad, "grad", x);
  if (grad_sum.has_value()) check_like(*grad_sum, "grad_sum", x);
  if (branch.has_value()) check_like(*branch, "branch", x);
  if (branch.has_value() != gate.has_value()) fail(gate.has_value() ? "branch" : "gate", "must be given, too");
  if (grad_sum.has_value() && !gate.has_value()) fail("grad_sum", "must come with a gate");
  [[maybe_unused]] const auto device = make.enter(x);
  Modulations modulation(x, "x");
  problem.scale = modulation(scale, "scale");
  problem.gate = modulation(gate, "gate");
  problem.span = modulation.span();
  problem.weight = parameter_of(weight, "weight", x, "x");
  problem.bias = parameter_of(bias, "bias", x, "x");

  const bool own = problem.span == 1, zero = x.numel() == 0;
  T grad_x = make(x.sizes(), dtype(x), x);
  T grad_branch = gradient_of(make, branch, true, false, x);
  T grad_scale = gradient_of(make, scale, modulation_grad, zero, x);
  T grad_shift = gradient_of(make, scale, modulation_grad && !own, zero, x);
  T grad_gate = gradient_of(make, gate, gate_grad, zero, x);
  T grad_weight = gradient_of(make, weight, parameter_grad, zero, x);
  T grad_bias = gradient_of(make, bias, parameter_grad, zero, x);
  if (x.numel() > 0) {
    problem.hidden = hidden_of(x);
    problem.rows = x.numel() / problem.hidden;
    problem.grad = rows_of(grad);
    problem.x = rows_of(x);
    if (grad_sum.has_value()) problem.grad_sum = rows_of(*grad_sum);
    if (branch.has_value()) problem.branch = rows_of(*branch);
    problem.grad_x = grad_x.mutable_data_ptr();
    problem.grad_branch = data_of(grad_branch);
    problem.grad_scale = data_of(grad_scale);
    problem.grad_shift = data_of(grad_shift);
    problem.grad_gate = data_of(grad_gate);
    problem.grad_weight = data_of(grad_weight);
    problem.grad_bias = data_of(grad_bias);
    const bool of_parameters = problem.grad_weight != nullptr || problem.grad_bias != nullptr;
    const bool of_modulations = problem.grad_scale != nullptr || problem.grad_gate != nullptr;
    const bool asked_for = (of_parameters && (kOneRowIsSummed || problem.rows > 1)) || (of_modulations && !own);
    const int count = problem.grad_gate != nullptr && !own ? 3 : 2;
    [[maybe_unused]] const auto partial = prepare_sums(make, problem, asked_for, count, x);
    run(problem, x);
  }
  return {grad_x, grad_scale, grad_shift, grad_weight, grad_bias, grad_branch, grad_gate};
}

// The gradients of branch and gate, in tensors that `make` gives.
template <class T, class Make>
std::tuple<T, T> gated_backward(Make& make, T grad, T branch, std::optional<T> gate, bool gate_grad) {
  check_x(branch, "branch");
  adaln::GateBackward problem{};
  problem.type = element_type(branch, "branch");
  check_like(grad, "grad", branch, "branch");
  [[maybe_unused]] const auto device = make.enter(branch);
  Modulations modulation(branch, "branch");
  problem.gate = modulation(gate, "gate");
  problem.span = modulation.span();
  T grad_branch = make(branch.sizes(), dtype(branch), branch);
  T grad_gate = gradient_of(make, gate, gate_grad, branch.numel() == 0, branch);
  if (branch.numel() > 0) {
    problem.hidden = hidden_of(branch);
    problem.rows = branch.numel() / problem.hidden;
    problem.grad = rows_of(grad);
    problem.branch = rows_of(branch);
    problem.grad_branch = grad_branch.mutable_data_ptr();
    problem.grad_gate = data_of(grad_gate);
    [[maybe_unused]] const auto partial = prepare_sums(make, problem, gate_grad && problem.span > 1, 1, branch);
    run(problem, branch);
  }
  return {grad_branch, grad_gate};
}

// What Python calls.

using Maybe = std::optional<Borrowed>;

Borrowed ada_norm_directly(Results& results, Borrowed x, Maybe scale, Maybe shift, Maybe weight, Maybe bias, double eps,
                           bool centered, bool stepwise) {
  return std::get<1>(forward<Borrowed>(results, x, "x", {}, {}, scale, shift, weight, bias, eps, centered, stepwise));
}

Borrowed gate_residual_directly(Results& results, Borrowed residual, Borrowed branch, Borrowed gate, bool stepwise) {
  return gated(results, residual, branch, Maybe(gate), stepwise);
}

std::tuple<Borrowed, Borrowed> gate_residual_ada_norm_directly(Results& results, Borrowed residual, Borrowed branch,
                                                               Borrowed gate, Maybe scale, Maybe shift, Maybe weight,
                                                               Maybe bias, double eps, bool centered, bool stepwise) {
  const auto [sum, normed] = forward(results, residual, "residual", Maybe(branch), Maybe(gate), scale, shift, weight,
                                     bias, eps, centered, stepwise);
  return {*sum, normed};
}

Gradients<Borrowed> ada_norm_backward_directly(Results& results, Borrowed grad, Borrowed x, Maybe scale, Maybe weight,
                                               Maybe bias, Maybe grad_sum, Maybe branch, Maybe gate, double eps,
                                               bool centered, bool modulation_grad, bool parameter_grad,
                                               bool gate_grad) {
  return backward(results, grad, x, scale, weight, bias, grad_sum, branch, gate, eps, centered, modulation_grad,
                  parameter_grad, gate_grad);
}

std::tuple<Borrowed, Borrowed> gate_residual_backward_directly(Results& results, Borrowed grad, Borrowed branch,
                                                               Borrowed gate, bool gate_grad) {
  return gated_backward(results, grad, branch, Maybe(gate), gate_grad);
}

}  // namespace

Tensor ada_norm(const Tensor& x, const MaybeTensor& scale, const MaybeTensor& shift, const MaybeTensor& weight,
                const MaybeTensor& bias, double eps, bool centered, bool stepwise) {
  return std::get<1>(forward(empty, x, "x", {}, {}, scale, shift, weight, bias, eps, centered, stepwise));
}

std::tuple<Tensor, Tensor> gate_residual_ada_norm(const Tensor& residual, const Tensor& branch, const Tensor& gate,
                                                  const MaybeTensor& scale, const MaybeTensor& shift,
                                                  const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                                                  bool centered, bool stepwise) {
  const auto [sum, normed] = forward(empty, residual, "residual", std::optional(branch), std::optional(gate), scale,
                                     shift, weight, bias, eps, centered, stepwise);
  return {*sum, normed};
}

Tensor gate_residual(const Tensor& residual, const Tensor& branch, const Tensor& gate, bool stepwise) {
  return gated(empty, residual, branch, std::optional(gate), stepwise);
}

Gradients<Tensor> ada_norm_backward(const Tensor& grad, const Tensor& x, const MaybeTensor& scale,
                                    const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& grad_sum,
                                    const MaybeTensor& branch, const MaybeTensor& gate, double eps, bool centered,
                                    bool modulation_grad, bool parameter_grad, bool gate_grad) {
  return backward(empty, grad, x, scale, weight, bias, grad_sum, branch, gate, eps, centered, modulation_grad,
                  parameter_grad, gate_grad);
}

std::tuple<Tensor, Tensor> gate_residual_backward(const Tensor& grad, const Tensor& branch, const Tensor& gate,
                                                  bool gate_grad) {
  return gated_backward(empty, grad, branch, MaybeTensor(gate), gate_grad);
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "ada_norm(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, bool centered,"
      " bool stepwise) -> Tensor");
  ops.def("gate_residual(Tensor residual, Tensor branch, Tensor gate, bool stepwise) -> Tensor");
  ops.def(
      "gate_residual_ada_norm(Tensor residual, Tensor branch, Tensor gate, Tensor? scale, Tensor? shift,"
      " Tensor? weight, Tensor? bias, float eps, bool centered, bool stepwise) -> (Tensor, Tensor)");
  ops.def(
      "ada_norm_backward(Tensor grad, Tensor x, Tensor? scale, Tensor? weight, Tensor? bias, Tensor? grad_sum,"
      " Tensor? branch, Tensor? gate, float eps, bool centered, bool modulation_grad, bool parameter_grad,"
      " bool gate_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  ops.def("gate_residual_backward(Tensor grad, Tensor branch, Tensor gate, bool gate_grad) -> (Tensor, Tensor)");
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#endif
  ops.impl("ada_norm", TORCH_BOX(&ada_norm));
  ops.impl("gate_residual", TORCH_BOX(&gate_residual));
  ops.impl("gate_residual_ada_norm", TORCH_BOX(&gate_residual_ada_norm));
  ops.impl("ada_norm_backward", TORCH_BOX(&ada_norm_backward));
  ops.impl("gate_residual_backward", TORCH_BOX(&gate_residual_backward));
}

KIT_DIRECT_MODULE(TORCH_EXTENSION_NAME, KIT_DIRECT("ada_norm", ada_norm_directly),
                  KIT_DIRECT("gate_residual", gate_residual_directly),
                  KIT_DIRECT("gate_residual_ada_norm", gate_residual_ada_norm_directly),
                  KIT_DIRECT("ada_norm_backward", ada_norm_backward_directly),
                  KIT_DIRECT("gate_residual_backward", gate_residual_backward_directly))
