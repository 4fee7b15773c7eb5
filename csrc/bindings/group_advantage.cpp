#include "ops/group_advantage.h"

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "cuda/group_advantage.h"

namespace py = pybind11;

namespace turnwise {
namespace {

void call(py::object rewards, py::object group_ids, py::object advantages, int64_t num_groups,
          py::object trajectory_ids, py::object lengths, py::object valid, bool by_trajectory, int center, int scale,
          int singleton, int ddof, double eps, double min_std, int threads) {
    const GroupAdvantageInput input{
        view_of(rewards, "rewards"), view_of(group_ids, "group_ids"), view_of(trajectory_ids, "trajectory_ids"),
        view_of(lengths, "lengths"), view_of(valid, "valid"),         num_groups};
    const GroupAdvantageOptions options{by_trajectory, Center(center), Scale(scale), Singleton(singleton), ddof,
                                        eps,           min_std};
    const View out = view_of(advantages, "advantages");
    py::gil_scoped_release unlocked;
    group_advantage(input, options, out, threads);
}

// The same of rewards and ids alone, by a rule made beforehand: what the arguments of a small batch cost counts.
void call_by_rule(py::handle rewards, py::handle group_ids, py::handle advantages, int64_t num_groups,
                  const GroupAdvantageOptions& rule, int threads) {
    const GroupAdvantageInput input{
        view_of(rewards, "rewards"), view_of(group_ids, "group_ids"), {}, {}, {}, num_groups};
    const View out = view_of(advantages, "advantages");
    py::gil_scoped_release unlocked;
    group_advantage(input, rule, out, threads);
}

void cuda_call(py::object rewards, py::object group_ids, py::object advantages, int64_t num_groups,
               py::object trajectory_ids, py::object lengths, py::object valid, bool by_trajectory, int center,
               int scale, int singleton, int ddof, double eps, double min_std, py::object workspace, uintptr_t stream) {
    const GroupAdvantageInput input{cuda_view_of(rewards, "rewards"),
                                    cuda_view_of(group_ids, "group_ids"),
                                    cuda_view_of(trajectory_ids, "trajectory_ids"),
                                    cuda_view_of(lengths, "lengths"),
                                    cuda_view_of(valid, "valid"),
                                    num_groups};
    const GroupAdvantageOptions options{by_trajectory, Center(center), Scale(scale), Singleton(singleton), ddof,
                                        eps,           min_std};
    const View out = cuda_view_of(advantages, "advantages"), space = cuda_view_of(workspace, "workspace");
    py::gil_scoped_release unlocked;
    cuda::group_advantage(input, options, out, space, {stream});
}

}  // namespace

void bind_group_advantage(py::module_& module) {
    module.def("group_advantage", &call, py::arg("rewards"), py::arg("group_ids"), py::arg("advantages"),
               py::arg("num_groups"), py::arg("trajectory_ids"), py::arg("lengths"), py::arg("valid"),
               py::arg("by_trajectory"), py::arg("center"), py::arg("scale"), py::arg("singleton"), py::arg("ddof"),
               py::arg("eps"), py::arg("min_std"), py::arg("threads"),
               "Writes the advantages of rewards within groups.");
    py::class_<GroupAdvantageOptions>(module, "GroupAdvantageRule", py::module_local())
        .def(py::init(
                 [](bool by_trajectory, int center, int scale, int singleton, int ddof, double eps, double min_std) {
                     return GroupAdvantageOptions{
                         by_trajectory, Center(center), Scale(scale), Singleton(singleton), ddof, eps, min_std};
                 }),
             py::arg("by_trajectory"), py::arg("center"), py::arg("scale"), py::arg("singleton"), py::arg("ddof"),
             py::arg("eps"), py::arg("min_std"));
    module.def("group_advantage_by_rule", &call_by_rule, py::arg("rewards"), py::arg("group_ids"),
               py::arg("advantages"), py::arg("num_groups"), py::arg("rule"), py::arg("threads"),
               "group_advantage of rewards and ids alone.");
    module.def("cuda_group_advantage_workspace", &cuda::group_advantage_workspace, py::arg("rows"), py::arg("groups"),
               py::arg("by_trajectory"), py::arg("weighted"), "Bytes of workspace that cuda_group_advantage needs.");
    module.def("cuda_group_advantage", &cuda_call, py::arg("rewards"), py::arg("group_ids"), py::arg("advantages"),
               py::arg("num_groups"), py::arg("trajectory_ids"), py::arg("lengths"), py::arg("valid"),
               py::arg("by_trajectory"), py::arg("center"), py::arg("scale"), py::arg("singleton"), py::arg("ddof"),
               py::arg("eps"), py::arg("min_std"), py::arg("workspace"), py::arg("stream"),
               "group_advantage on a CUDA stream.");
}

}  // namespace turnwise
