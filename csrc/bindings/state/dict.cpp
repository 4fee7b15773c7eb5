#include "bindings/state/dict.h"

#include "bindings/state/adopt.h"
#include "bindings/state/compare.h"

namespace turnwise::state {
namespace {

// The place of `key`, DictNode::kMissing, or kFailed with an error set. Sets its hash.
size_t find(Proxy* self, PyObject* key, Py_hash_t* hash) {
    *hash = PyUnicode_CheckExact(key) ? reinterpret_cast<PyASCIIObject*>(key)->hash : -1;
    if (*hash == -1 && (*hash = PyObject_Hash(key)) == -1) return DictNode::kFailed;
    for (;;) {
        const auto* node = read<DictNode>(self);
        if (!node) return DictNode::kFailed;
        const size_t place = node->find(*hash, leaf_of(key), [&](Leaf* leaf) {
            PyObject* held = object_of(leaf);
            if (PyUnicode_CheckExact(held) && PyUnicode_CheckExact(key)) {
                return PyUnicode_Compare(held, key) == 0 ? 1 : 0;
            }
            // The comparison may run any code. If that changes this dict, search again, as dict does.
            const uint32_t changes = node->changes;
            Py_INCREF(held);
            const int equal = PyObject_RichCompareBool(held, key, Py_EQ);
            Py_DECREF(held);
            if (equal < 0) return -1;
            if (read<DictNode>(self) != node) return PyErr_Occurred() ? -1 : -2;
            return node->changes != changes ? -2 : equal;
        });
        if (place != DictNode::kAgain) return place;
    }
}

// Sets KeyError; returns null.
PyObject* missing(PyObject* key) {
    // Not PyErr_SetObject: it would spread a key that is a tuple over the arguments.
    if (PyObject* error = PyObject_CallOneArg(PyExc_KeyError, key)) {
        PyErr_SetObject(PyExc_KeyError, error);
        Py_DECREF(error);
    }
    return nullptr;
}

PyObject* dict_get_item(PyObject* self, PyObject* key) {
    // The most common case: a small dict, and the same key object that it holds.
    const auto* node = read<DictNode>(proxy_of(self));
    if (!node) return nullptr;
    if (const Entry* entry = node->find_identical(leaf_of(key))) return wrap(proxy_of(self)->state, entry->value);
    Py_hash_t hash;
    const size_t place = find(proxy_of(self), key, &hash);
    if (place == DictNode::kMissing) return missing(key);
    if (place == DictNode::kFailed) return nullptr;
    Proxy* proxy = proxy_of(self);
    return wrap(proxy->state, static_cast<DictNode*>(proxy->node)->entries[place].value);
}

PyObject* dict_get(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    if (count < 1 || count > 2) return PyErr_Format(PyExc_TypeError, "get expected 1 or 2 arguments, got %zd", count);
    Py_hash_t hash;
    const size_t place = find(proxy_of(self), args[0], &hash);
    if (place == DictNode::kFailed) return nullptr;
    if (place == DictNode::kMissing) {
        return Py_NewRef(count == 2 ? args[1] : Py_None);
    }
    Proxy* proxy = proxy_of(self);
    return wrap(proxy->state, static_cast<DictNode*>(proxy->node)->entries[place].value);
}

int dict_contains(PyObject* self, PyObject* key) {
    Py_hash_t hash;
    const size_t place = find(proxy_of(self), key, &hash);
    return place == DictNode::kFailed ? -1 : place != DictNode::kMissing;
}

Py_ssize_t dict_length(PyObject* self) {
    const auto* node = read<DictNode>(proxy_of(self));
    return node ? Py_ssize_t(node->size()) : -1;
}

int dict_set(Proxy* self, PyObject* key, PyObject* object) {
    Operation operation;
    Value value;
    bool later;
    if (!check_key(self->state, key) || !take_in(self->state, object, value, later, self->slot, key)) return -1;
    Py_hash_t hash;
    const size_t place = find(self, key, &hash);
    DictNode* node = place == DictNode::kFailed ? nullptr : write<DictNode>(self);
    if (!node) {
        value.drop();
        return -1;
    }
    if (place == DictNode::kMissing) {
        Py_INCREF(key);
        node->insert(hash, leaf_of(key), value);
    } else {
        std::exchange(node->entries.own(place, node->epoch).value, value).drop();
    }
    if (later) note_pending(self->state, self->slot, node);
    return 0;
}

// Removes the entry at `place` and returns its value as a Python object.
PyObject* dict_take(Proxy* self, size_t place) {
    Operation operation;
    auto* node = write<DictNode>(self);
    PyObject* shown = node ? wrap(self->state, node->entries[place].value) : nullptr;
    // `wrap` may have copied an opaque value for this version, so get the node again. No key has moved.
    if (!shown || !(node = write<DictNode>(self))) {
        Py_XDECREF(shown);
        return nullptr;
    }
    ItemPolicy<Entry>::drop(node->erase(place));
    return shown;
}

int dict_delete(Proxy* self, PyObject* key) {
    Operation operation;
    Py_hash_t hash;
    const size_t place = find(self, key, &hash);
    if (place == DictNode::kFailed) return -1;
    auto* node = write<DictNode>(self);
    if (!node) return -1;
    if (place == DictNode::kMissing) {
        missing(key);
        return -1;
    }
    ItemPolicy<Entry>::drop(node->erase(place));
    return 0;
}

int dict_set_item(PyObject* self, PyObject* key, PyObject* value) {
    return guarded(-1, [&] { return value ? dict_set(proxy_of(self), key, value) : dict_delete(proxy_of(self), key); });
}

PyObject* dict_pop(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    if (count < 1 || count > 2) return PyErr_Format(PyExc_TypeError, "pop expected 1 or 2 arguments, got %zd", count);
    Py_hash_t hash;
    const size_t place = find(proxy_of(self), args[0], &hash);
    if (place == DictNode::kFailed) return nullptr;
    if (place == DictNode::kMissing) {
        return count == 1 ? missing(args[0]) : Py_NewRef(args[1]);
    }
    return guarded<PyObject*>(nullptr, [&] { return dict_take(proxy_of(self), place); });
}

PyObject* dict_popitem(PyObject* self, PyObject*) {
    const auto* node = read<DictNode>(proxy_of(self));
    if (!node) return nullptr;
    if (!node->size()) return PyErr_Format(PyExc_KeyError, "popitem(): dictionary is empty");
    const size_t place = node->entries.size() - 1;
    PyObject* key = object_of(node->entries[place].key);
    Py_INCREF(key);
    PyObject* value = guarded<PyObject*>(nullptr, [&] { return dict_take(proxy_of(self), place); });
    PyObject* item = value ? PyTuple_Pack(2, key, value) : nullptr;
    Py_DECREF(key);
    Py_XDECREF(value);
    return item;
}

PyObject* dict_clear(PyObject* self, PyObject*) {
    Operation operation;
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        auto* node = write<DictNode>(proxy_of(self));
        if (!node) return nullptr;
        node->clear();
        Py_RETURN_NONE;
    });
}

