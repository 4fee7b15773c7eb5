#include "cuda/scale.h"

#include <algorithm>

#include "cuda/block.h"

namespace turnwise::cuda {
namespace {

constexpr int kThreads = 256;

// Scales `packs` 16-byte packs, then the other values one by one.
template <class T>
__global__ void __launch_bounds__(kThreads) scale_kernel(T* values, int64_t packs, int64_t count, const float* factor) {
    constexpr int kPack = 16 / int(sizeof(T));
    const float by = *factor;
    if (by == 1.0f) return;
    const int64_t stride = int64_t(gridDim.x) * blockDim.x;
    const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    for (int64_t i = first; i < packs; i += stride) {
        const auto pack = load_streaming<T, kPack>(values + i * kPack);
        Pack<T, kPack> scaled;
#pragma unroll
        for (int k = 0; k < kPack; ++k) scaled.value[k] = from_float<T>(to_float(pack[k]) * by);
        store_streaming<T, kPack>(values + i * kPack, scaled);
    }
    for (int64_t i = packs * kPack + first; i < count; i += stride) values[i] = from_float<T>(to_float(values[i]) * by);
}

template <class T>
void run(const View& values, const View& factor, Stream stream) {
    constexpr int kPack = 16 / int(sizeof(T));
    const int64_t count = values.size();
    const int64_t packs = is_aligned(values.data, 16) ? count / kPack : 0;
    const int64_t wanted = (std::max(packs, count - packs * kPack) + kThreads - 1) / kThreads;
    const int64_t grid = std::min<int64_t>(wanted, int64_t(multiprocessors()) * 8);
    launch(scale_kernel<T>, grid, kThreads, 0, stream, values.as<T>(), packs, count, factor.as<const float>());
}

}  // namespace

void scale(const View& values, const View& factor, Stream stream) {
    require_float_stream("values", values);
    require_dtype("factor", factor, {DType::f32});
    if (factor.size() != 1) reject_shape("factor", factor, "one value");
    require_one_device(values, {&factor});
    if (values.size() == 0) return;
    const DeviceGuard guard(values.device);
    if (values.dtype == DType::bf16) return run<BFloat16>(values, factor, stream);
    if (values.dtype == DType::f16) return run<Half>(values, factor, stream);
    run<float>(values, factor, stream);
}

}  // namespace turnwise::cuda
