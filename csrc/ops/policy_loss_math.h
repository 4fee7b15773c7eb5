// The policy loss of one token: loss, derivative and what the metrics count. Written once for host and device, over a
// Math that says what a number is: a float on a GPU, a vector of floats on a CPU.
//
// Math gives: F (number) with + - * < >, M (truth value) with & |, and set(float) -> F, min, max, exp, differs (not
// equal), select(M, F, F).
// min and max give their second argument where either is NaN, and no comparison holds: NaN reaches loss and gradient.
#pragma once

#include "core/host_device.h"

namespace turnwise {

enum class KlKind : int { none, k1, abs, k2, k3, k1_plus, k3_plus };

constexpr float kLogRatioBound = 20.0f;
constexpr float kKlBound = 10.0f;

struct ClipBounds {
    float low;   // 1 - Clip.low
    float high;  // 1 + Clip.high
    float dual;  // Clip.dual; infinity: off
};

template <class Math>
struct Clamped {
    typename Math::F value;
    typename Math::M cut;  // where the clamp cuts the derivative off
};

template <class Math>
TW_HD Clamped<Math> clamp_symmetric(typename Math::F x, float bound) {
    const auto value = Math::max(Math::set(-bound), Math::min(Math::set(bound), x));
    return {value, Math::differs(value, x)};
}

// One variant's loss per token, its derivative by the log-probability, and which tokens it clipped.
template <class Math>
struct TokenLoss {
    typename Math::F loss, grad;
    typename Math::M clipped_low, clipped_high, dual_clipped;
};

// PPO: max(-A ratio, -A clip(ratio)), for A < 0 at most -A dual. `cut`: the ratio itself was clamped.
template <class Math>
TW_HD TokenLoss<Math> clipped_surrogate(typename Math::F ratio, typename Math::M cut, typename Math::F advantage,
                                        const ClipBounds& clip) {
    const auto zero = Math::set(0.0f);
    const auto low = Math::set(clip.low), high = Math::set(clip.high);
    const auto plain = -advantage * ratio;
    const auto clipped = -advantage * Math::max(low, Math::min(high, ratio));
    const auto negative = advantage < zero;
    const auto bound = -advantage * Math::set(clip.dual);
    const auto largest = Math::max(clipped, plain);
    const auto dual_clipped = negative & (largest > bound);
    TokenLoss<Math> out;
    out.loss = Math::select(dual_clipped, bound, largest);
    out.grad = Math::select(cut | (plain < clipped) | dual_clipped, zero, plain);
    out.clipped_low = negative & (ratio < low);
    out.clipped_high = (advantage > zero) & (ratio > high);
    out.dual_clipped = dual_clipped;
    return out;
}

template <class Math>
struct KlTerm {
    typename Math::F value, grad;
};

// An estimator of KL(policy || reference) and its derivative by the log-probability; d = ref - logprob.
template <class Math, KlKind kind>
TW_HD KlTerm<Math> kl_term(typename Math::F d) {
    using F = typename Math::F;
    const F zero = Math::set(0.0f), one = Math::set(1.0f);
    if constexpr (kind == KlKind::k1) return {-d, one};
    if constexpr (kind == KlKind::k1_plus) return {-d, -d};
    if constexpr (kind == KlKind::k2) return {Math::set(0.5f) * d * d, -d};
    if constexpr (kind == KlKind::abs) {
        return {Math::max(-d, d), Math::select(d > zero, -one, Math::select(d < zero, one, zero))};
    }
    if constexpr (kind == KlKind::k3 || kind == KlKind::k3_plus) {
        const Clamped<Math> c = clamp_symmetric<Math>(d, kLogRatioBound);
        const F growth = Math::exp(c.value) - one;
        const F k3 = growth - c.value;  // never far below 0, so only the upper bound can cut
        const F value = Math::min(Math::set(kKlBound), k3);
        if constexpr (kind == KlKind::k3_plus) return {value, -d};
        return {value, Math::select(c.cut | (k3 > value), zero, -growth)};
    }
    return {zero, zero};
}

}  // namespace turnwise
