#include "ops/grouped_policy_loss.h"

#include "ops/token_rewards.h"

namespace turnwise {

void grouped_policy_loss(const GroupedPolicyLossInput& input, const GroupAdvantageOptions& group,
                         const PolicyLossOptions& options, const PolicyLossOutput& output) {
    const View none;
    token_reward_sum({input.token_rewards, input.loss.mask, input.loss.cu_seqlens, none}, input.group.rewards,
                     options.threads);
    group_advantage(input.group, group, input.loss.advantages, options.threads);
    policy_loss(input.loss, options, output);
}

}  // namespace turnwise
