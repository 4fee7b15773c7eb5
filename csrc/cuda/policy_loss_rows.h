// Numbers that the tokens of a row share in the policy loss, and the rows that a warp holds in shared memory.
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

// The factor that the weights of all rows have in common. Called by a whole block. `scratch`: as for block_sum.
__device__ __forceinline__ double common_weight(const Params& p, double* scratch) {
    if (p.options.aggregation != Aggregation::agent_mean) return inverse(normalizer_of(p, 0));
    double active = 0;  // actors with trained tokens
    if (p.normalizer.data) {
        for (int actor = int(threadIdx.x); actor < p.actors; actor += kThreads) active += normalizer_of(p, actor) > 0;
        active = block_sum(active, scratch);
    } else {
        active = double(p.counts->actors);
    }
    const double common = inverse(active);
    return p.actor_ids.data ? common : common * inverse(normalizer_of(p, 0));
}

// ---- One row --------------------------------------------------------------------------------------------------------
// Numbers that all tokens of a row share. 16 bytes, so one instruction loads them.
struct alignas(16) ClipRow {
    float weight;     // weight of a token's loss in the batch's
    float scaled;     // A times `weight`, with the sign of A even if that is 0 or NaN; A is 0 if given per token
    float low, high;  // ClipRange of A

    __device__ __forceinline__ bool negative() const { return __float_as_uint(scaled) >> 31 != 0; }
};

// The rest, for what clip_minimal does not cover.
struct Row : ClipRow {
    float advantage;   // A
    RowTerms terms;    // gspo, gmpo
    float importance;  // sequence-level importance weight
    bool rejected;     // that weight is outside its bounds
};

