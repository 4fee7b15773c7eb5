#include "cuda/policy_loss.h"

#include "cuda/policy_loss_kernel.h"

// Every warp takes an equal span of the tokens, whatever the rows, and walks the pieces of rows in it: long rows
// balance by themselves. Two launches: `prepare` counts tokens and sums what a whole row must know, where that is
// needed; `main` gives gradients and metrics, and its last block adds up.
namespace turnwise::cuda {
namespace loss {
namespace {

enum Column { tokens, low, high, third, log_ratio, k3, loss, kl, mismatch, weight, weight_square, rejected, entropy };
constexpr int kSums = entropy + 1;  // then comes the largest ratio
constexpr int kColumns = kSums + 1;
constexpr int kSlices = kThreads / 16;  // of blocks, as the last one adds them up

// ---- One row --------------------------------------------------------------------------------------------------------
__device__ double inverse(double value) {
    return value > 0 ? 1 / value : value == 0 ? 0 : double(NAN);
}

// A row's trained tokens divided by: the batch's number, or its actor's.
__device__ double normalizer_of(const Params& p, int actor) {
    if (p.normalizer.data) return p.normalizer.number(p.options.aggregation == Aggregation::agent_mean ? actor : 0);
    switch (p.options.aggregation) {
        case Aggregation::token_mean:
            return p.mask.data ? double(p.counts->tokens) : double(p.rows.tokens);
        case Aggregation::seq_mean_token_sum_norm:
            return p.options.max_length;
        case Aggregation::agent_mean:
            return double(p.actor_tokens[actor]);
        default:
            return double(p.counts->rows);
    }
}

// What all rows of an actor share of their weight; the rest depends on the row's length.
__device__ double actor_weight(const Params& p, int actor) {
    if (p.options.aggregation != Aggregation::agent_mean) return inverse(normalizer_of(p, 0));
    double active = 0;
    for (int a = 0; a < p.actors; ++a) active += normalizer_of(p, a) > 0;
    return inverse(active) * inverse(normalizer_of(p, actor));
}

struct Row {
    float weight = 0, advantage = 0;
    RowTerms terms{1, 0, 0, false};
    float importance = 1;
    bool rejected = false;
    ClipRange<ScalarMath> range;
};

__device__ double row_sum(const Params& p, int64_t row, RowSum which) {
    const int64_t first = row_start(p.rows, row) / p.rows.span, last = (row_start(p.rows, row + 1) - 1) / p.rows.span;
    double total = 0;
    for (int64_t piece = first + threadIdx.x % kWarp; piece <= last; piece += kWarp) {
        total += p.records[(row + piece) * kRowSums + which];
    }
    return warp_sum(total);
}

__device__ Row read_row(const Params& p, int64_t row, double shared_weight) {
    const PolicyLossOptions& o = p.options;
    Row out;
    const bool by_length = o.aggregation == Aggregation::seq_mean_token_mean;
    const double length = by_length || is_by_row(o.variant.kind) ? double(p.lengths[row]) : 0;
    out.weight = float(by_length ? shared_weight * inverse(length) : shared_weight);
    if (p.row_advantages.data) out.advantage = p.row_advantages.number(row);
    if (is_by_row(o.variant.kind)) {
        const double advantage = o.variant.kind == VariantKind::gmpo ? row_sum(p, row, sum_advantage) : 0;
        const double kl = kl_by_row(o) ? row_sum(p, row, sum_kl) : 0;
        out.terms = row_terms(o.variant, length, row_sum(p, row, sum_log_ratio), advantage, kl);
    }
    if (o.correction == Correction::sequence) {
        const double sum = row_sum(p, row, sum_mismatch), bound = kLogRatioBound;
        const double importance = exp(sum > bound ? bound : sum < -bound ? -bound : sum);
        out.rejected = importance < double(o.reject_below) || importance > double(o.reject_above);
        out.importance = out.rejected ? 0 : importance > double(o.cap) ? o.cap : float(importance);
    }
    out.range = clip_range<ScalarMath>(out.advantage, o.variant);
    return out;
}

// ---- Tokens ---------------------------------------------------------------------------------------------------------
struct Sums {
    float of[kColumns] = {};
};

// What a kernel is made for; the rest of the code, and the registers that it takes, are left out of it. `clip`: PPO's
// clip with the k3 estimator, if any, weighted by the ratio or not. `lean`: besides, neither rollouts nor entropies.
enum class Form { any, clip, lean, clip_weighted, lean_weighted };

TW_HD constexpr bool is_lean(Form form) {
    return form == Form::lean || form == Form::lean_weighted;
}
TW_HD constexpr bool weighs_kl(Form form) {
    return form == Form::clip_weighted || form == Form::lean_weighted;
}

// One token's gradient, without what masks it.
template <Form form>
__device__ float one_token(const Params& p, const Row& row, float logprob, float old, float ref, float rollout,
                           float advantage, float entropy_value, bool chosen, Sums& sums) {
    using Math = ScalarMath;
    constexpr bool clip_only = form != Form::any;
    const PolicyLossOptions& o = p.options;
    const float raw = logprob - old, bounded = clamp_symmetric<Math>(raw, kLogRatioBound);
    const float ratio = Math::exp(bounded);
    const bool open = Math::unless_differs(true, bounded, raw);
    TokenLoss<Math> out;
    if constexpr (clip_only) {
        const bool per_token = p.advantages.data != nullptr;
        const auto range = per_token ? clip_range<Math>(advantage, o.variant) : row.range;
        out = clipped_surrogate<Math>(ratio, true, open, per_token ? advantage : row.advantage, range);
    } else {
        const Token<Math> token{
            logprob,       bounded, ratio, true, open, advantage, chosen, row.terms.ratio, row.terms.advantage,
            !row.terms.cut};
        out = token_loss<Math>(token, o.variant);
    }
    if (!is_lean(form) && p.rollout.data) {
        const float difference = old - rollout;
        const float w = Math::exp(clamp_symmetric<Math>(difference, kLogRatioBound));
        float applied = row.importance;
        if (o.correction == Correction::token) {
            const bool outside = w < o.reject_below || w > o.reject_above;
            applied = outside ? 0.0f : Math::min(o.cap, w);
            sums.of[rejected] += outside;
        } else {
            sums.of[rejected] += row.rejected;
        }
        out.loss *= applied;
        out.grad *= applied;
        sums.of[mismatch] += difference;
        sums.of[weight] += w;
        sums.of[weight_square] += w * w;
    }
    if (p.ref.data) {
        const float d = ref - logprob;
        const auto estimate = clip_only ? kl_term<Math, KlKind::k3>(d) : kl_term<Math>(kl_kind(o), d);
        auto term = estimate;
        if (weighs_kl(form) || (!clip_only && o.kl_weighted)) {
            const bool by_row = !clip_only && kl_by_row(o);
            const float carried = by_row ? row.terms.kl : open ? estimate.value : 0.0f;
            term = importance_weighted<Math>(estimate, by_row ? row.terms.ratio : ratio, carried);
        }
        out.loss = fmaf(o.kl_coef, term.value, out.loss);
        out.grad = fmaf(-o.kl_coef, term.slope, out.grad);
        sums.of[kl] += estimate.value;
    }
    if (!is_lean(form)) sums.of[entropy] += entropy_value;
    sums.of[tokens] += 1;
    sums.of[low] += out.clipped_low;
    sums.of[high] += out.clipped_high;
    sums.of[third] += out.third;
    sums.of[log_ratio] += bounded;
    sums.of[k3] += ratio - 1 - bounded;
    sums.of[loss] += row.weight == 0 ? 0.0f : out.loss * row.weight;
    sums.of[kSums] = Math::max(sums.of[kSums], ratio);
    return out.grad * row.weight;
}

// A pack of every stream, none of which is looked at here: all loads are on their way at once.
template <class T, bool fast, Form form>
struct TokenPacks {
    using At = PackAt<T, fast>;
    typename At::Floats logprob, old, ref{}, rollout{}, advantage{}, entropy_of{};
    typename At::Mask mask, selected{};

