// The policy loss of a batch: loss, gradient and metrics in one pass over the tokens.
#pragma once

#include "core/view.h"
#include "ops/policy_loss_math.h"

namespace turnwise {

// Aggregation of token losses l into one number. n: trained tokens; "rows": rows with a trained token.
enum class Aggregation {
    token_mean,               // sum(l) / n
    seq_mean_token_sum,       // sum(l) / rows
    seq_mean_token_mean,      // sum over rows of (sum(l) / n of the row) / rows
    seq_mean_token_sum_norm,  // sum(l) / max_length
    agent_mean,               // mean over actors of (sum(l) / n of the actor)
};

// Importance sampling between the rollout engine and the old policy: w = exp(old_logprob - rollout_logprob).
enum class Correction {
    none,
    token,     // w per token
    sequence,  // the product of w over the row's trained tokens
};

struct PolicyLossInput {
    View logprobs;          // [B, T], or [N] with cu_seqlens; f32, bf16, f16; any strides, like all streams
    View old_logprobs;      // as logprobs
    View advantages;        // [B], or as logprobs
    View mask;              // as logprobs, any dtype; or none
    View cu_seqlens;        // [B + 1] i32 or i64; or none
    View ref_logprobs;      // as logprobs; or none
    View rollout_logprobs;  // as logprobs; or none
    View normalizer;  // 0-dim f32, or [num_actors] for agent_mean: denominator of the loss; or none: the batch's own
    View actor_ids;   // [B] i64 or i32; or none
    View entropy;     // as logprobs; or none. Only its mean is used, as a metric
    View selected;    // as logprobs, boolean; for variants that select
};

struct PolicyLossOptions {
    Variant variant;                   // the token loss
    KlKind kl;                         // estimator of the KL term
    float kl_coef;                     // the KL term is kl_coef * estimate
    bool kl_weighted;                  // the KL term is multiplied by the token's importance ratio, for gspo the row's
    Correction correction;             // importance sampling against the rollout engine
    float cap;                         // largest importance weight
    float reject_below, reject_above;  // an importance weight outside these counts as 0
    Aggregation aggregation;           // of token losses
    int num_actors;                    // actor ids are below it; 0: no metrics per actor
    double max_length;                 // divisor of seq_mean_token_sum_norm, in tokens
    int threads;                       // CPU threads; ignored on a GPU
};

struct PolicyLossOutput {
    View loss;     // 0-dim f32
    View grad;     // d loss / d logprobs; shape and dtype as logprobs, contiguous
    View metrics;  // [1 + num_actors, metric_columns()] f32: the batch, then each actor
};

// The number of metrics; METRICS of the Python reference names them.
inline int64_t metric_columns(const PolicyLossInput& in) {
    return 8 + (in.ref_logprobs ? 1 : 0) + (in.rollout_logprobs ? 3 : 0) + (in.entropy ? 1 : 0);
}

// Throws InvalidInput if a tensor is missing, or if its shape or dtype does not fit `rows` rows of logprobs.
void check_policy_loss(const PolicyLossInput& input, const PolicyLossOptions& options, int64_t rows);

// True for advantages [rows] or [rows, 1], which are one per row.
inline bool has_row_advantages(const View& advantages, int64_t rows) {
    return advantages.shape[0] == rows && (advantages.dims == 1 || (advantages.dims == 2 && advantages.shape[1] == 1));
}

// Results do not depend on the number of threads. Throws InvalidInput.
void policy_loss(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output);

}  // namespace turnwise
