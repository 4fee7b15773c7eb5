// What State and Store ask of versions as wholes; Python builds diff, writable and stats on it.
#include "bindings/state.h"
#include "state/account.h"

namespace turnwise::state {
namespace {

StateObject* state_of(PyObject* self) noexcept {
    return reinterpret_cast<StateObject*>(self);
}

bool alive(StateObject* state) {
    if (state->pruned) PyErr_SetString(types.pruned, "this State was pruned: its contents are gone");
    return !state->pruned;
}

// The container of this State, a fork of the facade's, that stands where the facade's does; null with an error set.
PyObject* same_place(StateObject* self, PyObject* facade) {
    if (!is_proxy(facade)) return PyErr_Format(PyExc_TypeError, "facade=%R: expected one", facade);
    auto* proxy = reinterpret_cast<Proxy*>(facade);
    const Node* node = proxy->slot == kNoSlot ? nullptr : self->heap.at(proxy->slot);
    if (!node || node->birth != proxy->birth) {
        return PyErr_Format(types.error, "the facade shows no container of this State");
    }
    return guarded<PyObject*>(nullptr, [&] { return wrap_slot(self, proxy->slot); });
}

// _facade(facade): what shows the same container in this State, a fork of the facade's.
PyObject* facade_here(PyObject* object, PyObject* facade) {
    return alive(state_of(object)) ? same_place(state_of(object), facade) : nullptr;
}

// _rooted_at(facade): the same, and that container becomes the root of this State.
PyObject* rooted_at(PyObject* object, PyObject* facade) {
    Operation operation;
    PyObject* root = same_place(state_of(object), facade);
    if (root) state_of(object)->heap.exchange_root(Value::of(reinterpret_cast<Proxy*>(facade)->slot)).drop();
    return root;
}

// _take_over(objects): facades of what the objects of a list are in this State from now on; the root stays what it is.
PyObject* take_over_objects(PyObject* object, PyObject* objects) {
    Operation operation;
    StateObject* self = state_of(object);
    if (!alive(self) || ((self->frozen || self->locked) && refuse_writing(self))) return nullptr;
    if (!PyList_CheckExact(objects)) return PyErr_Format(PyExc_TypeError, "objects=%R: expected a list", objects);
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        std::vector<Value> values;
        if (!take_over(self, objects, values)) return nullptr;
        PyObject* facades = PyList_New(Py_ssize_t(values.size()));
        for (size_t i = 0; i < values.size(); ++i) {
            PyObject* facade = facades ? wrap(self, values[i]) : nullptr;
            if (facade)
                PyList_SET_ITEM(facades, Py_ssize_t(i), facade);
            else
                Py_CLEAR(facades);
            values[i].drop();
        }
        return facades;
    });
}

// _differing(other): one byte per slot, 1 where the containers differ or lead to such.
PyObject* differing(PyObject* object, PyObject* other) {
    if (!Py_IS_TYPE(other, types.state)) return PyErr_Format(PyExc_TypeError, "other=%R: expected a State", other);
    if (!alive(state_of(object)) || !alive(state_of(other))) return nullptr;
    return guarded<PyObject*>(nullptr, [&] {
        const std::vector<bool> differs = state_of(object)->heap.differing(state_of(other)->heap);
        PyObject* bytes = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(differs.size()));
        if (bytes) std::copy(differs.begin(), differs.end(), PyBytes_AS_STRING(bytes));
        return bytes;
    });
}

// _put_live(container, key, object, policy): container[key] becomes an object that this State owns, and forks by
// `policy`.
PyObject* put_live(PyObject* object, PyObject* args) {
    Operation operation;
    StateObject* self = state_of(object);
    PyObject *container, *key, *live, *policy;
    if (!PyArg_ParseTuple(args, "OOOO!", &container, &key, &live, &PyTuple_Type, &policy)) return nullptr;
    auto* proxy = reinterpret_cast<Proxy*>(container);
    if (!is_proxy(container) || proxy->state != self || !write<Node>(proxy)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "container: expected a facade of this State");
        return nullptr;
    }
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        // A marker goes in first, through the facade, so that its key is checked and found as ever.
        PyObject* marker = PyFloat_FromDouble(0);
        const int put = marker ? PyObject_SetItem(container, key, marker) : -1;
        if (put < 0) {
            Py_XDECREF(marker);
            return nullptr;
        }
        auto* node = new OpaqueNode(self->heap.epoch(), leaf_of(live), leaf_of(policy));
        const SlotIndex slot = self->heap.add(node);
        note_pending(self, slot, node);
        const auto replace = [&](Value& value) {
            if (value.is_leaf() && object_of(value.leaf()) == marker) std::exchange(value, Value::of(slot)).drop();
        };
        Node* holder = write<Node>(proxy);
        if (holder->kind == Kind::Dict) {
            auto& entries = static_cast<DictNode*>(holder)->entries;
            entries.for_each_owned_chunk(holder->epoch, [&](Entry* chunk, size_t count) {
                for (size_t i = 0; i < count; ++i) replace(chunk[i].value);
            });
        } else {
            static_cast<ListNode*>(holder)->items.for_each_owned_chunk(holder->epoch, [&](Value* values, size_t count) {
                for (size_t i = 0; i < count; ++i) replace(values[i]);
            });
        }
        Py_DECREF(marker);
        Py_RETURN_NONE;
    });
}

PyObject* facade_slot(PyObject* self, void*) {
    return PyLong_FromUnsignedLong(reinterpret_cast<Proxy*>(self)->slot);
}

// _account(): (versions, containers, bytes, unshared_bytes) of all living States of a Store.
PyObject* account(PyObject* object, PyObject*) {
    return guarded<PyObject*>(nullptr, [&] {
        Account account;
        Py_ssize_t versions = 0;
        for (StateObject* state = reinterpret_cast<StoreObject*>(object)->states; state; state = state->next) {
            if (state->pruned) continue;
            ++versions;
            account.add(state->heap);
        }
        return Py_BuildValue("nnnn", versions, Py_ssize_t(account.containers()), Py_ssize_t(account.bytes()),
                             Py_ssize_t(account.unshared_bytes()));
    });
}

PyMethodDef state_methods[] = {
    {"_facade", facade_here, METH_O, nullptr},      {"_take_over", take_over_objects, METH_O, nullptr},
    {"_rooted_at", rooted_at, METH_O, nullptr},     {"_differing", differing, METH_O, nullptr},
    {"_put_live", put_live, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyMethodDef store_methods[] = {{"_account", account, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyGetSetDef slot_getter = {"_slot", facade_slot, nullptr, nullptr, nullptr};

bool put(PyTypeObject* type, const char* name, PyObject* member) {
    const bool good = member && PyObject_SetAttrString(reinterpret_cast<PyObject*>(type), name, member) == 0;
    Py_XDECREF(member);
    return good;
}

}  // namespace

bool add_version_methods() {
    for (PyMethodDef* method = state_methods; method->ml_name; ++method) {
        if (!put(types.state, method->ml_name, PyDescr_NewMethod(types.state, method))) return false;
    }
    for (PyMethodDef* method = store_methods; method->ml_name; ++method) {
        if (!put(types.store, method->ml_name, PyDescr_NewMethod(types.store, method))) return false;
    }
    for (PyTypeObject* type : {types.dict, types.list, types.tokens}) {
        if (!put(type, slot_getter.name, PyDescr_NewGetSet(type, &slot_getter))) return false;
    }
    return true;
}

}  // namespace turnwise::state
