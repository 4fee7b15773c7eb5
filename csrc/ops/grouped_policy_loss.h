// From rewards per token to the loss: their sums over rows, advantages of the sums within groups, the policy loss.
#pragma once

#include "ops/group_advantage.h"
#include "ops/policy_loss.h"

namespace turnwise {

struct GroupedPolicyLossInput {
    PolicyLossInput loss;       // its advantages [B] f32, contiguous, are written here first
    View token_rewards;         // as loss.logprobs
    GroupAdvantageInput group;  // its rewards [B] f32, contiguous, are written here first
};

// Throws InvalidInput.
void grouped_policy_loss(const GroupedPolicyLossInput& input, const GroupAdvantageOptions& group,
                         const PolicyLossOptions& options, const PolicyLossOutput& output);

}  // namespace turnwise
