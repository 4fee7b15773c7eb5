// Compares facades with each other and with plain containers, item by item as dict and list do. A comparison of items
// may run code that changes the containers, so only the current place is kept across it.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

PyObject* compare_lists(PyObject* self, PyObject* other, int op);
PyObject* compare_dicts(PyObject* self, PyObject* other, int op);

}  // namespace turnwise::state
