#include "ops/logprob.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/check.h"
#include "core/float16.h"
#include "core/isa.h"
#include "core/parallel.h"
#include "ops/logprob_kernel.h"
#include "ops/scalar_math.h"

namespace turnwise {

const LogprobKernels& logprob_kernels_baseline();
#if defined(TURNWISE_X86)
const LogprobKernels& logprob_kernels_avx2();
const LogprobKernels& logprob_kernels_avx512();
#endif

namespace {

// The columns of the state tensor, see logprob_scan.
struct State {
    State(const View& view, int64_t n) : data(view.as<double>()), n(n) { check_logprob_state(view, n); }
    Seen seen(int64_t row) const { return {data[row], data[n + row], data[2 * n + row]}; }
    double& picked(int64_t row) const { return data[3 * n + row]; }
    void keep(int64_t row, const Seen& s) const {
        data[row] = s.max;
        data[n + row] = s.sum;
        data[2 * n + row] = s.weighted;
    }

    double* data;  // [4, n]: max, sum, weighted, picked
    int64_t n;     // tokens
};

// Access to the rows and segments of a LogitTile.
class Tile {
  public:
    explicit Tile(const LogitTile& tile) : tile_(tile), rows_(tile.logits.shape[0]), width_(tile.logits.shape[1]) {
        check_logit_tile(tile);
    }

    int64_t rows() const { return rows_; }
    int64_t width() const { return width_; }

    bool ignored(int64_t row) const { return tile_.ignore != kIgnoreNone && id(row) == tile_.ignore; }

    // The column of a row's target; -1 if the tile does not have it.
    int64_t target(int64_t row) const {
        const int64_t column = id(row);
        return column >= 0 && column < width_ ? column : -1;
    }

    // The scaled logit x.
    float value(int64_t row, int64_t column) const {
        const int64_t place = row * tile_.logits.stride[0] + column;
        const float bias = tile_.bias ? tile_.bias.as<float>()[column] : 0.0f;
        const float logit = read_logit(tile_.logits, place) + bias;
        return tile_.cap > 0 ? capped<ScalarMath>(logit, softcap()) : logit * tile_.scale;
    }
    // The derivative of the cap at the scaled logit x; 1 without a cap.
    float slope(float x) const { return tile_.cap > 0 ? cap_slope<ScalarMath>(x, softcap()) : 1.0f; }

    // Calls body(segment, first column) for each segment of a row.
    template <class Body>
    void each_segment(int64_t row, const Body& body) const {
        for (int64_t begin = 0; begin < width_; begin += kLogitSegment) {
            const int n = int(std::min<int64_t>(kLogitSegment, width_ - begin));
            const float* bias = tile_.bias ? tile_.bias.as<float>() + begin : nullptr;
            body(LogitSegment{tile_.logits, row * tile_.logits.stride[0] + begin, bias, n, tile_.scale, tile_.cap},
                 begin);
        }
    }

    // Calls body(row) for each row; threads share the rows.
    template <class Body>
    void each_row(int threads, const Body& body) const {
        const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, rows_ * width_ / kLogitsPerThread));
        run_parts(int(parts), [&](int part) {
            for (int64_t row = rows_ * part / parts; row < rows_ * (part + 1) / parts; ++row) body(row);
        });
    }

    // Fills a row of `out` with zeros, whose bits are all 0 in every float type.
    void clear(const View& out, int64_t start) const {
        const size_t size = out.dtype == DType::f32 ? 4 : 2;
        std::memset(out.as<char>() + size_t(start) * size, 0, size_t(width_) * size);
    }

    static void write(const View& view, int64_t place, float value) {
        if (view.dtype == DType::bf16) {
            view.as<BFloat16>()[place] = to_bfloat16(value);
        } else if (view.dtype == DType::f16) {
            view.as<Half>()[place] = to_half(value);
        } else {
            view.as<float>()[place] = value;
        }
    }

  private:
    int64_t id(int64_t row) const {
        const View& targets = tile_.targets;
        const int64_t place = row * targets.stride[0];
        return targets.dtype == DType::i64 ? targets.as<int64_t>()[place] : targets.as<int32_t>()[place];
    }
    Softcap softcap() const { return softcap_of(tile_.cap, tile_.scale); }

    const LogitTile& tile_;
    int64_t rows_, width_;  // [rows, width]: shape of the logits
};

}  // namespace

const LogprobKernels& logprob_kernels() {
#if defined(TURNWISE_X86)
    if (isa() == Isa::avx512) return logprob_kernels_avx512();
    if (isa() == Isa::avx2) return logprob_kernels_avx2();
#endif
    return logprob_kernels_baseline();
}

void check_logit_tile(const LogitTile& tile) {
    const View& logits = tile.logits;
    if (logits.dims != 2) reject_shape("logits", logits, "[N, V]");
    require_float_stream("logits", logits);
    require(has_contiguous_rows(logits), "logits: expected contiguous rows");
    require_shape("targets", tile.targets, {logits.shape[0]});
    require_dtype("targets", tile.targets, {DType::i64, DType::i32});
    require(tile.cap >= 0 && std::isfinite(tile.cap), "cap: expected a finite number >= 0");
    if (!tile.bias) return;
    require_shape("bias", tile.bias, {logits.shape[1]});
    require_dtype("bias", tile.bias, {DType::f32});
    require(is_contiguous_1d(tile.bias), "bias: expected a contiguous tensor");
}

