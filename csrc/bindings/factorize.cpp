#include "ops/factorize.h"

#include <cstdint>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "core/check.h"

namespace py = pybind11;

namespace turnwise {
namespace {

// Numbers the items of a sequence by Python's equality. Comparing keys may run code that changes a list, so it reads a
// copy.
int64_t number_objects(py::handle column, int64_t* ids) {
    const py::object items = py::reinterpret_steal<py::object>(PySequence_Tuple(column.ptr()));
    if (!items) throw py::error_already_set();
    const py::dict numbers;
    int64_t count = 0;
    py::object next = py::int_(0);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.ptr()); ++i) {
        PyObject* number = PyDict_SetDefault(numbers.ptr(), PyTuple_GET_ITEM(items.ptr(), i), next.ptr());
        if (number == nullptr) throw py::error_already_set();
        if (number == next.ptr()) {
            ids[i] = count++;
            next = py::int_(count);
        } else {
            ids[i] = PyLong_AsLongLong(number);
        }
    }
    return count;
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
