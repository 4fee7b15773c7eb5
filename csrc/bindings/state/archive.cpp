#include "bindings/state/archive.h"

#include <unordered_map>
#include <unordered_set>

#include "bindings/state/adopt.h"
#include "bindings/state/paths.h"
#include "bindings/state/policy.h"
#include "state/archive.h"

namespace turnwise::state {
namespace {

// Thrown when a Python error is set.
struct PythonError {};

PyObject* checked(PyObject* object) {
    if (!object) throw PythonError();
    return object;
}

// An owned reference.
struct Reference {
    explicit Reference(PyObject* object = nullptr) : object(object) {}
    Reference(const Reference&) = delete;
    Reference& operator=(const Reference&) = delete;
    ~Reference() { Py_XDECREF(object); }
    PyObject* release() { return std::exchange(object, nullptr); }
    PyObject* object;  // may be null
};

bool is_container(PyObject* object) noexcept {
    return PyList_CheckExact(object) || PyDict_CheckExact(object) || Py_IS_TYPE(object, types.state) ||
           is_proxy(object);
}

// Collects the leaves of an archive in a list.
class LeafList final : public LeafWriter {
  public:
    LeafList() : list(checked(PyList_New(0))), strings_(checked(PyDict_New())), bytes_(checked(PyDict_New())) {}

    uint64_t number_of(Leaf* leaf) override {
        const auto [known, fresh] = numbers_.emplace(leaf, count_);
        if (!fresh) return known->second;
        PyObject* object = object_of(leaf);
        if (is_container(object)) {
            PyErr_SetString(types.error, "a State changed while it was saved");
            throw PythonError();
        }
        // Equal strings share a number, because nothing depends on their identity. The same holds for bytes.
        PyObject* same = PyUnicode_CheckExact(object) ? strings_.object
                         : PyBytes_CheckExact(object) ? bytes_.object
                                                      : nullptr;
        if (same) {
            const Reference number(checked(PyLong_FromUnsignedLongLong(count_)));
            PyObject* first = checked(PyDict_SetDefault(same, object, number.object));
            if (first != number.object) return known->second = PyLong_AsUnsignedLongLong(first);
        }
        if (PyList_Append(list.object, object) < 0) throw PythonError();
        return count_++;
    }

    bool as_integer(Leaf* leaf, int64_t& integer) override {
        PyObject* object = object_of(leaf);
        if (!PyLong_CheckExact(object)) return false;
        int overflow;
        integer = PyLong_AsLongLongAndOverflow(object, &overflow);
        return !overflow && integer >> 59 == integer >> 63;
    }

    Reference list;  // the leaves, by number

  private:
    Reference strings_, bytes_;                    // dicts: string or bytes -> number
    std::unordered_map<Leaf*, uint64_t> numbers_;  // leaf -> number
    uint64_t count_ = 0;                           // leaves in the list
};

// Gives the leaves of an archive to its reader, and refuses those that are not allowed.
class LeafTuple final : public LeafReader {
  public:
    LeafTuple(StateObject* state, PyObject* leaves, size_t archive_bytes)
        : state_(state),
          leaves_(checked(PySequence_Tuple(leaves))),
          good_as_value_(size_t(PyTuple_GET_SIZE(leaves_.object))),
          hashable_(kHashable + kHashablePerByte * archive_bytes + kHashablePerLeaf * good_as_value_.size()) {}

    Leaf* leaf(uint64_t number, Use use) override {
        if (number >= good_as_value_.size()) return nullptr;
        PyObject* object = PyTuple_GET_ITEM(leaves_.object, Py_ssize_t(number));
        if (use == Use::TupleType) {
            const bool good =
                PyType_Check(object) && PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(object), &PyTuple_Type);
            return good ? leaf_of(object) : nullptr;
        }
        if (use == Use::Value && !good_as_value_[number]) {
            if (!shareable(object)) return nullptr;
            good_as_value_[number] = true;
        }
        return leaf_of(object);
    }

