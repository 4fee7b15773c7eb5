// Attention over a trie of tokens in depth-first order, on the CPU: a query at place q attends to a key at k if
// k <= q < subtree_end of k's segment.
#pragma once

#include "core/view.h"

namespace turnwise {

// Segments of a trie: `begin` [S + 1] are their first places, then the number of places; `subtree_end` [S] are the ends
// of their subtrees. Both are int64.
struct TreeSegments {
    View begin, subtree_end;
};

// One row per place: [U, heads * size] for queries, [U, kv_heads * size] for keys and values, with contiguous rows.
// All are float32 or all are float64. Heads kv_heads * i .. of the queries share key head i.
struct TreeTensors {
    View query, key, value;
    int64_t heads, kv_heads;  // of queries, and of keys and values
    double scale;             // of the scores
};

// Writes the output [U, heads * size] and the log-sum-exps [U, heads] of the scores.
void tree_attention(const TreeSegments& segments, const TreeTensors& tensors, const View& out, const View& lse,
                    int threads);

// Writes the gradients of queries, keys and values, given `out` and `lse` and the gradient of `out`. Results do not
// depend on the number of threads.
void tree_attention_grad(const TreeSegments& segments, const TreeTensors& tensors, const View& out, const View& lse,
                         const View& d_out, const View& d_query, const View& d_key, const View& d_value, int threads);

}  // namespace turnwise
