// The kernel of the policy loss. It takes one tile of a row at a time and is compiled once per instruction set;
// policy_loss_kernels() returns the best one for this machine.
#pragma once

#include "core/view.h"
#include "ops/policy_loss_math.h"

namespace turnwise {

constexpr int kTile = 1024;  // tokens; so few that float32 sums stay accurate and all streams fit in L1

// n tokens of one row; or of several rows, if `advantages` is given. Streams are [n] and contiguous, or null if not
// given.
struct Tile {
    int n;                             // tokens, at most kTile
    const float* logprobs;             // under the policy
    const float* old_logprobs;         // under the policy before the update
    const float* ref_logprobs;         // under the reference, for KL
    const float* rollout_logprobs;     // given by the rollout engine
    const float* advantages;           // per token; null: `advantage` for all
    const float* weights;              // per token, times `weight`, with `advantages`; null: 1. The loss's sum has them
    const float* entropy;              // for the metric
    const uint8_t* mask;               // 0 or not 0; null: every token trains
    const uint8_t* selected;           // 0 or not 0, for variants that select tokens
    float* grad;                       // output: d loss / d logprob, times `weight`
    float advantage;                   // of every token, if `advantages` is null
    float weight;                      // the row's weight in the batch's loss
    float token_cap;                   // largest importance weight of a token; 0: weights are per row
    float reject_below, reject_above;  // a token's importance weight outside these counts as 0
    float row_weight;                  // importance weight of the row, if token_cap is 0; 1: no correction
    bool corrects;                     // importance weights multiply the loss; false: they are only metrics
    RowTerms row;                      // for gspo and gmpo
    Variant variant;                   // the token loss
    KlKind kl;                         // estimator of the KL term and metric
    float kl_coef;                     // the KL term is kl_coef * estimate
    bool kl_weighted;                  // the KL term is multiplied by the importance ratio
    bool stream;                       // write the gradient past the caches
};

// Sums over trained tokens of the term in each comment. r: ratio, d: log-ratio, w: importance weight.
struct TileSums {
    double loss = 0;           // token loss, without Tile::weight
    double log_ratio = 0;      // d
    double k3 = 0;             // r - 1 - d
    double kl = 0;             // KL estimate against the reference
    double mismatch = 0;       // old_logprob - rollout_logprob
    double weight = 0;         // w, as it is used: with cap, bounds and rows; without a correction that of the token
    double weight_square = 0;  // w^2
    double entropy = 0;        // entropy, as given
    double tokens = 0;         // 1
    double clipped_low = 0;    // 1 if clipped from below
    double clipped_high = 0;   // 1 if clipped from above
    double clipped_dual = 0;   // 1 if the dual clip applies, or the token is selected
    double rejected = 0;       // 1 if w is outside its bounds
    float ratio_max = 0;       // largest r; not a sum

    void add(const TileSums& other) {
        loss += other.loss;
        log_ratio += other.log_ratio;
        k3 += other.k3;
        kl += other.kl;
        mismatch += other.mismatch;
        weight += other.weight;
        weight_square += other.weight_square;
        tokens += other.tokens;
        clipped_low += other.clipped_low;
        clipped_high += other.clipped_high;
        clipped_dual += other.clipped_dual;
        entropy += other.entropy;
        rejected += other.rejected;
        // Keeps NaN, for which every comparison is false.
        if (!(other.ratio_max <= ratio_max)) ratio_max = other.ratio_max;
    }
};

// Sums over a row's trained tokens, which the row's first gradient needs.
struct RowSums {
    double log_ratio = 0;  // gspo: logprob - old_logprob; gmpo: clamped and bounded
    double advantage = 0;  // gmpo: A
    double mismatch = 0;   // old_logprob - rollout_logprob
    double kl = 0;         // gspo: KL estimate

    void add(const RowSums& other) {
        log_ratio += other.log_ratio;
        advantage += other.advantage;
        mismatch += other.mismatch;
        kl += other.kl;
    }
};

struct PolicyLossKernels {
    void (*clip[2][7])(const Tile&, TileSums&);  // PPO's clip, by kl_weighted and KlKind
    void (*any)(const Tile&, TileSums&);         // every variant and KL estimator
    void (*row_sums)(const Tile&, RowSums&);     // adds a tile's sums; mismatch if rollout_logprobs is given
    // The number of values that are not 0.
    int64_t (*count)(const uint8_t* mask, int64_t n);
    // Gather n values as float32, or n mask values as 0 and 1. to_mask is false if a float mask holds another value.
    void (*to_floats)(const View& from, int64_t offset, int64_t stride, int n, float* to);
    bool (*to_mask)(const View& from, int64_t offset, int64_t stride, int n, uint8_t* to);
    // Writes n values as bf16 or f16.
    void (*from_floats)(const float* from, int n, const View& to, int64_t offset);
    // exp of n values within +-80, for tests.
    void (*exp)(const float* from, int64_t n, float* to);
};

const PolicyLossKernels& policy_loss_kernels();

}  // namespace turnwise
