#include "bindings/state/state_types.h"

#include "bindings/state/adopt.h"
#include "bindings/state/fork.h"

namespace turnwise::state {

namespace {

int state_traverse(PyObject* object, visitproc visit, void* arg) {
    StateObject* self = state_of(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->store);
    Py_VISIT(self->base);
    // Only chunks that carry this heap's epoch: no other version refers to the objects in them.
    for (SlotIndex slot : self->pending) {
        Node* node = self->heap.at(slot);
        if (!node || !self->heap.owns(node)) continue;
        int stop = 0;
        const auto visit_value = [&](Value value) {
            if (!stop && value.is_leaf()) stop = visit(object_of(value.leaf()), arg);
        };
        if (node->kind == Kind::Dict) {
            static_cast<DictNode*>(node)->entries.for_each_owned_chunk(node->epoch, [&](Entry* entries, size_t count) {
                for (size_t i = 0; i < count; ++i) visit_value(entries[i].value);
            });
        } else if (node->kind == Kind::List) {
            static_cast<ListNode*>(node)->items.for_each_owned_chunk(node->epoch, [&](Value* values, size_t count) {
                for (size_t i = 0; i < count; ++i) visit_value(values[i]);
            });
        } else if (node->kind == Kind::Opaque) {
            stop = visit(object_of(static_cast<OpaqueNode*>(node)->object), arg);
        }
        if (stop) return stop;
    }
    return 0;
}

void empty_state(StateObject* self) {
    forget_edges(self);
    drop_resting(self);
    self->heap.clear();
    self->pending.clear();
    Py_CLEAR(self->base);
}

int state_clear(PyObject* object) {
    Operation operation;
    state_of(object)->pruned = true;  // any later use raises PrunedError
    empty_state(state_of(object));
    return 0;
}

void state_dealloc(PyObject* object) {
    Operation operation;
    StateObject* self = state_of(object);
    PyObject_GC_UnTrack(object);
    // Leave the list first, because a weak reference's callback may ask the store for its states.
    *self->link = self->next;
    if (self->next) self->next->link = self->link;
    forget_edges(self);
    if (self->weakrefs) PyObject_ClearWeakRefs(object);
    Py_CLEAR(self->base);
    drop_resting(self);
    self->pending.~vector();
    self->proxies.~ProxyMap();
    self->heap.~Heap();
    Py_CLEAR(self->store);
    PyTypeObject* type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

// For functions of one optional argument: adds keyword arguments to `count`. False with an error set.
bool one_argument(const char* function, const char* name, Py_ssize_t& count, PyObject* names) {
    if (names && PyTuple_GET_SIZE(names)) {
        PyObject* given = PyTuple_GET_ITEM(names, 0);
        if (PyUnicode_CompareWithASCIIString(given, name) != 0) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", function, given);
            return false;
        }
        count += PyTuple_GET_SIZE(names);
    }
    if (count > 1)
        PyErr_Format(PyExc_TypeError, "%s() takes at most one argument, %s (%zd given)", function, name, count);
    return count <= 1;
}

PyObject* state_data(PyObject* object, void*) {
    StateObject* self = state_of(object);
    return check_alive(self) ? guarded<PyObject*>(nullptr, [&] { return wrap(self, self->heap.root()); }) : nullptr;
}

PyObject* state_fork(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    Operation operation;
    StateObject* self = state_of(object);
    if (!one_argument("fork", "n", count, names) || !check_alive(self)) return nullptr;
    if (count == 0) {
        StateObject* child = nullptr;
        return fork_states(self, &child, 1) ? reinterpret_cast<PyObject*>(child) : nullptr;
    }
    if (!PyLong_Check(args[0])) {
        return PyErr_Format(PyExc_TypeError, "n=%R: expected a whole number >= 0", args[0]);
    }
    const Py_ssize_t n = PyLong_AsSsize_t(args[0]);
    if (n == -1 && PyErr_Occurred()) return nullptr;
    if (n < 0) return PyErr_Format(PyExc_ValueError, "n=%zd: expected a whole number >= 0", n);
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        std::vector<StateObject*> children(size_t(n), nullptr);
        if (!fork_states(self, children.data(), children.size())) return nullptr;
        PyObject* list = PyList_New(n);
        for (Py_ssize_t i = 0; i < n; ++i) {
            auto* child = reinterpret_cast<PyObject*>(children[size_t(i)]);
            if (list)
                PyList_SET_ITEM(list, i, child);
            else
                Py_DECREF(child);
        }
        return list;
    });
}