    __device__ __forceinline__ TokenPacks(const Params& p, const At& at)
        : logprob(at.load(p.logprobs)), old(at.load(p.old_logprobs)), mask(at.ask(p.mask)) {
        if (p.ref.data) ref = at.load(p.ref);
        if (p.advantages.data) advantage = at.load(p.advantages);
        if (!is_lean(form) && p.rollout.data) rollout = at.load(p.rollout);
        if (!is_lean(form) && p.entropy.data) entropy_of = at.load(p.entropy);
        if (form == Form::any && p.selected.data) selected = at.ask(p.selected);
    }
};

// The tokens of [begin, end) of one row. A lane takes a 16-byte pack of every stream at a time; the lean form, which
// has the registers for it, asks for the next before it computes this one.
template <class T, bool fast, Form form>
__device__ void row_piece(const Params& p, const Row& row, const RowPiece& piece, Sums& sums) {
    constexpr int kPack = 16 / int(sizeof(T)), kStep = kWarp * kPack;
    using Packs = TokenPacks<T, fast, form>;
    const int lane = int(threadIdx.x) % kWarp;
    constexpr bool ahead = is_lean(form);
    int64_t i = piece.begin / kPack * kPack + lane * kPack;
    if (i >= piece.end) return;
    Packs now(p, {piece, i}), next = now;
    for (; i < piece.end; i += kStep, now = next) {
        if (ahead && i + kStep < piece.end) next = Packs(p, {piece, i + kStep});
        const PackAt<T, fast> at{piece, i};
        const unsigned trained = at.truths(p.mask, now.mask);
        const unsigned chosen = form == Form::any && p.selected.data ? at.truths(p.selected, now.selected) : 0;
        Pack<T, kPack> grad;
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            float slope = 0;
            if (trained >> k & 1) {
                const float own = p.advantages.data ? to_float(now.advantage[k]) : row.advantage;
                slope =
                    one_token<form>(p, row, to_float(now.logprob[k]), to_float(now.old[k]), to_float(now.ref[k]),
                                    to_float(now.rollout[k]), own, to_float(now.entropy_of[k]), chosen >> k & 1, sums);
            }
            grad.value[k] = from_float<T>(slope);
        }
        at.store(p.grad, p.grad_dtype, grad);
        if (!ahead && i + kStep < piece.end) next = Packs(p, {piece, i + kStep});
    }
}

// ---- Adding up ------------------------------------------------------------------------------------------------------
// Column by column: sums, but the largest of the ratios.
__device__ double combine(int column, double a, double b) {
    return column < kSums ? a + b : a < b ? b : a;
}

// A warp's sums of one actor into its own table, in the order in which the warp comes by.
__device__ void flush(Sums& sums, double* table, int actor) {
    const int lane = int(threadIdx.x) % kWarp;
    double mine = 0;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
        const float total = column < kSums ? warp_sum(sums.of[column]) : warp_max(sums.of[column]);
        if (lane == column) mine = total;
        sums.of[column] = 0;
    }
    if (lane < kColumns) {
        double* to = table + actor * kColumns + lane;
        *to = combine(lane, *to, mine);
    }
}

// Writes one row of metrics in the order of policy_loss_reference.METRICS.
__device__ void write_metrics(const Params& p, const double* s, float* to) {
    const double share = s[tokens] > 0 ? 1 / s[tokens] : 0;
    *to++ = float(s[tokens]);
    *to++ = float(s[low] * share);
    *to++ = float(s[high] * share);
    *to++ = float(s[third] * share);
    *to++ = float(-s[log_ratio] * share);
    *to++ = float(s[k3] * share);
    *to++ = float((s[tokens] + s[log_ratio] + s[k3]) * share);
    *to++ = s[log_ratio] == s[log_ratio] ? float(s[kSums]) : NAN;  // a maximum forgets NaN
    if (p.ref.data) *to++ = float(s[kl] * share);
    if (p.rollout.data) {
        *to++ = float(-s[mismatch] * share);
        *to++ = float(s[weight_square] > 0 ? s[weight] * s[weight] / (s[weight_square] * s[tokens]) : 0);
        *to++ = float(s[rejected] * share);
    }
    if (p.entropy.data) *to++ = float(s[entropy] * share);
}

// The last block: all blocks' sums, in the order of the blocks.
__device__ void finish(const Params& p, double* scratch) {
    const int column = int(threadIdx.x) % 16, slice = int(threadIdx.x) / 16;
    const int blocks = int(gridDim.x);
    for (int actor = 0; actor < p.actors; ++actor) {
        double total = 0;
        if (column < kColumns) {
#pragma unroll 8
            for (int block = slice; block < blocks; block += kSlices) {
                total = combine(column, total, p.partials[(int64_t(block) * p.actors + actor) * kColumns + column]);
            }
        }
        scratch[threadIdx.x] = total;
        __syncthreads();
        if (threadIdx.x < kColumns) {
            for (int k = 1; k < kSlices; ++k) total = combine(column, total, scratch[k * 16 + column]);
            p.finals[actor * kColumns + column] = total;
        }
        __syncthreads();
    }
    const int columns = 8 + (p.ref.data ? 1 : 0) + (p.rollout.data ? 3 : 0) + (p.entropy.data ? 1 : 0);
    if (p.options.num_actors > 0) {
        for (int actor = int(threadIdx.x); actor < p.actors; actor += kThreads) {
            write_metrics(p, p.finals + actor * kColumns, p.metrics + (1 + actor) * columns);
        }
    }
    if (threadIdx.x == 0) {
        double all[kColumns] = {};
        for (int actor = 0; actor < p.actors; ++actor) {
            for (int k = 0; k < kColumns; ++k) all[k] = combine(k, all[k], p.finals[actor * kColumns + k]);
        }
        write_metrics(p, all, p.metrics);
        *p.loss = float(all[loss]);
    }
}

template <class T, bool fast, Form form>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 && form != Form::any ? 3 : 2) main_kernel(const Params p) {
    const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
    const int64_t place = int64_t(blockIdx.x) * kWarps + warp;
    const int size = p.actors * kColumns;
    // Shared: a table per warp where they fit, and room to add up.
    double* scratch = shared<double>();
    double* tables = p.shared_tables ? scratch + kThreads : p.tables + int64_t(blockIdx.x) * kWarps * size;
    double* table = tables + warp * size;
    for (int i = lane; i < size; i += kWarp) table[i] = 0;
    __syncwarp();

    Sums sums;
    int actor = -1;
    bool lost = false;
    double shared_weight = 0;
    RowPieces pieces(p.rows, place);
    for (RowPiece piece; pieces.next(piece);) {
        int owner = actor_of(p, piece.row);
        const bool wrong = owner < 0;
        if (wrong) owner = 0;
        lost = lost || wrong;
        if (owner != actor) {
            if (actor >= 0) flush(sums, table, actor);
            actor = owner;
            shared_weight = actor_weight(p, actor);
        }
        row_piece<T, fast, form>(p, read_row(p, piece.row, wrong ? double(NAN) : shared_weight), piece, sums);
    }
    if (lost) sums.of[loss] = NAN;
    flush(sums, table, actor < 0 ? 0 : actor);
    __syncthreads();
    for (int i = int(threadIdx.x); i < size; i += kThreads) {
        double total = tables[i];
        for (int k = 1; k < kWarps; ++k) total = combine(i % kColumns, total, tables[k * size + i]);
        p.partials[int64_t(blockIdx.x) * size + i] = total;
    }
    if (is_last_block(&p.counts->ticket, reinterpret_cast<int*>(scratch))) {
        __syncthreads();
        finish(p, scratch);
    }
}

