// Binds the kernel to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, types and devices of the arguments.
// Writes:   tensors that it allocates itself, and those that it is given to rotate in place.
// Must not: compute; call anything of Torch newer than 2.10.
#include "torch_binding.h"

#include <algorithm>
#include <limits>
#include <string>

#include "kit/tensors.h"
#include "registration.h"
#include "rope3d/problem.h"
#if defined(CUDA_KERNEL)
#include "rope3d_cuda/rope3d.h"
#else
#include "rope3d_cpu/rope3d.h"
#endif

const char* const kit::kProject = "rope3d";

namespace {

using namespace kit;

// What q and k agree on.
struct Shape {
  int64_t batch, tokens, width;
};

// How q and k are laid out, as the operators are told.
struct Form {
  bool heads_first;
  int64_t head_dim;

  size_t head_dimension() const { return heads_first ? 1 : 2; }
  size_t token_dimension() const { return heads_first ? 2 : 1; }
};

Shape shape_of(const Tensor& x, const char* argument, const Form& form) {
  if (x.dim() != 4 && (x.dim() != 3 || form.heads_first)) {
    fail(argument, form.heads_first ? "must have four dimensions" : "must have three or four dimensions");
  }
  const int64_t last = x.size(x.dim() - 1);
  Shape shape{x.size(0), x.size(static_cast<int64_t>(form.token_dimension())), last};
  if (x.dim() == 3 && form.head_dim > 0) {
    if (last % form.head_dim != 0) {
      fail(argument, "must have a multiple of " + std::to_string(form.head_dim) + " elements in its last dimension");
    }
    shape.width = form.head_dim;
  }
  if (shape.width % 2 != 0) fail(argument, "must have an even number of elements in each head");
  if (shape.width > std::numeric_limits<int32_t>::max()) fail(argument, "must have heads of less than 2^31 elements");
  return shape;
}

rope3d::Strides strides_of(const Tensor& x, const Form& form, int64_t width) {
  const auto strides = x.strides();
  if (x.dim() == 3) return {strides[0], strides[1], width};
  return {strides[0], strides[form.token_dimension()], strides[form.head_dimension()]};
}

int64_t heads_of(const Tensor& x, const Form& form, int64_t width) {
  return x.dim() == 3 ? (width > 0 ? x.size(2) / width : 0) : x.size(static_cast<int64_t>(form.head_dimension()));
}

bool adjacent(const Tensor& x) { return x.size(x.dim() - 1) <= 1 || x.stride(x.dim() - 1) == 1; }

// The side that reads `from` and writes `to`; a contiguous copy takes the place of `from` where the elements of its
// heads are not adjacent.
rope3d::Side side_of(Tensor& from, const Tensor& to, const Form& form, int64_t width) {
  if (!adjacent(from)) from = torch::stable::contiguous(from);
  return {from.const_data_ptr(), to.mutable_data_ptr(), heads_of(from, form, width), strides_of(from, form, width),
          strides_of(to, form, width)};
}

// The table of an axis; contiguous copies take the place of `cos` and `sin` where their strides differ.
rope3d::Table table_of(Tensor& cos, Tensor& sin, const Tensor& q, int64_t batch) {
  check_device(cos, "cos", q, "q");
  rope3d::Table table;
  table.type = element_type(cos, "cos");
  check_like(sin, "sin", cos, "cos");
  const int64_t dims = cos.dim();
  if (dims != 2 && dims != 3) fail("cos", "must have two or three dimensions");
  if (dims == 3 && cos.size(0) != 1 && cos.size(0) != batch) {
    fail("cos", "must be for one sequence or for " + std::to_string(batch) + ", not " + std::to_string(cos.size(0)));
  }
  if (!cos.strides().equals(sin.strides())) {
    cos = torch::stable::contiguous(cos);
    sin = torch::stable::contiguous(sin);
  }
  table.cos = cos.const_data_ptr();
  table.sin = sin.const_data_ptr();
  table.rows = cos.size(dims - 2);
  table.pairs = cos.size(dims - 1);
  table.batch_stride = dims == 3 && cos.size(0) > 1 ? cos.stride(0) : 0;
  table.row_stride = cos.stride(dims - 2);
  table.pair_stride = cos.stride(dims - 1);
  return table;
}

#if defined(CUDA_KERNEL)

void run(const rope3d::Rotation& problem, const Tensor& x) { check(rope3d::rotate(problem, current_stream(x))); }

#else

void run(const rope3d::Rotation& problem, const Tensor&) {
  const int64_t heads = problem.sides[0].heads + problem.sides[1].heads;
  torch::stable::parallel_for(0, problem.batch * problem.tokens, grain(heads * problem.width),
                              [&](int64_t begin, int64_t end) { rope3d::rotate(problem, begin, end); });
}

#endif

// All but the sides. Replaces tables as `table_of` does.
rope3d::Rotation rotation(const Tensor& q, const std::optional<Tensor>& k, std::vector<Tensor>& cos,
                          std::vector<Tensor>& sin, bool in_turn, bool half, const Form& form, bool inverse) {
  rope3d::Rotation problem{};
  problem.type = element_type(q, "q");
  const Shape shape = shape_of(q, "q", form);
  if (k.has_value()) {
    check_device(*k, "k", q, "q");
    if (dtype(*k) != dtype(q)) fail("k", "must have the dtype of q");
    const Shape other = shape_of(*k, "k", form);
    if (other.batch != shape.batch || other.tokens != shape.tokens || other.width != shape.width) {
      fail("k", "must have as many sequences, tokens and elements in each head as q");
    }
  }
  problem.batch = shape.batch;
  problem.tokens = shape.tokens;
  problem.width = shape.width;
  problem.in_turn = in_turn;
  problem.half = half;
  problem.inverse = inverse;
  if (cos.size() != 1 && cos.size() != rope3d::kMaxAxes) fail("cos", "must be one table or three");
  if (sin.size() != cos.size()) fail("sin", "must be as many tables as cos");
  problem.axes = static_cast<int>(cos.size());
  int64_t rows = 1;
  for (int axis = 0; axis < problem.axes; ++axis) {
    rope3d::Table& table = problem.tables[axis];
    table = table_of(cos[axis], sin[axis], q, shape.batch);
    if (table.type != problem.tables[0].type) fail("cos", "must be tables of one dtype");
    if (in_turn && table.pairs != problem.tables[0].pairs)
      fail("cos", "must be tables of one width to be taken in turn");
    problem.pairs += table.pairs;
    rows *= table.rows;
    table.rows = std::max<int64_t>(table.rows, 1);
  }
  if (2 * problem.pairs > shape.width) {
    fail("cos",
         "must have at most " + std::to_string(shape.width / 2) + " pairs, not " + std::to_string(problem.pairs));
  }
  if (rows > shape.tokens) {
    fail("cos", "must be for at most " + std::to_string(shape.tokens) + " tokens, not " + std::to_string(rows));
  }
  problem.prefix = shape.tokens - rows;
  if (shape.batch * shape.tokens > std::numeric_limits<int32_t>::max()) fail("q", "must have less than 2^31 tokens");
  return problem;
}

}  // namespace

