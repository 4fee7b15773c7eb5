#include "cuda/device.h"
#include "cuda/launch.h"

namespace turnwise::cuda {
namespace {

__global__ void probe_kernel() {}

}  // namespace

std::string unsupported_reason(int device) {
    try {
        const DeviceGuard guard(device);
        cudaFuncAttributes attributes{};
        check(cudaFuncGetAttributes(&attributes, probe_kernel), "cudaFuncGetAttributes");
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}

}  // namespace turnwise::cuda
