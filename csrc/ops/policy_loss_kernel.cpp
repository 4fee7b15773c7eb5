// The token loop. Compiled once per instruction set with TW_ISA naming the function that it exports, so nothing here
// may be an inline function with external linkage.
#include "ops/policy_loss_kernel.h"

#include "core/float16.h"
#include "core/simd.h"

namespace turnwise {
namespace {

struct VectorMath {
    using F = VecF;
    using M = VecM;
    static TW_INLINE F set(float x) { return broadcast(x); }
    static TW_INLINE F min(F a, F b) { return vec_min(a, b); }
    static TW_INLINE F max(F a, F b) { return vec_max(a, b); }
    static TW_INLINE M differs(F a, F b) { return turnwise::differs(a, b); }
    static TW_INLINE F exp(F x) { return vec_exp(x); }
    static TW_INLINE F select(M m, F a, F b) { return vec_select(m, a, b); }
};

constexpr int kLanes = Lanes::count;
constexpr int kHigh = 1 << 16;

// Running sums of one tile, by lane.
struct Running {
    VecF loss, log_ratio, k3, ratio_max, kl, mismatch, weight, weight_square;
    VecN tokens_low, high_dual;  // two counts each, in the low and the high half of a lane
};

// The arithmetic of a few tokens fills the processor's window, so it sees too little of the next loads by itself.
template <KlKind kind>
TW_INLINE void prefetch(const Tile& t, int i) {
    constexpr int ahead = 512;  // tokens
    __builtin_prefetch(t.logprobs + i + ahead);
    __builtin_prefetch(t.old_logprobs + i + ahead);
    if constexpr (kind != KlKind::none) __builtin_prefetch(t.ref_logprobs + i + ahead);
    __builtin_prefetch(t.grad + i + ahead, 1);
}

template <KlKind kind, bool has_rollout>
TW_INLINE void step(const Tile& t, int i, Running& sums) {
    const VecF zero = broadcast(0.0f);
    const VecM mask = t.mask ? load_mask(t.mask + i) : all_true();
    const auto masked = [&](VecF x) { return vec_select(mask, x, zero); };  // first of all: what it hides may be NaN
    const VecF logprob = masked(load(t.logprobs + i));
    const VecF old = masked(load(t.old_logprobs + i));
    const VecF advantage = masked(t.advantages ? load(t.advantages + i) : broadcast(t.advantage));

    const auto log_ratio = clamp_symmetric<VectorMath>(logprob - old, kLogRatioBound);
    const VecF ratio = vec_exp(log_ratio.value);
    auto token = clipped_surrogate<VectorMath>(ratio, log_ratio.cut, advantage, t.clip);
    if constexpr (has_rollout) {
        const VecF mismatch = old - masked(load(t.rollout_logprobs + i));
        const VecF weight = vec_exp(clamp_symmetric<VectorMath>(mismatch, kLogRatioBound).value);
        const VecF truncated = t.token_cap > 0 ? vec_min(broadcast(t.token_cap), weight) : broadcast(t.row_weight);
        token.loss = token.loss * truncated;
        token.grad = token.grad * truncated;
        sums.mismatch = sums.mismatch + mismatch;
        sums.weight = sums.weight + masked(weight);
        sums.weight_square = sums.weight_square + masked(weight * weight);
    }
    if constexpr (kind != KlKind::none) {
        const auto kl = kl_term<VectorMath, kind>(masked(load(t.ref_logprobs + i)) - logprob);
        const VecF coef = broadcast(t.kl_coef);
        token.loss = fma(coef, kl.value, token.loss);
        token.grad = fma(coef, kl.grad, token.grad);
        sums.kl = sums.kl + kl.value;
    }
    const VecF grad = masked(token.grad * broadcast(t.weight));
    if (t.stream) {
        stream(t.grad + i, grad);
    } else {
        store(t.grad + i, grad);
    }
    sums.loss = sums.loss + token.loss;  // 0 where masked, as every stream is
    sums.log_ratio = sums.log_ratio + log_ratio.value;
    sums.k3 = sums.k3 + (ratio - broadcast(1.0f) - log_ratio.value);
    sums.ratio_max = vec_max(sums.ratio_max, masked(ratio));
    sums.tokens_low = count(sums.tokens_low, mask, 1);
    sums.tokens_low = count(sums.tokens_low, token.clipped_low, kHigh);
    sums.high_dual = count(sums.high_dual, token.clipped_high, 1);
    sums.high_dual = count(sums.high_dual, token.dual_clipped, kHigh);
}

// The last, partial vector of a tile, copied out with its missing lanes masked: a lane always takes the same tokens, so
// a row's sums do not depend on the padding behind it.
template <KlKind kind, bool has_rollout>
void tail_step(const Tile& t, int i, Running& sums) {
    const int left = t.n - i;
    float streams[6][kLanes] = {};
    uint8_t mask[kLanes] = {};
    const auto copy = [&](const float* from, float* to) -> const float* {
        if (from == nullptr) return nullptr;
        std::memcpy(to, from + i, size_t(left) * sizeof(float));
        return to;
    };
    for (int lane = 0; lane < left; ++lane) mask[lane] = t.mask ? t.mask[i + lane] : 1;
    Tile tail = t;
    tail.logprobs = copy(t.logprobs, streams[0]);
    tail.old_logprobs = copy(t.old_logprobs, streams[1]);
    tail.ref_logprobs = copy(t.ref_logprobs, streams[2]);
    tail.rollout_logprobs = copy(t.rollout_logprobs, streams[3]);
    tail.advantages = copy(t.advantages, streams[4]);
    tail.mask = mask;
    tail.grad = streams[5];
    tail.stream = false;
    step<kind, has_rollout>(tail, 0, sums);
    std::memcpy(t.grad + i, streams[5], size_t(left) * sizeof(float));
}

template <KlKind kind, bool has_rollout>
void loop(const Tile& given, TileSums& out) {
    const Tile t = given;  // a copy that no store can alias
    const VecF zero = broadcast(0.0f);
    Running sums{zero, zero, zero, zero, zero, zero, zero, zero, {}, {}};
    int i = 0;
    for (; i + kLanes <= t.n; i += kLanes) {
        prefetch<kind>(t, i);
        step<kind, has_rollout>(t, i, sums);
    }
    if (i < t.n) tail_step<kind, has_rollout>(t, i, sums);
    out.loss += sum_lanes(sums.loss);
    out.log_ratio += sum_lanes(sums.log_ratio);
    out.k3 += sum_lanes(sums.k3);
    const Counts tokens_low = sum_lanes(sums.tokens_low), high_dual = sum_lanes(sums.high_dual);
    out.tokens += double(tokens_low.low);
    out.clipped_low += double(tokens_low.high);
    out.clipped_high += double(high_dual.low);
    out.dual_clipped += double(high_dual.high);
    const float largest = max_lanes(sums.ratio_max);
    if (!(largest <= out.ratio_max)) out.ratio_max = largest;
    if (kind != KlKind::none) out.kl += sum_lanes(sums.kl);
    if (has_rollout) {
        out.mismatch += sum_lanes(sums.mismatch);
        out.weight += sum_lanes(sums.weight);
        out.weight_square += sum_lanes(sums.weight_square);
    }
}

template <KlKind kind>
void tile(const Tile& t, TileSums& sums) {
    if (t.rollout_logprobs) {
        loop<kind, true>(t, sums);
    } else {
        loop<kind, false>(t, sums);
    }
}

int64_t count_mask(const uint8_t* mask, int64_t n) {
    int64_t total = 0;
    for (int64_t start = 0; start < n; start += 128) {  // short runs keep the compiler's lanes one byte wide
        const int64_t end = start + 128 < n ? start + 128 : n;
        uint8_t found = 0;
        for (int64_t i = start; i < end; ++i) found = uint8_t(found + (mask[i] != 0));
        total += found;
    }
    return total;
}

double mismatch(const float* old_logprobs, const float* rollout_logprobs, const uint8_t* mask, int n) {
    double total = 0;
    for (int i = 0; i < n; ++i) {
        if (mask == nullptr || mask[i]) total += double(old_logprobs[i] - rollout_logprobs[i]);
    }
    return total;
}

template <class T>
T* data_of(const View& view) {
    return static_cast<T*>(view.data);
}

template <class T>
void gather_floats(const T* from, int64_t stride, int n, float* to) {
    if (stride == 1) {
        for (int i = 0; i < n; ++i) to[i] = to_float(from[i]);
    } else {
        for (int i = 0; i < n; ++i) to[i] = to_float(from[i * stride]);
    }
}

void to_floats(const View& from, int64_t offset, int64_t stride, int n, float* to) {
    switch (from.dtype) {
        case DType::bf16:
            return gather_floats(data_of<BFloat16>(from) + offset, stride, n, to);
        case DType::f16:
            return gather_floats(data_of<Half>(from) + offset, stride, n, to);
        default:
            return gather_floats(data_of<float>(from) + offset, stride, n, to);
    }
}

template <class T>
bool gather_mask(const T* from, int64_t stride, int n, uint8_t* to) {
    for (int i = 0; i < n; ++i) to[i] = from[i * stride] != T(0);
    return true;
}

template <class T>
bool gather_float_mask(const T* from, int64_t stride, int n, uint8_t* to) {
    int wrong = 0;
    for (int i = 0; i < n; ++i) {
        const float value = to_float(from[i * stride]);
        to[i] = value != 0.0f;
        wrong |= (value != 0.0f) & (value != 1.0f);
    }
    return wrong == 0;
}

bool to_mask(const View& from, int64_t offset, int64_t stride, int n, uint8_t* to) {
    switch (from.dtype) {
        case DType::i64:
            return gather_mask(data_of<int64_t>(from) + offset, stride, n, to);
        case DType::i32:
            return gather_mask(data_of<int32_t>(from) + offset, stride, n, to);
        case DType::i16:
            return gather_mask(data_of<int16_t>(from) + offset, stride, n, to);
        case DType::f32:
            return gather_float_mask(data_of<float>(from) + offset, stride, n, to);
        case DType::bf16:
            return gather_float_mask(data_of<BFloat16>(from) + offset, stride, n, to);
        case DType::f16:
            return gather_float_mask(data_of<Half>(from) + offset, stride, n, to);
        default:
            return gather_mask(data_of<uint8_t>(from) + offset, stride, n, to);
    }
}

void from_floats(const float* from, int n, const View& to, int64_t offset) {
    if (to.dtype == DType::bf16) {
        for (int i = 0; i < n; ++i) data_of<BFloat16>(to)[offset + i] = to_bfloat16(from[i]);
    } else {
        for (int i = 0; i < n; ++i) data_of<Half>(to)[offset + i] = to_half(from[i]);
    }
}

void exp_all(const float* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += kLanes) {
        float lanes[kLanes] = {};
        const size_t bytes = size_t(n - i < kLanes ? n - i : kLanes) * sizeof(float);
        std::memcpy(lanes, from + i, bytes);
        store(lanes, vec_exp(load(lanes)));
        std::memcpy(to + i, lanes, bytes);
    }
}

constexpr PolicyLossKernels kKernels = {
    {tile<KlKind::none>, tile<KlKind::k1>, tile<KlKind::abs>, tile<KlKind::k2>, tile<KlKind::k3>, tile<KlKind::k1_plus>,
     tile<KlKind::k3_plus>},
    count_mask,
    mismatch,
    to_floats,
    to_mask,
    from_floats,
    exp_all,
};

}  // namespace

const PolicyLossKernels& TW_ISA() {
    return kKernels;
}

}  // namespace turnwise
