// Binds the kernel to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, types and devices of the arguments.
// Writes:   tensors that it allocates itself, and those that it is given to rotate in place.
// Must not: compute; call anything of Torch newer than 2.10.
#include "torch_binding.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include "kit/direct.h"
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
using direct::Borrowed;
using direct::Results;
using rope3d::kAxes;
using rope3d::Rotation;
using std::to_string;

// What the operators are told of q and k, and of how they turn.
struct Form {
  int64_t prefix, head_dim;
  bool half, heads_first;
};

// The same with what they turn by: a grid and its table; or, where there is none, tables that come with each call.
struct Plan {
  Form form;
  std::optional<Tensor> table;
  int64_t sizes[kAxes], pairs[kAxes];
  bool in_turn;
  int64_t rotary_dim;
};

// Plans by their numbers. Threads may add and look up at the same time; a plan stays where it is.
class Plans {
 public:
  int64_t add(Plan plan) {
    const std::lock_guard<std::mutex> alone(changing_);
    all_.push_back(std::move(plan));
    return static_cast<int64_t>(all_.size()) - 1;
  }

  const Plan& at(int64_t number, bool of_grid) {
    const std::lock_guard<std::mutex> alone(changing_);
    if (number < 0 || number >= static_cast<int64_t>(all_.size()) || all_[number].table.has_value() != of_grid) {
      fail("plan", std::string("must be a number from ") + (of_grid ? "keep_grid" : "keep_tokens") + ", not " +
                       to_string(number));
    }
    return all_[number];
  }

 private:
  std::mutex changing_;
  std::deque<Plan> all_;
};

// Never destroyed: at the end of a process there may be no device left to give the tables back to.
Plans& plans() {
  static auto* const all = new Plans;
  return *all;
}

struct Shape {
  int64_t batch, tokens, heads, width;
};

template <class T>
Shape shape_of(const T& x, const char* argument, const Form& form) {
  const auto sizes = x.sizes();
  const size_t dims = form.head_dim == 0 ? 4 : 3;
  if (sizes.size() != dims) {
    fail(argument, "must have " + to_string(dims) + " dimensions, not " + to_string(sizes.size()));
  }
  Shape shape{sizes[0], sizes[1], 1, sizes[dims - 1]};
  if (dims == 4) {
    shape.heads = sizes[2];
    if (form.heads_first) std::swap(shape.heads, shape.tokens);
  } else if (form.head_dim > 0) {
    if (shape.width % form.head_dim != 0) {
      fail(argument, "must have a multiple of " + to_string(form.head_dim) + " elements in its last dimension");
    }
    shape.heads = shape.width / form.head_dim;
    shape.width = form.head_dim;
  }
  if (shape.width % 2 != 0) fail(argument, "must have an even number of elements in each head");
  if (shape.batch * shape.tokens > std::numeric_limits<int32_t>::max())
    fail(argument, "must have less than 2^31 tokens");
  if (shape.heads >= 1 << 15) fail(argument, "must have less than 2^15 heads");
  if (shape.heads * shape.width >= 1 << 23) fail(argument, "must have less than 2^23 elements in each token");
  return shape;
}

template <class T>
rope3d::Strides strides_of(const T& x, const Form& form, const Shape& shape) {
  const auto strides = x.strides();
  if (form.head_dim != 0) return {strides[0], strides[1], shape.width};
  return {strides[0], strides[form.heads_first ? 2 : 1], strides[form.heads_first ? 1 : 2]};
}

template <class T>
bool adjacent(const T& x) {
  const int64_t last = x.dim() - 1;
  return x.size(last) <= 1 || x.stride(last) == 1;
}