// ---- Before ---------------------------------------------------------------------------------------------------------
template <class T, bool fast>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const Params p) {
    const int64_t place = int64_t(blockIdx.x) * kWarps + int(threadIdx.x) / kWarp;
    long long all = 0;
    RowPieces pieces(p.rows, place);
    for (RowPiece piece; pieces.next(piece);) {
        double sums[kRowSums] = {};
        const long long count = p.sum_rows ? sum_piece<T, fast>(p, piece, sums) : count_trained<fast>(p.mask, piece);
        record_piece(p, piece, place, count, sums, p.sum_rows, all);
    }
    record_span(p, all);
}

// ---- Host -----------------------------------------------------------------------------------------------------------
int shared_bytes_of(int64_t actors) {
    return int(8 * (kThreads + actors * kWarps * kColumns));
}
bool fits_shared(int64_t actors) {
    return actors < 1000 && shared_bytes_of(actors) <= 24 << 10;
}

bool fits(const View& tokens, const View& stream) {
    return stream.dims == tokens.dims && stream.shape[0] == tokens.shape[0] &&
           (tokens.dims == 1 || stream.shape[1] == tokens.shape[1]);
}

Params params_of(const PolicyLossInput& in, const PolicyLossOptions& o, const PolicyLossOutput& out) {
    Params p{};
    static_cast<TokenRows&>(p.rows) = token_rows(in.logprobs, in.cu_seqlens, "logprobs");
    p.options = o;
    p.actors = std::max(o.num_actors, 1);
    const View* streams[] = {&in.logprobs, &in.old_logprobs, &in.ref_logprobs, &in.rollout_logprobs, &in.entropy};
    for (const View* stream : streams) {
        require(!*stream || fits(in.logprobs, *stream),
                "old_logprobs, ref_logprobs, rollout_logprobs, entropy: wrong shape");
        require(is_floating(stream->dtype) && stream->dtype != DType::f64, "logprobs: expected float32, bf16 or f16");
    }
    require(bool(in.old_logprobs), "old_logprobs: missing");
    require_one_device(in.logprobs, {&in.old_logprobs, &in.advantages, &in.mask, &in.cu_seqlens, &in.ref_logprobs,
                                     &in.rollout_logprobs, &in.normalizer, &in.actor_ids, &in.entropy, &in.selected,
                                     &out.loss, &out.grad, &out.metrics});
    require(o.kl == KlKind::none || in.ref_logprobs, "ref_logprobs: missing");
    require(o.correction == Correction::none || in.rollout_logprobs, "rollout_logprobs: missing");
    require(!in.mask || fits(in.logprobs, in.mask), "mask: wrong shape");
    require(in.mask.dtype != DType::f64, "mask: float64 is not read here");
    require(is_floating(in.advantages.dtype) && in.advantages.dtype != DType::f64, "advantages: wrong dtype");
    const View& a = in.advantages;
    const bool per_sequence = a.shape[0] == p.rows.rows && (a.dims == 1 || (a.dims == 2 && a.shape[1] == 1));
    require(per_sequence || fits(in.logprobs, a), "advantages: wrong shape");
    const bool by_actor = o.aggregation == Aggregation::agent_mean;
    require(!in.actor_ids || (in.actor_ids.dims == 1 && in.actor_ids.shape[0] == p.rows.rows),
            "actor_ids: wrong shape");
    require(!by_actor || in.actor_ids, "actor_ids: missing");
    require(!in.normalizer ||
                (in.normalizer.dtype == DType::f32 && in.normalizer.size() == (by_actor ? int64_t(o.num_actors) : 1)),
            "normalizer: wrong shape or dtype");
    require(!selects(o.variant.kind) || (in.selected && fits(in.logprobs, in.selected)), "selected: missing");
    p.logprobs = any_stream(in.logprobs);
    p.old_logprobs = any_stream(in.old_logprobs);
    p.ref = any_stream(in.ref_logprobs);
    p.rollout = any_stream(in.rollout_logprobs);
    p.entropy = any_stream(in.entropy);
    p.mask = any_stream(in.mask);
    p.selected = any_stream(in.selected);
    if (per_sequence) {
        p.row_advantages = RowStream(a);
    } else {
        p.advantages = any_stream(a);
    }
    p.actor_ids = RowStream(in.actor_ids);
    p.normalizer = RowStream(in.normalizer);
    p.grad = out.grad.data;
    p.grad_dtype = out.grad.dtype;
    p.loss = out.loss.as<float>();
    p.metrics = out.metrics.as<float>();
    p.sum_rows = is_by_row(o.variant.kind) || o.correction == Correction::sequence;
    p.count_rows = o.aggregation == Aggregation::seq_mean_token_mean || is_by_row(o.variant.kind) ||
                   (!in.normalizer && o.aggregation == Aggregation::seq_mean_token_sum);
    p.count_actors = by_actor && !in.normalizer;
    p.clip_only = o.variant.kind == VariantKind::clip && (o.kl == KlKind::none || o.kl == KlKind::k3);
    return p;
}

