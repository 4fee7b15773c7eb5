// Sums of doubles that blocks add up with integer atomics, so that no order of the additions changes a bit.
//
// A sum is a number in base 2^32 that ends at the smallest float32: digit k counts units of 2^(32 k - 149). A value of
// 53 bits touches at most three digits. Digits are signed 64-bit integers, so 2^31 additions fit without a carry. One
// more word records which values that are not finite came in.
#pragma once

#include "cuda/block.h"

namespace turnwise::cuda {

using Word = unsigned long long;

constexpr int kDigits = 11;                  // values below 2^190
constexpr int kSumWords = kDigits + 1;       // of one sum: its digits, then the values that are not finite
constexpr int kLowestExponent = 1075 - 149;  // of a double whose last bit counts 2^-149

enum NotFinite : Word { has_nan = 1, has_infinity = 2, has_minus_infinity = 4 };

// Adds a value to the sum whose words are `stride` apart, all 0 at first. Bits below 2^-149 are dropped, which no value
// that comes from float32 has. From 2^190 on a value counts as infinite.
__device__ __forceinline__ void add_exact(Word* sum, int stride, double value) {
    if (value == 0) return;
    const Word bits = Word(__double_as_longlong(value));
    const int exponent = int(bits >> 52 & 0x7ff), place = exponent - kLowestExponent;
    if (place >= (kDigits - 2) * 32) {
        const NotFinite kind = value != value ? has_nan : value > 0 ? has_infinity : has_minus_infinity;
        atomicOr(sum + kDigits * stride, Word(kind));
        return;
    }
    if (place <= -53) return;
    const Word mantissa = ((bits & ((Word(1) << 52) - 1)) | Word(1) << 52) >> (place < 0 ? -place : 0);
    const int shift = place < 0 ? 0 : place % 32, first = place < 0 ? 0 : place / 32;
    const Word low = mantissa << shift, high = shift == 0 ? 0 : mantissa >> (64 - shift);
    const Word parts[3] = {low & 0xffffffff, low >> 32, high};
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        if (parts[k] != 0) atomicAdd(sum + (first + k) * stride, value < 0 ? Word(0) - parts[k] : parts[k]);
    }
}

// The sum, rounded to a double. All additions must be visible.
__device__ __forceinline__ double read_exact(const Word* sum, int stride) {
    double value = 0;
#pragma unroll
    for (int k = kDigits - 1; k >= 0; --k) value = value * 0x1p32 + double((long long)__ldcg(sum + k * stride));
    switch (__ldcg(sum + kDigits * stride)) {
        case 0:
            return value * 0x1p-149;
        case has_infinity:
            return double(INFINITY);
        case has_minus_infinity:
            return -double(INFINITY);
        default:
            return double(NAN);
    }
}

}  // namespace turnwise::cuda
