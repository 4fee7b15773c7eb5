// Policy loss over a batch: loss, gradient and metrics in one pass over the tokens.
#pragma once

#include "core/view.h"
#include "ops/policy_loss_math.h"

namespace turnwise {

enum class Aggregation { token_mean, seq_mean_token_sum, seq_mean_token_mean, seq_mean_token_sum_norm, agent_mean };
enum class Correction { none, token, sequence };

struct PolicyLossInput {
    View logprobs;          // [B, T], or [N] with cu_seqlens; f32, bf16, f16; any strides, as all streams
    View old_logprobs;      // as logprobs
    View advantages;        // [B], or as logprobs
    View mask;              // as logprobs, any dtype; or none
    View cu_seqlens;        // [B + 1] i32 or i64; or none
    View ref_logprobs;      // as logprobs; or none
    View rollout_logprobs;  // as logprobs; or none
    View normalizer;        // 0-dim or [num_actors] f32; or none
    View actor_ids;         // [B] i64 or i32; or none
    View entropy;           // as logprobs; or none: for its mean alone
    View selected;          // as logprobs, boolean; for variants that select
};

struct PolicyLossOptions {
    Variant variant;
    KlKind kl;
    float kl_coef;
    bool kl_weighted;  // by the importance ratio: the token's, under gspo its row's
    Correction correction;
    float cap, reject_below, reject_above;  // a weight outside the last two counts as 0
    Aggregation aggregation;
    int num_actors;
    double max_length;
    int threads;
};

struct PolicyLossOutput {
    View loss;     // 0-dim f32
    View grad;     // as logprobs, contiguous
    View metrics;  // [1 + num_actors, metric_columns()] f32
};

inline int64_t metric_columns(const PolicyLossInput& in) {
    return 8 + (in.ref_logprobs ? 1 : 0) + (in.rollout_logprobs ? 3 : 0) + (in.entropy ? 1 : 0);
}

// Results do not depend on the number of threads. Throws InvalidInput.
void policy_loss(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output);

}  // namespace turnwise
