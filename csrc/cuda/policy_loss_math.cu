// Compiles the per-token formulas for the device, so that the header stays one that nvcc takes. The kernels over whole
// batches build on this.
#include "ops/scalar_math.h"

namespace turnwise::cuda {

template <KlKind kind>
__device__ float2 token(float log_ratio, float advantage, float d, ClipBounds clip, float kl_coef) {
    const auto bounded = clamp_symmetric<ScalarMath>(log_ratio, kLogRatioBound);
    const float ratio = ScalarMath::exp(bounded.value);
    const auto loss = clipped_surrogate<ScalarMath>(ratio, bounded.cut, advantage, clip);
    const auto kl = kl_term<ScalarMath, kind>(d);
    return {loss.loss + kl_coef * kl.value, loss.grad + kl_coef * kl.grad};
}

template __device__ float2 token<KlKind::none>(float, float, float, ClipBounds, float);
template __device__ float2 token<KlKind::k1>(float, float, float, ClipBounds, float);
template __device__ float2 token<KlKind::abs>(float, float, float, ClipBounds, float);
template __device__ float2 token<KlKind::k2>(float, float, float, ClipBounds, float);
template __device__ float2 token<KlKind::k3>(float, float, float, ClipBounds, float);
template __device__ float2 token<KlKind::k1_plus>(float, float, float, ClipBounds, float);
template __device__ float2 token<KlKind::k3_plus>(float, float, float, ClipBounds, float);

}  // namespace turnwise::cuda
