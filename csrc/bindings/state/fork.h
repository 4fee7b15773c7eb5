// Forks: takes snapshots of the live objects of a State, and makes the copies that its forks get.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

// Frees the containers that cannot be reached from the root or from a proxy. Returns their number.
size_t collect(StateObject* state);
// Makes `count` forks of `state`. On failure returns false with an error set and makes no children.
bool fork_states(StateObject* state, StateObject** children, size_t count);

}  // namespace turnwise::state
