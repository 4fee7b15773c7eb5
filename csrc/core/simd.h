// A vector of floats with the operators of a float, for the instruction set that this translation unit is compiled for.
// Everything is in an unnamed namespace, because units compiled with different flags must not share an inline function.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace turnwise {
namespace {

#define TW_INLINE inline __attribute__((always_inline))

#if defined(__AVX2__)
constexpr bool kFused = true;  // fma() rounds once
#else
constexpr bool kFused = false;  // fma() rounds the product and the sum
#endif

#if defined(__AVX512F__)

struct Lanes {
    static constexpr int count = 16;  // floats per vector
};
// Numbers.
struct VecF {
    __m512 v;  // one number per lane
};
// Truth values, one per lane.
struct VecM {
    __mmask16 v;  // one bit per lane
};
// Counters of truth values.
struct VecN {
    uint64_t v;  // the total of all lanes: a mask is an integer here, so its ones are counted at once
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
    return {_kand_mask16(a.v, b.v)};
}
TW_INLINE VecM operator|(VecM a, VecM b) {
    return {_kor_mask16(a.v, b.v)};
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
// n plus the true lanes of m; total(n) is the sum over all lanes.
TW_INLINE VecN count(VecN n, VecM m) {
    return {n.v + uint64_t(_mm_popcnt_u32(m.v))};
}
TW_INLINE VecN count(VecN n, VecM low, VecM high) {
    return {n.v + uint64_t(_mm_popcnt_u32(_mm512_kunpackw(high.v, low.v)))};
}
TW_INLINE int64_t total(VecN n) {
    return int64_t(n.v);
}
// a + b where m is true, else a. max_where: the larger of a and b.
TW_INLINE VecF add_where(VecM m, VecF a, VecF b) {
    return {_mm512_mask_add_ps(a.v, m.v, a.v, b.v)};
}
TW_INLINE VecF max_where(VecM m, VecF a, VecF b) {
    return {_mm512_mask_max_ps(a.v, m.v, a.v, b.v)};
}
// m and not n; m and not a < b; m and a == b. In the last two a comparison with NaN gives m.
TW_INLINE VecM unless(VecM m, VecM n) {
    return {_kandn_mask16(n.v, m.v)};
}
TW_INLINE VecM unless_less(VecM m, VecF a, VecF b) {
    return {_mm512_mask_cmp_ps_mask(m.v, a.v, b.v, _CMP_NLT_UQ)};
}
TW_INLINE VecM unless_differs(VecM m, VecF a, VecF b) {
    return {_mm512_mask_cmp_ps_mask(m.v, a.v, b.v, _CMP_EQ_UQ)};
}
// x 2^n for an integer n. The low bits of `shifted`, the third argument, hold n too.
TW_INLINE VecF times_power_of_two(VecF x, VecF n, VecF) {
    return {_mm512_scalef_ps(x.v, n.v)};
}

#elif defined(__AVX2__)

struct Lanes {
    static constexpr int count = 8;  // floats per vector
};
struct VecF {
    __m256 v;  // one number per lane
};
struct VecM {
    __m256 v;  // all bits of a lane are 1 where true
};
struct VecN {
    uint64_t v;  // the total of all lanes
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
TW_INLINE VecN count(VecN n, VecM m) {
    return {n.v + uint64_t(_mm_popcnt_u32(unsigned(_mm256_movemask_ps(m.v))))};
}
TW_INLINE int64_t total(VecN n) {
    return int64_t(n.v);
}
TW_INLINE VecM unless(VecM m, VecM n) {
    return {_mm256_andnot_ps(n.v, m.v)};
}
TW_INLINE VecM unless_less(VecM m, VecF a, VecF b) {
    return {_mm256_and_ps(m.v, _mm256_cmp_ps(a.v, b.v, _CMP_NLT_UQ))};
}
TW_INLINE VecM unless_differs(VecM m, VecF a, VecF b) {
    return {_mm256_and_ps(m.v, _mm256_cmp_ps(a.v, b.v, _CMP_EQ_UQ))};
}
TW_INLINE VecF times_power_of_two(VecF x, VecF, VecF shifted) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23);
    return x * VecF{_mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3f800000)))};
}

