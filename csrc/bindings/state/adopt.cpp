#include "bindings/state/adopt.h"

#include <unordered_map>

#include "bindings/state/paths.h"
#include "bindings/state/policy.h"

namespace turnwise::state {

namespace {

PyObject* type_name(PyObject* object) {
    return PyType_GetName(Py_TYPE(object));
}

// Takes objects over into a heap. The heap does not change before `apply`, so an error leaves it as it was.
class Adoption {
  public:
    // The treatment of opaque objects.
    enum class Opaque {
        Copied,  // the state gets copies; the caller keeps the objects
        Live,    // the objects belong to the state from now on
        Checked  // only errors matter: no copies and no opaque nodes; functions of share policies are called
    };
    Adoption(StateObject* state, Opaque opaque) : state_(state), opaque_(opaque), cursor_(state->heap.cursor()) {}
    ~Adoption() {
        for (Made& made : made_) {
            Node::drop(made.node);
            Py_DECREF(made.object);
        }
        for (auto& [object, value] : memo_) value.drop();
        for (PyObject* object : kept_) Py_DECREF(object);
    }

    // Sets the place of the objects that are converted next, for messages: `key` (null for a list) of the container
    // `slot`.
    void lies_in(SlotIndex slot, PyObject* key, size_t index = kUnknown) {
        slot_ = slot;
        key_ = key;
        index_ = index;
    }
    // Records that `object` is in `slot` already.
    void knows(PyObject* object, SlotIndex slot) { memo_.emplace(object, Value::of(slot)); }
    static constexpr size_t kUnknown = ~size_t{0};  // an index that is not known

    // Converts `object` to a value, which holds its own reference. `key` (or `index`, if it is null) is its place in
    // the container `parent`, an index into made_ or -1 for none.
    bool convert(PyObject* object, Value& value, int parent, PyObject* key, size_t index) {
        if (is_atom(object)) return leaf(object, value);
        if (is_proxy(object) && reinterpret_cast<Proxy*>(object)->state) return alias(object, value);
        const auto known = memo_.find(object);
        if (known != memo_.end()) {
            value = known->second;
            value.take();
            return true;
        }
        // Containers. A tuple is one only if something in it can change.
        if (PyList_CheckExact(object)) return container<ListNode>(object, value, parent, key, index);
        if (PyDict_CheckExact(object)) return container<DictNode>(object, value, parent, key, index);
        if (Py_IS_TYPE(object, types.tokens)) return tokens(object, value, parent, key, index);
        if (PyTuple_Check(object) && (PyTuple_CheckExact(object) || PyObject_HasAttrString(object, "_fields"))) {
            const int pure = is_pure(object);
            if (pure < 0) return false;
            if (pure) return leaf(object, value);
            PyObject* type = PyTuple_CheckExact(object) ? nullptr : reinterpret_cast<PyObject*>(Py_TYPE(object));
            return add(object, new TupleNode(state_->heap.epoch(), leaf_of(type)), value, parent, key, index);
        }
        return by_policy(object, value, parent, key, index);
    }

    // Converts the contents of the containers that `convert` found, and of those found meanwhile.
    bool fill() {
        for (size_t at = 0; at < made_.size(); ++at) {
            PyObject* object = made_[at].object;
            Node* node = made_[at].node;
            if (node->kind == Kind::List) {
                Values& items = static_cast<ListNode*>(node)->items;
                for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) {
                    if (!put(items, PyList_GET_ITEM(object, i), at, size_t(i))) return false;
                }
            } else if (node->kind == Kind::Tuple) {
                Values& items = static_cast<TupleNode*>(node)->items;
                for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
                    if (!put(items, PyTuple_GET_ITEM(object, i), at, size_t(i))) return false;
                }
            } else if (node->kind == Kind::Dict) {
                // Code that runs here may change the dict: hold key and item, and check the size.
                Py_ssize_t position = 0;
                PyObject *key, *item;
                Py_hash_t hash;
                const Py_ssize_t size = PyDict_GET_SIZE(object);
                while (PyDict_Next(object, &position, &key, &item)) {
                    Value value;
                    Py_INCREF(key);
                    Py_INCREF(item);
                    hash = PyObject_Hash(key);
                    const bool good = hash != -1 && check_key(state_, key) && convert(item, value, int(at), key, 0);
                    Py_DECREF(item);
                    if (!good) {
                        Py_DECREF(key);
                        return false;
                    }
                    static_cast<DictNode*>(node)->insert(hash, leaf_of(key), value);
                    if (PyDict_GET_SIZE(object) != size) return changed();
                }
            }
        }
        return true;
    }

