// Token rewards: their sum over each row, and their discounted sum from each token on.
#pragma once

#include "core/view.h"

namespace turnwise {

struct TokenRewardsInput {
    View rewards;     // [B, T], or [N] with cu_seqlens; f32, bf16, f16; any strides, as the mask
    View mask;        // the same shape; any type but f64; or none
    View cu_seqlens;  // [B + 1] i32 or i64, or none
    View lengths;     // [B] i32 or i64: row b ends there; padded form without a mask alone; or none
};

// Writes the sums of the trained tokens' rewards to sums [B] (f32 or f64, contiguous). False where one of
// them is not finite. Throws InvalidInput.
bool token_reward_sum(const TokenRewardsInput& input, const View& sums, int threads);

// Writes the sums of gamma^k times the reward of the k-th trained token behind, from each trained token on, to returns
// (f32, contiguous, shape of the rewards); masked tokens get 0. No lengths. False where a trained
// token's reward is not finite. Throws InvalidInput.
bool token_returns(const TokenRewardsInput& input, double gamma, const View& returns, int threads);

}  // namespace turnwise
