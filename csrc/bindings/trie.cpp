#include "pack/trie.h"

#include <pybind11/numpy.h>

#include <string>

#include "bindings/bindings.h"
#include "core/check.h"

namespace py = pybind11;

namespace turnwise {
namespace {

using Int64s = py::array_t<int64_t, py::array::c_style>;

const int64_t* column(const Int64s& values, int64_t length, const char* name) {
    if (values.ndim() != 1 || values.shape(0) != length) {
        throw InvalidInput(std::string(name) + ": expected int64 [" + std::to_string(length) + "]");
    }
    return values.data();
}

TokenTrie build(const Int64s& tokens, const Int64s& starts, const Int64s& ends, int64_t least) {
    require(tokens.ndim() == 1 && starts.ndim() == 1, "tokens, starts: expected one dimension");
    const int64_t count = starts.shape(0), total = tokens.shape(0);
    const TokenRows rows{tokens.data(), starts.data(), column(ends, count, "ends"), count};
    for (int64_t i = 0; i < count; ++i) {
        require(rows.starts[i] >= 0 && rows.starts[i] <= rows.ends[i] && rows.ends[i] <= total,
                "starts, ends: expected 0 <= start <= end <= len(tokens)");
    }
    py::gil_scoped_release unlocked;
    return build_trie(rows, least);
}

// A vector of the trie as a read-only array that keeps the trie alive.
template <std::vector<int64_t> TokenTrie::* member>
Int64s view(py::object self) {
    const std::vector<int64_t>& values = self.cast<const TokenTrie&>().*member;
    Int64s array({py::ssize_t(values.size())}, {py::ssize_t(sizeof(int64_t))}, values.data(), self);
    array.attr("setflags")(py::arg("write") = false);
    return array;
}

Int64s places(const TokenTrie& trie, const Int64s& firsts, const Int64s& counts) {
    const int64_t rows = int64_t(trie.row_end.size());
    const int64_t* first = column(firsts, rows, "firsts");
    const int64_t* count = column(counts, rows, "counts");
    int64_t total = 0;
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t end = trie.row_end[size_t(i)];
        const int64_t length = end < 0 ? 0 : trie.depth[size_t(end)] + 1;
        require(count[i] >= 0 && (count[i] == 0 || (first[i] >= 0 && first[i] + count[i] <= length)),
                "firsts, counts: expected positions within each row");
        total += count[i];
    }
    Int64s out(total);
    trie_places(trie, first, count, out.mutable_data());
    return out;
}

py::tuple cut(const TokenTrie& trie, int64_t max_tokens) {
    require(max_tokens >= 1, "max_tokens: expected at least 1");
    const size_t rows = trie.row_end.size();
    Int64s order{py::ssize_t(rows)}, part{py::ssize_t(rows)};
    std::vector<int64_t> lengths(rows);
    for (size_t i = 0; i < rows; ++i) lengths[i] = trie.row_end[i] < 0 ? 0 : trie.depth[size_t(trie.row_end[i])] + 1;
    const int64_t parts = cut_trie(trie, lengths.data(), max_tokens, order.mutable_data(), part.mutable_data());
    return py::make_tuple(order, part, parts);
}

}  // namespace

void bind_trie(py::module_& module) {
    // module_local, because the tests load a second build of this module, which emulates CUDA.
    py::class_<TokenTrie>(module, "TokenTrie", py::module_local(),
                          "Rows of a token stream, their common beginnings once, laid out depth first.")
        .def(py::init(&build), py::arg("tokens"), py::arg("starts"), py::arg("ends"), py::arg("least") = 0)
        .def_property_readonly("source", &view<&TokenTrie::source>,
                               "[U] the index in the stream of each place's token.")
        .def_property_readonly("depth", &view<&TokenTrie::depth>, "[U] the position of a place in its rows.")
        .def_property_readonly("begin", &view<&TokenTrie::begin>, "[S + 1] the first place of each segment.")
        .def_property_readonly("parent", &view<&TokenTrie::parent>, "[S] the segment above, -1 for none.")
        .def_property_readonly("subtree_end", &view<&TokenTrie::subtree_end>, "[S] where a segment's subtree ends.")
        .def_property_readonly("row_end", &view<&TokenTrie::row_end>, "[B] the place of a row's last token, or -1.")
        .def("places", &places, py::arg("firsts"), py::arg("counts"),
             "The places of counts[i] positions of row i from firsts[i] on, row after row.")
        .def("cut", &cut, py::arg("max_tokens"),
             "Rows depth first, the part of each, and how many parts: each of at most max_tokens unique tokens.");
}

}  // namespace turnwise
