// Takes Python objects into a State: decides which are leaves, which become containers of the heap and when, and which
// are copied.
#pragma once

#include "bindings/state/proxy.h"

namespace turnwise::state {

// Converts an object that is written into a State to a value: a leaf, the slot of a proxy of the same State, or a plain
// container. A container stays a plain object until `settle`; `later` is then true. Returns false with an error set,
// which names the place: `key` (null for a list) of the container `into`.
bool take_in_other(StateObject* state, PyObject* object, Value& value, bool& later, SlotIndex into, PyObject* key);
// True if `key` may be a key. All versions share keys, so a key must not change. Returns false with an error set.
bool check_rare_key(StateObject* state, PyObject* key);
inline bool check_key(StateObject* state, PyObject* key) {
    return PyUnicode_CheckExact(key) || PyLong_CheckExact(key) || check_rare_key(state, key);
}
// take_in_other with a fast path for atoms.
inline bool take_in(StateObject* state, PyObject* object, Value& value, bool& later, SlotIndex into,
                    PyObject* key = nullptr) {
    if (!is_atom(object)) return take_in_other(state, object, value, later, into, key);
    later = false;
    Py_INCREF(object);
    value = Value::of(leaf_of(object));
    return true;
}
// Takes over every plain container that was written since the last fork. On failure returns false with an error set and
// changes nothing.
bool settle(StateObject* state);
// Makes a copy of `data` the root of an empty state.
bool adopt_root(StateObject* state, PyObject* data);
// Takes over the contents of the objects in a list. `values` receives what they are in `state`, with references.
bool take_over(StateObject* state, PyObject* objects, std::vector<Value>& values);

}  // namespace turnwise::state
