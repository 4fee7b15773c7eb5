// Policies: how objects of a type that the store does not know fork.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

// A Store's rule for a type: a tuple (mode, copy, private).
//   share:  the object is a leaf, shared by all versions; `copy(object)`, if not None, is called when it enters a State
//   copy:   forks call `copy(object)`; if `private`, each version that reads the object gets its own copy, else it gets
//           the snapshot itself, which must then be read-only
//   freeze: `copy(object)` becomes a leaf, at once
//   linked: the object may refer to others of this State and to its facades, so each fork copies all of them together,
//           through the Store's `_copy_linked`; `copy(object)` only where one is copied alone
struct Policy {
    enum Mode : long { Share = 0, Copy = 1, Freeze = 2, Linked = 3 };
    Mode mode;
    PyObject* copy;
    bool hands_out_copies;
    bool makes_opaque() const noexcept { return mode == Copy || mode == Linked; }
    static Policy of(PyObject* tuple);
};

// The policy tuple of an object's type, borrowed; None where there is none; null on error.
PyObject* policy_of(StateObject* state, PyObject* object);

}  // namespace turnwise::state
