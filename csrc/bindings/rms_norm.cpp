#include "ops/rms_norm.h"

#include "bindings/bindings.h"
#include "bindings/tensor.h"

namespace py = pybind11;

namespace turnwise {
namespace {

void normalize(py::object x, py::object weight, float eps, py::object out, py::object inverse, int threads) {
    const NormTensors tensors{view_of(x, "x"), view_of(weight, "weight"), eps};
    const View to = view_of(out, "out"), kept = view_of(inverse, "inverse");
    py::gil_scoped_release unlocked;
    rms_norm(tensors, to, kept, threads);
}

void differentiate_norm(py::object x, py::object weight, py::object inverse, py::object upstream, py::object grad_x,
                        py::object grad_weight, int threads) {
    const NormTensors tensors{view_of(x, "x"), view_of(weight, "weight"), 0};
    const View scale = view_of(inverse, "inverse"), given = view_of(upstream, "upstream");
    const View to_x = view_of(grad_x, "grad_x"), to_weight = view_of(grad_weight, "grad_weight");
    py::gil_scoped_release unlocked;
    rms_norm_grad(tensors, scale, given, to_x, to_weight, threads);
}

}  // namespace

void bind_rms_norm(py::module_& module) {
    module.attr("NORM_BLOCK") = kNormBlock;
    module.def("rms_norm", &normalize, py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("out"),
               py::arg("inverse"), py::arg("threads"),
               "Writes rows over their root mean square, times a weight for each column.");
    module.def("rms_norm_grad", &differentiate_norm, py::arg("x"), py::arg("weight"), py::arg("inverse"),
               py::arg("upstream"), py::arg("grad_x"), py::arg("grad_weight"), py::arg("threads"),
               "Writes the gradient of the rows, and a partial gradient of the weight for each block of rows.");
}

}  // namespace turnwise
