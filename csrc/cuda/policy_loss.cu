#include "cuda/policy_loss.h"

#include "cuda/policy_loss_launch.h"

// Every warp takes an equal span of the tokens and walks the segments of rows in it, so that long rows do not unbalance
// the load. There are at most two launches. If the options need it, count_tokens_kernel counts tokens and computes the
// sums over whole rows. loss_grad_kernel writes gradients, and its last block writes loss and metrics.
namespace turnwise::cuda {
namespace loss {
namespace {

// Columns of the sums over trained tokens. l: loss, r: ratio, d: log-ratio, w: importance weight.
enum Column {
    tokens,         // 1 per token
    clipped_low,    // 1 if clipped from below
    clipped_high,   // 1 if clipped from above
    clipped_dual,   // 1 if the dual clip applies, or the token is selected
    log_ratio,      // d
    k3,             // r - 1 - d
    loss,           // l times the row's weight
    kl,             // KL estimate against the reference
    mismatch,       // old_logprob - rollout_logprob
    weight,         // w
    weight_square,  // w^2
    rejected,       // 1 if w is outside its bounds
    entropy,        // entropy, as given
    ratio_max,      // max(r): the only column that is not a sum
};
constexpr int kColumns = ratio_max + 1;
constexpr int kColumnStride = 16;                  // threads per slice in reduce_blocks: kColumns rounded up
constexpr int kSlices = kThreads / kColumnStride;  // of the blocks, each added up by its own threads
static_assert(kColumns <= kColumnStride);

// ---- One row --------------------------------------------------------------------------------------------------------
// 1 / value; 0 for 0, NaN for a negative number or NaN.
__device__ double inverse(double value) {
    return value > 0 ? 1 / value : value == 0 ? 0 : double(NAN);
}

// Denominator of the loss of an actor's rows, see Aggregation: the one that was given, or the batch's own.
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

// The factor of the row weight that all rows of an actor share. seq_mean_token_mean has another, from the row's length.
__device__ double actor_weight(const Params& p, int actor) {
    if (p.options.aggregation != Aggregation::agent_mean) return inverse(normalizer_of(p, 0));
    double active = 0;
    for (int a = 0; a < p.actors; ++a) active += normalizer_of(p, a) > 0;
    return inverse(active) * inverse(normalizer_of(p, actor));
}

// What all tokens of a row share.
struct Row {
    float weight = 0;                // weight of a token's loss in the batch's
    float advantage = 0;             // A, if given per row
    RowTerms terms{1, 0, 0, false};  // gspo, gmpo
    float importance = 1;            // sequence-level importance weight
    bool rejected = false;           // that weight is outside its bounds
    ClipRange<ScalarMath> range;     // for `advantage`
};

// A sum over a whole row: adds the partial sums of all spans that the row touches. Called by a whole warp.
__device__ double row_sum(const Params& p, int64_t row, RowSum which) {
    const int64_t first = row_start(p.rows, row) / p.rows.span, last = (row_start(p.rows, row + 1) - 1) / p.rows.span;
    double total = 0;
    for (int64_t segment = first + threadIdx.x % kWarp; segment <= last; segment += kWarp) {
        total += p.row_partials[(row + segment) * kRowSums + which];
    }
    return warp_sum(total);
}

// Computes what the tokens of a row share. `shared_weight`: see actor_weight. Called by a whole warp.
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
    float of[kColumns] = {};  // indexed by Column
};

// The cases for which loss_grad_kernel is compiled. A narrower case needs fewer registers.
enum class Specialization {
    full,                      // every variant and KL estimator
    clip_only,                 // PPO's clip, with the k3 estimator or none
    clip_minimal,              // clip_only without rollout log-probabilities and entropies
    clip_only_weighted_kl,     // clip_only with the KL term times the ratio
    clip_minimal_weighted_kl,  // clip_minimal with the KL term times the ratio
};

TW_HD constexpr bool is_minimal(Specialization s) {
    return s == Specialization::clip_minimal || s == Specialization::clip_minimal_weighted_kl;
}
TW_HD constexpr bool weighs_kl(Specialization s) {
    return s == Specialization::clip_only_weighted_kl || s == Specialization::clip_minimal_weighted_kl;
}

// Returns d loss / d logprob of a trained token, times the row's weight, and adds the token to `sums`.
template <Specialization special>
__device__ float token_grad(const Params& p, const Row& row, float logprob, float old, float ref, float rollout,
                            float advantage, float entropy_value, bool chosen, Sums& sums) {
    using Math = ScalarMath;
    constexpr bool clip_only = special != Specialization::full;
    const PolicyLossOptions& o = p.options;
    // The variant's loss and derivative.
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
    // Importance sampling: multiply loss and gradient by old / rollout, per token or per row.
    if (!is_minimal(special) && p.rollout.data) {
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
    // The KL term.
    if (p.ref.data) {
        const float d = ref - logprob;
        const auto estimate = clip_only ? kl_term<Math, KlKind::k3>(d) : kl_term<Math>(kl_kind(o), d);
        auto term = estimate;
        if (weighs_kl(special) || (!clip_only && o.kl_weighted)) {
            const bool by_row = !clip_only && kl_by_row(o);
            const float carried = by_row ? row.terms.kl : open ? estimate.value : 0.0f;
            term = importance_weighted<Math>(estimate, by_row ? row.terms.ratio : ratio, carried);
        }
        out.loss = fmaf(o.kl_coef, term.value, out.loss);
        out.grad = fmaf(-o.kl_coef, term.slope, out.grad);
        sums.of[kl] += estimate.value;
    }
    // The metrics.
    if (!is_minimal(special)) sums.of[entropy] += entropy_value;
    sums.of[tokens] += 1;
    sums.of[clipped_low] += out.clipped_low;
    sums.of[clipped_high] += out.clipped_high;
    sums.of[clipped_dual] += out.clipped_dual;
    sums.of[log_ratio] += bounded;
    sums.of[k3] += ratio - 1 - bounded;
    sums.of[loss] += row.weight == 0 ? 0.0f : out.loss * row.weight;
    sums.of[ratio_max] = Math::max(sums.of[ratio_max], ratio);
    return out.grad * row.weight;
}

// One pack of every stream that the case needs. The constructor only loads them, so all loads are in flight at once.
template <class T, bool fast, Specialization special>
struct TokenPacks {
    using At = PackAt<T, fast>;
    typename At::Floats logprob, old, ref{}, rollout{}, advantage{}, entropy_of{};  // 0 if not given
    typename At::Mask mask, selected{};                                             // see PackAt::truths

    __device__ __forceinline__ TokenPacks(const Params& p, const At& at)
        : logprob(at.load(p.logprobs)), old(at.load(p.old_logprobs)), mask(at.ask(p.mask)) {
        if (p.ref.data) ref = at.load(p.ref);
        if (p.advantages.data) advantage = at.load(p.advantages);
        if (!is_minimal(special) && p.rollout.data) rollout = at.load(p.rollout);
        if (!is_minimal(special) && p.entropy.data) entropy_of = at.load(p.entropy);
        if (special == Specialization::full && p.selected.data) selected = at.ask(p.selected);
    }
};

// Writes the gradients of a segment and adds to the sums. A lane takes a 16-byte pack of every stream at a time. The
// minimal cases have registers to spare, so they load the next pack before they compute this one.
template <class T, bool fast, Specialization special>
__device__ void process_segment(const Params& p, const Row& row, const RowSegment& segment, Sums& sums) {
    constexpr int kPack = 16 / int(sizeof(T)), kStep = kWarp * kPack;
    using Packs = TokenPacks<T, fast, special>;
    const int lane = int(threadIdx.x) % kWarp;
    constexpr bool ahead = is_minimal(special);
    int64_t i = segment.begin / kPack * kPack + lane * kPack;
    if (i >= segment.end) return;
    Packs now(p, {segment, i}), next = now;
    for (; i < segment.end; i += kStep, now = next) {
        if (ahead && i + kStep < segment.end) next = Packs(p, {segment, i + kStep});
        // Compute the tokens of this pack one by one.
        const PackAt<T, fast> at{segment, i};
        const unsigned trained = at.truths(p.mask, now.mask);
        const unsigned chosen =
            special == Specialization::full && p.selected.data ? at.truths(p.selected, now.selected) : 0;
        Pack<T, kPack> grad;
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            float slope = 0;
            if (trained >> k & 1) {
                const float own = p.advantages.data ? to_float(now.advantage[k]) : row.advantage;
                slope = token_grad<special>(p, row, to_float(now.logprob[k]), to_float(now.old[k]),
                                            to_float(now.ref[k]), to_float(now.rollout[k]), own,
                                            to_float(now.entropy_of[k]), chosen >> k & 1, sums);
            }
            grad.value[k] = from_float<T>(slope);
        }
        at.store(p.grad, p.grad_dtype, grad);
        if (!ahead && i + kStep < segment.end) next = Packs(p, {segment, i + kStep});
    }
}

// ---- Adding up ------------------------------------------------------------------------------------------------------
// The joint value of a column: the sum, or the maximum of ratios.
__device__ double add_or_max(int column, double a, double b) {
    return column != ratio_max ? a + b : a < b ? b : a;
}

// Adds a warp's sums to the row of `actor` in the warp's table, and clears them. The order of additions is fixed,
// because a warp takes its rows in order.
__device__ void store_warp_sums(Sums& sums, double* table, int actor) {
    const int lane = int(threadIdx.x) % kWarp;
    double mine = 0;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
        const float total = column != ratio_max ? warp_sum(sums.of[column]) : warp_max(sums.of[column]);
        if (lane == column) mine = total;
        sums.of[column] = 0;
    }
    if (lane < kColumns) {
        double* to = table + actor * kColumns + lane;
        *to = add_or_max(lane, *to, mine);
    }
}

// Writes one row of metrics, in the order of METRICS in the Python reference.
__device__ void write_metrics(const Params& p, const double* s, float* to) {
    const double share = s[tokens] > 0 ? 1 / s[tokens] : 0;
    *to++ = float(s[tokens]);
    *to++ = float(s[clipped_low] * share);
    *to++ = float(s[clipped_high] * share);
    *to++ = float(s[clipped_dual] * share);
    *to++ = float(-s[log_ratio] * share);
    *to++ = float(s[k3] * share);
    *to++ = float((s[tokens] + s[log_ratio] + s[k3]) * share);
    *to++ = s[log_ratio] == s[log_ratio] ? float(s[ratio_max]) : NAN;  // the maximum drops NaN, the sum keeps it
    if (p.ref.data) *to++ = float(s[kl] * share);
    if (p.rollout.data) {
        *to++ = float(-s[mismatch] * share);
        *to++ = float(s[weight_square] > 0 ? s[weight] * s[weight] / (s[weight_square] * s[tokens]) : 0);
        *to++ = float(s[rejected] * share);
    }
    if (p.entropy.data) *to++ = float(s[entropy] * share);
}

// Called by the last block. Adds up the sums of all blocks in a fixed order, and writes loss and metrics.
__device__ void reduce_blocks(const Params& p, double* scratch) {
    const int column = int(threadIdx.x) % kColumnStride, slice = int(threadIdx.x) / kColumnStride;
    const int blocks = int(gridDim.x);
    // Actor by actor: each slice of threads adds up its blocks, then the first slice adds up the slices.
    for (int actor = 0; actor < p.actors; ++actor) {
        double total = 0;
        if (column < kColumns) {
#pragma unroll 8
            for (int block = slice; block < blocks; block += kSlices) {
                total = add_or_max(column, total,
                                   p.block_partials[(int64_t(block) * p.actors + actor) * kColumns + column]);
            }
        }
        scratch[threadIdx.x] = total;
        __syncthreads();
        if (threadIdx.x < kColumns) {
            for (int k = 1; k < kSlices; ++k) total = add_or_max(column, total, scratch[k * kColumnStride + column]);
            p.actor_totals[actor * kColumns + column] = total;
        }
        __syncthreads();
    }
    // The metrics of each actor.
    const int columns = 8 + (p.ref.data ? 1 : 0) + (p.rollout.data ? 3 : 0) + (p.entropy.data ? 1 : 0);
    if (p.options.num_actors > 0) {
        for (int actor = int(threadIdx.x); actor < p.actors; actor += kThreads) {
            write_metrics(p, p.actor_totals + actor * kColumns, p.metrics + (1 + actor) * columns);
        }
    }
    // The batch: all actors together.
    if (threadIdx.x == 0) {
        double all[kColumns] = {};
        for (int actor = 0; actor < p.actors; ++actor) {
            for (int k = 0; k < kColumns; ++k) all[k] = add_or_max(k, all[k], p.actor_totals[actor * kColumns + k]);
        }
        write_metrics(p, all, p.metrics);
        *p.loss = float(all[loss]);
    }
}

// Gradients of all tokens; the last block writes loss and metrics.
template <class T, bool fast, Specialization special>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 && special != Specialization::full ? 3 : 2)
    loss_grad_kernel(const Params p) {
    const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
    const int64_t place = int64_t(blockIdx.x) * kWarps + warp;
    const int size = p.actors * kColumns;
    // Shared memory: scratch for reduce_blocks, then one table of sums per warp if they fit.
    double* scratch = shared<double>();
    double* tables = p.shared_tables ? scratch + kThreads : p.warp_tables + int64_t(blockIdx.x) * kWarps * size;
    double* table = tables + warp * size;
    for (int i = lane; i < size; i += kWarp) table[i] = 0;
    __syncwarp();

    // The span of this warp, segment by segment. An actor id out of range makes the row's weight and the loss NaN.
    Sums sums;
    int actor = -1;
    bool bad_actor_id = false;
    double shared_weight = 0;
    RowSegments segments(p.rows, place);
    for (RowSegment segment; segments.next(segment);) {
        const int id = actor_of(p, segment.row), row_actor = id < 0 ? 0 : id;
        bad_actor_id = bad_actor_id || id < 0;
        if (row_actor != actor) {
            if (actor >= 0) store_warp_sums(sums, table, actor);
            actor = row_actor;
            shared_weight = actor_weight(p, actor);
        }
        const Row row = read_row(p, segment.row, id < 0 ? double(NAN) : shared_weight);
        process_segment<T, fast, special>(p, row, segment, sums);
    }
    if (bad_actor_id) sums.of[loss] = NAN;
    store_warp_sums(sums, table, actor < 0 ? 0 : actor);
    __syncthreads();

    // The sums of the block: add up its warps' tables in order.
    for (int i = int(threadIdx.x); i < size; i += kThreads) {
        double total = tables[i];
        for (int k = 1; k < kWarps; ++k) total = add_or_max(i % kColumns, total, tables[k * size + i]);
        p.block_partials[int64_t(blockIdx.x) * size + i] = total;
    }
    if (is_last_block(&p.counts->ticket, reinterpret_cast<int*>(scratch))) {
        __syncthreads();
        reduce_blocks(p, scratch);
    }
}

