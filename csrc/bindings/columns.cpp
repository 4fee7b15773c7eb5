#include <utility>
#include <vector>

#include "bindings/attributes.h"
#include "bindings/bindings.h"

namespace py = pybind11;

namespace turnwise {
namespace {

// Moves the columns into a tuple.
py::tuple as_tuple(std::vector<py::list>& columns) {
    py::tuple all(columns.size());
    for (size_t column = 0; column < columns.size(); ++column) all[column] = std::move(columns[column]);
    return all;
}

py::tuple read_attributes(const py::sequence& objects, const py::sequence& names) {
    const py::tuple every(objects);  // a copy, which no property that runs can change
    const auto count = Py_ssize_t(every.size());
    PyObject* const* object = PySequence_Fast_ITEMS(every.ptr());
    std::vector<Attribute> attributes;
    for (const py::handle name : names) attributes.emplace_back(name);
    std::vector<py::list> columns;
    for (size_t column = 0; column < attributes.size(); ++column) columns.emplace_back(size_t(count));
    for (Py_ssize_t row = 0; row < count; ++row) {
        if (row + kFar < count) fetch_object(object[row + kFar]);
        for (size_t column = 0; column < attributes.size(); ++column) {
            if (row + kNear < count) attributes[column].fetch_ahead(object[row + kNear]);
            PyList_SET_ITEM(columns[column].ptr(), row, attributes[column].read(object[row]).release().ptr());
        }
    }
    return as_tuple(columns);
}

py::tuple read_items(const py::sequence& mappings, const py::dict& defaults) {
    const py::tuple every(mappings);
    const auto count = Py_ssize_t(every.size());
    PyObject* const* mapping = PySequence_Fast_ITEMS(every.ptr());
    std::vector<std::pair<py::object, py::object>> wanted;
    std::vector<py::list> columns;
    for (const auto& [key, fallback] : defaults) {
        wanted.emplace_back(py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(fallback));
        columns.emplace_back(size_t(count));
    }
    for (Py_ssize_t row = 0; row < count; ++row) {
        if (row + kFar < count) fetch(mapping[row + kFar], sizeof(PyDictObject));
        if (row + kNear < count) fetch_keys(mapping[row + kNear]);
        for (size_t column = 0; column < columns.size(); ++column) {
            const auto& [key, fallback] = wanted[column];
            PyList_SET_ITEM(columns[column].ptr(), row, item_of(mapping[row], key, fallback).release().ptr());
        }
    }
    return as_tuple(columns);
}

}  // namespace

void bind_columns(py::module_& module) {
    module.def("read_attributes", &read_attributes, py::arg("objects"), py::arg("names"),
               "For each name the list of that attribute of all objects.");
    module.def("read_items", &read_items, py::arg("mappings"), py::arg("defaults"),
               "For each key of defaults the list of what all mappings have for it, its default where they have none.");
}

}  // namespace turnwise
