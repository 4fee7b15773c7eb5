#include "ops/policy_loss.h"

#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "core/check.h"
#include "core/isa.h"
#include "core/parallel.h"
#include "ops/policy_loss_tile.h"
#include "ops/token_layout.h"

namespace turnwise {

const PolicyLossKernels& policy_loss_kernels_baseline();
#if defined(TURNWISE_X86)
const PolicyLossKernels& policy_loss_kernels_avx2();
const PolicyLossKernels& policy_loss_kernels_avx512();
#endif

const PolicyLossKernels& policy_loss_kernels() {
#if defined(TURNWISE_X86)
    if (isa() == Isa::avx512) return policy_loss_kernels_avx512();
    if (isa() == Isa::avx2) return policy_loss_kernels_avx2();
#endif
    return policy_loss_kernels_baseline();
}

namespace {

constexpr int64_t kSegment = 16 * kTile;          // tokens; longer rows are cut, so that threads can share them
constexpr int64_t kShortRow = 128;                // tokens; rows shorter on average are joined into tiles
constexpr int kFewActors = 8;                     // that take turns in a tile of joined rows
constexpr int64_t kTokensPerThread = 16 * kTile;  // below this a second thread costs more than it gains

double inverse(double value) {
    return value > 0 ? 1 / value : 0;
}

class Run {
  public:
    Run(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output)
        : in_(input),
          o_(options),
          out_(output),
          layout_(input.logprobs, input.cu_seqlens),
          kernels_(policy_loss_kernels()) {
        check_policy_loss(in_, o_, layout_.rows());
        check_values();
        per_sequence_ = has_row_advantages(in_.advantages, layout_.rows());
        joins_rows_ = can_join_rows();
        parts_ = joins_rows_ && in_.actor_ids ? size_t(o_.num_actors) : 1;
        if (joins_rows_) {
            for (int64_t begin = 0; begin < layout_.tokens(); begin += kSegment) {
                segments_.push_back({0, begin, std::min(begin + kSegment, layout_.tokens())});
            }
        } else {
            segments_ = cut_into_segments(layout_, kSegment);
        }
    }

    void run() {
        count_tokens();
        set_row_weights();
        std::vector<TileSums> sums(segments_.size() * parts_);
        rows_.assign(needs_row_sums() ? size_t(layout_.rows()) : 0, {});
        if (!needs_row_sums()) {
            each_segment([&](size_t i) { segment(segments_[i], &sums[i * parts_]); });
        } else if (layout_.rows() >= 8 * o_.threads) {
            // Two passes over the tokens. With many rows, both passes take a row at a time, so that it is in the cache.
            each_run([&](size_t first, size_t last) {
                sum_row(first, last);
                for (size_t i = first; i < last; ++i) segment(segments_[i], &sums[i]);
            });
        } else {
            // With few rows, threads share the segments of a row in each pass.
            std::vector<RowSums> parts(segments_.size());
            each_segment([&](size_t i) { parts[i] = row_sums(segments_[i]); });
            for (size_t i = 0; i < segments_.size(); ++i) rows_[size_t(segments_[i].row)].add(parts[i]);
            each_segment([&](size_t i) { segment(segments_[i], &sums[i]); });
        }
        require(!bad_mask_, "mask: expected 0 or 1");
        finish(sums);
    }

  private:
    // The checks that read values; a GPU skips them.
    void check_values() const {
        for (int64_t row = 0; in_.actor_ids && row < layout_.rows(); ++row) {
            require(actor(row) >= 0 && actor(row) < o_.num_actors, "actor_ids: an id is out of range");
        }
    }

    // The metric for reference log-probabilities uses the k3 estimator if the loss has no KL term.
    KlKind kl_kind() const { return in_.ref_logprobs && o_.kl == KlKind::none ? KlKind::k3 : o_.kl; }

    // True if a tile may hold several rows: they are short, lie side by side in every stream, and share no more than
    // advantage and weight.
    bool can_join_rows() const {
        if (layout_.tokens() >= kShortRow * layout_.rows()) return false;
        const bool simple = o_.variant.kind == VariantKind::clip && o_.correction != Correction::sequence;
        if (!simple || o_.num_actors > kFewActors || clip_kernel() == kernels_.any) return false;
        for (const View* stream :
             {&in_.logprobs, &in_.old_logprobs, &in_.ref_logprobs, &in_.rollout_logprobs, &in_.entropy, &in_.mask}) {
            if (*stream && !layout_.is_flat(*stream)) return false;
        }
        return per_sequence_ || layout_.is_flat(in_.advantages);
    }

