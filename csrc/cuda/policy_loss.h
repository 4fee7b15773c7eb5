// The op of ops/policy_loss.h on a GPU, in at most two launches and without a host sync.
#pragma once

#include "core/view.h"
#include "cuda/stream.h"
#include "ops/policy_loss.h"

namespace turnwise::cuda {

// Bytes of workspace that a call of this size may need, on any stream of the device.
int64_t policy_loss_workspace(int64_t rows, int64_t tokens, int num_actors, int device);

// Does not check values: an actor id out of range makes the loss NaN, and cu_seqlens that do not cover all tokens leave
// some out. workspace: policy_loss_workspace bytes.
void policy_loss(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output,
                 const View& workspace, Stream stream);

}  // namespace turnwise::cuda
