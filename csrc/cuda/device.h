// What `turnwise doctor` wants to know of the machine's GPUs. A build without CUDA has the same functions, which throw.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace turnwise::cuda {

struct Device {
    std::string name;
    int major, minor;
    int64_t memory_bytes;
    int multiprocessors;
};

bool compiled();
bool emulated();              // kernels run on the host, for the tests
std::string architectures();  // "" without CUDA
// Why this module's kernels can't run on a device (-1: the current one): a driver that is too old, no code for it. ""
// where they can. Loads an empty kernel, launches nothing. Not for a thread that captures a graph.
std::string obstacle(int device);
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
