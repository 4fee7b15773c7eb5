// The op of ops/grouped_policy_loss.h on a GPU in two launches: rewards, advantages and row sums; then the loss.
#pragma once

#include "core/view.h"
#include "cuda/stream.h"
#include "ops/grouped_policy_loss.h"

namespace turnwise::cuda {

// Bytes of workspace. groups: num_groups of the input. weighted: Center::length_weighted.
int64_t grouped_policy_loss_workspace(int64_t rows, int64_t tokens, int num_actors, int64_t groups, bool weighted,
                                      int device);

// Groups as in group_advantage.h, but not by trajectory.
void grouped_policy_loss(const GroupedPolicyLossInput& input, const GroupAdvantageOptions& group,
                         const PolicyLossOptions& options, const PolicyLossOutput& output, const View& workspace,
                         Stream stream);

}  // namespace turnwise::cuda
