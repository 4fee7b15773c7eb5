// Vectors of float and of double behind one name, Simd<T>, for kernels that compute in either.
#pragma once

#include "core/simd.h"

namespace turnwise {
namespace {

typedef double Doubles __attribute__((vector_size(sizeof(VecF))));
struct VecD {
    Doubles v;  // one number per lane
};

template <class T>
struct Simd;

template <>
struct Simd<float> {
    using V = VecF;
    static constexpr int lanes = Lanes::count;
    static TW_INLINE V set(float x) { return broadcast(x); }
    static TW_INLINE V multiply_add(V a, V b, V c) { return fma(a, b, c); }
    static TW_INLINE V larger(V a, V b) { return vec_max(a, b); }
    static TW_INLINE float max(V a) { return max_lanes(a); }
    static TW_INLINE float sum(V a) {
#if defined(__AVX512F__)
        return _mm512_reduce_add_ps(a.v);
#else
        float lane[lanes], all = 0;
        store(lane, a);
        for (int i = 0; i < lanes / 2; ++i) lane[i] += lane[i + lanes / 2];
        for (int i = 0; i < lanes / 2; ++i) all += lane[i];
        return all;
#endif
    }
    // Weights below exp(-80) count as exp(-80): the largest weight of a row is 1. NaN stays NaN.
    static TW_INLINE V exp(V x) { return vec_exp(vec_max(broadcast(-80.0f), x)); }
    // a in the first n lanes, b in the others.
    static TW_INLINE V first(int64_t n, V a, V b) {
        float index[lanes];
        for (int i = 0; i < lanes; ++i) index[i] = float(i);
        return vec_select(load(index) < broadcast(float(n)), a, b);
    }
};

TW_INLINE VecD load(const double* p) {
    VecD a;
    std::memcpy(&a.v, p, sizeof a.v);
    return a;
}
TW_INLINE void store(double* p, VecD a) {
    std::memcpy(p, &a.v, sizeof a.v);
}
TW_INLINE VecD operator+(VecD a, VecD b) {
    return {a.v + b.v};
}
TW_INLINE VecD operator-(VecD a, VecD b) {
    return {a.v - b.v};
}
TW_INLINE VecD operator*(VecD a, VecD b) {
    return {a.v * b.v};
}

template <>
struct Simd<double> {
    using V = VecD;
    static constexpr int lanes = int(sizeof(VecF) / sizeof(double));
    static TW_INLINE V set(double x) { return {Doubles{} + x}; }
    static TW_INLINE V multiply_add(V a, V b, V c) { return {a.v * b.v + c.v}; }
    static TW_INLINE V larger(V a, V b) {
        for (int i = 0; i < lanes; ++i) b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
        return b;
    }
    static TW_INLINE double max(V a) {
        double all = a.v[0];
        for (int i = 1; i < lanes; ++i) all = a.v[i] > all ? a.v[i] : all;
        return all;
    }
    static TW_INLINE double sum(V a) {
        double all = 0;
        for (int i = 0; i < lanes; ++i) all += a.v[i];
        return all;
    }
    static TW_INLINE V exp(V x) {
        for (int i = 0; i < lanes; ++i) x.v[i] = __builtin_exp(x.v[i]);
        return x;
    }
    static TW_INLINE V first(int64_t n, V a, V b) {
        for (int i = 0; i < lanes; ++i) a.v[i] = i < n ? a.v[i] : b.v[i];
        return a;
    }
};

}  // namespace
}  // namespace turnwise
