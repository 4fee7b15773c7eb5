// The policy loss of one token: its loss, its derivative and the flags that the metrics count. The code serves host and
// device. Its parameter Math defines a number: a float on a GPU, a vector of floats on a CPU.
//
// Math provides: F (number) with + - * / < >, M (truth value) with & |, and set(float) -> F, min, max, exp (of values
// within +-80), near_exp (within +-kLogRatioBound), select(M, F, F), unless(m, n) = m and not n, unless_less(m, a, b) =
// m and not a < b, unless_differs(m, a, b) = m and not (a < b or b < a).
// If an argument is NaN, min and max return their second one, and < and > are false. So NaN reaches loss and gradient.
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace turnwise {

// Estimators of KL(policy || reference) per token, with d = ref - logprob.
enum class KlKind : int {
    none,
    k1,       // -d
    abs,      // |d|
    k2,       // d^2 / 2
    k3,       // exp(d) - 1 - d, at most kKlBound
    k1_plus,  // the value of k1 with the gradient of k2
    k3_plus,  // the value of k3 with the gradient of k2
};

constexpr float kLogRatioBound = 20.0f;  // log-ratios are clamped to +-20 before exp
constexpr float kKlBound = 10.0f;        // largest value of k3

// Numbered as in options.Variant of the Python package. Each function below has its variant's formula.
enum class VariantKind : int { clip, gspo, cispo, policy_gradient, sapo, gmpo, clip_cov, kl_cov };

struct Variant {
    VariantKind kind;  // the formula
    float low;         // clip, gspo, cispo, clip_cov: least ratio; gmpo: least log-ratio; sapo: tau for A <= 0
    float high;        // clip, gspo, cispo, clip_cov: largest ratio; gmpo: largest log-ratio; sapo: tau for A > 0
    float dual;        // clip, gspo, clip_cov: largest ratio for A < 0 (infinity: off); kl_cov: coefficient of |d|
};

// is_by_row: variants with one ratio per row. selects: variants that need a set of selected tokens.
TW_HD constexpr bool is_by_row(VariantKind kind) {
    return kind == VariantKind::gspo || kind == VariantKind::gmpo;
}
TW_HD constexpr bool selects(VariantKind kind) {
    return kind == VariantKind::clip_cov || kind == VariantKind::kl_cov;
}

template <class Math>
TW_HD typename Math::F clamp_symmetric(typename Math::F x, float bound) {
    return Math::max(Math::set(-bound), Math::min(Math::set(bound), x));
}

// The inputs of a variant for one token. If the token is masked, ratio is 1, and logprob, log_ratio, advantage and the
// flags other than `open` are 0.
template <class Math>
struct Token {
    typename Math::F logprob;        // log-probability under the policy
    typename Math::F log_ratio;      // logprob - old_logprob, clamped to +-kLogRatioBound
    typename Math::F ratio;          // exp(log_ratio)
    typename Math::M trained;        // the mask
    typename Math::M open;           // log_ratio was not clamped, so the derivative is not cut
    typename Math::F advantage;      // A
    typename Math::M selected;       // clip_cov, kl_cov: one of the selected tokens
    typename Math::F row_ratio;      // gspo, gmpo: exp(mean log-ratio of the row)
    typename Math::F row_advantage;  // gmpo: mean advantage of the row
    typename Math::M row_open;       // gspo: the row's mean log-ratio was not clamped
};

template <class Math>
struct TokenLoss {
    typename Math::F loss;          // before the row's weight
    typename Math::F grad;          // d loss / d logprob
    typename Math::M clipped_low;   // ratio below the range
    typename Math::M clipped_high;  // ratio above the range, and A > 0
    typename Math::M clipped_dual;  // ratio above the dual clip, and A < 0; clip_cov, kl_cov: the token is selected
};

// The range in which PPO's loss follows the ratio. max(-A ratio, -A clip(ratio)) bounds the ratio from above if A > 0
// and from below if A < 0. The dual clip also bounds it from above if A < 0.
template <class Math>
struct ClipRange {
    typename Math::F low, high;           // bounds of the ratio; infinite if unbounded
    typename Math::M negative, positive;  // A < 0, A > 0
};

template <class Math>
TW_HD ClipRange<Math> clip_range(typename Math::F advantage, const Variant& v) {
    const auto zero = Math::set(0.0f), infinity = Math::set(HUGE_VALF);
    ClipRange<Math> out;
    out.negative = advantage < zero;
    out.positive = advantage > zero;
    out.low = Math::select(out.negative, Math::set(v.low), -infinity);
    out.high = Math::select(out.positive, Math::set(v.high), Math::select(out.negative, Math::set(v.dual), infinity));
    return out;
}

template <class Math>
struct ClippedRatio {
    typename Math::F value;      // the ratio, clipped to its range
    typename Math::M not_below;  // trained, and ratio >= low
    typename Math::M within;     // trained, and low <= ratio <= high
};

template <class Math>
TW_HD ClippedRatio<Math> clip_ratio(typename Math::F ratio, typename Math::M trained, const ClipRange<Math>& range) {
    ClippedRatio<Math> out;
    out.value = Math::max(range.low, Math::min(range.high, ratio));
    out.not_below = Math::unless_less(trained, ratio, range.low);
    out.within = Math::unless_less(out.not_below, range.high, ratio);
    return out;
}

// PPO: max(-A ratio, -A clip(ratio)); at most -A dual if A < 0. `trained` and `open` as in Token.
template <class Math>
TW_HD TokenLoss<Math> clipped_surrogate(typename Math::F ratio, typename Math::M trained, typename Math::M open,
                                        typename Math::F advantage, const ClipRange<Math>& range) {
    const auto clipped = clip_ratio<Math>(ratio, trained, range);
    const auto above = Math::unless(clipped.not_below, clipped.within);
    TokenLoss<Math> out;
    out.loss = -advantage * clipped.value;
    out.grad = Math::select(clipped.within & open, -advantage * ratio, Math::set(0.0f));
    out.clipped_low = Math::unless(trained, clipped.not_below);
    out.clipped_high = above & range.positive;
    out.clipped_dual = above & range.negative;
    return out;
}
template <class Math>
TW_HD TokenLoss<Math> clipped_surrogate(const Token<Math>& t, const Variant& v) {
    return clipped_surrogate<Math>(t.ratio, t.trained, t.open, t.advantage, clip_range<Math>(t.advantage, v));
}

// -A sg(clip(ratio)) logprob; sg: no gradient flows
template <class Math>
TW_HD TokenLoss<Math> cispo(const Token<Math>& t, const Variant& v) {
    const auto low = Math::set(v.low), high = Math::set(v.high);
    const auto grad = -t.advantage * Math::max(low, Math::min(high, t.ratio));
    const auto none = high < low;
    return {grad * t.logprob, grad, t.ratio<low, t.ratio> high, none};
}

// -A logprob
template <class Math>
TW_HD TokenLoss<Math> policy_gradient(const Token<Math>& t) {
    const auto none = Math::set(1.0f) < Math::set(0.0f);
    return {-t.advantage * t.logprob, -t.advantage, none, none, none};
}

// -A sigmoid(tau (ratio - 1)) 4 / tau
template <class Math>
TW_HD TokenLoss<Math> sapo(const Token<Math>& t, const Variant& v) {
    const auto zero = Math::set(0.0f), one = Math::set(1.0f), four = Math::set(4.0f);
    const auto none = one < zero;
    const auto tau = Math::select(t.advantage > zero, Math::set(v.high), Math::set(v.low));
    const auto far = clamp_symmetric<Math>(tau * (one - t.ratio), 80.0f);
    const auto decay = Math::exp(far);
    const auto gate = one / (one + decay);
    const auto loss = -t.advantage * gate * (four / tau);
    const auto grad = -t.advantage * (four * gate) * (gate * decay) * t.ratio;
    return {loss, Math::select(t.open, grad, zero), none, none, none};
}

// The term of a token in GMPO's mean: the log-ratio, bounded by `high` if A > 0 and by `low` if A < 0; 0 if A = 0.
template <class Math>
TW_HD typename Math::F gmpo_bounded(typename Math::F log_ratio, typename Math::F advantage, const Variant& v) {
    const auto zero = Math::set(0.0f);
    const auto above = Math::min(Math::set(v.high), log_ratio), below = Math::max(Math::set(v.low), log_ratio);
    return Math::select(advantage > zero, above, Math::select(advantage < zero, below, zero));
}

// -A exp(mean(d)) with the row's mean advantage A and bounded log-ratios d. Every token has the row's loss.
template <class Math>
TW_HD TokenLoss<Math> gmpo(const Token<Math>& t, const Variant& v) {
    const auto zero = Math::set(0.0f);
    const auto up = t.advantage > zero, down = t.advantage < zero;
    const typename Math::M low = down & (t.log_ratio < Math::set(v.low)), high = up & (t.log_ratio > Math::set(v.high));
    const auto loss = -t.row_advantage * t.row_ratio;
    const auto grad = Math::select((up | down) & t.open, Math::select(low | high, zero, loss), zero);
    return {loss, grad, low, high, zero > zero};
}

// PPO's clip; 0 for selected tokens.
template <class Math>
TW_HD TokenLoss<Math> clip_cov(const Token<Math>& t, const Variant& v) {
    const auto zero = Math::set(0.0f);
    auto out = clipped_surrogate<Math>(t, v);
    out.loss = Math::select(t.selected, zero, out.loss);
    out.grad = Math::select(t.selected, zero, out.grad);
    out.clipped_dual = t.selected;
    return out;
}

// -A ratio; plus coef |log-ratio| for selected tokens.
template <class Math>
TW_HD TokenLoss<Math> kl_cov(const Token<Math>& t, const Variant& v) {
    const auto zero = Math::set(0.0f), coef = Math::set(v.dual), d = t.log_ratio;
    const auto none = zero > zero;
    const auto plain = -t.advantage * t.ratio;
    const auto sign = Math::select(d > zero, coef, Math::select(d < zero, -coef, zero));
    const auto loss = plain + Math::select(t.selected, coef * Math::max(-d, d), zero);
    const auto grad = plain + Math::select(t.selected, sign, zero);
    return {loss, Math::select(t.open, grad, zero), none, none, t.selected};
}

template <class Math>
TW_HD TokenLoss<Math> token_loss(const Token<Math>& t, const Variant& v) {
    switch (v.kind) {
        case VariantKind::gspo:
            return clipped_surrogate<Math>(t.row_ratio, t.trained, t.row_open, t.advantage,
                                           clip_range<Math>(t.advantage, v));
        case VariantKind::cispo:
            return cispo<Math>(t, v);
        case VariantKind::policy_gradient:
            return policy_gradient<Math>(t);
        case VariantKind::sapo:
            return sapo<Math>(t, v);
        case VariantKind::gmpo:
            return gmpo<Math>(t, v);
        case VariantKind::clip_cov:
            return clip_cov<Math>(t, v);
        case VariantKind::kl_cov:
            return kl_cov<Math>(t, v);
        default:
            return clipped_surrogate<Math>(t, v);
    }
}

template <class Math>
struct KlTerm {
    typename Math::F value;  // the estimate
    typename Math::F slope;  // its derivative with respect to d; with respect to logprob it is -slope
};

// An estimator of KL(policy || reference) from d = ref - logprob.
template <class Math, KlKind kind>
TW_HD KlTerm<Math> kl_term(typename Math::F d) {
    using F = typename Math::F;
    const F zero = Math::set(0.0f), one = Math::set(1.0f);
    if constexpr (kind == KlKind::k1) return {-d, -one};
    if constexpr (kind == KlKind::k1_plus) return {-d, d};
    if constexpr (kind == KlKind::k2) return {Math::set(0.5f) * d * d, d};
    if constexpr (kind == KlKind::abs) {
        return {Math::max(-d, d), Math::select(d > zero, one, Math::select(d < zero, -one, zero))};
    }
    if constexpr (kind == KlKind::k3 || kind == KlKind::k3_plus) {
        const F bounded = clamp_symmetric<Math>(d, kLogRatioBound);
        const F growth = Math::near_exp(bounded) - one;
        const F k3 =
            growth - bounded;  // about >= 0, so only the upper bound can clamp it, as it does for d beyond +-20
        const F value = Math::min(Math::set(kKlBound), k3);
        if constexpr (kind == KlKind::k3_plus) return {value, d};
        return {value, Math::select(k3 > value, zero, growth)};
    }
    return {zero, zero};
}

template <class Math>
TW_HD KlTerm<Math> kl_term(KlKind kind, typename Math::F d) {
    switch (kind) {
        case KlKind::k1:
            return kl_term<Math, KlKind::k1>(d);
        case KlKind::abs:
            return kl_term<Math, KlKind::abs>(d);
        case KlKind::k2:
            return kl_term<Math, KlKind::k2>(d);
        case KlKind::k3:
            return kl_term<Math, KlKind::k3>(d);
        case KlKind::k1_plus:
            return kl_term<Math, KlKind::k1_plus>(d);
        case KlKind::k3_plus:
            return kl_term<Math, KlKind::k3_plus>(d);
        default:
            return kl_term<Math, KlKind::none>(d);
    }
}

// The estimate times an importance ratio, differentiated through both factors. The ratio's derivative is multiplied by
// `carried`: the token's own estimate, or the row's mean if the ratio is the row's.
template <class Math>
TW_HD KlTerm<Math> importance_weighted(const KlTerm<Math>& kl, typename Math::F ratio, typename Math::F carried) {
    return {ratio * kl.value, ratio * (kl.slope - carried)};
}

// Terms of a row that its variant needs before the row's first token.
struct RowTerms {
    float ratio;      // exp(mean log-ratio)
    float advantage;  // mean advantage
    float kl;         // mean KL estimate, if weighted by the row's ratio; 0 if that ratio is clamped
    bool cut;         // gspo: the mean log-ratio was clamped
};

// `log_ratio` (gmpo: bounded), `advantage` and `kl` are sums over the row's `length` trained tokens.
TW_HD RowTerms row_terms(const Variant& v, double length, double log_ratio, double advantage, double kl) {
    const double share = length > 0 ? 1 / length : 0;
    const double mean = log_ratio * share, bound = kLogRatioBound;
    // Every comparison with NaN is false, so NaN stays.
    const double clamped = mean > bound ? bound : mean < -bound ? -bound : mean;
    const bool cut = v.kind == VariantKind::gspo && clamped != mean;
    return {float(exp(clamped)), float(advantage * share), cut ? 0 : float(kl * share), cut};
}

}  // namespace turnwise
