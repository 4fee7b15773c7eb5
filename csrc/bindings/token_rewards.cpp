#include "ops/token_rewards.h"

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "cuda/token_rewards.h"

namespace py = pybind11;

namespace turnwise {
namespace {

bool sum(py::object rewards, py::object mask, py::object cu_seqlens, py::object lengths, py::object sums, int threads) {
    const TokenRewardsInput input{view_of(rewards, "token_rewards"), view_of(mask, "mask"),
                                  view_of(cu_seqlens, "cu_seqlens"), view_of(lengths, "lengths")};
    const View out = view_of(sums, "sums");
    py::gil_scoped_release unlocked;
    return token_reward_sum(input, out, threads);
}

bool returns_of(py::object rewards, py::object mask, py::object cu_seqlens, double gamma, py::object returns,
                int threads) {
    const TokenRewardsInput input{
        view_of(rewards, "token_rewards"), view_of(mask, "mask"), view_of(cu_seqlens, "cu_seqlens"), {}};
    const View out = view_of(returns, "returns");
    py::gil_scoped_release unlocked;
    return token_returns(input, gamma, out, threads);
}

void cuda_sum(py::object rewards, py::object mask, py::object cu_seqlens, py::object lengths, py::object sums,
              py::object workspace, uintptr_t stream) {
    const TokenRewardsInput input{cuda_view_of(rewards, "token_rewards"), cuda_view_of(mask, "mask"),
                                  cuda_view_of(cu_seqlens, "cu_seqlens"), cuda_view_of(lengths, "lengths")};
    const View out = cuda_view_of(sums, "sums"), space = cuda_view_of(workspace, "workspace");
    py::gil_scoped_release unlocked;
    cuda::token_reward_sum(input, out, space, {stream});
}

void cuda_returns(py::object rewards, py::object mask, py::object cu_seqlens, double gamma, py::object returns,
                  py::object workspace, uintptr_t stream) {
    const TokenRewardsInput input{
        cuda_view_of(rewards, "token_rewards"), cuda_view_of(mask, "mask"), cuda_view_of(cu_seqlens, "cu_seqlens"), {}};
    const View out = cuda_view_of(returns, "returns"), space = cuda_view_of(workspace, "workspace");
    py::gil_scoped_release unlocked;
    cuda::token_returns(input, gamma, out, space, {stream});
}

}  // namespace

void bind_token_rewards(py::module_& module) {
    module.def("token_reward_sum", &sum, py::arg("token_rewards"), py::arg("mask"), py::arg("cu_seqlens"),
               py::arg("lengths"), py::arg("sums"), py::arg("threads"),
               "Writes the sum of each row's rewards; false where they are not finite.");
    module.def("token_returns", &returns_of, py::arg("token_rewards"), py::arg("mask"), py::arg("cu_seqlens"),
               py::arg("gamma"), py::arg("returns"), py::arg("threads"),
               "Writes discounted rewards to go; false where rewards are not finite.");
    module.def("cuda_token_reward_sum_workspace", &cuda::token_reward_sum_workspace, py::arg("tokens"),
               "Bytes of workspace that cuda_token_reward_sum needs.");
    module.def("cuda_token_scan_workspace", &cuda::token_scan_workspace, py::arg("tokens"),
               "Bytes of workspace that cuda_token_returns and cuda_gae need.");
    module.def("cuda_token_reward_sum", &cuda_sum, py::arg("token_rewards"), py::arg("mask"), py::arg("cu_seqlens"),
               py::arg("lengths"), py::arg("sums"), py::arg("workspace"), py::arg("stream"),
               "token_reward_sum on a CUDA stream.");
    module.def("cuda_token_returns", &cuda_returns, py::arg("token_rewards"), py::arg("mask"), py::arg("cu_seqlens"),
               py::arg("gamma"), py::arg("returns"), py::arg("workspace"), py::arg("stream"),
               "token_returns on a CUDA stream.");
}

}  // namespace turnwise
