// A trie over rows of tokens: common beginnings of rows are stored once, in depth-first order.
#pragma once

#include <cstdint>
#include <vector>

namespace turnwise {

// Rows of one stream: row i is tokens[starts[i]] .. tokens[ends[i] - 1].
struct TokenRows {
    const int64_t* tokens;
    const int64_t* starts;  // [count], in tokens
    const int64_t* ends;    // [count], in tokens
    int64_t count;          // rows
};

// The layout: unique tokens have places 0, 1, ... in depth-first order, children by their first token, so that it does
// not depend on the order of the rows. A segment is a run of places without a branch in it; its children stand right
// after it, up to its subtree's end, and each of them begins where it ends.
struct TokenTrie {
    std::vector<int64_t> source;  // [U] where in the stream a place's token stands (in one of its rows)
    std::vector<int64_t> depth;   // [U] the place's position in its rows

    std::vector<int64_t> begin;        // [S + 1] the first place of each segment
    std::vector<int64_t> parent;       // [S] its parent segment, -1 for none
    std::vector<int64_t> subtree_end;  // [S] the place after the last one of its subtree

    std::vector<int64_t> row_end;  // [rows] the place of each row's last token, -1 for an empty row

    int64_t places() const { return int64_t(source.size()); }
    int64_t segments() const { return int64_t(parent.size()); }
};

// Takes linear time: only the part of a row that earlier rows share is compared.
// Sharing that saves fewer than `least` tokens is dropped, as a branch costs time too: each child then has a copy of
// the tokens above it.
TokenTrie build_trie(const TokenRows& rows, int64_t least);

// For each row i the places of its positions firsts[i] .. firsts[i] + counts[i] - 1, row after row, into `places`.
void trie_places(const TokenTrie& trie, const int64_t* firsts, const int64_t* counts, int64_t* places);

// Cuts the rows into parts of at most max_tokens unique tokens each, such that as few tokens as can be are computed in
// more than one of them: rows that share much stay together. `order` receives the rows depth first, `part[i]` the
// number of the part of row order[i]. A longer row has a part alone, or with rows that it holds. Returns the number of
// parts.
int64_t cut_trie(const TokenTrie& trie, const int64_t* lengths, int64_t max_tokens, int64_t* order, int64_t* part);

}  // namespace turnwise
