// Sums of token rewards: over each row, and discounted from each token on.
#pragma once

#include "core/view.h"

namespace turnwise {

struct TokenRewardsInput {
    View rewards;     // [B, T], or [N] with cu_seqlens; f32, bf16, f16; any strides, like the mask
    View mask;        // shape of the rewards; any type but f64; or none
    View cu_seqlens;  // [B + 1] i32 or i64; or none
    View lengths;     // [B] i32 or i64: tokens of each row that count; only without mask and cu_seqlens; or none
};

// Writes the sums of the trained tokens' rewards to sums [B] (f32 or f64, contiguous). Returns false if a sum is not
// finite. Throws InvalidInput.
bool token_reward_sum(const TokenRewardsInput& input, const View& sums, int threads);

// Writes the return of each trained token to `returns` (f32, contiguous, shape of the rewards): the sum over k >= 0 of
// gamma^k times the reward of the k-th trained token from it on. Masked tokens get 0. `lengths` is not used. Returns
// false if a trained token's reward is not finite. Throws InvalidInput.
bool token_returns(const TokenRewardsInput& input, double gamma, const View& returns, int threads);

}  // namespace turnwise
