// Scans over the tokens of each row from the last to the first, for returns and gae.
#pragma once

#include <cmath>

#include "ops/token_rewards_kernel.h"
#include "ops/token_rows.h"

namespace turnwise {

struct TokenScan {
    const TokenLayout& layout;                                       // of all streams
    const View& rewards;                                             // one value per token, like all streams
    const View& values;                                              // none for returns
    const View& mask;                                                // none: every token trains
    const View& advantages;                                          // f32, contiguous; none for returns
    const View& returns;                                             // f32, contiguous
    const ScanPowers& powers;                                        // of gamma, or gamma * lambda
    void (*kernel)(const ScanTile&, const ScanPowers&, ScanCarry&);  // TokenRewardsKernels::returns or ::gae
};

// Prefetches the tile that comes kScanAhead tiles later, possibly at the end of the next row. The processor does not
// prefetch several streams backwards.
constexpr int kScanAhead = 4;

inline void fetch_tile(const TokenScan& s, int64_t row, int64_t token) {
    token -= kScanAhead * kScanTile;
    if (token < 0) {
        if (++row >= s.layout.rows()) return;
        token += (s.layout.length(row) + kScanTile - 1) / kScanTile * kScanTile;
        if (token < 0) return;
    }
    for (const View* stream : {&s.rewards, &s.values, &s.mask}) {
        if (!*stream || s.layout.step(*stream) != 1) continue;
        const int bytes = bytes_of(stream->dtype);
        const char* from = stream->as<char>() + s.layout.offset(*stream, row, token) * bytes;
        for (int line = 0; line < kScanTile * bytes; line += 64) __builtin_prefetch(from + line);
    }
}

// Scans one row. Returns false if its first return is not finite: a reward or value that is not finite reaches all
// returns before it. Only the value of the first trained token reaches none.
inline bool scan_row(const TokenScan& s, int64_t row, bool stream, bool& bad) {
    float rewards[kScanTile], values[kScanTile];
    uint8_t mask[kScanTile];
    const int64_t length = s.layout.length(row), start = s.layout.start(row);
    ScanCarry carry;
    for (int64_t t = (length - 1) / kScanTile * kScanTile; t >= 0 && length > 0; t -= kScanTile) {
        const int n = int(std::min<int64_t>(kScanTile, length - t));
        fetch_tile(s, row, t);
        ScanTile tile{};
        tile.n = n;
        tile.rewards = row_floats(s.layout, s.rewards, row, t, n, rewards);
        if (s.values) tile.values = row_floats(s.layout, s.values, row, t, n, values);
        if (s.mask) tile.mask = row_mask(s.layout, s.mask, row, t, n, mask, bad);
        tile.returns = s.returns.as<float>() + start + t;
        if (s.advantages) tile.advantages = s.advantages.as<float>() + start + t;
        const uintptr_t places =
            reinterpret_cast<uintptr_t>(tile.returns) | reinterpret_cast<uintptr_t>(tile.advantages);
        tile.stream = stream && places % 64 == 0;
        s.kernel(tile, s.powers, carry);
    }
    return std::isfinite(carry.returns);
}

// True if scan_short_row can read all streams in place.
inline bool is_plain(const TokenScan& s) {
    for (const View* stream : {&s.rewards, &s.values}) {
        if (*stream && (stream->dtype != DType::f32 || s.layout.step(*stream) != 1)) return false;
    }
    return !s.mask || is_byte_mask(s.layout, s.mask);
}

// The same as scan_row for a row of one tile of plain streams. Short rows come in great numbers, so it does no more
// than it must.
inline bool scan_short_row(const TokenScan& s, int64_t row) {
    const int64_t start = s.layout.start(row);
    ScanTile tile{};
    tile.n = int(s.layout.length(row));
    tile.rewards = s.rewards.as<float>() + s.layout.offset(s.rewards, row, 0);
    if (s.values) tile.values = s.values.as<float>() + s.layout.offset(s.values, row, 0);
    if (s.mask) tile.mask = s.mask.as<uint8_t>() + s.layout.offset(s.mask, row, 0);
    if (s.advantages) tile.advantages = s.advantages.as<float>() + start;
    tile.returns = s.returns.as<float>() + start;
    ScanCarry carry;
    s.kernel(tile, s.powers, carry);
    return std::isfinite(carry.returns);
}

// Scans all rows. Returns false if scan_row does for any of them.
inline bool scan_rows(const TokenScan& s, int threads) {
    check_mask(s.layout, s.mask);
    const bool stream = s.layout.tokens() * int64_t(sizeof(float)) >= kStreamBytes;
    std::vector<Segment> rows;
    rows.reserve(size_t(s.layout.rows()));
    for (int64_t row = 0; row < s.layout.rows(); ++row) rows.push_back({row, 0, s.layout.length(row)});
    const bool plain = is_plain(s);
    std::atomic<bool> wrong{false}, finite{true};
    share_segments(rows, threads, [&](size_t first, size_t last) {
        bool bad = false, all_finite = true;
        for (size_t i = first; i < last; ++i) {
            const bool few = plain && rows[i].end <= kShortScan;
            all_finite &= few ? scan_short_row(s, rows[i].row) : scan_row(s, rows[i].row, stream, bad);
        }
        if (bad) wrong = true;
        if (!all_finite) finite = false;
    });
    require(!wrong, "mask: expected 0 or 1");
    return finite;
}

}  // namespace turnwise
