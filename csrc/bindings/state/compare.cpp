#include "bindings/state/compare.h"

#include "bindings/state/proxy.h"

namespace turnwise::state {
namespace {

// The length of a list or a StateList; -1 with an error set.
Py_ssize_t length_of(PyObject* list) {
    if (PyList_Check(list)) return PyList_GET_SIZE(list);
    const auto* node = read<ListNode>(reinterpret_cast<Proxy*>(list));
    return node ? Py_ssize_t(node->items.size()) : -1;
}

// The item at an index that `length_of` has just allowed.
PyObject* item_of(PyObject* list, Py_ssize_t index) {
    if (!PyList_Check(list)) {
        auto* proxy = reinterpret_cast<Proxy*>(list);
        const auto* node = read<ListNode>(proxy);
        if (!node) return nullptr;
        if (size_t(index) < node->items.size()) return wrap(proxy->state, node->items[size_t(index)]);
        return PyErr_Format(PyExc_IndexError, "list index out of range");
    }
    // Reading the other side's item may have run code that shortened this list.
    if (index >= PyList_GET_SIZE(list)) return PyErr_Format(PyExc_IndexError, "list index out of range");
    PyObject* item = PyList_GET_ITEM(list, index);
    Py_INCREF(item);
    return item;
}

PyObject* compare_items(PyObject* self, PyObject* other, int op) {
    for (Py_ssize_t i = 0;; ++i) {
        const Py_ssize_t ours = length_of(self), theirs = length_of(other);
        if (ours < 0 || theirs < 0) return nullptr;
        if ((op == Py_EQ || op == Py_NE) && ours != theirs) return PyBool_FromLong(op == Py_NE);
        if (i >= ours || i >= theirs) Py_RETURN_RICHCOMPARE(ours, theirs, op);
        PyObject* a = item_of(self, i);
        PyObject* b = a ? item_of(other, i) : nullptr;
        const int equal = b ? PyObject_RichCompareBool(a, b, Py_EQ) : -1;
        PyObject* result = nullptr;
        if (equal == 0) {
            result = op == Py_EQ || op == Py_NE ? PyBool_FromLong(op == Py_NE) : PyObject_RichCompare(a, b, op);
        }
        Py_XDECREF(a);
        Py_XDECREF(b);
        if (equal <= 0) return result;
    }
}

// A dict's value of `key`, as a new reference; null without an error if it has none.
PyObject* value_of(PyObject* dict, PyObject* key) {
    if (PyDict_Check(dict)) {
        PyObject* value = PyDict_GetItemWithError(dict, key);
        Py_XINCREF(value);
        return value;
    }
    PyObject* value = PyObject_GetItem(dict, key);
    if (!value && PyErr_ExceptionMatches(PyExc_KeyError)) PyErr_Clear();
    return value;
}

// 1 if equal, 0 if not, -1 with an error set.
int equal_dicts(PyObject* self, PyObject* other) {
    auto* proxy = reinterpret_cast<Proxy*>(self);
    const auto* node = read<DictNode>(proxy);
    const Py_ssize_t theirs = PyDict_Check(other) ? PyDict_GET_SIZE(other) : PyObject_Size(other);
    if (!node || theirs < 0) return -1;
    if (Py_ssize_t(node->size()) != theirs) return 0;
    for (size_t place = 0;; ++place) {
        if (!(node = read<DictNode>(proxy))) return -1;
        place = node->next(place);
        if (place >= node->entries.size()) return 1;
        PyObject* key = object_of(node->entries[place].key);
        Py_INCREF(key);
        PyObject* a = wrap(proxy->state, node->entries[place].value);
        PyObject* b = a ? value_of(other, key) : nullptr;
        const int equal = b ? PyObject_RichCompareBool(a, b, Py_EQ) : PyErr_Occurred() ? -1 : 0;
        Py_DECREF(key);
        Py_XDECREF(a);
        Py_XDECREF(b);
        if (equal <= 0) return equal;
    }
}

}  // namespace

PyObject* compare_lists(PyObject* self, PyObject* other, int op) {
    if (!PyList_Check(other) && !Py_IS_TYPE(other, types.list)) Py_RETURN_NOTIMPLEMENTED;
    if (self == other && (op == Py_EQ || op == Py_NE)) return PyBool_FromLong(op == Py_EQ);
    if (Py_EnterRecursiveCall(" in comparison")) return nullptr;
    PyObject* result = compare_items(self, other, op);
    Py_LeaveRecursiveCall();
    return result;
}

PyObject* compare_dicts(PyObject* self, PyObject* other, int op) {
    if ((op != Py_EQ && op != Py_NE) || (!PyDict_Check(other) && !Py_IS_TYPE(other, types.dict))) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    if (self == other) return PyBool_FromLong(op == Py_EQ);
    if (Py_EnterRecursiveCall(" in comparison")) return nullptr;
    const int equal = equal_dicts(self, other);
    Py_LeaveRecursiveCall();
    return equal < 0 ? nullptr : PyBool_FromLong((op == Py_EQ) == (equal == 1));
}

}  // namespace turnwise::state
