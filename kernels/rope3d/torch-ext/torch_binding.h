// The operators of this kernel. What is wrong with an argument is reported as an error that names it.
//
// In all of them: q and k are [B, S, H, D], or [B, H, S, D] if `heads_first`; or, if `head_dim` is not 0, [B, S, H * D]
// with D = `head_dim`, or with one head if it is -1. The first `prefix` tokens of each sequence stay; those after them
// turn, by the negative angles if `inverse`. `half` is that of the problem. The results are q and k rotated,
// contiguous; the latter is empty without k.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

using torch::stable::Tensor;

// By positions on a grid of frames x height x width. `table` is that of the problem, [frames + height + width, entries,
// 2]; `frame_pairs`, `height_pairs` and `width_pairs` are how many pairs of a head turn by each axis.
std::tuple<Tensor, Tensor> rotate_grid(const Tensor& q, const std::optional<Tensor>& k, const Tensor& table,
                                       int64_t frames, int64_t height, int64_t width, int64_t frame_pairs,
                                       int64_t height_pairs, int64_t width_pairs, int64_t prefix, int64_t head_dim,
                                       bool in_turn, bool half, bool heads_first, bool inverse);

// By `cos` and `sin` of [S', n] or [B, S', n]: n is `rotary_dim`, the elements of a head that turn, of which 0 means
// all; or half of it, with one entry for each pair.
std::tuple<Tensor, Tensor> rotate_tokens(const Tensor& q, const std::optional<Tensor>& k, const Tensor& cos,
                                         const Tensor& sin, int64_t rotary_dim, int64_t prefix, int64_t head_dim,
                                         bool half, bool heads_first, bool inverse);

// The same in place.
void rotate_grid_(Tensor q, std::optional<Tensor> k, const Tensor& table, int64_t frames, int64_t height, int64_t width,
                  int64_t frame_pairs, int64_t height_pairs, int64_t width_pairs, int64_t prefix, int64_t head_dim,
                  bool in_turn, bool half, bool heads_first, bool inverse);
void rotate_tokens_(Tensor q, std::optional<Tensor> k, const Tensor& cos, const Tensor& sin, int64_t rotary_dim,
                    int64_t prefix, int64_t head_dim, bool half, bool heads_first, bool inverse);

// Keeps what the operators above are told besides q, k, cos, sin and `inverse`, for as long as the process runs, and
// returns the number that those below know it by: each argument of an operator costs the host a part of a microsecond.
int64_t keep_grid(const Tensor& table, int64_t frames, int64_t height, int64_t width, int64_t frame_pairs,
                  int64_t height_pairs, int64_t width_pairs, int64_t prefix, int64_t head_dim, bool in_turn, bool half,
                  bool heads_first);
int64_t keep_tokens(int64_t rotary_dim, int64_t prefix, int64_t head_dim, bool half, bool heads_first);

// As those above, by the plan of that number.
std::tuple<Tensor, Tensor> rotate_kept_grid(const Tensor& q, const std::optional<Tensor>& k, int64_t plan,
                                            bool inverse);
std::tuple<Tensor, Tensor> rotate_kept_tokens(const Tensor& q, const std::optional<Tensor>& k, const Tensor& cos,
                                              const Tensor& sin, int64_t plan, bool inverse);
void rotate_kept_grid_(Tensor q, std::optional<Tensor> k, int64_t plan, bool inverse);
void rotate_kept_tokens_(Tensor q, std::optional<Tensor> k, const Tensor& cos, const Tensor& sin, int64_t plan,
                         bool inverse);
