// TokenArray: int32 token ids in chunks that versions share. A TokenArray outside any State owns its node.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

bool make_tokens_type(PyObject* module);

}  // namespace turnwise::state
