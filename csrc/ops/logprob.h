// Log-probability and entropy of given targets under rows of logits, which may come tile by tile over the vocabulary:
// scan every tile, finish, and with the gradients at hand turn each tile into its gradient.
#pragma once

#include "core/view.h"

namespace turnwise {

// The columns [first, first + v) of the logits of n tokens: x = (logits + bias) * scale.
struct LogitTile {
    View logits;   // [n, v] f32, bf16 or f16; rows contiguous, any distance between them
    View bias;     // [v] f32, contiguous; or none
    View targets;  // [n] i64 or i32, any stride; of the whole vocabulary, so most lie in other tiles
    int64_t first;
    float scale;
};

// state [4, n] f64, contiguous: maximum, sum, weighted sum (see logprob_math.h) and the target's x (NaN until met).
// A tile with first == 0 begins it. The weighted sum, which the entropy alone needs, is kept if `weighted`.
void logprob_scan(const LogitTile& tile, const View& state, bool weighted, int threads);

// logprob, lse and (or none) entropy [n] f32, contiguous.
void logprob_finish(const View& state, const View& logprob, const View& lse, const View& entropy);

// Gradients [n] f32, any stride; entropy and its gradient: both or none. `out` has the shape and dtype of the logits,
// which it may be itself.
struct LogprobGradient {
    View lse, grad_logprob;
    View entropy, grad_entropy;
};
void logprob_grad(const LogitTile& tile, const LogprobGradient& gradient, const View& out, int threads);

// total[i] += part[i]: [n, h] f32 and f32, bf16 or f16, contiguous rows.
void add_narrow(const View& total, const View& part, int threads);

// Results depend on neither threads nor the cut into rows. All throw InvalidInput.

}  // namespace turnwise
