#include <stdexcept>

#include "cuda/device.h"

namespace turnwise::cuda {
namespace {

[[noreturn]] void refuse() {
    throw std::runtime_error(
        "turnwise was built without CUDA; build it with -DTURNWISE_CUDA=ON and an nvcc on the PATH");
}

}  // namespace

bool compiled() {
    return false;
}
std::string architectures() {
    return "";
}
std::pair<int, int> runtime_version() {
    refuse();
}
std::pair<int, int> driver_version() {
    refuse();
}
int device_count() {
    refuse();
}
Device device(int) {
    refuse();
}

}  // namespace turnwise::cuda
