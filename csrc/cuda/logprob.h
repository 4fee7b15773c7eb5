// The ops of ops/logprob.h on a GPU: log-probability, entropy and their gradient on rows of logits.
#pragma once

#include "cuda/stream.h"
#include "ops/logprob.h"

namespace turnwise::cuda {

void logprob_scan(const LogitTile& tile, const View& state, bool weighted, Stream stream);
void logprob_finish(const View& state, const View& logprob, const View& lse, const View& entropy, Stream stream);
// `out` has the shape and dtype of the logits, and may be the logits. For float32 logits it may also be bf16 or f16,
// also in the first half of each row of the logits.
void logprob_grad(const LogitTile& tile, const LogprobGradient& gradient, const View& out, Stream stream);
}  // namespace turnwise::cuda
