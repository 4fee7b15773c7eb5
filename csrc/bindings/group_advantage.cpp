#include "ops/group_advantage.h"

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "cuda/group_advantage.h"

namespace py = pybind11;

namespace turnwise {
namespace {

GroupAdvantageInput input_of(py::handle rewards, py::handle group_ids, int64_t num_groups, py::handle trajectory_ids,
                             py::handle lengths, py::handle valid, Reader read) {
    return {read(rewards, "rewards"), read(group_ids, "group_ids"), read(trajectory_ids, "trajectory_ids"),
            read(lengths, "lengths"), read(valid, "valid"),         num_groups};
}

void call(py::handle rewards, py::handle group_ids, py::handle advantages, int64_t num_groups,
          py::handle trajectory_ids, py::handle lengths, py::handle valid, const GroupAdvantageOptions& rule,
          int threads) {
    const auto input = input_of(rewards, group_ids, num_groups, trajectory_ids, lengths, valid, view_of);
    const View out = view_of(advantages, "advantages");
    py::gil_scoped_release unlocked;
    group_advantage(input, rule, out, threads);
}

void cuda_call(py::handle rewards, py::handle group_ids, py::handle advantages, int64_t num_groups,
               py::handle trajectory_ids, py::handle lengths, py::handle valid, const GroupAdvantageOptions& rule,
               py::handle workspace, uintptr_t stream) {
    const auto input = input_of(rewards, group_ids, num_groups, trajectory_ids, lengths, valid, cuda_view_of);
    const View out = cuda_view_of(advantages, "advantages"), space = cuda_view_of(workspace, "workspace");
    py::gil_scoped_release unlocked;
    cuda::group_advantage(input, rule, out, space, {stream});
}

}  // namespace

void bind_group_advantage(py::module_& module) {
    // Python makes a rule once and keeps it: for a small batch, reading seven arguments costs more than the advantages.
    py::class_<GroupAdvantageOptions>(module, "GroupAdvantageRule", py::module_local())
        .def(py::init(
                 [](bool by_trajectory, int center, int scale, int singleton, int ddof, double eps, double min_std) {
                     return GroupAdvantageOptions{
                         by_trajectory, Center(center), Scale(scale), Singleton(singleton), ddof, eps, min_std};
                 }),
             py::arg("by_trajectory"), py::arg("center"), py::arg("scale"), py::arg("singleton"), py::arg("ddof"),
             py::arg("eps"), py::arg("min_std"));
    module.def("group_advantage", &call, py::arg("rewards"), py::arg("group_ids"), py::arg("advantages"),
               py::arg("num_groups"), py::arg("trajectory_ids"), py::arg("lengths"), py::arg("valid"), py::arg("rule"),
               py::arg("threads"), "Writes the advantages of rewards within groups.");
    module.def("cuda_group_advantage_workspace", &cuda::group_advantage_workspace, py::arg("rows"), py::arg("groups"),
               py::arg("by_trajectory"), py::arg("weighted"), "Bytes of workspace that cuda_group_advantage needs.");
    module.def("cuda_group_advantage", &cuda_call, py::arg("rewards"), py::arg("group_ids"), py::arg("advantages"),
               py::arg("num_groups"), py::arg("trajectory_ids"), py::arg("lengths"), py::arg("valid"), py::arg("rule"),
               py::arg("workspace"), py::arg("stream"), "group_advantage on a CUDA stream.");
}

}  // namespace turnwise