// What is known before there is a place for the result.
template <class T>
Rotation rotation(const T& q, const std::optional<T>& k, const Form& form, bool inverse) {
  check_here(q, "q");
  Rotation problem{};
  problem.type = element_type(q, "q");
  const Shape shape = shape_of(q, "q", form);
  problem.sides[0].heads = shape.heads;
  if (k.has_value()) {
    check_device(*k, "k", q, "q");
    if (dtype(*k) != dtype(q)) fail("k", "must have the dtype of q");
    const Shape other = shape_of(*k, "k", form);
    if (other.batch != shape.batch || other.tokens != shape.tokens || other.width != shape.width) {
      fail("k", "must have as many sequences, tokens and elements in each head as q");
    }
    problem.sides[1].heads = other.heads;
  }
  problem.batch = shape.batch;
  problem.tokens = shape.tokens;
  problem.width = shape.width;
  if (form.prefix < 0) fail("prefix", "must not be negative");
  problem.prefix = form.prefix;
  problem.half = form.half;
  problem.inverse = inverse;
  return problem;
}

template <class T>
rope3d::Grid grid_of(const Tensor& table, const T& q, const int64_t (&sizes)[kAxes], const int64_t (&pairs)[kAxes],
                     bool in_turn) {
  check_device(table, "table", q, "q");
  if (dtype(table) != aoti_torch_dtype_float32()) fail("table", "must be float32");
  const auto shape = table.sizes();
  if (shape.size() != 3 || shape[2] != 2) fail("table", "must have shape [rows, entries, 2], not " + text(shape));
  if (!table.is_contiguous()) fail("table", "must be contiguous");
  rope3d::Grid grid;
  grid.entries = shape[1];
  grid.in_turn = in_turn;
  int64_t rows = 0, begin = 0, entries = 0;
  for (int i = 0; i < kAxes; ++i) {
    const int64_t first = in_turn ? 0 : begin / rope3d::kAlignedPairs * rope3d::kAlignedPairs;
    grid.axes[i] = {sizes[i], begin, first};
    rows += sizes[i];
    begin += pairs[i];
    const int64_t needed = in_turn ? pairs[i] : begin - first;
    const int64_t multiple = in_turn ? 2 : rope3d::kAlignedPairs;
    entries = std::max(entries, (needed + multiple - 1) / multiple * multiple);
  }
  if (shape[0] != rows || shape[1] != entries) {
    fail("table", "must have shape [" + to_string(rows) + ", " + to_string(entries) + ", 2], not " + text(shape));
  }
  if (rows * entries >= 1 << 30) fail("table", "must have less than 2^31 elements");
  grid.table = static_cast<const float*>(table.const_data_ptr());
  return grid;
}

template <class T>
Rotation by_grid(const T& q, const std::optional<T>& k, const Plan& plan, bool inverse) {
  Rotation problem = rotation(q, k, plan.form, inverse);
  const auto& sizes = plan.sizes;
  const auto& pairs = plan.pairs;
  for (int i = 0; i < kAxes; ++i) {
    if (sizes[i] < 0 || pairs[i] < 0) fail("grid", "must have no negative size, nor a negative number of pairs");
  }
  problem.pairs = pairs[0] + pairs[1] + pairs[2];
  if (2 * problem.pairs > problem.width) {
    fail("q",
         "must have heads of at least " + to_string(2 * problem.pairs) + " elements, not " + to_string(problem.width));
  }
  // In double, which no sizes overflow.
  const double tokens = static_cast<double>(sizes[0]) * static_cast<double>(sizes[1]) * static_cast<double>(sizes[2]);
  if (tokens != static_cast<double>(problem.tokens - problem.prefix)) {
    fail("grid", "and prefix must have " + to_string(problem.tokens) + " tokens, as q has, not " + to_string(sizes[0]) +
                     " * " + to_string(sizes[1]) + " * " + to_string(sizes[2]) + " + " + to_string(problem.prefix));
  }
  problem.grid = grid_of(*plan.table, q, sizes, pairs, plan.in_turn);
  problem.first_turning = plan.in_turn ? problem.staying() : 0;
  return problem;
}

