#include "ops/tree_attention.h"

#include "bindings/bindings.h"
#include "bindings/tensor.h"

namespace py = pybind11;

namespace turnwise {
namespace {

void forward(py::object begin, py::object subtree_end, py::object query, py::object key, py::object value,
             int64_t heads, int64_t kv_heads, double scale, py::object out, py::object lse, int threads) {
    const TreeSegments segments{view_of(begin, "begin"), view_of(subtree_end, "subtree_end")};
    const TreeTensors tensors{
        view_of(query, "query"), view_of(key, "key"), view_of(value, "value"), heads, kv_heads, scale};
    const View to = view_of(out, "out"), sums = view_of(lse, "lse");
    py::gil_scoped_release unlocked;
    tree_attention(segments, tensors, to, sums, threads);
}

void backward(py::object begin, py::object subtree_end, py::object query, py::object key, py::object value,
              int64_t heads, int64_t kv_heads, double scale, py::object out, py::object lse, py::object d_out,
              py::object d_query, py::object d_key, py::object d_value, int threads) {
    const TreeSegments segments{view_of(begin, "begin"), view_of(subtree_end, "subtree_end")};
    const TreeTensors tensors{
        view_of(query, "query"), view_of(key, "key"), view_of(value, "value"), heads, kv_heads, scale};
    const View from = view_of(out, "out"), sums = view_of(lse, "lse"), upstream = view_of(d_out, "d_out"),
               to_query = view_of(d_query, "d_query"), to_key = view_of(d_key, "d_key"),
               to_value = view_of(d_value, "d_value");
    py::gil_scoped_release unlocked;
    tree_attention_grad(segments, tensors, from, sums, upstream, to_query, to_key, to_value, threads);
}

}  // namespace

void bind_tree_attention(py::module_& module) {
    module.def("tree_attention", &forward, py::arg("begin"), py::arg("subtree_end"), py::arg("query"), py::arg("key"),
               py::arg("value"), py::arg("heads"), py::arg("kv_heads"), py::arg("scale"), py::arg("out"),
               py::arg("lse"), py::arg("threads"),
               "Writes the attention of each place of a trie to its ancestors and itself, and log-sum-exps.");
    module.def("tree_attention_grad", &backward, py::arg("begin"), py::arg("subtree_end"), py::arg("query"),
               py::arg("key"), py::arg("value"), py::arg("heads"), py::arg("kv_heads"), py::arg("scale"),
               py::arg("out"), py::arg("lse"), py::arg("d_out"), py::arg("d_query"), py::arg("d_key"),
               py::arg("d_value"), py::arg("threads"), "Writes the gradients of queries, keys and values.");
}

}  // namespace turnwise
