// What the driver of the policy loss asks of a kernel: one tile of one row at a time. The kernel is compiled once per
// instruction set; kernels() gives the ones for this machine.
#pragma once

#include "core/view.h"
#include "ops/policy_loss_math.h"

namespace turnwise {

constexpr int kTile = 1024;  // tokens; short enough that float32 lanes lose nothing and all streams stay in L1

// n tokens of one row, contiguous. Pointers that are null: not given.
struct Tile {
    int n;
    const float* logprobs;
    const float* old_logprobs;
    const float* ref_logprobs;
    const float* rollout_logprobs;
    const float* advantages;  // per token, or null: `advantage` for all
    const float* entropy;
    const uint8_t* mask;
    const uint8_t* selected;
    float* grad;
    float advantage;
    float weight;                      // of the row in the loss; scales the gradient
    float token_cap;                   // cap of a token's importance weight; 0: none
    float reject_below, reject_above;  // a token's importance weight outside these counts as 0
    float row_weight;                  // importance weight of the whole row (1: none)
    RowTerms row;
    Variant variant;
    KlKind kl;
    float kl_coef;
    bool kl_weighted;  // by the importance ratio
    bool stream;       // write the gradient past the caches
};

// Sums over tokens; the loss without the row's weight.
struct TileSums {
    double loss = 0, log_ratio = 0, k3 = 0, kl = 0, mismatch = 0, weight = 0, weight_square = 0, entropy = 0;
    double tokens = 0, clipped_low = 0, clipped_high = 0, third = 0, rejected = 0;
    float ratio_max = 0;

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
        third += other.third;
        entropy += other.entropy;
        rejected += other.rejected;
        // NaN must show: it is larger than nothing, so ask for the opposite.
        if (!(other.ratio_max <= ratio_max)) ratio_max = other.ratio_max;
    }
};

// Sums over a row's trained tokens that must be known before its first gradient.
struct RowSums {
    double tokens = 0, log_ratio = 0, advantage = 0, mismatch = 0, kl = 0;

    void add(const RowSums& other) {
        tokens += other.tokens;
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

const PolicyLossKernels& kernels();

}  // namespace turnwise
