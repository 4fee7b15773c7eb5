// Loads and stores vectors of floats as float32, bf16 or f16: all lanes, or the first n.
#pragma once

#include "core/float16.h"
#include "core/simd.h"

namespace turnwise {
namespace {

TW_INLINE void from_float(float value, float* to) {
    *to = value;
}
TW_INLINE void from_float(float value, BFloat16* to) {
    *to = to_bfloat16(value);
}
TW_INLINE void from_float(float value, Half* to) {
    *to = to_half(value);
}

#if defined(__AVX512F__)

TW_INLINE VecF load(const BFloat16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
TW_INLINE VecF load(const Half* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
TW_INLINE void store(BFloat16* p, VecF a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);  // rounding could turn a NaN into infinity
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}
TW_INLINE void store(Half* p, VecF a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__AVX2__)

TW_INLINE VecF load(const BFloat16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
TW_INLINE VecF load(const Half* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))};
}
TW_INLINE void store(BFloat16* p, VecF a) {
    const __m256i bits = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));  // rounding could make it infinity
    const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
TW_INLINE void store(Half* p, VecF a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#else

template <class T>
TW_INLINE VecF load(const T* p) {
    float lanes[Lanes::count];
    for (int i = 0; i < Lanes::count; ++i) lanes[i] = to_float(p[i]);
    return load(lanes);
}
template <class T>
TW_INLINE void store(T* p, VecF a) {
    float lanes[Lanes::count];
    store(lanes, a);
    for (int i = 0; i < Lanes::count; ++i) from_float(lanes[i], p + i);
}

#endif

// The first n lanes from memory; the other lanes are `rest`.
template <class T>
TW_INLINE VecF load_first(const T* p, int n, float rest) {
    float lanes[Lanes::count];
    for (int i = 0; i < Lanes::count; ++i) lanes[i] = i < n ? to_float(p[i]) : rest;
    return load(lanes);
}
template <class T>
TW_INLINE void store_first(T* p, int n, VecF a) {
    float lanes[Lanes::count];
    store(lanes, a);
    for (int i = 0; i < n; ++i) from_float(lanes[i], p + i);
}

}  // namespace
}  // namespace turnwise
