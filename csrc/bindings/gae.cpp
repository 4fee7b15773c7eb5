#include "ops/gae.h"

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "cuda/gae.h"

namespace py = pybind11;

namespace turnwise {
namespace {

bool call(py::object rewards, py::object values, py::object mask, py::object cu_seqlens, double gamma, double lam,
          py::object advantages, py::object returns, int threads) {
    const GaeInput input{view_of(rewards, "rewards"), view_of(values, "values"), view_of(mask, "mask"),
                         view_of(cu_seqlens, "cu_seqlens")};
    const View advantages_out = view_of(advantages, "advantages"), returns_out = view_of(returns, "returns");
    py::gil_scoped_release unlocked;
    return gae(input, gamma, lam, advantages_out, returns_out, threads);
}

void cuda_call(py::object rewards, py::object values, py::object mask, py::object cu_seqlens, double gamma, double lam,
               py::object advantages, py::object returns, py::object workspace, uintptr_t stream) {
    const GaeInput input{cuda_view_of(rewards, "rewards"), cuda_view_of(values, "values"), cuda_view_of(mask, "mask"),
                         cuda_view_of(cu_seqlens, "cu_seqlens")};
    const View advantages_out = cuda_view_of(advantages, "advantages"), returns_out = cuda_view_of(returns, "returns");
    const View space = cuda_view_of(workspace, "workspace");
    py::gil_scoped_release unlocked;
    cuda::gae(input, gamma, lam, advantages_out, returns_out, space, {stream});
}

}  // namespace

void bind_gae(py::module_& module) {
    module.def("gae", &call, py::arg("rewards"), py::arg("values"), py::arg("mask"), py::arg("cu_seqlens"),
               py::arg("gamma"), py::arg("lam"), py::arg("advantages"), py::arg("returns"), py::arg("threads"),
               "Writes generalised advantage estimates and returns; false if a row's first return is not finite.");
    module.def("cuda_gae", &cuda_call, py::arg("rewards"), py::arg("values"), py::arg("mask"), py::arg("cu_seqlens"),
               py::arg("gamma"), py::arg("lam"), py::arg("advantages"), py::arg("returns"), py::arg("workspace"),
               py::arg("stream"), "gae on a CUDA stream.");
}

}  // namespace turnwise
