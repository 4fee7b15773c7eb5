#include "cuda/policy_loss.h"

#include <climits>

#include "cuda/policy_loss_launch.h"
#include "cuda/policy_loss_rows.h"
#include "cuda/policy_loss_tokens.h"

// Every warp takes an equal span of the tokens and walks the rows in it, so that long rows do not unbalance the load.
// There are at most two launches. If the options need it, count_tokens_kernel counts tokens and computes the sums over
// whole rows. loss_grad_kernel writes gradients, then loss and metrics.
//
// The sums of the batch and of each actor are exact integers that all blocks add to, so the memory that they take does
// not depend on the number of blocks. A warp adds to a table in shared memory first: to its row of the batch, and to
// those of the actors if they are few. Sums of many actors go straight to the totals.
namespace turnwise::cuda {
namespace loss {
namespace {

// ---- The span of a warp ---------------------------------------------------------------------------------------------
// The joint value of a column: the sum, or the maximum of ratios.
__device__ double add_or_max(int column, double a, double b) {
    return column != ratio_max ? a + b : a < b ? b : a;
}

// Adds to a row of the totals: 0 for the batch, 1 + actor for an actor.
__device__ __forceinline__ void add_total(const Params& p, int row, int column, double value) {
    Word* total = p.totals + int64_t(row) * kSumWords * kColumns + column;
    if (column != ratio_max) {
        add_exact(total, kColumns, value);
    } else if (value > 0) {
        atomicMax(total, Word(__double_as_longlong(value)));  // the bits of positive numbers are in their order
    }
}

// Adds a warp's sums to the batch and to `actor`, in the warp's table or in the totals, and clears them. The sums are
// the same in every run, because a warp takes its tokens in order.
template <Specialization special>
__device__ __forceinline__ void store_warp_sums(const Params& p, Sums& sums, double* table, int actor) {
    const int lane = int(threadIdx.x) % kWarp;
    double mine = 0;
    if (special != Specialization::full) {
        sums.of[clipped_high] = sums.above - float(sums.dual);
        sums.of[clipped_dual] = float(sums.dual);
        sums.above = 0;
        sums.dual = 0;
    }
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
        if (is_minimal(special) && mismatch <= column && column <= entropy) continue;  // always 0
        const float total = column != ratio_max ? warp_sum(sums.of[column]) : warp_max(sums.of[column]);
        if (lane == column) mine = total;
        sums.of[column] = 0;
    }
    if (lane >= kColumns) return;
    table[lane] = add_or_max(lane, table[lane], mine);
    if (p.table_rows > 1) {
        double* to = table + (1 + actor) * kColumns + lane;
        *to = add_or_max(lane, *to, mine);
    } else if (p.options.num_actors > 0) {
        add_total(p, 1 + actor, lane, mine);
    }
}

// The tokens of one row in whole steps of the warp. A lane takes a 16-byte pack of every stream at a time. The minimal
// cases have registers to spare, so they load the next pack before they compute this one.
template <bool per_token, class T, Specialization special, class R>
__device__ __forceinline__ void process_row(const Params& p, const R& row, const RowSegment& segment, Sums& sums) {
    using At = PackAt<T, true, true>;
    constexpr int kPack = At::kPack, kStep = kWarp * kPack;
    constexpr bool ahead = is_minimal(special);
    const int64_t begin = segment.begin + int(threadIdx.x) % kWarp * kPack;
    const int size = int(segment.end - segment.begin);
    const float loss_before = sums.of[loss], above_before = sums.above;
    TokenPacks<T, special> now, next;
    now.load(p, At(segment, begin));
    for (int i = 0; i < size; i += kStep, now = next) {
        const bool more = i + kStep < size;
        next = now;
        if (ahead && more) next.load(p, At(segment, begin + i + kStep));
        const At at(segment, begin + i);
        const auto out = add_pack<true, true, per_token, special>(
            p, now, now.trained(p, at), now.chosen(p, at), [&](int) -> const R& { return row; }, sums);
        at.store(p.grad, p.grad_dtype, pack_of<T>(out.slope));
        if (!ahead && more) next.load(p, At(segment, begin + i + kStep));
    }
    // Above the range the clip bounds A > 0, and the dual clip A < 0.
    if (!per_token && row.negative()) sums.dual += unsigned(sums.above - above_before);
    if (row.weight == 0) sums.of[loss] = loss_before;
}

// Writes the gradients of a warp's span, and adds its sums to the warp's table. Where a step of the warp lies in one
// row, what the row's tokens share is in registers. Where it has several rows, every token looks up its own.
template <class T, bool fast, Specialization special>
class SpanPass {
  public:
    __device__ __forceinline__ SpanPass(const Params& p, int64_t place, typename WindowOf<T, special>::Table& rows,
                                        double common, double* table)
        : p_(p),
          table_(table),
          begin_(place * p.rows.span),
          size_(uniform(int(max(min(p.rows.span, p.rows.tokens - begin_), int64_t(0))))),
          window_(p, rows, common, begin_, size_) {}

