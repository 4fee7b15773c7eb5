#include "ops/grouped_policy_loss.h"

#include "bindings/bindings.h"
#include "bindings/policy_loss.h"
#include "bindings/tensor.h"
#include "core/check.h"
#include "cuda/grouped_policy_loss.h"

namespace py = pybind11;

namespace turnwise {
namespace {

// (sums, group_ids, num_groups, trajectory_ids, lengths, valid)
GroupAdvantageInput group_input(const py::tuple& columns, Reader read) {
    require(columns.size() == 6, "columns: expected six");
    const auto view = [&](size_t i, const char* name) { return read(columns[i], name); };
    return {view(0, "sums"),    view(1, "group_ids"), view(3, "trajectory_ids"),
            view(4, "lengths"), view(5, "valid"),     columns[2].cast<int64_t>()};
}

// (by_trajectory, center, scale, singleton, ddof, eps, min_std)
GroupAdvantageOptions group_options(const py::tuple& o) {
    require(o.size() == 7, "rule: expected seven options");
    return {o[0].cast<bool>(), Center(o[1].cast<int>()), Scale(o[2].cast<int>()), Singleton(o[3].cast<int>()),
            o[4].cast<int>(),  o[5].cast<double>(),      o[6].cast<double>()};
}

void call(const py::tuple& streams, const py::tuple& numbers, const py::tuple& modes, py::object token_rewards,
          const py::tuple& columns, const py::tuple& rule, py::object loss, py::object grad, py::object metrics,
          int threads) {
    const GroupedPolicyLossInput input{policy_loss_input(streams, view_of), view_of(token_rewards, "token_rewards"),
                                       group_input(columns, view_of)};
    const PolicyLossOptions options = policy_loss_options(numbers, modes, threads);
    const PolicyLossOutput output = policy_loss_output(loss, grad, metrics, input.loss, options, view_of);
    const GroupAdvantageOptions group = group_options(rule);
    py::gil_scoped_release unlocked;
    grouped_policy_loss(input, group, options, output);
}

void cuda_call(const py::tuple& streams, const py::tuple& numbers, const py::tuple& modes, py::object token_rewards,
               const py::tuple& columns, const py::tuple& rule, py::object loss, py::object grad, py::object metrics,
               py::object workspace, uintptr_t stream) {
    const GroupedPolicyLossInput input{policy_loss_input(streams, cuda_view_of),
                                       cuda_view_of(token_rewards, "token_rewards"),
                                       group_input(columns, cuda_view_of)};
    const PolicyLossOptions options = policy_loss_options(numbers, modes, 0);
    const PolicyLossOutput output = policy_loss_output(loss, grad, metrics, input.loss, options, cuda_view_of);
    const GroupAdvantageOptions group = group_options(rule);
    const View scratch = cuda_view_of(workspace, "workspace");
    py::gil_scoped_release unlocked;
    cuda::grouped_policy_loss(input, group, options, output, scratch, {stream});
}

}  // namespace

void bind_grouped_policy_loss(py::module_& module) {
    module.def("grouped_policy_loss", &call, py::arg("streams"), py::arg("numbers"), py::arg("modes"),
               py::arg("token_rewards"), py::arg("columns"), py::arg("rule"), py::arg("loss"), py::arg("grad"),
               py::arg("metrics"), py::arg("threads"),
               "Writes sums of rewards, advantages, loss, gradient and metrics of the grouped policy loss.");
    module.def("cuda_grouped_policy_loss", &cuda_call, py::arg("streams"), py::arg("numbers"), py::arg("modes"),
               py::arg("token_rewards"), py::arg("columns"), py::arg("rule"), py::arg("loss"), py::arg("grad"),
               py::arg("metrics"), py::arg("workspace"), py::arg("stream"), "The same on a CUDA device.");
    module.def("cuda_grouped_policy_loss_workspace", &cuda::grouped_policy_loss_workspace, py::arg("rows"),
               py::arg("tokens"), py::arg("num_actors"), py::arg("groups"), py::arg("weighted"), py::arg("device"),
               "The bytes of workspace that cuda_grouped_policy_loss needs.");
}

}  // namespace turnwise
