// Modulated norms, with and without a gated branch that is added before: selects and launches a kernel.
//
// Reads:    x, the branch, modulations and parameters.
// Writes:   `normed`, and `sum` when there is a branch.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Bytes moved, for elements of e bytes and modulations of m bytes: rows * hidden * 2e (4e with a branch), and
// rows / span * hidden * 2m (3m).
#include "adaln_cuda/adaln.h"
#include "adaln_cuda/forward_general.cuh"
#include "adaln_cuda/forward_rows.cuh"

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
                           int64_t rows, int64_t element, int sms) {
  const auto contiguous = [&](const StridedRows& strided) {
    return strided.row_stride == problem.hidden && strided.span_stride == int64_t{problem.span} * problem.hidden;
  };
  const int64_t row_bytes = problem.hidden * element * (config.branch ? 2 : 1);  // that are read
  if (layout.tiles > 1 || problem.span % config.rows != 0 || !contiguous(problem.x) ||
      (config.branch && !contiguous(problem.branch)) || !prefetch_pays(2 * rows * row_bytes)) {
    return 0;
  }
  return static_cast<uint32_t>(sms * std::max<int64_t>(config.prefetch_bytes_per_sm / (row_bytes * config.rows), 1));
}

template <typename T, int kRow>
cudaError_t launch_tiles(TiledForward& problem, int64_t rows, const TileLayout& layout, cudaStream_t stream) {
  constexpr ForwardConfig kConfig = kForwardTable[kRow];
  int sms;
  cudaError_t error = sm_count(&sms);
  if (error != cudaSuccess) return error;
  problem.tiles_per_span = (problem.span + kConfig.rows - 1) / kConfig.rows;
  problem.tiles = static_cast<uint32_t>(rows / problem.span) * problem.tiles_per_span;
  problem.spans = Divider(problem.tiles_per_span);
  problem.prefetch_distance = prefetch_distance(problem, kConfig, layout, rows, sizeof(T), sms);
  const auto kernel = forward_kernel<T, kRow>;
  error = allow_shared_bytes(kernel, layout.shared_bytes, kStaticSharedBytes);
  if (error != cudaSuccess) return error;
  return launch_with_pdl(kernel, dim3((problem.tiles + layout.tiles - 1) / layout.tiles),
                         dim3(layout.group, layout.tiles), layout.shared_bytes, stream, problem);
}

bool all_aligned(const Forward& problem) {
  const int64_t element = bytes_of(problem.type);
  return problem.hidden % (kVectorBytes / element) == 0 && aligned(problem.x, element) &&
         aligned(problem.branch, element) && aligned(problem.gate) && aligned(problem.scale) &&
         aligned(problem.shift) && aligned(problem.weight.data) && aligned(problem.bias.data) &&
         aligned(problem.normed) && aligned(problem.sum);
}

// Fills in the parameters that do not depend on the launch configuration. Returns false when the fast path does not
// take the problem: rows are evenly strided and aligned; modulations and parameters share a dtype.
bool as_tiled(const Forward& problem, TiledForward* tiled) {
  CommonType common(problem.type);
  for (const Modulation* modulation : {&problem.gate, &problem.scale, &problem.shift}) common.add(*modulation);
  for (const Parameter* parameter : {&problem.weight, &problem.bias}) common.add(*parameter);
  tiled->float32_shared = common.type() != problem.type;
  // Without modulations, any division of the rows into spans gives the same result.
  const bool modulated = problem.scale.rows.data != nullptr || problem.gate.rows.data != nullptr;
  const int64_t span = !modulated && problem.x.dims == 2 ? problem.x.sizes[1] : problem.span;
  if (!common.unique() || (problem.stepwise && tiled->float32_shared) || problem.rows >= INT32_MAX ||
      !all_aligned(problem) || problem.gate.rows.dims > 1 || problem.scale.rows.dims > 1 ||
      problem.shift.rows.dims > 1 || !as_strided(problem.x, span, &tiled->x) ||
      !as_strided(problem.branch, span, &tiled->branch)) {
    return false;
  }
  const Shared shared[kSharedRows] = {{problem.scale.rows.data, problem.scale.rows.strides[0]},
                                      {problem.shift.rows.data, problem.shift.rows.strides[0]},
                                      {problem.weight.data, 0},
                                      {problem.bias.data, 0}};
  for (int k = 0; k < kSharedRows; ++k) {
    if (shared[k].data == nullptr) continue;
    tiled->slots[k] = static_cast<int8_t>(tiled->staged);
    tiled->shared[tiled->staged++] = shared[k];
  }
  tiled->normed = problem.normed;
  tiled->span = static_cast<uint32_t>(span);
  tiled->hidden = static_cast<int>(problem.hidden);
  tiled->eps = problem.eps;
  tiled->centered = problem.centered;
  tiled->stepwise = problem.stepwise;
  tiled->simple =
      shared[kScale].data != nullptr && shared[kBias].data == nullptr && !problem.stepwise && !tiled->float32_shared;
  tiled->sum = problem.sum;
  tiled->gate = {problem.gate.rows.data, problem.gate.rows.strides[0]};
  return true;
}

template <typename T>
cudaError_t launch(const Forward& problem, cudaStream_t stream) {
  const int capability = compiled_capability(reinterpret_cast<const void*>(forward_kernel<T, 0>));
  const bool branch = problem.branch.data != nullptr;
  const int row = find_row(kForwardTable, capability, [&](const ForwardConfig& one) { return one.branch == branch; });
  const int64_t vectors = problem.hidden / kVectorWidth<T>;
  TiledForward tiled(problem.hidden);
  if (row < 0 || vectors > kForwardTable[row].max_threads * kForwardTable[row].vectors || !as_tiled(problem, &tiled)) {
    return launch_general<T>(problem, capability, stream);
  }
  const int staged_words = tiled.staged * (tiled.float32_shared ? 2 : 1);
  const TileLayout layout = tile_layout(kForwardTable[row], static_cast<int>(vectors), staged_words);
  const size_t shared_bytes = layout.shared_bytes + kStaticSharedBytes;
  if (shared_bytes > kDefaultSharedBytes && shared_bytes > max_shared_bytes_per_block()) {
    return launch_general<T>(problem, capability, stream);
  }
  return with_row(kForwardTable, row, [&](auto index) {
    return launch_tiles<T, decltype(index)::value>(tiled, problem.rows, layout, stream);
  });
}

}  // namespace

int forward(const Forward& problem, void* stream) {
  cudaError_t error = cudaSuccess;
  dispatch_dtype(problem.type, [&](auto tag) {
    error = launch<typename decltype(tag)::Element>(problem, static_cast<cudaStream_t>(stream));
  });
  return error;
}

}  // namespace adaln
