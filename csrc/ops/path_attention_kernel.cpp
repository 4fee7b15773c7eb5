// The loops of attention of single queries. Compiled once per instruction set with TW_ISA naming the function that it
// exports, so nothing here may be an inline function with external linkage.
//
// The places of a row are read twice, for scores and for the output. Siblings follow one another and share their
// prompt, so it comes from the cache.
#include "ops/path_attention_kernel.h"

#include "core/simd_narrow.h"
#include "core/simd_real.h"

namespace turnwise {
namespace {

// What elements of type E are computed in.
template <class E>
struct Wide {
    using T = float;
};
template <>
struct Wide<double> {
    using T = double;
};

TW_INLINE double to_real(double x) {
    return x;
}
template <class E>
TW_INLINE float to_real(E x) {
    return to_float(x);
}
TW_INLINE void from_real(double x, double* to) {
    *to = x;
}
template <class E>
TW_INLINE void from_real(float x, E* to) {
    from_float(x, to);
}

// A head of `size` elements: N whole vectors, or if N is 0 any number of them and a rest.
template <class E, int N>
TW_INLINE typename Wide<E>::T dot(const E* a, const E* b, int64_t size) {
    using S = Simd<typename Wide<E>::T>;
    const int64_t vectors = N ? N : size / S::lanes;
    typename S::V sum = S::set(0);
    for (int64_t i = 0; i < vectors; ++i) {
        sum = S::multiply_add(load(a + i * S::lanes), load(b + i * S::lanes), sum);
    }
    typename Wide<E>::T rest = 0;
    for (int64_t d = vectors * S::lanes; d < size && !N; ++d) rest += to_real(a[d]) * to_real(b[d]);
    return S::sum(sum) + rest;
}

// Turns `count` scores into the weights of a softmax.
template <class T>
TW_INLINE void weigh(T* score, int64_t count) {
    using S = Simd<T>;
    // The last vector is filled up with copies of the first score, whose weights then become 0.
    const int64_t end = (count + S::lanes - 1) / S::lanes * S::lanes;
    for (int64_t i = count; i < end; ++i) score[i] = score[0];
    typename S::V most = load(score);
    for (int64_t i = S::lanes; i < end; i += S::lanes) most = S::larger(most, load(score + i));
    const typename S::V largest = S::set(S::max(most));
    for (int64_t i = 0; i < end; i += S::lanes) store(score + i, S::exp(load(score + i) - largest));
    for (int64_t i = count; i < end; ++i) score[i] = 0;
    typename S::V total = S::set(0);
    for (int64_t i = 0; i < end; i += S::lanes) total = total + load(score + i);
    const typename S::V share = S::set(1 / S::sum(total));
    for (int64_t i = 0; i < end; i += S::lanes) store(score + i, load(score + i) * share);
}

// Calls body(n, place) for the n-th place of a row.
template <class E, class Body>
TW_INLINE int64_t each_place(const PathCall<E>& call, int64_t row, const Body& body) {
    int64_t n = 0;
    for (int64_t place = call.begin[row]; place < call.end[row]; ++place) body(n++, place);
    const int64_t* path = call.path + row * call.path_row;
    for (int64_t step = 0; step < call.steps; ++step) {
        if (path[step] >= 0) body(n++, path[step]);
    }
    return n;
}

// out[first ..] = the sum of weight[n] times those elements of the n-th place's value: N vectors.
template <class E, int N>
TW_INLINE void mix(const PathCall<E>& call, int64_t row, const E* value, const typename Wide<E>::T* weight, E* out) {
    using S = Simd<typename Wide<E>::T>;
    typename S::V sum[N];
    for (int i = 0; i < N; ++i) sum[i] = S::set(0);
    each_place(call, row, [&](int64_t n, int64_t place) {
        const typename S::V w = S::set(weight[n]);
        for (int i = 0; i < N; ++i) {
            sum[i] = S::multiply_add(w, load(value + place * call.value_row + i * S::lanes), sum[i]);
        }
    });
    for (int i = 0; i < N; ++i) store(out + i * S::lanes, sum[i]);
}

// The same for a head of any size.
template <class E>
TW_INLINE void mix_any(const PathCall<E>& call, int64_t row, const E* value, const typename Wide<E>::T* weight,
                       E* out) {
    using T = typename Wide<E>::T;
    int64_t d = 0;
    for (; d + Simd<T>::lanes <= call.size; d += Simd<T>::lanes) mix<E, 1>(call, row, value + d, weight, out + d);
    for (; d < call.size; ++d) {
        T sum = 0;
        each_place(call, row,
                   [&](int64_t n, int64_t place) { sum += weight[n] * to_real(value[place * call.value_row + d]); });
        from_real(sum, out + d);
    }
}

template <class E, int N>
void rows_of(const PathCall<E>& call, int64_t first, int64_t last, typename Wide<E>::T* scratch) {
    using T = typename Wide<E>::T;
    const int64_t size = call.size, group = call.group, width = call.longest + kPathPadding;
    for (int64_t row = first; row < last; ++row) {
        for (int64_t head = 0; head < call.kv_heads; ++head) {
            const E* query = call.query + row * call.query_row + head * group * size;
            const E* value = call.value + head * size;
            E* out = call.out + row * call.out_row + head * group * size;
            const int64_t count = each_place(call, row, [&](int64_t n, int64_t place) {
                const E* key = call.key + place * call.key_row + head * size;
                for (int64_t g = 0; g < group; ++g) {
                    scratch[g * width + n] = dot<E, N>(query + g * size, key, size) * T(call.scale);
                }
            });
            for (int64_t g = 0; g < group; ++g) {
                T* weight = scratch + g * width;
                weigh(weight, count);
                if constexpr (N > 0) {
                    mix<E, N>(call, row, value, weight, out + g * size);
                } else {
                    mix_any<E>(call, row, value, weight, out + g * size);
                }
            }
        }
    }
}

template <class E>
void rows(const PathCall<E>& call, int64_t first, int64_t last, typename Wide<E>::T* scratch) {
    constexpr int64_t lanes = Simd<typename Wide<E>::T>::lanes;
    if (call.size == lanes) return rows_of<E, 1>(call, first, last, scratch);
    if (call.size == 2 * lanes) return rows_of<E, 2>(call, first, last, scratch);
    if (call.size == 4 * lanes) return rows_of<E, 4>(call, first, last, scratch);
    if (call.size == 8 * lanes) return rows_of<E, 8>(call, first, last, scratch);
    rows_of<E, 0>(call, first, last, scratch);
}

constexpr PathAttentionKernels kKernels = {rows<float>, rows<double>, rows<BFloat16>, rows<Half>};

}  // namespace

const PathAttentionKernels& TW_ISA() {
    return kKernels;
}

}  // namespace turnwise
