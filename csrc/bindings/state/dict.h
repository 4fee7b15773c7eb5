// StateDict: the facade of a dict in a State, its views and iterators. Rarely used methods are added in Python.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

// The value of `key`, for writing, until the next write; null with an error set where there is none.
Value* place_in_dict(Proxy* dict, PyObject* key);
bool make_dict_types(PyObject* module);

}  // namespace turnwise::state
