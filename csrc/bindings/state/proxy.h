// Proxies: the Python objects that show the containers of a State.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

Proxy* new_proxy(PyTypeObject* type, StateObject* state, SlotIndex slot, Node* node);
PyObject* wrap_new(StateObject* state, SlotIndex slot);
PyObject* wake(Proxy* proxy);
void drop_resting(StateObject* state);
inline PyObject* wrap_slot(StateObject* state, SlotIndex slot) {
    Proxy* known = state->proxies.find(slot);
    if (!known) return wrap_new(state, slot);
    auto* object = reinterpret_cast<PyObject*>(known);
    if (Py_REFCNT(object) == 0) return wake(known);
    Py_INCREF(object);
    return object;
}
inline PyObject* wrap(StateObject* state, Value value) {
    if (value.is_slot()) return wrap_slot(state, value.slot());
    PyObject* object = object_of(value.leaf());
    Py_INCREF(object);
    return object;
}
// As `wrap`, but makes tuples and a commit's copies of objects only once, where `wrap` makes new ones on each call.
// `shown` is a dict of those made so far, by the birth of their nodes; it is created at need where it is null.
PyObject* wrap_once(StateObject* state, Value value, PyObject*& shown);
Node* refresh(Proxy* proxy);
// The node that a proxy shows, or null with an error set.
inline Node* node_of(Proxy* proxy) {
    return proxy->stamp == proxy->state->heap.stamp() ? proxy->node : refresh(proxy);
}
template <class NodeType>
NodeType* read(Proxy* proxy) {
    return static_cast<NodeType*>(node_of(proxy));
}
// The node for writing, or null with an error set.
template <class NodeType>
NodeType* write(Proxy* proxy) {
    StateObject* state = proxy->state;
    Node* node = node_of(proxy);
    if (!node) return nullptr;
    if ((state->frozen || state->locked) && refuse_writing(state)) return nullptr;
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

}  // namespace turnwise::state
