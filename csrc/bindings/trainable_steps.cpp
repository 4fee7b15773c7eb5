#include <algorithm>
#include <cmath>
#include <vector>

#include "bindings/attributes.h"
#include "bindings/bindings.h"

namespace py = pybind11;

namespace turnwise {
namespace {

bool truth(const py::object& value) {
    const int is_true = PyObject_IsTrue(value.ptr());
    if (is_true < 0) throw py::error_already_set();
    return is_true;
}

// A rollout whose steps may train, and the index of its result.
struct Played {
    Py_ssize_t node;                     // index of the result
    py::object rollout, rewards, steps;  // rewards: by actor; steps: a tuple
    bool several_ends;                   // rewards depend on the end that a step belongs to
};

// A step of a rollout.
struct Call {
    size_t played;     // index of the rollout
    Py_ssize_t place;  // index of the step in the rollout
    PyObject* step;    // borrowed from Played::steps
};

// Reads the results, and finds the rollouts that may train.
class Nodes {
  public:
    explicit Nodes(const py::tuple& nodes) : nodes_(nodes) {}

    std::vector<Played> rollouts() {
        std::vector<Played> found;
        const auto count = Py_ssize_t(nodes_.size());
        PyObject* const* node = PySequence_Fast_ITEMS(nodes_.ptr());
        for (Py_ssize_t index = 0; index < count; ++index) {
            fetch_ahead(node + index, count - index);
            py::object rollout = rollout_.read(node[index]);
            py::object steps = py::tuple(steps_.read(rollout.ptr()));  // a copy, which no property that runs can change
            seen += PyTuple_GET_SIZE(steps.ptr());
            if (!truth(is_trainable_.read(node[index])) || !error_.read(rollout.ptr()).is_none()) continue;
            const bool several_ends = meta_.read(rollout.ptr()).contains("ends");
            py::object rewards = rewards_.read(rollout.ptr());
            found.push_back({index, std::move(rollout), std::move(rewards), std::move(steps), several_ends});
        }
        return found;
    }

    Py_ssize_t seen = 0;  // number of steps of all rollouts

  private:
    // From a result, four reads lead to a step: rollout, its steps and meta, their contents, each step. Each is
    // prefetched a few results before the next one needs it.
    void fetch_ahead(PyObject* const* node, Py_ssize_t left) const {
        constexpr Py_ssize_t apart = 4;
        if (left > 5 * apart) fetch_object(node[5 * apart]);
        if (left > 4 * apart) fetch(rollout_.peek(node[4 * apart]), 2 * kLine);
        if (left > 3 * apart) {
            PyObject* rollout = rollout_.peek(node[3 * apart]);
            steps_.fetch_ahead(rollout);
            meta_.fetch_ahead(rollout);
        }
        if (left > 2 * apart) {
            PyObject* rollout = rollout_.peek(node[2 * apart]);
            fetch_keys(meta_.peek(rollout));
            if (PyObject* steps = steps_.peek(rollout); steps && PyList_CheckExact(steps)) {
                fetch(PySequence_Fast_ITEMS(steps), kLine);
            }
        }
        if (left > apart) {
            PyObject* steps = steps_.peek(rollout_.peek(node[apart]));
            if (!steps || !PyList_CheckExact(steps)) return;
            const Py_ssize_t first_few = std::min<Py_ssize_t>(PyList_GET_SIZE(steps), 16);
            for (Py_ssize_t place = 0; place < first_few; ++place) fetch_object(PyList_GET_ITEM(steps, place));
        }
    }

    const py::tuple& nodes_;
    Attribute rollout_{"rollout"}, is_trainable_{"is_trainable"};
    Attribute error_{"error"}, meta_{"meta"}, rewards_{"rewards"}, steps_{"steps"};
};

// A finite number as a float; None for infinities and NaN. Anything else raises TypeError.
py::object finite(const py::object& number) {
    if (PyFloat_CheckExact(number.ptr()) && std::isfinite(PyFloat_AS_DOUBLE(number.ptr()))) return number;
    const double value = PyFloat_AsDouble(number.ptr());
    if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    if (!std::isfinite(value)) return py::none();
    return py::float_(value);
}

py::tuple trainable_steps(const py::sequence& nodes) {
    const py::tuple every(nodes);
    Nodes those(every);
    // Every step of every rollout that may train.
    const std::vector<Played> played = those.rollouts();
    std::vector<Call> calls;
    for (size_t index = 0; index < played.size(); ++index) {
        PyObject* const* step = PySequence_Fast_ITEMS(played[index].steps.ptr());
        const Py_ssize_t count = PyTuple_GET_SIZE(played[index].steps.ptr());
        for (Py_ssize_t place = 0; place < count; ++place) calls.push_back({index, place, step[place]});
    }
    Attribute actor_id("actor_id"), trainable("trainable"), finish_reason("finish_reason"),
        completion("completion_token_ids"), reward("reward");
    const py::str abort("abort");
    const py::object none = py::none();
    py::object wrong = none;
    py::list owners, places, steps, actors, rewards, of_rollouts;
    // Keep trainable calls that have a completion and were not aborted, with their rewards.
    for (size_t row = 0; row < calls.size(); ++row) {
        if (row + kFar < calls.size()) fetch_object(calls[row + kFar].step);
        if (row + kNear < calls.size()) completion.fetch_ahead(calls[row + kNear].step);
        const auto& [index, place, step] = calls[row];
        const Played& rollout = played[index];
        const py::object actor = actor_id.read(step);
        if (actor.is_none() || !truth(trainable.read(step)) || finish_reason.read(step).equal(abort) ||
            !truth(completion.read(step)))
            continue;
        // A step's own reward and its trajectory's; if one is missing, the other serves as both.
        const py::object by_actor =
            rollout.several_ends ? rollout.rollout.attr("rewards_of")(py::handle(step)) : rollout.rewards;
        const py::object own = reward.read(step), given = item_of(by_actor, actor, none);
        const py::object& first = own.is_none() ? given : own;
        const py::object& second = given.is_none() ? own : given;
        const py::object of_step = first.is_none() ? none : finite(first);
        const py::object of_rollout = second.is_none() ? none : finite(second);
        if (of_step.is_none() || of_rollout.is_none()) {
            wrong = py::make_tuple(rollout.node, place, actor, first, second);
            break;
        }
        owners.append(rollout.node);
        places.append(place);
        steps.append(py::handle(step));
        actors.append(actor);
        rewards.append(of_step);
        of_rollouts.append(of_rollout);
    }
    return py::make_tuple(wrong, those.seen, owners, places, steps, actors, rewards, of_rollouts);
}

}  // namespace

void bind_trainable_steps(py::module_& module) {
    module.def("trainable_steps", &trainable_steps, py::arg("nodes"),
               "The first call without a finite reward (node, place, actor, reward, trajectory reward) or None, the "
               "number of steps seen, and column by column node, place, step, actor, reward and trajectory reward of "
               "what turnwise.samples.collect.trainable_calls wants.");
}

}  // namespace turnwise
