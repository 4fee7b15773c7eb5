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
    bool given = false;           // data is not null
    bool bytes = false;           // dtype has one byte
    bool packs = false;           // given, and kernels can load a pack as a mask by whole instructions: bytes or f32

    __device__ __forceinline__ int64_t place(int64_t row, int64_t token) const { return row * gap + token * stride; }
};

// The address of a tensor. An empty tensor that was given has no memory; it gets an address that no kernel reads.
inline const void* address_of(const View& view) {
    return view.data == nullptr && view ? reinterpret_cast<const void*>(uintptr_t(16)) : view.data;
}

inline AnyStream any_stream(const View& view) {
    const bool given = address_of(view) != nullptr, bytes = is_byte(view.dtype);
    const bool packs = given && (bytes || view.dtype == DType::f32), flat = view.dims != 2;
    const int64_t gap = flat ? 0 : view.stride[0] - view.shape[1] * view.stride[1];
    return {address_of(view), view.dtype, gap, view.stride[flat ? 0 : 1], given, bytes, packs};
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
    int64_t span = 0;   // tokens per warp
    int lanes = kWarp;  // neighbours that share a row where rows are added up; fewer than kWarp if rows are short

    // Cuts the tokens into at most `most` spans, none shorter than a warp can use well. Returns the number of spans.
    int64_t cut(int64_t most) {
        const int few = rows > 0 ? lanes_per_row(*this) : 0;
        lanes = few > 0 ? few : kWarp;
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
    bool whole = false;  // these are all tokens of the row

    __device__ __forceinline__ bool empty() const { return begin >= end; }
};

// SpannedRows::lanes, known to the compiler if rows are not `short_rows`.
template <bool short_rows>
__device__ __forceinline__ int lanes_of(const SpannedRows& rows) {
    return short_rows ? rows.lanes : kWarp;
}

// Iterates over the segments of a warp's span. Groups of lanes_of neighbours take one segment each. All lanes of the
// warp call `next` together.
template <bool short_rows>
class RowSegments {
  public:
    __device__ RowSegments(const SpannedRows& rows, int64_t place) : rows_(rows), begin_(place * rows.span) {
        const int lanes = lanes_of<short_rows>(rows);
        end_ = min(begin_ + rows.span, rows.tokens);
        next_ = begin_ < end_ ? warp_find_row(rows, begin_) + int(threadIdx.x) % kWarp / lanes : rows.rows;
        step_ = kWarp / lanes;
    }
    // Gives each group its next segment, an empty one if only other groups have any left. False if none has.
    __device__ bool next(RowSegment& segment) {
        for (bool more = true; more;) {
            const int64_t row = next_;
            next_ += step_;
            const RowRange range = row < rows_.rows ? row_range(rows_, row) : RowRange{end_, end_};
            const int64_t first = max(range.begin, begin_);
            segment = {row, first, max(min(range.end, end_), first), range.begin >= begin_ && range.end <= end_};
            if (__any_sync(kFullWarp, !segment.empty())) return true;
            more = __any_sync(kFullWarp, range.begin < end_);
        }
        return false;
    }

  private:
    const SpannedRows& rows_;
    int64_t begin_, end_, next_;  // the span; the next row of this lane's group
    int step_;                    // groups
};

// Calls add(load(token)) for every token that this lane has of its group's segment. A lane takes `at_once` adjacent
// tokens at a time and starts all their loads before it adds. What lies past the segment is value-initialised.
template <int at_once, class Load, class Add>
__device__ __forceinline__ void each_token(const RowSegment& segment, int lanes, const Load& load, const Add& add) {
    const int size = int(segment.end - segment.begin);
    for (int i = lane_of_group(lanes) * at_once; i < size; i += lanes * at_once) {
        const int64_t first = segment.begin + i;
        decltype(load(first)) loaded[at_once]{};
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            if (i + k < size) loaded[k] = load(first + k);
        }
#pragma unroll
        for (int k = 0; k < at_once; ++k) add(loaded[k]);
    }
}

// A truth value per token of a pack, in the top bit of a byte each; all other bits are 0.
template <int count>
struct Truths {
    unsigned word[count / 4];

    __device__ __forceinline__ bool operator[](int k) const { return (word[k / 4] & 0x80u << k % 4 * 8) != 0; }
    // All bits set for a true value, else 0: one instruction, and no predicate register.
    __device__ __forceinline__ unsigned mask(int k) const {
#if defined(__CUDA_ARCH__)
        unsigned out;
        asm("prmt.b32 %0, %1, 0, %2;" : "=r"(out) : "r"(word[k / 4]), "r"(0x8888 + 0x1111 * (k % 4)));
        return out;
#else
        return (*this)[k] ? ~0u : 0u;
#endif
    }
    __device__ __forceinline__ void set(int k, bool value) { word[k / 4] |= (value ? 0x80u : 0u) << k % 4 * 8; }
    __device__ __forceinline__ int number() const {
        int found = 0;
#pragma unroll
        for (const unsigned bits : word) found += __popc(bits);
        return found;
    }
};

// A mask's pack as loaded. PackAt::truths reads it in a separate step, so that no other load waits for this one.
template <int count>
struct MaskPack {
    unsigned word[count];  // raw bytes or floats; or Truths, see PackAt::comes_whole
};

