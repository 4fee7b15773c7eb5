#include "cuda/scale.h"

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "core/check.h"

namespace py = pybind11;

namespace turnwise {
namespace {

void call(py::object values, py::object factor, uintptr_t stream) {
    const View to = cuda_view_of(values, "values"), by = cuda_view_of(factor, "factor");
    require(is_contiguous(to), "values: expected a contiguous tensor");
    py::gil_scoped_release unlocked;
    cuda::scale(to, by, {stream});
}

}  // namespace

void bind_scale(py::module_& module) {
    module.def("cuda_scale", &call, py::arg("values"), py::arg("factor"), py::arg("stream"),
               "Multiplies values by a number on the device, in place.");
}

}  // namespace turnwise
