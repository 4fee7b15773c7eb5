// Enough of CUDA to run turnwise's kernels on the host, one fibre per thread, in place of cuda_runtime.h.
//
// What it is for: indexing, barriers, reductions, tails, all of which the compiler alone can't check. Blocks run one
// after the other (all at once in a cooperative launch), the threads of a block in an order that turns round at every
// barrier, and shared memory starts as garbage and ends in canaries; so a forgotten barrier, a warp operation that not
// all lanes reach or a write past shared memory shows. It says nothing of speed.
//
// The compiler adds a call before every access to memory (kBoundsFlags of tests/ops/test_cuda_emulation.py,
// CMakeLists). An access outside the buffers of the call, the block's shared memory and the thread's own stack is an
// error.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

// ---- Types ---------------------------------------------------------------------------------------------------------
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

// ---- Host calls ----------------------------------------------------------------------------------------------------
enum cudaError_t { cudaSuccess, cudaErrorInsufficientDriver = 35, cudaErrorNoKernelImageForDevice = 209 };
struct cudaFuncAttributes {};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = struct CUstream_st*;

namespace turnwise::emulation {

constexpr int kMultiprocessors = 3;  // few, so that persistent kernels go round more than once
constexpr int kBlocksEach = 2;

struct Launch {
    int64_t grid;
    int threads, shared_bytes;
    bool cooperative;
};
// Runs body once per thread. Throws std::logic_error for a kernel that breaks the rules of launch.h.
void run(const Launch& launch, const std::function<void()>& body);

enum class Barrier { warp, block, grid };
void wait(Barrier barrier);
void* shared_memory();

// Puts `value` (at most 8 bytes) where the lanes of the warp see it; returns after all have: value_of(lane).
void publish(const void* value, size_t bytes);
void read_lane(int lane, void* value, size_t bytes);
void expect_full(unsigned mask);

// Lets kernels that this thread launches access [data, data + bytes). The first call after a launch forgets the buffers
// of the call before.
void allow(const void* data, size_t bytes);

extern dim3 thread_index, block_index, block_size, grid_size;
extern int64_t atomics;  // atomic operations of all launches, one per thread that makes one

}  // namespace turnwise::emulation

#define threadIdx (::turnwise::emulation::thread_index)
#define blockIdx (::turnwise::emulation::block_index)
#define blockDim (::turnwise::emulation::block_size)
#define gridDim (::turnwise::emulation::grid_size)

// What the emulated device answers: TURNWISE_EMULATED_ERROR, the number of an error, makes it refuse every kernel. With
// TURNWISE_EMULATED_MULTIPROCESSORS it names another number of them, as for the size of a workspace.
inline cudaError_t emulated_status() {
    const char* error = std::getenv("TURNWISE_EMULATED_ERROR");
    return error ? cudaError_t(std::atoi(error)) : cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) {
    return "emulated";
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
    return emulated_status();
}
inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    const char* count = std::getenv("TURNWISE_EMULATED_MULTIPROCESSORS");
    *value = count ? std::atoi(count) : turnwise::emulation::kMultiprocessors;
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
    *blocks = turnwise::emulation::kBlocksEach;
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
    std::memset(memory, value, bytes);
    return cudaSuccess;
}

// ---- Device functions ----------------------------------------------------------------------------------------------
inline void __syncthreads() {
    turnwise::emulation::wait(turnwise::emulation::Barrier::block);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    turnwise::emulation::expect_full(mask);
    turnwise::emulation::wait(turnwise::emulation::Barrier::warp);
}
inline void __threadfence() {}

namespace turnwise::emulation {

inline int lane() {
    return int(thread_index.x % 32);
}
template <class T>
T exchange(unsigned mask, T value, int from) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
    expect_full(mask);
    publish(&value, sizeof(T));
    T got = value;
    if (from >= 0 && from < 32) read_lane(from, &got, sizeof(T));
    return got;
}
template <class Visit>
void each_lane(unsigned mask, uint64_t value, const Visit& visit) {
    expect_full(mask);
    publish(&value, sizeof value);
    for (int i = 0; i < 32; ++i) {
        uint64_t other = 0;
        read_lane(i, &other, sizeof other);
        visit(i, other);
    }
}

}  // namespace turnwise::emulation

