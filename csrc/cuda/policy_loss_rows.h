// What the tokens of a row share in the policy loss, and the rows that a warp holds in shared memory.
#pragma once

#include <type_traits>

#include "cuda/policy_loss_launch.h"

namespace turnwise::cuda::loss {

// ---- The weight of a row --------------------------------------------------------------------------------------------
// 1 / value; 0 for 0, NaN for a negative number or NaN.
__device__ __forceinline__ double inverse(double value) {
    return value > 0 ? 1 / value : value == 0 ? 0 : double(NAN);
}

// Denominator of the loss of an actor's rows, see Aggregation: the one that was given, or the batch's own.
__device__ __forceinline__ double normalizer_of(const Params& p, int actor) {
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

// The factor that the weights of all rows have in common. Called by a whole warp.
__device__ __forceinline__ double common_weight(const Params& p) {
    if (p.options.aggregation != Aggregation::agent_mean) return inverse(normalizer_of(p, 0));
    double active = 0;  // actors with trained tokens
    for (int actor = int(threadIdx.x) % kWarp; actor < p.actors; actor += kWarp) active += normalizer_of(p, actor) > 0;
    return inverse(warp_sum(active));
}

// ---- One row --------------------------------------------------------------------------------------------------------
// What all tokens of a row share. 16 bytes, so one instruction loads them.
struct alignas(16) ClipRow {
    float weight;     // weight of a token's loss in the batch's
    float advantage;  // A, if given per row
    float low, high;  // ClipRange of `advantage`
};

// The rest, for what clip_minimal does not cover.
struct Row : ClipRow {
    RowTerms terms;    // gspo, gmpo
    float importance;  // sequence-level importance weight
    bool rejected;     // that weight is outside its bounds
};

// The sums over the whole rows of all lanes: each adds up the partial sums of the spans that its row touches. `here`:
// the lane has a row. Called by a whole warp.
__device__ __forceinline__ void add_row_sums(const Params& p, int64_t row, bool here, double (&sums)[kRowSums]) {
    constexpr int64_t kFew = 4;
    const int64_t first = here ? row_start(p.rows, row) / p.rows.span : 0;
    const int64_t count = here ? (row_start(p.rows, row + 1) - 1) / p.rows.span - first + 1 : 0;
    for (int64_t span = first; span < first + count && count <= kFew; ++span) {
        for (int k = 0; k < kRowSums; ++k) sums[k] += p.row_partials[(row + span) * kRowSums + k];
    }
    // A row of many spans takes the whole warp.
    for (unsigned long_rows = __ballot_sync(kFullWarp, count > kFew); long_rows; long_rows &= long_rows - 1) {
        const int lane = int(threadIdx.x) % kWarp, owner = __ffs(int(long_rows)) - 1;
        const int64_t from = __shfl_sync(kFullWarp, row + first, owner);
        const int64_t spans = __shfl_sync(kFullWarp, count, owner);
        double mine[kRowSums] = {};
        for (int64_t i = lane; i < spans; i += kWarp) {
            for (int k = 0; k < kRowSums; ++k) mine[k] += p.row_partials[(from + i) * kRowSums + k];
        }
        for (int k = 0; k < kRowSums; ++k) {
            const double total = warp_sum(mine[k]);
            if (lane == owner) sums[k] = total;
        }
    }
}

// Computes what the tokens of a row share. `sums`: see add_row_sums. `common`: see common_weight. A wrong actor id
// makes the weight NaN.
template <class R>
__device__ __forceinline__ R make_row(const Params& p, int64_t row, int actor_id, double common,
                                      const double (&sums)[kRowSums]) {
    const PolicyLossOptions& o = p.options;
    R out{};
    double weight = common;
    if (o.aggregation == Aggregation::agent_mean) weight *= inverse(normalizer_of(p, actor_id < 0 ? 0 : actor_id));
    if (o.aggregation == Aggregation::seq_mean_token_mean) weight *= inverse(double(p.lengths[row]));
    out.weight = actor_id < 0 ? NAN : float(weight);
    if (p.row_advantages.data) out.advantage = p.row_advantages.number(row);
    const auto range = clip_range<ScalarMath>(out.advantage, o.variant);
    out.low = range.low;
    out.high = range.high;
    if constexpr (std::is_same_v<R, Row>) {
        out.terms = {1, 0, 0, false};
        if (is_by_row(o.variant.kind)) {
            const double advantage = o.variant.kind == VariantKind::gmpo ? sums[sum_advantage] : 0;
            const double kl = kl_by_row(o) ? sums[sum_kl] : 0;
            out.terms = row_terms(o.variant, double(p.lengths[row]), sums[sum_log_ratio], advantage, kl);
        }
        out.importance = 1;
        if (o.correction == Correction::sequence) {
            const double sum = sums[sum_mismatch], bound = kLogRatioBound;
            const double importance = exp(sum > bound ? bound : sum < -bound ? -bound : sum);
            out.rejected = importance < double(o.reject_below) || importance > double(o.reject_above);
            out.importance = out.rejected ? 0 : importance > double(o.cap) ? o.cap : float(importance);
        }
    }
    return out;
}

// ---- The rows of a span ---------------------------------------------------------------------------------------------
// Rows that hold tokens, in shared memory and in order. size: a power of two, at least 2 * kWarp. One more place stands
// for the rows that are not in the table. All places from the number of rows on have kNoEnd in `ends`, so that a search
// needs no other bound.
template <class R, int size>
struct RowTable {
    R rows[size + 1];
    int64_t indices[size + 1];  // of the rows
    int actors[size + 1];       // 0 for an id out of range
    int ends[2 * size];         // the first token after the row, counted from the span's begin; at most the span's size
};

// Walks the rows of a warp's span in order and keeps the next ones in a table. A lane prepares a row, so rows of few
// tokens cost little. All lanes call its methods together.
template <class R, int size>
class RowWindow {
  public:
    using Table = RowTable<R, size>;

    __device__ __forceinline__ RowWindow(const Params& p, Table& table, int64_t begin, int tokens)
        : table(table), p_(p), begin_(begin), tokens_(tokens), common_(common_weight(p)) {
        next_ = tokens > 0 ? warp_find_row(p.rows, begin) : p.rows.rows;
        for (int i = int(threadIdx.x) % kWarp; i < 2 * size; i += kWarp) table.ends[i] = kNoEnd;
        __syncwarp();
    }

    // Reads rows until the tokens before `until` have theirs, or the table is full.
    __device__ __forceinline__ void fill(int until) {
        if (covered >= until || next_ >= p_.rows.rows || count_ - first > size - kWarp) return;
        __syncwarp();  // other lanes may still read rows whose places are taken now
        drop();
        do {
            read();
        } while (covered < until && next_ < p_.rows.rows && count_ <= size - kWarp);
    }

    // The place of the first row from `first` on that ends after a token; that of no row if the table does not hold it.
    __device__ __forceinline__ int find(int token) const {
        int place = first;
#pragma unroll
        for (int step = size / 2; step > 0; step /= 2) {
            if (table.ends[place + step - 1] <= token) place += step;
        }
        return place;
    }
    // Tells the place of the row that held the token before the next one.
    __device__ __forceinline__ void move_to(int place) { first = min(place, count_ - 1); }

    Table& table;
    int first = 0;              // the place of the next token's row, once `fill` has read it
    int covered = 0;            // the tokens before it have their row in the table, or had it
    bool bad_actor_id = false;  // this lane prepared a row with an id out of range

  private:
    static constexpr int kNoEnd = 0x7fffffff;

    // Moves the rows from `first` on to the front of the table.
    __device__ __forceinline__ void drop() {
        const int lane = int(threadIdx.x) % kWarp, left = count_ - first;
        for (int place = lane; first > 0 && place - lane < left; place += kWarp) {
            const bool here = place < left;
            const int from = here ? first + place : 0;
            const R row = table.rows[from];
            const int64_t index = table.indices[from];
            const int end = table.ends[from], actor = table.actors[from];
            __syncwarp();
            if (here) put(place, row, index, end, actor);
            __syncwarp();
        }
        first = 0;
        count_ = left;
    }

    __device__ __forceinline__ void put(int place, const R& row, int64_t index, int end, int actor) {
        table.rows[place] = row;
        table.indices[place] = index;
        table.ends[place] = end;
        table.actors[place] = actor;
    }

    // Appends those of the next 32 rows that hold tokens.
    __device__ __forceinline__ void read() {
        const int lane = int(threadIdx.x) % kWarp;
        const int64_t row = next_ + lane;
        int64_t start = 0, stop = 0;  // wrong ones do no harm: no token outside the span is touched
        if (row < p_.rows.rows) {
            start = given_start(p_.rows, row) - begin_;
            stop = given_start(p_.rows, row + 1) - begin_;
        }
        const bool here = start < stop && start < tokens_ && stop > 0;
        double sums[kRowSums] = {};
        if (p_.sum_rows) add_row_sums(p_, row, here, sums);
        const unsigned all = __ballot_sync(kFullWarp, here);
        const int place = count_ + __popc(all & ((1u << lane) - 1)), end = stop < tokens_ ? int(stop) : tokens_;
        for (int i = count_ + lane; i < size; i += kWarp) table.ends[i] = kNoEnd;
        __syncwarp();
        if (here) {
            const int id = actor_of(p_, row);
            put(place, make_row<R>(p_, row, id, common_, sums), row, end, id < 0 ? 0 : id);
            bad_actor_id = bad_actor_id || id < 0;
        }
        if (lane == 0) table.rows[count_ + __popc(all)] = R{};  // for tokens of no row: weight 0, and no NaN
        __syncwarp();
        count_ += __popc(all);
        next_ += kWarp;
        if (all != 0) covered = table.ends[count_ - 1];
    }

    const Params& p_;
    int64_t begin_;  // the first token of the span
    int tokens_;     // in the span
    double common_;  // see common_weight
    int64_t next_;   // the next row to read
    int count_ = 0;  // rows in the table, with those that no token needs any more
};

}  // namespace turnwise::cuda::loss
