// The ops of ops/logprob.h on a GPU: log-probability, entropy and their gradient on tiles of logits.
#pragma once

#include "cuda/stream.h"
#include "ops/logprob.h"

namespace turnwise::cuda {

void logprob_scan(const LogitTile& tile, const View& state, bool weighted, Stream stream);
void logprob_finish(const View& state, const View& logprob, const View& lse, const View& entropy, Stream stream);
// `out` has the shape and dtype of the logits. For float32 logits it may also be bf16 or f16.
void logprob_grad(const LogitTile& tile, const LogprobGradient& gradient, const View& out, Stream stream);
// The logits are float32; `out` as for logprob_grad.
void logprob_weights(const LogitTile& tile, const View& state, const View& reference, const View& sums, const View& out,
                     Stream stream);

}  // namespace turnwise::cuda