    decltype(PolicyLossKernels::any) clip_kernel() const { return kernels_.clip[o_.kl_weighted][int(kl_kind())]; }

    int64_t actor(int64_t row) const {
        const int64_t place = row * in_.actor_ids.stride[0];
        return in_.actor_ids.dtype == DType::i64 ? in_.actor_ids.as<int64_t>()[place]
                                                 : in_.actor_ids.as<int32_t>()[place];
    }

    // Cuts the segments into at most one part per thread, with about equal numbers of tokens, and runs body(first,
    // last) on each. With `whole_rows`, parts end where rows do.
    template <class Body>
    void each_part(bool whole_rows, const Body& body) const {
        const int64_t tokens = layout_.tokens();
        const int parts = int(std::max<int64_t>(1, std::min<int64_t>(o_.threads, tokens / kTokensPerThread)));
        // The first segment that starts at or after the equal share.
        const auto first_of = [&](int part) {
            if (part == parts) return int64_t(segments_.size());
            const int64_t place = tokens * part / parts;
            const auto before = [&](const Segment& segment, int64_t value) {
                return layout_.start(segment.row) + (whole_rows ? 0 : segment.begin) < value;
            };
            return int64_t(std::lower_bound(segments_.begin(), segments_.end(), place, before) - segments_.begin());
        };
        run_parts(parts, [&](int part) { body(size_t(first_of(part)), size_t(first_of(part + 1))); });
    }

    // Runs body on every segment.
    template <class Body>
    void each_segment(const Body& body) const {
        each_part(false, [&](size_t first, size_t last) {
            for (size_t i = first; i < last; ++i) body(i);
        });
    }

    // Runs body(first, last) on the segments [first, last) of every row.
    template <class Body>
    void each_run(const Body& body) const {
        each_part(true, [&](size_t first, size_t last) {
            for (size_t end = first; first < last; first = end) {
                while (end < last && segments_[end].row == segments_[first].row) ++end;
                body(first, end);
            }
        });
    }

    bool needs_row_sums() const { return is_by_row(o_.variant.kind) || o_.correction == Correction::sequence; }

    // Counts the trained tokens of every row, if anything depends on them.
    void count_tokens() {
        const bool by_row = !joins_rows_ || o_.aggregation == Aggregation::seq_mean_token_mean ||
                            (!in_.normalizer && (o_.aggregation == Aggregation::seq_mean_token_sum ||
                                                 o_.aggregation == Aggregation::agent_mean));
        if (by_row) lengths_.assign(size_t(layout_.rows()), 0);
        trained_ = double(layout_.tokens());
        if (!in_.mask) {
            if (!by_row) return;
            for (int64_t row = 0; row < layout_.rows(); ++row) lengths_[size_t(row)] = double(layout_.length(row));
            return;
        }
        // A mask must be counted only if row weights or row sums need the lengths.
        const bool counted = o_.aggregation == Aggregation::seq_mean_token_mean || is_by_row(o_.variant.kind) ||
                             (!in_.normalizer && o_.aggregation != Aggregation::seq_mean_token_sum_norm);
        if (!counted) return;
        if (!is_bytes(in_.mask)) converted_mask_.reset(new uint8_t[size_t(layout_.tokens())]);
        std::vector<double> length_of(segments_.size());
        each_segment([&](size_t i) {
            for (int64_t t = segments_[i].begin; t < segments_[i].end; t += kTile) {
                const int n = int(std::min<int64_t>(kTile, segments_[i].end - t));
                length_of[i] += double(kernels_.count(make_mask(segments_[i].row, t, n), n));
            }
        });
        require(!bad_mask_, "mask: expected 0 or 1");
        if (!joins_rows_) {
            for (size_t i = 0; i < segments_.size(); ++i) lengths_[size_t(segments_[i].row)] += length_of[i];
            return;
        }
        trained_ = std::accumulate(length_of.begin(), length_of.end(), 0.0);
        if (!by_row) return;
        const uint8_t* mask = converted_mask_ ? converted_mask_.get() : in_.mask.as<uint8_t>();
        each_segment([&](size_t i) {  // takes the rows that begin in it
            for (int64_t row = layout_.row_of(segments_[i].begin); row < layout_.rows(); ++row) {
                const int64_t start = layout_.start(row), end = layout_.start(row + 1);
                if (start >= segments_[i].end) break;
                if (start < segments_[i].begin) continue;
                int64_t found = 0;
                for (int64_t t = start; t < end; ++t) found += mask[t] != 0;
                lengths_[size_t(row)] = double(found);
            }
        });
    }

