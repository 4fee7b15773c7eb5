#include <pybind11/numpy.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace turnwise {
namespace {

template <class T>
using Column = py::array_t<T, py::array::c_style>;

// Converts items of a list to numbers. `quick` runs no Python code and may return false for a valid item. `convert` may
// run any code, and returns false for an invalid item, with or without a Python error set.
struct TokenId {
    using Value = int64_t;
    static constexpr const char* kExpected = "expected a token id, a whole number from 0 to 2147483647";

    static bool fits(long long wide) { return wide >= 0 && wide <= std::numeric_limits<int32_t>::max(); }
    // Takes ints of one digit of CPython, below 2^30, as token ids are.
    static bool quick(PyObject* item, Value& value) {
        if (!PyLong_CheckExact(item)) return false;
        const auto* whole = reinterpret_cast<const PyLongObject*>(item);
#if PY_VERSION_HEX >= 0x030C0000
        if (!PyUnstable_Long_IsCompact(whole)) return false;
        value = PyUnstable_Long_CompactValue(whole);
        return value >= 0;
#else
        if (static_cast<size_t>(Py_SIZE(whole)) > 1) return false;  // negative numbers have a negative size
        value = Py_SIZE(whole) ? whole->ob_digit[0] : 0;
        return true;
#endif
    }
    static bool convert(PyObject* item, Value& value) {
        const py::object whole = py::reinterpret_steal<py::object>(PyNumber_Index(item));
        if (!whole) return false;
        int overflow;
        value = PyLong_AsLongLongAndOverflow(whole.ptr(), &overflow);
        return overflow == 0 && fits(value);
    }
};

struct Logprob {
    using Value = float;
    static constexpr const char* kExpected = "expected a log-probability, a finite number";

    static bool quick(PyObject* item, Value& value) {
        if (!PyFloat_CheckExact(item)) return false;
        value = float(PyFloat_AS_DOUBLE(item));
        return std::isfinite(value);
    }
    static bool convert(PyObject* item, Value& value) {
        const double wide = PyFloat_AsDouble(item);
        if (wide == -1.0 && PyErr_Occurred()) return false;
        value = float(wide);
        return std::isfinite(value);
    }
};

// Raises errors about a row.
struct Blame {
    const char* name;           // of the column, for messages
    const py::function& where;  // where(row) describes a row

    [[noreturn]] void refuse(PyObject* type, Py_ssize_t row, const py::str& problem) const {
        const py::str message = py::str("{}: {}").format(where(row), problem);
        PyErr_SetObject(type, message.ptr());
        throw py::error_already_set();
    }

    [[noreturn]] void reject_item(Py_ssize_t row, Py_ssize_t index, py::handle item, const char* expected) const {
        // An item that is not a number raises TypeError, one that is out of range ValueError. Other errors come from
        // the item's own methods and pass through.
        PyObject* type =
            PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError) ? PyExc_TypeError : PyExc_ValueError;
        if (PyErr_Occurred() && type != PyExc_TypeError && !PyErr_ExceptionMatches(PyExc_OverflowError))
            throw py::error_already_set();
        PyErr_Clear();
        refuse(type, row, py::str("{}[{}]={!r:.80}: {}").format(name, index, item, expected));
    }
};

// The rows of one column, as lists or tuples. They may be lists of the user, and converting an unusual item runs the
// user's code, which may change them. So the lengths are stored, and each row is checked against its length before it
// is read.
class Rows {
  public:
    Rows(const py::sequence& rows, const Blame& blame) : blame_(blame) {
        const py::tuple every(rows);
        for (Py_ssize_t row = 0; row < Py_ssize_t(every.size()); ++row) {
            PyObject* items = PySequence_Fast(every[size_t(row)].ptr(), "");
            if (!items) {
                if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
                PyErr_Clear();
                blame_.refuse(PyExc_TypeError, row,
                              py::str("{}={!r:.80}: expected a list").format(blame_.name, every[size_t(row)]));
            }
            rows_.push_back(py::reinterpret_steal<py::object>(items));
            lengths_.push_back(PySequence_Fast_GET_SIZE(items));
        }
    }

    Py_ssize_t count() const { return Py_ssize_t(rows_.size()); }
    Py_ssize_t length(Py_ssize_t row) const { return lengths_[size_t(row)]; }

