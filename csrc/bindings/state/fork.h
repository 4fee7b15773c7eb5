// Forks: snapshots of the objects that a State has handed out, and the copies that its forks get of them.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

// Frees the containers that neither the root nor a living proxy leads to.
size_t collect(StateObject* state);
bool fork_states(StateObject* state, StateObject** children, size_t count);

}  // namespace turnwise::state