// Contiguous copies take the place of `cos` and `sin` where their strides differ.
template <class T>
Rotation by_tokens(const T& q, const std::optional<T>& k, T& cos, T& sin, const Plan& plan, bool inverse) {
  Rotation problem = rotation(q, k, plan.form, inverse);
  check_device(cos, "cos", q, "q");
  rope3d::Tokens& table = problem.table;
  table.type = element_type(cos, "cos");
  check_like(sin, "sin", cos, "cos");
  if (!cos.strides().equals(sin.strides())) {
    cos = contiguous_copy(cos);
    sin = contiguous_copy(sin);
  }
  const auto sizes = cos.sizes(), strides = cos.strides();
  const size_t dims = sizes.size();
  if (dims != 2 && dims != 3) fail("cos", "must have two or three dimensions");
  if (dims == 3 && sizes[0] != 1 && sizes[0] != problem.batch) {
    fail("cos", "must be for one sequence or for " + to_string(problem.batch) + ", not " + to_string(sizes[0]));
  }
  const int64_t rotary = plan.rotary_dim > 0 ? plan.rotary_dim : problem.width, entries = sizes[dims - 1];
  if (rotary > problem.width || rotary % 2 != 0) {
    fail("rotary_dim", "must be even and at most " + to_string(problem.width) + ", not " + to_string(rotary));
  }
  if (entries != rotary && 2 * entries != rotary) {
    fail("cos", "must have " + to_string(rotary) + " or " + to_string(rotary / 2) + " in its last dimension, not " +
                    to_string(entries));
  }
  if (sizes[dims - 2] + problem.prefix != problem.tokens) {
    fail("cos", "and prefix must have " + to_string(problem.tokens) + " tokens, as q has, not " +
                    to_string(sizes[dims - 2]) + " + " + to_string(problem.prefix));
  }
  problem.pairs = rotary / 2;
  table.cos = cos.const_data_ptr();
  table.sin = sin.const_data_ptr();
  table.batch_stride = dims == 3 && sizes[0] > 1 ? strides[0] : 0;
  table.row_stride = strides[dims - 2];
  table.pair_stride = strides[dims - 1] * (entries == rotary && !problem.half ? 2 : 1);
  return problem;
}

template <class T>
void run(Rotation& problem, const T& q) {
  [[maybe_unused]] const auto unlocked = running(q);
  if (problem.batch * problem.tokens == 0 || problem.width == 0) return;
  const int64_t heads = problem.sides[0].heads + problem.sides[1].heads;
  if (heads == 0) return;
#if defined(CUDA_KERNEL)
  check(rope3d::rotate(problem, current_stream(q)));
#else
  torch::stable::parallel_for(0, problem.batch * problem.tokens, grain(heads * problem.width),
                              [&](int64_t begin, int64_t end) { rope3d::rotate(problem, begin, end); });
#endif
}

// The result for x, which `side` then writes, contiguous; a contiguous copy takes the place of x where the elements of
// its heads are not adjacent.
template <class T, class Make>
T result_for(Make& make, T& x, rope3d::Side& side, const Rotation& problem, const Form& form) {
  T result = make(x.sizes(), dtype(x), x);
  if (!adjacent(x)) x = contiguous_copy(x);
  const Shape shape{problem.batch, problem.tokens, side.heads, problem.width};
  side.from = x.const_data_ptr();
  side.from_strides = strides_of(x, form, shape);
  side.to = result.mutable_data_ptr();
  const int64_t token = form.heads_first ? shape.width : shape.heads * shape.width;
  side.to_strides = {shape.tokens * shape.heads * shape.width, token,
                     form.heads_first ? shape.tokens * shape.width : shape.width};
  return result;
}

template <class T, class Make>
std::tuple<T, T> rotated(Make& make, Rotation& problem, T q, std::optional<T> k, const Form& form) {
  [[maybe_unused]] const auto device = make.enter(q);
  T to_q = result_for(make, q, problem.sides[0], problem, form);
  T to_k = k.has_value() ? result_for(make, *k, problem.sides[1], problem, form) : make.nothing(dtype(q), q);
  run(problem, q);
  return {to_q, to_k};
}

