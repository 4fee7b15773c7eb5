// How Python objects enter a State: which are leaves, which become containers of the heap and when, which are copied.
#pragma once

#include "bindings/state/proxy.h"

namespace turnwise::state {

// An object as it enters a State: a leaf, the slot of a proxy of the same State, or a plain container, which stays what
// it is until `settle` (then `later` is set). False with an error set, which names the place: `key` (null for a list)
// of the container `into`.
bool take_in_other(StateObject* state, PyObject* object, Value& value, bool& later, SlotIndex into, PyObject* key);
// Whether `key` may be one: keys are shared by all versions, so that they must not change. False with an error set.
bool check_rare_key(StateObject* state, PyObject* key);
inline bool check_key(StateObject* state, PyObject* key) {
    return PyUnicode_CheckExact(key) || PyLong_CheckExact(key) || check_rare_key(state, key);
}
inline bool is_atom(PyObject* object) noexcept {
    return PyUnicode_CheckExact(object) || PyLong_CheckExact(object) || object == Py_None ||
           PyFloat_CheckExact(object) || PyBool_Check(object) || PyBytes_CheckExact(object);
}
inline bool take_in(StateObject* state, PyObject* object, Value& value, bool& later, SlotIndex into,
                    PyObject* key = nullptr) {
    if (!is_atom(object)) return take_in_other(state, object, value, later, into, key);
    later = false;
    Py_INCREF(object);
    value = Value::of(leaf_of(object));
    return true;
}
// Takes over every plain container that was written since the last fork. False with an error set, and nothing changed.
bool settle(StateObject* state);
// Takes a copy of `data` in as the root of an empty state.
bool adopt_root(StateObject* state, PyObject* data);
// What the objects of a list are in `state` from now on: it takes their contents over. The values hold references.
bool take_over(StateObject* state, PyObject* objects, std::vector<Value>& values);

}  // namespace turnwise::state
