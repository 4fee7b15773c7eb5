// The ops of ops/token_rewards.h on a GPU: the same inputs, all contiguous, a mask of bytes or float32.
#pragma once

#include "core/view.h"
#include "cuda/stream.h"
#include "ops/token_rewards.h"

namespace turnwise::cuda {

// Bytes of workspace for a stream of so many tokens.
int64_t token_reward_sum_workspace(int64_t tokens);

// One launch for padded rows of at most 4096 tokens, two otherwise. sums [B] f32. workspace: u8, 16-byte aligned.
void token_reward_sum(const TokenRewardsInput& input, const View& sums, const View& workspace, Stream stream);

// One launch, and a fill of the workspace before it where rows are longer than 4096 tokens or packed.
int64_t token_scan_workspace(int64_t tokens);
void token_returns(const TokenRewardsInput& input, double gamma, const View& returns, const View& workspace,
                   Stream stream);

}  // namespace turnwise::cuda