    RowSums row_sums(const Segment& segment) {
        RowSums sums;
        each_tile(segment, false, [&](Tile& tile, int64_t, int) { kernels_.row_sums(tile, sums); });
        return sums;
    }

    void sum_row(size_t first, size_t last) {
        for (size_t i = first; i < last; ++i) rows_[size_t(segments_[i].row)].add(row_sums(segments_[i]));
    }

    // The weight of a row's tokens in the batch's loss, see Aggregation.
    void set_row_weights() {
        const size_t rows = size_t(layout_.rows());
        const bool by_length = o_.aggregation == Aggregation::seq_mean_token_mean;
        const bool by_actor = o_.aggregation == Aggregation::agent_mean;
        if (!joins_rows_ || by_length || by_actor) row_weight_.assign(rows, 0);
        // agent_mean: every actor with trained tokens has the same share, which its tokens divide.
        if (by_actor) {
            std::vector<double> tokens(size_t(o_.num_actors), 0);
            if (in_.normalizer) {
                for (size_t a = 0; a < tokens.size(); ++a) {
                    tokens[a] = given_count(int64_t(a) * in_.normalizer.stride[0]);
                }
            } else {
                for (size_t row = 0; row < rows; ++row) tokens[size_t(actor(int64_t(row)))] += lengths_[row];
            }
            double active = 0;
            for (double count : tokens) active += count > 0;
            for (double count : tokens) actor_weight_.push_back(inverse(active) * inverse(count));
            for (size_t row = 0; row < rows; ++row) row_weight_[row] = actor_weight_[size_t(actor(int64_t(row)))];
            return;
        }
        // Otherwise all rows share a denominator; seq_mean_token_mean also divides by the row's length.
        common_weight_ = inverse(in_.normalizer ? given_count(0) : batch_normalizer());
        for (size_t row = 0; row < row_weight_.size(); ++row) {
            row_weight_[row] = common_weight_ * (by_length ? inverse(lengths_[row]) : 1);
        }
    }

    // A denominator that the caller gave.
    double given_count(int64_t offset) const {
        const float count = in_.normalizer.as<float>()[offset];
        require(count >= 0, "normalizer: expected counts >= 0");
        return count;
    }

    // The batch's own denominator.
    double batch_normalizer() const {
        if (o_.aggregation == Aggregation::seq_mean_token_sum_norm) return o_.max_length;
        if (joins_rows_ && o_.aggregation == Aggregation::token_mean) return trained_;
        double tokens = 0, rows = 0;
        for (double length : lengths_) {
            tokens += length;
            rows += length > 0;
        }
        return o_.aggregation == Aggregation::token_mean ? tokens : rows;
    }

    bool is_bytes(const View& flags) const {
        const DType dtype = flags.dtype;
        return (dtype == DType::boolean || dtype == DType::u8 || dtype == DType::i8) && layout_.step(flags) == 1;
    }

    // A tile's values as float32: in place, or converted into scratch.
    const float* floats(const View& stream, int64_t row, int64_t token, int n, float* scratch) const {
        if (!stream) return nullptr;
        const int64_t offset = layout_.offset(stream, row, token), step = layout_.step(stream);
        if (stream.dtype == DType::f32 && step == 1) return stream.as<float>() + offset;
        kernels_.to_floats(stream, offset, step, n, scratch);
        return scratch;
    }

    // A mask or the selected tokens as bytes: in place, or converted into scratch.
    const uint8_t* bytes(const View& flags, int64_t row, int64_t token, int n, uint8_t* scratch) {
        const int64_t offset = layout_.offset(flags, row, token);
        if (is_bytes(flags)) return flags.as<uint8_t>() + offset;
        if (!kernels_.to_mask(flags, offset, layout_.step(flags), n, scratch)) bad_mask_ = true;
        return scratch;
    }
    const uint8_t* make_mask(int64_t row, int64_t token, int n) {
        return bytes(in_.mask, row, token, n,
                     converted_mask_ ? converted_mask_.get() + layout_.start(row) + token : nullptr);
    }