PyObject* state_deepcopy(PyObject* object, PyObject*) {
    return state_fork(object, nullptr, 0, nullptr);
}

PyObject* state_commit(PyObject* object, PyObject*) {
    Operation operation;
    StateObject* self = state_of(object);
    if (!check_alive(self) || ((self->frozen || self->locked) && reject_writing(self))) return nullptr;
    StateObject* version = nullptr;
    if (!fork_states(self, &version, 1)) return nullptr;
    version->frozen = true;
    Py_INCREF(reinterpret_cast<PyObject*>(version));
    PyObject* old = self->base;
    self->base = reinterpret_cast<PyObject*>(version);
    Py_XDECREF(old);
    return reinterpret_cast<PyObject*>(version);
}

PyObject* state_rollback(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    Operation operation;
    StateObject* self = state_of(object);
    if (!check_alive(self) || ((self->frozen || self->locked) && reject_writing(self))) return nullptr;
    if (!one_argument("rollback", "to", count, names)) return nullptr;
    PyObject* to = count && args[0] != Py_None ? args[0] : self->base;
    if (!to) return PyErr_Format(types.error, "nothing to roll back to: commit() first, or name a version");
    if (!Py_IS_TYPE(to, types.state)) {
        return PyErr_Format(PyExc_TypeError, "to=%R: expected a State of the same Store", to);
    }
    // Take the contents of a fork of the version.
    StateObject* version = state_of(to);
    if (!check_alive(version)) return nullptr;
    if (version->store != self->store) {
        return PyErr_Format(PyExc_ValueError, "to=%R: it belongs to another Store", to);
    }
    if (version == self) Py_RETURN_NONE;
    drop_resting(self);
    StateObject* copy = nullptr;  // forking settles the version and takes snapshots of its live objects
    if (!fork_states(version, &copy, 1)) return nullptr;
    ++self->writes;
    self->heap.restore(copy->heap);
    self->pending.clear();
    Py_DECREF(reinterpret_cast<PyObject*>(copy));
    // Remove the proxies of containers that this version doesn't have, because other containers may get their slots.
    std::vector<Proxy*> lost;
    self->proxies.for_each([&](Proxy* proxy) {
        const Node* node = self->heap.at(proxy->slot);
        if (!node || node->birth != proxy->birth) lost.push_back(proxy);
    });
    for (Proxy* proxy : lost) {
        self->proxies.erase(proxy);
        proxy->slot = kNoSlot;
    }
    Py_RETURN_NONE;
}

PyObject* state_prune(PyObject* object, PyObject*) {
    Operation operation;
    StateObject* self = state_of(object);
    if (self->locked && reject_writing(self)) return nullptr;
    self->pruned = true;
    empty_state(self);
    Py_RETURN_NONE;
}

PyObject* state_settle(PyObject* object, PyObject*) {
    Operation operation;
    StateObject* self = state_of(object);
    if (!check_alive(self) || !guarded(false, [&] { return settle(self); })) return nullptr;
    Py_RETURN_NONE;
}

PyObject* state_collect(PyObject* object, PyObject*) {
    Operation operation;
    StateObject* self = state_of(object);
    if (!check_alive(self) || (self->locked && reject_writing(self))) return nullptr;
    return guarded<PyObject*>(nullptr, [&] {
        if (self->frozen) return PyLong_FromLong(0);
        drop_resting(self);
        return PyLong_FromSize_t(collect(self));
    });
}

PyObject* get_flag(PyObject* object, void* which) {
    return PyBool_FromLong(which ? state_of(object)->pruned : state_of(object)->frozen);
}

PyObject* get_store(PyObject* object, void*) {
    return Py_NewRef(reinterpret_cast<PyObject*>(state_of(object)->store));
}