    // per_token: advantages are given per token.
    template <bool per_token>
    __device__ __forceinline__ void run() {
        for (int done = 0; done < size_;) {
            const int base = done & ~(kStep - 1), until = min(base + kStep, size_);
            window_.first += window_.table.ends[window_.first] <= done;
            if (window_.covered < until) window_.fill(until);
            if (window_.covered <= done) break;  // cu_seqlens end before the tokens do
            const int whole = (window_.table.ends[window_.first] - done) & ~(kStep - 1);
            if (fast && done == base && whole > 0) {
                take_row<per_token>(done, whole);
                done += whole;
                continue;
            }
            if (fast && done == base && p_.actors == 1 && !window_.table.has_zero_weight) {
                done = take_steps<per_token>(done);
                if (done > base) continue;
            }
            const int limit = min(until, window_.covered);
            take_rows<per_token>(base, done, limit);
            done = limit;
        }
        if (window_.table.has_bad_actor) sums_.of[loss] = NAN;
        store_warp_sums<special>(p_, sums_, table_, max(actor_, 0));
    }

  private:
    using At = PackAt<T, fast, false, true>;
    static constexpr int kPack = At::kPack, kStep = kWarp * kPack;

    __device__ __forceinline__ void switch_to(int actor) {
        if (actor == actor_) return;
        if (actor_ >= 0) store_warp_sums<special>(p_, sums_, table_, actor_);
        actor_ = actor;
    }

    // Whole steps of one row.
    template <bool per_token>
    __device__ __forceinline__ void take_row(int from, int tokens) {
        if constexpr (fast) {
            switch_to(window_.table.actors[window_.first]);
            const auto row = window_.table.rows[window_.first];
            const RowSegment segment{0, begin_ + from, begin_ + from + tokens};
            process_row<per_token, T, special>(p_, row, segment, sums_);
        }
    }

    // Whole steps from `from` on, of more than one row, as far as the table has their rows. Returns the next token.
    template <bool per_token>
    __device__ __forceinline__ int take_steps(int from) {
        if constexpr (fast) {
            const int limit = min(window_.covered, size_), token = int(threadIdx.x) % kWarp * kPack;
            for (; from + kStep <= limit; from += kStep) {
                const RowSegment segment{0, begin_ + from, begin_ + from + kStep};
                const PackAt<T, true, true> at(segment, begin_ + from + token);
                TokenPacks<T, special> packs;
                packs.load(p_, at);
                typename WindowOf<T, special>::Places places;
                if (!window_.place_rows(from, places)) break;
                const auto row_of = [&](int k) { return places[k]; };
                const auto out = add_pack<false, true, per_token, special>(p_, packs, packs.trained(p_, at),
                                                                           packs.chosen(p_, at), row_of, sums_);
                at.store(p_.grad, p_.grad_dtype, pack_of<T>(out.slope));
            }
        }
        return from;
    }

