// What the driver of the log-probabilities asks of a kernel: a piece of one row at a time. Compiled once per
// instruction set.
#pragma once

#include "core/view.h"
#include "ops/logprob_math.h"

namespace turnwise {

constexpr int kLogitPiece = 2048;  // columns: stays in L1 between the two looks at it, and float32 lanes lose nothing

// n <= kLogitPiece logits of one row, contiguous from `offset` of `logits`.
struct LogitPiece {
    View logits;
    int64_t offset;
    const float* bias;  // or null
    int n;
    float scale;
};

struct LogprobKernels {
    Seen (*scan)(const LogitPiece&, bool weighted);
    void (*grad)(const LogitPiece&, const RowGradient&, const View& out, int64_t out_offset);
    void (*add)(const View& part, int64_t offset, int64_t n, float* total);
};

}  // namespace turnwise
