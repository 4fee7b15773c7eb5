// Log-probability and entropy of given targets under rows of logits, which may come tile by tile over the vocabulary.
// Call logprob_scan on every tile, then logprob_finish; in the backward pass call logprob_grad on every tile.
#pragma once

#include "core/view.h"

namespace turnwise {

// The columns [first, first + v) of the logits of n tokens: x = (logits + bias) * scale.
struct LogitTile {
    View logits;    // [n, v] f32, bf16 or f16; rows contiguous, any distance between them
    View bias;      // [v] f32, contiguous; or none
    View targets;   // [n] i64 or i32, any stride; of the whole vocabulary, so most lie in other tiles
    int64_t first;  // the tile's first column in the vocabulary
    float scale;    // 1 / temperature
};

// state [4, n] f64, contiguous: maximum, sum, weighted sum (see logprob_math.h) and the target's x (NaN until met).
// A tile with first == 0 begins it. The weighted sum, which the entropy alone needs, is kept if `weighted`.
void logprob_scan(const LogitTile& tile, const View& state, bool weighted, int threads);

// logprob, lse and (or none) entropy [n] f32, contiguous.
void logprob_finish(const View& state, const View& logprob, const View& lse, const View& entropy);

// All [n] f32, any stride; entropy and its gradient: both or none. `out` has the shape and dtype of the logits, which
// it may be itself.
struct LogprobGradient {
    View lse;           // log(sum(exp(x)))
    View grad_logprob;  // upstream gradient of the target's log-probability
    View entropy;       // -sum(p log p)
    View grad_entropy;  // upstream gradient of the entropy
};
void logprob_grad(const LogitTile& tile, const LogprobGradient& gradient, const View& out, int threads);

// total[i] += part[i]: [n, h] f32 and f32, bf16 or f16, contiguous rows.
void add_narrow(const View& total, const View& part, int threads);

// Shapes and types; the CPU and the GPU check the same.
void check_logit_tile(const LogitTile& tile);
void check_logprob_state(const View& state, int64_t rows);
void check_logprob_gradient(const LogprobGradient& gradient, int64_t rows);
void check_row_floats(const char* name, const View& values, int64_t rows);

// Results depend on neither threads nor the cut into rows. All throw InvalidInput.

}  // namespace turnwise