    // The tokens [from, to) of the step that begins at `base`.
    template <bool per_token>
    __device__ __forceinline__ void take_rows(int base, int from, int to) {
        const auto& table = window_.table;
        const int token = base + int(threadIdx.x) % kWarp * kPack;
        int place[kPack];  // of each token's row
        place[0] = window_.find(token);
#pragma unroll
        for (int k = 1; k < kPack; ++k) place[k] = place[k - 1] + (table.ends[place[k - 1]] <= token + k);
        // Load them; where the whole step is there, without looking at its ends.
        const bool is_whole = fast && from == base && to == base + kStep;
        const RowSegment segment{0, begin_ + from, begin_ + to};
        TokenPacks<T, special> packs;
        Truths<kPack> left, chosen;
        const auto load = [&](const auto& at) {
            packs.load(p_, at);
            left = packs.trained(p_, at);
            chosen = packs.chosen(p_, at);
        };
        if (is_whole) {
            load(PackAt<T, fast, true>(segment, begin_ + token));
        } else {
            At at(segment, begin_ + token);
#pragma unroll
            for (int k = 0; !fast && k < kPack; ++k) at.rows[k] = table.indices[place[k]];
            load(at);
        }
        // The actors that have tokens here take turns.
        float grad[kPack] = {};
        for (bool more = true; more;) {
            const Truths<kPack> turn = p_.actors > 1 ? next_turn(left, place, more) : left;
            if (!more) break;
            more = p_.actors > 1;
            const auto row_of = [&](int k) -> const auto& { return table.rows[place[k]]; };
            const auto out = add_pack<false, false, per_token, special>(p_, packs, turn, chosen, row_of, sums_);
#pragma unroll
            for (int k = 0; k < kPack; ++k) grad[k] = turn[k] ? out.slope[k] : grad[k];
        }
        if (is_whole) {
            PackAt<T, fast, true>(segment, begin_ + token).store(p_.grad, p_.grad_dtype, pack_of<T>(grad));
        } else {
            At(segment, begin_ + token).store(p_.grad, p_.grad_dtype, pack_of<T>(grad));
        }
        window_.move_to(__shfl_sync(kFullWarp, place[kPack - 1], kWarp - 1));
    }

    // Takes the tokens of the lowest actor out of `left`, and returns them. `more`: there was one.
    __device__ __forceinline__ Truths<kPack> next_turn(Truths<kPack>& left, const int (&place)[kPack], bool& more) {
        int lowest = INT_MAX;
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            if (left[k]) lowest = min(lowest, window_.table.actors[place[k]]);
        }
        lowest = warp_min(lowest);
        more = lowest != INT_MAX;
        if (more) switch_to(lowest);
        Truths<kPack> turn{};
#pragma unroll
        for (int k = 0; k < kPack; ++k) turn.set(k, left[k] && window_.table.actors[place[k]] == lowest);
#pragma unroll
        for (int k = 0; k < kPack; k += 4) left.word[k / 4] &= ~turn.word[k / 4];
        return turn;
    }

