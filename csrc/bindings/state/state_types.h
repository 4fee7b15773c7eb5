// State and the base of Store: versions, forks, rollbacks.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

bool make_state_types(PyObject* module);

}  // namespace turnwise::state
