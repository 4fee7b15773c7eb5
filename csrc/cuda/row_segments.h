// Gives warps equal spans of tokens, cut at the ends of rows, and reads streams of any dtype and stride a pack at a
// time.
#pragma once

#include <algorithm>

#include "cuda/token_stream.h"

namespace turnwise::cuda {

// ---- Streams --------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float read_float(const void* data, DType dtype, int64_t place) {
    switch (dtype) {
        case DType::bf16:
            return to_float(static_cast<const BFloat16*>(data)[place]);
        case DType::f16:
            return to_float(static_cast<const Half*>(data)[place]);
        default:
            return static_cast<const float*>(data)[place];
    }
}

__device__ __forceinline__ bool read_truth(const void* data, DType dtype, int64_t place) {
    switch (dtype) {
        case DType::i64:
            return static_cast<const int64_t*>(data)[place] != 0;
        case DType::i32:
            return static_cast<const int32_t*>(data)[place] != 0;
        case DType::f32:
            return static_cast<const float*>(data)[place] != 0;
        case DType::i16:
            return static_cast<const int16_t*>(data)[place] != 0;
        case DType::bf16:
        case DType::f16:
            return (static_cast<const uint16_t*>(data)[place] & 0x7fff) != 0;  // -0 is 0
        default:
            return static_cast<const uint8_t*>(data)[place] != 0;
    }
}

// One value per token: padded [B, T] or packed [N]. The value of `token`, numbered over all rows, is at row * gap +
// token * stride. `gap` is the distance from the end of a row to the next row: 0 if rows are adjacent.
struct AnyStream {
    const void* data = nullptr;   // null: not given
    DType dtype = DType::f32;     // of the values
    int64_t gap = 0, stride = 0;  // in elements

    __device__ __forceinline__ int64_t place(int64_t row, int64_t token) const { return row * gap + token * stride; }
};

// The address of a tensor. An empty tensor that was given has no memory; it gets an address that no kernel reads.
inline const void* address_of(const View& view) {
    return view.data == nullptr && view ? reinterpret_cast<const void*>(uintptr_t(16)) : view.data;
}

inline AnyStream any_stream(const View& view) {
    if (view.dims != 2) return {address_of(view), view.dtype, 0, view.stride[0]};
    return {address_of(view), view.dtype, view.stride[0] - view.shape[1] * view.stride[1], view.stride[1]};
}

// One value per row: [B] or [B, 1].
struct RowStream {
    const void* data = nullptr;  // null: not given
    DType dtype = DType::f32;    // of the values
    int64_t stride = 0;          // in elements

    RowStream() = default;
    explicit RowStream(const View& view) : data(address_of(view)), dtype(view.dtype), stride(view.stride[0]) {}
    __device__ float number(int64_t row) const { return read_float(data, dtype, row * stride); }
    __device__ int64_t integer(int64_t row) const {
        return dtype == DType::i64 ? static_cast<const int64_t*>(data)[row * stride]
                                   : static_cast<const int32_t*>(data)[row * stride];
    }
};

// ---- Segments -------------------------------------------------------------------------------------------------------
// Rows whose tokens are divided into spans. Warp w takes tokens [w span, (w + 1) span).
struct SpannedRows : TokenRows {
    int64_t span = 0;  // tokens per warp

    // Cuts the tokens into at most `most` spans, none shorter than a warp can use well. Returns the number of spans.
    int64_t cut(int64_t most) {
        constexpr int64_t kShortest = 512;
        span = (tokens + most - 1) / most;
        span = std::max<int64_t>((span + kShortest - 1) / kShortest * kShortest, kShortest);
        return std::max<int64_t>((tokens + span - 1) / span, 1);
    }
};

// Tokens [begin, end) of one row.
struct RowSegment {
    int64_t row;         // index of the row
    int64_t begin, end;  // tokens, numbered over all rows
};