    Leaf* integer(int64_t value) override { return leaf_of(checked(PyLong_FromLongLong(value))); }

    int64_t hash(Leaf* key) override {
        if (PyTuple_Check(object_of(key))) charge(object_of(key), 0);
        const Py_hash_t hash = PyObject_Hash(object_of(key));
        if (hash == -1 && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            throw Damaged("a key that can't be one");
        }
        if (hash == -1 || !check_key(state_, object_of(key))) throw PythonError();
        return hash;
    }

    bool equal(Leaf* key, Leaf* other) override {
        if (PyTuple_Check(object_of(key))) charge(object_of(key), 0);  // it may be compared with many
        const int equal = PyObject_RichCompareBool(object_of(key), object_of(other), Py_EQ);
        if (equal < 0) throw PythonError();
        return equal > 0;
    }

    Leaf* policy(Leaf* object) override {
        PyObject* policy = policy_or_error(object_of(object));
        policies_.emplace_back(policy);
        if (Policy::of(policy).mode == Policy::Share) throw Damaged("an object to copy, of a type that forks share");
        return leaf_of(policy);
    }

    bool all_used(uint64_t count) const noexcept { return count == good_as_value_.size(); }

  private:
    // Items that hashing the keys may visit in all. Tuples don't remember their hash, so without a limit a few bytes
    // could make a key that takes for ever: a tuple that holds the one before twice, and so on.
    static constexpr size_t kHashable = 1'000'000, kHashablePerByte = 100, kHashablePerLeaf = 1000;
    static constexpr int kDeepest = 1000;  // tuples in a key; Python's hash recurses without a check

    void charge(PyObject* tuple, int depth) {
        const auto size = size_t(PyTuple_GET_SIZE(tuple));
        if (size >= hashable_ || depth > kDeepest) throw Damaged("keys that take too long to hash");
        hashable_ -= size + 1;
        for (size_t i = 0; i < size; ++i) {
            PyObject* item = PyTuple_GET_ITEM(tuple, Py_ssize_t(i));
            if (PyTuple_Check(item)) charge(item, depth + 1);
        }
    }

    // The policy of the object's type, as a new reference.
    PyObject* policy_or_error(PyObject* object) {
        PyObject* policy = is_container(object) ? Py_None : policy_of(state_, object);
        if (!policy) throw PythonError();
        if (policy == Py_None) {
            const Reference name(checked(PyType_GetName(Py_TYPE(object))));
            PyErr_Format(types.opaque,
                         "it holds an object of type %U, and the store has no policy for it: load it into a store "
                         "that knows the type, store.register(%U, 'share' | 'copy' | 'pickle')",
                         name.object, name.object);
            throw PythonError();
        }
        Py_INCREF(policy);
        return policy;
    }

    // True if versions may share the object: it is not a container, and its type's policy does not copy it.
    bool shareable(PyObject* object) {
        if (is_container(object)) return false;
        if (PyUnicode_CheckExact(object) || PyLong_CheckExact(object) || object == Py_None ||
            PyFloat_CheckExact(object) || PyBool_Check(object) || PyBytes_CheckExact(object)) {
            return true;
        }
        if (PyTuple_Check(object) && (PyTuple_CheckExact(object) || PyObject_HasAttrString(object, "_fields"))) {
            if (shareable_.count(object)) return true;
            if (Py_EnterRecursiveCall(" while a tuple is read")) throw PythonError();
            bool good = true;
            for (Py_ssize_t i = 0; good && i < PyTuple_GET_SIZE(object); ++i) {
                good = shareable(PyTuple_GET_ITEM(object, i));
            }
            Py_LeaveRecursiveCall();
            if (good) shareable_.insert(object);  // many tuples may hold the same one
            return good;
        }
        const Reference policy(policy_or_error(object));
        if (Policy::of(policy.object).makes_opaque()) return false;
        PyObject* listener = PyTuple_GET_ITEM(policy.object, 1);
        if (Policy::of(policy.object).mode == Policy::Share && listener != Py_None) {
            const Reference heard(checked(PyObject_CallOneArg(listener, object)));
        }
        return true;
    }

