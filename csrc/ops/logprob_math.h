// Log-softmax of a row of logits, segment by segment: its running state, and the gradient of one logit. The code serves
// host and device; policy_loss_math.h describes its parameter Math.
//
// Online softmax: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
#pragma once

#include <cmath>

#include "ops/policy_loss_math.h"

namespace turnwise {

constexpr float kLeastLog = -87.0f;  // exp of less counts as 0; here every step of exp still gives a normal number

// exp(x) for logits x relative to about the largest one: x <= 0 up to rounding. NaN stays NaN.
template <class Math>
struct Weight {
    typename Math::F log;    // x, at least kLeastLog
    typename Math::F value;  // exp(x)
};
template <class Math>
TW_HD Weight<Math> softmax_weight(typename Math::F x) {
    const auto least = Math::set(kLeastLog);
    const auto log = Math::max(least, x);
    return {log, Math::select(x < least, Math::set(0.0f), Math::exp(log))};
}

// tanh to 1e-7. A polynomial near 0, as the quotient loses its leading digits there.
template <class Math>
TW_HD typename Math::F tanh_of(typename Math::F z) {
    const auto zero = Math::set(0.0f), one = Math::set(1.0f);
    const auto size = Math::max(zero - z, z);
    const auto e = Math::exp(Math::max(Math::set(kLeastLog), Math::set(-2.0f) * size));
    const auto quotient = (one - e) / (one + e);
    // tanh(z) / z - 1 over z^2, fitted by least squares for |z| < 0.625
    const auto w = z * z;
    auto p = Math::set(-0.006104961f) * w + Math::set(0.021003652f);
    p = p * w + Math::set(-0.053852502f);
    p = p * w + Math::set(0.13332783f);
    p = p * w + Math::set(-0.33333328f);
    const auto signed_quotient = Math::select(z < zero, zero - quotient, quotient);
    return Math::select(size < Math::set(0.625f), z + z * (w * p), signed_quotient);
}

// Caps logits as Gemma 2 does (https://arxiv.org/abs/2408.00118, section 2), before the temperature divides them.
struct Softcap {
    float inverse;  // 1 / cap
    float top;      // scale cap: the largest x
};
TW_HD Softcap softcap_of(float cap, float scale) {
    return {1.0f / cap, scale * cap};
}
// The capped and scaled logit x.
template <class Math>
TW_HD typename Math::F capped(typename Math::F logit, const Softcap& by) {
    return Math::set(by.top) * tanh_of<Math>(logit * Math::set(by.inverse));
}
// The derivative of the cap, 1 - tanh^2, from the result x.
template <class Math>
TW_HD typename Math::F cap_slope(typename Math::F x, const Softcap& by) {
    const auto t = x * Math::set(1.0f / by.top);
    return Math::set(1.0f) - t * t;
}

// The state of an online softmax over logits x.
struct Seen {
    double max;       // largest x; -infinity if nothing was seen
    double sum;       // sum of exp(x - max)
    double weighted;  // sum of exp(x - max) (x - max), for the entropy
};

TW_HD Seen nothing_seen() {
    return {-double(INFINITY), 0, 0};
}

// The same state, relative to a larger maximum.
TW_HD Seen relative_to(const Seen& s, double top) {
    if (!(s.max > -double(INFINITY))) return {top, s.sum, 0};  // the sum is 0, or NaN
    const double shift = s.max - top, factor = exp(shift);
    return {top, factor * s.sum, factor * (s.weighted + shift * s.sum)};
}

// The state of all logits of a and b.
TW_HD Seen together(const Seen& a, const Seen& b) {
    const double top = a.max > b.max ? a.max : b.max;
    const Seen left = relative_to(a, top), right = relative_to(b, top);
    return {top, left.sum + right.sum, left.weighted + right.weighted};
}

TW_HD double log_sum_exp(const Seen& s) {
    return s.max + log(s.sum);
}
TW_HD double entropy_of(const Seen& s) {
    return log(s.sum) - s.weighted / s.sum;
}

// Let p = exp(x - lse) and H = -sum(p log p), with upstream gradients g of log p[target] and h of H. The gradient of x
// is then  g ([target] - p) - h p (log p + H), and that of the logit is `scale` times as much.
struct RowGradient {
    float lse;          // log(sum(exp(x)))
    float flat, slope;  // every logit gets p (flat + slope log p): -scale (g + h H) and -scale h
    float target;       // scale g: the target's logit gets this in addition
};

TW_HD RowGradient row_gradient(float lse, float entropy, float grad_logprob, float grad_entropy, float scale) {
    return {lse, -scale * (grad_logprob + grad_entropy * entropy), -scale * grad_entropy, scale * grad_logprob};
}

TW_HD bool is_zero(const RowGradient& g) {
    return g.flat == 0 && g.slope == 0 && g.target == 0;
}

template <class Math>
TW_HD typename Math::F logit_gradient(typename Math::F x, const RowGradient& row) {
    const Weight<Math> p = softmax_weight<Math>(x - Math::set(row.lse));
    return p.value * (Math::set(row.flat) + Math::set(row.slope) * p.log);
}

}  // namespace turnwise