    // Adds the new containers to the heap, which takes over their nodes.
    void apply() {
        for (Made& made : made_) {
            const SlotIndex slot = state_->heap.add(made.node);
            assert(slot == made.slot);
            if (made.node->kind == Kind::Opaque && state_->heap.owns(made.node)) note_pending(state_, slot, made.node);
            made.node = nullptr;
        }
    }

  private:
    struct Made {
        PyObject* object;  // the Python container; a reference
        Node* node;        // its node; null once the heap has it
        SlotIndex slot;    // the slot that it will get
        int parent;        // index into made_ of the container that holds it; -1: none
        PyObject* key;     // its key there; null in a list or tuple
        size_t index;      // its index there, if key is null
        SlotIndex into;    // without a parent: the container of the heap that holds it, or kNoSlot
    };

    // The object itself as a leaf.
    static bool leaf(PyObject* object, Value& value) {
        Py_INCREF(object);
        value = Value::of(leaf_of(object));
        return true;
    }

    // The slot of a proxy, which must be of the same State.
    bool alias(PyObject* object, Value& value) {
        auto* proxy = reinterpret_cast<Proxy*>(object);
        if (proxy->state != state_) {
            PyErr_Format(
                types.opaque,
                "a %s of another State: put in a plain copy, turnwise.state.to_python(value), or fork the State "
                "that it belongs to",
                Py_TYPE(object) == types.dict   ? "dict"
                : Py_TYPE(object) == types.list ? "list"
                                                : "TokenArray");
            return false;
        }
        if (!node_of(proxy)) return false;
        value = Value::of(proxy->slot);
        return true;
    }

    template <class NodeType>
    bool container(PyObject* object, Value& value, int parent, PyObject* key, size_t index) {
        return add(object, new NodeType(state_->heap.epoch()), value, parent, key, index);
    }

    // A copy of a TokenArray outside any State; the two share their chunks.
    bool tokens(PyObject* object, Value& value, int parent, PyObject* key, size_t index) {
        auto* node = static_cast<TokensNode*>(reinterpret_cast<Proxy*>(object)->node);
        auto* copy = new TokensNode(state_->heap.epoch());
        copy->tokens = node->tokens;
        node->epoch = next_epoch();  // so that neither writes the shared chunks in place
        return add(object, copy, value, parent, key, index);
    }

    // 1 if nothing in the tuple can change, 0 if something can, -1 on error. Tuples in tuples can't form a cycle, but
    // many tuples may hold the same one, so results for tuples that hold tuples are stored.
    int is_pure(PyObject* tuple) {
        if (!pure_.empty()) {
            const auto known = pure_.find(tuple);
            if (known != pure_.end()) return known->second;
        }
        // Atoms, pure tuples and shared objects cannot change; anything else can.
        if (Py_EnterRecursiveCall(" while a tuple is taken into a State")) return -1;
        int pure = 1;
        bool nested = false;
        for (Py_ssize_t i = 0; pure == 1 && i < PyTuple_GET_SIZE(tuple); ++i) {
            PyObject* item = PyTuple_GET_ITEM(tuple, i);
            if (is_atom(item)) continue;
            if (PyTuple_CheckExact(item)) {
                nested = true;
                pure = is_pure(item);
            } else if (PyList_CheckExact(item) || PyDict_CheckExact(item) || is_proxy(item) || PyTuple_Check(item)) {
                pure = 0;
            } else {
                PyObject* policy = policy_of(state_, item);
                pure = !policy ? -1 : policy != Py_None && Policy::of(policy).mode == Policy::Share;
                if (pure == 1 && !notify(policy, item)) pure = -1;
            }
        }
        Py_LeaveRecursiveCall();
        if (nested && pure >= 0) {
            pure_.emplace(tuple, pure);
            Py_INCREF(tuple);
            kept_.push_back(tuple);
        }
        return pure;
    }

