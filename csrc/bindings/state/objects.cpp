// The objects behind turnwise.state: States, reference counts of leaves, allocation of blocks, and the map of proxies.
#include "bindings/state/objects.h"

#include <chrono>
#include <thread>

namespace turnwise::state {

Types types;

// ---- leaves ---------------------------------------------------------------------------------------------------------
namespace {
std::vector<PyObject*> last_references;  // objects to destroy after the operation; guarded by the GIL

// True if destroying the object runs no Python code.
bool dies_quietly(PyObject* object) noexcept {
    return PyUnicode_CheckExact(object) || PyLong_CheckExact(object) || PyFloat_CheckExact(object) ||
           PyBytes_CheckExact(object);
}
}  // namespace

void* host_allocate(size_t bytes) noexcept {
    return PyObject_Malloc(bytes);
}
void* host_resize(void* memory, size_t bytes) noexcept {
    return PyObject_Realloc(memory, bytes);
}
void host_free(void* memory) noexcept {
    PyObject_Free(memory);
}

void retain(Leaf* leaf) noexcept {
    Py_INCREF(object_of(leaf));
}

void release(Leaf* leaf) noexcept {
    PyObject* object = object_of(leaf);
    if (Py_REFCNT(object) > 1 || dies_quietly(object)) {
        Py_DECREF(object);
    } else {
        last_references.push_back(object);
        Operation::waiting = true;
    }
}

void Operation::destroy_waiting() {
    while (!last_references.empty()) {
        PyObject* object = last_references.back();
        last_references.pop_back();
        waiting = !last_references.empty();
        Py_DECREF(object);
    }
}

// ---- the map of proxies ---------------------------------------------------------------------------------------------
namespace {
// Arrays of the smallest size, kept for the next State that gets a proxy.
constexpr size_t kSpareCells = 16;
Proxy** spare_cells[kSpareCells];
size_t spare_cells_count = 0;
}  // namespace

void ProxyMap::give_back() noexcept {
    if (capacity_ == kFirst && spare_cells_count < kSpareCells) {
        spare_cells[spare_cells_count++] = cells_;
    } else {
        delete[] cells_;
    }
    cells_ = nullptr;
    capacity_ = used_ = 0;
}

void ProxyMap::grow() {
    ProxyMap old;
    std::swap(old.cells_, cells_);
    std::swap(old.capacity_, capacity_);
    used_ = 0;
    const uint32_t wanted = old.capacity_ ? old.capacity_ * 2 : kFirst;
    cells_ = wanted == kFirst && spare_cells_count ? spare_cells[--spare_cells_count] : new Proxy*[wanted];
    capacity_ = wanted;
    shift_ = 32;
    for (uint32_t c = capacity_; c > 1; c /= 2) --shift_;
    std::fill_n(cells_, capacity_, nullptr);
    old.for_each([&](Proxy* proxy) { insert(proxy); });
}

void ProxyMap::insert(Proxy* proxy) {
    if (used_ * 2 >= capacity_) grow();
    size_t at = home(proxy->slot);
    while (cells_[at]) at = (at + 1) & (capacity_ - 1);
    cells_[at] = proxy;
    ++used_;
}

void ProxyMap::erase(Proxy* proxy) noexcept {
    if (used_ == 1) {
        give_back();
        return;
    }
    const size_t mask = capacity_ - 1;
    size_t at = home(proxy->slot);
    while (cells_[at] != proxy) at = (at + 1) & mask;
    // Close the gap: move each later proxy of the same run into it, unless that would put it before its home.
    for (size_t next = (at + 1) & mask; cells_[next]; next = (next + 1) & mask) {
        if (((next - home(cells_[next]->slot)) & mask) >= ((next - at) & mask)) {
            cells_[at] = cells_[next];
            at = next;
        }
    }
    cells_[at] = nullptr;
    --used_;
}

// ---- States ---------------------------------------------------------------------------------------------------------
StateObject* new_state(StoreObject* store) {
    auto* self = reinterpret_cast<StateObject*>(types.state->tp_alloc(types.state, 0));
    if (!self) return nullptr;
    new (&self->heap) Heap();
    new (&self->proxies) ProxyMap();
    new (&self->pending) std::vector<SlotIndex>();
    Py_INCREF(reinterpret_cast<PyObject*>(store));
    self->store = store;
    self->next = store->states;
    self->link = &store->states;
    if (self->next) self->next->link = &self->next;
    store->states = self;
    return self;
}

void forget_edges(StateObject* state) noexcept {
    StoreObject* store = state->store;
    if (!store || !store->edges) return;
    if (store->compared == state) store->compared = nullptr;
    if (store->edges_of != state) return;
    store->edges_of = std::exchange(store->compared, nullptr);
    try {
        if (store->edges_of) return store->edges->move_to(store->edges_of->heap);
    } catch (const std::bad_alloc&) {
        store->edges_of = nullptr;
    }
    delete std::exchange(store->edges, nullptr);
}

bool check_alive(StateObject* state) {
    if (state->pruned) PyErr_SetString(types.pruned, "this State was pruned: its contents are gone");
    return !state->pruned;
}

bool wait_for_others(StateObject* state) {
    constexpr auto kPause = std::chrono::microseconds(50);
    constexpr auto kPatience = std::chrono::seconds(60);
    if (!state->locked || state->locked == PyThread_get_thread_ident()) return true;
    const auto begun = std::chrono::steady_clock::now();
    while (state->locked) {
        // The other thread needs the GIL to go on.
        Py_BEGIN_ALLOW_THREADS;
        std::this_thread::sleep_for(kPause);
        Py_END_ALLOW_THREADS;
        if (PyErr_CheckSignals() < 0) return false;
        if (state->locked && std::chrono::steady_clock::now() - begun > kPatience) {
            PyErr_SetString(types.error, "another thread has copied an object of this State for a minute");
            return false;
        }
    }
    return true;
}

bool reject_writing(StateObject* state) {
    const uint32_t writes = state->writes;
    if (!wait_for_others(state)) return true;
    if (state->writes != writes) {
        PyErr_SetString(types.error, "two threads write to this State: only one may");
    } else if (state->locked) {
        PyErr_SetString(types.error,
                        "this State is being forked: a copy function of one of its objects tried to use it");
    } else if (state->frozen) {
        PyErr_SetString(types.frozen, "this State is frozen (a commit): fork() it and write to the fork");
    } else {
        return false;
    }
    return true;
}

void note_pending(StateObject* state, SlotIndex slot, Node* node) {
    if (node->pending) return;
    state->pending.push_back(slot);
    node->pending = true;
}

// ---- types ----------------------------------------------------------------------------------------------------------
PyTypeObject* make_type(PyObject* module, PyType_Spec& spec, const char* name) {
    PyObject* type = PyType_FromSpec(&spec);
    if (type && PyModule_AddObjectRef(module, name, type) < 0) Py_CLEAR(type);
    return reinterpret_cast<PyTypeObject*>(type);
}

bool add_member(PyTypeObject* type, const char* name, PyObject* member) {
    const bool good = member && PyObject_SetAttrString(reinterpret_cast<PyObject*>(type), name, member) == 0;
    Py_XDECREF(member);
    return good;
}

bool add_methods(PyTypeObject* type, PyMethodDef* methods) {
    for (; methods->ml_name; ++methods) {
        if (!add_member(type, methods->ml_name, PyDescr_NewMethod(type, methods))) return false;
    }
    return true;
}

}  // namespace turnwise::state
