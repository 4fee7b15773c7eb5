// The op of ops/group_advantage.h on a GPU: one cooperative launch.
#pragma once

#include "core/view.h"
#include "cuda/stream.h"
#include "ops/group_advantage.h"

namespace turnwise::cuda {

// Bytes of workspace. groups: num_groups of the input. weighted: Center::length_weighted.
int64_t group_advantage_workspace(int64_t rows, int64_t groups, bool by_trajectory, bool weighted);

// The same inputs as on the CPU, but num_groups < 0 means that ids are below the number of rows. A row whose id is out
// of range gets NaN, as do groups with a reward that is not finite. workspace: u8, 16-byte aligned.
void group_advantage(const GroupAdvantageInput& input, const GroupAdvantageOptions& options, const View& advantages,
                     const View& workspace, Stream stream);

}  // namespace turnwise::cuda
