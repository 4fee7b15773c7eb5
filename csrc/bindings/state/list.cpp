#include "bindings/state/list.h"

#include "bindings/state/adopt.h"
#include "bindings/state/compare.h"

namespace turnwise::state {
namespace {

// Reads a small non-negative int without a call. False for any other object.
bool small_index(PyObject* key, Py_ssize_t& index) noexcept {
    if (!PyLong_CheckExact(key)) return false;
    auto* number = reinterpret_cast<PyLongObject*>(key);
#if PY_VERSION_HEX >= 0x030C0000
    if (!PyUnstable_Long_IsCompact(number)) return false;
    index = PyUnstable_Long_CompactValue(number);
    return index >= 0;
#else
    const Py_ssize_t digits = Py_SIZE(key);
    index = digits == 1 ? Py_ssize_t(number->ob_digit[0]) : 0;
    return digits == 0 || digits == 1;
#endif
}

Py_ssize_t list_length(PyObject* self) {
    const auto* node = read<ListNode>(proxy_of(self));
    return node ? Py_ssize_t(node->items.size()) : -1;
}

PyObject* list_item(PyObject* self, Py_ssize_t index) {
    const auto* node = read<ListNode>(proxy_of(self));
    if (!node) return nullptr;
    const Py_ssize_t size = Py_ssize_t(node->items.size());
    if (index < 0) index += size;
    if (index < 0 || index >= size) return PyErr_Format(PyExc_IndexError, "list index out of range");
    return wrap(proxy_of(self)->state, node->items[size_t(index)]);
}

bool bad_index(PyObject* key) {
    PyErr_Format(PyExc_TypeError, "list indices must be integers or slices, not %.200s", Py_TYPE(key)->tp_name);
    return false;
}

// A slice of a list.
struct Range {
    Py_ssize_t start, stop, step, count;  // indices; count: number of items
};
bool range_of(PyObject* slice, Py_ssize_t size, Range& range) {
    if (PySlice_Unpack(slice, &range.start, &range.stop, &range.step) < 0) return false;
    range.count = PySlice_AdjustIndices(size, &range.start, &range.stop, range.step);
    return true;
}

PyObject* list_slice(PyObject* self, PyObject* slice) {
    const Py_ssize_t size = list_length(self);
    Range range;
    if (size < 0 || !range_of(slice, size, range)) return nullptr;
    PyObject* result = PyList_New(range.count);
    for (Py_ssize_t i = 0; result && i < range.count; ++i) {
        PyObject* item = list_item(self, range.start + i * range.step);
        if (item)
            PyList_SET_ITEM(result, i, item);
        else
            Py_CLEAR(result);
    }
    return result;
}

PyObject* list_sequence_item(PyObject* self, Py_ssize_t index) {
    return list_item(self, index < 0 ? PY_SSIZE_T_MAX : index);
}

PyObject* list_subscript(PyObject* self, PyObject* key) {
    Py_ssize_t small;
    if (small_index(key, small)) return list_item(self, small);
    if (PyIndex_Check(key)) {
        const Py_ssize_t index = PyNumber_AsSsize_t(key, PyExc_IndexError);
        return index == -1 && PyErr_Occurred() ? nullptr : list_item(self, index);
    }
    if (PySlice_Check(key)) return list_slice(self, key);
    bad_index(key);
    return nullptr;
}

// A list or tuple of an iterable's objects. If they cannot be assigned to `slice` (unless it is null), the error comes
// from a real list, because Python versions word it differently.
PyObject* objects_of(PyObject* iterable, PyObject* slice) {
    if (PyList_CheckExact(iterable) || PyTuple_CheckExact(iterable)) return Py_NewRef(iterable);
    PyObject* iterator = PyObject_GetIter(iterable);
    if (iterator) {
        PyObject* objects = PySequence_List(iterator);
        Py_DECREF(iterator);
        return objects;
    }
    if (!slice || !PyErr_ExceptionMatches(PyExc_TypeError)) return nullptr;
    PyErr_Clear();
    PyObject* list = PyList_New(0);
    if (list && PyObject_SetItem(list, slice, iterable) == 0) {
        PyErr_Format(PyExc_TypeError, "%R became an iterable while it was assigned", iterable);
    }
    Py_XDECREF(list);
    return nullptr;
}

// The objects of an iterable as values with their own references.
class Incoming {
  public:
    ~Incoming() {
        for (Value value : values_) value.drop();
    }
    // Takes all objects of an iterable. `slice`: what they are assigned to, or null.
    bool take(Proxy* self, PyObject* iterable, PyObject* slice) {
        PyObject* objects = objects_of(iterable, slice);
        if (!objects) return false;
        bool good = true;
        for (Py_ssize_t i = 0; good && i < PySequence_Fast_GET_SIZE(objects); ++i) {
            good = take_one(self, PySequence_Fast_GET_ITEM(objects, i));
        }
        Py_DECREF(objects);
        return good;
    }
    bool take_one(Proxy* self, PyObject* object) {
        Value value;
        bool later;
        if (!take_in(self->state, object, value, later, self->slot)) return false;
        values_.push_back(value);
        later_ = later_ || later;
        return true;
    }
    size_t size() const noexcept { return values_.size(); }
    // Replaces `removed` items of the list from `start` on by the values, which the list takes over.
    bool splice(Proxy* self, Py_ssize_t start, Py_ssize_t removed) {
        auto* node = write<ListNode>(self);
        if (!node) return false;
        Released out;
        node->items.splice(size_t(start), size_t(removed), values_.data(), values_.size(), node->epoch, out);
        values_.clear();
        for (Value value : out) value.drop();
        if (later_) note_pending(self->state, self->slot, node);
        return true;
    }
    // Exchanges the item at `index` with the value number `which`.
    bool put(Proxy* self, Py_ssize_t index, size_t which) {
        auto* node = write<ListNode>(self);
        if (!node) return false;
        std::swap(node->items.own(size_t(index), node->epoch), values_[which]);
        if (later_) note_pending(self->state, self->slot, node);
        return true;
    }

