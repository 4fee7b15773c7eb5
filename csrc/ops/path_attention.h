// Attention of one new token per row to its prompt and to the tokens since, on the CPU.
#pragma once

#include "core/view.h"

namespace turnwise {

// Row r of `query` [R, heads * size] attends to the places begin[r] .. end[r] - 1 of `key` and `value`
// [M, kv_heads * size], and to those in path[r] [S] that are not -1. All rows are contiguous, and all have one type of
// floats; begin, end [R] and path [R, S] are int64. Heads kv_heads * i .. of the queries share key head i.
struct PathTensors {
    View query, key, value;
    View begin, end, path;
    int64_t heads, kv_heads;  // of queries, and of keys and values
    double scale;             // of the scores
};

// Writes the output [R, heads * size]. A row's result does not depend on other rows or on the number of threads.
void path_attention(const PathTensors& tensors, const View& out, int threads);

}  // namespace turnwise
