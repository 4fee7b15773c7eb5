// Root-mean-square normalization of rows with a weight for each column, and its gradients, on the CPU.
#pragma once

#include "core/view.h"

namespace turnwise {

// x and weight have one type: f32, bf16 or f16; x [n, h] has contiguous rows, weight [h] is contiguous.
struct NormTensors {
    View x, weight;
    float eps;  // added to the mean square
};

// Writes out [n, h] = weight * round(x * inverse), of the type of x, and inverse [n] f32 = 1 / sqrt(mean(x^2) + eps),
// or no inverse. A row's result does not depend on other rows or on the number of threads.
void rms_norm(const NormTensors& tensors, const View& out, const View& inverse, int threads);

constexpr int64_t kNormBlock = 64;  // rows that share a partial gradient of the weight

// Writes the gradient of x to grad_x [n, h], and partial gradients of the weight, whose sum over their rows is the
// gradient, to grad_weight [ceil(n / kNormBlock), h] f32 or to none. `upstream` [n, h] is of the type of x.
void rms_norm_grad(const NormTensors& tensors, const View& inverse, const View& upstream, const View& grad_x,
                   const View& grad_weight, int threads);

}  // namespace turnwise
