// Versions to bytes and a list of leaves, and back: the content of files and pickles of States.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

bool add_archive_methods();

}  // namespace turnwise::state
