// The objects behind turnwise.state. They are raw CPython types, because a call of a pybind11 method costs several
// dictionary reads.
//
// A State owns one heap. A StateDict, StateList or TokenArray is a proxy of one slot in it. There is at most one living
// proxy per slot, so that `s["a"] is s["a"]`.
#pragma once

#include <Python.h>
#include <structmember.h>

#include <new>
#include <vector>

#include "state/edges.h"

namespace turnwise::state {

inline PyObject* object_of(Leaf* leaf) noexcept {
    return reinterpret_cast<PyObject*>(leaf);
}
inline Leaf* leaf_of(PyObject* object) noexcept {
    return reinterpret_cast<Leaf*>(object);
}

struct Proxy;

// The proxies of a State by slot: a hash table with linear probing and borrowed references. A proxy without references
// rests here, with a reference count of 0, until it is needed again or the State forks. So walks through a State make
// few new objects.
class ProxyMap {
  public:
    ~ProxyMap() { give_back(); }
    inline Proxy* find(SlotIndex slot) const noexcept;
    void insert(Proxy* proxy);
    void erase(Proxy* proxy) noexcept;
    template <class Function>
    void for_each(Function&& f) const {
        for (size_t i = 0; i < size_t(capacity_); ++i) {
            if (cells_[i]) f(cells_[i]);
        }
    }

  private:
    static constexpr uint32_t kFirst = 8;  // cells of the smallest table
    // Multiplying by the golden ratio spreads adjacent slots, the most frequent case, without a collision.
    size_t home(SlotIndex slot) const noexcept { return slot * 2654435769u >> shift_; }
    void grow();
    void give_back() noexcept;
    Proxy** cells_ = nullptr;  // [capacity_]; null: a free cell
    uint32_t capacity_ = 0;    // 0 or a power of two, at least twice used_
    uint16_t shift_ = 0;       // 32 - log2(capacity_)
    uint32_t used_ = 0;        // proxies
};

struct StateObject;

// The base of turnwise.state.Store: the part that C++ uses.
struct StoreObject {
    PyObject_HEAD PyObject* policies;  // dict: type -> policy tuple, see Policy
    StateObject* states;               // doubly linked list of its States that exist, newest first
    char checks_shared;                // nonzero: forks call `_check_shared(state)` first
    Edges* edges;                      // of the last State that was compared with another; null before
    StateObject *edges_of, *compared;  // these two States, borrowed; null once they are gone
};

struct StateObject {
    PyObject_HEAD StoreObject* store;  // owned
    PyObject* base;                    // the last commit, or null
    PyObject* weakrefs;                // CPython's list of weak references
    StateObject* next;                 // the next State of the Store's list
    StateObject** link;                // the pointer to this State in that list
    bool frozen;                       // a commit: nothing may write to it
    bool pruned;                       // its version was freed; use raises PrunedError
    uint32_t writes;                   // calls of `write`; pointers into chunks are valid until the next call
    uint32_t resting;                  // number of its resting proxies
    unsigned long locked;              // the thread that is copying its objects and alone may use them; 0: none
    Heap heap;                         // the version's containers
    ProxyMap proxies;                  // its living and resting proxies, by slot
    // Owned nodes that hold plain containers not yet taken over, and live opaque objects.
    std::vector<SlotIndex> pending;
};

// A view of the container in `slot`. A TokenArray outside any State owns its node and has no state.
struct Proxy {
    PyObject_HEAD StateObject* state;  // null for a TokenArray outside any State
    Node* node;                        // the container, valid while `stamp` equals the heap's
    uint64_t stamp;                    // the heap's stamp when `node` was looked up
    SlotIndex slot;                    // the container's slot in the heap
    Epoch birth;                       // the container's identity, see Node::birth
};

inline Proxy* ProxyMap::find(SlotIndex slot) const noexcept {
    if (!used_) return nullptr;
    for (size_t at = home(slot); cells_[at]; at = (at + 1) & (capacity_ - 1)) {
        if (cells_[at]->slot == slot) return cells_[at];
    }
    return nullptr;
}

// The Python types of this module; set when the module is imported.
struct Types {
    PyTypeObject *store, *state, *dict, *list, *tokens;              // StoreBase, State and the facades
    PyTypeObject *keys, *values, *items, *iterator, *list_iterator;  // views and iterators of StateDict; of StateList
    PyObject *error, *pruned, *frozen, *opaque, *checkpoint;         // StateError, PrunedError, ...
};
extern Types types;

// Guards an operation: objects whose destruction may run Python code are destroyed after it, not during it.
struct Operation {
    ~Operation() {
        if (waiting) destroy_waiting();
    }
    static void destroy_waiting();
    static inline bool waiting = false;  // there are objects to destroy
};

// Locks a State while Python code copies its objects. This code must not change it, and other threads wait.
struct Lock {
    explicit Lock(StateObject* state) : state(state), before(state->locked) {
        state->locked = PyThread_get_thread_ident();
    }
    ~Lock() { state->locked = before; }
    StateObject* state;    // the locked State
    unsigned long before;  // what its `locked` was
};

inline StateObject* state_of(PyObject* object) noexcept {
    return reinterpret_cast<StateObject*>(object);
}
inline Proxy* proxy_of(PyObject* object) noexcept {
    return reinterpret_cast<Proxy*>(object);
}

// An empty State in the list of its Store; null with an error set.
StateObject* new_state(StoreObject* store);
// False with PrunedError set for a State that was pruned.
bool check_alive(StateObject* state);
// Waits while another thread copies objects of `state`. False with an error set after a minute or a signal.
bool wait_for_others(StateObject* state);
// True with an error set if `state` is frozen, locked by this thread, or written to by another one during the wait.
bool reject_writing(StateObject* state);
// Lets the Store's edges know nothing of `state`, whose contents go.
void forget_edges(StateObject* state) noexcept;
// Notes that the next `settle` must look at the node in `slot`.
void note_pending(StateObject* state, SlotIndex slot, Node* node);

// Makes a type and adds it to the module; null with an error set.
PyTypeObject* make_type(PyObject* module, PyType_Spec& spec, const char* name);
// Adds a method or attribute to a finished type and takes over `member`. False with an error set.
bool add_member(PyTypeObject* type, const char* name, PyObject* member);
// Adds methods up to one without a name.
bool add_methods(PyTypeObject* type, PyMethodDef* methods);
// The function and flags of a method with METH_FASTCALL.
#define FASTCALL(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL
// Runs `body`. If memory runs out, sets MemoryError and returns `failed`.
template <class Result, class Body>
Result guarded(Result failed, Body&& body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return failed;
    }
}

// True for immutable objects of the basic types, which are always leaves.
inline bool is_atom(PyObject* object) noexcept {
    return PyUnicode_CheckExact(object) || PyLong_CheckExact(object) || object == Py_None ||
           PyFloat_CheckExact(object) || PyBool_Check(object) || PyBytes_CheckExact(object);
}

}  // namespace turnwise::state