// ---- Counts that precede the first gradient ------------------------------------------------------------------------
// Counts trained tokens and computes row sums, if loss_grad_kernel needs them.
template <class T, bool fast>
__global__ void __launch_bounds__(kThreads) count_tokens_kernel(const Params p) {
    const int64_t place = int64_t(blockIdx.x) * kWarps + int(threadIdx.x) / kWarp;
    long long all = 0;
    RowSegments segments(p.rows, place);
    for (RowSegment segment; segments.next(segment);) {
        double sums[kRowSums] = {};
        const long long count =
            p.sum_rows ? sum_segment<T, fast>(p, segment, sums) : count_trained<fast>(p.mask, segment);
        record_segment(p, segment, place, count, sums, p.sum_rows, all);
    }
    record_span(p, all);
}

// ---- Host ----------------------------------------------------------------------------------------------------------
// Shared memory of loss_grad_kernel with the warps' tables, and whether they fit.
int shared_bytes_of(int64_t actors) {
    return int(8 * (kThreads + actors * kWarps * kColumns));
}
bool fits_shared(int64_t actors) {
    return actors < 1000 && shared_bytes_of(actors) <= 24 << 10;
}

// True if kernels can use 16-byte packs: every stream has the layout of the gradient, which is contiguous.
bool is_fast(const Params& p) {
    for (const AnyStream* stream : {&p.logprobs, &p.old_logprobs, &p.ref, &p.rollout, &p.entropy, &p.advantages}) {
        if (!fits_fast(p.rows, *stream, p.grad_dtype)) return false;
    }
    for (const AnyStream* stream : {&p.mask, &p.selected}) {
        if (!fits_fast(p.rows, *stream, stream->dtype)) return false;
    }
    return is_aligned(p.grad, 16);
}

