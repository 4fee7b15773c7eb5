// The proxies of a State's containers, and how leaves are counted and blocks allocated.
#include "bindings/state.h"

namespace turnwise::state {

// ---- leaves ---------------------------------------------------------------------------------------------------------
namespace {
std::vector<PyObject*> last_references;  // guarded by Python's lock

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
// Arrays of the first size, for the next State that gets a proxy.
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
    // Close the gap: a later cell of the same run moves up if its home allows.
    for (size_t next = (at + 1) & mask; cells_[next]; next = (next + 1) & mask) {
        if (((next - home(cells_[next]->slot)) & mask) >= ((next - at) & mask)) {
            cells_[at] = cells_[next];
            at = next;
        }
    }
    cells_[at] = nullptr;
    --used_;
}

// ---- proxies --------------------------------------------------------------------------------------------------------
namespace {
constexpr size_t kSpares = 128;
struct Spares {
    PyObject* objects[kSpares];
    size_t count = 0;
};
Spares spare_dicts, spare_lists;

Spares* spares_of(PyTypeObject* type) noexcept {
    return type == types.dict ? &spare_dicts : type == types.list ? &spare_lists : nullptr;
}
}  // namespace

constexpr uint32_t kResting = 256;

static void free_proxy(Proxy* proxy, PyTypeObject* type) {
    Spares* spares = spares_of(type);
    if (spares && spares->count < kSpares) {
        spares->objects[spares->count++] = reinterpret_cast<PyObject*>(proxy);
    } else {
        PyObject_GC_Del(proxy);
    }
}

Proxy* new_proxy(PyTypeObject* type, StateObject* state, SlotIndex slot, Node* node) {
    Spares* spares = spares_of(type);
    Proxy* proxy = nullptr;
    if (spares && spares->count) {
        proxy = reinterpret_cast<Proxy*>(PyObject_Init(spares->objects[--spares->count], type));
    } else {
        proxy = PyObject_GC_New(Proxy, type);
        if (!proxy) return nullptr;
    }
    Py_XINCREF(reinterpret_cast<PyObject*>(state));
    proxy->state = state;
    proxy->node = node;
    proxy->slot = slot;
    proxy->birth = node->birth;
    proxy->stamp = state ? state->heap.stamp() : 0;
    if (state) state->proxies.insert(proxy);
    PyObject_GC_Track(proxy);
    return proxy;
}

int traverse_proxy(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(reinterpret_cast<Proxy*>(self)->state);
    return 0;
}

void dealloc_proxy(PyObject* self) {
    Operation operation;
    PyObject_GC_UnTrack(self);
    auto* proxy = reinterpret_cast<Proxy*>(self);
    PyTypeObject* type = Py_TYPE(self);
    if (StateObject* state = proxy->state) {
        const bool known = proxy->slot != kNoSlot;
        if (known && state->resting < kResting && type != types.tokens) {
            ++state->resting;
            Py_DECREF(reinterpret_cast<PyObject*>(state));  // which may end the State, and the proxy with it
            return;
        }
        if (known) state->proxies.erase(proxy);
        Py_DECREF(reinterpret_cast<PyObject*>(state));
    } else {
        Node::drop(proxy->node);
    }
    free_proxy(proxy, type);
    Py_DECREF(type);
}

PyObject* wake(Proxy* proxy) {
    StateObject* state = proxy->state;
    --state->resting;
    Py_INCREF(reinterpret_cast<PyObject*>(state));
    PyObject* object = reinterpret_cast<PyObject*>(proxy);
#ifdef Py_REF_DEBUG
    _Py_NewReference(object);
#else
    Py_SET_REFCNT(object, 1);  // it has kept its type
#endif
    PyObject_GC_Track(object);
    return object;
}

void drop_resting(StateObject* state) {
    if (!state->resting) return;
    Proxy* gone[kResting];
    size_t count = 0;
    state->proxies.for_each([&](Proxy* proxy) {
        if (Py_REFCNT(reinterpret_cast<PyObject*>(proxy)) == 0) gone[count++] = proxy;
    });
    state->resting = 0;
    for (size_t i = 0; i < count; ++i) {
        state->proxies.erase(gone[i]);
        PyTypeObject* type = Py_TYPE(reinterpret_cast<PyObject*>(gone[i]));
        free_proxy(gone[i], type);
        Py_DECREF(type);
    }
}

Node* refresh(Proxy* proxy) {
    StateObject* state = proxy->state;
    if (state->pruned) {
        PyErr_SetString(types.pruned, "this State was pruned: its contents are gone");
        return nullptr;
    }
    Node* node = proxy->slot == kNoSlot ? nullptr : state->heap.at(proxy->slot);
    if (!node || node->birth != proxy->birth) {
        PyErr_SetString(types.error,
                        "this container does not exist in its State any more: a rollback undid its creation");
        return nullptr;
    }
    proxy->node = node;
    proxy->stamp = state->heap.stamp();
    return node;
}

bool refuse_writing(StateObject* state) {
    if (state->locked) {
        PyErr_SetString(types.error,
                        "this State is being forked: a copy function of one of its objects tried to use it");
    } else if (state->frozen) {
        PyErr_SetString(types.frozen, "this State is frozen (a commit): fork() it and write to the fork");
    } else {
        return false;
    }
    return true;
}

namespace {
// A tuple is immutable: a fresh one, with proxies of the containers in it, is as good as the same one.
PyObject* build_tuple(StateObject* state, const TupleNode* tuple, PyObject*& shown) {
    const Values items = tuple->items;  // code that runs below may free the node
    PyObject* type = tuple->type ? object_of(tuple->type) : nullptr;
    if (Py_EnterRecursiveCall(" while a tuple is read")) return nullptr;
    PyObject* result = PyTuple_New(Py_ssize_t(items.size()));
    for (size_t i = 0; result && i < items.size(); ++i) {
        PyObject* item = wrap_once(state, items[i], shown);
        if (!item)
            Py_CLEAR(result);
        else
            PyTuple_SET_ITEM(result, Py_ssize_t(i), item);
    }
    Py_LeaveRecursiveCall();
    if (!result || !type) return result;
    PyObject* named = PyObject_CallMethod(reinterpret_cast<PyObject*>(&PyTuple_Type), "__new__", "OO", type, result);
    Py_DECREF(result);
    return named;
}
}  // namespace

PyObject* wrap_once(StateObject* state, Value value, PyObject*& shown) {
    const Node* node = value.is_slot() ? state->heap.at(value.slot()) : nullptr;
    if (!node || (node->kind != Kind::Tuple && node->kind != Kind::Opaque)) return wrap(state, value);
    if (!shown && !(shown = PyDict_New())) return nullptr;
    PyObject* birth = PyLong_FromUnsignedLongLong(node->birth);
    if (!birth) return nullptr;
    PyObject* object = PyDict_GetItemWithError(shown, birth);
    Py_XINCREF(object);
    if (!object && !PyErr_Occurred()) {
        const bool is_tuple = node->kind == Kind::Tuple;
        object = is_tuple ? build_tuple(state, static_cast<const TupleNode*>(node), shown) : wrap(state, value);
        if (object && PyDict_SetItem(shown, birth, object) < 0) Py_CLEAR(object);
    }
    Py_DECREF(birth);
    return object;
}

PyObject* wrap_new(StateObject* state, SlotIndex slot) {
    Node* node = state->heap.at(slot);
    switch (node->kind) {
        case Kind::Dict:
            return reinterpret_cast<PyObject*>(new_proxy(types.dict, state, slot, node));
        case Kind::List:
            return reinterpret_cast<PyObject*>(new_proxy(types.list, state, slot, node));
        case Kind::Tokens:
            return reinterpret_cast<PyObject*>(new_proxy(types.tokens, state, slot, node));
        case Kind::Opaque:
            return open_opaque(state, slot);
        case Kind::Tuple:
            break;
    }
    PyObject* shown = nullptr;
    PyObject* tuple = build_tuple(state, static_cast<const TupleNode*>(node), shown);
    Py_XDECREF(shown);
    return tuple;
}

}  // namespace turnwise::state
