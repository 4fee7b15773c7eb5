// The loops of attention of single queries. Compiled once per instruction set with TW_ISA naming the function that it
// exports, so nothing here may be an inline function with external linkage.
//
// The places of a row are read twice, for scores and for the output. Siblings follow one another and share their
// prompt, so it comes from the cache.
#include "ops/path_attention_kernel.h"

#include "core/simd_real.h"

namespace turnwise {
namespace {

// A head of `size` elements: N whole vectors, or if N is 0 any number of them and a rest.
template <class T, int N>
TW_INLINE T dot(const T* a, const T* b, int64_t size) {
    using S = Simd<T>;
    const int64_t vectors = N ? N : size / S::lanes;
    typename S::V sum = S::set(0);
    for (int64_t i = 0; i < vectors; ++i) {
        sum = S::multiply_add(load(a + i * S::lanes), load(b + i * S::lanes), sum);
    }
    T rest = 0;
    for (int64_t d = vectors * S::lanes; d < size && !N; ++d) rest += a[d] * b[d];
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
template <class T, class Body>
TW_INLINE int64_t each_place(const PathCall<T>& call, int64_t row, const Body& body) {
    int64_t n = 0;
    for (int64_t place = call.begin[row]; place < call.end[row]; ++place) body(n++, place);
    const int64_t* path = call.path + row * call.path_row;
    for (int64_t step = 0; step < call.steps; ++step) {
        if (path[step] >= 0) body(n++, path[step]);
    }
    return n;
}

// out = the sum of weight[n] times the n-th place's value.
template <class T, int N>
TW_INLINE void mix(const PathCall<T>& call, int64_t row, int64_t head, const T* weight, T* out) {
    using S = Simd<T>;
    const int64_t size = call.size;
    const auto value = [&](int64_t place) { return call.value + place * call.value_row + head * size; };
    if constexpr (N > 0) {
        typename S::V sum[N];
        for (int i = 0; i < N; ++i) sum[i] = S::set(0);
        each_place(call, row, [&](int64_t n, int64_t place) {
            const T* from = value(place);
            const typename S::V w = S::set(weight[n]);
            for (int i = 0; i < N; ++i) sum[i] = S::multiply_add(w, load(from + i * S::lanes), sum[i]);
        });
        for (int i = 0; i < N; ++i) store(out + i * S::lanes, sum[i]);
    } else {
        for (int64_t d = 0; d < size; ++d) out[d] = 0;
        each_place(call, row, [&](int64_t n, int64_t place) {
            const T* from = value(place);
            for (int64_t d = 0; d < size; ++d) out[d] += weight[n] * from[d];
        });
    }
}

template <class T, int N>
void rows_of(const PathCall<T>& call, int64_t first, int64_t last, T* scratch) {
    const int64_t size = call.size, group = call.group, width = call.longest + kPathPadding;
    for (int64_t row = first; row < last; ++row) {
        for (int64_t head = 0; head < call.kv_heads; ++head) {
            const T* query = call.query + row * call.query_row + head * group * size;
            T* out = call.out + row * call.out_row + head * group * size;
            const int64_t count = each_place(call, row, [&](int64_t n, int64_t place) {
                const T* key = call.key + place * call.key_row + head * size;
                for (int64_t g = 0; g < group; ++g) {
                    scratch[g * width + n] = dot<T, N>(query + g * size, key, size) * T(call.scale);
                }
            });
            for (int64_t g = 0; g < group; ++g) {
                T* weight = scratch + g * width;
                weigh(weight, count);
                mix<T, N>(call, row, head, weight, out + g * size);
            }
        }
    }
}

template <class T>
void rows(const PathCall<T>& call, int64_t first, int64_t last, T* scratch) {
    constexpr int64_t lanes = Simd<T>::lanes;
    if (call.size == lanes) return rows_of<T, 1>(call, first, last, scratch);
    if (call.size == 2 * lanes) return rows_of<T, 2>(call, first, last, scratch);
    if (call.size == 4 * lanes) return rows_of<T, 4>(call, first, last, scratch);
    if (call.size == 8 * lanes) return rows_of<T, 8>(call, first, last, scratch);
    rows_of<T, 0>(call, first, last, scratch);
}

constexpr PathAttentionKernels kKernels = {rows<float>, rows<double>};

}  // namespace

const PathAttentionKernels& TW_ISA() {
    return kKernels;
}

}  // namespace turnwise
