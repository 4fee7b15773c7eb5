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

constexpr int64_t kSumPiece = 16384;  // a longer row is shared by threads

int64_t length_of(const View& lengths, int64_t row) {
    const int64_t place = row * lengths.stride[0];
    return lengths.dtype == DType::i64 ? lengths.as<int64_t>()[place] : lengths.as<int32_t>()[place];
}

std::vector<Piece> cut(const TokenLayout& layout, const View& lengths) {
    std::vector<Piece> pieces = cut_into_pieces(layout, kSumPiece);
    if (!lengths) return pieces;
    require(lengths.dims == 1 && lengths.shape[0] == layout.rows(), "lengths: wrong shape");
    require(lengths.dtype == DType::i64 || lengths.dtype == DType::i32, "lengths: expected int32 or int64");
    for (int64_t row = 0; row < layout.rows(); ++row) {
        const int64_t length = length_of(lengths, row);
        require(length >= 0 && length <= layout.length(row), "lengths: a value is out of range");
    }
    size_t kept = 0;
    for (Piece piece : pieces) {
        piece.end = std::min(piece.end, length_of(lengths, piece.row));
        if (piece.begin < piece.end) pieces[kept++] = piece;
    }
    pieces.resize(kept);
    return pieces;
}

class RewardSum {
  public:
    RewardSum(const TokenRewardsInput& input, const TokenLayout& layout) : in_(input), layout_(layout) {
        const DType mask = in_.mask.dtype;
        const bool plain_mask =
            !in_.mask || is_byte_mask(layout, in_.mask) || (mask == DType::f32 && layout.step(in_.mask) == 1);
        direct_ = layout.step(in_.rewards) == 1 && plain_mask;
        mask_kind_ = !in_.mask ? 0 : mask == DType::f32 && direct_ ? 2 : 1;
    }

    // `next`: the piece that this thread takes afterwards, or null.
    double piece(const Piece& piece, const Piece* next, bool& bad) const {
        if (direct_) return whole(piece, next, bad);
        double total = 0;
        const auto sum = token_rewards_kernels().sum[0][in_.mask ? 1 : 0];
        for (int64_t t = piece.begin; t < piece.end; t += kTile) {
            const int n = int(std::min<int64_t>(kTile, piece.end - t));
            float scratch[kTile];
            uint8_t bytes[kTile];
            const float* rewards = row_floats(layout_, in_.rewards, piece.row, t, n, scratch);
            const uint8_t* mask = in_.mask ? row_mask(layout_, in_.mask, piece.row, t, n, bytes, bad) : nullptr;
            total += sum(rewards, mask, n, {}, bad);
        }
        return total;
    }

  private:
    double whole(const Piece& piece, const Piece* next, bool& bad) const {
        const DType dtype = in_.rewards.dtype;
        const int kind = dtype == DType::f32 ? 0 : dtype == DType::bf16 ? 1 : 2;
        const int reward_bytes = kind == 0 ? 4 : 2, mask_bytes = mask_kind_ == 2 ? 4 : 1;
        const auto place = [&](const View& stream, const Piece* of, int bytes) -> const char* {
            return stream && of ? stream.as<char>() + layout_.offset(stream, of->row, of->begin) * bytes : nullptr;
        };
        const NextTokens behind{place(in_.rewards, next, reward_bytes), place(in_.mask, next, mask_bytes)};
        return token_rewards_kernels().sum[kind][mask_kind_](place(in_.rewards, &piece, reward_bytes),
                                                             place(in_.mask, &piece, mask_bytes),
                                                             piece.end - piece.begin, behind, bad);
    }

    const TokenRewardsInput& in_;
    const TokenLayout& layout_;
    bool direct_;
    int mask_kind_;
};

}  // namespace

bool token_reward_sum(const TokenRewardsInput& input, const View& sums, int threads) {
    const TokenLayout layout(input.rewards, input.cu_seqlens, "token_rewards");
    check_token_stream(layout, input.rewards, "token_rewards");
    check_mask(layout, input.mask);
    require(!input.lengths || !(input.mask || input.cu_seqlens), "lengths: expected neither a mask nor cu_seqlens");
    require(is_contiguous_1d(sums) && sums.shape[0] == layout.rows(), "sums: expected [B], contiguous");
    const std::vector<Piece> pieces = cut(layout, input.lengths);
    const RewardSum reward_sum(input, layout);
    std::vector<double> totals(pieces.size());
    std::atomic<bool> wrong{false};
    share_pieces(pieces, threads, [&](size_t first, size_t last) {
        bool bad = false;
        for (size_t i = first; i < last; ++i) {
            totals[i] = reward_sum.piece(pieces[i], i + 1 < last ? &pieces[i + 1] : nullptr, bad);
        }
        if (bad) wrong = true;
    });
    require(!wrong, "mask: expected 0 or 1");
    std::vector<double> by_row(size_t(layout.rows()), 0);
    for (size_t i = 0; i < pieces.size(); ++i) by_row[size_t(pieces[i].row)] += totals[i];
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
    check_token_stream(layout, input.rewards, "token_rewards");
    require(layout.fits(returns) && returns.dtype == DType::f32, "returns: expected float32, shape of token_rewards");
    ScanPowers powers{};
    token_rewards_kernels().powers(gamma, powers);
    const View none;
    return scan_rows({layout, input.rewards, none, input.mask, none, returns, powers, token_rewards_kernels().returns},
                     threads);
}

}  // namespace turnwise
