// Two vectors with the operators of one. Arithmetic on a pair gives the processor two independent chains of operations,
// interleaved; its window is too small to find the second chain by itself.
#pragma once

#include "core/simd.h"

namespace turnwise {
namespace {

struct PairF {
    VecF a, b;  // lanes 0 ... count - 1, then count ... 2 count - 1
};
struct PairM {
    VecM a, b;  // as PairF
};

#define TW_PAIR_OPERATOR(Result, Operand, op)            \
    TW_INLINE Result operator op(Operand x, Operand y) { \
        return {x.a op y.a, x.b op y.b};                 \
    }
TW_PAIR_OPERATOR(PairF, PairF, +)
TW_PAIR_OPERATOR(PairF, PairF, -)
TW_PAIR_OPERATOR(PairF, PairF, *)
TW_PAIR_OPERATOR(PairF, PairF, /)
TW_PAIR_OPERATOR(PairM, PairF, <)
TW_PAIR_OPERATOR(PairM, PairF, >)
TW_PAIR_OPERATOR(PairM, PairM, &)
TW_PAIR_OPERATOR(PairM, PairM, |)
#undef TW_PAIR_OPERATOR

TW_INLINE PairF operator-(PairF x) {
    return {-x.a, -x.b};
}
TW_INLINE PairF fma(PairF x, PairF y, PairF z) {
    return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)};
}
TW_INLINE PairF vec_min(PairF x, PairF y) {
    return {vec_min(x.a, y.a), vec_min(x.b, y.b)};
}
TW_INLINE PairF vec_max(PairF x, PairF y) {
    return {vec_max(x.a, y.a), vec_max(x.b, y.b)};
}
TW_INLINE PairF vec_select(PairM m, PairF x, PairF y) {
    return {vec_select(m.a, x.a, y.a), vec_select(m.b, x.b, y.b)};
}
TW_INLINE PairM unless(PairM m, PairM n) {
    return {unless(m.a, n.a), unless(m.b, n.b)};
}
TW_INLINE PairM unless_less(PairM m, PairF x, PairF y) {
    return {unless_less(m.a, x.a, y.a), unless_less(m.b, x.b, y.b)};
}
TW_INLINE PairM unless_differs(PairM m, PairF x, PairF y) {
    return {unless_differs(m.a, x.a, y.a), unless_differs(m.b, x.b, y.b)};
}
TW_INLINE VecN count(VecN n, PairM m) {
#if defined(__AVX512F__)
    return count(n, m.a, m.b);
#else
    return count(count(n, m.a), m.b);
#endif
}
TW_INLINE VecF add_where(PairM m, VecF sum, PairF x) {
    return add_where(m.b, add_where(m.a, sum, x.a), x.b);
}
TW_INLINE VecF max_where(PairM m, VecF top, PairF x) {
    return max_where(m.b, max_where(m.a, top, x.a), x.b);
}
TW_INLINE VecF add(VecF sum, PairF x) {
    return sum + (x.a + x.b);
}
TW_INLINE PairF times_power_of_two(PairF x, PairF n, PairF shifted) {
    return {times_power_of_two(x.a, n.a, shifted.a), times_power_of_two(x.b, n.b, shifted.b)};
}
TW_INLINE void spread(float x, PairF& out) {
    out = {broadcast(x), broadcast(x)};
}
TW_INLINE void load_into(const float* from, PairF& out) {
    out = {load(from), load(from + Lanes::count)};
}
TW_INLINE void load_into(const uint8_t* from, PairM& out) {
#if defined(__AVX512F__)
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)from);
    const __mmask32 both = _mm256_test_epi8_mask(bytes, bytes);
    out = {{__mmask16(both)}, {__mmask16(_kshiftri_mask32(both, 16))}};
#else
    out = {load_mask(from), load_mask(from + Lanes::count)};
#endif
}
TW_INLINE void all_true_into(PairM& out) {
    out = {all_true(), all_true()};
}
TW_INLINE void store(float* to, PairF x) {
    store(to, x.a);
    store(to + Lanes::count, x.b);
}
TW_INLINE void stream(float* to, PairF x) {
    stream(to, x.a);
    stream(to + Lanes::count, x.b);
}
}  // namespace
}  // namespace turnwise