  private:
    std::vector<Value> values_;  // with references
    bool later_ = false;         // one of them must be settled
};

// The item at `index`, for writing; valid until the next write. Null with an error set.
Value* place_of(Proxy* self, Py_ssize_t index) {
    auto* node = write<ListNode>(self);
    if (!node) return nullptr;
    const Py_ssize_t size = Py_ssize_t(node->items.size());
    if (index < 0) index += size;
    if (index >= 0 && index < size) return &node->items.own(size_t(index), node->epoch);
    PyErr_SetString(PyExc_IndexError, "list assignment index out of range");
    return nullptr;
}

int list_set(Proxy* self, Py_ssize_t index, PyObject* object) {
    Operation operation;
    Value value;
    bool later;
    if (!take_in(self->state, object, value, later, self->slot)) return -1;
    Value* place = place_of(self, index);
    if (!place) {
        value.drop();
        return -1;
    }
    std::exchange(*place, value).drop();
    if (later) note_pending(self->state, self->slot, self->node);
    return 0;
}

int list_delete(Proxy* self, Py_ssize_t index) {
    Operation operation;
    auto* node = write<ListNode>(self);
    if (!node) return -1;
    const Py_ssize_t size = Py_ssize_t(node->items.size());
    if (index < 0) index += size;
    if (index < 0 || index >= size) {
        PyErr_SetString(PyExc_IndexError, "list assignment index out of range");
        return -1;
    }
    return Incoming().splice(self, index, 1) ? 0 : -1;
}

int list_set_slice(Proxy* self, PyObject* slice, PyObject* objects) {
    Operation operation;
    Incoming incoming;
    Range range;
    if (!range_of(slice, 0, range)) return -1;
    if (objects && !incoming.take(self, objects, slice)) return -1;
    // Taking the objects may have changed the list, so its size is read only now.
    const Py_ssize_t size = list_length(reinterpret_cast<PyObject*>(self));
    if (size < 0 || !range_of(slice, size, range)) return -1;
    if (range.step == 1) return incoming.splice(self, range.start, range.count) ? 0 : -1;
    if (!objects) {
        auto* node = write<ListNode>(self);
        if (!node) return -1;
        if (range.step < 0) {
            range.start += (range.count - 1) * range.step;
            range.step = -range.step;
        }
        Released gone;
        gone.reserve(size_t(range.count));
        // A few of many items go one by one.
        if ((size - range.start) / 64 > range.count) {
            for (Py_ssize_t i = 0; i < range.count; ++i) {
                node->items.splice(size_t(range.start + i * (range.step - 1)), 1, nullptr, 0, node->epoch, gone);
            }
            for (Value item : gone) item.drop();
            return 0;
        }
        // Otherwise move the items that stay forward, in one pass. The items left at the end were moved, so they hold
        // no references.
        Py_ssize_t to = range.start;
        for (Py_ssize_t from = range.start; range.count && from < size; ++from) {
            const Value item = node->items.own(size_t(from), node->epoch);
            const bool goes = (from - range.start) % range.step == 0 && Py_ssize_t(gone.size()) < range.count;
            if (goes)
                gone.push_back(item);
            else
                node->items.own(size_t(to++), node->epoch) = item;
        }
        for (Py_ssize_t i = 0; i < range.count; ++i) node->items.pop_back(node->epoch);
        for (Value item : gone) item.drop();
        return 0;
    }
    // An extended slice takes exactly as many objects as it has items.
    if (Py_ssize_t(incoming.size()) != range.count) {
        PyErr_Format(PyExc_ValueError, "attempt to assign sequence of size %zu to extended slice of size %zd",
                     incoming.size(), range.count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < range.count; ++i) {
        if (!incoming.put(self, range.start + i * range.step, size_t(i))) return -1;
    }
    return 0;
}

int list_set_subscript(PyObject* self, PyObject* key, PyObject* value) {
    Proxy* proxy = proxy_of(self);
    // The most common case: an atom into a chunk that this version owns.
    StateObject* state = proxy->state;
    Py_ssize_t index;
    if (value && small_index(key, index) && is_atom(value) && proxy->stamp == state->heap.stamp() && !state->frozen &&
        !state->locked) {
        auto* node = static_cast<ListNode*>(proxy->node);
        if (size_t(index) < node->items.size() && state->heap.owns(node)) {
            if (Value* place = node->items.owned(size_t(index), node->epoch)) {
                Operation operation;
                Py_INCREF(value);
                std::exchange(*place, Value::of(leaf_of(value))).drop();
                return 0;
            }
        }
    }
    return guarded(-1, [&]() -> int {
        if (PyIndex_Check(key)) {
            const Py_ssize_t index = PyNumber_AsSsize_t(key, PyExc_IndexError);
            if (index == -1 && PyErr_Occurred()) return -1;
            return value ? list_set(proxy_of(self), index, value) : list_delete(proxy_of(self), index);
        }
        if (PySlice_Check(key)) return list_set_slice(proxy_of(self), key, value);
        bad_index(key);
        return -1;
    });
}
// The sequence slots get indices that Python has already counted from the start. A negative one is out of range.
int list_set_item(PyObject* self, Py_ssize_t index, PyObject* value) {
    if (index < 0) index = PY_SSIZE_T_MAX;
    return guarded(-1,
                   [&] { return value ? list_set(proxy_of(self), index, value) : list_delete(proxy_of(self), index); });
}

PyObject* list_append(PyObject* self, PyObject* object) {
    Operation operation;
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        Value value;
        bool later;
        if (!take_in(proxy_of(self)->state, object, value, later, proxy_of(self)->slot)) return nullptr;
        auto* node = write<ListNode>(proxy_of(self));
        if (!node) {
            value.drop();
            return nullptr;
        }
        node->items.push_back(value, node->epoch);
        if (later) note_pending(proxy_of(self)->state, proxy_of(self)->slot, node);
        Py_RETURN_NONE;
    });
}

PyObject* list_extend(PyObject* self, PyObject* objects) {
    Operation operation;
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        Incoming incoming;
        if (!incoming.take(proxy_of(self), objects, nullptr)) return nullptr;
        const Py_ssize_t size = list_length(self);
        if (size < 0 || !incoming.splice(proxy_of(self), size, 0)) return nullptr;
        Py_RETURN_NONE;
    });
}

