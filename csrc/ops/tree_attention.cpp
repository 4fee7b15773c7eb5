#include "ops/tree_attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/check.h"
#include "core/isa.h"
#include "core/parallel.h"
#include "ops/tree_attention_kernel.h"

namespace turnwise {

const TreeAttentionKernelSet& tree_attention_kernels_baseline();
#if defined(TURNWISE_X86)
const TreeAttentionKernelSet& tree_attention_kernels_avx2();
const TreeAttentionKernelSet& tree_attention_kernels_avx512();
#endif

namespace {

constexpr int64_t kPiece = 64;           // most places of a piece: chunks are cut between pieces
constexpr int64_t kChunks = 8;           // most chunks: each holds its own part of the gradients above it
constexpr int64_t kChunkWork = 1 << 21;  // least work of a chunk: pairs of query and key times elements

const TreeAttentionKernels& kernels(DType dtype) {
    const TreeAttentionKernelSet* set = &tree_attention_kernels_baseline();
#if defined(TURNWISE_X86)
    if (isa() == Isa::avx2) set = &tree_attention_kernels_avx2();
    if (isa() == Isa::avx512) set = &tree_attention_kernels_avx512();
#endif
    return dtype == DType::f64 ? set->f64 : set->f32;
}

// Pieces whose ancestors come first, see TreePieces.
struct Chunk {
    std::vector<TreePiece> pieces;  // ancestors first
    int64_t above = 0;              // number of ancestors
    int64_t longest = 0;            // tokens of the longest chain

