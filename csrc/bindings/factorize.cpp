#include "ops/factorize.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "core/check.h"

namespace py = pybind11;

namespace turnwise {
namespace {

// Numbers strings; -1 if not all items are strings. It uses its own hash table, because a string stores its hash and
// equal strings often come again, as the same object or as another one.
int64_t number_strings(PyObject** items, Py_ssize_t count, int64_t* ids) {
    struct Slot {
        Py_hash_t hash;  // of the key
        PyObject* key;   // borrowed from the column; null: free
        int64_t id;      // number of the key
    };
    std::vector<Slot> slots(64, Slot{0, nullptr, 0});
    int64_t found = 0;
    const auto place_of = [&](Py_hash_t hash) { return size_t(hash ^ (hash >> 32)) & (slots.size() - 1); };
    const auto equal = [](PyObject* a, PyObject* b) {
        if (a == b) return true;
        if (PyUnicode_GET_LENGTH(a) != PyUnicode_GET_LENGTH(b) || PyUnicode_KIND(a) != PyUnicode_KIND(b)) return false;
        return std::memcmp(PyUnicode_DATA(a), PyUnicode_DATA(b),
                           size_t(PyUnicode_GET_LENGTH(a)) * size_t(PyUnicode_KIND(a))) == 0;
    };
    // Look every string up. A repeated object needs no look-up.
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (i + 8 < count) __builtin_prefetch(items[i + 8]);
        PyObject* key = items[i];
        if (i > 0 && key == items[i - 1]) {
            ids[i] = ids[i - 1];
            continue;
        }
        if (!PyUnicode_CheckExact(key)) return -1;
        const Py_hash_t hash = PyUnicode_Type.tp_hash(key);
        size_t place = place_of(hash);
        while (slots[place].key && !(slots[place].hash == hash && equal(slots[place].key, key))) {
            place = (place + 1) & (slots.size() - 1);
        }
        // A new string; the table grows so that it stays at most half full.
        if (!slots[place].key) {
            slots[place] = {hash, key, found++};
            ids[i] = found - 1;
            if (size_t(found) * 2 <= slots.size()) continue;
            std::vector<Slot> old(slots.size() * 4, Slot{0, nullptr, 0});
            old.swap(slots);
            for (const Slot& slot : old) {
                if (!slot.key) continue;
                for (place = place_of(slot.hash); slots[place].key;) place = (place + 1) & (slots.size() - 1);
                slots[place] = slot;
            }
        } else {
            ids[i] = slots[place].id;
        }
    }
    return found;
}

// Numbers integers; -1 if an item is not an int or does not fit int64. A bool does not count as an int here, because it
// equals another key.
int64_t number_integers(PyObject** items, Py_ssize_t count, int64_t* ids) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        int overflow = 0;
        if (!PyLong_CheckExact(items[i])) return -1;
        ids[i] = PyLong_AsLongLongAndOverflow(items[i], &overflow);
        if (overflow != 0) return -1;
    }
    return factorize(ids, count, ids);
}

// Numbers any objects by a dictionary, so by Python's equality.
int64_t number_mixed(PyObject** items, Py_ssize_t count, int64_t* ids) {
    const py::dict numbers;
    int64_t found = 0;
    py::object next = py::int_(0);
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* number = PyDict_SetDefault(numbers.ptr(), items[i], next.ptr());
        if (number == nullptr) throw py::error_already_set();
        if (number == next.ptr()) {
            ids[i] = found++;
            next = py::int_(found);
        } else {
            ids[i] = PyLong_AsLongLong(number);
        }
    }
    return found;
}

int64_t number_objects(py::handle column, int64_t* ids) {
    // Strings and integers run no Python code. Other keys may run code that changes a list, so they need a copy.
    py::object items = py::reinterpret_steal<py::object>(PySequence_Fast(column.ptr(), "keys: expected sequences"));
    if (!items) throw py::error_already_set();
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.ptr());
    if (count == 0) return 0;
    PyObject** first = PySequence_Fast_ITEMS(items.ptr());
    int64_t found = PyUnicode_CheckExact(first[0]) ? number_strings(first, count, ids)
                    : PyLong_CheckExact(first[0])  ? number_integers(first, count, ids)
                                                   : -1;
    if (found >= 0) return found;
    items = py::reinterpret_steal<py::object>(PySequence_Tuple(items.ptr()));
    if (!items) throw py::error_already_set();
    return number_mixed(PySequence_Fast_ITEMS(items.ptr()), count, ids);
}

// Numbers a column: an int64 array (any object with such a buffer) or a sequence of objects.
int64_t number_column(py::handle column, int64_t* ids) {
    if (!PyObject_CheckBuffer(column.ptr())) return number_objects(column, ids);
    const py::buffer_info keys = py::reinterpret_borrow<py::buffer>(column).request();
    require(keys.itemsize == sizeof(int64_t) && keys.ndim == 1, "keys: expected an int64 array");
    const int64_t* data = static_cast<const int64_t*>(keys.ptr);
    const int64_t count = keys.shape[0];
    py::gil_scoped_release unlocked;
    return factorize(data, count, ids);
}

int64_t factorize_columns(const py::list& columns, py::object ids_tensor) {
    const View ids = view_of(ids_tensor, "ids");
    require(ids.dtype == DType::i64 && is_contiguous_1d(ids), "ids: expected int64, contiguous");
    for (py::handle column : columns) {
        require(int64_t(py::len(column)) == ids.shape[0], "keys: expected equal lengths");
    }
    int64_t groups = number_column(columns[0], ids.as<int64_t>());
    std::vector<int64_t> next(columns.size() > 1 ? size_t(ids.shape[0]) : 0);
    for (size_t i = 1; i < columns.size(); ++i) {
        const int64_t values = number_column(columns[i], next.data());
        groups = factorize_pairs(ids.as<int64_t>(), next.data(), values, ids.shape[0], ids.as<int64_t>());
    }
    return groups;
}

}  // namespace

void bind_factorize(py::module_& module) {
    module.def("factorize", &factorize_columns, py::arg("columns"), py::arg("ids"),
               "Numbers the rows of some columns (int64 arrays or sequences) into ids; returns how many differ.");
}

}  // namespace turnwise
