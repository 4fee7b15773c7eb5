// bfloat16 and IEEE half as bit patterns, and their conversion to and from float32 (round to nearest, ties to even).
#pragma once

#include <cstdint>
#include <cstring>

#include "core/host_device.h"

namespace turnwise {

struct BFloat16 {
    uint16_t bits;  // sign 1, exponent 8, mantissa 7
};
struct Half {
    uint16_t bits;  // sign 1, exponent 5, mantissa 10
};

static TW_HD float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static TW_HD uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static TW_HD float to_float(float value) {
    return value;
}
static TW_HD float to_float(BFloat16 value) {
    return float_of_bits(uint32_t(value.bits) << 16);
}

static TW_HD float to_float(Half value) {
#if defined(__CUDA_ARCH__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
#else
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
    const uint32_t magnitude = value.bits & 0x7fff;
    if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (magnitude << 13));
    // Multiplying by 2^112 corrects the exponent's bias, for subnormal numbers too.
    return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 13) * float_of_bits(0x77800000)));
#endif
}

static TW_HD BFloat16 to_bfloat16(float value) {
#if defined(__CUDA_ARCH__)
    BFloat16 narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
#else
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t((bits >> 16) | 0x40)};  // a quiet NaN
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
#endif
}

static TW_HD Half to_half(float value) {
#if defined(__CUDA_ARCH__)
    Half narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
#else
    const uint32_t bits = bits_of_float(value);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (magnitude >= 0x47800000) return {uint16_t(sign | 0x7c00)};  // 65536 and above
    if (magnitude < 0x38800000) {                                   // subnormal: adding 0.5 rounds at bit 2^-24
        return {uint16_t(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000))};
    }
    return {uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13))};
#endif
}

}  // namespace turnwise
