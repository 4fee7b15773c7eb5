#include "ops/draw_tokens.h"

#include "bindings/bindings.h"
#include "bindings/tensor.h"

namespace py = pybind11;

namespace turnwise {
namespace {

void draw(py::object logits, py::object temperature, py::object uniform, py::object allowed, py::object token,
          py::object logprob, int threads) {
    const DrawTensors tensors{view_of(logits, "logits"), view_of(temperature, "temperature"),
                              view_of(uniform, "uniform"), view_of(allowed, "allowed")};
    const View to = view_of(token, "token"), its_logprob = view_of(logprob, "logprob");
    py::gil_scoped_release unlocked;
    draw_tokens(tensors, to, its_logprob, threads);
}

}  // namespace

void bind_draw_tokens(py::module_& module) {
    module.def("draw_tokens", &draw, py::arg("logits"), py::arg("temperature"), py::arg("uniform"),
               py::arg("allowed").none(true), py::arg("token"), py::arg("logprob"), py::arg("threads"),
               "Writes the next token of each row of logits and its log-probability.");
}

}  // namespace turnwise
