// A vector of floats, with the operators of a float, for the instruction set that this translation unit is compiled
// for. Everything is in an unnamed namespace: units compiled with different flags must not share one inline function.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace turnwise {
namespace {

#define TW_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)

struct Lanes {
    static constexpr int count = 16;
};
struct VecF {
    __m512 v;
};
struct VecM {
    __mmask16 v;
};
struct VecN {
    __m512i v;
};
TW_INLINE VecF broadcast(float x) {
    return {_mm512_set1_ps(x)};
}
TW_INLINE VecF load(const float* p) {
    return {_mm512_loadu_ps(p)};
}
TW_INLINE void store(float* p, VecF a) {
    _mm512_storeu_ps(p, a.v);
}
TW_INLINE void stream(float* p, VecF a) {
    _mm512_stream_ps(p, a.v);
}
TW_INLINE VecM load_mask(const uint8_t* p) {
    return {_mm512_cmpneq_epi32_mask(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), _mm512_setzero_si512())};
}
TW_INLINE VecM all_true() {
    return {__mmask16(0xffff)};
}
TW_INLINE VecF operator+(VecF a, VecF b) {
    return {_mm512_add_ps(a.v, b.v)};
}
TW_INLINE VecF operator-(VecF a, VecF b) {
    return {_mm512_sub_ps(a.v, b.v)};
}
TW_INLINE VecF operator*(VecF a, VecF b) {
    return {_mm512_mul_ps(a.v, b.v)};
}
TW_INLINE VecF operator/(VecF a, VecF b) {
    return {_mm512_div_ps(a.v, b.v)};
}
TW_INLINE VecM operator<(VecF a, VecF b) {
    return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)};
}
TW_INLINE VecM operator&(VecM a, VecM b) {
    return {__mmask16(a.v & b.v)};
}
TW_INLINE VecM operator|(VecM a, VecM b) {
    return {__mmask16(a.v | b.v)};
}
TW_INLINE VecF fma(VecF a, VecF b, VecF c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
TW_INLINE VecF vec_min(VecF a, VecF b) {
    return {_mm512_min_ps(a.v, b.v)};
}
TW_INLINE VecF vec_max(VecF a, VecF b) {
    return {_mm512_max_ps(a.v, b.v)};
}
TW_INLINE VecF vec_select(VecM m, VecF a, VecF b) {
    return {_mm512_mask_blend_ps(m.v, b.v, a.v)};
}
// n, and `by` more where m is true
TW_INLINE VecN count(VecN n, VecM m, int by) {
    return {_mm512_mask_add_epi32(n.v, m.v, n.v, _mm512_set1_epi32(by))};
}
TW_INLINE VecM differs(VecF a, VecF b) {
    return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_OQ)};
}  // never for NaN
// 2^n, where the low bits of `shifted` hold the integer n.
TW_INLINE VecF power_of_two(VecF shifted) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3f800000)))};
}

#elif defined(__AVX2__)

struct Lanes {
    static constexpr int count = 8;
};
struct VecF {
    __m256 v;
};
struct VecM {
    __m256 v;
};
struct VecN {
    __m256i v;
};
TW_INLINE VecF broadcast(float x) {
    return {_mm256_set1_ps(x)};
}
TW_INLINE VecF load(const float* p) {
    return {_mm256_loadu_ps(p)};
}
TW_INLINE void store(float* p, VecF a) {
    _mm256_storeu_ps(p, a.v);
}
TW_INLINE void stream(float* p, VecF a) {
    _mm256_stream_ps(p, a.v);
}
TW_INLINE VecM load_mask(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(wide, _mm256_setzero_si256()))};
}
TW_INLINE VecM all_true() {
    return {_mm256_castsi256_ps(_mm256_set1_epi32(-1))};
}
TW_INLINE VecF operator+(VecF a, VecF b) {
    return {_mm256_add_ps(a.v, b.v)};
}
TW_INLINE VecF operator-(VecF a, VecF b) {
    return {_mm256_sub_ps(a.v, b.v)};
}
TW_INLINE VecF operator*(VecF a, VecF b) {
    return {_mm256_mul_ps(a.v, b.v)};
}
TW_INLINE VecF operator/(VecF a, VecF b) {
    return {_mm256_div_ps(a.v, b.v)};
}
TW_INLINE VecM operator<(VecF a, VecF b) {
    return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)};
}
TW_INLINE VecM operator&(VecM a, VecM b) {
    return {_mm256_and_ps(a.v, b.v)};
}
TW_INLINE VecM operator|(VecM a, VecM b) {
    return {_mm256_or_ps(a.v, b.v)};
}
TW_INLINE VecF fma(VecF a, VecF b, VecF c) {
    return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
TW_INLINE VecF vec_min(VecF a, VecF b) {
    return {_mm256_min_ps(a.v, b.v)};
}
TW_INLINE VecF vec_max(VecF a, VecF b) {
    return {_mm256_max_ps(a.v, b.v)};
}
TW_INLINE VecF vec_select(VecM m, VecF a, VecF b) {
    return {_mm256_blendv_ps(b.v, a.v, m.v)};
}
TW_INLINE VecN count(VecN n, VecM m, int by) {
    return {_mm256_add_epi32(n.v, _mm256_and_si256(_mm256_castps_si256(m.v), _mm256_set1_epi32(by)))};
}
TW_INLINE VecM differs(VecF a, VecF b) {
    return {_mm256_cmp_ps(a.v, b.v, _CMP_NEQ_OQ)};
}
TW_INLINE VecF power_of_two(VecF shifted) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3f800000)))};
}