PyMethodDef state_methods[] = {
    {"fork", FASTCALL(state_fork) | METH_KEYWORDS,
     "fork(n: object = None) -> object\n\nAn independent version with the same contents, or a list of n; constant time "
     "each."},
    {"__deepcopy__", state_deepcopy, METH_O, "A fork."},
    {"commit", state_commit, METH_NOARGS,
     "commit() -> State\n\nKeep the contents as they are now. Returns them as a frozen State, which is also where "
     "rollback() goes."},
    {"rollback", FASTCALL(state_rollback) | METH_KEYWORDS,
     "rollback(to: object = None) -> None\n\nTake the contents of the last commit, or of the State `to`, which stays "
     "as it is."},
    {"prune", state_prune, METH_NOARGS,
     "prune() -> None\n\nGive the memory back now; every later use of this State raises PrunedError."},
    {"_settle", state_settle, METH_NOARGS, nullptr},
    {"collect", state_collect, METH_NOARGS,
     "collect() -> int\n\nFree containers that nothing refers to any more, and say how many. Happens by itself as "
     "containers are added."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef state_getset[] = {
    {"data", state_data, nullptr, "The root: a facade of the dict or list, or the leaf itself.", nullptr},
    {"frozen", get_flag, nullptr, "True for a commit: it can be read, forked and gone back to.", nullptr},
    {"pruned", get_flag, nullptr, "True after prune().", reinterpret_cast<void*>(1)},
    {"store", get_store, nullptr, "The Store that it belongs to.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMemberDef state_members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(StateObject, weakrefs), READONLY, nullptr},
                               {nullptr, 0, 0, 0, nullptr}};

PyType_Slot state_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(state_traverse)},
                             {Py_tp_clear, reinterpret_cast<void*>(state_clear)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(state_dealloc)},
                             {Py_tp_methods, state_methods},
                             {Py_tp_getset, state_getset},
                             {Py_tp_members, state_members},
                             {0, nullptr}};
PyType_Spec state_spec = {"turnwise.state.State", sizeof(StateObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, state_slots};

// ---- the base of Store ----------------------------------------------------------------------------------------------
StoreObject* store_of(PyObject* self) noexcept {
    return reinterpret_cast<StoreObject*>(self);
}

PyObject* store_new(PyTypeObject* type, PyObject*, PyObject*) {
    PyObject* self = type->tp_alloc(type, 0);
    if (!self) return nullptr;
    store_of(self)->policies = PyDict_New();
    if (!store_of(self)->policies) Py_CLEAR(self);
    return self;
}
int store_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(store_of(self)->policies);
    return 0;
}
int store_clear(PyObject* self) {
    Py_CLEAR(store_of(self)->policies);
    return 0;
}
void store_dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(store_of(self)->policies);
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}
PyObject* store_state(PyObject* self, PyObject* data) {
    Operation operation;
    StateObject* state = new_state(store_of(self));
    if (!state) return nullptr;
    if (!guarded(false, [&] { return adopt_root(state, data); })) {
        Py_DECREF(reinterpret_cast<PyObject*>(state));
        return nullptr;
    }
    return reinterpret_cast<PyObject*>(state);
}
PyObject* store_states(PyObject* self, PyObject*) {
    PyObject* list = PyList_New(0);
    for (StateObject* state = store_of(self)->states; list && state; state = state->next) {
        if (!state->pruned && PyList_Append(list, reinterpret_cast<PyObject*>(state)) < 0) Py_CLEAR(list);
    }
    return list;
}

PyMethodDef store_methods[] = {
    {"state", store_state, METH_O,
     "state(data: object) -> State\n\nA copy of `data`, aliasing and cycles kept, as the first version."},
    {"states", store_states, METH_NOARGS, "states() -> list\n\nThe living States, newest first."},
    {nullptr, nullptr, 0, nullptr}};
PyMemberDef store_members[] = {{"_policies", T_OBJECT_EX, offsetof(StoreObject, policies), READONLY, nullptr},
                               {"_checks_shared", T_BOOL, offsetof(StoreObject, checks_shared), 0, nullptr},
                               {nullptr, 0, 0, 0, nullptr}};
PyType_Slot store_slots[] = {{Py_tp_new, reinterpret_cast<void*>(store_new)},
                             {Py_tp_traverse, reinterpret_cast<void*>(store_traverse)},
                             {Py_tp_clear, reinterpret_cast<void*>(store_clear)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(store_dealloc)},
                             {Py_tp_methods, store_methods},
                             {Py_tp_members, store_members},
                             {0, nullptr}};
PyType_Spec store_spec = {"turnwise._C.StoreBase", sizeof(StoreObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, store_slots};

}  // namespace

bool make_state_types(PyObject* module) {
    types.store = make_type(module, store_spec, "StoreBase");
    types.state = make_type(module, state_spec, "State");
    return types.store && types.state;
}

}  // namespace turnwise::state
