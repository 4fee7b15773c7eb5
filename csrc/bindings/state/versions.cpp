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

// _differing(other): by the slot of each container that differs or leads to one that does, the places of the items that
// lead there.
PyObject* differing(PyObject* object, PyObject* other) {
    Operation operation;
    if (!Py_IS_TYPE(other, types.state)) return PyErr_Format(PyExc_TypeError, "other=%R: expected a State", other);
    StateObject *self = state_of(object), *there = state_of(other);
    if (!check_alive(self) || !check_alive(there)) return nullptr;
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        StoreObject* store = self->store;
        if (!store->edges) store->edges = new Edges;
        store->edges_of = self;
        store->compared = there;
        const Edges::Marks marks = store->edges->differing(self->heap, there->heap);
        PyObject* found = PyDict_New();
        for (auto mark = marks.begin(); found && mark != marks.end(); ++mark) {
            PyObject* slot = PyLong_FromUnsignedLong(mark->first);
            PyObject* places = PyList_New(Py_ssize_t(mark->second.size()));
            bool done = slot && places;
            for (size_t i = 0; done && i < mark->second.size(); ++i) {
                PyObject* place = PyLong_FromSize_t(mark->second[i]);
                if ((done = place)) PyList_SET_ITEM(places, Py_ssize_t(i), place);
            }
            if (!done || PyDict_SetItem(found, slot, places) < 0) Py_CLEAR(found);
            Py_XDECREF(slot);
            Py_XDECREF(places);
        }
        return found;
    });
}

// Calls look(place, ours, theirs) wherever the items of two containers may differ: for a container of both versions,
// where its items do and at the places of its mark, and for two containers everywhere.
template <class Items, class Look>
void look_at_changes(const Items& ours, const Items& theirs, bool is_one, PyObject* mark, Look&& look) {
    const size_t size = std::max(ours.size(), theirs.size());
    const auto look_again = [&](size_t i) {
        if (i < size) look(i, i < ours.size() ? &ours[i] : nullptr, i < theirs.size() ? &theirs[i] : nullptr);
    };
    if (!is_one) {
        for (size_t i = 0; i < size; ++i) look_again(i);
        return;
    }
    Items::compare(ours, theirs, look);
    for (Py_ssize_t i = 0; mark && i < PyList_GET_SIZE(mark); ++i) {
        look_again(PyLong_AsSize_t(PyList_GET_ITEM(mark, i)));
    }
}

// _changed_items(other, slot, other_slot, marks): keys or indices at which two dicts or two lists may differ, by the
// marks of `_differing`; None if their keys must be compared.
PyObject* changed_items(PyObject* object, PyObject* args) {
    PyObject *other, *marks;
    unsigned slot, other_slot;
    if (!PyArg_ParseTuple(args, "O!IIO!", types.state, &other, &slot, &other_slot, &PyDict_Type, &marks))
        return nullptr;
    if (!check_alive(state_of(object)) || !check_alive(state_of(other))) return nullptr;
    const Node *ours = state_of(object)->heap.at(slot), *theirs = state_of(other)->heap.at(other_slot);
    if (!ours || !theirs || ours->kind != theirs->kind) Py_RETURN_NONE;
    const auto mark_of = [marks](SlotIndex of) {
        PyObject* number = PyLong_FromUnsignedLong(of);
        PyObject* mark = number ? PyDict_GetItemWithError(marks, number) : nullptr;
        Py_XDECREF(number);
        return mark && PyList_CheckExact(mark) ? mark : nullptr;
    };
    const auto may_differ = [&](Value left, Value right) {
        return left != right || (left.is_slot() && mark_of(left.slot()));
    };
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        std::vector<size_t> places;
        bool same_keys = true;
        PyObject* mark = mark_of(slot);
        if (ours->kind == Kind::List) {
            look_at_changes(static_cast<const ListNode*>(ours)->items, static_cast<const ListNode*>(theirs)->items,
                            slot == other_slot, mark, [&](size_t place, const Value* left, const Value* right) {
                                if (!left || !right || may_differ(*left, *right)) places.push_back(place);
                            });
        } else if (ours->kind == Kind::Dict) {
            const auto look = [&](size_t place, const Entry* left, const Entry* right) {
                if (left && right && left->key != right->key) same_keys = false;
                if (!(left ? left : right)->key) return;
                if (!left || !right || may_differ(left->value, right->value)) places.push_back(place);
            };
            look_at_changes(static_cast<const DictNode*>(ours)->entries, static_cast<const DictNode*>(theirs)->entries,
                            slot == other_slot, mark, look);
        } else {
            Py_RETURN_NONE;
        }
        if (PyErr_Occurred()) return nullptr;
        if (!same_keys) Py_RETURN_NONE;
        std::sort(places.begin(), places.end());
        places.erase(std::unique(places.begin(), places.end()), places.end());
        PyObject* found = PyList_New(0);
        for (size_t i = 0; found && i < places.size(); ++i) {
            PyObject* key = nullptr;
            if (ours->kind == Kind::Dict) {
                const auto& entries = static_cast<const DictNode*>(ours)->entries;
                const auto& others = static_cast<const DictNode*>(theirs)->entries;
                key = object_of((places[i] < entries.size() ? entries : others)[places[i]].key);
                Py_INCREF(key);
            } else {
                key = PyLong_FromSize_t(places[i]);
            }
            if (!key || PyList_Append(found, key) < 0) Py_CLEAR(found);
            Py_XDECREF(key);
        }
        return found;
    });
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