PyObject* list_insert(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Operation operation;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "insert expected 2 arguments, got %zd", count);
    Py_ssize_t index = PyNumber_AsSsize_t(args[0], PyExc_OverflowError);
    if (index == -1 && PyErr_Occurred()) return nullptr;
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        Incoming incoming;
        if (!incoming.take_one(proxy_of(self), args[1])) return nullptr;
        const Py_ssize_t size = list_length(self);
        if (size < 0) return nullptr;
        if (index < 0) index = std::max<Py_ssize_t>(index + size, 0);
        if (!incoming.splice(proxy_of(self), std::min(index, size), 0)) return nullptr;
        Py_RETURN_NONE;
    });
}

PyObject* list_pop(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Operation operation;
    if (count > 1) return PyErr_Format(PyExc_TypeError, "pop expected at most 1 argument, got %zd", count);
    Py_ssize_t index = -1;
    if (count && (index = PyNumber_AsSsize_t(args[0], PyExc_IndexError)) == -1 && PyErr_Occurred()) return nullptr;
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        auto* node = write<ListNode>(proxy_of(self));
        if (!node) return nullptr;
        const Py_ssize_t size = Py_ssize_t(node->items.size());
        if (!size) return PyErr_Format(PyExc_IndexError, "pop from empty list");
        if (index < 0) index += size;
        if (index < 0 || index >= size) return PyErr_Format(PyExc_IndexError, "pop index out of range");
        PyObject* shown = wrap(proxy_of(self)->state, node->items[size_t(index)]);
        if (!shown) return nullptr;
        if (!(node = write<ListNode>(proxy_of(self)))) {
            Py_DECREF(shown);
            return nullptr;
        }
        if (index == size - 1) {
            node->items.pop_back(node->epoch).drop();
        } else {
            Incoming().splice(proxy_of(self), index, 1);
        }
        return shown;
    });
}