template <class T>
void rotate_side(const T& x, const char* argument, rope3d::Side& side, const Rotation& problem, const Form& form) {
  if (!adjacent(x)) fail(argument, "must have adjacent elements in its last dimension to be rotated in place");
  side.from = side.to = x.mutable_data_ptr();
  side.from_strides = side.to_strides = strides_of(x, form, {problem.batch, problem.tokens, side.heads, problem.width});
}

template <class T>
void rotate_in_place(Rotation& problem, const T& q, const std::optional<T>& k, const Form& form) {
  rotate_side(q, "q", problem.sides[0], problem, form);
  if (k.has_value()) rotate_side(*k, "k", problem.sides[1], problem, form);
  [[maybe_unused]] const auto device = enter(q);
  run(problem, q);
}

template <class T, class Make>
std::tuple<T, T> rotated_by_grid(Make& make, const T& q, const std::optional<T>& k, const Plan& plan, bool inverse) {
  Rotation problem = by_grid(q, k, plan, inverse);
  return rotated(make, problem, q, k, plan.form);
}

template <class T>
void rotate_by_grid(const T& q, const std::optional<T>& k, const Plan& plan, bool inverse) {
  Rotation problem = by_grid(q, k, plan, inverse);
  rotate_in_place(problem, q, k, plan.form);
}

template <class T, class Make>
std::tuple<T, T> rotated_by_tokens(Make& make, const T& q, const std::optional<T>& k, T cos, T sin, const Plan& plan,
                                   bool inverse) {
  Rotation problem = by_tokens(q, k, cos, sin, plan, inverse);
  return rotated(make, problem, q, k, plan.form);
}

template <class T>
void rotate_by_tokens(const T& q, const std::optional<T>& k, T cos, T sin, const Plan& plan, bool inverse) {
  Rotation problem = by_tokens(q, k, cos, sin, plan, inverse);
  rotate_in_place(problem, q, k, plan.form);
}

Plan plan_of_grid(const Tensor& table, int64_t frames, int64_t height, int64_t width, int64_t frame_pairs,
                  int64_t height_pairs, int64_t width_pairs, int64_t prefix, int64_t head_dim, bool in_turn, bool half,
                  bool heads_first) {
  return {{prefix, head_dim, half, heads_first},    table,   {frames, height, width},
          {frame_pairs, height_pairs, width_pairs}, in_turn, 0};
}

Plan plan_of_tokens(int64_t rotary_dim, int64_t prefix, int64_t head_dim, bool half, bool heads_first) {
  return {{prefix, head_dim, half, heads_first}, std::nullopt, {}, {}, false, rotary_dim};
}

using Maybe = std::optional<Borrowed>;

std::tuple<Borrowed, Borrowed> kept_grid_directly(Results& results, Borrowed q, Maybe k, int64_t plan, bool inverse) {
  return rotated_by_grid(results, q, k, plans().at(plan, true), inverse);
}

void kept_grid_in_place_directly(Borrowed q, Maybe k, int64_t plan, bool inverse) {
  rotate_by_grid(q, k, plans().at(plan, true), inverse);
}

std::tuple<Borrowed, Borrowed> kept_tokens_directly(Results& results, Borrowed q, Maybe k, Borrowed cos, Borrowed sin,
                                                    int64_t plan, bool inverse) {
  return rotated_by_tokens(results, q, k, cos, sin, plans().at(plan, false), inverse);
}

void kept_tokens_in_place_directly(Borrowed q, Maybe k, Borrowed cos, Borrowed sin, int64_t plan, bool inverse) {
  rotate_by_tokens(q, k, cos, sin, plans().at(plan, false), inverse);
}

