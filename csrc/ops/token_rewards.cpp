#include "ops/token_rewards.h"

#include <cmath>
#include <cstring>

#include "core/isa.h"
#include "ops/token_rewards_kernel.h"
#include "ops/token_rows.h"
#include "ops/token_scan.h"

namespace turnwise {

const TokenRewardsKernels& token_rewards_kernels_baseline();
#if defined(TURNWISE_X86)
const TokenRewardsKernels& token_rewards_kernels_avx2();
const TokenRewardsKernels& token_rewards_kernels_avx512();
#endif

const TokenRewardsKernels& token_rewards_kernels() {
#if defined(TURNWISE_X86)
    if (isa() == Isa::avx512) return token_rewards_kernels_avx512();
    if (isa() == Isa::avx2) return token_rewards_kernels_avx2();
#endif
    return token_rewards_kernels_baseline();
}

namespace {

constexpr int64_t kSumSegment = 16384;  // tokens; threads share a longer row

int64_t length_of(const View& lengths, int64_t row) {
    const int64_t place = row * lengths.stride[0];
    return lengths.dtype == DType::i64 ? lengths.as<int64_t>()[place] : lengths.as<int32_t>()[place];
}

void check_lengths(const TokenLayout& layout, const View& lengths) {
    if (!lengths) return;
    require_shape("lengths", lengths, {layout.rows()});
    require_dtype("lengths", lengths, {DType::i64, DType::i32});
    for (int64_t row = 0; row < layout.rows(); ++row) {
        const int64_t length = length_of(lengths, row);
        require(length >= 0 && length <= layout.length(row), "lengths: a value is out of range");
    }
}

// The segments of all rows, cut at `lengths` if given.
std::vector<Segment> cut(const TokenLayout& layout, const View& lengths) {
    std::vector<Segment> segments = cut_into_segments(layout, kSumSegment);
    if (!lengths) return segments;
    size_t kept = 0;
    for (Segment segment : segments) {
        segment.end = std::min(segment.end, length_of(lengths, segment.row));
        if (segment.begin < segment.end) segments[kept++] = segment;
    }
    segments.resize(kept);
    return segments;
}

// The sum of a segment's rewards.
class RewardSum {
  public:
    RewardSum(const TokenRewardsInput& input, const TokenLayout& layout) : in_(input), layout_(layout) {
        const DType mask = in_.mask.dtype;
        const bool plain_mask =
            !in_.mask || is_byte_mask(layout, in_.mask) || (mask == DType::f32 && layout.step(in_.mask) == 1);
        direct_ = layout.step(in_.rewards) == 1 && plain_mask;
        mask_kind_ = !in_.mask ? 0 : mask == DType::f32 && direct_ ? 2 : 1;
    }

    // `next`: the segment that this thread sums afterwards, or null. Sets `bad` if a float mask holds anything but 0
    // and 1.
    double segment(const Segment& segment, const Segment* next, bool& bad) const {
        if (direct_) return whole(segment, next, bad);
        // Otherwise tile by tile, converted to float32 and bytes.
        double total = 0;
        const auto sum = token_rewards_kernels().sum[0][in_.mask ? 1 : 0];
        for (int64_t t = segment.begin; t < segment.end; t += kTile) {
            const int n = int(std::min<int64_t>(kTile, segment.end - t));
            float scratch[kTile];
            uint8_t bytes[kTile];
            const float* rewards = row_floats(layout_, in_.rewards, segment.row, t, n, scratch);
            const uint8_t* mask = in_.mask ? row_mask(layout_, in_.mask, segment.row, t, n, bytes, bad) : nullptr;
            total += sum(rewards, mask, n, {}, bad);
        }
        return total;
    }

    // Sums whole rows into totals, without a list of segments: for many short rows that takes longer than their sums.
    // False, and no effect, if a row is longer than kSumSegment or needs to be converted first.
    bool rows(int threads, double* totals, bool& bad) const {
        const bool plain_lengths = !in_.lengths || (in_.lengths.dtype == DType::i64 && is_contiguous_1d(in_.lengths));
        if (!direct_ || !plain_lengths || layout_.longest() > kSumSegment) return false;
        RewardRows all{};
        all.rewards = in_.rewards.data;
        all.mask = in_.mask.data;
        all.starts = layout_.starts();
        all.lengths = in_.lengths.as<const int64_t>();
        if (!all.starts) {
            all.width = in_.rewards.shape[1];
            all.reward_stride = in_.rewards.stride[0];
            all.mask_stride = in_.mask ? in_.mask.stride[0] : 0;
        }
        const int64_t tokens = layout_.tokens();
        const int parts = int(std::max<int64_t>(1, std::min<int64_t>(threads, tokens / kRowTokensPerThread)));
        std::atomic<bool> wrong{false};
        run_parts(parts, [&](int part) {
            RewardRows mine = all;
            mine.first = part == 0 ? 0 : layout_.row_of(tokens * part / parts);
            mine.last = part + 1 == parts ? layout_.rows() : layout_.row_of(tokens * (part + 1) / parts);
            bool found = false;
            token_rewards_kernels().sum_rows[reward_kind()][mask_kind_](mine, totals, found);
            if (found) wrong = true;
        });
        bad = wrong;
        return true;
    }