    // Runs body(tile, token, n) on a segment's tiles, with their streams as float32. `all`: every stream; otherwise
    // only those that row sums need.
    template <class Body>
    void each_tile(const Segment& segment, bool all, const Body& body) {
        const int64_t row = segment.row, start = layout_.start(row);
        float scratch[6][kTile];
        uint8_t mask_scratch[kTile], selected_scratch[kTile];
        // What all tiles share.
        Tile tile{};
        tile.variant = o_.variant;
        tile.kl = kl_kind();
        tile.kl_coef = o_.kl_coef;
        tile.kl_weighted = o_.kl_weighted;
        if (per_sequence_ && !joins_rows_)
            kernels_.to_floats(in_.advantages, row * in_.advantages.stride[0], 1, 1, &tile.advantage);
        const bool ratios = all || is_by_row(o_.variant.kind);
        const bool rollout = all || o_.correction == Correction::sequence;
        const bool ref = all || (o_.kl_weighted && o_.variant.kind == VariantKind::gspo);
        // The streams of each tile, in place or converted.
        for (int64_t t = segment.begin; t < segment.end; t += kTile) {
            const int n = int(std::min<int64_t>(kTile, segment.end - t));
            tile.n = n;
            tile.old_logprobs = floats(in_.old_logprobs, row, t, n, scratch[1]);
            if (ratios) tile.logprobs = floats(in_.logprobs, row, t, n, scratch[0]);
            if (rollout) tile.rollout_logprobs = floats(in_.rollout_logprobs, row, t, n, scratch[3]);
            if (!per_sequence_) tile.advantages = floats(in_.advantages, row, t, n, scratch[4]);
            if (ref) tile.ref_logprobs = floats(in_.ref_logprobs, row, t, n, scratch[2]);
            if (all) {
                tile.entropy = floats(in_.entropy, row, t, n, scratch[5]);
                if (in_.selected) tile.selected = bytes(in_.selected, row, t, n, selected_scratch);
            }
            if (converted_mask_) {
                tile.mask = converted_mask_.get() + start + t;
            } else if (in_.mask) {
                tile.mask = bytes(in_.mask, row, t, n, mask_scratch);
            }
            body(tile, t, n);
        }
    }

    // Writes the advantages of the tokens [begin, begin + n) of joined rows, and their weights if rows have different
    // ones. `row`: that of the first token. Returns the row of the last. Writes up to kPast values more.
    static constexpr int kPast = 3;
    struct OfRows {
        float advantages[kTile + kPast], weights[kTile + kPast];
        uint8_t actors[kTile + kPast];
    };
    int64_t spread_rows(int64_t begin, int n, int64_t row, Tile& tile, OfRows& out) const {
        const auto spread = [](auto value, int from, int to, auto* values) {
            for (int i = from; i < to; i += kPast + 1) {
                for (int k = 0; k <= kPast; ++k) values[i + k] = value;
            }
        };
        for (int from = 0, to; from < n; from = to) {
            while (layout_.start(row + 1) <= begin + from) ++row;
            to = int(std::min<int64_t>(layout_.start(row + 1) - begin, n));
            if (per_sequence_) {
                const int64_t place = row * in_.advantages.stride[0];
                float advantage;
                if (in_.advantages.dtype == DType::f32) {
                    advantage = in_.advantages.as<float>()[place];
                } else {
                    kernels_.to_floats(in_.advantages, place, 1, 1, &advantage);
                }
                spread(advantage, from, to, out.advantages);
            }
            if (!row_weight_.empty()) spread(float(row_weight_[size_t(row)]), from, to, out.weights);
            if (parts_ > 1) spread(uint8_t(actor(row)), from, to, out.actors);
        }
        if (per_sequence_) tile.advantages = out.advantages;
        tile.weight = row_weight_.empty() ? float(common_weight_) : 1.0f;
        if (!row_weight_.empty()) tile.weights = out.weights;
        return row;
    }

    // Runs the kernel on the tokens of each actor in turn. `sums`: of the actors.
    void take_turns(Tile tile, const uint8_t* actors, TileSums* sums) const {
        float* grad = tile.grad;
        const uint8_t* mask = tile.mask;
        float own_grad[kTile];
        uint8_t own[kTile];
        tile.mask = own;
        tile.grad = own_grad;
        tile.stream = false;
        std::fill_n(grad, tile.n, 0.0f);
        for (size_t actor = 0; actor < parts_; ++actor) {
            int found = 0;
            for (int i = 0; i < tile.n; ++i) {
                own[i] = uint8_t((actors[i] == actor) & (mask == nullptr || mask[i] != 0));
                found |= own[i];
            }
            if (!found) continue;
            clip_kernel()(tile, sums[actor]);
            for (int i = 0; i < tile.n; ++i) grad[i] += own_grad[i];
        }
    }

