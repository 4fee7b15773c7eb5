#include "bindings/policy_loss.h"

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "core/check.h"
#include "cuda/policy_loss.h"
#include "ops/policy_loss_tile.h"

namespace py = pybind11;

namespace turnwise {

PolicyLossOptions policy_loss_options(const py::tuple& numbers, const py::tuple& modes, int threads) {
    require(numbers.size() == 8 && modes.size() == 6, "options: expected eight numbers and six modes");
    const auto number = [&](Py_ssize_t i) { return PyFloat_AsDouble(PyTuple_GET_ITEM(numbers.ptr(), i)); };
    const auto mode = [&](Py_ssize_t i) { return int(PyLong_AsLong(PyTuple_GET_ITEM(modes.ptr(), i))); };
    PolicyLossOptions o{};
    o.variant = {VariantKind(mode(0)), float(number(0)), float(number(1)), float(number(2))};
    o.kl = KlKind(mode(1));
    o.kl_coef = float(number(3));
    o.correction = Correction(mode(2));
    o.cap = float(number(4));
    o.reject_below = float(number(5));
    o.reject_above = float(number(6));
    o.aggregation = Aggregation(mode(3));
    o.num_actors = mode(4);
    o.kl_weighted = mode(5) != 0;
    o.max_length = number(7);
    o.threads = threads;
    if (PyErr_Occurred()) throw py::error_already_set();
    require(VariantKind::clip <= o.variant.kind && o.variant.kind <= VariantKind::kl_cov, "options: unknown variant");
    require(KlKind::none <= o.kl && o.kl <= KlKind::k3_plus, "options: unknown kind of KL");
    require(Correction::none <= o.correction && o.correction <= Correction::sequence, "options: unknown correction");
    require(Aggregation::token_mean <= o.aggregation && o.aggregation <= Aggregation::agent_mean,
            "options: unknown aggregation");
    require(o.num_actors >= 0, "options: a negative number of actors");
    return o;
}

PolicyLossInput policy_loss_input(const py::tuple& streams, Reader read) {
    static constexpr const char* kNames[] = {"logprobs",   "old_logprobs", "advantages",       "mask",
                                             "cu_seqlens", "ref_logprobs", "rollout_logprobs", "normalizer",
                                             "actor_ids",  "entropy",      "selected"};
    require(streams.size() == 11, "streams: expected eleven");
    View views[11];
    for (size_t i = 0; i < 11; ++i) views[i] = read(PyTuple_GET_ITEM(streams.ptr(), Py_ssize_t(i)), kNames[i]);
    return {views[0], views[1], views[2], views[3], views[4], views[5],
            views[6], views[7], views[8], views[9], views[10]};
}

PolicyLossOutput policy_loss_output(py::handle loss, py::handle grad, py::handle metrics, const PolicyLossInput& input,
                                    const PolicyLossOptions& options, Reader read) {
    const PolicyLossOutput output{read(loss, "loss"), read(grad, "grad"), read(metrics, "metrics")};
    require_shape("metrics", output.metrics, {1 + options.num_actors, metric_columns(input)});
    require_shape_of("grad", output.grad, "logprobs", input.logprobs);
    require_dtype("grad", output.grad, {input.logprobs.dtype});
    return output;
}

namespace {

void call(const py::tuple& streams, const py::tuple& numbers, const py::tuple& modes, py::object loss, py::object grad,
          py::object metrics, int threads) {
    const PolicyLossInput input = policy_loss_input(streams, view_of);
    const PolicyLossOptions options = policy_loss_options(numbers, modes, threads);
    const PolicyLossOutput output = policy_loss_output(loss, grad, metrics, input, options, view_of);
    py::gil_scoped_release unlocked;
    policy_loss(input, options, output);
}

void cuda_call(const py::tuple& streams, const py::tuple& numbers, const py::tuple& modes, py::object loss,
               py::object grad, py::object metrics, py::object workspace, uintptr_t stream) {
    const PolicyLossInput input = policy_loss_input(streams, cuda_view_of);
    const PolicyLossOptions options = policy_loss_options(numbers, modes, 0);
    const PolicyLossOutput output = policy_loss_output(loss, grad, metrics, input, options, cuda_view_of);
    const View scratch = cuda_view_of(workspace, "workspace");
    py::gil_scoped_release unlocked;
    cuda::policy_loss(input, options, output, scratch, {stream});
}

void exp_values(py::object values, py::object out) {
    const View from = view_of(values, "values"), to = view_of(out, "out");
    require(is_contiguous_1d(from) && is_contiguous_1d(to) && from.size() == to.size(), "values, out: expected [N]");
    require(from.dtype == DType::f32 && to.dtype == DType::f32, "values, out: expected float32");
    policy_loss_kernels().exp(from.as<float>(), from.size(), to.as<float>());
}

}  // namespace

void bind_policy_loss(py::module_& module) {
    module.def("policy_loss", &call, py::arg("streams"), py::arg("numbers"), py::arg("modes"), py::arg("loss"),
               py::arg("grad"), py::arg("metrics"), py::arg("threads"),
               "Writes loss, gradient and metrics of the policy loss.");
    module.def("cuda_policy_loss", &cuda_call, py::arg("streams"), py::arg("numbers"), py::arg("modes"),
               py::arg("loss"), py::arg("grad"), py::arg("metrics"), py::arg("workspace"), py::arg("stream"),
               "The same on a CUDA device.");
    module.def("cuda_policy_loss_workspace", &cuda::policy_loss_workspace, py::arg("rows"), py::arg("tokens"),
               py::arg("num_actors"), py::arg("device"), "The bytes of workspace that cuda_policy_loss needs.");
    module.def("exp", &exp_values, py::arg("values"), py::arg("out"),
               "The kernels' own exp of float32 values within +-80, for tests of its accuracy.");
}

}  // namespace turnwise
