// Binds the kernel to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, dtypes and devices of the arguments.
// Writes:   only tensors that it allocates, apart from rotate_grid_ and rotate_tokens_, which write q and k.
// Must not: compute; call anything of Torch newer than 2.10.
//
// torch-ext/arguments.h has the shared arguments. `inverse` is that of rope3d/problem.h.
#include <algorithm>
#include <tuple>

#include "kit/tensors.h"
#include "registration.h"
#include "rope3d/problem.h"
#include "torch-ext/arguments.h"

const char* const kit::kProject = "rope3d";

namespace {

using namespace rope3d;

// The arguments of rotate_grid that describe the grid.
struct GridArguments {
  const Tensor& table;
  int64_t sizes[kAxes], pairs[kAxes];
  bool interleaved_axes;
};

rope3d::Grid grid_of(const GridArguments& by, const Tensor& q) {
  const auto& [table, sizes, pairs, interleaved_axes] = by;
  check_device(table, "table", q, "q");
  if (dtype(table) != aoti_torch_dtype_float32()) fail("table", "must be float32");
  const auto shape = table.sizes();
  if (shape.size() != 3 || shape[2] != 2) fail("table", "must have shape [rows, entries, 2], not " + text(shape));
  if (!table.is_contiguous()) fail("table", "must be contiguous");
  rope3d::Grid grid;
  grid.entries = shape[1];
  grid.interleaved_axes = interleaved_axes;
  int64_t rows = 0, begin = 0, entries = 0;
  for (int i = 0; i < kAxes; ++i) {
    const int64_t first = interleaved_axes ? 0 : begin / rope3d::kAlignedPairs * rope3d::kAlignedPairs;
    grid.axes[i] = {sizes[i], begin, first};
    rows += sizes[i];
    begin += pairs[i];
    const int64_t needed = interleaved_axes ? pairs[i] : begin - first;
    const int64_t multiple = interleaved_axes ? 2 : rope3d::kAlignedPairs;
    entries = std::max(entries, (needed + multiple - 1) / multiple * multiple);
  }
  if (shape[0] != rows || shape[1] != entries) {
    fail("table", "must have shape [" + to_string(rows) + ", " + to_string(entries) + ", 2], not " + text(shape));
  }
  if (rows * entries >= 1 << 30) fail("table", "must have less than 2^31 elements");
  grid.table = static_cast<const float*>(table.const_data_ptr());
  return grid;
}

Rotation by_grid(const Tensor& q, const MaybeTensor& k, const GridArguments& by, const Form& form, bool inverse) {
  Rotation problem = rotation(q, k, form, inverse);
  const auto& [table, sizes, pairs, interleaved_axes] = by;
  for (int i = 0; i < kAxes; ++i) {
    if (sizes[i] < 0 || pairs[i] < 0) fail("grid", "must have no negative size, nor a negative number of pairs");
  }
  problem.pairs = pairs[0] + pairs[1] + pairs[2];
  if (2 * problem.pairs > problem.width) {
    fail("q",
         "must have heads of at least " + to_string(2 * problem.pairs) + " elements, not " + to_string(problem.width));
  }
  // The product of any three sizes fits a double.
  const double tokens = static_cast<double>(sizes[0]) * static_cast<double>(sizes[1]) * static_cast<double>(sizes[2]);
  if (tokens != static_cast<double>(problem.tokens - problem.prefix)) {
    fail("grid", "and prefix must have " + to_string(problem.tokens) + " tokens, as q has, not " + to_string(sizes[0]) +
                     " * " + to_string(sizes[1]) + " * " + to_string(sizes[2]) + " + " + to_string(problem.prefix));
  }
  problem.grid = grid_of(by, q);
  problem.first_rotated = interleaved_axes ? problem.passthrough() : 0;
  return problem;
}

void launch_rotation(const Rotation& problem, const Tensor& q) {
  if (problem.batch * problem.tokens == 0 || problem.width == 0) return;
  const int64_t heads = problem.sides[0].heads + problem.sides[1].heads;
  if (heads == 0) return;
  launch(problem, q, problem.batch * problem.tokens, heads * problem.width);
}

void set_in_place(const Tensor& x, const char* argument, rope3d::Side& side, int64_t width, const Form& form) {
  if (!adjacent(x)) fail(argument, "must have adjacent elements in its last dimension to be rotated in place");
  check_not_expanded(x, argument);
  side.from = side.to = x.mutable_data_ptr();
  side.from_strides = side.to_strides = strides_of(x, form, width);
}

// Writes q and k in place and returns nothing, or returns contiguous results; that of k is undefined, in Python None,
// without k.
template <bool kInPlace>
auto rotate(Rotation& problem, Tensor q, MaybeTensor k, const Form& form) {
  [[maybe_unused]] const auto device = enter(q);
  if constexpr (kInPlace) {
    set_in_place(q, "q", problem.sides[0], problem.width, form);
    if (k.has_value()) {
      set_in_place(*k, "k", problem.sides[1], problem.width, form);
      check_apart(*k, "k", q, "q", problem.type);
    }
    launch_rotation(problem, q);
  } else {
    Tensor to_q = result_for(q, problem.sides[0], problem, form);
    Tensor to_k = k.has_value() ? result_for(*k, problem.sides[1], problem, form) : Tensor();
    launch_rotation(problem, q);
    return std::tuple(to_q, to_k);
  }
}

// Rotates q and k by positions on a grid of frames x height x width. `table` is that of rope3d/problem.h,
// [frames + height + width, entries, 2]; `frame_pairs`, `height_pairs` and `width_pairs` are the numbers of pairs of a
// head that each axis rotates.
template <bool kInPlace>
auto rotate_grid(const Tensor& q, const MaybeTensor& k, const Tensor& table, int64_t frames, int64_t height,
                 int64_t width, int64_t frame_pairs, int64_t height_pairs, int64_t width_pairs, int64_t prefix,
                 int64_t head_dim, bool interleaved_axes, bool half, bool heads_first, bool inverse) {
  const GridArguments by{table, {frames, height, width}, {frame_pairs, height_pairs, width_pairs}, interleaved_axes};
  const Form form{prefix, head_dim, half, heads_first};
  Rotation problem = by_grid(q, k, by, form, inverse);
  return rotate<kInPlace>(problem, q, k, form);
}

// Rotates q and k by `cos` and `sin` of [S', n] or [B, S', n]. n is half of `rotary_dim`, the number of elements of a
// head that are rotated (0: all), with one entry for each pair, or `rotary_dim`, with one for each element.
template <bool kInPlace>
auto rotate_tokens(const Tensor& q, const MaybeTensor& k, Tensor cos, Tensor sin, int64_t rotary_dim, int64_t prefix,
                   int64_t head_dim, bool half, bool heads_first, bool inverse) {
  const Form form{prefix, head_dim, half, heads_first};
  Rotation problem = by_tokens(q, k, cos, sin, rotary_dim, form, inverse);
  return rotate<kInPlace>(problem, q, k, form);
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  // Implemented in Python, so that a trace holds one call in place of the steps that make the table.
  ops.def(
      "grid_table(SymInt frames, SymInt height, SymInt width, SymInt frame_pairs, SymInt height_pairs, SymInt "
      "width_pairs, str order, float[] theta, float[] scale, float[] offset, Device device) -> Tensor");
  // Callers leave out options that have their default values: Torch takes 0.2 us to convert each one it is given.
#define GRID                                                                                                       \
  "Tensor table, SymInt frames, SymInt height, SymInt width, SymInt frame_pairs, SymInt height_pairs, SymInt "     \
  "width_pairs, SymInt prefix=0, SymInt head_dim=0, bool in_turn=False, bool half=False, bool heads_first=False, " \
  "bool inverse=False"
#define TOKENS                                                                                              \
  "Tensor cos, Tensor sin, SymInt rotary_dim=0, SymInt prefix=0, SymInt head_dim=0, bool half=False, bool " \
  "heads_first=False, bool inverse=False"
  ops.def("rotate_grid(Tensor q, Tensor? k, " GRID ") -> (Tensor, Tensor)");
  ops.def("rotate_grid_(Tensor(a!) q, Tensor(b!)? k, " GRID ") -> ()");
  ops.def("rotate_tokens(Tensor q, Tensor? k, " TOKENS ") -> (Tensor, Tensor)");
  ops.def("rotate_tokens_(Tensor(a!) q, Tensor(b!)? k, " TOKENS ") -> ()");
#define NORM                                                                                                           \
  "Tensor q, Tensor? k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps, bool per_token=False, " \
  "float offset=0.0, bool rounded_before_weight=False, SymInt rotary_dim=0, SymInt prefix=0, SymInt head_dim=0, "      \
  "bool half=False, bool heads_first=False"
  ops.def("norm_rotate(" NORM ") -> (Tensor, Tensor)");
  ops.def("norm_rotate_backward(Tensor? grad_q, Tensor? grad_k, bool of_q_weight, bool of_k_weight, " NORM
          ") -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, KIT_BACKEND, ops) {
  ops.impl("rotate_grid", TORCH_BOX(&rotate_grid<false>));
  ops.impl("rotate_grid_", TORCH_BOX(&rotate_grid<true>));
  ops.impl("rotate_tokens", TORCH_BOX(&rotate_tokens<false>));
  ops.impl("rotate_tokens_", TORCH_BOX(&rotate_tokens<true>));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
