#include "ops/draw_tokens.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"
#include "ops/logprob_kernel.h"

namespace turnwise {
namespace {

constexpr int64_t kPiece = 128;  // columns of a segment that are read one by one

// The scaled logits of one row; those that are not allowed are -infinity.
class Row {
  public:
    Row(const DrawTensors& tensors, int64_t row) : logits_(tensors.logits) {
        start_ = row * logits_.stride[0];
        const float temperature = tensors.temperature.as<float>()[row];
        scale_ = temperature > 0 ? 1 / temperature : 1;
        if (tensors.allowed) allowed_ = tensors.allowed.as<uint8_t>() + row * tensors.allowed.stride[0];
    }

    float value(int64_t column) const {
        if (allowed_ && !(allowed_[column / 8] >> (column % 8) & 1)) return -INFINITY;
        return read_logit(logits_, start_ + column) * scale_;
    }

    // The sums of the columns begin .. end - 1, at most a segment.
    Seen scan(int64_t begin, int64_t end) const {
        const int n = int(end - begin);
        if (!allowed_) return logprob_kernels().scan({logits_, start_ + begin, nullptr, n, scale_, 0}, false);
        float masked[kLogitSegment];
        for (int i = 0; i < n; ++i) masked[i] = value(begin + i);
        View view;
        view.data = masked;
        return logprob_kernels().scan({view, 0, nullptr, n, 1, 0}, false);
    }

  private:
    const View& logits_;
    int64_t start_;  // of the row in the logits, in elements
    float scale_;
    const uint8_t* allowed_ = nullptr;
};

// The first of n weights with which their sum is above `fraction` of it. Turns `fraction` into that of the weight's own
// part that lies below. So parts of a part may be summed with other rounding: a part of weight 0 is never found.
int64_t pick(const double* weight, int64_t n, double& fraction) {
    double total = 0, sum = 0;
    for (int64_t i = 0; i < n; ++i) total += weight[i];
    const double target = std::min(fraction, 1 - 0x1p-50) * total;
    int64_t found = 0;
    while (found < n - 1 && !(sum + weight[found] > target)) sum += weight[found++];
    fraction = (target - sum) / weight[found];
    return found;
}

// The first column whose cumulative weight is above `fraction` of all. `parts` are the sums of the segments.
int64_t find(const Row& row, int64_t width, const std::vector<Seen>& parts, double top, double fraction) {
    std::vector<double> weight(std::max<size_t>({parts.size(), kPiece, kLogitSegment / kPiece}));
    for (size_t s = 0; s < parts.size(); ++s) weight[s] = relative_to(parts[s], top).sum;
    const int64_t begin = pick(weight.data(), int64_t(parts.size()), fraction) * kLogitSegment;
    const int64_t end = std::min(begin + kLogitSegment, width), pieces = (end - begin + kPiece - 1) / kPiece;
    for (int64_t p = 0; p < pieces; ++p) {
        const int64_t first = begin + p * kPiece;
        weight[p] = relative_to(row.scan(first, std::min(first + kPiece, end)), top).sum;
    }
    const int64_t first = begin + pick(weight.data(), pieces, fraction) * kPiece, n = std::min(kPiece, end - first);
    for (int64_t c = 0; c < n; ++c) weight[c] = std::exp(double(row.value(first + c)) - top);
    return first + pick(weight.data(), n, fraction);
}

// The first column with the largest logit.
int64_t find_largest(const Row& row, int64_t width, const std::vector<Seen>& parts, double top) {
    int64_t begin = 0;
    while (parts[begin / kLogitSegment].max < top) begin += kLogitSegment;
    int64_t best = begin;
    for (int64_t column = begin; column < std::min(begin + kLogitSegment, width); ++column) {
        if (row.value(column) > row.value(best)) best = column;
    }
    return best;
}

void require_column(const char* name, const View& view, int64_t rows, DType dtype) {
    require_shape(name, view, {rows});
    require_dtype(name, view, {dtype});
    require(is_contiguous_1d(view), "temperature, uniform, token, logprob: expected contiguous tensors");
}

}  // namespace

void draw_tokens(const DrawTensors& tensors, const View& token, const View& logprob, int threads) {
    const View& logits = tensors.logits;
    if (logits.dims != 2 || logits.shape[1] == 0) reject_shape("logits", logits, "[R, V]");
    require_float_stream("logits", logits);
    require(has_contiguous_rows(logits), "logits: expected contiguous rows");
    const int64_t rows = logits.shape[0], width = logits.shape[1];
    require_column("temperature", tensors.temperature, rows, DType::f32);
    require_column("uniform", tensors.uniform, rows, DType::f32);
    require_column("token", token, rows, DType::i64);
    require_column("logprob", logprob, rows, DType::f32);
    const View& allowed = tensors.allowed;
    if (allowed) {
        require_dtype("allowed", allowed, {DType::u8});
        if (allowed.dims != 2 || allowed.shape[0] != rows || allowed.shape[1] * 8 < width) {
            reject_shape("allowed", allowed, "[R, at least V / 8]");
        }
        require(has_contiguous_rows(allowed), "allowed: expected contiguous rows");
    }
    const float *temperature = tensors.temperature.as<float>(), *uniform = tensors.uniform.as<float>();
    const int64_t segments = (width + kLogitSegment - 1) / kLogitSegment;
    const int64_t shares = std::clamp<int64_t>(rows * width / kLogitsPerThread, 1, std::max(1, threads));
    run_parts(int(shares), [&](int share) {
        std::vector<Seen> parts(segments, nothing_seen());
        for (int64_t r = rows * share / shares; r < rows * (share + 1) / shares; ++r) {
            const Row row(tensors, r);
            Seen seen = nothing_seen();
            for (int64_t s = 0; s < segments; ++s) {
                parts[s] = row.scan(s * kLogitSegment, std::min((s + 1) * kLogitSegment, width));
                seen = together(seen, parts[s]);
            }
            int64_t& drawn = token.as<int64_t>()[r];
            drawn = -1;
            if (!std::isfinite(seen.max) || !std::isfinite(seen.sum)) continue;
            drawn = temperature[r] > 0 ? find(row, width, parts, seen.max, double(uniform[r]))
                                       : find_largest(row, width, parts, seen.max);
            logprob.as<float>()[r] = float(std::min(0.0, double(row.value(drawn)) - log_sum_exp(seen)));
        }
    });
    for (int64_t r = 0; r < rows; ++r) {
        require(token.as<int64_t>()[r] >= 0, "logits: a row has NaN, +inf, or no allowed token above -inf");
    }
}

}  // namespace turnwise
