// Proxies: the Python objects that show the containers of a State.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

// A new proxy, in the map of its State; `state` is null for a TokenArray outside any State.
Proxy* new_proxy(PyTypeObject* type, StateObject* state, SlotIndex slot, Node* node);
// The Python object for a slot that has no proxy.
PyObject* wrap_new(StateObject* state, SlotIndex slot);
// A resting proxy, with a new reference.
PyObject* wake(Proxy* proxy);
// Frees all resting proxies.
void drop_resting(StateObject* state);
// The Python object for a slot: its proxy, a new tuple or an opaque object. A new reference; null with an error set.
inline PyObject* wrap_slot(StateObject* state, SlotIndex slot) {
    Proxy* known = state->proxies.find(slot);
    if (!known) return wrap_new(state, slot);
    auto* object = reinterpret_cast<PyObject*>(known);
    if (Py_REFCNT(object) == 0) return wake(known);
    Py_INCREF(object);
    return object;
}
// The same for any value; a leaf is the object itself.
inline PyObject* wrap(StateObject* state, Value value) {
    if (value.is_slot()) return wrap_slot(state, value.slot());
    PyObject* object = object_of(value.leaf());
    Py_INCREF(object);
    return object;
}
// Like `wrap`, but makes tuples and a commit's copies of objects only once; `wrap` makes new ones on each call. `shown`
// is a dict of those made so far, by the birth of their nodes. If it is null, the function creates it when needed.
PyObject* wrap_once(StateObject* state, Value value, PyObject*& shown);
// Looks up the node of a proxy again; null with an error set.
Node* refresh(Proxy* proxy);
// The node of a proxy; null with an error set.
inline Node* node_of(Proxy* proxy) {
    return proxy->stamp == proxy->state->heap.stamp() ? proxy->node : refresh(proxy);
}
template <class NodeType>
NodeType* read(Proxy* proxy) {
    return static_cast<NodeType*>(node_of(proxy));
}
// The node of a proxy for writing, copied first if this version does not own it; null with an error set.
template <class NodeType>
NodeType* write(Proxy* proxy) {
    StateObject* state = proxy->state;
    Node* node = node_of(proxy);
    if (!node) return nullptr;
    if (state->frozen || state->locked) {
        if (reject_writing(state) || !(node = node_of(proxy))) return nullptr;
    }
    ++state->writes;
    if (!state->heap.owns(node)) {
        node = state->heap.own<NodeType>(proxy->slot);
        proxy->node = node;
        proxy->stamp = state->heap.stamp();
    }
    return static_cast<NodeType*>(node);
}
inline bool is_proxy(PyObject* object) {
    return Py_IS_TYPE(object, types.dict) || Py_IS_TYPE(object, types.list) || Py_IS_TYPE(object, types.tokens);
}

int traverse_proxy(PyObject* self, visitproc visit, void* arg);
void dealloc_proxy(PyObject* self);
// Getters: the State of a proxy, or None; the type that a facade claims to have.
PyObject* state_of_proxy(PyObject* self, void*);
PyObject* claimed_class(PyObject*, void* type);

// A view or iterator, which holds a proxy. It may have more fields behind it.
struct Holder {
    PyObject_HEAD Proxy* proxy;  // owned; null for an exhausted iterator
};
// A new object of a holder's type, not yet tracked; null with an error set.
template <class HolderType>
HolderType* new_holder(PyTypeObject* type, Proxy* proxy) {
    auto* self = PyObject_GC_New(HolderType, type);
    if (self) self->proxy = proxy_of(Py_NewRef(reinterpret_cast<PyObject*>(proxy)));
    return self;
}
int traverse_holder(PyObject* self, visitproc visit, void* arg);
void dealloc_holder(PyObject* self);

}  // namespace turnwise::state
