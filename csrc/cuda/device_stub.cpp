#include "cuda/device.h"

#if defined(TURNWISE_EMULATE_CUDA)
#include "cuda_emulation.h"
#endif

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
void allow([[maybe_unused]] const View& view) {
#if defined(TURNWISE_EMULATE_CUDA)
    if (view.size() == 0) return;
    int64_t last = 0;  // offset of the last element
    for (int d = 0; d < view.dims; ++d) last += (view.shape[d] - 1) * view.stride[d];
    emulation::allow(view.data, size_t((last + 1) * bytes_of(view.dtype)));
#endif
}
std::string architectures() {
    return "";
}
std::pair<int, int> runtime_version() {
    reject_without_cuda();
}
std::pair<int, int> driver_version() {
    reject_without_cuda();
}
int device_count() {
    reject_without_cuda();
}
Device device(int) {
    reject_without_cuda();
}

}  // namespace turnwise::cuda