#else  // the compiler's own vectors: SSE2 on x86-64, NEON on aarch64

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
struct Lanes {
    static constexpr int count = 4;
};
struct VecF {
    Float4 v;
};
struct VecM {
    Int4 v;
};
struct VecN {
    Int4 v;
};
TW_INLINE VecF broadcast(float x) {
    return {Float4{x, x, x, x}};
}
TW_INLINE VecF load(const float* p) {
    VecF a;
    std::memcpy(&a.v, p, sizeof a.v);
    return a;
}
TW_INLINE void store(float* p, VecF a) {
    std::memcpy(p, &a.v, sizeof a.v);
}
TW_INLINE void stream(float* p, VecF a) {
    store(p, a);
}
TW_INLINE VecM load_mask(const uint8_t* p) {
    return {Int4{p[0], p[1], p[2], p[3]} != Int4{0, 0, 0, 0}};
}
TW_INLINE VecM all_true() {
    return {Int4{-1, -1, -1, -1}};
}
TW_INLINE VecF operator+(VecF a, VecF b) {
    return {a.v + b.v};
}
TW_INLINE VecF operator-(VecF a, VecF b) {
    return {a.v - b.v};
}
TW_INLINE VecF operator*(VecF a, VecF b) {
    return {a.v * b.v};
}
TW_INLINE VecF operator/(VecF a, VecF b) {
    return {a.v / b.v};
}
TW_INLINE VecM operator<(VecF a, VecF b) {
    return {a.v < b.v};
}
TW_INLINE VecM operator&(VecM a, VecM b) {
    return {a.v & b.v};
}
TW_INLINE VecM operator|(VecM a, VecM b) {
    return {a.v | b.v};
}
TW_INLINE VecF fma(VecF a, VecF b, VecF c) {
    return {a.v * b.v + c.v};
}
TW_INLINE VecF vec_select(VecM m, VecF a, VecF b) {
    return {(Float4)(((Int4)a.v & m.v) | ((Int4)b.v & ~m.v))};
}
TW_INLINE VecF vec_min(VecF a, VecF b) {
    return vec_select(a < b, a, b);
}
TW_INLINE VecF vec_max(VecF a, VecF b) {
    return vec_select(b < a, a, b);
}
TW_INLINE VecN count(VecN n, VecM m, int by) {
    return {n.v + (m.v & by)};
}
TW_INLINE VecM differs(VecF a, VecF b) {
    return (a < b) | (b < a);
}
TW_INLINE VecF power_of_two(VecF shifted) {
    return {(Float4)(((Int4)shifted.v << 23) + 0x3f800000)};
}

#endif

TW_INLINE VecF operator-(VecF a) {
    return broadcast(-0.0f) - a;
}
TW_INLINE VecM operator>(VecF a, VecF b) {
    return b < a;
}

TW_INLINE void spread(float x, VecF& out) {
    out = broadcast(x);
}
TW_INLINE void load_into(const float* from, VecF& out) {
    out = load(from);
}
TW_INLINE void load_into(const uint8_t* from, VecM& out) {
    out = load_mask(from);
}
TW_INLINE void all_true_into(VecM& out) {
    out = all_true();
}
// The same number in every lane of a vector, or of what stands for one.
template <class V>
TW_INLINE V broadcast_to(float x) {
    V out;
    spread(x, out);
    return out;
}

// exp(x) for |x| <= 80, to 2 ulp: x = n ln 2 + r, exp(r) = 1 + r + r^2 q(r) with q fitted to least the largest relative
// error on |r| <= ln(2)/2. NaN stays NaN.
template <class V>
TW_INLINE V vec_exp(V x) {
    const auto set = [](float c) { return broadcast_to<V>(c); };
    const V shift = set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which the low bits hold
    const V shifted = fma(x, set(1.442695041f), shift);
    const V n = shifted - shift;
    const V r = fma(n, set(-1.7409306e-3f), fma(n, set(-0.69140625f), x));
    V q = fma(r, set(1.3814539e-3f), set(8.368745e-3f));
    q = fma(q, r, set(4.166839e-2f));
    q = fma(q, r, set(1.6666521e-1f));
    q = fma(q, r, set(4.9999994e-1f));
    return fma(q * r, r, r + set(1.0f)) * power_of_two(shifted);
}

// Lane by lane in a fixed order, in double.
TW_INLINE double sum_lanes(VecF a) {
#if defined(__AVX512F__)
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a.v));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1));
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
#endif
    float lanes[Lanes::count];
    store(lanes, a);
    double total = 0;
    for (float lane : lanes) total += lane;
    return total;
}

// The sums of the low and the high 16 bits of every lane.
struct Counts {
    int64_t low, high;
};
TW_INLINE Counts sum_lanes(VecN n) {
    uint32_t lanes[Lanes::count];
    std::memcpy(lanes, &n.v, sizeof lanes);
    Counts total{0, 0};
    for (uint32_t lane : lanes) {
        total.low += lane & 0xffff;
        total.high += lane >> 16;
    }
    return total;
}

TW_INLINE float max_lanes(VecF a) {
    float lanes[Lanes::count];
    store(lanes, a);
    float largest = lanes[0];
    for (float lane : lanes) largest = lane > largest ? lane : largest;
    return largest;
}

}  // namespace
}  // namespace turnwise