// Packs of 16 bytes serve where the streams lie like the gradient, which is contiguous.
bool is_fast(const Params& p, DType dtype) {
    for (const AnyStream* stream : {&p.logprobs, &p.old_logprobs, &p.ref, &p.rollout, &p.entropy, &p.advantages}) {
        if (!fits_fast(p.rows, *stream, dtype)) return false;
    }
    for (const AnyStream* stream : {&p.mask, &p.selected}) {
        if (!fits_fast(p.rows, *stream, stream->dtype)) return false;
    }
    return is_aligned(p.grad, 16);
}

template <class K>
auto main_of(const Params& p, K) {
    using T = typename K::Type;
    if (!p.clip_only) return main_kernel<T, K::fast, Form::any>;
    const bool weighted = p.options.kl_weighted;
    if constexpr (K::fast) {
        if (!p.rollout.data && !p.entropy.data) {
            return weighted ? main_kernel<T, true, Form::lean_weighted> : main_kernel<T, true, Form::lean>;
        }
    }
    return weighted ? main_kernel<T, K::fast, Form::clip_weighted> : main_kernel<T, K::fast, Form::clip>;
}

}  // namespace

Layout::Layout(int64_t rows, int64_t warps, int64_t actors) {
    actor_tokens = sizeof(Counts);
    lengths = actor_tokens + actors * 8;
    zeroed = (lengths + rows * 4 + 15) / 16 * 16;
    records = zeroed;
    partials = records + (rows + warps) * kRowSums * 8;
    finals = partials + (warps / kWarps + 1) * actors * kColumns * 8;
    tables = finals + actors * kColumns * 8;
    bytes = (tables + (fits_shared(actors) ? 0 : warps * actors * kColumns * 8) + 15) / 16 * 16;
}