// The narrowest specialization of loss_grad_kernel that covers the options.
template <class K>
auto kernel_for(const Params& p, K) {
    using T = typename K::Type;
    if (!p.clip_only) return loss_grad_kernel<T, K::fast, Specialization::full>;
    const bool weighted = p.options.kl_weighted;
    if constexpr (K::fast) {
        if (!p.rollout.data && !p.entropy.data) {
            return weighted ? loss_grad_kernel<T, true, Specialization::clip_minimal_weighted_kl>
                            : loss_grad_kernel<T, true, Specialization::clip_minimal>;
        }
    }
    return weighted ? loss_grad_kernel<T, K::fast, Specialization::clip_only_weighted_kl>
                    : loss_grad_kernel<T, K::fast, Specialization::clip_only>;
}

void launch_count_tokens(const Params& p, Stream stream) {
    dispatch(p.fast, p.grad_dtype, [&](auto kind) {
        using K = decltype(kind);
        launch(count_tokens_kernel<typename K::Type, K::fast>, blocks_of(p), kThreads, 0, stream, p);
    });
}

}  // namespace

Layout::Layout(int64_t rows, int64_t warps, int64_t actors) {
    actor_tokens = sizeof(Counts);
    lengths = actor_tokens + actors * 8;
    zeroed = (lengths + rows * 4 + 15) / 16 * 16;
    row_partials = zeroed;
    block_partials = row_partials + (rows + warps) * kRowSums * 8;
    actor_totals = block_partials + (warps / kWarps + 1) * actors * kColumns * 8;
    warp_tables = actor_totals + actors * kColumns * 8;
    bytes = (warp_tables + (fits_shared(actors) ? 0 : warps * actors * kColumns * 8) + 15) / 16 * 16;
}

