// The Math of single floats: for GPUs, for single logits and for tests on the host.
#pragma once

#include <cmath>

#include "ops/policy_loss_math.h"

namespace turnwise {

struct ScalarMath {
    using F = float;
    using M = bool;
    static TW_HD F set(float x) { return x; }
    static TW_HD F min(F a, F b) { return a < b ? a : b; }
    static TW_HD F max(F a, F b) { return a > b ? a : b; }
    static TW_HD F exp(F x) { return expf(x); }
    static TW_HD F near_exp(F x) { return expf(x); }
    static TW_HD M unless(M m, M n) { return m && !n; }
    static TW_HD M unless_less(M m, F a, F b) { return m && !(a < b); }
    static TW_HD M unless_differs(M m, F a, F b) { return m && !(a < b || b < a); }
    static TW_HD F select(M m, F a, F b) { return m ? a : b; }
};

}  // namespace turnwise
