// Helpers for kernels: sums over a warp and a block in a fixed order, 16-byte accesses, a ticket for the last block.
#pragma once

#include <type_traits>

#include "cuda/launch.h"

namespace turnwise::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;  // mask of all lanes
constexpr int kWarp = 32;                    // lanes

// The value of lane 0 in every lane. Where all lanes have the same one, this keeps it in a register: the compiler does
// not compute it again at each use.
__device__ __forceinline__ int uniform(int value) {
    return __shfl_sync(kFullWarp, value, 0);
}

// ---- Sums ----------------------------------------------------------------------------------------------------------
// The sum over a warp, in every lane. The order of additions is fixed.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
    return value;
}

// This thread's number among `lanes` neighbours, a power of two.
__device__ __forceinline__ int lane_of_group(int lanes) {
    return int(threadIdx.x) & (lanes - 1);
}

// The sum over `lanes` neighbours, a power of two, in each of them. Called by the whole warp.
template <class T>
__device__ __forceinline__ T group_sum(T value, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
    return value;
}

// The maximum over a warp, in every lane; NaN if any value is NaN.
template <class T>
__device__ __forceinline__ T warp_max(T value) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
        const T other = __shfl_xor_sync(kFullWarp, value, offset);
        if (!(other <= value)) value = other;
    }
    return value;
}

// The sum over the lanes up to this one.
__device__ __forceinline__ unsigned warp_prefix_sum(unsigned value) {
#pragma unroll
    for (int by = 1; by < kWarp; by *= 2) {
#if defined(__CUDA_ARCH__)
        // The shuffle itself says which lanes have a lane `by` below, so no comparison does.
        asm volatile(
            "{\n.reg .pred there;\n.reg .u32 other;\n"
            "shfl.sync.up.b32 other|there, %0, %1, 0, 0xffffffff;\n@there add.u32 %0, %0, other;\n}"
            : "+r"(value)
            : "r"(by));
#else
        const unsigned other = __shfl_up_sync(kFullWarp, value, by);
        if (int(threadIdx.x) % kWarp >= by) value += other;
#endif
    }
    return value;
}

// `sum` plus the products of the words' bytes.
__device__ __forceinline__ unsigned dot_bytes(unsigned a, unsigned b, unsigned sum) {
#if defined(__CUDA_ARCH__)
    return __dp4a(a, b, sum);
#else
    for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xff) * (b >> i & 0xff);
    return sum;
#endif
}

// The minimum over a warp, in every lane.
__device__ __forceinline__ int warp_min(int value) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
        const int other = __shfl_xor_sync(kFullWarp, value, offset);
        if (other < value) value = other;
    }
    return value;
}

// The sum over a block, in every thread. `scratch`: shared memory for 32 values, which other code may use after the
// next barrier.
template <class T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, warps = int(blockDim.x) / kWarp;
    value = warp_sum(value);
    __syncthreads();  // other threads may still read `scratch` for an earlier call
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : T(0));
}

// ---- Memory --------------------------------------------------------------------------------------------------------
// `count` adjacent values that one instruction moves: at most 16 bytes, at an address that is a multiple of their size.
template <class T, int count>
struct alignas(sizeof(T) * count) Pack {
    T value[count];  // in the order of memory
};

template <int bytes>
struct WordOf;  // a type of that many bytes, which one instruction moves
template <>
struct WordOf<4> {
    using type = unsigned;
};
template <>
struct WordOf<8> {
    using type = uint2;
};
template <>
struct WordOf<16> {
    using type = uint4;
};

// A pack as loaded from memory. Code extracts values from its words where it uses them. Extracting them earlier, where
// the paths of whole and partial packs join, would make the next load wait for this one.
template <class T, int count>
struct Loaded {
    static constexpr int kPerWord = 4 / int(sizeof(T));  // values per word
    unsigned word[count / kPerWord];                     // the values, in the order of memory

    __device__ __forceinline__ T operator[](int i) const {
        const unsigned from = word[i / kPerWord] >> i % kPerWord * int(8 * sizeof(T));
        T value;
        if constexpr (sizeof(T) == 4) {
            memcpy(&value, &from, sizeof value);
        } else if constexpr (sizeof(T) == 2) {
            const uint16_t bits = uint16_t(from);
            memcpy(&value, &bits, sizeof value);
        } else {
            value = T(from & 0xff);
        }
        return value;
    }
};

// Reads and writes of data that need not stay in the caches.
template <class T, int count>
__device__ __forceinline__ Loaded<T, count> load_streaming(const T* from) {
    using Word = typename WordOf<int(sizeof(T)) * count>::type;
    const Word word = __ldcs(reinterpret_cast<const Word*>(from));
    Loaded<T, count> loaded;
    memcpy(loaded.word, &word, sizeof word);
    return loaded;
}

template <class T, int count>
__device__ __forceinline__ Loaded<T, count> load_cached(const T* from) {
    using Word = typename WordOf<int(sizeof(T)) * count>::type;
    const Word word = __ldg(reinterpret_cast<const Word*>(from));
    Loaded<T, count> loaded;
    memcpy(loaded.word, &word, sizeof word);
    return loaded;
}

template <class T, int count>
__device__ __forceinline__ void store_streaming(T* to, const Pack<T, count>& pack) {
    using Word = typename WordOf<int(sizeof(T)) * count>::type;
    Word word;
    memcpy(&word, &pack, sizeof word);
    __stcs(reinterpret_cast<Word*>(to), word);
}

inline bool is_aligned(const void* address, size_t bytes) {
    return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// Converts float32 to a tensor's type.
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float value) {
    return to_bfloat16(value);
}
template <>
__device__ __forceinline__ Half from_float<Half>(float value) {
    return to_half(value);
}

// Converts float32 to a pack of a tensor's type; bfloat16 two at a time.
template <class T, int count>
__device__ __forceinline__ Pack<T, count> pack_of(const float (&values)[count]) {
    Pack<T, count> pack;
#if defined(__CUDA_ARCH__)
    if constexpr (std::is_same_v<T, BFloat16>) {
        unsigned words[count / 2];
#pragma unroll
        for (int i = 0; i < count / 2; ++i) {
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
        }
        memcpy(&pack, words, sizeof pack);
    } else
#endif
    {
#pragma unroll
        for (int i = 0; i < count; ++i) pack.value[i] = from_float<T>(values[i]);
    }
    return pack;
}

// ---- The last block ------------------------------------------------------------------------------------------------
// True in the last block that calls this; it sees all writes of the other blocks. `ticket` must be 0 before the launch
// and is 0 again after it, so that a captured graph can replay. `flag`: one int of shared memory.
__device__ __forceinline__ bool is_last_block(unsigned* ticket, int* flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned taken = atomicAdd(ticket, 1u);
        *flag = taken == gridDim.x - 1;
        if (*flag) *ticket = 0;
    }
    __syncthreads();
    __threadfence();
    return *flag != 0;
}

}  // namespace turnwise::cuda
