// The machine's GPUs, for `turnwise doctor` and the choice of a backend. A build without CUDA has the same functions,
// which throw.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace turnwise::cuda {

struct Device {
    std::string name;
    int major, minor;      // compute capability
    int64_t memory_bytes;  // of global memory
    int multiprocessors;
};

bool compiled();
bool emulated();              // kernels run on the host, for the tests
std::string architectures();  // "" without CUDA
// The reason why this module's kernels cannot run on a device (-1: the current one), such as a driver that is too old;
// "" where they can. Loads an empty kernel and launches nothing. Do not call it while a graph is captured.
std::string unsupported_reason(int device);
// These throw std::runtime_error, with the reason, where there is no CUDA, no driver or no such device.
std::pair<int, int> runtime_version();
std::pair<int, int> driver_version();
int device_count();
Device device(int index);

[[noreturn]] inline void refuse_without_cuda() {
    throw std::runtime_error(
        "turnwise was built without CUDA; build it with -DTURNWISE_CUDA=ON and an nvcc on the PATH");
}

}  // namespace turnwise::cuda
