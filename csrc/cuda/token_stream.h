// Reads token streams in kernels: adjacent tokens of a contiguous stream, and the row of a token.
#pragma once

#include "cuda/block.h"
#include "ops/token_layout.h"

namespace turnwise::cuda {

// The rows of a stream. Tokens are numbered row by row.
struct TokenRows {
    int64_t rows, tokens;           // B, and N or B * T
    int64_t width;                  // padded: T, the length of every row
    const void* starts;             // packed: [rows + 1] i32 or i64; null: padded
    bool wide;                      // starts are i64
    const void* lengths = nullptr;  // padded: [rows] i32 or i64, number of tokens of each row that count; null: all
    bool wide_lengths = false;      // lengths are i64
};

// The first token of a row, as given.
__device__ __forceinline__ int64_t given_start(const TokenRows& r, int64_t row) {
    if (r.starts == nullptr) return row * r.width;
    return r.wide ? static_cast<const int64_t*>(r.starts)[row] : int64_t(static_cast<const int32_t*>(r.starts)[row]);
}

// The first token of a row and that of the next row, as given.
struct RowRange {
    int64_t begin, end;
};
__device__ __forceinline__ RowRange given_range(const TokenRows& r, int64_t row) {
    if (r.starts == nullptr) return {row * r.width, row * r.width + r.width};
    if (r.wide) return {static_cast<const int64_t*>(r.starts)[row], static_cast<const int64_t*>(r.starts)[row + 1]};
    const int32_t* starts = static_cast<const int32_t*>(r.starts) + row;
    return {starts[0], starts[1]};
}

// The same, clamped, so wrong boundaries give wrong sums but no illegal access.
__device__ __forceinline__ int64_t row_start(const TokenRows& r, int64_t row) {
    const int64_t start = given_start(r, row);
    if (r.starts == nullptr) return start;
    return start < 0 ? 0 : start > r.tokens ? r.tokens : start;
}

// A row's first token and that of the next row, clamped like row_start.
__device__ __forceinline__ RowRange row_range(const TokenRows& r, int64_t row) {
    RowRange range = given_range(r, row);
    if (r.starts != nullptr) {
        range.begin = range.begin < 0 ? 0 : range.begin > r.tokens ? r.tokens : range.begin;
        range.end = range.end < 0 ? 0 : range.end > r.tokens ? r.tokens : range.end;
    }
    return range;
}

// The number of a row's tokens that count.
__device__ __forceinline__ int64_t row_length(const TokenRows& r, int64_t row, int64_t tokens) {
    if (r.lengths == nullptr) return tokens;
    const int64_t length = r.wide_lengths ? static_cast<const int64_t*>(r.lengths)[row]
                                          : int64_t(static_cast<const int32_t*>(r.lengths)[row]);
    return length < 0 ? 0 : length > tokens ? tokens : length;
}

// Lanes that share a row where several rows fit a warp: each adds up about 16 tokens. 0: rows are long, and the whole
// warp adds up one row after the other.
inline int lanes_per_row(const TokenRows& r) {
    const int64_t mean = r.tokens / r.rows;
    if (mean >= 128) return 0;
    int lanes = 1;
    while (mean > 16 * lanes) lanes *= 2;
    return lanes;
}

// The last row that starts at or before a token, so the row that holds it. Called by a whole warp; every lane gets it.
__device__ __forceinline__ int64_t warp_find_row(const TokenRows& r, int64_t token) {
    if (r.starts == nullptr) return token / r.width;
    const int lane = int(threadIdx.x) % kWarp;
    // Search with 32 probes at a time: the row is in [low, high).
    int64_t low = 0, high = r.rows;
    while (high - low > 1) {
        const int64_t step = (high - low + kWarp - 1) / kWarp;
        const int64_t probe = low + (lane + 1) * step;
        const bool below = probe < high && row_start(r, probe) <= token;
        low += __popc(__ballot_sync(kFullWarp, below)) * step;
        high = min(high, low + step);
    }
    return low;
}

// Tokens [first, first + count) of a stream as loaded. Tokens from `end` on are 0, and so are all tokens of a null
// stream. `aligned`: the address of the first token is a multiple of the load's size.
template <class T, int count>
class TokenRun {
  public:
    __device__ __forceinline__ TokenRun(const T* stream, int64_t first, int64_t end, bool aligned) {
        if (stream != nullptr && aligned && first + count <= end) {
#pragma unroll
            for (int p = 0; p < kPacks; ++p) packs_[p] = load_streaming<T, kPack>(stream + first + p * kPack);
            return;
        }
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            Pack<T, kPack> pack{};
#pragma unroll
            for (int k = 0; k < kPack; ++k) {
                const int64_t token = first + p * kPack + k;
                if (stream != nullptr && token < end) pack.value[k] = stream[token];
            }
            memcpy(packs_[p].word, &pack, sizeof pack);
        }
    }

    __device__ __forceinline__ T operator[](int i) const { return packs_[i / kPack][i % kPack]; }

  private:
    // Values per load, and number of loads.
    static constexpr int kPack = count * int(sizeof(T)) < 16 ? count : 16 / int(sizeof(T)), kPacks = count / kPack;
    Loaded<T, kPack> packs_[kPacks];
};

inline TokenRows token_rows(const View& tokens, const View& cu_seqlens, const char* name) {
    if (!cu_seqlens) {
        if (tokens.dims != 2) reject_shape(name, tokens, "[B, T], or [N] with cu_seqlens");
        return {tokens.shape[0], tokens.size(), tokens.shape[1], nullptr, false};
    }
    if (tokens.dims != 1) reject_shape(name, tokens, "[N], as cu_seqlens is given");
    require_one_device(tokens, {&cu_seqlens});
    check_cu_seqlens(cu_seqlens);
    return {cu_seqlens.shape[0] - 1, tokens.size(), 0, cu_seqlens.data, cu_seqlens.dtype == DType::i64};
}

__host__ __device__ inline bool is_byte(DType dtype) {
    return dtype == DType::boolean || dtype == DType::u8 || dtype == DType::i8;
}

inline void check_kernel_mask(const char* name, const View& tokens, const View& mask) {
    if (!mask) return;
    require_shape_of("mask", mask, name, tokens);
    require(is_contiguous(mask) && (is_byte(mask.dtype) || mask.dtype == DType::f32),
            "mask: expected bytes or float32, contiguous");
}

}  // namespace turnwise::cuda
