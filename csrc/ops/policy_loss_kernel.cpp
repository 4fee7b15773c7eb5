// The token loop. This file is compiled once per instruction set; TW_ISA names the function that it exports. So nothing
// here may be an inline function with external linkage.
#include "ops/policy_loss_tile.h"

#include "core/float16.h"
#include "ops/policy_loss_loop.h"

namespace turnwise {
namespace {

// Prefetches every stream. The arithmetic of a few tokens fills the processor's window, so the window holds too few of
// the next loads, and the processor's own prefetcher follows only a few streams at once.
template <bool has_ref, bool per_token>
TW_INLINE void prefetch(const Tile& t, int i) {
    constexpr int ahead = 512, line = 16;  // tokens
    for (int k = 0; k < kLanes; k += line) {
        __builtin_prefetch(t.logprobs + i + ahead + k);
        __builtin_prefetch(t.old_logprobs + i + ahead + k);
        if constexpr (has_ref) __builtin_prefetch(t.ref_logprobs + i + ahead + k);
        if constexpr (per_token) __builtin_prefetch(t.advantages + i + ahead + k);
        if (t.rollout_logprobs) __builtin_prefetch(t.rollout_logprobs + i + ahead + k);
        if (!t.stream) __builtin_prefetch(t.grad + i + ahead + k, 1);
    }
}

// The weight that multiplies loss and gradient: per token if token_cap is not 0, else that of the row.
TW_INLINE Floats importance_weight(const Tile& t, Floats weight, Truths mask, VecN& rejected) {
    if (t.token_cap == 0) return VectorMath::set(t.row_weight);
    const Truths outside = (weight < VectorMath::set(t.reject_below)) | (weight > VectorMath::set(t.reject_above));
    rejected = count(rejected, mask & outside);
    return vec_select(outside, VectorMath::set(0.0f), vec_min(VectorMath::set(t.token_cap), weight));
}

// One vector of tokens: writes the gradient and adds to the sums.
template <class Loop>
TW_INLINE void step(const Loop& kind, const Tile& t, int i, Running& sums) {
    const Floats zero = VectorMath::set(0.0f);
    const Truths mask = t.mask ? load_truths(t.mask + i) : everywhere();
    const auto masked = [&](Floats x) {
        return vec_select(mask, x, zero);
    };  // applied first, because masked values may be NaN
    // The variant's loss and derivative. A masked log-ratio is 0, so its ratio is 1, which no range clips.
    const Floats logprob = load_floats(t.logprobs + i), old = load_floats(t.old_logprobs + i);
    const Floats log_ratio = masked(logprob - old);
    Token<VectorMath> token;
    token.logprob = masked(logprob);
    token.log_ratio = clamp_symmetric<VectorMath>(log_ratio, kLogRatioBound);
    token.ratio = VectorMath::near_exp(token.log_ratio);
    token.trained = mask;
    token.open = unless_differs(everywhere(), token.log_ratio, log_ratio);
    const Floats growth = token.ratio - VectorMath::set(1.0f);
    Part part = kind.part(t, i, token, growth, sums);
    // Importance sampling.
    if (Loop::has_rollout(t)) {
        const Floats mismatch = masked(old - load_floats(t.rollout_logprobs + i));
        const Floats weight = VectorMath::near_exp(clamp_symmetric<VectorMath>(mismatch, kLogRatioBound));
        const Floats applied = importance_weight(t, weight, mask, sums.rejected);
        part.loss = part.loss * applied;
        part.grad = part.grad * applied;
        sums.mismatch = add(sums.mismatch, mismatch);
        const Floats used = t.corrects ? applied : weight;
        sums.weight = add_where(mask, sums.weight, used);
        sums.weight_square = add_where(mask, sums.weight_square, used * used);
    }
    // The KL term.
    if (Loop::has_ref(t)) {
        auto kl = Loop::kl(t, masked(load_floats(t.ref_logprobs + i) - logprob));  // 0 if masked, because d is
        sums.kl = add(sums.kl, kl.value);
        if (Loop::weighs_kl(t)) kl = Loop::weighted(t, token, kl);
        if constexpr (Loop::has_weights) {
            const Floats weight = load_floats(t.weights + i);
            kl = {kl.value * weight, kl.slope * weight};
        }
        if (Loop::weighs_kl(t) || Loop::has_weights) sums.weighted_kl = add(sums.weighted_kl, kl.value);
        part.grad = fma(kind.kl_scale, kl.slope, part.grad);
    }
    // Gradient and metrics.
    if (t.entropy) sums.entropy = add_where(mask, sums.entropy, load_floats(t.entropy + i));
    const Floats grad = Loop::gradient(t, mask, part.grad);
    if (t.stream) {
        stream(t.grad + i, grad);
    } else {
        store(t.grad + i, grad);
    }
    sums.loss = add_where(mask, sums.loss, part.loss);
    sums.log_ratio = add(sums.log_ratio, token.log_ratio);
    sums.growth = add(sums.growth, growth);
    sums.ratio_max = max_where(mask, sums.ratio_max, token.ratio);
    sums.tokens = count(sums.tokens, mask);
}

// A copy of the last, partial vector of a tile, with the missing lanes masked. A token's lane depends only on its
// position, so a row's sums do not depend on the padding after it.
struct Tail {
    Tail(const Tile& t, int i) : tile(t) {
        const int left = t.n - i < kLanes ? t.n - i : kLanes;
        const float** streams[] = {&tile.logprobs,   &tile.old_logprobs, &tile.ref_logprobs, &tile.rollout_logprobs,
                                   &tile.advantages, &tile.weights,      &tile.entropy};
        for (int k = 0; k < 7; ++k) {
            if (*streams[k] == nullptr) continue;
            copy(*streams[k] + i, left, values[k]);
            *streams[k] = values[k];
        }
        if (t.mask) {
            copy(t.mask + i, left, mask);
        } else {
            for (int lane = 0; lane < kLanes; ++lane) mask[lane] = lane < left;
        }
        tile.mask = mask;
        if (t.selected) {
            copy(t.selected + i, left, selected);
            tile.selected = selected;
        }
        tile.grad = grad;
        tile.stream = false;
    }
    // The values that are there, then zeros.
    template <class T>
    static TW_INLINE void copy(const T* from, int left, T (&to)[kLanes]) {
        std::memset(to, 0, sizeof to);
        std::memcpy(to, from, size_t(left) * sizeof(T));
    }
    Tile tile;                               // its streams are the arrays below
    float values[7][kLanes], grad[kLanes];   // copies of the float streams that are given; the gradient
    uint8_t mask[kLanes], selected[kLanes];  // 0 in missing lanes
};

template <class Loop>
void tail_step(const Loop& kind, const Tile& t, int i, Running& sums) {
    const Tail tail(t, i);
    step(kind, tail.tile, 0, sums);
    std::memcpy(t.grad + i, tail.grad, size_t(t.n - i) * sizeof(float));
}

// All tokens of a tile.
template <class Loop>
void loop(const Tile& given, TileSums& out) {
    const Tile t = given;  // a copy that no store can alias
    const Loop kind(t);
    const VecF zero = broadcast(0.0f);
    Running sums{zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, {}, {}, {}, {}, {}};
    int i = 0;
    for (; i + kLanes <= t.n; i += kLanes) {
        prefetch<Loop::prefetch_ref, Loop::prefetch_advantages>(t, i);
        step(kind, t, i, sums);
    }
    if (i < t.n) tail_step(kind, t, i, sums);
    // Add the lanes up in double.
    const double log_ratio = sum_lanes(sums.log_ratio), kl = sum_lanes(sums.kl);
    const bool has_own = Loop::weighs_kl(t) || Loop::has_weights;  // the KL term is not its metric
    out.loss += Loop::loss(t, sums) + double(t.kl_coef) * (has_own ? sum_lanes(sums.weighted_kl) : kl);
    out.log_ratio += log_ratio;
    out.k3 += sum_lanes(sums.growth) - log_ratio;
    out.tokens += double(total(sums.tokens));
    Loop::add_clipped(t, sums, out);
    const float largest = max_lanes(sums.ratio_max);
    if (!(largest <= out.ratio_max)) out.ratio_max = largest;
    if (Loop::has_ref(t)) out.kl += kl;
    if (t.entropy) out.entropy += sum_lanes(sums.entropy);
    if (Loop::has_rollout(t)) {
        out.mismatch += sum_lanes(sums.mismatch);
        out.weight += sum_lanes(sums.weight);
        out.weight_square += sum_lanes(sums.weight_square);
        out.rejected += double(total(sums.rejected));
    }
}

template <KlKind kind, bool kl_weighted, bool with_rollout>
void clip_loop(const Tile& t, TileSums& sums) {
    if (t.weights) {
        loop<ClipLoop<kind, kl_weighted, with_rollout, true, true>>(t, sums);
    } else if (t.advantages) {
        loop<ClipLoop<kind, kl_weighted, with_rollout, true>>(t, sums);
    } else {
        loop<ClipLoop<kind, kl_weighted, with_rollout, false>>(t, sums);
    }
}

template <KlKind kind, bool kl_weighted>
void clip_tile(const Tile& t, TileSums& sums) {
    if (t.rollout_logprobs) {
        clip_loop<kind, kl_weighted, true>(t, sums);
    } else {
        clip_loop<kind, kl_weighted, false>(t, sums);
    }
}

void any_tile(const Tile& t, TileSums& sums) {
    loop<AnyLoop>(t, sums);
}

// RowSums, one per lane.
struct RunningRow {
    VecF log_ratio, advantage, mismatch, kl;  // as in RowSums
};

// One vector of tokens: adds to the sums that the variant and the correction need.
TW_INLINE void row_step(const Tile& t, int i, RunningRow& sums) {
    const Floats zero = VectorMath::set(0.0f);
    const Truths mask = t.mask ? load_truths(t.mask + i) : everywhere();
    const auto masked = [&](Floats x) { return vec_select(mask, x, zero); };
    const Floats old = load_floats(t.old_logprobs + i);
    if (t.rollout_logprobs) sums.mismatch = add(sums.mismatch, masked(old - load_floats(t.rollout_logprobs + i)));
    if (!is_by_row(t.variant.kind)) return;
    const Floats logprob = load_floats(t.logprobs + i);
    Floats log_ratio = masked(logprob - old);
    if (t.ref_logprobs) {
        sums.kl = add(sums.kl, kl_term<VectorMath>(t.kl, masked(load_floats(t.ref_logprobs + i) - logprob)).value);
    }
    if (t.variant.kind == VariantKind::gmpo) {
        const Floats advantage = masked(t.advantages ? load_floats(t.advantages + i) : VectorMath::set(t.advantage));
        log_ratio = clamp_symmetric<VectorMath>(log_ratio, kLogRatioBound);
        log_ratio = gmpo_bounded<VectorMath>(log_ratio, advantage, t.variant);
        sums.advantage = add(sums.advantage, advantage);
    }
    sums.log_ratio = add(sums.log_ratio, log_ratio);
}

// Adds the lanes up in double every few steps. The sum of a long row is exponentiated, so float32 is not accurate
// enough.
void row_sums(const Tile& t, RowSums& out) {
    constexpr int kRun = 8 * Lanes::count;
    const VecF zero = broadcast(0.0f);
    for (int start = 0; start < t.n; start += kRun) {
        RunningRow sums{zero, zero, zero, zero};
        const int end = t.n - start < kRun ? t.n : start + kRun;
        int i = start;
        for (; i + kLanes <= end; i += kLanes) row_step(t, i, sums);
        if (i < end) {
            const Tail tail(t, i);
            row_step(tail.tile, 0, sums);
        }
        out.log_ratio += sum_lanes(sums.log_ratio);
        out.advantage += sum_lanes(sums.advantage);
        out.mismatch += sum_lanes(sums.mismatch);
        out.kl += sum_lanes(sums.kl);
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
        store(lanes, vec_exp(load_floats(lanes)));
        std::memcpy(to + i, lanes, bytes);
    }
}

constexpr PolicyLossKernels kKernels = {
    {{clip_tile<KlKind::none, false>, any_tile, any_tile, any_tile, clip_tile<KlKind::k3, false>, any_tile, any_tile},
     {any_tile, any_tile, any_tile, any_tile, clip_tile<KlKind::k3, true>, any_tile, any_tile}},
    any_tile,
    row_sums,
    count_mask,
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
