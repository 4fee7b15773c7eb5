// Comparison of facades with each other and with plain containers, item by item as dict and list do it. Any comparison
// of items may run code that changes what is compared: nothing is remembered across one but places.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

PyObject* compare_lists(PyObject* self, PyObject* other, int op);
PyObject* compare_dicts(PyObject* self, PyObject* other, int op);

}  // namespace turnwise::state