    // Calls a share policy's function, if it has one, with the object. False with an error set.
    static bool notify(PyObject* policy, PyObject* object) {
        PyObject* listener = PyTuple_GET_ITEM(policy, 1);
        if (listener == Py_None) return true;
        Py_INCREF(listener);
        PyObject* done = PyObject_CallOneArg(listener, object);
        Py_DECREF(listener);
        Py_XDECREF(done);
        return done != nullptr;
    }

    // An object of any other type, by the Store's policy for that type.
    bool by_policy(PyObject* object, Value& value, int parent, PyObject* key, size_t index) {
        PyObject* tuple = policy_of(state_, object);
        if (!tuple) return false;
        if (tuple == Py_None) return reject(object, parent, key, index);
        const Policy policy = Policy::of(tuple);
        if (policy.mode == Policy::Share && !notify(tuple, object)) return false;
        if (policy.mode == Policy::Share || opaque_ == Opaque::Checked) return leaf(object, value);
        if (policy.makes_opaque() && opaque_ == Opaque::Live) {
            auto* node = new OpaqueNode(state_->heap.epoch(), leaf_of(object), leaf_of(tuple));
            return add(object, node, value, parent, key, index);
        }
        // Freeze: a copy becomes a leaf. Copy and linked objects that stay the caller's: a copy becomes a snapshot.
        Py_INCREF(tuple);
        PyObject* copy = PyObject_CallOneArg(policy.copy, object);
        if (!copy) {
            Py_DECREF(tuple);
            return false;
        }
        bool done;
        if (policy.mode == Policy::Freeze) {
            value = Value::of(leaf_of(copy));
            value.take();
            memo_.emplace(object, value);
            Py_INCREF(object);
            kept_.push_back(object);
            done = leaf(copy, value);
        } else {
            // Epoch 0 belongs to no heap: the node is a snapshot, copied when a version asks for the object.
            done = add(object, new OpaqueNode(0, leaf_of(copy), leaf_of(tuple)), value, parent, key, index);
        }
        Py_DECREF(copy);
        Py_DECREF(tuple);
        return done;
    }

    // Plans a slot for a new container, and remembers it under its object.
    bool add(PyObject* object, Node* node, Value& value, int parent, PyObject* key, size_t index) {
        const SlotIndex slot = state_->heap.plan(cursor_);
        if (parent < 0)
            made_.push_back({object, node, slot, parent, key_, index_, slot_});
        else
            made_.push_back({object, node, slot, parent, key, index, kNoSlot});
        Py_INCREF(object);  // code of the objects may run before everything is taken over
        value = Value::of(slot);
        memo_.emplace(object, value);
        return true;
    }

    // Converts an item of a list or tuple and appends it to the node.
    bool put(Values& items, PyObject* object, size_t parent, size_t index) {
        Value value;
        Py_INCREF(object);
        const bool done = convert(object, value, int(parent), nullptr, index);
        if (done) items.push_back(value, state_->heap.epoch());
        Py_DECREF(object);
        return done;
    }

    static bool changed() {
        PyErr_SetString(PyExc_RuntimeError, "a dict changed while it was taken into a State");
        return false;
    }

    // Sets the error "data['players'][0]: ..." with the type and what to do about it. Returns false.
    bool reject(PyObject* object, int parent, PyObject* key, size_t index) {
        // Build the path from the object up: through new containers, then from the root of the heap.
        PyObject* path = PyUnicode_FromString("");
        SlotIndex into = slot_;
        if (parent < 0) {
            key = key_;
            index = index_;
        }
        while (parent >= 0) {
            path = longer(path, key, index);
            const Made& holder = made_[size_t(parent)];
            key = holder.key;
            index = holder.index;
            into = holder.into;
            parent = holder.parent;
        }
        if (into != kNoSlot) path = path_from_root(longer(path, key, index), into);
        PyObject* name = path ? type_name(object) : nullptr;
        if (name) {
            PyErr_Format(types.opaque,
                         "data%U: an object of type %U, which the store can't look into. Say what a fork does with it: "
                         "store.register(%U, 'share' | 'copy' | 'pickle'), or make %U a ForkableMixin",
                         path, name, name, name);
        }
        Py_XDECREF(name);
        Py_XDECREF(path);
        return false;
    }

