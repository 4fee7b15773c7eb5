// The kernel of the log-probabilities, which takes one segment of a row at a time. Compiled once per instruction set.
#pragma once

#include "core/view.h"
#include "ops/logprob_math.h"

namespace turnwise {

constexpr int kLogitSegment = 2048;  // columns: stays in L1 between the two looks at it, and float32 lanes lose nothing

// n <= kLogitSegment logits of one row, contiguous from `offset` of `logits`.
struct LogitSegment {
    View logits;
    int64_t offset;     // of the segment, in elements
    const float* bias;  // or null
    int n;              // columns
    float scale;        // 1 / temperature
};

struct LogprobKernels {
    Seen (*scan)(const LogitSegment&, bool weighted);
    void (*grad)(const LogitSegment&, const RowGradient&, const View& out, int64_t out_offset);
    void (*add)(const View& part, int64_t offset, int64_t n, float* total);
};

}  // namespace turnwise
