#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "cuda/device.h"

namespace py = pybind11;

namespace turnwise {
namespace {

py::dict describe(int device) {
    const cuda::Device found = cuda::device(device);
    py::dict out;
    out["name"] = found.name;
    out["capability"] = py::make_tuple(found.major, found.minor);
    out["memory_bytes"] = found.memory_bytes;
    out["multiprocessors"] = found.multiprocessors;
    return out;
}

}  // namespace

void bind_cuda(py::module_& module) {
    module.attr("with_cuda") = cuda::compiled();
    module.attr("emulates_cuda") = cuda::emulated();
    module.def("cuda_architectures", &cuda::architectures, "The architectures compiled in, as CMake writes them.");
    module.def("cuda_runtime_version", &cuda::runtime_version, "(major, minor) of the CUDA runtime linked in.");
    module.def("cuda_driver_version", &cuda::driver_version,
               "(major, minor) that the driver supports; (0, 0): no driver.");
    module.def("cuda_device_count", &cuda::device_count, "How many CUDA devices there are.");
    module.def("cuda_device", &describe, py::arg("device"), "Name, capability and memory of a CUDA device.");
    module.def("cuda_unsupported_reason", &cuda::unsupported_reason, py::arg("device"),
               "Why this module's kernels can't run on a CUDA device (-1: the current one); empty where they can.");
}

}  // namespace turnwise
