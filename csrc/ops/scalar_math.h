// The Math of single floats: for GPUs, for single logits and for tests on the host. On a GPU min and max take one
// instruction and return NaN if either argument is NaN, and exp takes 4. Emulated kernels do the same.
#pragma once

#include <cmath>

#include "ops/policy_loss_math.h"

namespace turnwise {

struct ScalarMath {
    using F = float;
    using M = bool;
    static TW_HD F set(float x) { return x; }
#if defined(__CUDA_ARCH__)
    static TW_HD F min(F a, F b) {
        F out;
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
        return out;
    }
    static TW_HD F max(F a, F b) {
        F out;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
        return out;
    }
    static TW_HD F power_of_two(F x) {
        F out;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
        return out;
    }
#elif defined(TURNWISE_EMULATE_CUDA)
    static TW_HD F min(F a, F b) { return a < b || a != a ? a : b; }
    static TW_HD F max(F a, F b) { return a > b || a != a ? a : b; }
    static TW_HD F power_of_two(F x) { return exp2f(x); }
#else
    static TW_HD F min(F a, F b) { return a < b ? a : b; }
    static TW_HD F max(F a, F b) { return a > b ? a : b; }
#endif
#if defined(__CUDA_ARCH__) || defined(TURNWISE_EMULATE_CUDA)
    // x log2(e) is rounded; what the rounding lost multiplies the power. 3e-7 relative for |x| <= 80.
    static TW_HD F exp(F x) {
        const F exponent = x * 1.44269504f, power = power_of_two(exponent);
        return fmaf(power, fmaf(exponent, -0.693147181f, x), power);
    }
#else
    static TW_HD F exp(F x) { return expf(x); }
#endif
    static TW_HD F near_exp(F x) { return exp(x); }
    static TW_HD M unless(M m, M n) { return m && !n; }
    static TW_HD M unless_less(M m, F a, F b) { return m && !(a < b); }
    static TW_HD M unless_differs(M m, F a, F b) { return m && !(a < b || b < a); }
    static TW_HD F select(M m, F a, F b) { return m ? a : b; }
};

}  // namespace turnwise