// ---- views and iterators --------------------------------------------------------------------------------------------
// The part of each entry that a view or iterator shows.
enum What { Keys, Values_, Items };

struct Iterator {
    PyObject_HEAD Proxy* proxy;  // the dict, owned; null when exhausted
    size_t place;                // the next place; backwards: the place after it
    size_t left;                 // entries that are left
    size_t size;                 // of the dict at the start
    What what;                   // what it yields
    bool backwards;              // for reversed()
};

PyObject* make_iterator(Proxy* proxy, What what, bool backwards) {
    const auto* node = read<DictNode>(proxy);
    if (!node) return nullptr;
    auto* self = new_holder<Iterator>(types.iterator, proxy);
    if (!self) return nullptr;
    self->size = self->left = node->size();
    self->place = backwards ? node->entries.size() : 0;
    self->what = what;
    self->backwards = backwards;
    PyObject_GC_Track(self);
    return reinterpret_cast<PyObject*>(self);
}

PyObject* iterator_next(PyObject* object) {
    auto* self = reinterpret_cast<Iterator*>(object);
    Proxy* proxy = self->proxy;
    if (!proxy) return nullptr;
    const auto* node = read<DictNode>(proxy);
    if (!node) return nullptr;
    if (node->size() != self->size) {
        self->size = ~size_t{0};  // the iterator stays broken, as for dict
        return PyErr_Format(PyExc_RuntimeError, "dictionary changed size during iteration");
    }
    // Find the next entry that was not erased.
    const Entry* entry = nullptr;
    if (self->backwards) {
        self->place = std::min(self->place, node->entries.size());
        while (self->place > 0 && !(entry = &node->entries[--self->place])->key) entry = nullptr;
    } else {
        const size_t place = node->next(self->place);
        if (place < node->entries.size()) entry = &node->entries[place];
        self->place = place + 1;
    }
    if (!entry) {
        self->proxy = nullptr;
        Py_DECREF(reinterpret_cast<PyObject*>(proxy));
        return nullptr;
    }
    if (self->left-- == 0) return PyErr_Format(PyExc_RuntimeError, "dictionary keys changed during iteration");
    if (self->what == Values_) return wrap(proxy->state, entry->value);
    // Keys, or pairs of key and value.
    PyObject* key = object_of(entry->key);
    Py_INCREF(key);
    if (self->what == Keys) return key;
    PyObject* value = wrap(proxy->state, entry->value);
    PyObject* item = value ? PyTuple_New(2) : nullptr;
    if (!item) {
        Py_DECREF(key);
        Py_XDECREF(value);
        return nullptr;
    }
    PyTuple_SET_ITEM(item, 0, key);
    PyTuple_SET_ITEM(item, 1, value);
    return item;
}

