#include "bindings/state/tokens.h"

#include <limits>

#include "bindings/state/proxy.h"

namespace turnwise::state {
namespace {

// The node for reading; null with an error set.
const TokensNode* look(PyObject* self) {
    Proxy* proxy = proxy_of(self);
    return static_cast<const TokensNode*>(proxy->state ? node_of(proxy) : proxy->node);
}
// The node for writing, without its flat copy; null with an error set.
TokensNode* change(PyObject* self) {
    Proxy* proxy = proxy_of(self);
    auto* node = proxy->state ? write<TokensNode>(proxy) : static_cast<TokensNode*>(proxy->node);
    if (node) node->forget();
    return node;
}

bool token_of(PyObject* object, int32_t& token) {
    PyObject* number = PyNumber_Index(object);
    if (!number) {
        PyErr_Format(PyExc_TypeError, "token=%R: expected a whole number", object);
        return false;
    }
    int overflow;
    const long long wide = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (overflow || wide < std::numeric_limits<int32_t>::min() || wide > std::numeric_limits<int32_t>::max()) {
        PyErr_Format(PyExc_OverflowError, "token=%R: expected a number that fits 32 bits", object);
        return false;
    }
    token = static_cast<int32_t>(wide);
    return true;
}

// Reads a contiguous int32 or int64 buffer, such as a numpy array. Returns 1, 0 if it is not such a buffer, -1 on
// error.
int read_buffer(PyObject* objects, std::vector<int32_t>& tokens) {
    if (!PyObject_CheckBuffer(objects)) return 0;
    Py_buffer view;
    if (PyObject_GetBuffer(objects, &view, PyBUF_ND | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return 0;
    }
    const char format = view.format && view.format[1] == 0 ? view.format[0] : 0;
    int done = 0;
    if (view.ndim == 1 && view.itemsize == 4 && (format == 'i' || format == 'l')) {
        const auto* from = static_cast<const int32_t*>(view.buf);
        tokens.assign(from, from + view.len / 4);
        done = 1;
    } else if (view.ndim == 1 && view.itemsize == 8 && (format == 'q' || format == 'l')) {
        const auto* from = static_cast<const int64_t*>(view.buf);
        done = 1;
        for (Py_ssize_t i = 0; done > 0 && i < view.len / 8; ++i) {
            if (from[i] != static_cast<int32_t>(from[i])) {
                PyErr_Format(PyExc_OverflowError, "tokens[%zd]=%lld: expected a number that fits 32 bits", i,
                             static_cast<long long>(from[i]));
                done = -1;
            }
            tokens.push_back(static_cast<int32_t>(from[i]));
        }
    }
    PyBuffer_Release(&view);
    return done;
}

// Reads a TokenArray, a buffer or any iterable of whole numbers. False with an error set.
bool read_tokens(PyObject* objects, std::vector<int32_t>& tokens) {
    if (Py_IS_TYPE(objects, types.tokens)) {
        const TokensNode* node = look(objects);
        if (!node) return false;
        node->tokens.for_each_chunk(
            [&](const int32_t* chunk, size_t count) { tokens.insert(tokens.end(), chunk, chunk + count); });
        return true;
    }
    const int buffer = read_buffer(objects, tokens);
    if (buffer) return buffer > 0;
    PyObject* list = PySequence_Fast(objects, "tokens: expected an iterable of whole numbers");
    if (!list) return false;
    bool good = true;
    for (Py_ssize_t i = 0; good && i < PySequence_Fast_GET_SIZE(list); ++i) {
        int32_t token;
        good = token_of(PySequence_Fast_GET_ITEM(list, i), token);
        if (good) tokens.push_back(token);
    }
    Py_DECREF(list);
    return good;
}

// A new TokenArray outside any State.
PyObject* standalone(const std::vector<int32_t>& tokens) {
    auto* node = new TokensNode(next_epoch());
    for (int32_t token : tokens) node->tokens.push_back(token, node->epoch);
    Proxy* proxy = new_proxy(types.tokens, nullptr, kNoSlot, node);
    if (!proxy) Node::drop(node);
    return reinterpret_cast<PyObject*>(proxy);
}

PyObject* tokens_new(PyTypeObject*, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"tokens", nullptr};
    PyObject* objects = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O", const_cast<char**>(names), &objects)) return nullptr;
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        std::vector<int32_t> tokens;
        return !objects || read_tokens(objects, tokens) ? standalone(tokens) : nullptr;
    });
}

Py_ssize_t tokens_length(PyObject* self) {
    const TokensNode* node = look(self);
    return node ? Py_ssize_t(node->tokens.size()) : -1;
}

PyObject* tokens_item(PyObject* self, Py_ssize_t index) {
    const TokensNode* node = look(self);
    if (!node) return nullptr;
    if (index < 0 || size_t(index) >= node->tokens.size()) {
        return PyErr_Format(PyExc_IndexError, "TokenArray index out of range");
    }
    return PyLong_FromLong(node->tokens[size_t(index)]);
}

// Converts a key to an index from the start; one that is too small becomes too large. False with an error set.
bool index_of(PyObject* self, PyObject* key, Py_ssize_t& index) {
    index = PyNumber_AsSsize_t(key, PyExc_IndexError);
    const Py_ssize_t size = tokens_length(self);
    if ((index == -1 && PyErr_Occurred()) || size < 0) return false;
    if (index < 0) index += size;
    if (index < 0) index = PY_SSIZE_T_MAX;
    return true;
}

