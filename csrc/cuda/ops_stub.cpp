// The CUDA ops of a build without CUDA: the same functions, which all throw.
#include "cuda/device.h"
#include "cuda/gae.h"
#include "cuda/group_advantage.h"
#include "cuda/grouped_policy_loss.h"
#include "cuda/logprob.h"
#include "cuda/policy_loss.h"
#include "cuda/scale.h"
#include "cuda/token_rewards.h"

namespace turnwise::cuda {

std::string unsupported_reason(int) {
    reject_without_cuda();
}
void logprob_scan(const LogitTile&, const View&, bool, Stream) {
    reject_without_cuda();
}
void logprob_finish(const View&, const View&, const View&, const View&, Stream) {
    reject_without_cuda();
}
void logprob_grad(const LogitTile&, const LogprobGradient&, const View&, Stream) {
    reject_without_cuda();
}
int64_t grouped_policy_loss_workspace(int64_t, int64_t, int, int64_t, bool, int) {
    reject_without_cuda();
}
void grouped_policy_loss(const GroupedPolicyLossInput&, const GroupAdvantageOptions&, const PolicyLossOptions&,
                         const PolicyLossOutput&, const View&, Stream) {
    reject_without_cuda();
}
int64_t policy_loss_workspace(int64_t, int64_t, int, int) {
    reject_without_cuda();
}
void policy_loss(const PolicyLossInput&, const PolicyLossOptions&, const PolicyLossOutput&, const View&, Stream) {
    reject_without_cuda();
}
void scale(const View&, const View&, Stream) {
    reject_without_cuda();
}

int64_t group_advantage_workspace(int64_t, int64_t, bool, bool) {
    reject_without_cuda();
}
void group_advantage(const GroupAdvantageInput&, const GroupAdvantageOptions&, const View&, const View&, Stream) {
    reject_without_cuda();
}
int64_t token_reward_sum_workspace(int64_t) {
    reject_without_cuda();
}
void token_reward_sum(const TokenRewardsInput&, const View&, const View&, Stream) {
    reject_without_cuda();
}
int64_t token_scan_workspace(int64_t) {
    reject_without_cuda();
}
void token_returns(const TokenRewardsInput&, double, const View&, const View&, Stream) {
    reject_without_cuda();
}
void gae(const GaeInput&, double, double, const View&, const View&, const View&, Stream) {
    reject_without_cuda();
}

}  // namespace turnwise::cuda