    struct Kept : Reference {
        using Reference::Reference;
        Kept(Kept&& other) noexcept : Reference(other.release()) {}
    };
    StateObject* state_;
    Reference leaves_;                         // tuple, by number
    std::vector<bool> good_as_value_;          // by number: the leaf was found shareable
    size_t hashable_;                          // items that hashing may still visit
    std::unordered_set<PyObject*> shareable_;  // shareable tuples; `leaves_` keeps them alive
    std::vector<Kept> policies_;               // keeps borrowed policies alive
};

// Runs `body` and turns its exceptions into Python errors.
template <class Body>
PyObject* converting(Body&& body) {
    try {
        return body();
    } catch (const PythonError&) {
    } catch (const Damaged& error) {
        PyErr_SetString(types.checkpoint, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::length_error&) {
        PyErr_NoMemory();
    }
    return nullptr;
}

// _archive(states): (structure, leaves, versions). `versions` has (frozen, commit) for each state, then for each commit
// that is not among them. `commit` is the index of the version that rollback() returns to, or -1.
PyObject* store_archive(PyObject* self, PyObject* list) {
    Operation operation;
    return converting([&]() -> PyObject* {
        // Settle the states, and append their commits.
        const Reference states(checked(PySequence_List(list)));
        const auto count = [&] { return PyList_GET_SIZE(states.object); };
        std::unordered_map<PyObject*, Py_ssize_t> places;
        std::vector<Py_ssize_t> commits;
        for (Py_ssize_t i = 0; i < count(); ++i) places.emplace(PyList_GET_ITEM(states.object, i), i);
        for (Py_ssize_t i = 0; i < count(); ++i) {  // the list grows by the commits
            PyObject* object = PyList_GET_ITEM(states.object, i);
            if (!Py_IS_TYPE(object, types.state)) {
                return PyErr_Format(PyExc_TypeError, "states[%zd]: expected a State, not %R", i, object);
            }
            StateObject* state = state_of(object);
            if (reinterpret_cast<PyObject*>(state->store) != self) {
                return PyErr_Format(PyExc_ValueError, "states[%zd]: it belongs to another Store", i);
            }
            if (state->pruned) return PyErr_Format(types.pruned, "states[%zd]: this State was pruned", i);
            if (!settle(state)) return nullptr;
            PyObject* commit = state->base && !state_of(state->base)->pruned ? state->base : nullptr;
            commits.push_back(-1);
            if (!commit) continue;
            const auto [place, fresh] = places.emplace(commit, count());
            if (fresh && PyList_Append(states.object, commit) < 0) return nullptr;
            commits.back() = place->second;
        }
        // Write all heaps into one archive.
        std::vector<const Heap*> heaps;
        const Reference versions(checked(PyList_New(0)));
        for (Py_ssize_t i = 0; i < count(); ++i) {
            const StateObject* state = state_of(PyList_GET_ITEM(states.object, i));
            heaps.push_back(&state->heap);
            const Reference version(checked(Py_BuildValue("(Nn)", PyBool_FromLong(state->frozen), commits[size_t(i)])));
            if (PyList_Append(versions.object, version.object) < 0) return nullptr;
        }
        LeafList leaves;
        const std::string structure = write_archive(heaps, leaves);
        PyObject* bytes = checked(PyBytes_FromStringAndSize(structure.data(), Py_ssize_t(structure.size())));
        return Py_BuildValue("(NOO)", bytes, leaves.list.object, versions.object);
    });
}

// _restore(structure, leaves, versions): a list of States of this Store, from what `_archive` returned.
PyObject* store_restore(PyObject* self, PyObject* args) {
    Operation operation;
    PyObject *structure, *leaves, *versions;
    if (!PyArg_ParseTuple(args, "OOO!", &structure, &leaves, &PyList_Type, &versions)) return nullptr;
    Py_buffer view;
    if (PyObject_GetBuffer(structure, &view, PyBUF_SIMPLE) < 0) return nullptr;
    PyObject* result = converting([&]() -> PyObject* {
        // Read the heaps, and make a State of each.
        auto* store = reinterpret_cast<StoreObject*>(self);
        const Reference first(checked(reinterpret_cast<PyObject*>(new_state(store))));
        LeafTuple table(state_of(first.object), leaves, size_t(view.len));
        const Restored read = read_archive(static_cast<const uint8_t*>(view.buf), size_t(view.len), table);
        if (!table.all_used(read.leaves)) throw Damaged("leaves that nothing refers to");
        const auto count = Py_ssize_t(read.heaps.size());
        if (count != PyList_GET_SIZE(versions)) throw Damaged("another number of versions");
        Reference states(checked(PyList_New(0)));
        for (Py_ssize_t i = 0; i < count; ++i) {
            const Reference state(checked(reinterpret_cast<PyObject*>(new_state(store))));
            state_of(state.object)->heap.restore(*read.heaps[size_t(i)]);
            if (PyList_Append(states.object, state.object) < 0) return nullptr;
        }
        // Check and set which States are frozen, then their commits.
        std::vector<Py_ssize_t> commits;
        for (Py_ssize_t i = 0; i < count; ++i) {
            PyObject* version = PyList_GET_ITEM(versions, i);
            int frozen;
            Py_ssize_t commit;
            if (!PyTuple_Check(version) || !PyArg_ParseTuple(version, "pn", &frozen, &commit) || commit < -1 ||
                commit >= count) {
                PyErr_Clear();
                throw Damaged("a commit that does not exist");
            }
            state_of(PyList_GET_ITEM(states.object, i))->frozen = frozen != 0;
            commits.push_back(commit);
        }
        // Only a State that is not frozen has a commit, and the commit is frozen.
        for (Py_ssize_t i = 0; i < count; ++i) {
            if (commits[size_t(i)] < 0) continue;
            PyObject* commit = PyList_GET_ITEM(states.object, commits[size_t(i)]);
            StateObject* state = state_of(PyList_GET_ITEM(states.object, i));
            if (state->frozen || !state_of(commit)->frozen) throw Damaged("a commit that is none");
            Py_INCREF(commit);
            state->base = commit;
        }
        return states.release();
    });
    PyBuffer_Release(&view);
    return result;
}

// _path_of(object): the keys and indices that lead from the root to the object, or None.
PyObject* path_of(PyObject* self, PyObject* object) {
    return converting([&]() -> PyObject* {
        const Heap& heap = state_of(self)->heap;
        const auto path = find_path(heap, [&](Value value, PyObject* key) {
            if (key == object) return true;
            if (value.is_leaf()) return object_of(value.leaf()) == object;
            const Node* node = heap.at(value.slot());
            return node && node->kind == Kind::Opaque &&
                   object_of(static_cast<const OpaqueNode*>(node)->object) == object;
        });
        if (!path) Py_RETURN_NONE;
        Reference keys(checked(PyTuple_New(Py_ssize_t(path->size()))));
        for (size_t i = 0; i < path->size(); ++i) {
            const PathStep& step = (*path)[i];
            PyTuple_SET_ITEM(keys.object, Py_ssize_t(i),
                             checked(step.key ? Py_NewRef(step.key) : PyLong_FromSize_t(step.index)));
        }
        return keys.release();
    });
}

PyMethodDef state_methods[] = {{"_path_of", path_of, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyMethodDef store_methods[] = {{"_archive", store_archive, METH_O, nullptr},
                               {"_restore", store_restore, METH_VARARGS, nullptr},
                               {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_archive_methods() {
    return add_methods(types.store, store_methods) && add_methods(types.state, state_methods);
}

}  // namespace turnwise::state