    // Writes the gradient of a segment, and adds its sums to `sums`: by actor if there are several parts.
    void segment(const Segment& segment, TileSums* sums) {
        // Choose the kernel and compute what the whole row shares.
        const int64_t row = segment.row, start = layout_.start(row);
        const bool direct = out_.grad.dtype == DType::f32;
        const bool large = layout_.tokens() * int64_t(sizeof(float)) >= kStreamBytes;
        const bool clip = o_.variant.kind == VariantKind::clip;
        const auto kernel = clip ? clip_kernel() : kernels_.any;
        const RowSums* row_sums = rows_.empty() ? nullptr : &rows_[size_t(row)];
        RowTerms terms{};
        if (row_sums) {
            terms =
                row_terms(o_.variant, lengths_[size_t(row)], row_sums->log_ratio, row_sums->advantage, row_sums->kl);
        }
        bool rejected = false;
        const float row_weight = sequence_weight(row_sums, rejected);
        float grad[kTile];
        OfRows of_rows;
        int64_t joined = joins_rows_ ? layout_.row_of(segment.begin) : 0;

        // Run the kernel on every tile. A narrow gradient goes through a float32 buffer.
        each_tile(segment, true, [&](Tile& tile, int64_t t, int n) {
            if (joins_rows_) {
                joined = spread_rows(t, n, joined, tile, of_rows);
            } else {
                tile.weight = float(row_weight_[size_t(row)]);
            }
            tile.row_weight = row_weight;
            tile.corrects = o_.correction != Correction::none;
            tile.row = terms;
            if (o_.correction == Correction::token) tile.token_cap = o_.cap;
            tile.reject_below = o_.reject_below;
            tile.reject_above = o_.reject_above;
            tile.grad = direct ? out_.grad.as<float>() + start + t : grad;
            tile.stream = direct && large && reinterpret_cast<uintptr_t>(tile.grad) % 64 == 0;
            parts_ > 1 ? take_turns(tile, of_rows.actors, sums) : kernel(tile, *sums);
            if (!direct) kernels_.from_floats(grad, n, out_.grad, start + t);
        });
        if (rejected) sums->rejected = sums->tokens;
    }

    // The importance weight of a whole row. Sets `rejected` if it is outside its bounds.
    float sequence_weight(const RowSums* sums, bool& rejected) const {
        if (o_.correction != Correction::sequence) return 1;
        // With this order of arguments std::clamp and std::min keep NaN; fmin and fmax would drop it.
        const double bound = kLogRatioBound, cap = o_.cap;
        const double weight = std::exp(std::clamp(sums->mismatch, -bound, bound));
        rejected = weight < double(o_.reject_below) || weight > double(o_.reject_above);
        return rejected ? 0 : float(std::min(weight, cap));
    }

    // Adds up the segments in order, and writes loss and metrics.
    void finish(const std::vector<TileSums>& sums) const {
        double loss = 0;
        TileSums all;
        std::vector<TileSums> by_actor(in_.actor_ids ? size_t(o_.num_actors) : 0);
        for (size_t i = 0; i < sums.size(); ++i) {
            const int64_t row = segments_[i / parts_].row;
            const size_t owner = joins_rows_ ? i % parts_ : in_.actor_ids ? size_t(actor(row)) : 0;
            // The sums of joined rows have the rows' weights already, if these differ. A weight of 0 hides even NaN.
            const double weight = !joins_rows_ ? row_weight_[size_t(row)] : row_weight_.empty() ? common_weight_ : 1;
            const bool counts = actor_weight_.empty() ? common_weight_ > 0 : actor_weight_[owner] > 0;
            if (counts && weight > 0) loss += sums[i].loss * weight;
            all.add(sums[i]);
            if (in_.actor_ids) by_actor[owner].add(sums[i]);
        }
        *out_.loss.as<float>() = float(loss);
        float* metrics = write_metrics(all, out_.metrics.as<float>());
        for (const TileSums& actor : by_actor) metrics = write_metrics(actor, metrics);
    }

