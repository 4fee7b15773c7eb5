// Log-probability and entropy of given targets under rows of logits. The logits may come in tiles of the vocabulary.
// Call logprob_scan on every tile, then logprob_finish; in the backward pass call logprob_grad on every tile.
//
// Results depend neither on the number of threads nor on how rows are grouped into calls. All functions throw
// InvalidInput.
#pragma once

#include "core/view.h"

namespace turnwise {

constexpr int64_t kIgnoreNone = INT64_MIN;

// Columns [first, first + v) of the logits of n tokens. The scaled logits are x = (logits + bias) * scale, or
// x = cap tanh((logits + bias) / cap) * scale. A row whose target is `ignore` is not read: its log-probability, entropy
// and gradient are 0.
struct LogitTile {
    View logits;     // [n, v] f32, bf16 or f16; contiguous rows, any row stride
    View bias;       // [v] f32, contiguous; or none
    View targets;    // [n] i64 or i32, any stride; ids of the whole vocabulary, so most are in other tiles
    int64_t first;   // the tile's first column in the vocabulary
    float scale;     // 1 / temperature
    float cap;       // of the logits before they are scaled; 0: none
    int64_t ignore;  // target of the rows to leave out; kIgnoreNone: no row
};

// Adds a tile to `state` [4, n] f64, contiguous: maximum, sum, weighted sum (see logprob_math.h) and the target's x
// (NaN until its tile comes). A tile with first == 0 resets the state. Only the entropy needs the weighted sum, which
// is kept if `weighted`.
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

// Writes the derivative of sum(exp(x)) over all tokens but the target, for gradients that need no second look at the
// logits: `out` is scale exp(x - reference) times the slope of the cap, and 0 for the target. Call it after
// logprob_scan of the same tile. `out`: as for logprob_grad. `reference` [n] f32, contiguous, follows the state's
// maximum: within a factor of exp(kReferenceLag). Where it grows, the row of `sums` [n, h] f32, contiguous rows,
// shrinks with the weights to come. A tile with first == 0 resets it; the sums are then 0.
constexpr float kReferenceLag = 8;
void logprob_weights(const LogitTile& tile, const View& state, const View& reference, const View& sums, const View& out,
                     int threads);

// total += part, both [n, h] with contiguous rows; total f32, part f32, bf16 or f16.
void add_narrow(const View& total, const View& part, int threads);

// Checks of shapes and types that the CPU and the GPU share.
void check_logit_tile(const LogitTile& tile);
void check_logprob_state(const View& state, int64_t rows);
void check_logprob_gradient(const LogprobGradient& gradient, int64_t rows);
void check_logprob_sums(const View& reference, const View& sums, int64_t rows);
void check_row_floats(const char* name, const View& values, int64_t rows);

}  // namespace turnwise