PyObject* list_clear(PyObject* self, PyObject*) {
    Operation operation;
    auto* node = guarded<ListNode*>(nullptr, [&] { return write<ListNode>(proxy_of(self)); });
    if (!node) return nullptr;
    node->items.clear();
    Py_RETURN_NONE;
}

// ---- iterator -------------------------------------------------------------------------------------------------------
struct Iterator {
    PyObject_HEAD Proxy* proxy;  // the list, owned; null when exhausted
    Py_ssize_t index;            // the next index
    Py_ssize_t step;             // 1, or -1 for reversed()
    const Value *at, *end;       // the rest of the chunk at `index`; valid while nothing is written
    uint64_t stamp;              // the heap's stamp when `at` was set
    uint32_t writes;             // StateObject::writes when `at` was set
};

PyObject* make_iterator(PyObject* list, Py_ssize_t index, Py_ssize_t step) {
    auto* self = new_holder<Iterator>(types.list_iterator, proxy_of(list));
    if (!self) return nullptr;
    self->index = index;
    self->step = step;
    self->at = self->end = nullptr;
    PyObject_GC_Track(self);
    return reinterpret_cast<PyObject*>(self);
}
PyObject* list_iter(PyObject* self) {
    return node_of(proxy_of(self)) ? make_iterator(self, 0, 1) : nullptr;
}
PyObject* list_reversed(PyObject* self, PyObject*) {
    const Py_ssize_t size = list_length(self);
    return size < 0 ? nullptr : make_iterator(self, size - 1, -1);
}
PyObject* iterator_next(PyObject* object) {
    auto* self = reinterpret_cast<Iterator*>(object);
    if (!self->proxy) return nullptr;
    StateObject* state = self->proxy->state;
    if (self->at != self->end && self->stamp == state->heap.stamp() && self->writes == state->writes) {
        ++self->index;
        return wrap(state, *self->at++);
    }
    // Look up the item, and remember the rest of its chunk when going forward.
    const auto* node = read<ListNode>(self->proxy);
    if (!node) return nullptr;
    if (self->index < 0 || self->index >= Py_ssize_t(node->items.size())) {
        Py_CLEAR(self->proxy);
        return nullptr;
    }
    const auto run = node->items.run(size_t(self->index));
    if (self->step == 1) {
        self->at = run.items + 1;
        self->end = run.items + run.count;
        self->stamp = state->heap.stamp();
        self->writes = state->writes;
    }
    self->index += self->step;
    return wrap(state, *run.items);
}
PyObject* iterator_length_hint(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<Iterator*>(object);
    const auto* node = self->proxy ? read<ListNode>(self->proxy) : nullptr;
    if (!node) return PyErr_Occurred() ? nullptr : PyLong_FromLong(0);
    const Py_ssize_t left = self->step > 0 ? Py_ssize_t(node->items.size()) - self->index : self->index + 1;
    return PyLong_FromSsize_t(std::max<Py_ssize_t>(left, 0));
}

