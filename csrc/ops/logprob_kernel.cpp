// The loops over logits. Compiled once per instruction set with TW_ISA naming the function that it exports, so nothing
// here may be an inline function with external linkage.
#include "ops/logprob_kernel.h"

#include "core/simd_narrow.h"

namespace turnwise {
namespace {

struct VectorMath {
    using F = VecF;
    using M = VecM;
    static TW_INLINE F set(float x) { return broadcast(x); }
    static TW_INLINE F max(F a, F b) { return vec_max(a, b); }
    static TW_INLINE F exp(F x) { return vec_exp(x); }
    static TW_INLINE F select(M m, F a, F b) { return vec_select(m, a, b); }
};

// x as it is stored. The compiler would fuse a product into the subtraction that follows, and a sum of weights would
// then not be that of the logits whose largest it is relative to.
TW_INLINE VecF rounded(VecF x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x.v));
#elif defined(__AVX2__)
    asm("" : "+x"(x.v));
#endif
    return x;
}

constexpr int kLanes = Lanes::count;
constexpr float kInfinity = INFINITY;

template <class T, bool has_cap>
struct Row {
    const T* logits;    // [n]
    const float* bias;  // [n], or null
    int n;              // columns
    VecF scale;         // 1 / temperature, in every lane
    Softcap cap;        // if has_cap

    TW_INLINE VecF finished(VecF logit) const {
        if constexpr (has_cap) return capped<VectorMath>(logit, cap);
        return rounded(logit * scale);
    }
    TW_INLINE VecF at(int i) const { return finished(bias ? load(logits + i) + load(bias + i) : load(logits + i)); }
    // The last, partial vector. Lanes beyond the end are -inf, so their weight exp(x) is 0.
    TW_INLINE VecF tail(int i) const {
        static constexpr float kZeros[kLanes] = {};
        const VecF x = load_first(logits + i, n - i, 0.0f);
        return finished(bias ? x + load_first(bias + i, n - i, 0.0f) : x) + load_first(kZeros, n - i, -kInfinity);
    }
    // The gradient of a logit from x: `d`, times the derivative of the cap.
    TW_INLINE VecF uncapped(VecF d, VecF x) const {
        if constexpr (has_cap) return d * cap_slope<VectorMath>(x, cap);
        return d;
    }
};

// Calls body(row) with the Row of a segment of T.
template <class T, class Body>
TW_INLINE auto with_row(const LogitSegment& s, const Body& body) {
    const T* logits = static_cast<const T*>(s.logits.data) + s.offset;
    if (s.cap > 0) return body(Row<T, true>{logits, s.bias, s.n, broadcast(s.scale), softcap_of(s.cap, s.scale)});
    return body(Row<T, false>{logits, s.bias, s.n, broadcast(s.scale), {}});
}

// The largest x of a segment, ignoring NaN.
template <class R>
TW_INLINE float largest(const R& row) {
    // Four maxima at a time, because each one waits for the one before it.
    VecF top[4] = {broadcast(-kInfinity), broadcast(-kInfinity), broadcast(-kInfinity), broadcast(-kInfinity)};
    int i = 0;
    for (; i + 4 * kLanes <= row.n; i += 4 * kLanes) {
        for (int k = 0; k < 4; ++k)
            top[k] = vec_max(row.at(i + k * kLanes), top[k]);  // ignores NaN, which still reaches the sum
    }
    for (; i + kLanes <= row.n; i += kLanes) top[0] = vec_max(row.at(i), top[0]);
    if (i < row.n) top[0] = vec_max(row.tail(i), top[0]);
    return max_lanes(vec_max(vec_max(top[0], top[1]), vec_max(top[2], top[3])));
}

// A segment's sums relative to its maximum.
template <bool weighted, class R>
Seen scan_row(const R row) {
    const float top = largest(row);
    const VecF reference = broadcast(top > -kInfinity ? top : 0.0f);
    VecF sum[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
    VecF product[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
    const auto add = [&](VecF x, int k) {
        const Weight<VectorMath> w = softmax_weight<VectorMath>(x - reference);
        sum[k] = sum[k] + w.value;
        if (weighted) product[k] = fma(w.value, w.log, product[k]);
    };
    int i = 0;
    for (; i + 4 * kLanes <= row.n; i += 4 * kLanes) {
        for (int k = 0; k < 4; ++k) add(row.at(i + k * kLanes), k);
    }
    for (; i + kLanes <= row.n; i += kLanes) add(row.at(i), 0);
    if (i < row.n) add(row.tail(i), 0);
    const double total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    return {top, total, weighted ? sum_lanes((product[0] + product[1]) + (product[2] + product[3])) : 0};
}

template <class T>
Seen scan_as(const LogitSegment& segment, bool weighted) {
    return with_row<T>(segment, [&](const auto& row) { return weighted ? scan_row<true>(row) : scan_row<false>(row); });
}

template <class T, class R>
void grad_row(const R row, const RowGradient gradient, T* to) {  // copies that no store can alias
    const auto d = [&](VecF x) { return row.uncapped(logit_gradient<VectorMath>(x, gradient), x); };
    int i = 0;
    for (; i + kLanes <= row.n; i += kLanes) store(to + i, d(row.at(i)));
    if (i < row.n) store_first(to + i, row.n - i, d(row.tail(i)));
}

template <class T>
void grad_as(const LogitSegment& segment, const RowGradient& gradient, const View& out, int64_t out_offset) {
    with_row<T>(segment, [&](const auto& row) { grad_row(row, gradient, static_cast<T*>(out.data) + out_offset); });
}

template <class T>
void add_as(const View& part, int64_t offset, int64_t n, float* total) {
    const T* from = static_cast<const T*>(part.data) + offset;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(total + i, load(total + i) + load(from + i));
    for (; i < n; ++i) total[i] += to_float(from[i]);
}

Seen scan(const LogitSegment& segment, bool weighted) {
    if (segment.logits.dtype == DType::bf16) return scan_as<BFloat16>(segment, weighted);
    if (segment.logits.dtype == DType::f16) return scan_as<Half>(segment, weighted);
    return scan_as<float>(segment, weighted);
}

void grad(const LogitSegment& segment, const RowGradient& gradient, const View& out, int64_t out_offset) {
    if (segment.logits.dtype == DType::bf16) return grad_as<BFloat16>(segment, gradient, out, out_offset);
    if (segment.logits.dtype == DType::f16) return grad_as<Half>(segment, gradient, out, out_offset);
    return grad_as<float>(segment, gradient, out, out_offset);
}

void add(const View& part, int64_t offset, int64_t n, float* total) {
    if (part.dtype == DType::bf16) return add_as<BFloat16>(part, offset, n, total);
    if (part.dtype == DType::f16) return add_as<Half>(part, offset, n, total);
    return add_as<float>(part, offset, n, total);
}

constexpr LogprobKernels kKernels = {scan, grad, add};

}  // namespace

const LogprobKernels& TW_ISA() {
    return kKernels;
}

}  // namespace turnwise
