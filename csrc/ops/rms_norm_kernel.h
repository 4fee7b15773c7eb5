// The kernels of root-mean-square normalization. They are compiled once per instruction set.
#pragma once

#include <cstdint>

#include "core/float16.h"

namespace turnwise {

// Addresses of the first rows, and the elements from one row to the next.
template <class T>
struct NormCall {
    const T *x, *weight, *upstream;  // [n, width], [width], [n, width]
    T *out, *grad_x;                 // [n, width]
    float* inverse;                  // [n]; null: not wanted
    float* grad_weight;              // [width], of the rows of a call; null: not wanted
    int64_t x_row, upstream_row, out_row, grad_x_row;
    int64_t width;
    float eps;
};

// Both compute rows first .. last - 1. Elements of 16 bits are computed with in float32.
template <class T>
struct NormKernels {
    void (*normalize)(const NormCall<T>&, int64_t first, int64_t last);
    void (*differentiate)(const NormCall<T>&, int64_t first, int64_t last);
};
struct RmsNormKernels {
    NormKernels<float> f32;
    NormKernels<BFloat16> bf16;
    NormKernels<Half> f16;
};

}  // namespace turnwise