int64_t most_warps() {
    return int64_t(multiprocessors()) * (2048 / kWarp);
}

bool fits_fast(const SpannedRows& rows, const AnyStream& stream, DType dtype) {
    if (stream.data == nullptr) return true;
    const bool contiguous = stream.stride == 1 && (stream.gap == 0 || rows.rows <= 1);
    return contiguous && stream.dtype == dtype && is_aligned(stream.data, 16);
}

void check_inputs(const PolicyLossInput& in, const PolicyLossOptions& o, const PolicyLossOutput& out) {
    check_policy_loss(in, o, token_rows(in.logprobs, in.cu_seqlens, "logprobs").rows);
    require_one_device(in.logprobs, {&in.old_logprobs, &in.advantages, &in.mask, &in.cu_seqlens, &in.ref_logprobs,
                                     &in.rollout_logprobs, &in.normalizer, &in.actor_ids, &in.entropy, &in.selected,
                                     &out.loss, &out.grad, &out.metrics});
}

Params bind(const PolicyLossInput& in, const PolicyLossOptions& o, const PolicyLossOutput& out) {
    Params p{};
    static_cast<TokenRows&>(p.rows) = token_rows(in.logprobs, in.cu_seqlens, "logprobs");
    p.options = o;
    p.actors = std::max(o.num_actors, 1);
    p.logprobs = any_stream(in.logprobs);
    p.old_logprobs = any_stream(in.old_logprobs);
    p.ref = any_stream(in.ref_logprobs);
    p.rollout = any_stream(in.rollout_logprobs);
    p.entropy = any_stream(in.entropy);
    p.mask = any_stream(in.mask);
    p.selected = any_stream(in.selected);
    if (has_row_advantages(in.advantages, p.rows.rows)) {
        p.row_advantages = RowStream(in.advantages);
    } else {
        p.advantages = any_stream(in.advantages);
    }
    p.actor_ids = RowStream(in.actor_ids);
    p.normalizer = RowStream(in.normalizer);
    p.grad = out.grad.data;
    p.grad_dtype = out.grad.dtype;
    p.loss = out.loss.as<float>();
    p.metrics = out.metrics.as<float>();
    return p;
}

