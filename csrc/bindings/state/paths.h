// Paths: the keys and indices that lead from the root of a State to a value in it.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "bindings/state/objects.h"

namespace turnwise::state {

struct PathStep {
    PyObject* key;  // key in a dict, borrowed; null in a list or tuple
    size_t index;   // index in a list or tuple; 0 in a dict
};

// The shortest path to the first value for which `matches(value, key)` is true: empty for the root, nullopt if there is
// no such value. `key` is null for the root and outside dicts.
std::optional<std::vector<PathStep>> find_path(const Heap& heap,
                                               const std::function<bool(Value value, PyObject* key)>& matches);

}  // namespace turnwise::state