PyMethodDef list_methods[] = {{"append", list_append, METH_O, nullptr},
                              {"extend", list_extend, METH_O, nullptr},
                              {"insert", FASTCALL(list_insert), nullptr},
                              {"pop", FASTCALL(list_pop), nullptr},
                              {"clear", list_clear, METH_NOARGS, nullptr},
                              {"__reversed__", list_reversed, METH_NOARGS, nullptr},
                              {nullptr, nullptr, 0, nullptr}};
PyGetSetDef list_getset[] = {{"__class__", claimed_class, nullptr, nullptr, &PyList_Type},
                             {"_state", state_of_proxy, nullptr, nullptr, nullptr},
                             {nullptr, nullptr, nullptr, nullptr, nullptr}};
// type(facade)(...) makes a plain list, because dataclasses.asdict rebuilds containers this way.
PyObject* plain_list(PyTypeObject*, PyObject* args, PyObject* names) {
    return PyObject_Call(reinterpret_cast<PyObject*>(&PyList_Type), args, names);
}

PyType_Slot list_slots[] = {{Py_tp_new, reinterpret_cast<void*>(plain_list)},
                            {Py_mp_subscript, reinterpret_cast<void*>(list_subscript)},
                            {Py_mp_ass_subscript, reinterpret_cast<void*>(list_set_subscript)},
                            {Py_sq_length, reinterpret_cast<void*>(list_length)},
                            {Py_mp_length, reinterpret_cast<void*>(list_length)},
                            {Py_sq_item, reinterpret_cast<void*>(list_sequence_item)},
                            {Py_sq_ass_item, reinterpret_cast<void*>(list_set_item)},
                            {Py_tp_iter, reinterpret_cast<void*>(list_iter)},
                            {Py_tp_hash, reinterpret_cast<void*>(PyObject_HashNotImplemented)},
                            {Py_tp_richcompare, reinterpret_cast<void*>(compare_lists)},
                            {Py_tp_traverse, reinterpret_cast<void*>(traverse_proxy)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_proxy)},
                            {Py_tp_methods, list_methods},
                            {Py_tp_getset, list_getset},
                            {0, nullptr}};
constexpr unsigned long kFlags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION;
PyType_Spec list_spec = {"turnwise.state.StateList", sizeof(Proxy), 0,
                         (kFlags & ~Py_TPFLAGS_DISALLOW_INSTANTIATION) | Py_TPFLAGS_SEQUENCE, list_slots};

PyMethodDef iterator_methods[] = {{"__length_hint__", iterator_length_hint, METH_NOARGS, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
PyType_Slot iterator_slots[] = {{Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
                                {Py_tp_iternext, reinterpret_cast<void*>(iterator_next)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse_holder)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_holder)},
                                {Py_tp_methods, iterator_methods},
                                {0, nullptr}};
PyType_Spec iterator_spec = {"turnwise.state.StateListIterator", sizeof(Iterator), 0, kFlags, iterator_slots};

}  // namespace

Value* place_in_list(Proxy* list, PyObject* index) {
    const Py_ssize_t place = PyNumber_AsSsize_t(index, PyExc_IndexError);
    return place == -1 && PyErr_Occurred() ? nullptr : place_of(list, place);
}

bool make_list_types(PyObject* module) {
    types.list = make_type(module, list_spec, "StateList");
    types.list_iterator = make_type(module, iterator_spec, "StateListIterator");
    return types.list && types.list_iterator;
}

}  // namespace turnwise::state
