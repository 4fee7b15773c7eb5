// Draws the next token of each row from its logits, on the CPU.
#pragma once

#include "core/view.h"

namespace turnwise {

// Row r of `logits` [R, V] has the distribution softmax(logits / temperature[r]), over the tokens that `allowed` names
// if it is given. At temperature 0 the row is greedy: it takes its most likely token.
struct DrawTensors {
    View logits;       // [R, V] float32, bf16 or f16, contiguous rows
    View temperature;  // [R] float32, >= 0
    View uniform;      // [R] float32, in [0, 1)
    View allowed;      // [R, at least V / 8] u8: bit t % 8 of byte t / 8 allows token t; empty: all tokens
};

// Writes `token` [R] int64, the first whose cumulative probability is above the row's `uniform`, up to the rounding of
// float32, and `logprob` [R] float32, its log-probability, at temperature 1 in greedy rows. A row does not depend on
// other rows or on the number of threads. Throws InvalidInput for a row with NaN, whose largest allowed logit is not
// finite, or whose logits are no longer finite once the temperature divides them.
void draw_tokens(const DrawTensors& tensors, const View& token, const View& logprob, int threads);

}  // namespace turnwise
