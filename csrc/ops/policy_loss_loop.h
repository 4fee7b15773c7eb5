// The specializations of the policy loss's token loop. Only the kernel includes this file. It is compiled once per
// instruction set, so everything is in an unnamed namespace.
#pragma once

#include "core/simd_pair.h"
#include "ops/policy_loss_tile.h"

namespace turnwise {
namespace {

#if defined(__AVX512F__) || !defined(__AVX2__)
using Floats = PairF;
using Truths = PairM;
#else  // sixteen registers hold only one chain of operations
using Floats = VecF;
using Truths = VecM;
#endif

struct VectorMath {
    using F = Floats;
    using M = Truths;
    static TW_INLINE F set(float x) { return broadcast_to<F>(x); }
    static TW_INLINE F min(F a, F b) { return vec_min(a, b); }
    static TW_INLINE F max(F a, F b) { return vec_max(a, b); }
    static TW_INLINE M unless(M m, M n) { return turnwise::unless(m, n); }
    static TW_INLINE M unless_less(M m, F a, F b) { return turnwise::unless_less(m, a, b); }
    static TW_INLINE M unless_differs(M m, F a, F b) { return turnwise::unless_differs(m, a, b); }
    static TW_INLINE F exp(F x) { return vec_exp(x); }
    static TW_INLINE F near_exp(F x) { return vec_near_exp(x); }
    static TW_INLINE F select(M m, F a, F b) { return vec_select(m, a, b); }
};

constexpr int kLanes = int(sizeof(Floats) / sizeof(float));

TW_INLINE Floats load_floats(const float* from) {
    Floats out;
    load_into(from, out);
    return out;
}
TW_INLINE Truths load_truths(const uint8_t* from) {
    Truths out;
    load_into(from, out);
    return out;
}
TW_INLINE Truths everywhere() {
    Truths out;
    all_true_into(out);
    return out;
}

// TileSums, one per lane of a vector.
struct Running {
    VecF loss;                                      // ClipLoop: see its loss(); AnyLoop: loss
    VecF log_ratio;                                 // sum of d = logprob - old_logprob
    VecF growth;                                    // sum of ratio - 1
    VecF ratio_max, kl;                             // largest ratio; sum of KL estimates
    VecF weighted_kl;                               // sum of KL estimate times importance ratio and Tile::weights
    VecF mismatch, weight, weight_square, entropy;  // sums; w = exp(mismatch) and w^2
    VecN tokens;                                    // trained tokens
    VecN first;                                     // ClipLoop: ratio >= low; AnyLoop: clipped_low
    VecN second;                                    // ClipLoop: low <= ratio <= high; AnyLoop: clipped_high
    VecN clipped_dual, rejected;                    // see TileSums
};

// A token's part in the loss and the gradient.
struct Part {
    Floats loss;  // a token's part in Running::loss
    Floats grad;  // d loss / d logprob; ClipLoop: times the row's weight
};

TW_INLINE KlTerm<VectorMath> weighted_by_token(const Token<VectorMath>& token, const KlTerm<VectorMath>& kl) {
    const Floats carried = vec_select(token.open, kl.value, VectorMath::set(0.0f));
    return importance_weighted<VectorMath>(kl, token.ratio, carried);
}

// PPO's clip for one KL estimator, with or without rollout log-probabilities. AnyLoop handles everything else.
template <KlKind kl_kind, bool kl_weighted, bool with_rollout, bool per_token, bool with_weights = false>
struct ClipLoop {
    explicit TW_INLINE ClipLoop(const Tile& t)
        : range(clip_range<VectorMath>(VectorMath::set(t.advantage), t.variant)),
          least(range.low - VectorMath::set(1.0f)),
          most(range.high - VectorMath::set(1.0f)),
          scale(VectorMath::set(per_token ? -t.weight : -t.advantage * t.weight)),
          kl_scale(VectorMath::set(-t.kl_coef * t.weight)) {}
    static constexpr bool prefetch_ref = kl_kind != KlKind::none, prefetch_advantages = per_token;  // see prefetch
    static constexpr bool has_weights = with_weights;                                               // Tile::weights
    static TW_INLINE bool has_ref(const Tile&) { return kl_kind != KlKind::none; }
    static TW_INLINE bool has_rollout(const Tile&) { return with_rollout; }
    static TW_INLINE KlTerm<VectorMath> kl(const Tile&, Floats d) { return kl_term<VectorMath, kl_kind>(d); }
    static TW_INLINE bool weighs_kl(const Tile&) { return kl_weighted; }
    static TW_INLINE KlTerm<VectorMath> weighted(const Tile&, const Token<VectorMath>& token,
                                                 const KlTerm<VectorMath>& kl) {
        return weighted_by_token(token, kl);
    }
    // If the whole row has one advantage, the running loss is the sum of clipped ratios - 1, without the advantage:
    // these numbers are small, so they lose little to rounding.
    static constexpr bool from_one = !per_token && !with_rollout;
    static double loss(const Tile& t, const Running& sums) {
        const double sum = sum_lanes(sums.loss);
        if constexpr (per_token) return -sum;
        const int64_t tokens = total(sums.tokens);  // 0 tokens give 0, even if the advantage is NaN
        return tokens == 0 ? 0 : -double(t.advantage) * (from_one ? double(tokens) + sum : sum);
    }
    TW_INLINE Part part(const Tile& t, int i, const Token<VectorMath>& token, Floats growth, Running& sums) const {
        const Floats zero = VectorMath::set(0.0f);
        if constexpr (per_token) {
            const Floats advantage = vec_select(token.trained, load_floats(t.advantages + i), zero);
            const auto own = clip_range<VectorMath>(advantage, t.variant);
            const auto clipped = clip_ratio<VectorMath>(token.ratio, token.trained, own);
            count_clipped(clipped, sums);
            sums.clipped_dual = count(sums.clipped_dual, unless(clipped.not_below, clipped.within) & own.negative);
            const Floats weighted = with_weights ? advantage * load_floats(t.weights + i) : advantage;
            const Floats slope = weighted * scale;
            return {weighted * clipped.value, vec_select(clipped.within & token.open, slope * token.ratio, zero)};
        }
        const auto clipped = clip_ratio<VectorMath>(token.ratio, token.trained, range);
        count_clipped(clipped, sums);
        const Floats value = from_one ? vec_max(least, vec_min(most, growth)) : clipped.value;
        return {value, vec_select(clipped.within & token.open, scale * token.ratio, zero)};
    }
    static TW_INLINE void count_clipped(const ClippedRatio<VectorMath>& clipped, Running& sums) {
        sums.first = count(sums.first, clipped.not_below);
        sums.second = count(sums.second, clipped.within);
    }
    static TW_INLINE Floats gradient(const Tile&, Truths, Floats grad) {
        return grad;
    }  // already weighted, and 0 if masked
    static void add_clipped(const Tile& t, const Running& sums, TileSums& out) {
        const int64_t above = total(sums.first) - total(sums.second);
        const int64_t dual = per_token ? total(sums.clipped_dual) : t.advantage < 0 ? above : 0;
        out.clipped_low += double(total(sums.tokens) - total(sums.first));
        out.clipped_high += double(above - dual);
        out.clipped_dual += double(dual);
    }
    ClipRange<VectorMath> range;          // for the row's advantage
    Floats least, most, scale, kl_scale;  // range - 1; the factors of the ratio and of the KL slope in the gradient
};

// Every variant and KL estimator, chosen at run time.
struct AnyLoop {
    explicit TW_INLINE AnyLoop(const Tile& t) : kl_scale(VectorMath::set(-t.kl_coef)) {}
    static constexpr bool prefetch_ref = false, prefetch_advantages = false, has_weights = false;
    static TW_INLINE bool has_ref(const Tile& t) { return t.ref_logprobs != nullptr; }
    static TW_INLINE bool has_rollout(const Tile& t) { return t.rollout_logprobs != nullptr; }
    static TW_INLINE KlTerm<VectorMath> kl(const Tile& t, Floats d) { return kl_term<VectorMath>(t.kl, d); }
    static TW_INLINE bool weighs_kl(const Tile& t) { return t.kl_weighted; }
    static TW_INLINE KlTerm<VectorMath> weighted(const Tile& t, const Token<VectorMath>& token,
                                                 const KlTerm<VectorMath>& kl) {
        if (t.variant.kind != VariantKind::gspo) return weighted_by_token(token, kl);
        return importance_weighted<VectorMath>(kl, VectorMath::set(t.row.ratio), VectorMath::set(t.row.kl));
    }
    static double loss(const Tile&, const Running& sums) { return sum_lanes(sums.loss); }
    TW_INLINE Part part(const Tile& t, int i, Token<VectorMath> token, Floats, Running& sums) const {
        const Truths none = VectorMath::set(1.0f) < VectorMath::set(0.0f);
        const Floats advantage = t.advantages ? load_floats(t.advantages + i) : VectorMath::set(t.advantage);
        token.advantage = vec_select(token.trained, advantage, VectorMath::set(0.0f));
        token.selected = t.selected ? load_truths(t.selected + i) & token.trained : none;
        token.row_ratio = VectorMath::set(t.row.ratio);
        token.row_advantage = VectorMath::set(t.row.advantage);
        token.row_open = t.row.cut ? none : token.trained;
        const auto out = token_loss<VectorMath>(token, t.variant);
        sums.first = count(sums.first, out.clipped_low);
        sums.second = count(sums.second, out.clipped_high);
        sums.clipped_dual = count(sums.clipped_dual, out.clipped_dual);
        return {out.loss, out.grad};
    }
    static TW_INLINE Floats gradient(const Tile& t, Truths mask, Floats grad) {
        return vec_select(mask, grad * VectorMath::set(t.weight), VectorMath::set(0.0f));
    }
    static void add_clipped(const Tile&, const Running& sums, TileSums& out) {
        out.clipped_low += double(total(sums.first));
        out.clipped_high += double(total(sums.second));
        out.clipped_dual += double(total(sums.clipped_dual));
    }
    Floats kl_scale;  // factor of the KL slope in the gradient
};

}  // namespace
}  // namespace turnwise
