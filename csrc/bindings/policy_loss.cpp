#include "ops/policy_loss.h"

#include <limits>

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "core/check.h"
#include "ops/policy_loss_kernel.h"

namespace py = pybind11;

namespace turnwise {
namespace {

// (low, high, dual, kl kind, kl coef, correction level, cap, aggregation, actors, max_length), as ops.policy_loss packs
// them: one tuple costs less than ten arguments.
PolicyLossOptions options_of(const py::tuple& packed, int threads) {
    require(packed.size() == 10, "options: expected ten values");
    const auto number = [&](size_t i) { return PyFloat_AsDouble(PyTuple_GET_ITEM(packed.ptr(), Py_ssize_t(i))); };
    const auto whole = [&](size_t i) { return int(PyLong_AsLong(PyTuple_GET_ITEM(packed.ptr(), Py_ssize_t(i)))); };
    PolicyLossOptions o{};
    const float dual = number(2) > 0 ? float(number(2)) : std::numeric_limits<float>::infinity();  // 0: no dual clip
    o.clip = {float(1.0 - number(0)), float(1.0 + number(1)), dual};
    o.kl = KlKind(whole(3));
    o.kl_coef = float(number(4));
    o.correction = Correction(whole(5));
    o.cap = float(number(6));
    o.aggregation = Aggregation(whole(7));
    o.num_actors = whole(8);
    o.max_length = number(9);
    o.threads = threads;
    if (PyErr_Occurred()) throw py::error_already_set();
    require(KlKind::none <= o.kl && o.kl <= KlKind::k3_plus, "options: unknown kind of KL");
    require(Correction::none <= o.correction && o.correction <= Correction::sequence, "options: unknown correction");
    require(Aggregation::token_mean <= o.aggregation && o.aggregation <= Aggregation::agent_mean,
            "options: unknown aggregation");
    require(o.num_actors >= 0, "options: a negative number of actors");
    return o;
}

void call(py::object logprobs, py::object old_logprobs, py::object advantages, py::object mask, py::object cu_seqlens,
          py::object ref_logprobs, py::object rollout_logprobs, py::object normalizer, py::object actor_ids,
          const py::tuple& options, py::object loss, py::object grad, py::object metrics, int threads) {
    const PolicyLossInput input{view_of(logprobs, "logprobs"),
                                view_of(old_logprobs, "old_logprobs"),
                                view_of(advantages, "advantages"),
                                view_of(mask, "mask"),
                                view_of(cu_seqlens, "cu_seqlens"),
                                view_of(ref_logprobs, "ref_logprobs"),
                                view_of(rollout_logprobs, "rollout_logprobs"),
                                view_of(normalizer, "normalizer"),
                                view_of(actor_ids, "actor_ids")};
    const PolicyLossOutput output{view_of(loss, "loss"), view_of(grad, "grad"), view_of(metrics, "metrics")};
    const PolicyLossOptions unpacked = options_of(options, threads);
    const int64_t columns = 8 + (input.ref_logprobs ? 1 : 0) + (input.rollout_logprobs ? 2 : 0);
    require(output.metrics.size() == columns * (1 + unpacked.num_actors), "metrics: wrong shape");
    require(output.grad.size() == input.logprobs.size() && output.grad.dtype == input.logprobs.dtype,
            "grad: wrong shape");
    py::gil_scoped_release unlocked;
    policy_loss(input, unpacked, output);
}

void exp_values(py::object values, py::object out) {
    const View from = view_of(values, "values"), to = view_of(out, "out");
    require(is_contiguous_1d(from) && is_contiguous_1d(to) && from.size() == to.size(), "values, out: expected [N]");
    require(from.dtype == DType::f32 && to.dtype == DType::f32, "values, out: expected float32");
    kernels().exp(from.as<float>(), from.size(), to.as<float>());
}

}  // namespace

void bind_policy_loss(py::module_& module) {
    module.def("policy_loss", &call, py::arg("logprobs"), py::arg("old_logprobs"), py::arg("advantages"),
               py::arg("mask"), py::arg("cu_seqlens"), py::arg("ref_logprobs"), py::arg("rollout_logprobs"),
               py::arg("normalizer"), py::arg("actor_ids"), py::arg("options"), py::arg("loss"), py::arg("grad"),
               py::arg("metrics"), py::arg("threads"), "Writes loss, gradient and metrics of the clipped policy loss.");
    module.def("exp", &exp_values, py::arg("values"), py::arg("out"),
               "The kernels' own exp of float32 values within +-80, for tests of its accuracy.");
}

}  // namespace turnwise
