// The operators of this kernel. What is wrong with an argument is reported as an error that names it.
//
// In both: q and k are [B, S, H, D], or [B, H, S, D] if `heads_first`, or [B, S, H * D] with D = `head_dim`, of which 0
// means all. `cos` and `sin` hold one table of [S', P] or [B, S', P], or three of a grid whose rows multiply to S'. The
// last S' tokens turn; those before them stay. `in_turn`, `half` and `inverse` are those of the problem.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

using torch::stable::Tensor;

// q and k rotated, contiguous; the latter is empty without k.
std::tuple<Tensor, Tensor> rotate(const Tensor& q, const std::optional<Tensor>& k, std::vector<Tensor> cos,
                                  std::vector<Tensor> sin, bool in_turn, bool half, bool heads_first, int64_t head_dim,
                                  bool inverse);

// The same in place.
void rotate_(Tensor q, std::optional<Tensor> k, std::vector<Tensor> cos, std::vector<Tensor> sin, bool in_turn,
             bool half, bool heads_first, int64_t head_dim, bool inverse);
