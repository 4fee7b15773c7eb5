// The kernel of the log-probabilities. It takes one segment of a row at a time and is compiled once per instruction
// set.
#pragma once

#include "core/float16.h"
#include "core/view.h"
#include "ops/logprob_math.h"

namespace turnwise {

constexpr int kLogitSegment = 2048;  // columns: it stays in L1 between the two passes, and float32 sums stay accurate

constexpr int64_t kLogitsPerThread = 16384;  // below this a second thread costs more than it gains

static inline float read_logit(const View& view, int64_t place) {
    if (view.dtype == DType::bf16) return to_float(view.as<BFloat16>()[place]);
    if (view.dtype == DType::f16) return to_float(view.as<Half>()[place]);
    return view.as<float>()[place];
}

// n <= kLogitSegment logits of one row, contiguous from element `offset` of `logits`.
struct LogitSegment {
    View logits;        // the whole tile
    int64_t offset;     // of the segment in `logits`, in elements
    const float* bias;  // [n]; or null
    int n;              // columns
    float scale;        // 1 / temperature
    float cap;          // see LogitTile
};

struct LogprobKernels {
    // The sums of a segment; with the weighted sum if `weighted`.
    Seen (*scan)(const LogitSegment&, bool weighted);
    // Writes the gradient of a segment from element `out_offset` of `out` on, without the term of the target.
    void (*grad)(const LogitSegment&, const RowGradient&, const View& out, int64_t out_offset);
    // total[i] += part[offset + i] for i < n.
    void (*add)(const View& part, int64_t offset, int64_t n, float* total);
};

// Those of the machine's instruction set.
const LogprobKernels& logprob_kernels();

}  // namespace turnwise
