#include "ops/path_attention.h"

#include "bindings/bindings.h"
#include "bindings/tensor.h"

namespace py = pybind11;

namespace turnwise {
namespace {

void attend(py::object query, py::object key, py::object value, py::object begin, py::object end, py::object path,
            int64_t heads, int64_t kv_heads, double scale, py::object out, int threads) {
    const PathTensors tensors{view_of(query, "query"),
                              view_of(key, "key"),
                              view_of(value, "value"),
                              view_of(begin, "begin"),
                              view_of(end, "end"),
                              view_of(path, "path"),
                              heads,
                              kv_heads,
                              scale};
    const View to = view_of(out, "out");
    py::gil_scoped_release unlocked;
    path_attention(tensors, to, threads);
}

}  // namespace

void bind_path_attention(py::module_& module) {
    module.def("path_attention", &attend, py::arg("query"), py::arg("key"), py::arg("value"), py::arg("begin"),
               py::arg("end"), py::arg("path"), py::arg("heads"), py::arg("kv_heads"), py::arg("scale"), py::arg("out"),
               py::arg("threads"),
               "Writes the attention of each row's query to the places begin to end and to those in its path.");
}

}  // namespace turnwise
