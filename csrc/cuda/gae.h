// The op of ops/gae.h on a GPU. The same inputs, all contiguous; rewards and values have one type, the mask has bytes
// or float32.
#pragma once

#include "core/view.h"
#include "cuda/stream.h"
#include "ops/gae.h"

namespace turnwise::cuda {

// Writes advantages and returns; does not check values. workspace: token_scan_workspace bytes, 16-byte aligned.
void gae(const GaeInput& input, double gamma, double lam, const View& advantages, const View& returns,
         const View& workspace, Stream stream);

}  // namespace turnwise::cuda