  private:
    int reward_kind() const { return in_.rewards.dtype == DType::f32 ? 0 : in_.rewards.dtype == DType::bf16 ? 1 : 2; }

    // A whole segment in place, in its own types.
    double whole(const Segment& segment, const Segment* next, bool& bad) const {
        const int kind = reward_kind();
        const int reward_bytes = kind == 0 ? 4 : 2, mask_bytes = mask_kind_ == 2 ? 4 : 1;
        const auto place = [&](const View& stream, const Segment* of, int bytes) -> const char* {
            return stream && of ? stream.as<char>() + layout_.offset(stream, of->row, of->begin) * bytes : nullptr;
        };
        const NextTokens behind{place(in_.rewards, next, reward_bytes), place(in_.mask, next, mask_bytes)};
        return token_rewards_kernels().sum[kind][mask_kind_](place(in_.rewards, &segment, reward_bytes),
                                                             place(in_.mask, &segment, mask_bytes),
                                                             segment.end - segment.begin, behind, bad);
    }

    const TokenRewardsInput& in_;
    const TokenLayout& layout_;
    bool direct_;    // the kernel reads rewards and mask in place
    int mask_kind_;  // 0: no mask, 1: bytes, 2: float32
};

}  // namespace

bool token_reward_sum(const TokenRewardsInput& input, const View& sums, int threads) {
    const TokenLayout layout(input.rewards, input.cu_seqlens, "token_rewards");
    check_token_stream(layout, "token_rewards", input.rewards);
    check_mask(layout, input.mask);
    require(!input.lengths || !(input.mask || input.cu_seqlens), "lengths: expected neither a mask nor cu_seqlens");
    require_shape("sums", sums, {layout.rows()});
    require(is_contiguous_1d(sums), "sums: expected a contiguous tensor");
    check_lengths(layout, input.lengths);
    const RewardSum reward_sum(input, layout);
    std::vector<double> by_row(size_t(layout.rows()), 0);
    bool bad_mask = false;
    if (layout.tokens() > 0 && !reward_sum.rows(threads, by_row.data(), bad_mask)) {
        // Sum the segments on several threads, then each row in the order of its segments.
        const std::vector<Segment> segments = cut(layout, input.lengths);
        std::vector<double> totals(segments.size());
        std::atomic<bool> wrong{false};
        share_segments(segments, threads, [&](size_t first, size_t last) {
            bool bad = false;
            for (size_t i = first; i < last; ++i) {
                totals[i] = reward_sum.segment(segments[i], i + 1 < last ? &segments[i + 1] : nullptr, bad);
            }
            if (bad) wrong = true;
        });
        for (size_t i = 0; i < segments.size(); ++i) by_row[size_t(segments[i].row)] += totals[i];
        bad_mask = wrong;
    }
    require(!bad_mask, "mask: expected 0 or 1");
    // Write the sums, and find out whether they are finite.
    bool finite = true;
    for (int64_t row = 0; row < layout.rows(); ++row) {
        finite &= std::isfinite(by_row[size_t(row)]);
        if (sums.dtype == DType::f64) {
            sums.as<double>()[row] = by_row[size_t(row)];
        } else {
            sums.as<float>()[row] = float(by_row[size_t(row)]);
        }
    }
    return finite;
}

bool token_returns(const TokenRewardsInput& input, double gamma, const View& returns, int threads) {
    const TokenLayout layout(input.rewards, input.cu_seqlens, "token_rewards");
    check_token_stream(layout, "token_rewards", input.rewards);
    layout.check_shape("returns", returns);
    require_dtype("returns", returns, {DType::f32});
    ScanPowers powers{};
    token_rewards_kernels().powers(gamma, powers);
    const View none;
    return scan_rows({layout, input.rewards, none, input.mask, none, returns, powers, token_rewards_kernels().returns},
                     threads);
}

}  // namespace turnwise
