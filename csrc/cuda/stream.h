// A CUDA stream as Python passes it, for headers that must compile without CUDA.
#pragma once

#include <cstdint>

namespace turnwise::cuda {

struct Stream {
    std::uintptr_t handle = 0;  // a cudaStream_t; 0: the default stream
};

}  // namespace turnwise::cuda