// A number for the device of a tensor and the size of its last dimension. None: it is no plain tensor, or a mode looks
// at the operators that are called.
direct::Object* place(direct::Object*, direct::Object* const* objects, std::ptrdiff_t count) {
  try {
    if (direct::exchange != nullptr && count == 1 && !direct::any_mode()) {
      const Borrowed x = Borrowed::plain(objects[0]);
      if (x.dim() == 0) throw direct::Declined();
      const int64_t device = x.exchanged().device_type << 8 | (x.get_device_index() & 255);
      return direct::kit_python_integer(device << 40 | x.size(x.dim() - 1));
    }
  } catch (...) {
  }
  return direct::none();
}

}  // namespace

std::tuple<Tensor, Tensor> rotate_grid(const Tensor& q, const std::optional<Tensor>& k, const Tensor& table,
                                       int64_t frames, int64_t height, int64_t width, int64_t frame_pairs,
                                       int64_t height_pairs, int64_t width_pairs, int64_t prefix, int64_t head_dim,
                                       bool in_turn, bool half, bool heads_first, bool inverse) {
  return rotated_by_grid(empty, q, k,
                         plan_of_grid(table, frames, height, width, frame_pairs, height_pairs, width_pairs, prefix,
                                      head_dim, in_turn, half, heads_first),
                         inverse);
}

void rotate_grid_(Tensor q, std::optional<Tensor> k, const Tensor& table, int64_t frames, int64_t height, int64_t width,
                  int64_t frame_pairs, int64_t height_pairs, int64_t width_pairs, int64_t prefix, int64_t head_dim,
                  bool in_turn, bool half, bool heads_first, bool inverse) {
  rotate_by_grid(q, k,
                 plan_of_grid(table, frames, height, width, frame_pairs, height_pairs, width_pairs, prefix, head_dim,
                              in_turn, half, heads_first),
                 inverse);
}

std::tuple<Tensor, Tensor> rotate_tokens(const Tensor& q, const std::optional<Tensor>& k, const Tensor& cos,
                                         const Tensor& sin, int64_t rotary_dim, int64_t prefix, int64_t head_dim,
                                         bool half, bool heads_first, bool inverse) {
  return rotated_by_tokens(empty, q, k, cos, sin, plan_of_tokens(rotary_dim, prefix, head_dim, half, heads_first),
                           inverse);
}

void rotate_tokens_(Tensor q, std::optional<Tensor> k, const Tensor& cos, const Tensor& sin, int64_t rotary_dim,
                    int64_t prefix, int64_t head_dim, bool half, bool heads_first, bool inverse) {
  rotate_by_tokens(q, k, cos, sin, plan_of_tokens(rotary_dim, prefix, head_dim, half, heads_first), inverse);
}

int64_t keep_grid(const Tensor& table, int64_t frames, int64_t height, int64_t width, int64_t frame_pairs,
                  int64_t height_pairs, int64_t width_pairs, int64_t prefix, int64_t head_dim, bool in_turn, bool half,
                  bool heads_first) {
  return plans().add(plan_of_grid(table, frames, height, width, frame_pairs, height_pairs, width_pairs, prefix,
                                  head_dim, in_turn, half, heads_first));
}

int64_t keep_tokens(int64_t rotary_dim, int64_t prefix, int64_t head_dim, bool half, bool heads_first) {
  return plans().add(plan_of_tokens(rotary_dim, prefix, head_dim, half, heads_first));
}

std::tuple<Tensor, Tensor> rotate_kept_grid(const Tensor& q, const std::optional<Tensor>& k, int64_t plan,
                                            bool inverse) {
  return rotated_by_grid(empty, q, k, plans().at(plan, true), inverse);
}

void rotate_kept_grid_(Tensor q, std::optional<Tensor> k, int64_t plan, bool inverse) {
  rotate_by_grid(q, k, plans().at(plan, true), inverse);
}

std::tuple<Tensor, Tensor> rotate_kept_tokens(const Tensor& q, const std::optional<Tensor>& k, const Tensor& cos,
                                              const Tensor& sin, int64_t plan, bool inverse) {
  return rotated_by_tokens(empty, q, k, cos, sin, plans().at(plan, false), inverse);
}