#else  // the compiler's own vectors: SSE2 on x86-64, NEON on aarch64

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
struct Lanes {
    static constexpr int count = 4;  // floats per vector
};
struct VecF {
    Float4 v;  // one number per lane
};
struct VecM {
    Int4 v;  // -1 where true
};
struct VecN {
    Int4 v;  // one counter per lane
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
TW_INLINE VecN count(VecN n, VecM m) {
    return {n.v - m.v};  // true is -1
}
TW_INLINE int64_t total(VecN n) {
    return int64_t(n.v[0]) + n.v[1] + n.v[2] + n.v[3];
}
TW_INLINE VecM unless(VecM m, VecM n) {
    return {m.v & ~n.v};
}
TW_INLINE VecM unless_less(VecM m, VecF a, VecF b) {
    return {m.v & ~(a < b).v};
}
TW_INLINE VecM unless_differs(VecM m, VecF a, VecF b) {
    return {m.v & ~((a < b) | (b < a)).v};
}
TW_INLINE VecF times_power_of_two(VecF x, VecF, VecF shifted) {
    return x * VecF{(Float4)(((Int4)shifted.v << 23) + 0x3f800000)};
}

#endif

TW_INLINE VecF operator-(VecF a) {
    return broadcast(-0.0f) - a;
}
TW_INLINE VecM operator>(VecF a, VecF b) {
    return b < a;
}
#if !defined(__AVX512F__)  // a + b, or the larger of the two, where m is true; else a
TW_INLINE VecF add_where(VecM m, VecF a, VecF b) {
    return a + vec_select(m, b, broadcast(0.0f));
}
TW_INLINE VecF max_where(VecM m, VecF a, VecF b) {
    return vec_select(m, vec_max(a, b), a);
}
#endif

TW_INLINE VecF add(VecF sum, VecF x) {
    return sum + x;
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
// A vector, or a pair of vectors, with x in every lane.
template <class V>
TW_INLINE V broadcast_to(float x) {
    V out;
    spread(x, out);
    return out;
}

// exp(x) to 2 ulp for |x| <= 80; if `near`, for |x| <= 20. x = n ln 2 + r and exp(r) = 1 + r + r^2 q(r). The polynomial
// q minimizes the largest relative error on |r| <= ln(2)/2. NaN stays NaN.
template <bool near, class V>
TW_INLINE V exp_within(V x) {
    const auto set = [](float c) { return broadcast_to<V>(c); };
    const V shift = set(12582912.0f), one = set(1.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const V shifted = fma(x, set(1.442695041f), shift);
    const V n = shifted - shift;
    // r = x - n ln 2. ln 2 has two parts, and the first has so few bits that n times it is exact. With `near` and a
    // fused multiply-add one part is enough, because n is small.
    const V r =
        near && kFused ? fma(n, set(-0.6931472f), x) : fma(n, set(-1.7409306e-3f), fma(n, set(-0.69140625f), x));
    const V rr = r * r;
    const V high = fma(rr, set(1.3814539e-3f), fma(r, set(8.368745e-3f), set(4.166839e-2f)));
    const V low = fma(r, set(1.6666521e-1f), set(4.9999994e-1f));
    return times_power_of_two(fma(rr, fma(rr, high, low), r + one), n, shifted);
}
template <class V>
TW_INLINE V vec_exp(V x) {
    return exp_within<false>(x);
}
template <class V>
TW_INLINE V vec_near_exp(V x) {
    return exp_within<true>(x);
}

// The sum of the lanes in double, in a fixed order.
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

TW_INLINE float max_lanes(VecF a) {
    float lanes[Lanes::count];
    store(lanes, a);
    float largest = lanes[0];
    for (float lane : lanes) largest = lane > largest ? lane : largest;
    return largest;
}

}  // namespace
}  // namespace turnwise
