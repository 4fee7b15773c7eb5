// What `turnwise doctor` wants to know of the machine's GPUs. A build without CUDA has the same functions, which throw.
#pragma once

#include <cstdint>
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
std::string architectures();  // "" without CUDA
// These throw std::runtime_error, with the reason, where there is no CUDA, no driver or no such device.
std::pair<int, int> runtime_version();
std::pair<int, int> driver_version();
int device_count();
Device device(int index);

}  // namespace turnwise::cuda
