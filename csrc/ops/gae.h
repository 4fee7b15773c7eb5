// Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16) over the tokens of each row.
#pragma once

#include "core/view.h"

namespace turnwise {

struct GaeInput {
    View rewards;     // [B, T], or [N] with cu_seqlens; f32, bf16, f16; any strides, as all streams
    View values;      // the same shape and types
    View mask;        // the same shape; any type but f64; or none
    View cu_seqlens;  // [B + 1] i32 or i64, or none
};

// Writes advantages and returns (f32, contiguous, shape of the rewards); masked tokens are passed over and get 0.
// False where a trained token's reward or value is not finite. Throws InvalidInput.
bool gae(const GaeInput& input, double gamma, double lam, const View& advantages, const View& returns, int threads);

}  // namespace turnwise
