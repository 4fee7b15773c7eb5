#include "bindings/state/fork.h"

#include "bindings/state/adopt.h"
#include "bindings/state/policy.h"

namespace turnwise::state {

size_t collect(StateObject* state) {
    std::vector<SlotIndex> roots;
    state->proxies.for_each([&](Proxy* proxy) { roots.push_back(proxy->slot); });
    const size_t freed = state->heap.collect(roots);
    // Remove freed slots from the pending ones before other containers get these slots.
    std::vector<SlotIndex> left;
    for (SlotIndex slot : state->pending) {
        if (state->heap.at(slot)) left.push_back(slot);
    }
    state->pending = std::move(left);
    return freed;
}

namespace {
// A live opaque object of a State.
struct Live {
    SlotIndex slot;    // its slot in the heap
    OpaqueNode* node;  // in that slot
};

// True if a live object has a linked policy. Call it after `settle`: only opaque nodes are pending then.
bool holds_linked(StateObject* state) {
    for (SlotIndex slot : state->pending) {
        const auto* node = static_cast<OpaqueNode*>(state->heap.at(slot));
        if (Policy::of(object_of(node->policy)).mode == Policy::Linked) return true;
    }
    return false;
}

// Copies the linked objects of `state` together for `child`, a fork that was just made. False with an error set.
bool copy_linked(StateObject* state, const std::vector<Live>& linked, StateObject* child) {
    if (linked.empty()) return true;
    PyObject* objects = PyList_New(Py_ssize_t(linked.size()));
    if (!objects) return false;
    for (size_t i = 0; i < linked.size(); ++i) {
        PyObject* object = object_of(linked[i].node->object);
        Py_INCREF(object);
        PyList_SET_ITEM(objects, Py_ssize_t(i), object);
    }
    // Python copies them; the copies become live objects of the child.
    PyObject* copies = PyObject_CallMethod(reinterpret_cast<PyObject*>(state->store), "_copy_linked", "OOO", objects,
                                           reinterpret_cast<PyObject*>(state), reinterpret_cast<PyObject*>(child));
    Py_DECREF(objects);
    const bool good = copies && PyList_CheckExact(copies) && PyList_GET_SIZE(copies) == Py_ssize_t(linked.size());
    for (size_t i = 0; good && i < linked.size(); ++i) {
        const OpaqueNode* node = linked[i].node;
        auto* copy = new OpaqueNode(child->heap.epoch(), node->birth, leaf_of(PyList_GET_ITEM(copies, Py_ssize_t(i))),
                                    node->policy);
        child->heap.replace(linked[i].slot, copy);
        note_pending(child, linked[i].slot, copy);
    }
    if (copies && !good) PyErr_SetString(PyExc_TypeError, "Store._copy_linked: expected a list of as many copies");
    Py_XDECREF(copies);
    return good;
}
}  // namespace

bool fork_states(StateObject* state, StateObject** children, size_t count) {
    return guarded(false, [&] {
        std::vector<Live> live, linked;
        if (!wait_for_others(state) || !settle(state)) return false;
        if (state->store->checks_shared) {
            PyObject* done = PyObject_CallMethod(reinterpret_cast<PyObject*>(state->store), "_check_shared", "O",
                                                 reinterpret_cast<PyObject*>(state));
            if (!done) return false;
            Py_DECREF(done);
            if (!wait_for_others(state)) return false;
        }
        if (!check_alive(state)) return false;
        Lock lock(state);
        drop_resting(state);
        // An unreachable object may be one that cannot be copied, so free such objects first.
        if (!state->frozen && (state->heap.wants_collection() || holds_linked(state))) collect(state);
        if (!state->pending.empty()) {
            // Put snapshots in the place of live objects, for the children. The live objects stay with this state.
            std::vector<Node*> snapshots;
            bool good = true;
            for (SlotIndex slot : state->pending) {
                auto* node = static_cast<OpaqueNode*>(state->heap.at(slot));
                const Policy policy = Policy::of(object_of(node->policy));
                if (policy.mode == Policy::Linked) {
                    linked.push_back({slot, node});
                    continue;
                }
                PyObject* copy = PyObject_CallOneArg(policy.copy, object_of(node->object));
                if (!copy) {
                    good = false;
                    break;
                }
                snapshots.push_back(new OpaqueNode(state->heap.epoch(), node->birth, leaf_of(copy), node->policy));
                Py_DECREF(copy);
                live.push_back({slot, node});
            }
            if (!good) {
                for (Node* node : snapshots) Node::drop(node);
                return false;
            }
            // Hold the live objects while snapshots take their slots.
            for (size_t i = 0; i < live.size(); ++i) {
                live[i].node->up();
                state->heap.replace(live[i].slot, snapshots[i]);
            }
            for (Live& each : linked) each.node->up();
        }
        // Fork the heap, then put the live objects back.
        bool good = true;
        for (size_t i = 0; i < count; ++i) {
            children[i] = good ? new_state(state->store) : nullptr;
            good = children[i] != nullptr;
            if (good) state->heap.fork_into(children[i]->heap);
        }
        live.insert(live.end(), linked.begin(), linked.end());
        for (Live& each : live) {
            each.node->epoch = state->heap.epoch();
            state->heap.replace(each.slot, each.node);
        }
        // Copy linked objects for each child; on failure drop all children.
        for (size_t i = 0; good && i < count; ++i) good = copy_linked(state, linked, children[i]);
        for (size_t i = 0; !good && i < count; ++i) Py_CLEAR(children[i]);
        return good;
    });
}

}  // namespace turnwise::state
