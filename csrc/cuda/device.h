// The machine's GPUs, for `turnwise doctor` and the choice of a backend. A build without CUDA has the same functions,
// but most of them throw.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/view.h"

namespace turnwise::cuda {

struct Device {
    std::string name;      // as the driver reports it
    int major, minor;      // compute capability
    int64_t memory_bytes;  // size of global memory
    int multiprocessors;   // number of them
};

bool compiled();               // this build has CUDA kernels
bool emulated();               // kernels run on the host, for the tests
void allow(const View& view);  // emulated kernels may access this memory in the next call; nothing in other builds
std::string architectures();   // "" without CUDA
// Returns why this module's kernels cannot run on a device (-1: the current one), such as a driver that is too old; ""
// if they can run. Loads an empty kernel and launches nothing. Do not call it while a graph is captured.
std::string unsupported_reason(int device);
// These throw std::runtime_error with the reason if there is no CUDA, no driver or no such device. Versions are (major,
// minor).
std::pair<int, int> runtime_version();
std::pair<int, int> driver_version();
int device_count();
Device device(int index);

[[noreturn]] inline void reject_without_cuda() {
    throw std::runtime_error(
        "turnwise was built without CUDA; build it with -DTURNWISE_CUDA=ON and an nvcc on the PATH");
}

}  // namespace turnwise::cuda