void plan(Params& p, const View& workspace) {
    // Choose what the first launch must count.
    const PolicyLossOptions& o = p.options;
    const bool own_normalizer = !p.normalizer.data;
    p.sum_rows = is_by_row(o.variant.kind) || o.correction == Correction::sequence;
    p.count_rows = o.aggregation == Aggregation::seq_mean_token_mean || is_by_row(o.variant.kind) ||
                   (own_normalizer && o.aggregation == Aggregation::seq_mean_token_sum);
    p.count_actors = own_normalizer && o.aggregation == Aggregation::agent_mean;
    const bool count_tokens = own_normalizer && p.mask.data && o.aggregation == Aggregation::token_mean;
    p.count_first = p.sum_rows || p.count_rows || p.count_actors || count_tokens;
    // Choose the kernel and its grid.
    p.clip_only = o.variant.kind == VariantKind::clip && (o.kl == KlKind::none || o.kl == KlKind::k3);
    p.fast = is_fast(p);
    p.shared_tables = fits_shared(p.actors);
    p.shared_bytes = p.shared_tables ? shared_bytes_of(p.actors) : 8 * kThreads;
    dispatch(p.fast, p.grad_dtype, [&](auto kind) {
        const int64_t resident = resident_blocks(kernel_for(p, kind), kThreads, p.shared_bytes);
        p.warps = p.rows.cut(std::min(resident * kWarps, most_warps()));
    });
    // Divide the workspace.
    const Layout layout(p.rows.rows, most_warps(), p.actors);
    require_bytes("workspace", workspace, layout.bytes);
    char* base = workspace.as<char>();
    p.counts = reinterpret_cast<Counts*>(base);
    p.actor_tokens = reinterpret_cast<unsigned long long*>(base + layout.actor_tokens);
    p.lengths = reinterpret_cast<int*>(base + layout.lengths);
    p.row_partials = reinterpret_cast<double*>(base + layout.row_partials);
    p.block_partials = reinterpret_cast<double*>(base + layout.block_partials);
    p.actor_totals = reinterpret_cast<double*>(base + layout.actor_totals);
    p.warp_tables = reinterpret_cast<double*>(base + layout.warp_tables);
}

void launch_loss_grad(const Params& p, Stream stream) {
    dispatch(p.fast, p.grad_dtype,
             [&](auto kind) { launch(kernel_for(p, kind), blocks_of(p), kThreads, p.shared_bytes, stream, p); });
}

}  // namespace loss

int64_t policy_loss_workspace(int64_t rows, int64_t, int num_actors, int device) {
    const DeviceGuard guard(device);
    return loss::Layout(rows, loss::most_warps(), std::max(num_actors, 1)).bytes;
}

void policy_loss(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output,
                 const View& workspace, Stream stream) {
    loss::check_inputs(input, options, output);
    require_one_device(input.logprobs, {&workspace});
    const DeviceGuard guard(input.logprobs.device);
    loss::Params p = loss::bind(input, options, output);
    loss::plan(p, workspace);
    const loss::Layout layout(p.rows.rows, loss::most_warps(), p.actors);
    fill_bytes(workspace.data, 0, p.count_first ? layout.zeroed : int64_t(sizeof(loss::Counts)), stream);
    if (p.count_first) loss::launch_count_tokens(p, stream);
    loss::launch_loss_grad(p, stream);
}

}  // namespace turnwise::cuda
