// StateList: the facade of a list in a State. Rarely used methods are added in Python.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

// The item at `index`, for writing, until the next write; null with an error set where there is none.
Value* place_in_list(Proxy* list, PyObject* index);
bool make_list_types(PyObject* module);

}  // namespace turnwise::state
