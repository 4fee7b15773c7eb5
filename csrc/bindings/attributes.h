// Reads attributes of many objects that were made long ago. Such objects are spread over memory, and each read waits
// for memory. So the code prefetches values kNear steps ahead, and the objects that hold them kFar steps ahead.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

namespace turnwise {

constexpr Py_ssize_t kNear = 8, kFar = 16;  // objects
constexpr size_t kLine = 64;                // bytes of a cache line

// Prefetches `bytes` bytes.
inline void fetch(const void* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kLine) __builtin_prefetch(static_cast<const char*>(from) + at);
}

inline void fetch_object(PyObject* object) {
    fetch(object, size_t(Py_TYPE(object)->tp_basicsize));
}

// One attribute of many objects. If their type has a slot for it, reads the slot directly; otherwise reads it as Python
// does. The caller must hold references to the objects, and so to their types.
class Attribute {
  public:
    explicit Attribute(pybind11::handle name) : name_(pybind11::reinterpret_borrow<pybind11::str>(name)) {}
    explicit Attribute(const char* name) : name_(name) {}

    // The slot's value, borrowed; null if there is no slot, or if `read` has not found it yet.
    PyObject* peek(PyObject* object) const {
        return object && Py_TYPE(object) == type_ && offset_ != 0 ? *slot(object) : nullptr;
    }

    // Prefetches the value.
    void fetch_ahead(PyObject* object) const { __builtin_prefetch(peek(object), 1); }

    pybind11::object read(PyObject* object) {
        if (Py_TYPE(object) != type_) learn(Py_TYPE(object));
        if (offset_ != 0) {
            if (PyObject* value = *slot(object)) return pybind11::reinterpret_borrow<pybind11::object>(value);
        }
        PyObject* value = PyObject_GetAttr(object, name_.ptr());
        if (!value) throw pybind11::error_already_set();
        return pybind11::reinterpret_steal<pybind11::object>(value);
    }

  private:
    PyObject** slot(PyObject* object) const {
        return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
    }

    // Finds the slot of a type, if it has one and reads attributes in the default way.
    void learn(PyTypeObject* type) {
        type_ = type;
        offset_ = 0;
        if (type->tp_getattro != PyObject_GenericGetAttr) return;
        const pybind11::handle owner(reinterpret_cast<PyObject*>(type));
        const pybind11::object found = pybind11::getattr(owner, name_, pybind11::none());
        if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type) return;
        const auto* member = reinterpret_cast<PyMemberDescrObject*>(found.ptr());
        if (member->d_member->type != T_OBJECT_EX || !PyType_IsSubtype(type, member->d_common.d_type)) return;
        offset_ = member->d_member->offset;
    }

    pybind11::str name_;
    const PyTypeObject* type_ = nullptr;  // the type of the object that was read last
    Py_ssize_t offset_ = 0;               // of the slot in its objects, in bytes; 0: no slot
};

// Prefetches the part of a dict that a look-up reads first. For a small dict this is all of it.
inline void fetch_keys(PyObject* mapping) {
    if (mapping && PyDict_CheckExact(mapping)) fetch(reinterpret_cast<PyDictObject*>(mapping)->ma_keys, 2 * kLine);
}

// mapping.get(key, fallback)
inline pybind11::object item_of(pybind11::handle mapping, pybind11::handle key, pybind11::handle fallback) {
    if (!PyDict_CheckExact(mapping.ptr())) return mapping.attr("get")(key, fallback);
    PyObject* value = PyDict_GetItemWithError(mapping.ptr(), key.ptr());
    if (!value && PyErr_Occurred()) throw pybind11::error_already_set();
    return pybind11::reinterpret_borrow<pybind11::object>(value ? pybind11::handle(value) : fallback);
}

}  // namespace turnwise
