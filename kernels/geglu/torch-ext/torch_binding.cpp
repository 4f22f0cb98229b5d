// Binds the kernels to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, types and devices of the arguments.
// Writes:   tensors that it allocates itself.
// Must not: compute; call anything of Torch newer than 2.10.
#include "torch_binding.h"

#include <algorithm>
#include <string>
#include <utility>

#include "geglu/problem.h"
#include "kit/direct.h"
#include "kit/tensors.h"
#include "registration.h"
#if defined(CUDA_KERNEL)
#include "geglu_cuda/geglu.h"
#else
#include "geglu_cpu/geglu.h"
#endif

const char* const kit::kProject = "geglu";

namespace {

using namespace kit;
using direct::Borrowed;
using direct::Results;

template <class T>
void check_first(const T& tensor, const char* argument) {
  check_here(tensor, argument);
  if (tensor.dim() == 0) fail(argument, "must have at least one dimension");
}

// The sizes of a half of x.
class HalfSizes {
 public:
  template <class T>
  explicit HalfSizes(const T& x) {
    check_first(x, "x");
    const auto whole = x.sizes();
    const int64_t last = whole[whole.size() - 1];
    if (last % 2 != 0) {
      fail("x", "must have an even number of elements in its last dimension, not " + std::to_string(last));
    }
    if (whole.size() > kMostDims) fail("x", "must have at most " + std::to_string(kMostDims) + " dimensions");
    std::copy(whole.begin(), whole.end(), sizes_);
    dims_ = whole.size();
    sizes_[dims_ - 1] = last / 2;
  }

  operator IntHeaderOnlyArrayRef() const { return {sizes_, dims_}; }
  int64_t hidden() const { return sizes_[dims_ - 1]; }

 private:
  int64_t sizes_[kMostDims];
  size_t dims_;
};

int64_t bytes_of(Type type) { return type == Type::float32 ? 4 : 2; }

template <class Problem, class T>
Problem problem_of(const T& first, const char* argument, bool tanh) {
  Problem problem{};
  problem.type = element_type(first, argument);
  problem.approximate = tanh ? geglu::Approximate::tanh : geglu::Approximate::none;
  return problem;
}

// The rows of x, as those of gate and up.
template <class Problem, class T>
void read_halves(Problem& problem, T& x, bool gate_first) {
  problem.gate = problem.up = rows_of(x);
  Rows& second = gate_first ? problem.up : problem.gate;
  second.data = static_cast<const char*>(second.data) + problem.hidden * bytes_of(problem.type);
}

// Reads each tensor as one row, if all of them are contiguous: the fewer rows, the more often do they suit vectors.
// Otherwise replaces them as `rows_of` does.
template <class T, class Problem>
void read(Problem& problem, std::initializer_list<std::pair<Rows*, T*>> tensors) {
  const auto contiguous = [](const auto& one) { return one.second->is_contiguous(); };
  if (std::all_of(tensors.begin(), tensors.end(), contiguous)) {
    problem.hidden *= problem.rows;
    problem.rows = 1;
    for (const auto& [rows, tensor] : tensors) rows->data = tensor->const_data_ptr();
  } else {
    for (const auto& [rows, tensor] : tensors) *rows = rows_of(*tensor);
  }
}

#if defined(CUDA_KERNEL)

template <class Problem, class T>
void run(int (*kernel)(const Problem&, void*), const Problem& problem, const T& beside) {
  [[maybe_unused]] const auto unlocked = running(beside);
  check(kernel(problem, current_stream(beside)));
}

#else

template <class Problem, class T>
void run(void (*kernel)(const Problem&, int64_t, int64_t), const Problem& problem, const T& x) {
  [[maybe_unused]] const auto unlocked = running(x);
  torch::stable::parallel_for(0, problem.rows * problem.hidden, kGrain,
                              [&](int64_t begin, int64_t end) { kernel(problem, begin, end); });
}

#endif

// Into a tensor that `make` gives.
template <class T, class Make>
T forward_halves(Make& make, T x, bool tanh, bool gate_first) {
  const HalfSizes sizes(x);
  auto problem = problem_of<geglu::Forward>(x, "x", tanh);

  [[maybe_unused]] const auto device = make.enter(x);
  T out = make(sizes, dtype(x), x);
  const int64_t elements = x.numel() / 2;
  if (elements == 0) return out;
  problem.hidden = sizes.hidden();
  problem.rows = elements / problem.hidden;
  read_halves(problem, x, gate_first);
  problem.out = out.mutable_data_ptr();
  run(geglu::forward, problem, x);
  return out;
}

template <class T, class Make>
T forward_pair(Make& make, T gate, T up, bool tanh) {
  check_first(gate, "gate");
  auto problem = problem_of<geglu::Forward>(gate, "gate", tanh);
  check_like(up, "up", gate, "gate");

  [[maybe_unused]] const auto device = make.enter(gate);
  const auto sizes = gate.sizes();
  T out = make(sizes, dtype(gate), gate);
  const int64_t elements = gate.numel();
  if (elements == 0) return out;
  problem.hidden = sizes[sizes.size() - 1];
  problem.rows = elements / problem.hidden;
  read<T>(problem, {{&problem.gate, &gate}, {&problem.up, &up}});
  problem.out = out.mutable_data_ptr();
  run(geglu::forward, problem, gate);
  return out;
}

template <class T, class Make>
T backward_halves(Make& make, T grad, T x, bool tanh, bool gate_first) {
  const HalfSizes sizes(x);
  auto problem = problem_of<geglu::Backward>(x, "x", tanh);
  check_device(grad, "grad", x);
  if (dtype(grad) != dtype(x)) fail("grad", "must have the dtype of x");
  const IntHeaderOnlyArrayRef expected = sizes;
  if (!grad.sizes().equals(expected)) fail("grad", "must have shape " + text(expected) + ", not " + text(grad.sizes()));

  [[maybe_unused]] const auto device = make.enter(x);
  T grad_x = make(x.sizes(), dtype(x), x);
  const int64_t elements = grad.numel();
  if (elements == 0) return grad_x;
  problem.hidden = sizes.hidden();
  problem.rows = elements / problem.hidden;
  read_halves(problem, x, gate_first);
  problem.grad = rows_of(grad);
  auto* first = static_cast<char*>(grad_x.mutable_data_ptr());
  char* second = first + problem.hidden * bytes_of(problem.type);
  problem.grad_gate = gate_first ? first : second;
  problem.grad_up = gate_first ? second : first;
  problem.stride = 2 * problem.hidden;
  run(geglu::backward, problem, x);
  return grad_x;
}

template <class T, class Make>
std::tuple<T, T> backward_pair(Make& make, T grad, T gate, T up, bool tanh) {
  check_first(gate, "gate");
  auto problem = problem_of<geglu::Backward>(gate, "gate", tanh);
  check_like(up, "up", gate, "gate");
  check_like(grad, "grad", gate, "gate");

  [[maybe_unused]] const auto device = make.enter(gate);
  const auto sizes = gate.sizes();
  T grad_gate = make(sizes, dtype(gate), gate), grad_up = make(sizes, dtype(gate), gate);
  const int64_t elements = gate.numel();
  if (elements == 0) return {grad_gate, grad_up};
  problem.hidden = sizes[sizes.size() - 1];
  problem.rows = elements / problem.hidden;
  read<T>(problem, {{&problem.grad, &grad}, {&problem.gate, &gate}, {&problem.up, &up}});
  problem.grad_gate = grad_gate.mutable_data_ptr();
  problem.grad_up = grad_up.mutable_data_ptr();
  problem.stride = problem.hidden;
  run(geglu::backward, problem, gate);
  return {grad_gate, grad_up};
}

// What Python calls.

Borrowed halves_directly(Results& results, Borrowed x, bool tanh, bool gate_first) {
  return forward_halves(results, x, tanh, gate_first);
}

Borrowed pair_directly(Results& results, Borrowed gate, Borrowed up, bool tanh) {
  return forward_pair(results, gate, up, tanh);
}

Borrowed halves_backward_directly(Results& results, Borrowed grad, Borrowed x, bool tanh, bool gate_first) {
  return backward_halves(results, grad, x, tanh, gate_first);
}

std::tuple<Borrowed, Borrowed> pair_backward_directly(Results& results, Borrowed grad, Borrowed gate, Borrowed up,
                                                      bool tanh) {
  return backward_pair(results, grad, gate, up, tanh);
}

}  // namespace

