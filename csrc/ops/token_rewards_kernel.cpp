// Sums and reversed scans over the tokens of a row. This file is compiled once per instruction set; TW_ISA names the
// function that it exports. So nothing here may be an inline function with external linkage.
#include "ops/token_rewards_kernel.h"

#include <type_traits>

#include "core/float16.h"
#include "core/simd.h"

namespace turnwise {
namespace {

constexpr int kLanes = Lanes::count;

// ---- Vectors -------------------------------------------------------------------------------------------------------
#if defined(__AVX512F__)

// A VecF in double.
struct VecD {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();  // lanes 0-7 and 8-15
};
TW_INLINE void accumulate(VecD& sum, VecF a) {
    sum.low = _mm512_add_pd(sum.low, _mm512_cvtps_pd(_mm512_castps512_ps256(a.v)));
    sum.high = _mm512_add_pd(sum.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1)));
}
TW_INLINE VecD add(VecD a, VecD b) {
    return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)};
}
TW_INLINE double sum_lanes(VecD a) {  // halves, then their halves
    const __m512d eight = _mm512_add_pd(a.low, a.high);
    const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
TW_INLINE VecF load_wide(const BFloat16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
TW_INLINE VecF load_wide(const Half* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
TW_INLINE VecM is_not(VecF a, float value) {  // true for NaN
    return {_mm512_cmp_ps_mask(a.v, _mm512_set1_ps(value), _CMP_NEQ_UQ)};
}
TW_INLINE bool any(VecM m) {
    return m.v != 0;
}
template <int by>
TW_INLINE VecF shift_down(VecF a) {  // lane i gets lane i + by, the last get 0
    return {_mm512_castsi512_ps(_mm512_alignr_epi32(_mm512_setzero_si512(), _mm512_castps_si512(a.v), by))};
}
TW_INLINE float first_lane(VecF a) {
    return _mm512_cvtss_f32(a.v);
}

#elif defined(__AVX2__)

struct VecD {
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();  // lanes 0-3 and 4-7
};
TW_INLINE void accumulate(VecD& sum, VecF a) {
    sum.low = _mm256_add_pd(sum.low, _mm256_cvtps_pd(_mm256_castps256_ps128(a.v)));
    sum.high = _mm256_add_pd(sum.high, _mm256_cvtps_pd(_mm256_extractf128_ps(a.v, 1)));
}
TW_INLINE VecD add(VecD a, VecD b) {
    return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)};
}
TW_INLINE double sum_lanes(VecD a) {
    const __m256d four = _mm256_add_pd(a.low, a.high);
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
TW_INLINE VecF load_wide(const BFloat16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
TW_INLINE VecF load_wide(const Half* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))};
}
TW_INLINE VecM is_not(VecF a, float value) {
    return {_mm256_cmp_ps(a.v, _mm256_set1_ps(value), _CMP_NEQ_UQ)};
}
TW_INLINE bool any(VecM m) {
    return _mm256_movemask_ps(m.v) != 0;
}
template <int by>
TW_INLINE VecF shift_down(VecF a) {
    const __m256 upper = _mm256_permute2f128_ps(a.v, a.v, 0x81);  // the high half, then zeros
    if constexpr (by == 4) return {upper};
    return {_mm256_castsi256_ps(_mm256_alignr_epi8(_mm256_castps_si256(upper), _mm256_castps_si256(a.v), 4 * by % 16))};
}
TW_INLINE float first_lane(VecF a) {
    return _mm256_cvtss_f32(a.v);
}

#else

typedef double Double2 __attribute__((vector_size(16)));
struct VecD {
    Double2 low{0, 0}, high{0, 0};  // lanes 0-1 and 2-3
};
TW_INLINE void accumulate(VecD& sum, VecF a) {
    sum.low += Double2{double(a.v[0]), double(a.v[1])};
    sum.high += Double2{double(a.v[2]), double(a.v[3])};
}
TW_INLINE VecD add(VecD a, VecD b) {
    return {a.low + b.low, a.high + b.high};
}
TW_INLINE double sum_lanes(VecD a) {
    const Double2 two = a.low + a.high;
    return two[0] + two[1];
}
template <class T>
TW_INLINE VecF load_wide(const T* p) {
    return {Float4{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}};
}
TW_INLINE VecM is_not(VecF a, float value) {
    return {a.v != Float4{value, value, value, value}};
}
TW_INLINE bool any(VecM m) {
    return (m.v[0] | m.v[1] | m.v[2] | m.v[3]) != 0;
}
template <int by>
TW_INLINE VecF shift_down(VecF a) {
    if constexpr (by == 1) return {Float4{a.v[1], a.v[2], a.v[3], 0}};
    return {Float4{a.v[2], a.v[3], 0, 0}};
}
TW_INLINE float first_lane(VecF a) {
    return a.v[0];
}

