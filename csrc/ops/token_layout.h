// The layout of a token stream in rows: padded [B, T], or packed [N] with cu_seqlens [B + 1].
#pragma once

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "core/view.h"

namespace turnwise {

// Outputs of this many bytes or more bypass the caches. Otherwise they would evict the inputs, and each store would
// read its cache line first.
constexpr int64_t kStreamBytes = int64_t(2) << 20;

inline void check_cu_seqlens(const View& cu_seqlens) {
    if (cu_seqlens.dims != 1 || cu_seqlens.shape[0] < 1) reject_shape("cu_seqlens", cu_seqlens, "[B + 1]");
    require(is_contiguous_1d(cu_seqlens), "cu_seqlens: expected a contiguous tensor");
    require_dtype("cu_seqlens", cu_seqlens, {DType::i64, DType::i32});
}

// Maps rows to the tokens of a stream.
class TokenLayout {
  public:
    // `name`: the argument of `tokens`, for messages.
    TokenLayout(const View& tokens, const View& cu_seqlens, const char* name = "logprobs") : packed_(bool(cu_seqlens)) {
        if (!packed_) {
            if (tokens.dims != 2) reject_shape(name, tokens, "[B, T], or [N] with cu_seqlens");
            rows_ = tokens.shape[0];
            width_ = tokens.shape[1];
            return;
        }
        if (tokens.dims != 1) reject_shape(name, tokens, "[N], as cu_seqlens is given");
        check_cu_seqlens(cu_seqlens);
        rows_ = cu_seqlens.shape[0] - 1;
        if (cu_seqlens.dtype == DType::i64) {
            starts_ = cu_seqlens.as<int64_t>();
        } else {
            const int32_t* narrow = cu_seqlens.as<int32_t>();
            widened_.assign(narrow, narrow + rows_ + 1);
            starts_ = widened_.data();
        }
        require(starts_[0] == 0, "cu_seqlens: expected 0 first");
        require(std::is_sorted(starts_, starts_ + rows_ + 1), "cu_seqlens: expected values that never decrease");
        if (starts_[rows_] != tokens.shape[0]) {
            throw InvalidInput("cu_seqlens[-1]=" + std::to_string(starts_[rows_]) + ": expected " +
                               std::to_string(tokens.shape[0]) + ", the number of tokens");
        }
    }
    TokenLayout(const TokenLayout&) = delete;

    int64_t rows() const { return rows_; }
    int64_t tokens() const { return start(rows_); }
    // The first token of a row, numbered over all rows.
    int64_t start(int64_t row) const { return packed_ ? starts_[row] : row * width_; }
    int64_t length(int64_t row) const { return packed_ ? starts_[row + 1] - starts_[row] : width_; }

    // The row that holds a token, numbered over all rows.
    int64_t row_of(int64_t token) const {
        return packed_ ? std::upper_bound(starts_, starts_ + rows_ + 1, token) - starts_ - 1 : token / width_;
    }
    // True if the stream's rows follow one another at the step of their tokens.
    bool is_flat(const View& stream) const {
        return packed_ || rows_ <= 1 || stream.stride[0] == width_ * stream.stride[1];
    }

    // Throws unless a stream has one value per token.
    void check_shape(const char* name, const View& stream) const {
        if (packed_) return require_shape(name, stream, {tokens()});
        require_shape(name, stream, {rows_, width_});
    }
    const int64_t* starts() const { return packed_ ? starts_ : nullptr; }  // [B + 1]
    // The number of tokens of the longest row.
    int64_t longest() const {
        int64_t most = packed_ ? 0 : width_;
        for (int64_t row = 0; packed_ && row < rows_; ++row) most = std::max(most, length(row));
        return most;
    }
    // The offset of a row's token in a stream, and below the step from one token to the next; both in elements.
    int64_t offset(const View& stream, int64_t row, int64_t token) const {
        return packed_ ? (starts_[row] + token) * stream.stride[0] : row * stream.stride[0] + token * stream.stride[1];
    }
    int64_t step(const View& stream) const { return stream.stride[packed_ ? 0 : 1]; }

  private:
    bool packed_;                      // true with cu_seqlens
    int64_t rows_ = 0, width_ = 0;     // B; T if padded
    const int64_t* starts_ = nullptr;  // packed: [B + 1], the first token of each row, then N
    std::vector<int64_t> widened_;     // i32 cu_seqlens as int64
};

// Tokens [begin, end) of one row. Rows are cut at fixed offsets, so sums do not depend on the number of threads.
struct Segment {
    int64_t row;         // index of the row
    int64_t begin, end;  // counted from the row's start
};

// All rows in segments of at most `longest` tokens.
inline std::vector<Segment> cut_into_segments(const TokenLayout& layout, int64_t longest) {
    std::vector<Segment> segments;
    segments.reserve(size_t(layout.rows() + layout.tokens() / longest));
    for (int64_t row = 0; row < layout.rows(); ++row) {
        for (int64_t begin = 0; begin < layout.length(row); begin += longest) {
            segments.push_back({row, begin, std::min(begin + longest, layout.length(row))});
        }
    }
    return segments;
}

}  // namespace turnwise