    // Writes one row of metrics, in the order of METRICS in the Python reference. Returns its end.
    float* write_metrics(const TileSums& s, float* to) const {
        const double share = inverse(s.tokens);
        for (double value : {s.tokens, s.clipped_low * share, s.clipped_high * share, s.clipped_dual * share,
                             -s.log_ratio * share, s.k3 * share, (s.tokens + s.log_ratio + s.k3) * share}) {
            *to++ = float(value);
        }
        *to++ = std::isnan(s.log_ratio) ? float(s.log_ratio) : s.ratio_max;  // the maximum drops NaN, the sum keeps it
        if (in_.ref_logprobs) *to++ = float(s.kl * share);
        if (in_.rollout_logprobs) {
            *to++ = float(-s.mismatch * share);
            // Effective sample size as a share of the tokens; 0 for a batch without trained tokens.
            *to++ = float(s.weight_square > 0 ? s.weight * s.weight / (s.weight_square * s.tokens) : 0);
            *to++ = float(s.rejected * share);
        }
        if (in_.entropy) *to++ = float(s.entropy * share);
        return to;
    }

    const PolicyLossInput& in_;
    const PolicyLossOptions& o_;
    const PolicyLossOutput& out_;
    TokenLayout layout_;
    const PolicyLossKernels& kernels_;
    bool per_sequence_;                          // one advantage per row
    bool joins_rows_;                            // tiles hold several rows; segments count their tokens from row 0 on
    size_t parts_;                               // sums of a segment: one per actor of joined rows, else 1
    std::vector<Segment> segments_;              // all rows, cut at kSegment
    std::vector<double> lengths_, row_weight_;   // [rows]: trained tokens; weight of a token's loss in the batch's
    double trained_ = 0;                         // trained tokens, if rows are joined
    double common_weight_ = 0;                   // of all rows, without their lengths; not for agent_mean
    std::vector<double> actor_weight_;           // [actors]: the weight of their rows; agent_mean alone
    std::vector<RowSums> rows_;                  // [rows]; empty if not needed
    std::unique_ptr<uint8_t[]> converted_mask_;  // [tokens]: the mask as bytes; null if not needed
    std::atomic<bool> bad_mask_{false};          // a float mask holds a value other than 0 and 1
};

}  // namespace

void check_policy_loss(const PolicyLossInput& in, const PolicyLossOptions& o, int64_t rows) {
    require_float_stream("logprobs", in.logprobs);
    require_given("old_logprobs", in.old_logprobs, "the ratio needs it");
    if (o.kl != KlKind::none) require_given("ref_logprobs", in.ref_logprobs, "kl is given");
    if (o.correction != Correction::none) require_given("rollout_logprobs", in.rollout_logprobs, "correction is given");
    // Streams of one value per token.
    const auto check_stream = [&](const char* name, const View& stream) {
        if (!stream) return;
        require_shape_of(name, stream, "logprobs", in.logprobs);
        require_float_stream(name, stream);
    };
    check_stream("old_logprobs", in.old_logprobs);
    check_stream("ref_logprobs", in.ref_logprobs);
    check_stream("rollout_logprobs", in.rollout_logprobs);
    check_stream("entropy", in.entropy);
    if (!has_row_advantages(in.advantages, rows)) {
        require_shape_of("advantages", in.advantages, "logprobs", in.logprobs);
    }
    require_float_stream("advantages", in.advantages);
    if (in.mask) require_shape_of("mask", in.mask, "logprobs", in.logprobs);
    require(in.mask.dtype != DType::f64, "mask.dtype=float64: expected bool, an integer type or a narrower float");
    if (selects(o.variant.kind)) {
        require_given("selected", in.selected, "the variant selects tokens");
        require_shape_of("selected", in.selected, "logprobs", in.logprobs);
        require_dtype("selected", in.selected, {DType::boolean});
    }
    // Columns of one value per row or actor.
    const bool by_actor = o.aggregation == Aggregation::agent_mean;
    if (by_actor) require_given("actor_ids", in.actor_ids, "aggregation is agent-mean");
    if (in.actor_ids) {
        require_shape("actor_ids", in.actor_ids, {rows});
        require_dtype("actor_ids", in.actor_ids, {DType::i64, DType::i32});
    }
    if (in.normalizer) {
        require_dtype("normalizer", in.normalizer, {DType::f32});
        const int64_t count = by_actor ? o.num_actors : 1;
        if (in.normalizer.size() != count) reject_shape("normalizer", in.normalizer, std::to_string(count) + " values");
    }
}

void policy_loss(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output) {
    Run(input, options, output).run();
}

}  // namespace turnwise