    int64_t depth() const { return above ? pieces[size_t(above)].depth : 0; }  // tokens of the ancestors
    TreePieces view() const { return {pieces.data(), int64_t(pieces.size()), above, longest}; }
    void add(TreePiece piece) {
        pieces.push_back(piece);
        longest = std::max(longest, piece.depth + piece.length);
    }
};

// Pairs of a query of the piece and a key.
int64_t pairs(const TreePiece& piece) {
    return piece.length * piece.depth + piece.length * (piece.length + 1) / 2;
}

// Calls body(piece) for the pieces of the trie, depth first; a piece's parent is its index among all pieces. Throws
// InvalidInput for segments that do not nest.
template <class Body>
void each_piece(const TreeSegments& segments, int64_t places, const Body& body) {
    struct Open {
        int64_t end;    // of the subtree
        int64_t depth;  // after the segment
        int64_t last;   // index of its last piece
    };
    const int64_t* begin = segments.begin.as<int64_t>();
    const int64_t* subtree_end = segments.subtree_end.as<int64_t>();
    const int64_t count = segments.subtree_end.shape[0];
    const char* problem = "begin, subtree_end: expected segments of a trie, depth first";
    require(begin[0] == 0 && begin[count] == places, problem);
    std::vector<Open> open;
    int64_t index = 0;
    for (int64_t s = 0; s < count; ++s) {
        while (!open.empty() && open.back().end == begin[s]) open.pop_back();
        const int64_t outer = open.empty() ? places : open.back().end;
        require(begin[s] <= begin[s + 1] && begin[s + 1] <= subtree_end[s] && subtree_end[s] <= outer, problem);
        Open now = open.empty() ? Open{0, 0, -1} : open.back();
        for (int64_t at = begin[s]; at < begin[s + 1]; at += kPiece) {
            const TreePiece piece{at, std::min(kPiece, begin[s + 1] - at), now.depth, now.last};
            body(piece);
            now.depth += piece.length;
            now.last = index++;
        }
        now.end = subtree_end[s];
        open.push_back(now);
    }
}

// Cuts the trie into chunks of about equal work. The cut depends on shapes alone, not on the number of threads.
std::vector<Chunk> cut(const TreeSegments& segments, int64_t places, const TreeHeads& heads) {
    std::vector<TreePiece> all;
    int64_t total = 0;
    each_piece(segments, places, [&](const TreePiece& piece) {
        all.push_back(piece);
        total += pairs(piece);
    });
    const int64_t wanted = total * heads.group * heads.size / kChunkWork;
    const int64_t most = std::clamp<int64_t>(wanted, 1, kChunks);
    std::vector<Chunk> chunks;
    std::vector<int64_t> chain;              // pieces above the present one, as indices in `all`
    std::vector<int64_t> place(all.size());  // index of a piece in the present chunk
    int64_t done = 0;
    for (size_t i = 0; i < all.size(); ++i) {
        while (!chain.empty() && chain.back() != all[i].parent) chain.pop_back();
        if (chunks.empty() || done * most >= total * int64_t(chunks.size())) {
            Chunk& chunk = chunks.emplace_back();
            for (const int64_t above : chain) {
                place[size_t(above)] = chunk.above;
                TreePiece piece = all[size_t(above)];
                piece.parent = chunk.above++ - 1;
                chunk.add(piece);
            }
        }
        Chunk& chunk = chunks.back();
        TreePiece piece = all[i];
        if (piece.parent >= 0) piece.parent = place[size_t(piece.parent)];
        place[i] = int64_t(chunk.pieces.size());
        chunk.add(piece);
        chain.push_back(int64_t(i));
        done += pairs(all[i]);
    }
    return chunks;
}

TreeRows rows_of(const View& view) {
    return {view.data, view.stride[0]};
}

TreeForward checked(const TreeSegments& segments, const TreeTensors& tensors, const View& out, const View& lse) {
    const View& query = tensors.query;
    const int64_t places = query.shape[0], heads = tensors.heads, kv_heads = tensors.kv_heads;
    if (query.dims != 2) reject_shape("query", query, "[U, heads * size]");
    require_dtype("query", query, {DType::f32, DType::f64});
    require(kv_heads > 0 && heads > 0 && heads % kv_heads == 0 && query.shape[1] % heads == 0 && query.shape[1] > 0,
            "heads, kv_heads: expected a divisor of the width of query, and one of its own");
    const int64_t size = query.shape[1] / heads;
    require_rows("query", query, places, heads * size, query.dtype);
    require_rows("key", tensors.key, places, kv_heads * size, query.dtype);
    require_rows("value", tensors.value, places, kv_heads * size, query.dtype);
    require_rows("out", out, places, heads * size, query.dtype);
    require_rows("lse", lse, places, heads, query.dtype);
    require_dtype("begin", segments.begin, {DType::i64});
    require_dtype("subtree_end", segments.subtree_end, {DType::i64});
    require(is_contiguous_1d(segments.begin) && is_contiguous_1d(segments.subtree_end),
            "begin, subtree_end: expected contiguous tensors of one dimension");
    require_shape("begin", segments.begin, {segments.subtree_end.shape[0] + 1});
    return {{kv_heads, heads / kv_heads, size, tensors.scale},
            rows_of(query),
            rows_of(tensors.key),
            rows_of(tensors.value),
            rows_of(out),
            rows_of(lse)};
}

// Calls body(chunk, key head, scratch) for each pair of the two; threads share the pairs.
template <class Body>
void each_chunk(const std::vector<Chunk>& chunks, const TreeHeads& heads, const TreeAttentionKernels& kernel,
                int threads, const Body& body) {
    const int64_t units = int64_t(chunks.size()) * heads.kv_heads;
    const auto run = [&](int64_t unit) {
        const size_t chunk = size_t(unit / heads.kv_heads);
        const size_t bytes = size_t(kernel.scratch(heads, chunks[chunk].longest));
        const std::unique_ptr<void, decltype(&std::free)> scratch(std::calloc(bytes, 1), &std::free);
        body(chunk, unit % heads.kv_heads, scratch.get());
    };
    const int parts = int(std::max<int64_t>(1, std::min<int64_t>(threads, units)));
    std::atomic<int64_t> next{0};
    run_parts(parts, [&](int) {
        for (int64_t unit = next++; unit < units; unit = next++) run(unit);
    });
}

template <class T>
void add_row(T* to, const T* from, int64_t size) {
    for (int64_t d = 0; d < size; ++d) to[d] += from[d];
}

// Adds to the gradients of one head's keys and values what the chunk adds to those above it.
template <class T>
void add_shared(const TreeBackward& call, const Chunk& chunk, int64_t head, const T* shared) {
    const int64_t size = call.forward.heads.size;
    for (int64_t i = 0; i < chunk.above; ++i) {
        const TreePiece& piece = chunk.pieces[size_t(i)];
        for (int64_t t = 0; t < piece.length; ++t) {
            const int64_t place = piece.begin + t;
            const T* from = shared + (piece.depth + t) * size;
            add_row(static_cast<T*>(call.d_key.data) + place * call.d_key.stride + head * size, from, size);
            add_row(static_cast<T*>(call.d_value.data) + place * call.d_value.stride + head * size,
                    from + chunk.depth() * size, size);
        }
    }
}

}  // namespace

void tree_attention(const TreeSegments& segments, const TreeTensors& tensors, const View& out, const View& lse,
                    int threads) {
    const TreeForward call = checked(segments, tensors, out, lse);
    const TreeAttentionKernels& kernel = kernels(out.dtype);
    const std::vector<Chunk> chunks = cut(segments, out.shape[0], call.heads);
    each_chunk(chunks, call.heads, kernel, threads, [&](size_t chunk, int64_t head, void* scratch) {
        kernel.forward(call, chunks[chunk].view(), head, scratch);
    });
}

void tree_attention_grad(const TreeSegments& segments, const TreeTensors& tensors, const View& out, const View& lse,
                         const View& d_out, const View& d_query, const View& d_key, const View& d_value, int threads) {
    const TreeForward forward = checked(segments, tensors, out, lse);
    const TreeHeads& heads = forward.heads;
    const int64_t places = out.shape[0], width = heads.kv_heads * heads.size;
    require_rows("d_out", d_out, places, out.shape[1], out.dtype);
    require_rows("d_query", d_query, places, out.shape[1], out.dtype);
    require_rows("d_key", d_key, places, width, out.dtype);
    require_rows("d_value", d_value, places, width, out.dtype);
    const TreeBackward call{forward, rows_of(d_out), rows_of(d_query), rows_of(d_key), rows_of(d_value)};
    const TreeAttentionKernels& kernel = kernels(out.dtype);
    const std::vector<Chunk> chunks = cut(segments, places, heads);

    // The parts that each chunk adds to the places above it.
    const int64_t bytes = bytes_of(out.dtype);
    std::vector<int64_t> start(chunks.size() + 1, 0);
    for (size_t i = 0; i < chunks.size(); ++i) start[i + 1] = start[i] + 2 * chunks[i].depth() * width * bytes;
    std::vector<char> shared(size_t(start.back()));
    const auto shared_of = [&](size_t chunk, int64_t head) {
        return shared.data() + start[chunk] + 2 * chunks[chunk].depth() * head * heads.size * bytes;
    };
    each_chunk(chunks, heads, kernel, threads, [&](size_t chunk, int64_t head, void* scratch) {
        kernel.backward(call, chunks[chunk].view(), head, shared_of(chunk, head), scratch);
    });
    // The order of these sums is that of the chunks.
    run_parts(int(std::min<int64_t>(threads, heads.kv_heads)), [&](int part) {
        const int64_t parts = std::min<int64_t>(threads, heads.kv_heads);
        for (int64_t head = part; head < heads.kv_heads; head += parts) {
            for (size_t i = 0; i < chunks.size(); ++i) {
                if (out.dtype == DType::f64) {
                    add_shared(call, chunks[i], head, reinterpret_cast<const double*>(shared_of(i, head)));
                } else {
                    add_shared(call, chunks[i], head, reinterpret_cast<const float*>(shared_of(i, head)));
                }
            }
        }
    });
}

}  // namespace turnwise
