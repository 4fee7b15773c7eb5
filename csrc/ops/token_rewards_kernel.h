// The kernel of token_rewards.h and gae.h. It takes one segment of a row at a time and is compiled once per instruction
// set; token_rewards_kernels() returns the best one for this machine.
#pragma once

#include <cstdint>

namespace turnwise {

constexpr int kScanTile = 256;  // tokens per step of a scan: so few that most tiles are all trained or all masked

constexpr int kShortScan = 8;  // trained tokens of a tile that are scanned one by one

// Powers of a scan's factor: gamma, or gamma * lambda for gae. TokenRewardsKernels::powers fills them.
struct ScanPowers {
    float step[4];      // factor^1, ^2, ^4, ^8
    float falling[32];  // lane i of a vector of c tokens starts at falling[lanes - c]: factor^(c - i)
    double whole[17];   // factor^c
    float value;        // gamma * (1 - lambda), for gae; set by the caller
};

// n <= kScanTile tokens of one row. Streams are [n] and contiguous, or null if not given.
struct ScanTile {
    int n;                 // tokens
    const float* rewards;  // r
    const float* values;   // V, for gae
    const uint8_t* mask;   // 0 or not 0; null: every token trains
    float* advantages;     // output of gae
    float* returns;        // output
    bool stream;           // write past the caches; the addresses are multiples of 64
};

// The state of a row after a tile, which the scan of the tile starts from.
struct ScanCarry {
    double returns = 0;  // R of the next trained token
    float value = 0;     // V of the next trained token
};

// Addresses of the tokens that are summed next, for prefetching; null: none.
struct NextTokens {
    const void* rewards = nullptr;  // type of the current rewards
    const void* mask = nullptr;     // type of the current mask
};

// Whole rows [first, last) of a stream, each token beside the one before.
struct RewardRows {
    const void* rewards;                 // of row 0
    const void* mask;                    // the same, in its own type
    const int64_t* starts;               // packed: the first token of each row, then N; null: padded
    const int64_t* lengths;              // padded: tokens of each row that count; null: all
    int64_t width;                       // padded: tokens
    int64_t reward_stride, mask_stride;  // padded: from row to row, in elements
    int64_t first, last;                 // rows
};

struct TokenRewardsKernels {
    // The sum of n rewards, by reward type (f32, bf16, f16) and mask type (none, bytes, f32). Sets `bad` if a float
    // mask holds anything but 0 and 1. A token's lane depends only on its position, so zeros after it change nothing.
    double (*sum[3][3])(const void* rewards, const void* mask, int64_t n, const NextTokens& next, bool& bad);
    // The sums of whole rows, at totals[row].
    void (*sum_rows[3][3])(const RewardRows& rows, double* totals, bool& bad);
    // Fills all of `powers` except `value`.
    void (*powers)(double factor, ScanPowers& powers);
    // Scan a tile from its last token to its first, and update `carry` to the state before the tile.
    void (*returns)(const ScanTile& tile, const ScanPowers& powers, ScanCarry& carry);
    void (*gae)(const ScanTile& tile, const ScanPowers& powers, ScanCarry& carry);
};

const TokenRewardsKernels& token_rewards_kernels();

}  // namespace turnwise
