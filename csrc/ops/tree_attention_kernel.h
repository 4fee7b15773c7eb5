// The kernel of attention over a trie. It takes one chunk of the trie and one key head at a time, in float32 or
// float64, and is compiled once per instruction set.
#pragma once

#include <cstdint>

namespace turnwise {

// A run of places within a segment. Its tokens attend to the pieces above it, and each to itself and those before it.
struct TreePiece {
    int64_t begin;   // its first place
    int64_t length;  // places
    int64_t depth;   // position of its first token in a row: number of tokens above it
    int64_t parent;  // index of the piece above it in the same chunk, or -1
};

// Pieces that follow one another depth first. The first `above` of them are the ancestors of the chunk's first piece;
// other chunks own their places.
struct TreePieces {
    const TreePiece* pieces;  // [count], ancestors first
    int64_t count;            // pieces
    int64_t above;            // pieces that belong to other chunks
    int64_t longest;          // tokens of the longest chain of pieces
};

// Rows of one place each; all heads of a place are contiguous.
struct TreeRows {
    void* data;      // the first row
    int64_t stride;  // elements from one place to the next
};

struct TreeHeads {
    int64_t kv_heads;  // key heads, which are also those of the values
    int64_t group;     // query heads per key head
    int64_t size;      // elements of a head
    double scale;      // of the scores
};

struct TreeForward {
    TreeHeads heads;             // of all of these
    TreeRows query, key, value;  // [U, kv_heads * group * size], [U, kv_heads * size] twice
    TreeRows out, lse;           // written: [U, kv_heads * group * size], [U, kv_heads * group]
};

struct TreeBackward {
    TreeForward forward;               // with its results
    TreeRows d_out;                    // gradient of `out`
    TreeRows d_query, d_key, d_value;  // written
};

struct TreeAttentionKernels {
    // Bytes of scratch memory, zero at first, for a chunk whose longest chain has `longest` tokens.
    int64_t (*scratch)(const TreeHeads&, int64_t longest);
    void (*forward)(const TreeForward&, const TreePieces&, int64_t kv_head, void* scratch);
    // Writes the gradients of the chunk's own places, and to `shared` [2, depth of the chunk, size] what it adds to
    // the keys and values above it.
    void (*backward)(const TreeBackward&, const TreePieces&, int64_t kv_head, void* shared, void* scratch);
};

// The kernels of float32 and of float64.
struct TreeAttentionKernelSet {
    TreeAttentionKernels f32, f64;
};

}  // namespace turnwise
