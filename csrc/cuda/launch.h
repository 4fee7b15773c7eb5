// Launches kernels, and wraps the few host calls around a launch. Kernels use CUDA only through this header, so the
// same file also compiles as plain C++ and runs in the emulator of tests/cpp/cuda_emulation on machines without a GPU.
// For that, a kernel
//   - has blocks of whole warps, and every thread of a warp reaches every warp operation and every barrier;
//   - gets its shared memory from shared<T>(), as many bytes as its launch asked for;
//   - has no static __shared__ variable.
#pragma once

#if defined(TURNWISE_EMULATE_CUDA)
#include "cuda_emulation.h"
#else
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#endif

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "core/check.h"
#include "core/float16.h"
#include "core/view.h"
#include "cuda/stream.h"

namespace turnwise::cuda {

inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // clears the error, so that the next launch does not report it again
    throw std::runtime_error(std::string("CUDA: ") + what + " failed: " + cudaGetErrorString(status) + " (error " +
                             std::to_string(int(status)) + ")");
}

// Throws unless all given views are on one device. Memory of another device is an illegal address for a kernel, and
// after an illegal access no CUDA call works.
inline void require_one_device(const View& first, std::initializer_list<const View*> others) {
    for (const View* other : others) {
        require(!*other || other->device == first.device, "expected all tensors on one device");
    }
}

// Makes a device current during the guard's lifetime. A negative index means the current device.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        changed_ = device >= 0 && device != before_;
        if (changed_) check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~DeviceGuard() {
        if (changed_) cudaSetDevice(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;

  private:
    int before_ = 0;        // the device that was current before
    bool changed_ = false;  // the destructor must restore it
};

// The number of multiprocessors of the current device.
inline int multiprocessors() {
    int device = 0, count = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return count;
}

// Requests shared memory for a kernel, which CUDA demands above 48 KiB.
template <class... Parameters>
void allow_shared(void (*kernel)(Parameters...), int shared_bytes) {
    if (shared_bytes <= 48 << 10) return;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          "cudaFuncSetAttribute");
}

// The number of blocks of a kernel that the device runs at once: the grid of a persistent or cooperative kernel.
template <class... Parameters>
int resident_blocks(void (*kernel)(Parameters...), int threads, int shared_bytes = 0) {
    allow_shared(kernel, shared_bytes);
    int each = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, size_t(shared_bytes)),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return each * multiprocessors();
}

#if !defined(TURNWISE_EMULATE_CUDA)

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t grid, int threads, int shared_bytes, Stream stream,
            Arguments... arguments) {
    allow_shared(kernel, shared_bytes);
    kernel<<<unsigned(grid), unsigned(threads), size_t(shared_bytes), reinterpret_cast<cudaStream_t>(stream.handle)>>>(
        Parameters(arguments)...);
    check(cudaGetLastError(), "launch");
}

// Launches all blocks at once, so that grid_barrier() works. `grid` must be at most resident_blocks.
template <class... Parameters, class... Arguments>
void launch_cooperative(void (*kernel)(Parameters...), int64_t grid, int threads, int shared_bytes, Stream stream,
                        Arguments... arguments) {
    allow_shared(kernel, shared_bytes);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(grid));
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = size_t(shared_bytes);
    config.stream = reinterpret_cast<cudaStream_t>(stream.handle);
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
    config.attrs = &cooperative;
    config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "cooperative launch");
}

__device__ __forceinline__ void grid_barrier() {
    cooperative_groups::this_grid().sync();
}

template <class T>
__device__ __forceinline__ T* shared() {
    extern __shared__ __align__(16) unsigned char turnwise_shared[];
    return reinterpret_cast<T*>(turnwise_shared);
}

#endif

inline cudaStream_t stream_of(Stream stream) {
    return reinterpret_cast<cudaStream_t>(stream.handle);
}

// Fills memory with a byte on the stream. Graphs can capture it.
inline void fill_bytes(void* memory, int value, int64_t bytes, Stream stream) {
    if (bytes > 0) check(cudaMemsetAsync(memory, value, size_t(bytes), stream_of(stream)), "cudaMemsetAsync");
}

}  // namespace turnwise::cuda
