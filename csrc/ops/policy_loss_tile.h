// The kernel of the policy loss, which takes one tile of a row at a time. Compiled once per instruction set;
// policy_loss_kernels() gives the best for this machine.
#pragma once

#include "core/view.h"
#include "ops/policy_loss_math.h"

namespace turnwise {

constexpr int kTile = 1024;  // tokens; short enough that float32 lanes lose nothing and all streams stay in L1

// n tokens of one row. Streams are contiguous, and null where not given.
struct Tile {
    int n;
    const float* logprobs;
    const float* old_logprobs;
    const float* ref_logprobs;
    const float* rollout_logprobs;
    const float* advantages;  // per token, or null: `advantage` for all
    const float* entropy;
    const uint8_t* mask;               // 0 or 1; null: every token trains
    const uint8_t* selected;           // 0 or 1, for variants that select tokens
    float* grad;                       // output: d loss / d logprob, times the weight
    float advantage;                   // of every token, where `advantages` is null
    float weight;                      // the row's weight in the batch's loss
    float token_cap;                   // largest importance weight of a token; 0: weights are per row
    float reject_below, reject_above;  // a token's importance weight outside these counts as 0
    float row_weight;                  // importance weight of the row, where token_cap is 0 (1: none)
    RowTerms row;                      // gspo, gmpo
    Variant variant;
    KlKind kl;
    float kl_coef;     // the KL term is kl_coef * estimate
    bool kl_weighted;  // the KL term is weighted by the importance ratio
    bool stream;       // write the gradient past the caches
};

// Sums over trained tokens. r: ratio, d: log-ratio, w: importance weight.
struct TileSums {
    double loss = 0;           // without the row's weight
    double log_ratio = 0;      // d
    double k3 = 0;             // r - 1 - d
    double kl = 0;             // KL estimate against the reference
    double mismatch = 0;       // old_logprob - rollout_logprob
    double weight = 0;         // w
    double weight_square = 0;  // w^2
    double entropy = 0;        // entropy, as given
    double tokens = 0;         // 1
    double clipped_low = 0;    // 1 where clipped from below
    double clipped_high = 0;   // 1 where clipped from above
    double clipped_dual = 0;   // 1 where the dual clip applies, or the token is selected
    double rejected = 0;       // 1 where w is outside its bounds
    float ratio_max = 0;       // largest r; no sum

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
        // NaN must show, and fails every comparison.
        if (!(other.ratio_max <= ratio_max)) ratio_max = other.ratio_max;
    }
};

// Sums over a row's trained tokens that precede its first gradient.
struct RowSums {
    double log_ratio = 0;  // logprob - old_logprob; gmpo: clamped and bounded
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
    void (*clip[2][7])(const Tile&, TileSums&);  // PPO, by kl_weighted and KlKind
    void (*any)(const Tile&, TileSums&);         // every variant and kind of KL
    void (*row_sums)(const Tile&, RowSums&);     // of the tile's variant, and the mismatch with rollout_logprobs
    int64_t (*count)(const uint8_t* mask, int64_t n);
    // Gathers n values into float32, or n mask values into 0 and 1; false: a float mask holds another value.
    void (*to_floats)(const View& from, int64_t offset, int64_t stride, int n, float* to);
    bool (*to_mask)(const View& from, int64_t offset, int64_t stride, int n, uint8_t* to);
    void (*from_floats)(const float* from, int n, const View& to, int64_t offset);
    void (*exp)(const float* from, int64_t n, float* to);
};

const PolicyLossKernels& policy_loss_kernels();

}  // namespace turnwise