// The top bit of every byte that is not 0.
__device__ __forceinline__ unsigned byte_truths(unsigned word) {
    return (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
}

// The value where all bits of `mask` are set, 0 where none is: what a masked NaN needs.
__device__ __forceinline__ float keep(float value, unsigned mask) {
    return __uint_as_float(__float_as_uint(value) & mask);
}

// ---- A lane's share of a segment ------------------------------------------------------------------------------------
// The pack of tokens [first, first + kPack). Only tokens inside the segment count. `fast`: streams are contiguous and
// aligned, with floats of type T, so one instruction loads a whole pack. `is_whole`: the segment holds all of the pack.
// `again`: the pack or its neighbours are read again soon, so the caches may keep them.
template <class T, bool fast, bool is_whole = false, bool again = false>
class PackAt {
  public:
    static constexpr int kPack = 16 / int(sizeof(T));
    using Floats = Loaded<T, kPack>;
    using Mask = MaskPack<kPack>;
    const RowSegment& segment;       // holds the pack, in part or in whole
    int64_t first;                   // token, numbered over all rows
    int64_t rows[fast ? 1 : kPack];  // row of each token; the segment's, unless the caller knows better

    __device__ __forceinline__ PackAt(const RowSegment& in, int64_t from)
        : segment(in), first(from), whole_(from >= in.begin && from + kPack <= in.end) {
        for (int64_t& row : rows) row = in.row;
    }
    __device__ __forceinline__ bool whole() const { return is_whole || whole_; }
    __device__ bool inside(int k) const { return first + k >= segment.begin && first + k < segment.end; }
    __device__ int64_t place(const AnyStream& stream, int k) const {
        return fast ? first + k : stream.place(rows[k], first + k);
    }

    // The stream's values; 0 outside the segment. If not `fast`, T is float and values are converted.
    __device__ Floats load(const AnyStream& stream) const {
        const T* from = static_cast<const T*>(stream.data) + first;
        if (fast && whole()) return again ? load_cached<T, kPack>(from) : load_streaming<T, kPack>(from);
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

    // Starts to load a mask's pack.
    __device__ Mask ask(const AnyStream& stream) const {
        Mask mask{};
        if (!comes_whole(stream)) {
            const Truths<kPack> found = truths_one_by_one(stream);
#pragma unroll
            for (int k = 0; k < kPack; k += 4) mask.word[k / 4] = found.word[k / 4];
        } else if (stream.bytes) {
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

    // True for the tokens inside the segment whose mask, if given, is not 0.
    __device__ Truths<kPack> truths(const AnyStream& stream, const Mask& mask) const {
        Truths<kPack> out{};
        if (!comes_whole(stream)) {
#pragma unroll
            for (int k = 0; k < kPack; k += 4) out.word[k / 4] = mask.word[k / 4];
        } else if (stream.bytes) {
#pragma unroll
            for (int k = 0; k < kPack; k += 4) out.word[k / 4] = byte_truths(mask.word[k / 4]);
        } else {
#pragma unroll
            for (int k = 0; k < kPack; ++k) out.set(k, mask.word[k] << 1 != 0);  // -0 is 0
        }
        return out;
    }
    // True if whole instructions load the mask's pack; otherwise `ask` reads its values one by one.
    __device__ bool comes_whole(const AnyStream& stream) const { return fast && stream.packs && whole(); }
    __device__ Truths<kPack> truths_one_by_one(const AnyStream& stream) const {
        Truths<kPack> out{};
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            bool through = is_whole || inside(k);
            if (through && stream.given) through = read_truth(stream.data, stream.dtype, place(stream, k));
            out.set(k, through);
        }
        return out;
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

  private:
    bool whole_;  // the pack is inside the segment
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

// The value of a token. `fast`: the stream is contiguous, with floats of type T.
template <class T, bool fast>
__device__ __forceinline__ float value_at(const AnyStream& stream, const RowSegment& segment, int64_t token) {
    if constexpr (fast) return to_float(static_cast<const T*>(stream.data)[token]);
    return read_float(stream.data, stream.dtype, stream.place(segment.row, token));
}
// True if a token's mask, if given, is not 0.
template <bool fast>
__device__ __forceinline__ bool truth_at(const AnyStream& mask, const RowSegment& segment, int64_t token) {
    return !mask.given || read_truth(mask.data, mask.dtype, fast ? token : mask.place(segment.row, token));
}

// This lane's share of the number of trained tokens in a segment that `lanes` neighbours share: those of a warp unless
// rows are short. `fast`: the mask is contiguous, aligned to 16 bytes.
template <bool fast, bool short_rows>
__device__ int64_t count_trained(const AnyStream& mask, const RowSegment& segment, int lanes) {
    if (mask.data == nullptr) return lane_of_group(lanes) == 0 ? segment.end - segment.begin : 0;
    if (fast && !short_rows && mask.bytes) return count_stream(static_cast<const uint8_t*>(mask.data), segment);
    if (fast && !short_rows && mask.dtype == DType::f32) {
        return count_stream(static_cast<const float*>(mask.data), segment);
    }
    int count = 0;
    const auto add = [&](auto found) { count += found != 0; };
    if (fast && mask.bytes) {
        each_token<8>(segment, lanes, [&](int64_t i) { return static_cast<const uint8_t*>(mask.data)[i]; }, add);
    } else {
        each_token<4>(segment, lanes, [&](int64_t i) { return truth_at<fast>(mask, segment, i); }, add);
    }
    return count;
}

}  // namespace turnwise::cuda