Tensor geglu_halves(const Tensor& x, bool tanh, bool gate_first) { return forward_halves(empty, x, tanh, gate_first); }

Tensor geglu_pair(const Tensor& gate, const Tensor& up, bool tanh) { return forward_pair(empty, gate, up, tanh); }

Tensor geglu_halves_backward(const Tensor& grad, const Tensor& x, bool tanh, bool gate_first) {
  return backward_halves(empty, grad, x, tanh, gate_first);
}

std::tuple<Tensor, Tensor> geglu_pair_backward(const Tensor& grad, const Tensor& gate, const Tensor& up, bool tanh) {
  return backward_pair(empty, grad, gate, up, tanh);
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("geglu_halves(Tensor x, bool tanh, bool gate_first) -> Tensor");
  ops.def("geglu_pair(Tensor gate, Tensor up, bool tanh) -> Tensor");
  ops.def("geglu_halves_backward(Tensor grad, Tensor x, bool tanh, bool gate_first) -> Tensor");
  ops.def("geglu_pair_backward(Tensor grad, Tensor gate, Tensor up, bool tanh) -> (Tensor, Tensor)");
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#endif
  ops.impl("geglu_halves", TORCH_BOX(&geglu_halves));
  ops.impl("geglu_pair", TORCH_BOX(&geglu_pair));
  ops.impl("geglu_halves_backward", TORCH_BOX(&geglu_halves_backward));
  ops.impl("geglu_pair_backward", TORCH_BOX(&geglu_pair_backward));
}

KIT_DIRECT_MODULE(TORCH_EXTENSION_NAME, KIT_DIRECT("geglu_halves", halves_directly),
                  KIT_DIRECT("geglu_pair", pair_directly),
                  KIT_DIRECT("geglu_halves_backward", halves_backward_directly),
                  KIT_DIRECT("geglu_pair_backward", pair_backward_directly))