PyObject* tokens_subscript(PyObject* self, PyObject* key) {
    Py_ssize_t index;
    if (PyIndex_Check(key)) return index_of(self, key, index) ? tokens_item(self, index) : nullptr;
    if (!PySlice_Check(key)) {
        return PyErr_Format(PyExc_TypeError, "TokenArray indices must be integers or slices, not %.200s",
                            Py_TYPE(key)->tp_name);
    }
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        Py_ssize_t start, stop, step;
        const TokensNode* node = PySlice_Unpack(key, &start, &stop, &step) < 0 ? nullptr : look(self);
        if (!node) return nullptr;
        const Py_ssize_t count = PySlice_AdjustIndices(Py_ssize_t(node->tokens.size()), &start, &stop, step);
        std::vector<int32_t> tokens;
        tokens.reserve(size_t(count));
        for (Py_ssize_t i = 0; i < count; ++i) tokens.push_back(node->tokens[size_t(start + i * step)]);
        return standalone(tokens);
    });
}

int tokens_set_subscript(PyObject* self, PyObject* key, PyObject* value) {
    if (!value || !PyIndex_Check(key)) {
        PyErr_SetString(PyExc_TypeError,
                        "a TokenArray takes single tokens: tokens[index] = token; see also pop(), clear()");
        return -1;
    }
    Py_ssize_t index;
    int32_t token;
    if (!token_of(value, token) || !index_of(self, key, index)) return -1;
    return guarded(-1, [&] {
        TokensNode* node = change(self);
        if (!node) return -1;
        if (size_t(index) >= node->tokens.size()) {
            PyErr_SetString(PyExc_IndexError, "TokenArray index out of range");
            return -1;
        }
        node->tokens.own(size_t(index), node->epoch) = token;
        return 0;
    });
}

PyObject* tokens_append(PyObject* self, PyObject* object) {
    Operation operation;
    int32_t token;
    if (!token_of(object, token)) return nullptr;
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        TokensNode* node = change(self);
        if (!node) return nullptr;
        node->tokens.push_back(token, node->epoch);
        Py_RETURN_NONE;
    });
}

PyObject* tokens_extend(PyObject* self, PyObject* objects) {
    Operation operation;
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        std::vector<int32_t> tokens;
        TokensNode* node = read_tokens(objects, tokens) ? change(self) : nullptr;
        if (!node) return nullptr;
        for (int32_t token : tokens) node->tokens.push_back(token, node->epoch);
        Py_RETURN_NONE;
    });
}

PyObject* tokens_pop(PyObject* self, PyObject*) {
    Operation operation;
    return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
        TokensNode* node = change(self);
        if (!node) return nullptr;
        if (node->tokens.empty()) return PyErr_Format(PyExc_IndexError, "pop from empty TokenArray");
        return PyLong_FromLong(node->tokens.pop_back(node->epoch));
    });
}

PyObject* tokens_clear(PyObject* self, PyObject*) {
    Operation operation;
    TokensNode* node = guarded<TokensNode*>(nullptr, [&] { return change(self); });
    if (!node) return nullptr;
    node->tokens.clear();
    Py_RETURN_NONE;
}

// The ids as bytes, which numpy can view without a copy. They are kept until the next write.
PyObject* tokens_bytes(PyObject* self, PyObject*) {
    auto* node = const_cast<TokensNode*>(look(self));
    if (!node) return nullptr;
    if (!node->cached) {
        PyObject* bytes = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(node->tokens.size() * sizeof(int32_t)));
        if (!bytes) return nullptr;
        char* to = PyBytes_AS_STRING(bytes);
        node->tokens.for_each_chunk([&](const int32_t* chunk, size_t count) {
            std::memcpy(to, chunk, count * sizeof(int32_t));
            to += count * sizeof(int32_t);
        });
        node->cached = leaf_of(bytes);
    }
    return Py_NewRef(object_of(node->cached));
}

PyMethodDef tokens_methods[] = {
    {"append", tokens_append, METH_O, "append(token: int) -> None\n\nAdd one token."},
    {"extend", tokens_extend, METH_O,
     "extend(tokens: object) -> None\n\nAdd the tokens of an iterable, a TokenArray, or an int32 or int64 array."},
    {"pop", tokens_pop, METH_NOARGS, "pop() -> int\n\nRemove and return the last token."},
    {"clear", tokens_clear, METH_NOARGS, "clear() -> None\n\nRemove all tokens."},
    {"_bytes", tokens_bytes, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef tokens_getset[] = {{"_state", state_of_proxy, nullptr, nullptr, nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot tokens_slots[] = {{Py_tp_new, reinterpret_cast<void*>(tokens_new)},
                              {Py_mp_subscript, reinterpret_cast<void*>(tokens_subscript)},
                              {Py_mp_ass_subscript, reinterpret_cast<void*>(tokens_set_subscript)},
                              {Py_sq_length, reinterpret_cast<void*>(tokens_length)},
                              {Py_mp_length, reinterpret_cast<void*>(tokens_length)},
                              {Py_sq_item, reinterpret_cast<void*>(tokens_item)},
                              {Py_tp_hash, reinterpret_cast<void*>(PyObject_HashNotImplemented)},
                              {Py_tp_traverse, reinterpret_cast<void*>(traverse_proxy)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_proxy)},
                              {Py_tp_methods, tokens_methods},
                              {Py_tp_getset, tokens_getset},
                              {0, nullptr}};
PyType_Spec tokens_spec = {"turnwise.state.TokenArray", sizeof(Proxy), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_SEQUENCE, tokens_slots};

}  // namespace

bool make_tokens_type(PyObject* module) {
    types.tokens = make_type(module, tokens_spec, "TokenArray");
    return types.tokens != nullptr;
}

}  // namespace turnwise::state
