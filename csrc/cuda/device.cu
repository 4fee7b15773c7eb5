#include "cuda/device.h"

#include <cuda_runtime_api.h>

#include <stdexcept>

namespace turnwise::cuda {
namespace {

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    throw std::runtime_error(std::string("CUDA: ") + what + " failed: " + cudaGetErrorString(status) + " (error " +
                             std::to_string(int(status)) + ")");
}

std::pair<int, int> split(int version) {
    return {version / 1000, version % 1000 / 10};
}

}  // namespace

bool compiled() {
    return true;
}

bool emulated() {
    return false;
}
void allow(const View&) {}

std::string architectures() {
    return TURNWISE_CUDA_ARCHITECTURES;
}

std::pair<int, int> runtime_version() {
    int version = 0;
    check(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
    return split(version);
}

std::pair<int, int> driver_version() {
    int version = 0;
    check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    return split(version);
}

int device_count() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    return count;
}

Device device(int index) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    return {properties.name, properties.major, properties.minor, int64_t(properties.totalGlobalMem),
            properties.multiProcessorCount};
}

}  // namespace turnwise::cuda
