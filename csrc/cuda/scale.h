// A gradient times the loss's own, in place.
#pragma once

#include "core/view.h"
#include "cuda/stream.h"

namespace turnwise::cuda {

// values *= *factor, values contiguous f32, bf16 or f16, factor 0-dim f32 on the device. Where the factor is 1, which
// is the usual case and known to the device alone, nothing is read or written.
void scale(const View& values, const View& factor, Stream stream);

}  // namespace turnwise::cuda