    const Params& p_;
    double* table_;  // of the warp's sums
    int64_t begin_;  // the first token of the span
    int size_;       // its tokens
    WindowOf<T, special> window_;
    Sums sums_;
    int actor_ = -1;  // whose tokens `sums_` has
};

// ---- Adding up ------------------------------------------------------------------------------------------------------
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

// Writes loss and metrics from the totals. A block writes kTotalRows rows at a time: those from number `first` on, then
// those `step` rows later.
__device__ void write_totals(const Params& p, int first, int step, double* scratch) {
    const int columns = 8 + (p.ref.data ? 1 : 0) + (p.rollout.data ? 3 : 0) + (p.entropy.data ? 1 : 0);
    const int column = int(threadIdx.x) % kColumnStride, rows = 1 + p.options.num_actors;
    for (; first < rows; first += step) {
        const int row = first + int(threadIdx.x) / kColumnStride;
        if (row < rows && column < kColumns) {
            const Word* total = p.totals + int64_t(row) * kSumWords * kColumns + column;
            scratch[threadIdx.x] =
                column != ratio_max ? read_exact(total, kColumns) : __longlong_as_double((long long)__ldcg(total));
        }
        __syncwarp();  // a row is within a warp
        if (row < rows && column == 0) {
            const double* sums = scratch + threadIdx.x;
            write_metrics(p, sums, p.metrics + int64_t(row) * columns);
            if (row == 0) *p.loss = float(sums[loss]);
        }
        __syncwarp();
    }
}

// Gradients of all tokens, then loss and metrics: the last block writes few, and all blocks write many.
template <class T, bool fast, Specialization special>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 && special != Specialization::full ? 3 : 2)
    loss_grad_kernel(const Params p) {
    const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
    const int64_t place = int64_t(blockIdx.x) * kWarps + warp;
    const int size = p.table_rows * kColumns;
    // Shared memory: scratch for write_totals, the warps' tables of rows, then a table of sums per warp.
    using Rows = typename WindowOf<T, special>::Table;
    double* scratch = shared<double>();
    Rows* rows = reinterpret_cast<Rows*>(scratch + kThreads);
    double* tables = reinterpret_cast<double*>(rows + kWarps);
    double* table = tables + warp * size;
    for (int i = lane; i < size; i += kWarp) table[i] = 0;
    __syncwarp();
    SpanPass<T, fast, special> pass(p, place, rows[warp], common_weight(p, scratch), table);
    p.advantages.given ? pass.template run<true>() : pass.template run<false>();
    __syncthreads();

    // The sums of the block: add up its warps' tables in order.
    for (int i = int(threadIdx.x); i < size; i += kThreads) {
        double total = tables[i];
        for (int k = 1; k < kWarps; ++k) total = add_or_max(i % kColumns, total, tables[k * size + i]);
        add_total(p, i / kColumns, i % kColumns, total);
    }
    if (is_spread(p)) {
        grid_barrier();
        write_totals(p, int(blockIdx.x) * kTotalRows, int(gridDim.x) * kTotalRows, scratch);
    } else if (is_last_block(&p.counts->ticket, reinterpret_cast<int*>(scratch))) {
        __syncthreads();
        write_totals(p, 0, kTotalRows, scratch);
    }
}

// ---- Counts that precede the first gradient ------------------------------------------------------------------------
// Counts trained tokens and computes row sums, if loss_grad_kernel needs them.
template <class T, bool fast, bool short_rows>
__global__ void __launch_bounds__(kThreads) count_tokens_kernel(const Params p) {
    const int64_t place = int64_t(blockIdx.x) * kWarps + int(threadIdx.x) / kWarp;
    SpanCounts counts;
    if (fast && !p.sum_rows && !p.count_rows && !p.count_actors) {
        // Only the batch's total is needed, so rows do not matter.
        const int64_t last = row_start(p.rows, p.rows.rows), begin = min(place * p.rows.span, last);
        counts.tokens = count_trained<fast, false>(p.mask, {0, begin, min(begin + p.rows.span, last)}, kWarp);
    } else {
        RowSegments<short_rows> segments(p.rows, place);
        const int lanes = lanes_of<short_rows>(p.rows);
        for (RowSegment segment; segments.next(segment);) {
            double sums[kRowSums] = {};
            const int64_t count = p.sum_rows ? sum_segment<T, fast, short_rows>(p, segment, sums)
                                             : count_trained<fast, short_rows>(p.mask, segment, lanes);
            record_segment<short_rows>(p, segment, place, int(count), sums, p.sum_rows, counts);
        }
    }
    record_span(p, counts);
}

// ---- Host ----------------------------------------------------------------------------------------------------------
// Rows of a warp's table of sums: the batch, and all actors if the tables of a block then fit into 22 KiB.
int table_rows(int num_actors) {
    return 8 * (1 + int64_t(num_actors)) * kWarps * kColumns <= 22 << 10 ? 1 + num_actors : 1;
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

// A kernel, and the bytes of its warps' tables of rows.
struct LossKernel {
    void (*run)(Params);
    int table_bytes;
};

// The narrowest specialization of loss_grad_kernel that covers the options.
template <class T, bool fast, Specialization special>
LossKernel kernel_as() {
    return {loss_grad_kernel<T, fast, special>, int(sizeof(typename WindowOf<T, special>::Table)) * kWarps};
}
template <class K>
LossKernel kernel_for(const Params& p, K) {
    using T = typename K::Type;
    if (!p.clip_only) return kernel_as<T, K::fast, Specialization::full>();
    const bool weighted = p.options.kl_weighted;
    if constexpr (K::fast) {
        if (!p.rollout.data && !p.entropy.data) {
            return weighted ? kernel_as<T, true, Specialization::clip_minimal_weighted_kl>()
                            : kernel_as<T, true, Specialization::clip_minimal>();
        }
    }
    return weighted ? kernel_as<T, K::fast, Specialization::clip_only_weighted_kl>()
                    : kernel_as<T, K::fast, Specialization::clip_only>();
}

void launch_count_tokens(const Params& p, Stream stream) {
    dispatch(p.fast, p.grad_dtype, [&](auto kind) {
        using K = decltype(kind);
        dispatch_rows(p.rows, [&](auto short_rows) {
            launch(count_tokens_kernel<typename K::Type, K::fast, short_rows.value>, blocks_of(p), kThreads, 0, stream,
                   p);
        });
    });
}

}  // namespace

