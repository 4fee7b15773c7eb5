// Helpers for the ops on token rewards: they share rows between threads, and read any stream as contiguous float32 or
// bytes.
#pragma once

#include <atomic>

#include "core/parallel.h"
#include "ops/policy_loss_tile.h"
#include "ops/token_layout.h"

namespace turnwise {

constexpr int64_t kRowTokensPerThread = 16384;  // below this a second thread costs more than it gains

// Calls body(first, last) on runs of segments [first, last) with about equal numbers of tokens, one per thread.
template <class Body>
void share_segments(const std::vector<Segment>& segments, int threads, const Body& body) {
    int64_t tokens = 0;
    for (const Segment& segment : segments) tokens += segment.end - segment.begin;
    const int parts = int(std::max<int64_t>(1, std::min<int64_t>(threads, tokens / kRowTokensPerThread)));
    std::vector<size_t> first{0};
    int64_t seen = 0;
    for (size_t i = 0; i < segments.size(); ++i) {
        while (int64_t(first.size()) < parts && seen >= tokens * int64_t(first.size()) / parts) first.push_back(i);
        seen += segments[i].end - segments[i].begin;
    }
    first.resize(size_t(parts), segments.size());
    first.push_back(segments.size());
    run_parts(parts, [&](int part) { body(first[size_t(part)], first[size_t(part) + 1]); });
}

// Returns a stream's tokens [token, token + n) of a row as float32: in place, or converted into scratch.
inline const float* row_floats(const TokenLayout& layout, const View& stream, int64_t row, int64_t token, int n,
                               float* scratch) {
    const int64_t offset = layout.offset(stream, row, token), step = layout.step(stream);
    if (stream.dtype == DType::f32 && step == 1) return stream.as<float>() + offset;
    policy_loss_kernels().to_floats(stream, offset, step, n, scratch);
    return scratch;
}

inline bool is_byte_mask(const TokenLayout& layout, const View& mask) {
    const bool bytes = mask.dtype == DType::boolean || mask.dtype == DType::u8 || mask.dtype == DType::i8;
    return bytes && layout.step(mask) == 1;
}

// Returns the same tokens of a mask as bytes. Sets `bad` if a float mask holds anything but 0 and 1.
inline const uint8_t* row_mask(const TokenLayout& layout, const View& mask, int64_t row, int64_t token, int n,
                               uint8_t* scratch, bool& bad) {
    const int64_t offset = layout.offset(mask, row, token);
    if (is_byte_mask(layout, mask)) return mask.as<uint8_t>() + offset;
    if (!policy_loss_kernels().to_mask(mask, offset, layout.step(mask), n, scratch)) bad = true;
    return scratch;
}

inline void check_token_stream(const TokenLayout& layout, const char* name, const View& stream) {
    layout.check_shape(name, stream);
    require_float_stream(name, stream);
}

inline void check_mask(const TokenLayout& layout, const View& mask) {
    if (!mask) return;
    layout.check_shape("mask", mask);
    require(mask.dtype != DType::f64, "mask.dtype=float64: expected bool, an integer type or a narrower float");
}

}  // namespace turnwise