// The sums over the whole rows of all lanes: each adds up the partial sums of the spans that its row touches. `here`:
// the lane has a row. `only`: the number of the span that holds all of the row; -1: several may. Called by a whole
// warp.
__device__ __forceinline__ void add_row_sums(const Params& p, int64_t row, bool here, int64_t only,
                                             double (&sums)[kRowSums]) {
    if (here && only >= 0) {
        for (int k = 0; k < kRowSums; ++k) sums[k] = p.row_partials[(row + only) * kRowSums + k];
    }
    here = here && only < 0;
    if (!__any_sync(kFullWarp, here)) return;
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

// Computes what the tokens of a row share. `sums`: see add_row_sums. `common`: see common_weight. A wrong actor id (-1)
// makes the weight NaN.
template <class R>
__device__ __forceinline__ R make_row(const Params& p, int64_t row, double common, const double (&sums)[kRowSums],
                                      int& actor) {
    const PolicyLossOptions& o = p.options;
    R out{};
    double weight = common;
    actor = 0;
    if (!p.one_weight) {
        if (p.actor_ids.data) {
            actor = actor_of(p, row);
            if (o.aggregation == Aggregation::agent_mean) weight *= inverse(normalizer_of(p, max(actor, 0)));
            if (actor < 0) weight = NAN;
        }
        if (o.aggregation == Aggregation::seq_mean_token_mean) weight *= inverse(double(max(p.lengths[row], 1)));
    }
    out.weight = float(weight);
    const float advantage = p.row_advantages.data ? p.row_advantages.number(row) : 0.0f;
    const auto range = clip_range<ScalarMath>(advantage, o.variant);
    out.scaled = copysignf(advantage * out.weight, advantage);
    out.low = range.low;
    out.high = range.high;
    if constexpr (std::is_same_v<R, Row>) {
        out.advantage = advantage;
        out.terms = {1, 0, 0, false};
        if (is_by_row(o.variant.kind)) {
            const double total = o.variant.kind == VariantKind::gmpo ? sums[sum_advantage] : 0;
            const double kl = kl_by_row(o) ? sums[sum_kl] : 0;
            out.terms = row_terms(o.variant, double(p.lengths[row]), sums[sum_log_ratio], total, kl);
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
// needs no other bound. step: tokens that the warp takes at once.
template <class R, int size, int step>
struct RowTable {
    R rows[size + 1];
    int ends[2 * size];  // the first token after the row, counted from the span's begin; at most the span's size
    unsigned starts[2][step / 4];  // a byte per token of a step, 0 but in place_rows, which uses the two in turn
    int64_t indices[size + 1];     // of the rows
    int actors[size + 1];          // 0 for an id out of range; not set if there is one actor
    bool has_zero_weight;          // a row has weight 0
    bool has_bad_actor;            // a row had an id out of range
};

// Walks the rows of a warp's span in order and keeps the next ones in a table. A lane prepares a row, so rows of few
// tokens cost little. All lanes call its methods together.
template <class R, int size, int step>
class RowWindow {
  public:
    using Table = RowTable<R, size, step>;
    static constexpr int kPack = step / kWarp;  // tokens per lane and step

    // `common`: see common_weight.
    __device__ __forceinline__ RowWindow(const Params& p, Table& table, double common, int64_t begin, int tokens)
        : table(table), p_(p), begin_(begin), tokens_(tokens), common_(common) {
        next_ = tokens > 0 ? warp_find_row(p.rows, begin) : p.rows.rows;
        const int lane = int(threadIdx.x) % kWarp;
        for (int i = lane; i < 2 * size; i += kWarp) table.ends[i] = kNoEnd;
        for (int i = lane; i < step / 2; i += kWarp) table.starts[0][i] = 0;
        if (lane == 0) table.has_bad_actor = false;
        __syncwarp();
    }

    // Reads rows, from that of the next token on, until the tokens before `until` and a few steps more have theirs, or
    // the table is full. A row that is still needed is read again: to move it would take as long.
    __device__ __forceinline__ void fill(int until) {
        if (next_ >= p_.rows.rows || count_ - first > size - kWarp) return;
        if (first < count_) next_ = table.indices[first];
        __syncwarp();  // other lanes may still read rows whose places are taken now
        const int lane = int(threadIdx.x) % kWarp;
#pragma unroll
        for (int i = 0; i < size; i += kWarp) table.ends[i + lane] = kNoEnd;
        if (lane == 0) table.has_zero_weight = p_.one_weight && float(common_) == 0;
        __syncwarp();
        first = count_ = 0;
        const int wanted = min(until + 2 * step, tokens_);
        do {
            read();
        } while (covered < wanted && next_ < p_.rows.rows && count_ <= size - kWarp);
        if (lane == 0) table.rows[count_] = no_row();
        __syncwarp();
    }

    // The place of the first row from `first` on that ends after a token; that of no row if the table does not hold it.
    __device__ __forceinline__ int find(int token) const {
        int place = first;
#pragma unroll
        for (int half = size / 2; half > 0; half /= 2) {
            if (table.ends[place + half - 1] <= token) place += half;
        }
        return place;
    }
    // Tells the place of the row that held the token before the next one.
    __device__ __forceinline__ void move_to(int place) { first = min(place, count_ - 1); }

    // Where the rows of this lane's tokens are.
    struct Places {
        const R* before;             // the row of the token before the lane's first one
        unsigned starts[kPack / 4];  // a byte per token: sizeof(R) if a row starts with it, else 0

        __device__ __forceinline__ const R& operator[](int k) const {
            unsigned bytes = 0;
#pragma unroll
            for (int i = 0; i <= k; i += 4) {
                const int after = max(i + 3 - k, 0);  // tokens of the word after token k
                bytes = dot_bytes(starts[i / 4], 0x01010101u >> 8 * after, bytes);
            }
            return *reinterpret_cast<const R*>(reinterpret_cast<const char*>(before) + bytes);
        }
    };

    // Finds the rows of a whole step that begins at `base`, all in the table, and moves to the last of them. False, and
    // no effect, if the whole step has one row. The rows that start in the step are marked at their first tokens, and a
    // prefix sum over the marks counts them up to each token: in bytes, so that it gives addresses.
    __device__ __forceinline__ bool place_rows(int base, Places& places) {
        const int lane = int(threadIdx.x) % kWarp;
        unsigned* starts = table.starts[turn_];
        // Mark the tokens with which rows start: the ends of those before.
        int marked = 0;
        unsigned found;
        do {
            const int end = table.ends[first + marked + lane] - base;
            const bool inside = unsigned(end) < unsigned(step);
            if (inside) reinterpret_cast<uint8_t*>(starts)[end] = uint8_t(sizeof(R));
            found = __ballot_sync(kFullWarp, inside);
            marked += __popc(found);
        } while (found == kFullWarp);
        if (marked == 0) return false;
        turn_ ^= 1;
        __syncwarp();
        // Every lane reads its own tokens, and clears them for the step after the next.
        unsigned mine = 0;
#pragma unroll
        for (int i = 0; i < kPack / 4; ++i) {
            places.starts[i] = starts[lane * (kPack / 4) + i];
            starts[lane * (kPack / 4) + i] = 0;
            mine = dot_bytes(places.starts[i], 0x01010101u, mine);
        }
        const unsigned upto = warp_prefix_sum(mine);
        places.before = reinterpret_cast<const R*>(reinterpret_cast<const char*>(table.rows + first) + (upto - mine));
        first += marked;
        return true;
    }

    Table& table;
    int first = 0;    // the place of the next token's row, once `fill` has read it
    int covered = 0;  // the tokens before it have their row in the table, or had it

  private:
    static constexpr int kNoEnd = 0x7fffffff;

    // For tokens of no row: weight 0, no NaN, and never clipped.
    static __device__ __forceinline__ R no_row() {
        R none{};
        none.low = -HUGE_VALF;
        none.high = HUGE_VALF;
        return none;
    }

    // A token counted from the span's begin, or the nearest one that is in the span.
    __device__ __forceinline__ int in_span(int64_t token) const {
        const int64_t place = token - begin_;
        const int high = int(place >> 32);
        const int low = int(min(unsigned(place), unsigned(tokens_)));
        return high == 0 ? low : high < 0 ? 0 : tokens_;
    }

    // Appends those of the next 32 rows that hold tokens.
    __device__ __forceinline__ void read() {
        const int lane = int(threadIdx.x) % kWarp;
        const int64_t row = next_ + lane;
        bool whole = false;
        int start = 0, end = 0;  // wrong ones do no harm: no token outside the span is touched
        if (row < p_.rows.rows) {
            const RowRange range = given_range(p_.rows, row);
            start = in_span(range.begin);
            end = in_span(range.end);
            whole = range.begin >= begin_ && range.end <= begin_ + tokens_;
        }
        const bool here = start < end;
        double sums[kRowSums] = {};
        if (std::is_same_v<R, Row> && p_.sum_rows) {
            add_row_sums(p_, row, here, whole ? begin_ / p_.rows.span : -1, sums);
        }
        const unsigned all = __ballot_sync(kFullWarp, here);
        const int place = count_ + __popc(all & ((1u << lane) - 1));
        int actor = 0;
        bool is_zero = false;
        if (here) {
            const R prepared = make_row<R>(p_, row, common_, sums, actor);
            table.rows[place] = prepared;
            table.indices[place] = row;
            table.ends[place] = end;
            is_zero = prepared.weight == 0;
        }
        if (!p_.one_weight) {
            if (p_.actors > 1 && here) table.actors[place] = max(actor, 0);
            const bool bad_actor = __any_sync(kFullWarp, actor < 0), zero = __any_sync(kFullWarp, is_zero);
            if (lane == 0 && bad_actor) table.has_bad_actor = true;
            if (lane == 0 && zero) table.has_zero_weight = true;
        }
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
    int turn_ = 0;   // which of Table::starts the next step uses
};

}  // namespace turnwise::cuda::loss
