// StateDict: the facade of a dict in a State, with its views and iterators. Python adds the rarely used methods.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

// The value of `key`, for writing; valid until the next write. Null with an error set if there is none.
Value* place_in_dict(Proxy* dict, PyObject* key);
bool make_dict_types(PyObject* module);

}  // namespace turnwise::state