template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
    return turnwise::emulation::exchange(mask, value, from & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int other) {
    return turnwise::emulation::exchange(mask, value, turnwise::emulation::lane() ^ other);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    return turnwise::emulation::exchange(mask, value, turnwise::emulation::lane() - int(by));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by) {
    return turnwise::emulation::exchange(mask, value, turnwise::emulation::lane() + int(by));
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    unsigned votes = 0;
    turnwise::emulation::each_lane(mask, predicate != 0, [&](int i, uint64_t v) { votes |= unsigned(v) << i; });
    return votes;
}
inline int __any_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, predicate) != 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
    unsigned same = 0;
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    turnwise::emulation::each_lane(mask, bits, [&](int i, uint64_t v) { same |= unsigned(v == bits) << i; });
    return same;
}

// One thread runs at a time, so plain reads and writes are atomic.
namespace turnwise::emulation {

template <class T>
T before_atomic(const T* address) {
    ++atomics;
    return *address;
}

}  // namespace turnwise::emulation

template <class T>
T atomicAdd(T* to, std::common_type_t<T> value) {
    static_assert(std::is_integral_v<T>, "sums of floats in any order differ from run to run");
    const T before = turnwise::emulation::before_atomic(to);
    *to = T(before + value);
    return before;
}
template <class T>
T atomicMax(T* to, std::common_type_t<T> value) {
    const T before = turnwise::emulation::before_atomic(to);
    if (value > before) *to = value;
    return before;
}
template <class T>
T atomicOr(T* to, std::common_type_t<T> value) {
    const T before = turnwise::emulation::before_atomic(to);
    *to = before | value;
    return before;
}
template <class T>
T atomicExch(T* to, std::common_type_t<T> value) {
    const T before = turnwise::emulation::before_atomic(to);
    *to = value;
    return before;
}
template <class T>
T atomicCAS(T* to, std::common_type_t<T> compare, std::common_type_t<T> value) {
    const T before = turnwise::emulation::before_atomic(to);
    if (before == compare) *to = value;
    return before;
}

// A vector access at a wrong address is an error on a GPU, so it is one here.
template <class T>
const T& at(const T* address) {
    if (reinterpret_cast<uintptr_t>(address) % alignof(T) != 0) throw std::logic_error("misaligned access");
    return *address;
}
template <class T>
T __ldcs(const T* from) {
    return at(from);
}
template <class T>
T __ldg(const T* from) {
    return at(from);
}
template <class T>
T __ldcg(const T* from) {
    return at(from);
}
template <class T>
void __stcs(T* to, std::common_type_t<T> value) {
    const_cast<T&>(at(to)) = value;
}
template <class T>
void __stcg(T* to, std::common_type_t<T> value) {
    const_cast<T&>(at(to)) = value;
}

template <class To, class From>
To turnwise_bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float x) {
    return turnwise_bit_cast<unsigned>(x);
}
inline float __uint_as_float(unsigned x) {
    return turnwise_bit_cast<float>(x);
}
inline long long __double_as_longlong(double x) {
    return turnwise_bit_cast<long long>(x);
}
inline double __longlong_as_double(long long x) {
    return turnwise_bit_cast<double>(x);
}
inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
template <class T>
T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
    return a < b ? b : a;
}

// ---- Launches, in place of those of launch.h -----------------------------------------------------------------------
namespace turnwise::cuda {

struct Stream;

template <class... Parameters, class StreamType, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t grid, int threads, int shared_bytes, StreamType,
            Arguments... arguments) {
    const auto body = [&] { kernel(Parameters(arguments)...); };
    emulation::run({grid, threads, shared_bytes, false}, std::ref(body));
}

template <class... Parameters, class StreamType, class... Arguments>
void launch_cooperative(void (*kernel)(Parameters...), int64_t grid, int threads, int shared_bytes, StreamType,
                        Arguments... arguments) {
    const auto body = [&] { kernel(Parameters(arguments)...); };
    emulation::run({grid, threads, shared_bytes, true}, std::ref(body));
}

inline void grid_barrier() {
    emulation::wait(emulation::Barrier::grid);
}

template <class T>
T* shared() {
    return static_cast<T*>(emulation::shared_memory());
}

}  // namespace turnwise::cuda
