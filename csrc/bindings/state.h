// What the types of turnwise.state share: raw CPython types, because a pybind11 method costs several dictionary reads.
//
// A State owns one heap. StateDict, StateList and TokenArray are proxies of one slot in it; there is at most one living
// proxy per slot, so that `s["a"] is s["a"]`.
#pragma once

#include <Python.h>
#include <structmember.h>

#include <new>
#include <vector>

#include "state/heap.h"

namespace turnwise::state {

inline PyObject* object_of(Leaf* leaf) noexcept {
    return reinterpret_cast<PyObject*>(leaf);
}
inline Leaf* leaf_of(PyObject* object) noexcept {
    return reinterpret_cast<Leaf*>(object);
}

struct Proxy;

// The proxies of a State by slot: open addressing, borrowed references. One that nobody refers to any more rests here
// (its count is zero) until it is asked for again or the State forks: walks through a State make few new objects.
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
    static constexpr uint32_t kFirst = 8;
    // Multiplying by the golden ratio spreads runs of neighbours, the most frequent case, without a collision.
    size_t home(SlotIndex slot) const noexcept { return slot * 2654435769u >> shift_; }
    void grow();
    void give_back() noexcept;
    Proxy** cells_ = nullptr;
    uint32_t capacity_ = 0;
    uint16_t shift_ = 0;
    uint32_t used_ = 0;
};

struct StateObject;

// The base of turnwise.state.Store: what C++ needs of it.
struct StoreObject {
    PyObject_HEAD PyObject* policies;  // dict: type -> policy tuple, see Policy
    StateObject* states;               // the living ones, a doubly linked list
    char checks_shared;                // whether forks call `_check_shared(state)` first
};

struct StateObject {
    PyObject_HEAD StoreObject* store;
    PyObject* base;  // the last commit, or null
    PyObject* weakrefs;
    StateObject* next;
    StateObject** link;  // what points here
    bool frozen;
    bool pruned;
    uint32_t writes;   // counts calls of `write`: pointers into chunks are good until the next
    uint32_t resting;  // how many of its proxies rest
    bool locked;       // its objects are being copied: Python code runs that must not change it
    Heap heap;
    ProxyMap proxies;
    // Owned nodes that hold plain containers not yet taken over, and live opaque objects.
    std::vector<SlotIndex> pending;
};

// A view of the container in `slot`. A TokenArray that lies in no State yet owns its node and has no state.
struct Proxy {
    PyObject_HEAD StateObject* state;
    Node* node;
    uint64_t stamp;
    SlotIndex slot;
    Epoch birth;
};

inline Proxy* ProxyMap::find(SlotIndex slot) const noexcept {
    if (!used_) return nullptr;
    for (size_t at = home(slot); cells_[at]; at = (at + 1) & (capacity_ - 1)) {
        if (cells_[at]->slot == slot) return cells_[at];
    }
    return nullptr;
}

// What a Store says of a type: a tuple (mode, copy, private).
//   share:  the object is a leaf, shared by all versions; `copy(object)`, if it is not None, hears of it
//   copy:   `copy(object)` at forks; if `private`, each version that asks for the object gets its own copy, else it
//           gets the snapshot itself (which then must be read-only)
//   freeze: `copy(object)` is taken as a leaf, at once
//   linked: the object may lead to others of this State and to its facades, so each fork copies all of them at once,
//           through the Store's `_copy_linked`; `copy(object)` only where one is copied alone
struct Policy {
    enum Mode : long { Share = 0, Copy = 1, Freeze = 2, Linked = 3 };
    Mode mode;
    PyObject* copy;
    bool hands_out_copies;
    bool makes_opaque() const noexcept { return mode == Copy || mode == Linked; }
    static Policy of(PyObject* tuple);
};

struct Types {
    PyTypeObject *store, *state, *dict, *list, *tokens;
    PyTypeObject *keys, *values, *items, *iterator, *list_iterator;
    PyObject *error, *pruned, *frozen, *opaque, *checkpoint;
};
extern Types types;

// Objects whose destruction may run Python code are destroyed when the operation is over, not in its middle.
struct Operation {
    ~Operation() {
        if (waiting) destroy_waiting();
    }
    static void destroy_waiting();
    static inline bool waiting = false;
};

// While a State's objects are copied, Python code runs that must not change it.
struct Lock {
    explicit Lock(StateObject* state) : state(state) { state->locked = true; }
    ~Lock() { state->locked = false; }
    StateObject* state;
};

