// The kernel of attention of single queries to listed places. It is compiled once per instruction set.
#pragma once

#include <cstdint>

#include "core/float16.h"

namespace turnwise {

// Addresses of the first rows, and the elements from one row to the next.
template <class T>
struct PathCall {
    const T *query, *key, *value;       // [R, kv_heads * group * size], [M, kv_heads * size] twice
    T* out;                             // [R, kv_heads * group * size]
    const int64_t *begin, *end, *path;  // [R], [R], [R, steps]; -1 in a path is no place
    int64_t query_row, key_row, value_row, out_row, path_row;
    int64_t steps;                  // places in a row's path
    int64_t longest;                // most places that a row attends to
    int64_t kv_heads, group, size;  // key heads, query heads of each, elements of a head
    double scale;                   // of the scores
};

constexpr int64_t kPathPadding = 16;  // elements that a vector may reach past a row's weights

// Computes rows first .. last - 1. `scratch` has group * (longest + kPathPadding) elements. Elements of 16 bits are
// computed with in float32.
struct PathAttentionKernels {
    void (*f32)(const PathCall<float>&, int64_t first, int64_t last, float* scratch);
    void (*f64)(const PathCall<double>&, int64_t first, int64_t last, double* scratch);
    void (*bf16)(const PathCall<BFloat16>&, int64_t first, int64_t last, float* scratch);
    void (*f16)(const PathCall<Half>&, int64_t first, int64_t last, float* scratch);
};

}  // namespace turnwise
