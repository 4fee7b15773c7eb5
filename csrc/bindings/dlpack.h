// The part of DLPack's C exchange (version 1) that reads tensors: their memory, without one call into Python.
// https://dmlc.github.io/dlpack/latest/c_api.html; the layouts are fixed for as long as the major version is.
#pragma once

#include <cstdint>

namespace turnwise::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr const char* kTypeAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsuleName = "dlpack_exchange_api";

enum class DeviceType : int32_t { cpu = 1, cuda = 2, cuda_host = 3 };
enum class Code : uint8_t { integer = 0, unsigned_integer = 1, floating = 2, bfloat = 4, boolean = 6 };

struct Tensor {
    void* data;
    DeviceType device_type;
    int32_t device;
    int32_t dims;
    Code code;
    uint8_t bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;  // in elements
    uint64_t byte_offset;
};

struct ExchangeApi {
    uint32_t major, minor;
    const void* older;
    void (*allocate)();
    void (*own)();
    void (*to_object)();
    // 0, or -1 with a Python exception. Shape and strides belong to the object. May be null.
    int (*view)(void* object, Tensor* out);
    int (*current_stream)(DeviceType device_type, int32_t device, void** out);
};

}  // namespace turnwise::dlpack
