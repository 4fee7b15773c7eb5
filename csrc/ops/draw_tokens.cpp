#include "ops/draw_tokens.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/check.h"
#include "core/float16.h"
#include "core/parallel.h"
#include "ops/logprob_kernel.h"

namespace turnwise {
namespace {

constexpr int64_t kValuesPerThread = 16384;  // below this a second thread costs more than it gains
constexpr int64_t kPiece = 128;              // columns of a segment that are read one by one

float read(const View& view, int64_t place) {
    if (view.dtype == DType::bf16) return to_float(view.as<BFloat16>()[place]);
    if (view.dtype == DType::f16) return to_float(view.as<Half>()[place]);
    return view.as<float>()[place];
}

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
        return read(logits_, start_ + column) * scale_;
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

// The first of several weights, added one by one, with which their sum is above `target`. Where rounding leaves the
// whole sum below it, that is the largest weight, as the last one may have a probability of about 0.
class Search {
  public:
    Search(double target, double sum) : target_(target), sum_(sum), before(sum) {}

    // Returns true if the search ends here.
    bool add(double weight, int64_t place) {
        const bool ends = sum_ + weight > target_;
        if (ends || weight > largest_) {
            found = place;
            before = sum_;
            largest_ = weight;
        }
        sum_ += weight;
        return ends;
    }

  private:
    double target_, sum_, largest_ = 0;

  public:
    int64_t found = 0;
    double before;  // the sum before `found`
};

// The first column whose cumulative weight is above `target`. `parts` are the sums of the segments.
int64_t find(const Row& row, int64_t width, const std::vector<Seen>& parts, double top, double target) {
    Search segments(target, 0);
    for (int64_t s = 0; s < int64_t(parts.size()); ++s) {
        if (segments.add(relative_to(parts[s], top).sum, s)) break;
    }
    const int64_t begin = segments.found * kLogitSegment, end = std::min(begin + kLogitSegment, width);
    Search pieces(target, segments.before);
    for (int64_t piece = begin; piece < end; piece += kPiece) {
        if (pieces.add(relative_to(row.scan(piece, std::min(piece + kPiece, end)), top).sum, piece)) break;
    }
    Search columns(target, pieces.before);
    for (int64_t column = pieces.found; column < std::min(pieces.found + kPiece, end); ++column) {
        if (columns.add(std::exp(double(row.value(column)) - top), column)) break;
    }
    return columns.found;
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
    const int64_t shares = std::clamp<int64_t>(rows * width / kValuesPerThread, 1, std::max(1, threads));
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
            drawn = temperature[r] > 0 ? find(row, width, parts, seen.max, double(uniform[r]) * seen.sum)
                                       : find_largest(row, width, parts, seen.max);
            logprob.as<float>()[r] = float(std::min(0.0, double(row.value(drawn)) - log_sum_exp(seen)));
        }
    });
    for (int64_t r = 0; r < rows; ++r) {
        require(token.as<int64_t>()[r] >= 0, "logits: a row has NaN, +inf, or no allowed token above -inf");
    }
}

}  // namespace turnwise
