// The op of ops/policy_loss.h on a GPU, in at most two launches and without a host sync.
#pragma once

#include "core/view.h"
#include "cuda/stream.h"
#include "ops/policy_loss.h"

namespace turnwise::cuda {

// Bytes of scratch memory that a call of this size may need, on any stream of the device.
int64_t policy_loss_workspace(int64_t rows, int64_t tokens, int num_actors, int device);

// Values are not looked at: an actor id out of range makes the loss NaN, cu_seqlens that don't fit leave tokens out.
void policy_loss(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output,
                 const View& workspace, Stream stream);

}  // namespace turnwise::cuda
