// Where the rows of a token stream lie: padded [B, T], or packed [N] with cu_seqlens [B + 1].
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/view.h"

namespace turnwise {

// Outputs of this size or more go past the caches: they would push out what is there, and a store to a cache reads its
// line first.
constexpr int64_t kStreamBytes = int64_t(2) << 20;

class TokenLayout {
  public:
    // `name` is what the caller calls the tokens.
    TokenLayout(const View& tokens, const View& cu_seqlens, const std::string& name = "logprobs")
        : packed_(bool(cu_seqlens)) {
        if (!packed_) {
            require(tokens.dims == 2, (name + ": expected [B, T], or [N] with cu_seqlens").c_str());
            rows_ = tokens.shape[0];
            width_ = tokens.shape[1];
            return;
        }
        require(tokens.dims == 1, (name + ": expected [N], as cu_seqlens is given").c_str());
        require(is_contiguous_1d(cu_seqlens) && cu_seqlens.shape[0] >= 1, "cu_seqlens: expected [B + 1], contiguous");
        require(cu_seqlens.dtype == DType::i64 || cu_seqlens.dtype == DType::i32,
                "cu_seqlens: expected int32 or int64");
        rows_ = cu_seqlens.shape[0] - 1;
        if (cu_seqlens.dtype == DType::i64) {
            starts_ = cu_seqlens.as<int64_t>();
        } else {
            const int32_t* narrow = cu_seqlens.as<int32_t>();
            widened_.assign(narrow, narrow + rows_ + 1);
            starts_ = widened_.data();
        }
        require(starts_[0] == 0, "cu_seqlens: expected 0 first");
        require(std::is_sorted(starts_, starts_ + rows_ + 1), "cu_seqlens: expected values that never fall");
        require(starts_[rows_] == tokens.shape[0], "cu_seqlens: expected the number of tokens last");
    }
    TokenLayout(const TokenLayout&) = delete;

    int64_t rows() const { return rows_; }
    int64_t tokens() const { return start(rows_); }
    int64_t start(int64_t row) const { return packed_ ? starts_[row] : row * width_; }
    int64_t length(int64_t row) const { return packed_ ? starts_[row + 1] - starts_[row] : width_; }

    bool fits(const View& stream) const {
        return packed_ ? stream.dims == 1 && stream.shape[0] == tokens()
                       : stream.dims == 2 && stream.shape[0] == rows_ && stream.shape[1] == width_;
    }
    // The place of a row's token in a stream, and the step from one token to the next, in elements.
    int64_t offset(const View& stream, int64_t row, int64_t token) const {
        return packed_ ? (starts_[row] + token) * stream.stride[0] : row * stream.stride[0] + token * stream.stride[1];
    }
    int64_t step(const View& stream) const { return stream.stride[packed_ ? 0 : 1]; }

  private:
    bool packed_;
    int64_t rows_ = 0, width_ = 0;
    const int64_t* starts_ = nullptr;
    std::vector<int64_t> widened_;
};

// A run of tokens of one row. Rows are cut at fixed places, so that sums never depend on who adds them up.
struct Piece {
    int64_t row, begin, end;
};

inline std::vector<Piece> cut_into_pieces(const TokenLayout& layout, int64_t longest) {
    std::vector<Piece> pieces;
    pieces.reserve(size_t(layout.rows() + layout.tokens() / longest));
    for (int64_t row = 0; row < layout.rows(); ++row) {
        for (int64_t begin = 0; begin < layout.length(row); begin += longest) {
            pieces.push_back({row, begin, std::min(begin + longest, layout.length(row))});
        }
    }
    return pieces;
}

}  // namespace turnwise
