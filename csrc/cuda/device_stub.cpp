#include "cuda/device.h"

namespace turnwise::cuda {

bool compiled() {
    return false;
}
bool emulated() {
#if defined(TURNWISE_EMULATE_CUDA)
    return true;
#else
    return false;
#endif
}
std::string architectures() {
    return "";
}
std::pair<int, int> runtime_version() {
    refuse_without_cuda();
}
std::pair<int, int> driver_version() {
    refuse_without_cuda();
}
int device_count() {
    refuse_without_cuda();
}
Device device(int) {
    refuse_without_cuda();
}

}  // namespace turnwise::cuda
