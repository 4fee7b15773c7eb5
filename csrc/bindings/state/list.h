// StateList: the facade of a list in a State. Python adds the rarely used methods.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

// The item at `index`, for writing; valid until the next write. Null with an error set if there is none.
Value* place_in_list(Proxy* list, PyObject* index);
bool make_list_types(PyObject* module);

}  // namespace turnwise::state
