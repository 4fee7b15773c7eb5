// From rewards per token to the loss: sums the rewards of each row, computes advantages of the sums within groups, then
// the policy loss.
#pragma once

#include "ops/group_advantage.h"
#include "ops/policy_loss.h"

namespace turnwise {

struct GroupedPolicyLossInput {
    PolicyLossInput
        loss;  // its advantages [B] f32, contiguous, are an output: the op writes them before the loss reads them
    View token_rewards;         // shape and types as loss.logprobs
    GroupAdvantageInput group;  // its rewards [B] f32, contiguous, are an output: the sums of token rewards
};

// Throws InvalidInput.
void grouped_policy_loss(const GroupedPolicyLossInput& input, const GroupAdvantageOptions& group,
                         const PolicyLossOptions& options, const PolicyLossOutput& output);

}  // namespace turnwise
