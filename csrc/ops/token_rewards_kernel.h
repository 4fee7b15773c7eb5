// The kernel of token_rewards.h and gae.h, which takes one segment of a row at a time. Compiled once per instruction
// set; token_rewards_kernels() gives the best for this machine.
#pragma once

#include <cstdint>

namespace turnwise {

constexpr int kScanTile = 256;  // tokens that a scan takes at once: most tiles are then wholly trained or wholly masked

// Powers of a scan's factor; made by TokenRewardsKernels::powers.
struct ScanPowers {
    float step[4];      // factor^1, ^2, ^4, ^8
    float falling[32];  // lane i of a vector of c tokens starts at falling[lanes - c]: factor^(c - i)
    double whole[17];   // factor^c
    float value;        // gamma * (1 - lambda), for gae
};

// n <= kScanTile tokens of one row, contiguous. Streams are null where not given.
struct ScanTile {
    int n;
    const float* rewards;
    const float* values;  // for gae
    const uint8_t* mask;  // 0 or not 0; null: every token trains
    float* advantages;    // output of gae
    float* returns;       // output
    bool stream;          // write past the caches; the addresses are multiples of 64
};

// The state behind a tile.
struct ScanCarry {
    double returns = 0;  // R of the next trained token
    float value = 0;     // V of the next trained token
};

// Addresses of the tokens that are summed next, to be prefetched; null: none.
struct NextTokens {
    const void* rewards = nullptr;
    const void* mask = nullptr;
};

struct TokenRewardsKernels {
    // The sum of n rewards by reward type (f32, bf16, f16) and mask type (none, bytes, f32). Sets `bad` where a float
    // mask holds anything but 0 and 1. A token's lane depends on its place alone, so zeros behind change nothing.
    // `next`: the rewards and masks that are summed afterwards, to be prefetched.
    double (*sum[3][3])(const void* rewards, const void* mask, int64_t n, const NextTokens& next, bool& bad);
    void (*powers)(double factor, ScanPowers& powers);
    void (*returns)(const ScanTile& tile, const ScanPowers& powers, ScanCarry& carry);
    void (*gae)(const ScanTile& tile, const ScanPowers& powers, ScanCarry& carry);
};

const TokenRewardsKernels& token_rewards_kernels();

}  // namespace turnwise