// Iterates over the segments of a warp's span. All lanes call `next` together.
class RowSegments {
  public:
    __device__ RowSegments(const SpannedRows& rows, int64_t place) : rows_(rows), at_(place * rows.span) {
        end_ = min(at_ + rows.span, rows.tokens);
        if (at_ < end_) row_ = warp_find_row(rows, at_);
    }
    __device__ bool next(RowSegment& segment) {
        for (; at_ < end_ && row_ < rows_.rows; ++row_) {
            const int64_t stop = min(row_start(rows_, row_ + 1), end_);
            if (stop <= at_) continue;
            segment = {row_, at_, stop};
            at_ = stop;
            return true;
        }
        return false;
    }

  private:
    const SpannedRows& rows_;
    int64_t at_, end_, row_ = 0;  // the next token; the end of the span; the row of the next token
};

// ---- A lane's share of a segment ------------------------------------------------------------------------------------
// The pack of tokens [first, first + kPack). Only tokens inside the segment count. `fast`: streams are contiguous and
// aligned, with floats of type T, so one instruction loads a whole pack.
template <class T, bool fast>
struct PackAt {
    static constexpr int kPack = 16 / int(sizeof(T));
    const RowSegment& segment;  // holds the pack, in part or in whole
    int64_t first;              // token, numbered over all rows

    __device__ bool whole() const { return first >= segment.begin && first + kPack <= segment.end; }
    __device__ bool inside(int k) const { return first + k >= segment.begin && first + k < segment.end; }
    __device__ int64_t place(const AnyStream& stream, int k) const {
        return fast ? first + k : stream.place(segment.row, first + k);
    }

    using Floats = Loaded<T, kPack>;

    // The stream's values; 0 outside the segment. If not `fast`, T is float and values are converted.
    __device__ Floats load(const AnyStream& stream) const {
        if (fast && whole()) return load_streaming<T, kPack>(static_cast<const T*>(stream.data) + first);
        Pack<T, kPack> pack{};
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            if (!inside(k)) continue;
            if constexpr (fast) {
                pack.value[k] = static_cast<const T*>(stream.data)[first + k];
            } else {
                pack.value[k] = read_float(stream.data, stream.dtype, place(stream, k));
            }
        }
        Floats floats;
        memcpy(floats.word, &pack, sizeof pack);
        return floats;
    }

    // A mask's pack as loaded. `truths` reads it in a separate step, so that no other load waits for this one.
    struct Mask {
        unsigned word[kPack];  // raw bytes or floats; or bits in word[0], see comes_whole
    };
    // Starts to load a mask's pack.
    __device__ Mask ask(const AnyStream& stream) const {
        Mask mask{};
        if (!comes_whole(stream)) {
            mask.word[0] = truths_one_by_one(stream);
        } else if (is_byte(stream.dtype)) {
            const auto bytes = load_streaming<uint8_t, kPack>(static_cast<const uint8_t*>(stream.data) + first);
            memcpy(mask.word, &bytes, sizeof bytes);
        } else {
#pragma unroll
            for (int k = 0; k < kPack; k += 4) {
                const auto floats = load_streaming<float, 4>(static_cast<const float*>(stream.data) + first + k);
                memcpy(mask.word + k, &floats, sizeof floats);
            }
        }
        return mask;
    }

    // One bit per token of the pack: set if the token is inside the segment and the mask, if given, is not 0.
    __device__ unsigned truths(const AnyStream& stream, const Mask& mask) const {
        if (!comes_whole(stream)) return mask.word[0];
        const bool bytes = is_byte(stream.dtype);
        unsigned bits = 0;
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            const bool through =
                bytes ? (mask.word[k / 4] >> k % 4 * 8 & 0xff) != 0 : mask.word[k] << 1 != 0;  // -0 is 0
            bits |= unsigned(through) << k;
        }
        return bits;
    }
    // True if whole instructions load the mask's pack; otherwise `ask` reads its values one by one.
    __device__ bool comes_whole(const AnyStream& stream) const {
        return fast && whole() && stream.data && (is_byte(stream.dtype) || stream.dtype == DType::f32);
    }
    __device__ unsigned truths_one_by_one(const AnyStream& stream) const {
        unsigned bits = 0;
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            bool through = inside(k);
            if (through && stream.data) through = read_truth(stream.data, stream.dtype, place(stream, k));
            bits |= unsigned(through) << k;
        }
        return bits;
    }

    // Writes the tokens inside the segment to a contiguous tensor.
    __device__ void store(void* data, DType dtype, const Pack<T, kPack>& pack) const {
        if (fast && whole()) return store_streaming<T, kPack>(static_cast<T*>(data) + first, pack);
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            if (!inside(k)) continue;
            if constexpr (fast) {
                static_cast<T*>(data)[first + k] = pack.value[k];
            } else if (dtype == DType::bf16) {
                static_cast<BFloat16*>(data)[first + k] = to_bfloat16(pack.value[k]);
            } else if (dtype == DType::f16) {
                static_cast<Half*>(data)[first + k] = to_half(pack.value[k]);
            } else {
                static_cast<float*>(data)[first + k] = pack.value[k];
            }
        }
    }
};

