// The CUDA ops of a build without CUDA: the same names, which throw.
#include "cuda/device.h"
#include "cuda/scale.h"

namespace turnwise::cuda {

void scale(const View&, const View&, Stream) {
    refuse_without_cuda();
}

}  // namespace turnwise::cuda
