// Methods of State and Store on versions as wholes; Python builds diff, writable and stats on them.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

bool add_version_methods();

}  // namespace turnwise::state
