#include "ops/gae.h"

#include "ops/token_scan.h"

namespace turnwise {

bool gae(const GaeInput& input, double gamma, double lam, const View& advantages, const View& returns, int threads) {
    const TokenLayout layout(input.rewards, input.cu_seqlens, "rewards");
    check_token_stream(layout, "rewards", input.rewards);
    check_token_stream(layout, "values", input.values);
    layout.check_shape("advantages", advantages);
    layout.check_shape("returns", returns);
    require_dtype("advantages", advantages, {DType::f32});
    require_dtype("returns", returns, {DType::f32});
    ScanPowers powers{};
    token_rewards_kernels().powers(gamma * lam, powers);
    powers.value = float(gamma * (1 - lam));
    return scan_rows(
        {layout, input.rewards, input.values, input.mask, advantages, returns, powers, token_rewards_kernels().gae},
        threads);
}

}  // namespace turnwise
