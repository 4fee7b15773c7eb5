// Turns versions into bytes and a list of leaves, and back. Files and pickles of States hold these.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

bool add_archive_methods();

}  // namespace turnwise::state
