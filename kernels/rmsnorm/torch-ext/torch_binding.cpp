// Binds the kernels to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, types and devices of the arguments.
// Writes:   tensors that it allocates itself.
// Must not: compute; call anything of Torch newer than 2.10.
#include "torch_binding.h"

#include <string>

#include "kit/direct.h"
#include "kit/tensors.h"
#include "registration.h"
#include "rmsnorm/problem.h"
#if defined(CUDA_KERNEL)
#include "rmsnorm_cuda/rmsnorm.h"
#else
#include "rmsnorm_cpu/rmsnorm.h"
#endif

const char* const kit::kProject = "rmsnorm";

namespace {

using namespace kit;
using direct::Borrowed;
using direct::Results;

template <class T>
void check_x(const T& x) {
  check_here(x, "x");
  if (x.dim() == 0) fail("x", "must have at least one dimension");
}

// Replaces the weight by a contiguous copy where its elements are not adjacent.
template <class T>
rmsnorm::Weight weight_of(std::optional<T>& weight, double offset, const T& x) {
  rmsnorm::Weight result;
  if (!weight.has_value()) return result;
  check_device(*weight, "weight", x);
  const int64_t hidden = x.size(x.dim() - 1);
  if (weight->dim() != 1 || weight->size(0) != hidden) {
    fail("weight", "must have shape [" + std::to_string(hidden) + "], not " + text(weight->sizes()));
  }
  result.type = element_type(*weight, "weight");
  if (result.type != Type::float32 && dtype(*weight) != dtype(x)) {
    fail("weight", "must have the dtype of x, or float32");
  }
  if (!weight->is_contiguous()) weight = contiguous_copy(*weight);
  result.data = weight->const_data_ptr();
  result.offset = static_cast<float>(offset);
  return result;
}

#if defined(CUDA_KERNEL)

template <class T>
void run(const rmsnorm::Forward& problem, const T& x) {
  [[maybe_unused]] const auto unlocked = running(x);
  check(rmsnorm::forward(problem, current_stream(x)));
}

int64_t partial_sums(const rmsnorm::Backward& problem) {
  int64_t parts;
  check(rmsnorm::partial_sums(problem.rows, problem.hidden, problem.type, &parts));
  return parts;
}

template <class T>
void run(const rmsnorm::Backward& problem, const T& x) {
  [[maybe_unused]] const auto unlocked = running(x);
  check(rmsnorm::backward(problem, current_stream(x)));
}

#else

template <class T>
void run(const rmsnorm::Forward& problem, const T& x) {
  [[maybe_unused]] const auto unlocked = running(x);
  torch::stable::parallel_for(0, problem.rows, grain(problem.hidden),
                              [&](int64_t begin, int64_t end) { rmsnorm::forward(problem, begin, end); });
}

int64_t partial_sums(const rmsnorm::Backward& problem) { return rmsnorm::partial_sums(problem.rows); }

template <class T>
void run(const rmsnorm::Backward& problem, const T& x) {
  [[maybe_unused]] const auto unlocked = running(x);
  torch::stable::parallel_for(0, problem.parts, grain(problem.rows / problem.parts * problem.hidden),
                              [&](int64_t begin, int64_t end) { rmsnorm::backward(problem, begin, end); });
  if (problem.partial == nullptr) return;
  torch::stable::parallel_for(0, problem.hidden, grain(problem.parts), [&](int64_t begin, int64_t end) {
    rmsnorm::reduce_weight_gradient(problem, begin, end);
  });
}

#endif

// What there is to do, but for where the rows lie, which is left to `run_over`.
template <class T>
rmsnorm::Forward checked(const T& x, std::optional<T>& weight, double eps, double offset, bool rounded_before_weight) {
  check_x(x);
  rmsnorm::Forward problem{};
  problem.type = element_type(x, "x");
  problem.eps = static_cast<float>(eps);
  problem.weight = weight_of(weight, offset, x);
  problem.rounded_before_weight = rounded_before_weight;
  problem.normed_type = rounded_before_weight && problem.weight.data != nullptr ? problem.weight.type : problem.type;
  return problem;
}

template <class T>
void run_over(rmsnorm::Forward& problem, T& x, std::optional<T>& residual, int64_t elements) {
  problem.hidden = x.size(x.dim() - 1);
  problem.rows = elements / problem.hidden;
  problem.x = rows_of(x);
  if (residual.has_value()) problem.residual = rows_of(*residual);
  run(problem, x);
}

// The norm of x, or of x + residual, whose sum it then returns beside it, in tensors that `make` gives.
template <class T, class Make>
std::tuple<T, std::optional<T>> forward(Make& make, T x, std::optional<T> residual, std::optional<T> weight, double eps,
                                        double offset, bool rounded_before_weight) {
  rmsnorm::Forward problem = checked(x, weight, eps, offset, rounded_before_weight);
  if (residual.has_value()) check_like(*residual, "residual", x);

  [[maybe_unused]] const auto device = make.enter(x);
  T normed = make(x.sizes(), problem.normed_type == problem.type ? dtype(x) : aoti_torch_dtype_float32(), x);
  std::optional<T> sum;
  if (residual.has_value()) sum = make(x.sizes(), dtype(x), x);
  if (const int64_t elements = x.numel(); elements > 0) {
    problem.normed = normed.mutable_data_ptr();
    if (sum.has_value()) problem.sum = sum->mutable_data_ptr();
    run_over(problem, x, residual, elements);
  }
  return {normed, sum};
}

// Throws unless the rows of a tensor can be written where they are.
template <class T>
void check_writable(const T& tensor, const char* argument) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] > 1 && strides[dim] == 0) fail(argument, "must not be expanded, to be changed in place");
  }
  T rows = tensor;
  if (tensor.numel() > 0 && rows_of(rows).data != tensor.const_data_ptr()) {
    fail(argument, "must have adjacent elements in its last dimension, to be changed in place");
  }
}

