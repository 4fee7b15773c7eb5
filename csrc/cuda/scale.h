// Multiplies a gradient by the upstream gradient of the loss, in place.
#pragma once

#include "core/view.h"
#include "cuda/stream.h"

namespace turnwise::cuda {

// values *= *factor. values: contiguous f32, bf16 or f16; factor: one f32 on the device. If the factor is 1, the usual
// case, the kernel reads and writes no values. Only the device knows the factor.
void scale(const View& values, const View& factor, Stream stream);

}  // namespace turnwise::cuda
