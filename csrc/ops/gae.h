// Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16) over the tokens of each row.
#pragma once

#include "core/view.h"

namespace turnwise {

struct GaeInput {
    View rewards;     // [B, T], or [N] with cu_seqlens; f32, bf16, f16; any strides, like all streams
    View values;      // shape and types as rewards
    View mask;        // shape of the rewards; any type but f64; or none
    View cu_seqlens;  // [B + 1] i32 or i64; or none
};

// Writes advantages and returns (f32, contiguous, shape of the rewards). The recursion skips masked tokens, which get
// 0. Returns false if a row's first return is not finite, so if a reward of a trained token is not, or a value other
// than that of the row's first trained token. Throws InvalidInput.
bool gae(const GaeInput& input, double gamma, double lam, const View& advantages, const View& returns, int threads);

}  // namespace turnwise
