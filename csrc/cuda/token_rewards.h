// The ops of ops/token_rewards.h on a GPU. The same inputs, all contiguous; the mask has bytes or float32.
#pragma once

#include "core/view.h"
#include "cuda/stream.h"
#include "ops/token_rewards.h"

namespace turnwise::cuda {

// Bytes of workspace for a stream of `tokens` tokens.
int64_t token_reward_sum_workspace(int64_t tokens);

// Writes sums [B] f32. One launch for padded rows of at most 4096 tokens, two otherwise. workspace: u8, 16-byte
// aligned.
void token_reward_sum(const TokenRewardsInput& input, const View& sums, const View& workspace, Stream stream);

// token_returns takes one launch. If rows are packed or longer than 4096 tokens, it first fills the workspace.
int64_t token_scan_workspace(int64_t tokens);
void token_returns(const TokenRewardsInput& input, double gamma, const View& returns, const View& workspace,
                   Stream stream);

}  // namespace turnwise::cuda
