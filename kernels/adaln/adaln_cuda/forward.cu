// Modulated norms, with and without a branch, gated or not, that is added before: selects and launches a kernel.
//
// Beyond naive/adaln.cu: rows stay in registers, vectorized loads, PDL, the branch, and modulations of any shape.
//
// Reads:    x, the branch, modulations and parameters.
// Writes:   `normed`, and `sum` when there is a branch.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Bytes moved, for elements of e bytes and modulations of m bytes: rows * hidden * 2e (4e with a branch), and
// rows / span * hidden * 2m (3m with a gate).
#include <initializer_list>
#include <optional>

#include "adaln_cuda/forward_general.cuh"
#include "adaln_cuda/forward_rows.cuh"
#include "adaln_cuda/gate_rows.cuh"

namespace adaln {
namespace {

// The mapping of tiles to blocks.
struct TileLayout {
  int group;            // threads of a tile
  int tiles;            // of a block
  size_t shared_bytes;  // of a block
};

TileLayout tile_layout(const ForwardConfig& config, int vectors, int staged_words) {
  int group = threads_for(vectors, config.vectors);
  while (group <= kWarp && group / 2 * config.vectors >= vectors) group /= 2;
  const int tiles = group > kWarp ? 1 : config.packed_threads / group;
  return {group, tiles, size_t{kVectorBytes} * config.vectors * group * tiles * staged_words};
}

// Returns how many tiles ahead a block prefetches; 0 if tiles do not follow one another in memory, or are few.
uint32_t prefetch_distance(const TiledForward& problem, const ForwardConfig& config, const TileLayout& layout,
                           int64_t rows, int64_t element, const DeviceProperties& device) {
  const auto contiguous = [&](const StridedRows& strided) {
    return strided.row_stride == problem.hidden && strided.span_stride == int64_t{problem.span} * problem.hidden;
  };
  const bool branch = !config.is(Branch::none);
  const int64_t row_bytes = problem.hidden * element * (branch ? 2 : 1);  // that are read
  if (layout.tiles > 1 || problem.span % config.rows != 0 || !contiguous(problem.x) ||
      (branch && !contiguous(problem.branch)) || !prefetch_pays(device, 2 * rows * row_bytes)) {
    return 0;
  }
  return static_cast<uint32_t>(device.sms *
                               std::max<int64_t>(config.prefetch_bytes_per_sm / (row_bytes * config.rows), 1));
}

template <typename T, int kRow>
cudaError_t launch_tiles(TiledForward& problem, int64_t rows, const TileLayout& layout, const DeviceProperties& device,
                         cudaStream_t stream) {
  constexpr ForwardConfig kConfig = kForwardTable[kRow];
  problem.tiles_per_span = (problem.span + kConfig.rows - 1) / kConfig.rows;
  problem.tiles = static_cast<uint32_t>(rows / problem.span) * problem.tiles_per_span;
  problem.spans = fast_divisor(problem.tiles_per_span);
  problem.prefetch_distance = prefetch_distance(problem, kConfig, layout, rows, sizeof(T), device);
  const auto kernel = forward_kernel<T, kRow>;
  const cudaError_t error = allow_shared_bytes(kernel, layout.shared_bytes, kStaticSharedBytes, device);
  if (error != cudaSuccess) return error;
  return launch_with_pdl(kernel, dim3((problem.tiles + layout.tiles - 1) / layout.tiles),
                         dim3(layout.group, layout.tiles), layout.shared_bytes, stream, problem);
}

// Which kernel takes a call: that of the first line that holds and for whose FactorCount the launch table has a row;
// else the general kernel. In the last two lines, all dtypes of a stepwise call are that of the rows.
//
//                modulations and parameters               dtypes                             code
//   simple       scale and shift, perhaps a weight        that of the rows; not stepwise     any: norm_rows
//   one_factor   scale and shift, weight and bias, none   one; the gate may have another     one: norm_rows
//   fast         any                                      one, which the gate has, too       any: norm_general
struct Factors {
  bool fast, simple, one_factor;
  bool float32_shared, float32_gate;  // the dtype is float32, that of rows is not
};

// Returns the dtype that those share which are present, or the rows' dtype if none is, or nothing if they differ.
std::optional<Type> common_type(Type rows, std::initializer_list<Parameter> parameters) {
  std::optional<Type> common;
  for (const Parameter& parameter : parameters) {
    if (parameter.data == nullptr) continue;
    if (common.value_or(parameter.type) != parameter.type) return std::nullopt;
    common = parameter.type;
  }
  return common.value_or(rows);
}

Factors factors_of(const Forward& problem) {
  // The shift has the dtype of the scale.
  const Parameter scale{problem.scale.rows.data, problem.scale.type}, gate{problem.gate.rows.data, problem.gate.type};
  const auto shared = common_type(problem.type, {scale, problem.weight, problem.bias});
  const bool scaled = scale.data != nullptr;
  const bool affine = problem.weight.data != nullptr || problem.bias.data != nullptr;
  Factors factors;
  factors.float32_shared = shared != problem.type;
  factors.float32_gate = gate.data != nullptr && gate.type != problem.type;
  const bool rounded = problem.stepwise && (factors.float32_shared || factors.float32_gate);
  factors.fast = !rounded && common_type(problem.type, {scale, problem.weight, problem.bias, gate}).has_value();
  factors.simple = factors.fast && scaled && problem.bias.data == nullptr && !problem.stepwise &&
                   !factors.float32_shared && !factors.float32_gate;
  factors.one_factor = shared.has_value() && !rounded && !(scaled && affine);
  return factors;
}

// Fills in the parameters that do not depend on the launch configuration. Returns false when no fast path takes the
// rows: they are aligned and, like modulations, evenly strided.
bool as_tiled(const Forward& problem, TiledForward* tiled) {
  // Without modulations, any division of the rows into spans gives the same result.
  const bool modulated = problem.scale.rows.data != nullptr || problem.gate.rows.data != nullptr;
  const int64_t span = !modulated && problem.x.dims == 2 ? problem.x.sizes[1] : problem.span;
  if (problem.rows >= INT32_MAX || !all_aligned(problem) || problem.gate.rows.dims > 1 || problem.scale.rows.dims > 1 ||
      problem.shift.rows.dims > 1 || !as_strided(problem.x, span, &tiled->x) ||
      !as_strided(problem.branch, span, &tiled->branch)) {
    return false;
  }
  tiled->normed = problem.normed;
  tiled->span = static_cast<uint32_t>(span);
  tiled->hidden = static_cast<int>(problem.hidden);
  tiled->eps = problem.eps;
  tiled->centered = problem.centered;
  tiled->stepwise = problem.stepwise;
  tiled->sum = problem.sum;
  tiled->gate = {problem.gate.rows.data, problem.gate.rows.strides[0]};
  return true;
}

// Fills in modulations and parameters.
void add_shared(const Forward& problem, const Factors& factors, bool one_factor, TiledForward* tiled) {
  const Shared scale{problem.scale.rows.data, problem.scale.rows.strides[0]};
  const Shared shift{problem.shift.rows.data, problem.shift.rows.strides[0]};
  const Shared weight{problem.weight.data, 0}, bias{problem.bias.data, 0};
  tiled->float32_gate = factors.float32_gate;
  if (one_factor) {
    const bool affine = weight.data != nullptr || bias.data != nullptr;
    tiled->float32_shared = factors.float32_shared;
    tiled->shared[kFactor] = affine ? weight : scale;
    tiled->shared[kOffset] = affine ? bias : shift;
    tiled->staged = 2;
    tiled->weighted = weight.data != nullptr;
    tiled->stepwise_norm = problem.stepwise && scale.data != nullptr;
    return;
  }
  tiled->float32_shared = factors.float32_shared || factors.float32_gate;
  tiled->simple = factors.simple;
  const Shared shared[kSharedRows] = {scale, shift, weight, bias};
  for (int k = 0; k < kSharedRows; ++k) {
    if (shared[k].data == nullptr) continue;
    tiled->slots[k] = static_cast<int8_t>(tiled->staged);
    tiled->shared[tiled->staged++] = shared[k];
  }
}

// Returns the row of the launch table for a problem, or -1.
int select_row(const Forward& problem, const Factors& factors, int64_t vectors) {
  const Branch branch = problem.branch.data == nullptr      ? Branch::none
                        : problem.gate.rows.data == nullptr ? Branch::plain
                                                            : Branch::gated;
  const auto find = [&](FactorCount count) {
    return find_row(kForwardTable, {compiled_capability(), problem.type, {branch, count}, vectors});
  };
  const int general = factors.fast ? find(FactorCount::any) : -1;
  if (!factors.one_factor || (factors.simple && general >= 0)) return general;
  const int row = find(FactorCount::one);
  return row < 0 ? general : row;
}

template <typename T>
cudaError_t launch(const Forward& problem, const DeviceProperties& device, cudaStream_t stream) {
  const Factors factors = factors_of(problem);
  const int64_t vectors = problem.hidden / kVectorWidth<T>;
  const int row = select_row(problem, factors, vectors);
  TiledForward tiled(problem.hidden);
  if (row < 0 || vectors > kForwardTable[row].max_threads * kForwardTable[row].vectors || !as_tiled(problem, &tiled)) {
    return launch_general(problem, stream);
  }
  add_shared(problem, factors, kForwardTable[row].is(FactorCount::one), &tiled);
  const int staged_words = tiled.staged * (tiled.float32_shared ? 2 : 1);
  const TileLayout layout = tile_layout(kForwardTable[row], static_cast<int>(vectors), staged_words);
  const size_t most_bytes = std::max(kDefaultSharedBytes, static_cast<size_t>(device.max_shared_bytes_per_block));
  if (layout.shared_bytes + kStaticSharedBytes > most_bytes) {
    return launch_general(problem, stream);
  }
  return launch_row<kForwardTable, dtype_bit(kTypeOf<T>)>(
      row, [&](auto index) { return launch_tiles<T, index()>(tiled, problem.rows, layout, device, stream); });
}

}  // namespace

int run(const Forward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  DeviceProperties device;
  cudaError_t error = current_device_properties(&device);
  if (error != cudaSuccess) return error;
  if (problem.normed == nullptr) {
    return launch_gate(problem, device, cuda_stream, &error) ? error : launch_general(problem, cuda_stream);
  }
  dispatch_dtype(problem.type,
                 [&](auto tag) { error = launch<typename decltype(tag)::Element>(problem, device, cuda_stream); });
  return error;
}

}  // namespace adaln
