#include "bindings/state/policy.h"

namespace turnwise::state {

Policy Policy::of(PyObject* tuple) {
    return {static_cast<Mode>(PyLong_AsLong(PyTuple_GET_ITEM(tuple, 0))), PyTuple_GET_ITEM(tuple, 1),
            PyTuple_GET_ITEM(tuple, 2) == Py_True};
}

namespace {
// 1 if no item of the iterable can change, 0 if one can, -1 on error.
int is_constant(StateObject* state, PyObject* iterable) {
    if (Py_EnterRecursiveCall(" while a frozenset is taken into a State")) return -1;
    PyObject* items = PyObject_GetIter(iterable);
    int constant = items ? 1 : -1;
    while (constant == 1) {
        PyObject* item = PyIter_Next(items);
        if (!item) break;
        if (!is_atom(item)) {
            if (PyTuple_Check(item) && !Py_TYPE(item)->tp_dictoffset) {
                constant = is_constant(state, item);
            } else {
                PyObject* policy = policy_of(state, item);
                constant = !policy ? -1 : policy != Py_None && Policy::of(policy).mode == Policy::Share;
            }
        }
        Py_DECREF(item);
    }
    Py_XDECREF(items);
    Py_LeaveRecursiveCall();
    return PyErr_Occurred() ? -1 : constant;
}
}  // namespace

PyObject* policy_of(StateObject* state, PyObject* object) {
    PyObject* known = policy_of_type(state, Py_TYPE(object));
    if (!known || known == Py_None || !PyFrozenSet_Check(object)) return known;
    const Policy policy = Policy::of(known);
    if (policy.mode != Policy::Share || !policy.hands_out_copies) return known;
    const int constant = is_constant(state, object);
    if (constant < 0) return nullptr;
    return constant ? known : policy_of_type(state, &PySet_Type);
}

PyObject* policy_of_type(StateObject* state, PyTypeObject* object_type) {
    PyObject* type = reinterpret_cast<PyObject*>(object_type);
    PyObject* known = PyDict_GetItemWithError(state->store->policies, type);
    if (known || PyErr_Occurred()) return known;
    // The Store examines each type once. Its answer, a policy or None, is kept in `policies`.
    PyObject* found = PyObject_CallMethod(reinterpret_cast<PyObject*>(state->store), "_policy_of", "O", type);
    if (!found) return nullptr;
    const bool stored = PyDict_SetItem(state->store->policies, type, found) == 0;
    Py_DECREF(found);  // the dict holds it
    return stored ? found : nullptr;
}

}  // namespace turnwise::state
