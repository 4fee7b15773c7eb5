#include "cuda/gae.h"

#include "cuda/token_scan.h"

namespace turnwise::cuda {

void gae(const GaeInput& input, double gamma, double lam, const View& advantages, const View& returns,
         const View& workspace, Stream stream) {
    const ScanCall call{input.rewards,
                        input.values,
                        input.mask,
                        advantages,
                        returns,
                        token_rows(input.rewards, input.cu_seqlens, "rewards"),
                        {float(gamma * lam), float(gamma * (1 - lam))}};
    require_given("values", input.values, "gae reads it");
    require_given("advantages", advantages, "gae writes it");
    scan<true>("rewards", call, workspace, stream);
}

}  // namespace turnwise::cuda