// ---- state_object.cpp
StateObject* new_state(StoreObject* store);
// ---- state_proxy.cpp
Proxy* new_proxy(PyTypeObject* type, StateObject* state, SlotIndex slot, Node* node);
PyObject* wrap_new(StateObject* state, SlotIndex slot);
PyObject* wake(Proxy* proxy);
void drop_resting(StateObject* state);
inline PyObject* wrap_slot(StateObject* state, SlotIndex slot) {
    Proxy* known = state->proxies.find(slot);
    if (!known) return wrap_new(state, slot);
    auto* object = reinterpret_cast<PyObject*>(known);
    if (Py_REFCNT(object) == 0) return wake(known);
    Py_INCREF(object);
    return object;
}
inline PyObject* wrap(StateObject* state, Value value) {
    if (value.is_slot()) return wrap_slot(state, value.slot());
    PyObject* object = object_of(value.leaf());
    Py_INCREF(object);
    return object;
}
// As `wrap`, but what `wrap` makes anew each time, tuples and a commit's copies of objects, is made once and stays one
// object: what was met stands in `shown`, a dict by the birth of the nodes, which is made at need where it is null.
PyObject* wrap_once(StateObject* state, Value value, PyObject*& shown);
Node* refresh(Proxy* proxy);
// The node that a proxy shows, or null with an error set.
inline Node* node_of(Proxy* proxy) {
    return proxy->stamp == proxy->state->heap.stamp() ? proxy->node : refresh(proxy);
}
template <class NodeType>
NodeType* read(Proxy* proxy) {
    return static_cast<NodeType*>(node_of(proxy));
}
bool refuse_writing(StateObject* state);
// The node for writing, or null with an error set.
template <class NodeType>
NodeType* write(Proxy* proxy) {
    StateObject* state = proxy->state;
    Node* node = node_of(proxy);
    if (!node) return nullptr;
    if ((state->frozen || state->locked) && refuse_writing(state)) return nullptr;
    ++state->writes;
    if (!state->heap.owns(node)) {
        node = state->heap.own<NodeType>(proxy->slot);
        proxy->node = node;
        proxy->stamp = state->heap.stamp();
    }
    return static_cast<NodeType*>(node);
}
inline bool is_proxy(PyObject* object) {
    return Py_IS_TYPE(object, types.dict) || Py_IS_TYPE(object, types.list) || Py_IS_TYPE(object, types.tokens);
}

// ---- state_adopt.cpp
// An object as it enters a State: a leaf, the slot of a proxy of the same State, or a plain container, which stays what
// it is until `settle` (then `later` is set). False with an error set, which names the place: `key` (null for a list)
// of the container `into`.
bool take_in_other(StateObject* state, PyObject* object, Value& value, bool& later, SlotIndex into, PyObject* key);
// Whether `key` may be one: keys are shared by all versions, so that they must not change. False with an error set.
bool check_rare_key(StateObject* state, PyObject* key);
inline bool check_key(StateObject* state, PyObject* key) {
    return PyUnicode_CheckExact(key) || PyLong_CheckExact(key) || check_rare_key(state, key);
}
inline bool is_atom(PyObject* object) noexcept {
    return PyUnicode_CheckExact(object) || PyLong_CheckExact(object) || object == Py_None ||
           PyFloat_CheckExact(object) || PyBool_Check(object) || PyBytes_CheckExact(object);
}
inline bool take_in(StateObject* state, PyObject* object, Value& value, bool& later, SlotIndex into,
                    PyObject* key = nullptr) {
    if (!is_atom(object)) return take_in_other(state, object, value, later, into, key);
    later = false;
    Py_INCREF(object);
    value = Value::of(leaf_of(object));
    return true;
}
void note_pending(StateObject* state, SlotIndex slot, Node* node);
// Takes over every plain container that was written since the last fork. False with an error set, and nothing changed.
bool settle(StateObject* state);
// Takes a copy of `data` in as the root of an empty state.
bool adopt_root(StateObject* state, PyObject* data);
// What the objects of a list are in `state` from now on: it takes their contents over. The values hold references.
bool take_over(StateObject* state, PyObject* objects, std::vector<Value>& values);
// Frees the containers that neither the root nor a living proxy leads to.
size_t collect(StateObject* state);
bool fork_states(StateObject* state, StateObject** children, size_t count);
PyObject* open_opaque(StateObject* state, SlotIndex slot);
PyObject* policy_of(StateObject* state, PyObject* object);  // borrowed; None where there is none; null on error

// ---- state_dict.cpp, state_list.cpp
// Where the item of a key or index lies, for writing, until the next write; null with an error set if there is none.
Value* place_in_dict(Proxy* dict, PyObject* key);
Value* place_in_list(Proxy* list, PyObject* index);

// ---- state_compare.cpp: tp_richcompare
PyObject* compare_lists(PyObject* self, PyObject* other, int op);
PyObject* compare_dicts(PyObject* self, PyObject* other, int op);

// ---- the types, each in its file
bool make_dict_types(PyObject* module);
bool make_list_types(PyObject* module);
bool make_tokens_type(PyObject* module);
bool make_state_types(PyObject* module);
bool add_version_methods();
bool add_archive_methods();

PyTypeObject* make_type(PyObject* module, PyType_Spec& spec, const char* name);
// Runs `body`; where memory runs out, sets MemoryError and gives `failed`.
template <class Result, class Body>
Result guarded(Result failed, Body&& body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return failed;
    }
}

int traverse_proxy(PyObject* self, visitproc visit, void* arg);
void dealloc_proxy(PyObject* self);

}  // namespace turnwise::state