    // Writes the numbers of a row to `to`.
    template <class Kind>
    void write(Py_ssize_t row, typename Kind::Value* to) const {
        PyObject* items = rows_[size_t(row)].ptr();
        const Py_ssize_t length = lengths_[size_t(row)];
        if (PySequence_Fast_GET_SIZE(items) != length) reject_changed(row);
        PyObject** first = PySequence_Fast_ITEMS(items);
        Py_ssize_t index = 0;
        while (index < length && Kind::quick(first[index], to[index])) ++index;
        if (index < length) write_odd<Kind>(row, index, to);
    }

  private:
    // Writes a row from its first unusual item on. Reads from a tuple, which no other code can change.
    template <class Kind>
    void write_odd(Py_ssize_t row, Py_ssize_t index, typename Kind::Value* to) const {
        const py::tuple items(rows_[size_t(row)]);
        if (Py_ssize_t(items.size()) != lengths_[size_t(row)]) reject_changed(row);
        for (; index < lengths_[size_t(row)]; ++index) {
            PyObject* item = PyTuple_GET_ITEM(items.ptr(), index);
            if (!Kind::convert(item, to[index])) blame_.reject_item(row, index, item, Kind::kExpected);
        }
    }

    [[noreturn]] void reject_changed(Py_ssize_t row) const {
        blame_.refuse(PyExc_RuntimeError, row,
                      py::str("{} changed its length while it was packed").format(blame_.name));
    }

    Blame blame_;
    std::vector<py::object> rows_;     // lists or tuples
    std::vector<Py_ssize_t> lengths_;  // [rows]: items of each row when it was added
};

py::tuple pack_tokens(const py::sequence& prompts, const py::sequence& completions, const py::sequence& logprobs,
                      const py::function& where) {
    const Rows prompt(prompts, {"prompt_token_ids", where});
    const Blame of_completion{"completion_token_ids", where};
    const Rows completion(completions, of_completion);
    const Rows logprob(logprobs, {"logprobs", where});
    const Py_ssize_t rows = prompt.count();
    if (completion.count() != rows || logprob.count() != rows) {
        throw py::value_error("prompts, completions, logprobs: expected equally many rows");
    }
    // Row boundaries; a completion needs one log-probability per token.
    Column<int64_t> cu_seqlens(rows + 1);
    int64_t* ends = cu_seqlens.mutable_data();
    ends[0] = 0;
    for (Py_ssize_t row = 0; row < rows; ++row) {
        ends[row + 1] = ends[row] + prompt.length(row) + completion.length(row);
        if (completion.length(row) == logprob.length(row)) continue;
        of_completion.refuse(PyExc_ValueError, row,
                             py::str("expected equal lengths, got {} completion tokens, {} log-probabilities")
                                 .format(completion.length(row), logprob.length(row)));
    }
    // The streams: each row is its prompt, then its completion.
    Column<int64_t> token_ids(ends[rows]);
    Column<uint8_t> is_completion(ends[rows]);
    Column<float> rollout_logprobs(ends[rows]);
    int64_t* token = token_ids.mutable_data();
    uint8_t* mask = is_completion.mutable_data();
    float* value = rollout_logprobs.mutable_data();
    for (Py_ssize_t row = 0; row < rows; ++row) {
        const int64_t begin = ends[row], middle = begin + prompt.length(row), end = ends[row + 1];
        prompt.write<TokenId>(row, token + begin);
        completion.write<TokenId>(row, token + middle);
        logprob.write<Logprob>(row, value + middle);
        std::fill(value + begin, value + middle, 0.0f);
        std::fill(mask + begin, mask + middle, uint8_t(0));
        std::fill(mask + middle, mask + end, uint8_t(1));
    }
    return py::make_tuple(token_ids, cu_seqlens, is_completion, rollout_logprobs);
}

}  // namespace

void bind_pack_tokens(py::module_& module) {
    module.def("pack_tokens", &pack_tokens, py::arg("prompts"), py::arg("completions"), py::arg("logprobs"),
               py::arg("where"),
               "Lists of rows as one stream: token_ids, cu_seqlens, is_completion and logprobs (0 on prompts). "
               "where(row) names a row in errors.");
}

}  // namespace turnwise
