#include "bindings/state/versions.h"

#include <algorithm>

#include "bindings/state/adopt.h"
#include "bindings/state/dict.h"
#include "bindings/state/list.h"
#include "state/account.h"

namespace turnwise::state {
namespace {

// The facade of the same container in this State, which is a fork of the facade's State; null with an error set.
PyObject* same_place(StateObject* self, PyObject* facade) {
    if (!is_proxy(facade)) return PyErr_Format(PyExc_TypeError, "facade=%R: expected one", facade);
    auto* proxy = reinterpret_cast<Proxy*>(facade);
    const Node* node = proxy->slot == kNoSlot ? nullptr : self->heap.at(proxy->slot);
    if (!node || node->birth != proxy->birth) {
        return PyErr_Format(types.error, "the facade shows no container of this State");
    }
    return guarded<PyObject*>(nullptr, [&] { return wrap_slot(self, proxy->slot); });
}

// _facade(facade): the facade of the same container in this State, which is a fork of the facade's State.
PyObject* facade_here(PyObject* object, PyObject* facade) {
    return check_alive(state_of(object)) ? same_place(state_of(object), facade) : nullptr;
}

// _rooted_at(facade): the same. The container also becomes the root of this State.
PyObject* rooted_at(PyObject* object, PyObject* facade) {
    Operation operation;
    PyObject* root = same_place(state_of(object), facade);
    if (root) state_of(object)->heap.exchange_root(Value::of(reinterpret_cast<Proxy*>(facade)->slot)).drop();
    return root;
}

// _take_over(objects): takes over the objects of a list into this State, and returns their facades. The root stays.
PyObject* take_over_objects(PyObject* object, PyObject* objects) {
    Operation operation;
    StateObject* self = state_of(object);
    if (!check_alive(self)) return nullptr;
    // No wait: the caller has a lock of its own, and can use another State.
    if (self->locked) return PyErr_Format(types.error, "this State is being forked");
    if (self->frozen && reject_writing(self)) return nullptr;
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

// _differing(other): one byte per slot: 1 if the containers differ or lead to containers that do.
PyObject* differing(PyObject* object, PyObject* other) {
    if (!Py_IS_TYPE(other, types.state)) return PyErr_Format(PyExc_TypeError, "other=%R: expected a State", other);
    if (!check_alive(state_of(object)) || !check_alive(state_of(other))) return nullptr;
    return guarded<PyObject*>(nullptr, [&] {
        const std::vector<bool> differs = state_of(object)->heap.differing(state_of(other)->heap);
        PyObject* bytes = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(differs.size()));
        if (bytes) std::copy(differs.begin(), differs.end(), PyBytes_AS_STRING(bytes));
        return bytes;
    });
}

// Whether a value of two versions may differ: the words do, or a container that `differs` marks, or whose marks say
// nothing: an object, and a tuple, which may hold one.
bool may_differ(const Heap& heap, Value ours, Value theirs, const char* differs) {
    if (ours != theirs) return true;
    if (!ours.is_slot()) return false;
    const Node* node = heap.at(ours.slot());
    return differs[ours.slot()] || !node || node->kind == Kind::Opaque || node->kind == Kind::Tuple;
}

// Appends the indices at which two lists may differ. Returns 1, or -1 with an error set.
int add_changed(PyObject* found, const Heap& heap, const ListNode* ours, const ListNode* theirs, const char* differs) {
    const size_t ours_size = ours->items.size(), theirs_size = theirs->items.size();
    for (size_t i = 0; i < std::max(ours_size, theirs_size); ++i) {
        if (i < ours_size && i < theirs_size && !may_differ(heap, ours->items[i], theirs->items[i], differs)) continue;
        PyObject* index = PyLong_FromSize_t(i);
        const bool added = index && PyList_Append(found, index) == 0;
        Py_XDECREF(index);
        if (!added) return -1;
    }
    return 1;
}

// Appends the keys at which two dicts may differ, if one begins with the keys of the other, in order and the same
// objects; otherwise returns 0. Returns -1 with an error set.
int add_changed(PyObject* found, const Heap& heap, const DictNode* ours, const DictNode* theirs, const char* differs) {
    const size_t ours_size = ours->entries.size(), theirs_size = theirs->entries.size();
    for (size_t i = 0; i < std::max(ours_size, theirs_size); ++i) {
        const Entry* left = i < ours_size ? &ours->entries[i] : nullptr;
        const Entry* right = i < theirs_size ? &theirs->entries[i] : nullptr;
        if (left && right && left->key != right->key) return 0;
        Leaf* key = (left ? left : right)->key;
        if (!key || (left && right && !may_differ(heap, left->value, right->value, differs))) continue;
        if (PyList_Append(found, reinterpret_cast<PyObject*>(key)) < 0) return -1;
    }
    return 1;
}

// _changed_items(other, slot, other_slot, differs): keys or indices at which two dicts or two lists may differ, by the
// marks of `_differing`; None if their keys must be compared.
PyObject* changed_items(PyObject* object, PyObject* args) {
    PyObject *other, *differs;
    unsigned slot, other_slot;
    if (!PyArg_ParseTuple(args, "O!IIS", types.state, &other, &slot, &other_slot, &differs)) return nullptr;
    if (!check_alive(state_of(object)) || !check_alive(state_of(other))) return nullptr;
    const Heap &heap = state_of(object)->heap, &there = state_of(other)->heap;
    const Node *ours = heap.at(slot), *theirs = there.at(other_slot);
    const bool is_list = ours && ours->kind == Kind::List, is_dict = ours && ours->kind == Kind::Dict;
    const size_t marked = size_t(PyBytes_GET_SIZE(differs));
    if (!theirs || ours->kind != theirs->kind || !(is_list || is_dict) ||
        marked < std::max(heap.table().size(), there.table().size())) {
        Py_RETURN_NONE;
    }
    PyObject* found = PyList_New(0);
    if (!found) return nullptr;
    const char* marks = PyBytes_AS_STRING(differs);
    const auto add = [&](auto* node) {
        return add_changed(found, heap, node, static_cast<decltype(node)>(theirs), marks);
    };
    const int result = is_list ? add(static_cast<const ListNode*>(ours)) : add(static_cast<const DictNode*>(ours));
    if (result == 1) return found;
    Py_DECREF(found);
    if (result < 0) return nullptr;
    Py_RETURN_NONE;
}

// _put_live(container, key, object, policy): replaces container[key], which must exist, by an object that this State
// owns. Forks treat it by `policy`.
PyObject* put_live(PyObject* object, PyObject* args) {
    Operation operation;
    StateObject* self = state_of(object);
    PyObject *container, *key, *live, *policy;
    if (!PyArg_ParseTuple(args, "OOOO!", &container, &key, &live, &PyTuple_Type, &policy)) return nullptr;
    const bool is_dict = Py_IS_TYPE(container, types.dict);
    auto* proxy = reinterpret_cast<Proxy*>(container);
    if ((!is_dict && !Py_IS_TYPE(container, types.list)) || proxy->state != self) {
        return PyErr_Format(PyExc_TypeError, "container=%R: expected a dict or list of this State", container);
    }
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        Value* place = is_dict ? place_in_dict(proxy, key) : place_in_list(proxy, key);
        if (!place) return nullptr;
        auto* node = new OpaqueNode(self->heap.epoch(), leaf_of(live), leaf_of(policy));
        const SlotIndex slot = self->heap.add(node);
        note_pending(self, slot, node);
        std::exchange(*place, Value::of(slot)).drop();
        Py_RETURN_NONE;
    });
}

