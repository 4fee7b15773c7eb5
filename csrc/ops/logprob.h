// Log-probability and entropy of given targets under rows of logits. Call logprob_scan, then logprob_finish; once the
// upstream gradients are known, logprob_grad turns the logits into their gradient.
//
// Results depend neither on the number of threads nor on how rows are grouped into calls. All functions throw
// InvalidInput.
#pragma once

#include "core/view.h"

namespace turnwise {

constexpr int64_t kIgnoreNone = INT64_MIN;

// The logits of n tokens, or of one rank's part of the vocabulary. The scaled logits are x = (logits + bias) * scale,
// or x = cap tanh((logits + bias) / cap) * scale. A row whose target is `ignore` is not read: its log-probability,
// entropy and gradient are 0.
struct LogitTile {
    View logits;     // [n, v] f32, bf16 or f16; contiguous rows, any row stride
    View bias;       // [v] f32, contiguous; or none
    View targets;    // [n] i64 or i32, any stride; columns of the tile, or beyond it if another rank has the column
    float scale;     // 1 / temperature
    float cap;       // of the logits before they are scaled; 0: none
    int64_t ignore;  // target of the rows to leave out; kIgnoreNone: no row
};

// Writes `state` [4, n] f64, contiguous: maximum, sum, weighted sum (see logprob_math.h) and the target's x (NaN if the
// tile does not have it). Only the entropy needs the weighted sum, which is computed if `weighted`.
void logprob_scan(const LogitTile& tile, const View& state, bool weighted, int threads);

// Writes logprob, lse and entropy (or none), each [n] f32. On a GPU they must be contiguous.
void logprob_finish(const View& state, const View& logprob, const View& lse, const View& entropy);

// All [n] f32, any stride. entropy and grad_entropy: both or none.
struct LogprobGradient {
    View lse;           // log(sum(exp(x)))
    View grad_logprob;  // upstream gradient of the target's log-probability
    View entropy;       // -sum(p log p)
    View grad_entropy;  // upstream gradient of the entropy
};
// Writes the gradient of the logits to `out`, which has their shape and dtype and may be the logits themselves.
void logprob_grad(const LogitTile& tile, const LogprobGradient& gradient, const View& out, int threads);

// total += part, both [n, h] with contiguous rows; total f32, part f32, bf16 or f16.
void add_narrow(const View& total, const View& part, int threads);

// Checks of shapes and types that the CPU and the GPU share.
void check_logit_tile(const LogitTile& tile);
void check_logprob_state(const View& state, int64_t rows);
void check_logprob_gradient(const LogprobGradient& gradient, int64_t rows);
void check_row_floats(const char* name, const View& values, int64_t rows);

}  // namespace turnwise
