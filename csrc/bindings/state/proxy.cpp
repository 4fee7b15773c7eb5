#include "bindings/state/proxy.h"

#include "bindings/state/policy.h"

namespace turnwise::state {

namespace {
constexpr size_t kSpares = 128;
// Memory of freed proxies, kept for new ones.
struct Spares {
    PyObject* objects[kSpares];  // the first `count` are valid
    size_t count = 0;            // spare proxies
};
Spares spare_dicts, spare_lists;

Spares* spares_of(PyTypeObject* type) noexcept {
    return type == types.dict ? &spare_dicts : type == types.list ? &spare_lists : nullptr;
}
}  // namespace

constexpr uint32_t kResting = 256;  // most resting proxies of a State

static void free_proxy(Proxy* proxy, PyTypeObject* type) {
    Spares* spares = spares_of(type);
    if (spares && spares->count < kSpares) {
        spares->objects[spares->count++] = reinterpret_cast<PyObject*>(proxy);
    } else {
        PyObject_GC_Del(proxy);
    }
}

Proxy* new_proxy(PyTypeObject* type, StateObject* state, SlotIndex slot, Node* node) {
    Spares* spares = spares_of(type);
    Proxy* proxy = nullptr;
    if (spares && spares->count) {
        proxy = reinterpret_cast<Proxy*>(PyObject_Init(spares->objects[--spares->count], type));
    } else {
        proxy = PyObject_GC_New(Proxy, type);
        if (!proxy) return nullptr;
    }
    Py_XINCREF(reinterpret_cast<PyObject*>(state));
    proxy->state = state;
    proxy->node = node;
    proxy->slot = slot;
    proxy->birth = node->birth;
    proxy->stamp = state ? state->heap.stamp() : 0;
    if (state) state->proxies.insert(proxy);
    PyObject_GC_Track(proxy);
    return proxy;
}

int traverse_proxy(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(reinterpret_cast<Proxy*>(self)->state);
    return 0;
}

void dealloc_proxy(PyObject* self) {
    Operation operation;
    PyObject_GC_UnTrack(self);
    auto* proxy = reinterpret_cast<Proxy*>(self);
    PyTypeObject* type = Py_TYPE(self);
    if (StateObject* state = proxy->state) {
        const bool known = proxy->slot != kNoSlot;
        if (known && state->resting < kResting && type != types.tokens) {
            ++state->resting;
            Py_DECREF(reinterpret_cast<PyObject*>(state));  // may free the State, and the proxy with it
            return;
        }
        if (known) state->proxies.erase(proxy);
        Py_DECREF(reinterpret_cast<PyObject*>(state));
    } else {
        Node::drop(proxy->node);
    }
    free_proxy(proxy, type);
    Py_DECREF(type);
}

PyObject* state_of_proxy(PyObject* self, void*) {
    PyObject* state = reinterpret_cast<PyObject*>(proxy_of(self)->state);
    return Py_NewRef(state ? state : Py_None);
}
PyObject* claimed_class(PyObject*, void* type) {
    return Py_NewRef(static_cast<PyObject*>(type));
}

int traverse_holder(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(reinterpret_cast<Holder*>(self)->proxy);
    return 0;
}
void dealloc_holder(PyObject* self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(reinterpret_cast<Holder*>(self)->proxy);
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

PyObject* wake(Proxy* proxy) {
    StateObject* state = proxy->state;
    --state->resting;
    Py_INCREF(reinterpret_cast<PyObject*>(state));
    PyObject* object = reinterpret_cast<PyObject*>(proxy);
#ifdef Py_REF_DEBUG
    _Py_NewReference(object);
#else
    Py_SET_REFCNT(object, 1);  // it still holds the reference to its type
#endif
    PyObject_GC_Track(object);
    return object;
}

void drop_resting(StateObject* state) {
    if (!state->resting) return;
    Proxy* gone[kResting];
    size_t count = 0;
    state->proxies.for_each([&](Proxy* proxy) {
        if (Py_REFCNT(reinterpret_cast<PyObject*>(proxy)) == 0) gone[count++] = proxy;
    });
    state->resting = 0;
    for (size_t i = 0; i < count; ++i) {
        state->proxies.erase(gone[i]);
        PyTypeObject* type = Py_TYPE(reinterpret_cast<PyObject*>(gone[i]));
        free_proxy(gone[i], type);
        Py_DECREF(type);
    }
}

Node* refresh(Proxy* proxy) {
    StateObject* state = proxy->state;
    if (state->pruned) {
        PyErr_SetString(types.pruned, "this State was pruned: its contents are gone");
        return nullptr;
    }
    Node* node = proxy->slot == kNoSlot ? nullptr : state->heap.at(proxy->slot);
    if (!node || node->birth != proxy->birth) {
        PyErr_SetString(types.error,
                        "this container does not exist in its State any more: a rollback undid its creation");
        return nullptr;
    }
    proxy->node = node;
    proxy->stamp = state->heap.stamp();
    return node;
}

namespace {
// The object of an opaque node: the live object of this version, or the snapshot if its policy hands that out, or a
// copy of the snapshot. The copy becomes this version's live object unless the State is a commit.
PyObject* open_opaque(StateObject* state, SlotIndex slot) {
    // Another thread may be copying this very object, or forking the State. It may change the node meanwhile.
    if (!state->frozen && !wait_for_others(state)) return nullptr;
    if (!check_alive(state)) return nullptr;
    Node* found = state->heap.at(slot);
    if (!found || found->kind != Kind::Opaque) {
        return PyErr_Format(types.error, "another thread removed the object while this one read it");
    }
    auto* node = static_cast<OpaqueNode*>(found);
    PyObject* object = object_of(node->object);
    const Policy policy = Policy::of(object_of(node->policy));
    Py_INCREF(object);
    if (state->heap.owns(node) || !policy.hands_out_copies) return object;
    // A commit does not change here, and several threads may read it at once, so it is not locked.
    if (!state->frozen && state->locked && reject_writing(state)) {
        Py_DECREF(object);
        return nullptr;
    }
    // Copy the snapshot. The code that copies may free the node, so keep what is needed of it.
    const Epoch birth = node->birth;
    Leaf* rule = node->policy;
    retain(rule);
    PyObject* copy;
    if (state->frozen) {
        copy = PyObject_CallOneArg(policy.copy, object);
    } else {
        Lock lock(state);
        copy = PyObject_CallOneArg(policy.copy, object);
    }
    Py_DECREF(object);
    if (copy && !state->frozen) {
        auto* own = new OpaqueNode(state->heap.epoch(), birth, leaf_of(copy), rule);
        state->heap.replace(slot, own);
        note_pending(state, slot, own);
    }
    release(rule);
    return copy;
}

// A new tuple with proxies of the containers in it. Tuples are immutable, so a new one can stand for the original.
PyObject* build_tuple(StateObject* state, const TupleNode* tuple, PyObject*& shown) {
    const Values items = tuple->items;  // a copy, because code that runs below may free the node
    PyObject* type = tuple->type ? object_of(tuple->type) : nullptr;
    if (Py_EnterRecursiveCall(" while a tuple is read")) return nullptr;
    PyObject* result = PyTuple_New(Py_ssize_t(items.size()));
    for (size_t i = 0; result && i < items.size(); ++i) {
        PyObject* item = wrap_once(state, items[i], shown);
        if (!item)
            Py_CLEAR(result);
        else
            PyTuple_SET_ITEM(result, Py_ssize_t(i), item);
    }
    Py_LeaveRecursiveCall();
    if (!result || !type) return result;
    PyObject* named = PyObject_CallMethod(reinterpret_cast<PyObject*>(&PyTuple_Type), "__new__", "OO", type, result);
    Py_DECREF(result);
    return named;
}
}  // namespace

PyObject* wrap_once(StateObject* state, Value value, PyObject*& shown) {
    const Node* node = value.is_slot() ? state->heap.at(value.slot()) : nullptr;
    if (!node || (node->kind != Kind::Tuple && node->kind != Kind::Opaque)) return wrap(state, value);
    if (!shown && !(shown = PyDict_New())) return nullptr;
    PyObject* birth = PyLong_FromUnsignedLongLong(node->birth);
    if (!birth) return nullptr;
    PyObject* object = PyDict_GetItemWithError(shown, birth);
    Py_XINCREF(object);
    if (!object && !PyErr_Occurred()) {
        const bool is_tuple = node->kind == Kind::Tuple;
        object = is_tuple ? build_tuple(state, static_cast<const TupleNode*>(node), shown) : wrap(state, value);
        if (object && PyDict_SetItem(shown, birth, object) < 0) Py_CLEAR(object);
    }
    Py_DECREF(birth);
    return object;
}

PyObject* wrap_new(StateObject* state, SlotIndex slot) {
    Node* node = state->heap.at(slot);
    switch (node->kind) {
        case Kind::Dict:
            return reinterpret_cast<PyObject*>(new_proxy(types.dict, state, slot, node));
        case Kind::List:
            return reinterpret_cast<PyObject*>(new_proxy(types.list, state, slot, node));
        case Kind::Tokens:
            return reinterpret_cast<PyObject*>(new_proxy(types.tokens, state, slot, node));
        case Kind::Opaque:
            return open_opaque(state, slot);
        case Kind::Tuple:
            break;
    }
    PyObject* shown = nullptr;
    PyObject* tuple = build_tuple(state, static_cast<const TupleNode*>(node), shown);
    Py_XDECREF(shown);
    return tuple;
}

}  // namespace turnwise::state