#endif

TW_INLINE VecF load_wide(const float* p) {
    return load(p);
}

// ---- Sums ----------------------------------------------------------------------------------------------------------
struct NoMask {};

// The trained lanes. Adds to `bad` the lanes of a float mask that are neither 0 nor 1.
TW_INLINE VecM read_mask(const NoMask*, VecM&) {
    return all_true();
}
TW_INLINE VecM read_mask(const uint8_t* mask, VecM&) {
    return load_mask(mask);
}
TW_INLINE VecM read_mask(const float* mask, VecM& bad) {
    const VecF value = load(mask);
    const VecM used = is_not(value, 0.0f);
    bad = bad | (used & is_not(value, 1.0f));
    return used;
}

// The first n of a vector's values, then zeros.
template <class T>
TW_INLINE VecF load_part(const T* from, int n) {
#if defined(__AVX512F__)
    const __mmask16 there = __mmask16((1u << n) - 1);
    if constexpr (std::is_same_v<T, float>) return {_mm512_maskz_loadu_ps(there, from)};
    T all[kLanes];
    if constexpr (sizeof(T) == 2) _mm256_storeu_si256((__m256i*)all, _mm256_maskz_loadu_epi16(there, from));
#else
    T all[kLanes] = {};
    for (int i = 0; i < n; ++i) all[i] = from[i];
#endif
    return load_wide(all);
}

// read_mask of the first n tokens; the others do not train.
TW_INLINE VecM read_mask_part(const NoMask*, int, VecM&) {
    return all_true();  // their values are 0
}
TW_INLINE VecM read_mask_part(const uint8_t* mask, int n, VecM&) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_maskz_loadu_epi8(__mmask16((1u << n) - 1), mask);
    return {_mm_test_epi8_mask(bytes, bytes)};
#else
    uint8_t all[kLanes];
    for (int i = 0; i < kLanes; ++i) all[i] = i < n ? mask[i] : 0;
    return load_mask(all);
#endif
}
TW_INLINE VecM read_mask_part(const float* mask, int n, VecM& bad) {
    const VecF value = load_part(mask, n);
    const VecM used = is_not(value, 0.0f);
    bad = bad | (used & is_not(value, 1.0f));
    return used;
}

constexpr int kUnroll = 4;                  // independent sums
constexpr int kSumStep = kUnroll * kLanes;  // tokens

template <class T, class Mask>
TW_INLINE void sum_step(const T* rewards, const Mask* mask, VecD* sums, VecM& bad) {
    const VecF zero = broadcast(0.0f);
    for (int k = 0; k < kUnroll; ++k) {
        const VecF value = load_wide(rewards + k * kLanes);
        accumulate(sums[k], vec_select(read_mask(mask + k * kLanes, bad), value, zero));
    }
}

// Prefetches kAhead bytes of rewards ahead. The processor's own prefetcher does not keep up with two streams: this
// makes a sum of masked rewards three times as fast. After the end of these tokens it continues with the next ones.
// `near` prefetches into the first-level cache. If there is a gap before the next tokens, the second level is better,
// because it can have more loads in flight.
constexpr int64_t kAhead = 4096;

template <bool near, class T>
TW_INLINE void fetch(const T* from, int64_t place, int64_t n, const void* next, int64_t ahead) {
    const int64_t wanted = place + ahead;
    const char* address =
        wanted < n || next == nullptr ? (const char*)(from + wanted) : (const char*)((const T*)next + (wanted - n));
    for (size_t line = 0; line < kSumStep * sizeof(T); line += 64) __builtin_prefetch(address + line, 0, near ? 3 : 2);
}

