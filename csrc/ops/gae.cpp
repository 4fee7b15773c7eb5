#include "ops/gae.h"

#include "ops/token_scan.h"

namespace turnwise {

bool gae(const GaeInput& input, double gamma, double lam, const View& advantages, const View& returns, int threads) {
    const TokenLayout layout(input.rewards, input.cu_seqlens, "rewards");
    check_token_stream(layout, input.rewards, "rewards");
    check_token_stream(layout, input.values, "values");
    for (const View* out : {&advantages, &returns}) {
        require(layout.fits(*out) && out->dtype == DType::f32, "advantages, returns: expected float32, as rewards");
    }
    ScanPowers powers{};
    token_rewards_kernels().powers(gamma * lam, powers);
    powers.value = float(gamma * (1 - lam));
    return scan_rows(
        {layout, input.rewards, input.values, input.mask, advantages, returns, powers, token_rewards_kernels().gae},
        threads);
}

}  // namespace turnwise