// The number of values other than 0 in 16 bytes.
__device__ __forceinline__ int count_word(const uint8_t*, const uint4& word) {
    const auto bytes = [](unsigned w) { return __popc((((w & 0x7f7f7f7fu) + 0x7f7f7f7fu) | w) & 0x80808080u); };
    return bytes(word.x) + bytes(word.y) + bytes(word.z) + bytes(word.w);
}
__device__ __forceinline__ int count_word(const float*, const uint4& word) {  // -0 is 0
    return (word.x << 1 != 0) + (word.y << 1 != 0) + (word.z << 1 != 0) + (word.w << 1 != 0);
}

// This lane's share of the number of values other than 0 in a segment of a contiguous stream, aligned to 16 bytes.
// Loads four words at once.
template <class T>
__device__ int64_t count_stream(const T* stream, const RowSegment& segment) {
    constexpr int kTokens = 16 / int(sizeof(T)), kAtOnce = 4, kStep = kWarp * kTokens;
    int64_t count = 0, i = segment.begin / kTokens * kTokens + int(threadIdx.x) % kWarp * kTokens;
    // Counts one word; values at the ends of the segment one by one.
    const auto count_next = [&] {
        if (i >= segment.begin && i + kTokens <= segment.end) {
            count += count_word(stream, __ldg(reinterpret_cast<const uint4*>(stream + i)));
        } else {
            for (int64_t k = max(i, segment.begin); k < min(i + kTokens, segment.end); ++k) count += stream[k] != T(0);
        }
        i += kStep;
    };
    if (i < segment.begin) count_next();
    for (; i + (kAtOnce - 1) * kStep + kTokens <= segment.end; i += kAtOnce * kStep) {
        uint4 words[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) words[k] = __ldg(reinterpret_cast<const uint4*>(stream + i + k * kStep));
#pragma unroll
        for (const uint4& word : words) count += count_word(stream, word);
    }
    while (i < segment.end) count_next();
    return count;
}

// This lane's share of the number of trained tokens in a segment. `fast`: the mask is contiguous, aligned to 16 bytes.
template <bool fast>
__device__ int64_t count_trained(const AnyStream& mask, const RowSegment& segment) {
    const int lane = int(threadIdx.x) % kWarp;
    if (mask.data == nullptr) return lane == 0 ? segment.end - segment.begin : 0;
    if (fast && is_byte(mask.dtype)) return count_stream(static_cast<const uint8_t*>(mask.data), segment);
    if (fast && mask.dtype == DType::f32) return count_stream(static_cast<const float*>(mask.data), segment);
    int64_t count = 0;
    for (int64_t i = segment.begin + lane; i < segment.end; i += kWarp) {
        count += read_truth(mask.data, mask.dtype, fast ? i : mask.place(segment.row, i));
    }
    return count;
}

}  // namespace turnwise::cuda