template <class T, class Mask>
double sum(const void* all_rewards, const void* all_masks, int64_t n, const NextTokens& next, bool& bad) {
    constexpr bool has_mask = !__is_same(Mask, NoMask);
    const T* rewards = static_cast<const T*>(all_rewards);
    const Mask* mask = static_cast<const Mask*>(all_masks);
    VecM wrong = is_not(broadcast(0.0f), 0.0f);
    // A short row: the first of the vectors below.
    if (n <= kLanes) {
        VecD only;
        const VecM on = read_mask_part(mask, int(n), wrong);
        accumulate(only, vec_select(on, load_part(rewards, int(n)), broadcast(0.0f)));
        if constexpr (std::is_same_v<Mask, float>) bad = bad || any(wrong);
        return sum_lanes(only);
    }
    // Full steps, with prefetches.
    VecD sums[kUnroll];
    int64_t i = 0;
    const auto sum_steps = [&](auto near) {
        for (; i + kSumStep <= n; i += kSumStep) {
            constexpr int64_t ahead = kAhead / int64_t(sizeof(T));
            fetch<near.value>(rewards, i, n, next.rewards, ahead);
            if constexpr (has_mask) fetch<near.value>(mask, i, n, next.mask, ahead);
            sum_step(rewards + i, has_mask ? mask + i : mask, sums, wrong);
        }
    };
    if (next.rewards == nullptr || next.rewards == rewards + n) {
        sum_steps(std::true_type{});
    } else {
        sum_steps(std::false_type{});
    }
    // The rest, vector by vector.
    for (int k = 0; i < n; ++k, i += kLanes) {
        const int part = int(n - i < kLanes ? n - i : kLanes);
        const VecM on = read_mask_part(has_mask ? mask + i : mask, part, wrong);
        accumulate(sums[k], vec_select(on, load_part(rewards + i, part), broadcast(0.0f)));
    }
    if constexpr (std::is_same_v<Mask, float>) bad = bad || any(wrong);
    // In the order of a short row, whose other vectors are 0.
    return sum_lanes(add(add(sums[0], sums[2]), add(sums[1], sums[3])));
}

// The sums of adjacent rows.
template <class T, class Mask>
void sum_rows(const RewardRows& rows, double* totals, bool& bad) {
    const T* rewards = static_cast<const T*>(rows.rewards);
    const Mask* mask = static_cast<const Mask*>(rows.mask);
    for (int64_t row = rows.first; row < rows.last; ++row) {
        const int64_t start = rows.starts ? rows.starts[row] : 0;
        const int64_t n = rows.lengths ? rows.lengths[row] : rows.starts ? rows.starts[row + 1] - start : rows.width;
        const T* own = rewards + (rows.starts ? start : row * rows.reward_stride);
        const Mask* own_mask = __is_same(Mask, NoMask) ? mask : mask + (rows.starts ? start : row * rows.mask_stride);
        totals[row] = sum<T, Mask>(own, own_mask, n, {own + n, __is_same(Mask, NoMask) ? mask : own_mask + n}, bad);
    }
}

// ---- Scans ---------------------------------------------------------------------------------------------------------
// See ScanPowers.
void make_powers(double factor, ScanPowers& powers) {
    double power = 1;
    for (int c = 0; c <= 16; ++c, power *= factor) powers.whole[c] = power;
    for (int k = 0; k < 4; ++k) powers.step[k] = float(powers.whole[1 << k]);
    for (int i = 0; i < 2 * kLanes; ++i) powers.falling[i] = i < kLanes ? float(powers.whole[kLanes - i]) : 0.0f;
}

// Lane i: the sum over j >= i of factor^(j - i) x[j].
TW_INLINE VecF scan_lanes(VecF x, const ScanPowers& powers) {
    x = fma(broadcast(powers.step[0]), shift_down<1>(x), x);
    x = fma(broadcast(powers.step[1]), shift_down<2>(x), x);
    if constexpr (kLanes > 4) x = fma(broadcast(powers.step[2]), shift_down<4>(x), x);
#if defined(__AVX512F__)
    x = fma(broadcast(powers.step[3]), shift_down<8>(x), x);
#endif
    return x;
}

// Moves the trained values of a tile together and returns their number. May write up to one vector beyond them.
int compact(const float* from, const uint8_t* mask, int n, float* to) {
    int found = 0, i = 0;
#if defined(__AVX512F__)
    for (; i + kLanes <= n; i += kLanes) {
        const VecM m = load_mask(mask + i);
        store(to + found, {_mm512_maskz_compress_ps(m.v, load(from + i).v)});
        found += __builtin_popcount(m.v);
    }
#endif
    for (; i < n; ++i) {
        to[found] = from[i];
        found += mask[i] != 0;
    }
    return found;
}

// Moves compacted values back to the trained tokens; masked tokens get 0.
void expand(const float* from, const uint8_t* mask, int n, float* to) {
    int used = 0, i = 0;
#if defined(__AVX512F__)
    for (; i + kLanes <= n; i += kLanes) {
        const VecM m = load_mask(mask + i);
        store(to + i, {_mm512_maskz_expand_ps(m.v, load(from + used).v)});
        used += __builtin_popcount(m.v);
    }
#endif
    for (; i < n; ++i) {
        to[i] = mask[i] ? from[used] : 0.0f;
        used += mask[i] != 0;
    }
}