PyObject* iterator_length_hint(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<Iterator*>(object);
    return PyLong_FromSize_t(self->proxy ? self->left : 0);
}

PyObject* make_view(PyObject* proxy, PyTypeObject* type) {
    auto* self = new_holder<Holder>(type, proxy_of(proxy));
    if (self) PyObject_GC_Track(self);
    return reinterpret_cast<PyObject*>(self);
}
PyObject* dict_keys(PyObject* self, PyObject*) {
    return make_view(self, types.keys);
}
PyObject* dict_values(PyObject* self, PyObject*) {
    return make_view(self, types.values);
}
PyObject* dict_items(PyObject* self, PyObject*) {
    return make_view(self, types.items);
}
PyObject* dict_iter(PyObject* self) {
    return make_iterator(proxy_of(self), Keys, false);
}
PyObject* dict_reversed(PyObject* self, PyObject*) {
    return make_iterator(proxy_of(self), Keys, true);
}

What what_of(PyObject* view) noexcept {
    return Py_IS_TYPE(view, types.keys) ? Keys : Py_IS_TYPE(view, types.values) ? Values_ : Items;
}
PyObject* view_iter(PyObject* self) {
    return make_iterator(reinterpret_cast<Holder*>(self)->proxy, what_of(self), false);
}
PyObject* view_reversed(PyObject* self, PyObject*) {
    return make_iterator(reinterpret_cast<Holder*>(self)->proxy, what_of(self), true);
}
Py_ssize_t view_length(PyObject* self) {
    return dict_length(reinterpret_cast<PyObject*>(reinterpret_cast<Holder*>(self)->proxy));
}
PyObject* view_mapping(PyObject* self, void*) {
    return Py_NewRef(reinterpret_cast<PyObject*>(reinterpret_cast<Holder*>(self)->proxy));
}

PyMethodDef dict_methods[] = {{"get", FASTCALL(dict_get), nullptr},
                              {"pop", FASTCALL(dict_pop), nullptr},
                              {"popitem", dict_popitem, METH_NOARGS, nullptr},
                              {"clear", dict_clear, METH_NOARGS, nullptr},
                              {"keys", dict_keys, METH_NOARGS, nullptr},
                              {"values", dict_values, METH_NOARGS, nullptr},
                              {"items", dict_items, METH_NOARGS, nullptr},
                              {"__reversed__", dict_reversed, METH_NOARGS, nullptr},
                              {nullptr, nullptr, 0, nullptr}};
