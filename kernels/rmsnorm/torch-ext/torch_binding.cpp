// Binds the kernels to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, types and devices of the arguments.
// Writes:   tensors that it allocates itself.
// Must not: compute; call anything of Torch newer than 2.10.
#include "torch_binding.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "registration.h"
#include "rmsnorm/problem.h"
#if defined(CUDA_KERNEL)
#include "rmsnorm_cuda/rmsnorm.h"
#else
#include "rmsnorm_cpu/rmsnorm.h"
#endif

namespace {

using rmsnorm::Rows;
using rmsnorm::Type;
using torch::headeronly::IntHeaderOnlyArrayRef;

[[noreturn]] void fail(const char* argument, const std::string& problem) {
  throw std::runtime_error(std::string("rmsnorm: ") + argument + " " + problem);
}

std::string text(IntHeaderOnlyArrayRef sizes) {
  std::string list = "[";
  for (const int64_t size : sizes) list += (list.size() > 1 ? ", " : "") + std::to_string(size);
  return list + "]";
}

int32_t dtype(const Tensor& tensor) {
  int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

int32_t device_type(const Tensor& tensor) {
  int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &code));
  return code;
}

Type element_type(const Tensor& tensor, const char* argument) {
  const int32_t code = dtype(tensor);
  if (code == aoti_torch_dtype_float32()) return Type::float32;
  if (code == aoti_torch_dtype_float16()) return Type::float16;
  if (code == aoti_torch_dtype_bfloat16()) return Type::bfloat16;
  fail(argument, "must be float32, float16 or bfloat16");
}

Tensor empty(IntHeaderOnlyArrayRef sizes, int32_t dtype, const Tensor& beside) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0; stride *= sizes[dim] > 0 ? sizes[dim] : 1) strides[dim] = stride;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  dtype, device_type(beside), beside.get_device_index(), &handle));
  return Tensor(handle);
}

void check_device(const Tensor& tensor, const char* argument, const Tensor& x) {
  if (device_type(tensor) != device_type(x) || tensor.get_device_index() != x.get_device_index()) {
    fail(argument, "must be on the device of x");
  }
}

void check_x(const Tensor& x) {
#if defined(CUDA_KERNEL)
  if (!x.is_cuda()) fail("x", "must be on a CUDA device");
#else
  if (!x.is_cpu()) fail("x", "must be on the CPU");
#endif
  if (x.dim() == 0) fail("x", "must have at least one dimension");
}

void check_like_x(const Tensor& tensor, const char* argument, const Tensor& x) {
  check_device(tensor, argument, x);
  if (dtype(tensor) != dtype(x)) fail(argument, "must have the dtype of x");
  const auto sizes = tensor.sizes(), expected = x.sizes();
  if (!sizes.equals(expected)) fail(argument, "must have shape " + text(expected) + ", not " + text(sizes));
}

// Folds the leading dimensions into as few as their strides allow. Replaces the tensor by a contiguous copy where that
// leaves too many, or too many rows in more than one, or where the elements of a row are not adjacent.
Rows rows_of(Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const size_t last = sizes.size() - 1;
  Rows rows;
  rows.data = tensor.const_data_ptr();
  bool foldable = sizes[last] == 1 || strides[last] == 1;
  int64_t reversed_sizes[rmsnorm::kMaxDims], reversed_strides[rmsnorm::kMaxDims];
  for (size_t dim = last; foldable && dim-- > 0;) {
    if (sizes[dim] == 1) continue;
    const int top = rows.dims - 1;
    if (top >= 0 && strides[dim] == reversed_strides[top] * reversed_sizes[top]) {
      reversed_sizes[top] *= sizes[dim];
    } else if (rows.dims < rmsnorm::kMaxDims) {
      reversed_sizes[rows.dims] = sizes[dim];
      reversed_strides[rows.dims++] = strides[dim];
    } else {
      foldable = false;
    }
  }
  constexpr int64_t kMostRows = int64_t{1} << 31;
  if (!foldable || (rows.dims > 1 && tensor.numel() / sizes[last] >= kMostRows)) {
    tensor = torch::stable::contiguous(tensor);
    return rows_of(tensor);
  }
  for (int dim = 0; dim < rows.dims; ++dim) {
    rows.sizes[dim] = reversed_sizes[rows.dims - 1 - dim];
    rows.strides[dim] = reversed_strides[rows.dims - 1 - dim];
  }
  return rows;
}

// Replaces the weight by a contiguous copy where its elements are not adjacent.
rmsnorm::Weight weight_of(std::optional<Tensor>& weight, const Tensor& x) {
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
  if (!weight->is_contiguous()) weight = torch::stable::contiguous(*weight);
  result.data = weight->const_data_ptr();
  return result;
}

#if defined(CUDA_KERNEL)

void check(int error) {
  if (error == 0) return;
  char* message = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_c10_cuda_check_msg(error, __FILE__, __func__, __LINE__, true, &message));
  const std::string text = message == nullptr ? "error " + std::to_string(error) : message;
  torch_c10_cuda_free_error_msg(message);
  throw std::runtime_error("rmsnorm: " + text);
}

using Device = torch::stable::accelerator::DeviceGuard;

Device enter(const Tensor& x) { return Device(x.get_device_index()); }

void* current_stream(const Tensor& x) {
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return stream;
}

void run(const rmsnorm::Forward& problem, const Tensor& x) { check(rmsnorm::forward(problem, current_stream(x))); }

