#include "cuda/gae.h"

#include "cuda/token_scan.h"

namespace turnwise::cuda {

void gae(const GaeInput& input, double gamma, double lam, const View& advantages, const View& returns,
         const View& workspace, Stream stream) {
    const TokenRows rows = token_rows(input.rewards, input.cu_seqlens, "rewards");
    check_kernel_mask(input.rewards, input.mask);
    check_same_shape(input.rewards, input.values, "values: wrong shape");
    check_same_shape(input.rewards, advantages, "advantages: wrong shape");
    check_same_shape(input.rewards, returns, "returns: wrong shape");
    const ScanFactors factors{float(gamma * lam), float(gamma * (1 - lam))};
    scan<true>(input.rewards, input.values, input.mask, rows, factors, advantages, returns, workspace, stream);
}

}  // namespace turnwise::cuda