PyGetSetDef dict_getset[] = {{"__class__", claimed_class, nullptr, nullptr, &PyDict_Type},
                             {"_state", state_of_proxy, nullptr, nullptr, nullptr},
                             {nullptr, nullptr, nullptr, nullptr, nullptr}};
// type(facade)(...) makes a plain dict, because dataclasses.asdict rebuilds containers this way.
PyObject* plain_dict(PyTypeObject*, PyObject* args, PyObject* names) {
    return PyObject_Call(reinterpret_cast<PyObject*>(&PyDict_Type), args, names);
}

PyType_Slot dict_slots[] = {{Py_tp_new, reinterpret_cast<void*>(plain_dict)},
                            {Py_mp_subscript, reinterpret_cast<void*>(dict_get_item)},
                            {Py_mp_ass_subscript, reinterpret_cast<void*>(dict_set_item)},
                            {Py_mp_length, reinterpret_cast<void*>(dict_length)},
                            {Py_sq_contains, reinterpret_cast<void*>(dict_contains)},
                            {Py_tp_iter, reinterpret_cast<void*>(dict_iter)},
                            {Py_tp_hash, reinterpret_cast<void*>(PyObject_HashNotImplemented)},
                            {Py_tp_richcompare, reinterpret_cast<void*>(compare_dicts)},
                            {Py_tp_traverse, reinterpret_cast<void*>(traverse_proxy)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_proxy)},
                            {Py_tp_methods, dict_methods},
                            {Py_tp_getset, dict_getset},
                            {0, nullptr}};
constexpr unsigned long kFlags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION;
PyType_Spec dict_spec = {"turnwise.state.StateDict", sizeof(Proxy), 0,
                         (kFlags & ~Py_TPFLAGS_DISALLOW_INSTANTIATION) | Py_TPFLAGS_MAPPING, dict_slots};

PyMethodDef view_methods[] = {{"__reversed__", view_reversed, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyGetSetDef view_getset[] = {{"mapping", view_mapping, nullptr, nullptr, nullptr},
                             {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot view_slots[] = {{Py_tp_iter, reinterpret_cast<void*>(view_iter)},
                            {Py_sq_length, reinterpret_cast<void*>(view_length)},
                            {Py_tp_traverse, reinterpret_cast<void*>(traverse_holder)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_holder)},
                            {Py_tp_methods, view_methods},
                            {Py_tp_getset, view_getset},
                            {0, nullptr}};
PyType_Spec keys_spec = {"turnwise.state.StateDictKeys", sizeof(Holder), 0, kFlags, view_slots};
PyType_Spec values_spec = {"turnwise.state.StateDictValues", sizeof(Holder), 0, kFlags, view_slots};
PyType_Spec items_spec = {"turnwise.state.StateDictItems", sizeof(Holder), 0, kFlags, view_slots};

PyMethodDef iterator_methods[] = {{"__length_hint__", iterator_length_hint, METH_NOARGS, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
PyType_Slot iterator_slots[] = {{Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
                                {Py_tp_iternext, reinterpret_cast<void*>(iterator_next)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse_holder)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_holder)},
                                {Py_tp_methods, iterator_methods},
                                {0, nullptr}};
PyType_Spec iterator_spec = {"turnwise.state.StateDictIterator", sizeof(Iterator), 0, kFlags, iterator_slots};

}  // namespace

Value* place_in_dict(Proxy* dict, PyObject* key) {
    Py_hash_t hash;
    const size_t place = find(dict, key, &hash);
    if (place == DictNode::kMissing) missing(key);
    if (place == DictNode::kMissing || place == DictNode::kFailed) return nullptr;
    auto* node = write<DictNode>(dict);
    return node ? &node->entries.own(place, node->epoch).value : nullptr;
}

bool make_dict_types(PyObject* module) {
    types.dict = make_type(module, dict_spec, "StateDict");
    types.keys = make_type(module, keys_spec, "StateDictKeys");
    types.values = make_type(module, values_spec, "StateDictValues");
    types.items = make_type(module, items_spec, "StateDictItems");
    types.iterator = make_type(module, iterator_spec, "StateDictIterator");
    return types.dict && types.keys && types.values && types.items && types.iterator;
}

}  // namespace turnwise::state