int64_t partial_sums(const rmsnorm::Backward& problem) {
  int64_t parts;
  check(rmsnorm::partial_sums(problem.rows, problem.hidden, problem.type, &parts));
  return parts;
}

void run(const rmsnorm::Backward& problem, const Tensor& x) { check(rmsnorm::backward(problem, current_stream(x))); }

#else

struct Device {};

Device enter(const Tensor&) { return {}; }

// So many elements are worth a thread.
constexpr int64_t kGrain = 32768;

int64_t grain(int64_t elements) { return elements < kGrain ? kGrain / elements : 1; }

void run(const rmsnorm::Forward& problem, const Tensor&) {
  torch::stable::parallel_for(0, problem.rows, grain(problem.hidden),
                              [&](int64_t begin, int64_t end) { rmsnorm::forward(problem, begin, end); });
}

int64_t partial_sums(const rmsnorm::Backward& problem) { return rmsnorm::partial_sums(problem.rows); }

void run(const rmsnorm::Backward& problem, const Tensor&) {
  torch::stable::parallel_for(0, problem.parts, grain(problem.rows / problem.parts * problem.hidden),
                              [&](int64_t begin, int64_t end) { rmsnorm::backward(problem, begin, end); });
  if (problem.partial == nullptr) return;
  torch::stable::parallel_for(0, problem.hidden, grain(problem.parts), [&](int64_t begin, int64_t end) {
    rmsnorm::reduce_weight_gradient(problem, begin, end);
  });
}

#endif

// The norm of x, or of x + residual, whose sum it then returns beside it.
std::tuple<Tensor, std::optional<Tensor>> forward(Tensor x, std::optional<Tensor> residual,
                                                  std::optional<Tensor> weight, double eps) {
  check_x(x);
  rmsnorm::Forward problem{};
  problem.type = element_type(x, "x");
  problem.eps = static_cast<float>(eps);
  problem.weight = weight_of(weight, x);
  if (residual.has_value()) check_like_x(*residual, "residual", x);

  [[maybe_unused]] const Device device = enter(x);
  Tensor normed = empty(x.sizes(), dtype(x), x);
  std::optional<Tensor> sum;
  if (residual.has_value()) sum = empty(x.sizes(), dtype(x), x);
  const int64_t elements = x.numel();
  if (elements > 0) {
    problem.hidden = x.size(x.dim() - 1);
    problem.rows = elements / problem.hidden;
    problem.x = rows_of(x);
    problem.normed = normed.mutable_data_ptr();
    if (residual.has_value()) {
      problem.residual = rows_of(*residual);
      problem.sum = sum->mutable_data_ptr();
    }
    run(problem, x);
  }
  return {normed, sum};
}

}  // namespace

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps) {
  return std::get<0>(forward(x, std::nullopt, weight, eps));
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
                                        double eps) {
  const auto [normed, sum] = forward(x, residual, weight, eps);
  return {normed, *sum};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const std::optional<Tensor>& weight,
                                             const std::optional<Tensor>& grad_sum, double eps, bool weight_grad) {
  check_x(x);
  rmsnorm::Backward problem{};
  problem.type = element_type(x, "x");
  problem.eps = static_cast<float>(eps);
  // Copies of the handles: `rows_of` puts a contiguous copy in their place where it must.
  Tensor grad_rows = grad, x_rows = x;
  std::optional<Tensor> grad_sum_rows = grad_sum, weight_row = weight;
  problem.weight = weight_of(weight_row, x);
  check_like_x(grad, "grad", x);
  if (grad_sum.has_value()) check_like_x(*grad_sum, "grad_sum", x);
  if (weight_grad && !weight.has_value()) fail("weight", "must be given for its gradient");

  [[maybe_unused]] const Device device = enter(x);
  Tensor grad_x = empty(x.sizes(), dtype(x), x);
  const int64_t hidden = x.size(x.dim() - 1), elements = x.numel();
  const int64_t weight_size = weight_grad ? hidden : 0;
  Tensor grad_weight = empty({&weight_size, 1}, dtype(weight.has_value() ? *weight : x), x);
  if (elements == 0) {
    if (weight_size > 0) TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(grad_weight.get()));
    return {grad_x, grad_weight};
  }
  problem.hidden = hidden;
  problem.rows = elements / hidden;
  problem.grad = rows_of(grad_rows);
  problem.x = rows_of(x_rows);
  if (grad_sum_rows.has_value()) problem.grad_sum = rows_of(*grad_sum_rows);
  problem.grad_x = grad_x.mutable_data_ptr();
  problem.parts = problem.rows;
  std::optional<Tensor> partial;
  if (weight_grad) {
    problem.parts = partial_sums(problem);
    const int64_t sizes[] = {problem.parts, hidden};
    partial = empty({sizes, 2}, aoti_torch_dtype_float32(), x);
    problem.partial = static_cast<float*>(partial->mutable_data_ptr());
    problem.grad_weight = grad_weight.mutable_data_ptr();
  }
  run(problem, x);
  return {grad_x, grad_weight};
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor");
  ops.def("add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor, Tensor)");
  ops.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor? grad_sum, float eps, bool weight_grad)"
      " -> (Tensor, Tensor)");
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#endif
  ops.impl("rms_norm", TORCH_BOX(&rms_norm));
  ops.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  ops.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
