// Policies: rules for forking objects of types that the store does not know.
#pragma once

#include "bindings/state/objects.h"

namespace turnwise::state {

// A Store's rule for a type: a tuple (mode, copy, private).
//   share:  all versions share the object, a leaf; the State calls `copy(object)`, if not None, when the object enters;
//           with `private`, a frozenset whose items may change has the policy of a set instead
//   copy:   forks call `copy(object)`; if `private`, each version that reads the object gets its own copy, else it gets
//           the snapshot itself, which must then be read-only
//   freeze: the State keeps `copy(object)` as a leaf from the start
//   linked: the object may refer to other objects of this State and to its facades, so each fork copies all of them
//           together by the Store's `_copy_linked`; `copy(object)` is called if only one object is copied
struct Policy {
    enum Mode : long { Share = 0, Copy = 1, Freeze = 2, Linked = 3 };
    Mode mode;              // see above
    PyObject* copy;         // the function, or None; borrowed from the tuple
    bool hands_out_copies;  // `private` of the tuple
    // Objects with this policy become opaque nodes.
    bool makes_opaque() const noexcept { return mode == Copy || mode == Linked; }
    static Policy of(PyObject* tuple);
};

// The policy tuple of a type, borrowed; None if there is none; null with an error set.
PyObject* policy_of_type(StateObject* state, PyTypeObject* type);
// The same for an object: that of its type, or of a set for a frozenset whose items may change.
PyObject* policy_of(StateObject* state, PyObject* object);

}  // namespace turnwise::state
