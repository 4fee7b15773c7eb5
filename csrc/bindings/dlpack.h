// The part of DLPack's C exchange API (version 1) that reads a tensor's memory without a call into Python.
// https://dmlc.github.io/dlpack/latest/c_api.html. The layouts stay the same within a major version.
#pragma once

#include <cstdint>

namespace turnwise::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr const char* kTypeAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsuleName = "dlpack_exchange_api";

enum class DeviceType : int32_t { cpu = 1, cuda = 2, cuda_host = 3 };
enum class Code : uint8_t { integer = 0, unsigned_integer = 1, floating = 2, bfloat = 4, boolean = 6 };

// DLTensor.
struct Tensor {
    void* data;  // start of the memory
    DeviceType device_type;
    int32_t device;        // index among the devices of that type
    int32_t dims;          // number of dimensions
    Code code;             // kind of number
    uint8_t bits;          // per number
    uint16_t lanes;        // numbers per element, 1 except for vector types
    int64_t* shape;        // [dims]
    int64_t* strides;      // [dims], in elements
    uint64_t byte_offset;  // of the first element from `data`
};

// DLPackExchangeAPI. The signatures of unused functions are left out.
struct ExchangeApi {
    uint32_t major, minor;  // version
    const void* older;      // the same API for an older version; unused
    void (*allocate)();     // unused
    void (*own)();          // unused
    void (*to_object)();    // unused
    // Fills `out` and returns 0, or returns -1 with a Python exception set. The object owns shape and strides. May be
    // null.
    int (*view)(void* object, Tensor* out);
    // Unused.
    int (*current_stream)(DeviceType device_type, int32_t device, void** out);
};

}  // namespace turnwise::dlpack
