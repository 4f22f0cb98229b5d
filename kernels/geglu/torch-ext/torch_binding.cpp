// Binds the kernels to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, dtypes and devices of the arguments.
// Writes:   only tensors that it allocates.
// Must not: compute; call anything of Torch newer than 2.10.
#include <algorithm>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "geglu/problem.h"
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "geglu";

namespace {

using namespace kit;

// The sizes of a half of x.
std::vector<int64_t> half_sizes(const Tensor& x) {
  check_first(x, "x");
  const int64_t last = x.size(x.dim() - 1);
  if (last % 2 != 0) {
    fail("x", "must have an even number of elements in its last dimension, not " + to_string(last));
  }
  return sizes_with_last(x, last / 2);
}

template <class Problem>
Problem problem_of(const Tensor& first, const char* argument, int64_t activation) {
  Problem problem{};
  problem.type = element_type(first, argument);
  if (activation < 0 || activation > static_cast<int64_t>(geglu::Activation::silu)) {
    fail("activation", "must be the number of a geglu::Activation, not " + to_string(activation));
  }
  problem.activation = static_cast<geglu::Activation>(activation);
  return problem;
}

constexpr int kRowDims = 1;  // the kernels read evenly strided rows

// Sets gate and up to the halves of the rows of x.
template <class Problem>
void read_halves(Problem& problem, Tensor& x, bool gate_first) {
  problem.hidden = x.size(x.dim() - 1) / 2;
  problem.rows = x.numel() / 2 / problem.hidden;
  problem.gate = problem.up = rows_of(x, kRowDims);
  Rows& second = gate_first ? problem.up : problem.gate;
  second.data = static_cast<const char*>(second.data) + problem.hidden * bytes_of(problem.type);
}

// Reads each tensor as a single row if all of them are contiguous: fewer rows have fewer tails. Otherwise replaces
// tensors as `rows_of` does.
template <class Problem>
void read(Problem& problem, std::initializer_list<std::pair<Rows*, Tensor*>> tensors) {
  const auto contiguous = [](const auto& one) { return one.second->is_contiguous(); };
  if (std::all_of(tensors.begin(), tensors.end(), contiguous)) {
    problem.hidden *= problem.rows;
    problem.rows = 1;
    for (const auto& [rows, tensor] : tensors) rows->data = tensor->const_data_ptr();
  } else {
    for (const auto& [rows, tensor] : tensors) *rows = rows_of(*tensor, kRowDims);
  }
}

// up * activation(gate), contiguous, where gate and up are the halves of the last dimension of x. `activation`: the
// number of a geglu::Activation. `gate_first`: the gate is the first half.
Tensor geglu_halves(Tensor x, int64_t activation, bool gate_first) {
  const std::vector<int64_t> sizes = half_sizes(x);
  auto problem = problem_of<geglu::Forward>(x, "x", activation);
  [[maybe_unused]] const auto device = enter(x);
  Tensor out = allocate(sizes, dtype(x), x);
  const int64_t elements = x.numel() / 2;
  if (elements == 0) return out;
  read_halves(problem, x, gate_first);
  problem.out = out.mutable_data_ptr();
  launch(problem, x, elements, 1);
  return out;
}

// The same of two tensors.
Tensor geglu_pair(Tensor gate, Tensor up, int64_t activation) {
  check_first(gate, "gate");
  auto problem = problem_of<geglu::Forward>(gate, "gate", activation);
  check_like(up, "up", gate, "gate");
  [[maybe_unused]] const auto device = enter(gate);
  Tensor out = allocate_like(gate);
  const int64_t elements = gate.numel();
  if (elements == 0) return out;
  problem.hidden = gate.size(gate.dim() - 1);
  problem.rows = elements / problem.hidden;
  read(problem, {{&problem.gate, &gate}, {&problem.up, &up}});
  problem.out = out.mutable_data_ptr();
  launch(problem, gate, elements, 1);
  return out;
}

// The gradient of geglu_halves with respect to x, contiguous.
Tensor geglu_halves_backward(Tensor grad, Tensor x, int64_t activation, bool gate_first) {
  const std::vector<int64_t> sizes = half_sizes(x);
  auto problem = problem_of<geglu::Backward>(x, "x", activation);
  check_dtype(grad, "grad", x);
  check_shape(grad, "grad", sizes);

  [[maybe_unused]] const auto device = enter(x);
  Tensor grad_x = allocate_like(x);
  const int64_t elements = grad.numel();
  if (elements == 0) return grad_x;
  read_halves(problem, x, gate_first);
  problem.grad = rows_of(grad, kRowDims);
  auto* first = static_cast<char*>(grad_x.mutable_data_ptr());
  char* second = first + problem.hidden * bytes_of(problem.type);
  problem.grad_gate = gate_first ? first : second;
  problem.grad_up = gate_first ? second : first;
  problem.stride = 2 * problem.hidden;
  launch(problem, x, elements, 1);
  return grad_x;
}

// The gradients of geglu_pair with respect to gate and up, both contiguous.
std::tuple<Tensor, Tensor> geglu_pair_backward(Tensor grad, Tensor gate, Tensor up, int64_t activation) {
  check_first(gate, "gate");
  auto problem = problem_of<geglu::Backward>(gate, "gate", activation);
  check_like(up, "up", gate, "gate");
  check_like(grad, "grad", gate, "gate");

  [[maybe_unused]] const auto device = enter(gate);
  Tensor grad_gate = allocate_like(gate), grad_up = allocate_like(gate);
  const int64_t elements = gate.numel();
  if (elements == 0) return {grad_gate, grad_up};
  problem.hidden = gate.size(gate.dim() - 1);
  problem.rows = elements / problem.hidden;
  read(problem, {{&problem.grad, &grad}, {&problem.gate, &gate}, {&problem.up, &up}});
  problem.grad_gate = grad_gate.mutable_data_ptr();
  problem.grad_up = grad_up.mutable_data_ptr();
  problem.stride = problem.hidden;
  launch(problem, gate, elements, 1);
  return {grad_gate, grad_up};
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("geglu_halves(Tensor x, int activation, bool gate_first) -> Tensor");
  ops.def("geglu_pair(Tensor gate, Tensor up, int activation) -> Tensor");
  ops.def("geglu_halves_backward(Tensor grad, Tensor x, int activation, bool gate_first) -> Tensor");
  ops.def("geglu_pair_backward(Tensor grad, Tensor gate, Tensor up, int activation) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, KIT_BACKEND, ops) {
  ops.impl("geglu_halves", TORCH_BOX(&geglu_halves));
  ops.impl("geglu_pair", TORCH_BOX(&geglu_pair));
  ops.impl("geglu_halves_backward", TORCH_BOX(&geglu_halves_backward));
  ops.impl("geglu_pair_backward", TORCH_BOX(&geglu_pair_backward));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