// _values(shown): a list of the values of a dict or the items of a list. Reads of one State with the same dict `shown`
// return the same tuples, see wrap_once.
PyObject* facade_values(PyObject* self, PyObject* shown) {
    if (!PyDict_CheckExact(shown)) return PyErr_Format(PyExc_TypeError, "shown=%R: expected a dict", shown);
    auto* proxy = reinterpret_cast<Proxy*>(self);
    PyObject* values = PyList_New(0);
    for (size_t place = 0; values; ++place) {
        // Look up the node each time, because copying an object for this version runs code.
        Node* node = node_of(proxy);
        Value value;
        if (!node) {
            Py_CLEAR(values);
            break;
        }
        if (node->kind == Kind::Dict) {
            const auto* dict = static_cast<DictNode*>(node);
            place = dict->next(place);
            if (place >= dict->entries.size()) break;
            value = dict->entries[place].value;
        } else {
            const Values& items = static_cast<ListNode*>(node)->items;
            if (place >= items.size()) break;
            value = items[place];
        }
        PyObject* item = guarded<PyObject*>(nullptr, [&] { return wrap_once(proxy->state, value, shown); });
        if (!item || PyList_Append(values, item) < 0) Py_CLEAR(values);
        Py_XDECREF(item);
    }
    return values;
}

// _values(shown) of a State: a list of its root.
PyObject* state_values(PyObject* self, PyObject* shown) {
    if (!PyDict_CheckExact(shown)) return PyErr_Format(PyExc_TypeError, "shown=%R: expected a dict", shown);
    StateObject* state = state_of(self);
    if (!check_alive(state)) return nullptr;
    PyObject* root = guarded<PyObject*>(nullptr, [&] { return wrap_once(state, state->heap.root(), shown); });
    return root ? Py_BuildValue("[N]", root) : nullptr;
}

PyObject* facade_slot(PyObject* self, void*) {
    return PyLong_FromUnsignedLong(reinterpret_cast<Proxy*>(self)->slot);
}

// _account(): (versions, containers, bytes, unshared_bytes) of all States of a Store that are not pruned.
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

PyMethodDef state_methods[] = {{"_facade", facade_here, METH_O, nullptr},
                               {"_take_over", take_over_objects, METH_O, nullptr},
                               {"_rooted_at", rooted_at, METH_O, nullptr},
                               {"_differing", differing, METH_O, nullptr},
                               {"_changed_items", changed_items, METH_VARARGS, nullptr},
                               {"_put_live", put_live, METH_VARARGS, nullptr},
                               {"_values", state_values, METH_O, nullptr},
                               {nullptr, nullptr, 0, nullptr}};
PyMethodDef store_methods[] = {{"_account", account, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyMethodDef facade_methods[] = {{"_values", facade_values, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyGetSetDef slot_getter = {"_slot", facade_slot, nullptr, nullptr, nullptr};

}  // namespace

bool add_version_methods() {
    for (PyTypeObject* type : {types.dict, types.list, types.tokens}) {
        if (!add_member(type, slot_getter.name, PyDescr_NewGetSet(type, &slot_getter))) return false;
    }
    return add_methods(types.state, state_methods) && add_methods(types.store, store_methods) &&
           add_methods(types.dict, facade_methods) && add_methods(types.list, facade_methods);
}

}  // namespace turnwise::state
