// The ops that normalize and rotate in one pass.
#pragma once

#include <tuple>

#include "torch-ext/arguments.h"

// q and k, RMSNorm'd and then rotated by `cos` and `sin`, contiguous; the latter is undefined, in Python None, without
// k. The norm is over each head, or over all heads of a token if `per_token`; rope3d/norm_problem.h has the formula and
// its roundings. Weights have one entry for each element that is normalized together. The other arguments are those of
// rotate_tokens.
std::tuple<kit::Tensor, kit::Tensor> norm_rotate(kit::Tensor q, rope3d::MaybeTensor k, rope3d::MaybeTensor q_weight,
                                                 rope3d::MaybeTensor k_weight, kit::Tensor cos, kit::Tensor sin,
                                                 double eps, bool per_token, double offset, bool rounded_before_weight,
                                                 int64_t rotary_dim, int64_t prefix, int64_t head_dim, bool half,
                                                 bool heads_first);

// The gradients with respect to q, k and their weights. Those of q and k are undefined, in Python None, without the
// gradient of the result; those of the weights unless `of_q_weight` or `of_k_weight` asks for them, which takes the
// gradient of the result.
std::tuple<kit::Tensor, kit::Tensor, kit::Tensor, kit::Tensor> norm_rotate_backward(
    rope3d::MaybeTensor grad_q, rope3d::MaybeTensor grad_k, bool of_q_weight, bool of_k_weight, kit::Tensor q,
    rope3d::MaybeTensor k, rope3d::MaybeTensor q_weight, rope3d::MaybeTensor k_weight, kit::Tensor cos, kit::Tensor sin,
    double eps, bool per_token, double offset, bool rounded_before_weight, int64_t rotary_dim, int64_t prefix,
    int64_t head_dim, bool half, bool heads_first);
