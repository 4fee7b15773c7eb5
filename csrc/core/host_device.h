// TW_HD marks functions that are compiled for both host and device.
#pragma once

#if defined(__CUDACC__)
#define TW_HD __host__ __device__ __forceinline__
#else
#define TW_HD inline __attribute__((always_inline))
#endif