// A few tokens one by one. Not inlined, so that its bits are the same wherever the tokens come from. The outputs may be
// the inputs.
template <bool has_values>
__attribute__((noinline)) void scan_few(const ScanTile& t, const ScanPowers& powers, ScanCarry& carry) {
    for (int i = t.n - 1; i >= 0; --i) {
        const bool on = !t.mask || t.mask[i] != 0;
        double result = double(t.rewards[i]) + powers.whole[1] * carry.returns;
        if constexpr (has_values) {
            const float value = t.values[i];
            result += double(powers.value) * double(carry.value);
            t.advantages[i] = on ? float(result - double(value)) : 0.0f;
            carry.value = on ? value : carry.value;
        }
        t.returns[i] = on ? float(result) : 0.0f;
        carry.returns = on ? result : carry.returns;
    }
}

// Removes masked tokens first, so the scan sees only trained ones. For gae it computes the returns
// R[t] = r[t] + gamma ((1 - lambda) V[t + 1] + lambda R[t + 1]), and advantages are R - V. This equals the sum of
// discounted errors, without the cancellation in each error. The carry is double, so long rows stay accurate.
template <bool has_values>
void scan(const ScanTile& t, const ScanPowers& given, ScanCarry& carry) {
    constexpr int kRoom = kScanTile + 2 * kLanes;
    alignas(64) float rewards[kRoom], values[has_values ? kRoom : 1], advantages[has_values ? kRoom : 1];
    if (t.n <= kShortScan) return scan_few<has_values>(t, given, carry);
    int n = t.n;
    if (t.mask) {
        n = compact(t.rewards, t.mask, t.n, rewards);
        if constexpr (has_values) compact(t.values, t.mask, t.n, values);
        if (n <= kShortScan) {
            scan_few<has_values>({n, rewards, values, nullptr, advantages, rewards, false}, given, carry);
            expand(rewards, t.mask, t.n, t.returns);
            if constexpr (has_values) expand(advantages, t.mask, t.n, t.advantages);
            return;
        }
    } else {
        std::memcpy(rewards, t.rewards, size_t(n) * sizeof(float));
        if constexpr (has_values) std::memcpy(values, t.values, size_t(n) * sizeof(float));
    }
    // Zeros after the tokens; the value of the next trained token comes first.
    const bool direct = n == t.n;
    const VecF zero = broadcast(0.0f);
    store(rewards + n, zero);
    if constexpr (has_values) {
        store(values + n, zero);
        values[n] = carry.value;
        store(values + n + 1, zero);
        carry.value = n > 0 ? values[0] : carry.value;
    }
    const ScanPowers powers = given;  // a copy that no store can alias
    const auto put = [&](float* to, VecF x) { t.stream ? stream(to, x) : store(to, x); };
    // Vector by vector from the last token: a scan of the lanes, plus the carry times falling powers.
    for (int i = (n - 1) / kLanes * kLanes; i >= 0 && n > 0; i -= kLanes) {
        const int c = n - i < kLanes ? n - i : kLanes;
        VecF x = load(rewards + i);
        VecF value = zero;
        if constexpr (has_values) {
            x = fma(broadcast(powers.value), load(values + i + 1), x);
            value = load(values + i);
        }
        x = scan_lanes(x, powers);
        const VecF result = fma(load(powers.falling + kLanes - c), broadcast(float(carry.returns)), x);
        carry.returns = double(first_lane(x)) + powers.whole[c] * carry.returns;
        // Without masked tokens a full vector goes straight to the output; otherwise results replace the inputs.
        if (direct && c == kLanes) {
            put(t.returns + i, result);
            if constexpr (has_values) put(t.advantages + i, result - value);
            continue;
        }
        store(rewards + i, result);
        if constexpr (has_values) store(advantages + i, result - value);
        if (direct) {
            std::memcpy(t.returns + i, rewards + i, size_t(c) * sizeof(float));
            if constexpr (has_values) std::memcpy(t.advantages + i, advantages + i, size_t(c) * sizeof(float));
        }
    }
    if (direct) return;
    expand(rewards, t.mask, t.n, t.returns);
    if constexpr (has_values) expand(advantages, t.mask, t.n, t.advantages);
}

constexpr TokenRewardsKernels kKernels = {
    {{sum<float, NoMask>, sum<float, uint8_t>, sum<float, float>},
     {sum<BFloat16, NoMask>, sum<BFloat16, uint8_t>, sum<BFloat16, float>},
     {sum<Half, NoMask>, sum<Half, uint8_t>, sum<Half, float>}},
    {{sum_rows<float, NoMask>, sum_rows<float, uint8_t>, sum_rows<float, float>},
     {sum_rows<BFloat16, NoMask>, sum_rows<BFloat16, uint8_t>, sum_rows<BFloat16, float>},
     {sum_rows<Half, NoMask>, sum_rows<Half, uint8_t>, sum_rows<Half, float>}},
    make_powers,
    scan<false>,
    scan<true>,
};

}  // namespace

const TokenRewardsKernels& TW_ISA() {
    return kKernels;
}

}  // namespace turnwise
