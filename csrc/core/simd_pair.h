// Two vectors side by side, with the operators of one: arithmetic written over a pair gives the processor two chains of
// operations in turn, where its window is too small to find the second by itself.
#pragma once

#include "core/simd.h"

namespace turnwise {
namespace {

struct PairF {
    VecF a, b;
};
struct PairM {
    VecM a, b;
};
struct PairN {
    VecN a, b;
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
TW_INLINE PairM differs(PairF x, PairF y) {
    return {differs(x.a, y.a), differs(x.b, y.b)};
}
TW_INLINE PairN count(PairN n, PairM m, int by) {
    return {count(n.a, m.a, by), count(n.b, m.b, by)};
}
TW_INLINE PairF power_of_two(PairF shifted) {
    return {power_of_two(shifted.a), power_of_two(shifted.b)};
}
TW_INLINE void spread(float x, PairF& out) {
    out = {broadcast(x), broadcast(x)};
}
TW_INLINE void load_into(const float* from, PairF& out) {
    out = {load(from), load(from + Lanes::count)};
}
TW_INLINE void load_into(const uint8_t* from, PairM& out) {
    out = {load_mask(from), load_mask(from + Lanes::count)};
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
TW_INLINE double sum_lanes(PairF x) {
    return sum_lanes(x.a) + sum_lanes(x.b);
}
TW_INLINE Counts sum_lanes(PairN n) {
    const Counts a = sum_lanes(n.a), b = sum_lanes(n.b);
    return {a.low + b.low, a.high + b.high};
}
TW_INLINE float max_lanes(PairF x) {
    return max_lanes(vec_max(x.a, x.b));
}

}  // namespace
}  // namespace turnwise
