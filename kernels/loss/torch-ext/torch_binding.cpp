// Binds the kernels to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, dtypes and devices of the arguments.
// Writes:   only tensors that it allocates, and the logits.
// Must not: compute; call anything of Torch newer than 2.10.
#include <cstdint>
#include <limits>
#include <string>

#include "kit/tensors.h"
#include "loss/problem.h"
#include "registration.h"

const char* const kit::kProject = "loss";

namespace {

using namespace kit;

// The losses of rows of logits, float32; their gradients replace the logits. loss/problem.h has the formula.
Tensor cross_entropy_(Tensor logits, Tensor target, Tensor scale, int64_t ignore_index, double label_smoothing,
                      double softcap, double z_loss) {
  check_first(logits, "logits");
  if (logits.dim() != 2 || !logits.is_contiguous()) fail("logits", "must be contiguous and have two dimensions");
  loss::CrossEntropy problem{};
  problem.type = element_type(logits, "logits");
  problem.rows = logits.size(0);
  problem.vocabulary = logits.size(1);
  if (problem.rows > std::numeric_limits<int32_t>::max() || problem.vocabulary > std::numeric_limits<int32_t>::max()) {
    fail("logits", "must have less than 2^31 rows and columns");
  }
  const int64_t expected[] = {problem.rows};
  check_device(target, "target", logits, "logits");
  if (dtype(target) != aoti_torch_dtype_int64()) fail("target", "must be int64");
  check_shape(target, "target", {expected, 1});
  check_device(scale, "scale", logits, "logits");
  if (dtype(scale) != aoti_torch_dtype_float32() || scale.numel() != 1) fail("scale", "must be one float32 number");

  [[maybe_unused]] const auto device = enter(logits);
  Tensor losses = allocate({expected, 1}, aoti_torch_dtype_float32(), logits);
  if (problem.rows == 0) return losses;
  if (problem.vocabulary == 0) fail("logits", "must have at least one column");
  target = torch::stable::contiguous(target);
  problem.logits = logits.mutable_data_ptr();
  problem.targets = static_cast<const int64_t*>(target.const_data_ptr());
  problem.scale = static_cast<const float*>(scale.const_data_ptr());
  problem.losses = static_cast<float*>(losses.mutable_data_ptr());
  problem.ignored = ignore_index;
  problem.smoothing = static_cast<float>(label_smoothing);
  problem.softcap = static_cast<float>(softcap);
  problem.z_loss = static_cast<float>(z_loss);
  launch(problem, logits, problem.rows, problem.vocabulary);
  return losses;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "cross_entropy_(Tensor(a!) logits, Tensor target, Tensor scale, int ignore_index, float label_smoothing, "
      "float softcap, float z_loss) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, KIT_BACKEND, ops) {
  ops.impl("cross_entropy_", TORCH_BOX(&cross_entropy_));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
