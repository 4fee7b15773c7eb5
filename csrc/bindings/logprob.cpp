#include "ops/logprob.h"

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "cuda/logprob.h"

namespace py = pybind11;

namespace turnwise {
namespace {

// `view`: view_of or cuda_view_of.
template <class ViewOf>
LogitTile tile_of(const ViewOf& view, const py::object& logits, const py::object& bias, const py::object& targets,
                  float scale, float cap, int64_t ignore) {
    return {view(logits, "logits"), view(bias, "bias"), view(targets, "targets"), scale, cap, ignore};
}

void scan(py::object logits, py::object bias, py::object targets, float scale, float cap, int64_t ignore,
          py::object state, bool weighted, int threads) {
    const LogitTile tile = tile_of(view_of, logits, bias, targets, scale, cap, ignore);
    const View kept = view_of(state, "state");
    py::gil_scoped_release unlocked;
    logprob_scan(tile, kept, weighted, threads);
}

void finish(py::object state, py::object logprob, py::object lse, py::object entropy) {
    const View kept = view_of(state, "state"), to = view_of(logprob, "logprob"), sums = view_of(lse, "lse"),
               entropies = view_of(entropy, "entropy");
    py::gil_scoped_release unlocked;
    logprob_finish(kept, to, sums, entropies);
}

void grad(py::object logits, py::object bias, py::object targets, float scale, float cap, int64_t ignore,
          py::object lse, py::object grad_logprob, py::object entropy, py::object grad_entropy, py::object out,
          int threads) {
    const LogitTile tile = tile_of(view_of, logits, bias, targets, scale, cap, ignore);
    const LogprobGradient gradient{view_of(lse, "lse"), view_of(grad_logprob, "grad_logprob"),
                                   view_of(entropy, "entropy"), view_of(grad_entropy, "grad_entropy")};
    const View to = view_of(out, "out");
    py::gil_scoped_release unlocked;
    logprob_grad(tile, gradient, to, threads);
}

void add(py::object total, py::object part, int threads) {
    const View to = view_of(total, "total"), from = view_of(part, "part");
    py::gil_scoped_release unlocked;
    add_narrow(to, from, threads);
}

void cuda_scan(py::object logits, py::object bias, py::object targets, float scale, float cap, int64_t ignore,
               py::object state, bool weighted, uintptr_t stream) {
    const LogitTile tile = tile_of(cuda_view_of, logits, bias, targets, scale, cap, ignore);
    const View kept = cuda_view_of(state, "state");
    py::gil_scoped_release unlocked;
    cuda::logprob_scan(tile, kept, weighted, {stream});
}

void cuda_finish(py::object state, py::object logprob, py::object lse, py::object entropy, uintptr_t stream) {
    const View kept = cuda_view_of(state, "state"), to = cuda_view_of(logprob, "logprob"),
               sums = cuda_view_of(lse, "lse"), entropies = cuda_view_of(entropy, "entropy");
    py::gil_scoped_release unlocked;
    cuda::logprob_finish(kept, to, sums, entropies, {stream});
}

void cuda_grad(py::object logits, py::object bias, py::object targets, float scale, float cap, int64_t ignore,
               py::object lse, py::object grad_logprob, py::object entropy, py::object grad_entropy, py::object out,
               uintptr_t stream) {
    const LogitTile tile = tile_of(cuda_view_of, logits, bias, targets, scale, cap, ignore);
    const LogprobGradient gradient{cuda_view_of(lse, "lse"), cuda_view_of(grad_logprob, "grad_logprob"),
                                   cuda_view_of(entropy, "entropy"), cuda_view_of(grad_entropy, "grad_entropy")};
    const View to = cuda_view_of(out, "out");
    py::gil_scoped_release unlocked;
    cuda::logprob_grad(tile, gradient, to, {stream});
}

}  // namespace

void bind_logprob(py::module_& module) {
    module.def("logprob_scan", &scan, py::arg("logits"), py::arg("bias"), py::arg("targets"), py::arg("scale"),
               py::arg("cap"), py::arg("ignore"), py::arg("state"), py::arg("weighted"), py::arg("threads"),
               "Writes the softmax states of rows of logits.");
    module.def("logprob_finish", &finish, py::arg("state"), py::arg("logprob"), py::arg("lse"), py::arg("entropy"),
               "Writes log-probabilities, log-sum-exps and entropies of scanned rows.");
    module.def("logprob_grad", &grad, py::arg("logits"), py::arg("bias"), py::arg("targets"), py::arg("scale"),
               py::arg("cap"), py::arg("ignore"), py::arg("lse"), py::arg("grad_logprob"), py::arg("entropy"),
               py::arg("grad_entropy"), py::arg("out"), py::arg("threads"), "Turns logits into their gradient.");
    module.def("add_narrow", &add, py::arg("total"), py::arg("part"), py::arg("threads"),
               "total += part, where total is float32 and part may be narrower.");
    module.def("cuda_logprob_scan", &cuda_scan, py::arg("logits"), py::arg("bias"), py::arg("targets"),
               py::arg("scale"), py::arg("cap"), py::arg("ignore"), py::arg("state"), py::arg("weighted"),
               py::arg("stream"), "logprob_scan on a GPU.");
    module.def("cuda_logprob_finish", &cuda_finish, py::arg("state"), py::arg("logprob"), py::arg("lse"),
               py::arg("entropy"), py::arg("stream"), "logprob_finish on a GPU.");
    module.def("cuda_logprob_grad", &cuda_grad, py::arg("logits"), py::arg("bias"), py::arg("targets"),
               py::arg("scale"), py::arg("cap"), py::arg("ignore"), py::arg("lse"), py::arg("grad_logprob"),
               py::arg("entropy"), py::arg("grad_entropy"), py::arg("out"), py::arg("stream"),
               "logprob_grad on a GPU; out may be narrower than float32 logits.");
}

}  // namespace turnwise