template <class T>
void forward_in_place(T x, std::optional<T> residual, std::optional<T> weight, double eps, double offset,
                      bool rounded_before_weight) {
  rmsnorm::Forward problem = checked(x, weight, eps, offset, rounded_before_weight);
  if (problem.normed_type != problem.type) {
    fail("weight", "must have the dtype of x, to be multiplied after the rounding in place");
  }
  check_like(*residual, "residual", x);
  check_writable(x, "x");
  check_writable(*residual, "residual");
  [[maybe_unused]] const auto device = enter(x);
  if (const int64_t elements = x.numel(); elements > 0) run_over(problem, x, residual, elements);
}

// The gradients of x and weight, in tensors that `make` gives.
template <class T, class Make>
std::tuple<T, T> backward(Make& make, T grad, T x, std::optional<T> weight, std::optional<T> grad_sum, double eps,
                          double offset, bool weight_grad) {
  check_x(x);
  rmsnorm::Backward problem{};
  problem.type = element_type(x, "x");
  problem.eps = static_cast<float>(eps);
  problem.weight = weight_of(weight, offset, x);
  check_like(grad, "grad", x);
  if (grad_sum.has_value()) check_like(*grad_sum, "grad_sum", x);
  if (weight_grad && !weight.has_value()) fail("weight", "must be given for its gradient");

  [[maybe_unused]] const auto device = make.enter(x);
  T grad_x = make(x.sizes(), dtype(x), x);
  const int64_t hidden = x.size(x.dim() - 1), elements = x.numel();
  const int32_t weight_type = dtype(weight.has_value() ? *weight : x);
  T grad_weight = weight_grad ? make({&hidden, 1}, weight_type, x) : make.nothing(weight_type, x);
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
  problem.parts = partial_sums(problem);
  std::optional<T> partial;
  if (weight_grad) {
    const int64_t sizes[] = {problem.parts, hidden};
    partial = make({sizes, 2}, aoti_torch_dtype_float32(), x);
    problem.partial = static_cast<float*>(partial->mutable_data_ptr());
    problem.grad_weight = grad_weight.mutable_data_ptr();
  }
  run(problem, x);
  return {grad_x, grad_weight};
}

// What Python calls.

Borrowed rms_norm_directly(Results& results, Borrowed x, std::optional<Borrowed> weight, double eps, double offset,
                           bool rounded_before_weight) {
  return std::get<0>(forward<Borrowed>(results, x, {}, weight, eps, offset, rounded_before_weight));
}

std::tuple<Borrowed, Borrowed> add_rms_norm_directly(Results& results, Borrowed x, Borrowed residual,
                                                     std::optional<Borrowed> weight, double eps, double offset,
                                                     bool rounded_before_weight) {
  const auto [normed, sum] = forward(results, x, std::optional(residual), weight, eps, offset, rounded_before_weight);
  return {normed, *sum};
}

std::tuple<Borrowed, Borrowed> rms_norm_backward_directly(Results& results, Borrowed grad, Borrowed x,
                                                          std::optional<Borrowed> weight,
                                                          std::optional<Borrowed> grad_sum, double eps, double offset,
                                                          bool weight_grad) {
  return backward(results, grad, x, weight, grad_sum, eps, offset, weight_grad);
}

void add_rms_norm_in_place_directly(Borrowed x, Borrowed residual, std::optional<Borrowed> weight, double eps,
                                    double offset, bool rounded_before_weight) {
  forward_in_place(x, std::optional(residual), weight, eps, offset, rounded_before_weight);
}

}  // namespace

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps, double offset,
                bool rounded_before_weight) {
  return std::get<0>(forward(empty, x, {}, weight, eps, offset, rounded_before_weight));
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
                                        double eps, double offset, bool rounded_before_weight) {
  const auto [normed, sum] = forward(empty, x, std::optional(residual), weight, eps, offset, rounded_before_weight);
  return {normed, *sum};
}

void add_rms_norm_(Tensor x, const Tensor& residual, std::optional<Tensor> weight, double eps, double offset,
                   bool rounded_before_weight) {
  forward_in_place(x, std::optional(residual), weight, eps, offset, rounded_before_weight);
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const std::optional<Tensor>& weight,
                                             const std::optional<Tensor>& grad_sum, double eps, double offset,
                                             bool weight_grad) {
  return backward(empty, grad, x, weight, grad_sum, eps, offset, weight_grad);
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rms_norm(Tensor x, Tensor? weight, float eps, float offset, bool rounded_before_weight) -> Tensor");
  ops.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, bool rounded_before_weight)"
      " -> (Tensor, Tensor)");
  ops.def(
      "add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float eps, float offset,"
      " bool rounded_before_weight) -> ()");
  ops.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor? grad_sum, float eps, float offset,"
      " bool weight_grad) -> (Tensor, Tensor)");
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#endif
  ops.impl("rms_norm", TORCH_BOX(&rms_norm));
  ops.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  ops.impl("add_rms_norm_", TORCH_BOX(&add_rms_norm_));
  ops.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

KIT_DIRECT_MODULE(TORCH_EXTENSION_NAME, KIT_DIRECT("rms_norm", rms_norm_directly),
                  KIT_DIRECT("add_rms_norm", add_rms_norm_directly),
                  KIT_CHANGING("add_rms_norm_", add_rms_norm_in_place_directly),
                  KIT_DIRECT("rms_norm_backward", rms_norm_backward_directly))