std::tuple<Tensor, Tensor> rotate(const Tensor& q, const std::optional<Tensor>& k, std::vector<Tensor> cos,
                                  std::vector<Tensor> sin, bool in_turn, bool half, bool heads_first, int64_t head_dim,
                                  bool inverse) {
  check_here(q, "q");
  const Form form{heads_first, head_dim};
  [[maybe_unused]] const Device device = enter(q);
  rope3d::Rotation problem = rotation(q, k, cos, sin, in_turn, half, form, inverse);
  Tensor from_q = q;
  Tensor to_q = empty(q.sizes(), dtype(q), q);
  std::optional<Tensor> from_k = k;
  constexpr int64_t kNone = 0;
  Tensor to_k = k.has_value() ? empty(k->sizes(), dtype(q), q) : empty({&kNone, 1}, dtype(q), q);
  if (q.numel() + to_k.numel() == 0) return {to_q, to_k};
  problem.sides[0] = side_of(from_q, to_q, form, problem.width);
  if (k.has_value()) problem.sides[1] = side_of(*from_k, to_k, form, problem.width);
  run(problem, q);
  return {to_q, to_k};
}

void rotate_(Tensor q, std::optional<Tensor> k, std::vector<Tensor> cos, std::vector<Tensor> sin, bool in_turn,
             bool half, bool heads_first, int64_t head_dim, bool inverse) {
  check_here(q, "q");
  const Form form{heads_first, head_dim};
  [[maybe_unused]] const Device device = enter(q);
  rope3d::Rotation problem = rotation(q, k, cos, sin, in_turn, half, form, inverse);
  if (!adjacent(q)) fail("q", "must have adjacent elements in its last dimension to be rotated in place");
  if (k.has_value() && !adjacent(*k)) {
    fail("k", "must have adjacent elements in its last dimension to be rotated in place");
  }
  if (q.numel() + (k.has_value() ? k->numel() : 0) == 0) return;
  problem.sides[0] = side_of(q, q, form, problem.width);
  if (k.has_value()) problem.sides[1] = side_of(*k, *k, form, problem.width);
  run(problem, q);
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "rotate(Tensor q, Tensor? k, Tensor[] cos, Tensor[] sin, bool in_turn, bool half, bool heads_first, int head_dim,"
      " bool inverse) -> (Tensor, Tensor)");
  ops.def(
      "rotate_(Tensor(a!) q, Tensor(b!)? k, Tensor[] cos, Tensor[] sin, bool in_turn, bool half, bool heads_first,"
      " int head_dim, bool inverse) -> ()");
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#endif
  ops.impl("rotate", TORCH_BOX(&rotate));
  ops.impl("rotate_", TORCH_BOX(&rotate_));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