void rotate_kept_tokens_(Tensor q, std::optional<Tensor> k, const Tensor& cos, const Tensor& sin, int64_t plan,
                         bool inverse) {
  rotate_by_tokens(q, k, cos, sin, plans().at(plan, false), inverse);
}

#define GRID(INT)                                                                                                \
  "Tensor table, " INT " frames, " INT " height, " INT " width, " INT " frame_pairs, " INT " height_pairs, " INT \
  " width_pairs, " INT " prefix, " INT " head_dim, bool in_turn, bool half, bool heads_first"
#define TOKENS(INT) INT " rotary_dim, " INT " prefix, " INT " head_dim, bool half, bool heads_first"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  // Of the table of a grid, in Python alone, so that no trace repeats what it takes to make one.
  ops.def(
      "grid_table(SymInt frames, SymInt height, SymInt width, SymInt frame_pairs, SymInt height_pairs, SymInt "
      "width_pairs, str order, float[] theta, float[] scale, float[] offset, Device device) -> Tensor");
  ops.def("rotate_grid(Tensor q, Tensor? k, " GRID("SymInt") ", bool inverse) -> (Tensor, Tensor)");
  ops.def("rotate_grid_(Tensor(a!) q, Tensor(b!)? k, " GRID("SymInt") ", bool inverse) -> ()");
  ops.def("rotate_tokens(Tensor q, Tensor? k, Tensor cos, Tensor sin, " TOKENS(
      "SymInt") ", bool inverse) -> (Tensor, Tensor)");
  ops.def(
      "rotate_tokens_(Tensor(a!) q, Tensor(b!)? k, Tensor cos, Tensor sin, " TOKENS("SymInt") ", bool inverse) -> ()");
  ops.def("keep_grid(" GRID("int") ") -> int");
  ops.def("keep_tokens(" TOKENS("int") ") -> int");
  ops.def("rotate_kept_grid(Tensor q, Tensor? k, int plan, bool inverse) -> (Tensor, Tensor)");
  ops.def("rotate_kept_grid_(Tensor(a!) q, Tensor(b!)? k, int plan, bool inverse) -> ()");
  ops.def(
      "rotate_kept_tokens(Tensor q, Tensor? k, Tensor cos, Tensor sin, int plan, bool inverse) -> (Tensor, Tensor)");
  ops.def("rotate_kept_tokens_(Tensor(a!) q, Tensor(b!)? k, Tensor cos, Tensor sin, int plan, bool inverse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("keep_tokens", TORCH_BOX(&keep_tokens));
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#endif
  ops.impl("rotate_grid", TORCH_BOX(&rotate_grid));
  ops.impl("rotate_grid_", TORCH_BOX(&rotate_grid_));
  ops.impl("rotate_tokens", TORCH_BOX(&rotate_tokens));
  ops.impl("rotate_tokens_", TORCH_BOX(&rotate_tokens_));
  ops.impl("keep_grid", TORCH_BOX(&keep_grid));
  ops.impl("rotate_kept_grid", TORCH_BOX(&rotate_kept_grid));
  ops.impl("rotate_kept_grid_", TORCH_BOX(&rotate_kept_grid_));
  ops.impl("rotate_kept_tokens", TORCH_BOX(&rotate_kept_tokens));
  ops.impl("rotate_kept_tokens_", TORCH_BOX(&rotate_kept_tokens_));
}

KIT_DIRECT_MODULE(TORCH_EXTENSION_NAME, KIT_DIRECT("rotate_kept_grid", kept_grid_directly),
                  KIT_CHANGING("rotate_kept_grid_", kept_grid_in_place_directly),
                  KIT_DIRECT("rotate_kept_tokens", kept_tokens_directly),
                  KIT_CHANGING("rotate_kept_tokens_", kept_tokens_in_place_directly),
                  {"place", place, kit::direct::kFastCall, nullptr})