Layout::Layout(int64_t rows, int64_t warps, int64_t num_actors) {
    totals = sizeof(Counts);
    actor_tokens = totals + (1 + num_actors) * kSumWords * kColumns * 8;
    lengths = actor_tokens + std::max<int64_t>(num_actors, 1) * 8;
    zeroed = (lengths + rows * 4 + 15) / 16 * 16;
    row_partials = zeroed;
    bytes = (row_partials + (rows + warps) * kRowSums * 8 + 15) / 16 * 16;
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
    p.one_weight = p.actors == 1 && !p.actor_ids.data && o.aggregation != Aggregation::seq_mean_token_mean;
    // Choose the kernel and its grid.
    const Variant& v = o.variant;
    p.clip_only = v.kind == VariantKind::clip && (o.kl == KlKind::none || o.kl == KlKind::k3) && v.low <= 1 &&
                  v.high >= 1 && v.dual >= 1;  // so that a masked token's ratio of 1 is inside the range
    p.fast = is_fast(p);
    p.table_rows = table_rows(o.num_actors);
    dispatch(p.fast, p.grad_dtype, [&](auto kind) {
        const LossKernel kernel = kernel_for(p, kind);
        p.shared_bytes = 8 * kThreads + kernel.table_bytes + 8 * p.table_rows * kWarps * kColumns;
        const int64_t resident = resident_blocks(kernel.run, kThreads, p.shared_bytes);
        p.warps = p.rows.cut(std::min(resident * kWarps, most_warps()));
    });
    // Divide the workspace.
    const Layout layout(p.rows.rows, most_warps(), o.num_actors);
    require_bytes("workspace", workspace, layout.bytes);
    char* base = workspace.as<char>();
    p.counts = reinterpret_cast<Counts*>(base);
    p.actor_tokens = reinterpret_cast<unsigned long long*>(base + layout.actor_tokens);
    p.lengths = reinterpret_cast<int*>(base + layout.lengths);
    p.row_partials = reinterpret_cast<double*>(base + layout.row_partials);
    p.totals = reinterpret_cast<Word*>(base + layout.totals);
}

void launch_loss_grad(const Params& p, Stream stream) {
    dispatch(p.fast, p.grad_dtype, [&](auto kind) {
        const auto kernel = kernel_for(p, kind).run;
        if (is_spread(p)) return launch_cooperative(kernel, blocks_of(p), kThreads, p.shared_bytes, stream, p);
        launch(kernel, blocks_of(p), kThreads, p.shared_bytes, stream, p);
    });
}

}  // namespace loss

int64_t policy_loss_workspace(int64_t rows, int64_t, int num_actors, int device) {
    const DeviceGuard guard(device);
    return loss::Layout(rows, loss::most_warps(), num_actors).bytes;
}

void policy_loss(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output,
                 const View& workspace, Stream stream) {
    loss::check_inputs(input, options, output);
    require_one_device(input.logprobs, {&workspace});
    const DeviceGuard guard(input.logprobs.device);
    loss::Params p = loss::bind(input, options, output);
    loss::plan(p, workspace);
    const loss::Layout layout(p.rows.rows, loss::most_warps(), options.num_actors);
    fill_bytes(workspace.data, 0, p.count_first ? layout.zeroed : layout.actor_tokens, stream);
    if (p.count_first) loss::launch_count_tokens(p, stream);
    loss::launch_loss_grad(p, stream);
}

}  // namespace turnwise::cuda