void check_logprob_state(const View& state, int64_t rows) {
    require_shape("state", state, {4, rows});
    require_dtype("state", state, {DType::f64});
    require(is_contiguous(state), "state: expected a contiguous tensor");
}

void check_row_floats(const char* name, const View& values, int64_t rows) {
    require_shape(name, values, {rows});
    require_dtype(name, values, {DType::f32});
}

void check_logprob_gradient(const LogprobGradient& gradient, int64_t rows) {
    check_row_floats("lse", gradient.lse, rows);
    check_row_floats("grad_logprob", gradient.grad_logprob, rows);
    require(bool(gradient.entropy) == bool(gradient.grad_entropy), "entropy, grad_entropy: expected both or none");
    if (!gradient.entropy) return;
    check_row_floats("entropy", gradient.entropy, rows);
    check_row_floats("grad_entropy", gradient.grad_entropy, rows);
}

void logprob_scan(const LogitTile& given, const View& state_view, bool weighted, int threads) {
    const Tile tile(given);
    const State state(state_view, tile.rows());
    const LogprobKernels& kernel = logprob_kernels();
    tile.each_row(threads, [&](int64_t row) {
        if (tile.ignored(row)) {  // one token of probability 1, the target
            state.keep(row, {0, 1, 0});
            state.picked(row) = 0;
            return;
        }
        Seen seen = nothing_seen();
        tile.each_segment(
            row, [&](const LogitSegment& segment, int64_t) { seen = together(seen, kernel.scan(segment, weighted)); });
        state.keep(row, seen);
        const int64_t target = tile.target(row);
        state.picked(row) = target >= 0 ? tile.value(row, target) : std::numeric_limits<double>::quiet_NaN();
    });
}

void logprob_finish(const View& state_view, const View& logprob, const View& lse, const View& entropy) {
    const int64_t n = logprob.shape[0];
    const State state(state_view, n);
    check_row_floats("logprob", logprob, n);
    check_row_floats("lse", lse, n);
    if (entropy) check_row_floats("entropy", entropy, n);
    for (int64_t row = 0; row < n; ++row) {
        const Seen seen = state.seen(row);
        const double sum = log_sum_exp(seen);
        logprob.as<float>()[row * logprob.stride[0]] = float(state.picked(row) - sum);
        lse.as<float>()[row * lse.stride[0]] = float(sum);
        if (entropy) entropy.as<float>()[row * entropy.stride[0]] = float(entropy_of(seen));
    }
}

void logprob_grad(const LogitTile& given, const LogprobGradient& gradient, const View& out, int threads) {
    const Tile tile(given);
    check_logprob_gradient(gradient, tile.rows());
    require_shape_of("out", out, "logits", given.logits);
    require_dtype("out", out, {given.logits.dtype});
    require(has_contiguous_rows(out), "out: expected contiguous rows");
    const LogprobKernels& kernel = logprob_kernels();
    const auto at = [](const View& values, int64_t row) {
        return values ? values.as<float>()[row * values.stride[0]] : 0.0f;
    };
    tile.each_row(threads, [&](int64_t row) {
        const RowGradient g = row_gradient(at(gradient.lse, row), at(gradient.entropy, row),
                                           at(gradient.grad_logprob, row), at(gradient.grad_entropy, row), given.scale);
        const int64_t target = tile.target(row);
        const int64_t start = row * out.stride[0];
        if (is_zero(g) || tile.ignored(row)) {  // the token does not train, so even NaN logits get 0
            tile.clear(out, start);
            return;
        }
        // The target's gradient is computed in float32, before its logit may be overwritten.
        const float x = target >= 0 ? tile.value(row, target) : 0.0f;
        tile.each_segment(
            row, [&](const LogitSegment& segment, int64_t begin) { kernel.grad(segment, g, out, start + begin); });
        if (target < 0) return;
        Tile::write(out, start + target, (g.target + logit_gradient<ScalarMath>(x, g)) * tile.slope(x));
    });
}

void add_narrow(const View& total, const View& part, int threads) {
    if (total.dims != 2) reject_shape("total", total, "[N, H]");
    require_shape_of("part", part, "total", total);
    require_dtype("total", total, {DType::f32});
    require_float_stream("part", part);
    const int64_t rows = total.shape[0], width = total.shape[1];
    require(has_contiguous_rows(total) && has_contiguous_rows(part), "total, part: expected contiguous rows");
    const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, rows * width / kLogitsPerThread));
    run_parts(int(parts), [&](int i) {
        for (int64_t row = rows * i / parts; row < rows * (i + 1) / parts; ++row) {
            logprob_kernels().add(part, row * part.stride[0], width, total.as<float>() + row * total.stride[0]);
        }
    });
}

}  // namespace turnwise