int64_t most_warps() {
    return int64_t(multiprocessors()) * (2048 / kWarp);
}

bool fits_fast(const SpannedRows& rows, const AnyStream& stream, DType dtype) {
    if (stream.data == nullptr) return true;
    const bool contiguous = stream.stride == 1 && (stream.gap == 0 || rows.rows <= 1);
    return contiguous && stream.dtype == dtype && is_aligned(stream.data, 16);
}

Params plan(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output,
            const View& workspace) {
    Params p = params_of(input, options, output);
    p.fast = is_fast(p, p.grad_dtype);
    p.shared_tables = fits_shared(p.actors);
    p.shared_bytes = p.shared_tables ? shared_bytes_of(p.actors) : 8 * kThreads;
    dispatch(p.fast, p.grad_dtype, [&](auto kind) {
        const int64_t resident = resident_blocks(main_of(p, kind), kThreads, p.shared_bytes);
        p.warps = p.rows.cut(std::min(resident * kWarps, most_warps()));
    });
    const Layout layout(p.rows.rows, most_warps(), p.actors);
    require_one_device(input.logprobs, {&workspace});
    require(workspace.size() >= layout.bytes, "workspace: too small");
    char* base = workspace.as<char>();
    p.counts = reinterpret_cast<Counts*>(base);
    p.actor_tokens = reinterpret_cast<unsigned long long*>(base + layout.actor_tokens);
    p.lengths = reinterpret_cast<int*>(base + layout.lengths);
    p.records = reinterpret_cast<double*>(base + layout.records);
    p.partials = reinterpret_cast<double*>(base + layout.partials);
    p.finals = reinterpret_cast<double*>(base + layout.finals);
    p.tables = reinterpret_cast<double*>(base + layout.tables);
    const bool count_tokens = p.mask.data && !p.normalizer.data && options.aggregation == Aggregation::token_mean;
    p.prepare = p.sum_rows || p.count_rows || p.count_actors || count_tokens;
    return p;
}

void launch_main(const Params& p, Stream stream) {
    dispatch(p.fast, p.grad_dtype,
             [&](auto kind) { launch(main_of(p, kind), blocks_of(p), kThreads, p.shared_bytes, stream, p); });
}

}  // namespace loss

int64_t policy_loss_workspace(int64_t rows, int64_t, int num_actors, int device) {
    const DeviceGuard guard(device);
    return loss::Layout(rows, loss::most_warps(), std::max(num_actors, 1)).bytes;
}

void policy_loss(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output,
                 const View& workspace, Stream stream) {
    const DeviceGuard guard(input.logprobs.device);
    const loss::Params p = loss::plan(input, options, output, workspace);
    const loss::Layout layout(p.rows.rows, loss::most_warps(), p.actors);
    fill_bytes(workspace.data, 0, p.prepare ? layout.zeroed : int64_t(sizeof(loss::Counts)), stream);
    if (p.prepare) {
        loss::dispatch(p.fast, p.grad_dtype, [&](auto kind) {
            using K = decltype(kind);
            launch(loss::prepare_kernel<typename K::Type, K::fast>, loss::blocks_of(p), loss::kThreads, 0, stream, p);
        });
    }
    loss::launch_main(p, stream);
}

}  // namespace turnwise::cuda
