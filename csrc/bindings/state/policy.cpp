#include "bindings/state/policy.h"

namespace turnwise::state {

Policy Policy::of(PyObject* tuple) {
    return {static_cast<Mode>(PyLong_AsLong(PyTuple_GET_ITEM(tuple, 0))), PyTuple_GET_ITEM(tuple, 1),
            PyTuple_GET_ITEM(tuple, 2) == Py_True};
}

PyObject* policy_of(StateObject* state, PyObject* object) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
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
