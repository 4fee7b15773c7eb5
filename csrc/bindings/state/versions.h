// Methods of State and Store that handle whole versions. The Python functions diff, writable and stats use them.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

bool add_version_methods();

}  // namespace turnwise::state