    // "[key]" or "[index]" followed by `path`, which it takes over; null on error.
    static PyObject* longer(PyObject* path, PyObject* key, size_t index) {
        if (!path) return nullptr;
        PyObject* result = key                 ? PyUnicode_FromFormat("[%R]%U", key, path)
                           : index == kUnknown ? PyUnicode_FromFormat("[...]%U", path)
                                               : PyUnicode_FromFormat("[%zu]%U", index, path);
        Py_DECREF(path);
        return result;
    }

    // The path from the root to `slot`, followed by `path`, which it takes over; null on error.
    PyObject* path_from_root(PyObject* path, SlotIndex slot) const {
        const auto steps =
            find_path(state_->heap, [slot](Value value, PyObject*) { return value.is_slot() && value.slot() == slot; });
        if (!steps) return path;
        for (auto step = steps->rbegin(); path && step != steps->rend(); ++step) {
            path = longer(path, step->key, step->index);
        }
        return path;
    }

    StateObject* state_;
    Opaque opaque_;
    SlotIndex slot_ = kNoSlot;                   // see lies_in
    PyObject* key_ = nullptr;                    // see lies_in
    size_t index_ = 0;                           // see lies_in
    std::vector<PyObject*> kept_;                // references to keys of memo_ and pure_
    Heap::Cursor cursor_;                        // plans the slots of new containers
    std::vector<Made> made_;                     // new containers, in the order of their slots
    std::unordered_map<PyObject*, Value> memo_;  // converted objects
    std::unordered_map<PyObject*, int> pure_;    // results of is_pure
};

// A value of the heap that settling replaces.
struct Patch {
    Value* place;  // in an owned chunk
    Value value;   // the new one, with a reference
};

// Converts the object at `place` unless it is an atom, and notes a patch if its value changes. `key` is null in a list,
// where the index is not known.
bool convert_value(Adoption& adoption, Value* place, SlotIndex slot, Leaf* key, std::vector<Patch>& patches) {
    if (!place->is_leaf() || is_atom(object_of(place->leaf()))) return true;
    Value value;
    adoption.lies_in(slot, key ? object_of(key) : nullptr);
    if (!adoption.convert(object_of(place->leaf()), value, -1, nullptr, 0)) return false;
    if (value == *place)
        value.drop();
    else
        patches.push_back({place, value});
    return true;
}

}  // namespace

bool check_rare_key(StateObject* state, PyObject* key) {
    if (is_atom(key)) return true;
    if (PyObject_Hash(key) == -1) return false;  // keeps the error that a dict would raise
    if (PyTuple_Check(key) && (PyTuple_CheckExact(key) || PyObject_HasAttrString(key, "_fields"))) {
        if (Py_EnterRecursiveCall(" while a key is taken into a State")) return false;
        bool good = true;
        for (Py_ssize_t i = 0; good && i < PyTuple_GET_SIZE(key); ++i) {
            good = check_rare_key(state, PyTuple_GET_ITEM(key, i));
        }
        Py_LeaveRecursiveCall();
        return good;
    }
    PyObject* policy = policy_of_type(state, Py_TYPE(key));
    if (!policy) return false;
    if (policy != Py_None && Policy::of(policy).mode == Policy::Share) return true;
    if (PyObject* name = type_name(key)) {
        PyErr_Format(types.opaque,
                     "a key of type %U: all versions share their keys, so these must not change. If its objects never "
                     "do: store.register(%U, 'share')",
                     name, name);
        Py_DECREF(name);
    }
    return false;
}

bool take_in_other(StateObject* state, PyObject* object, Value& value, bool& later, SlotIndex into, PyObject* key) {
    later = false;
    if (!is_proxy(object) && !PyList_CheckExact(object) && !PyDict_CheckExact(object) && !PyTuple_Check(object)) {
        PyObject* tuple = policy_of(state, object);
        if (!tuple) return false;
        if (tuple != Py_None && Policy::of(tuple).mode == Policy::Freeze) {
            PyObject* function = Policy::of(tuple).copy;
            Py_INCREF(function);
            PyObject* copy = PyObject_CallOneArg(function, object);
            Py_DECREF(function);
            value = Value::of(leaf_of(copy));
            return copy != nullptr;
        }
    }
    // Check the object and everything in it; it is taken over when the State settles.
    Adoption check(state, Adoption::Opaque::Checked);
    check.lies_in(into, key);
    if (!check.convert(object, value, -1, nullptr, 0) || !check.fill()) return false;
    if (is_proxy(object) && reinterpret_cast<Proxy*>(object)->state) return true;
    if (value.is_leaf()) {
        // A leaf. If its policy makes it opaque, the State takes it over as a live object when it settles.
        PyObject* tuple = PyTuple_CheckExact(object) ? nullptr : policy_of(state, object);
        later = tuple && tuple != Py_None && Policy::of(tuple).makes_opaque();
        return true;
    }
    Py_INCREF(object);
    value = Value::of(leaf_of(object));
    later = true;
    return true;
}

bool settle(StateObject* state) {
    if (state->pending.empty()) return true;
    if (!wait_for_others(state) || (state->locked && reject_writing(state))) return false;
    Lock lock(state);
    Adoption adoption(state, Adoption::Opaque::Live);
    std::vector<Patch> patches;
    bool good = true;
    for (SlotIndex slot : state->pending) {
        // A live object that was also written to a second place must stay one object.
        Node* node = state->heap.at(slot);
        if (!node || !state->heap.owns(node) || node->kind != Kind::Opaque) continue;
        adoption.knows(object_of(static_cast<OpaqueNode*>(node)->object), slot);
    }
    // Convert what was written to pending dicts and lists, in the chunks that this version owns.
    for (size_t at = 0; good && at < state->pending.size(); ++at) {
        const SlotIndex slot = state->pending[at];
        Node* node = state->heap.at(slot);
        if (!node || !state->heap.owns(node) || !node->pending) continue;
        if (node->kind == Kind::Dict) {
            static_cast<DictNode*>(node)->entries.for_each_owned_chunk(node->epoch, [&](Entry* entries, size_t count) {
                for (size_t i = 0; good && i < count; ++i) {
                    good = convert_value(adoption, &entries[i].value, slot, entries[i].key, patches);
                }
            });
        } else if (node->kind == Kind::List) {
            static_cast<ListNode*>(node)->items.for_each_owned_chunk(node->epoch, [&](Value* values, size_t count) {
                for (size_t i = 0; good && i < count; ++i) {
                    good = convert_value(adoption, &values[i], slot, nullptr, patches);
                }
            });
        }
    }
    if (!good || !adoption.fill()) {
        for (Patch& patch : patches) patch.value.drop();
        return false;
    }
    // Nothing can fail now: apply the patches and keep only live objects pending.
    std::vector<SlotIndex> live;
    for (SlotIndex slot : state->pending) {
        Node* node = state->heap.at(slot);
        if (!node || !state->heap.owns(node) || !node->pending) continue;
        if (node->kind == Kind::Opaque)
            live.push_back(slot);
        else
            node->pending = false;
    }
    for (Patch& patch : patches) std::exchange(*patch.place, patch.value).drop();
    state->pending = std::move(live);
    adoption.apply();
    return true;
}

bool adopt_root(StateObject* state, PyObject* data) {
    Adoption adoption(state, Adoption::Opaque::Copied);
    Value root;
    if (!adoption.convert(data, root, -1, nullptr, 0)) return false;
    if (!adoption.fill()) {
        root.drop();
        return false;
    }
    adoption.apply();
    state->heap.exchange_root(root).drop();
    return true;
}

bool take_over(StateObject* state, PyObject* objects, std::vector<Value>& values) {
    Lock lock(state);
    Adoption adoption(state, Adoption::Opaque::Live);
    bool good = true;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(objects); ++i) {
        Value value;
        good = adoption.convert(PyList_GET_ITEM(objects, i), value, -1, nullptr, size_t(i));
        if (good) values.push_back(value);
    }
    if (!good || !adoption.fill()) {
        for (Value value : values) value.drop();
        return false;
    }
    adoption.apply();
    return true;
}

}  // namespace turnwise::state
