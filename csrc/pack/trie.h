// A trie over rows of tokens: it stores common beginnings of rows once, in depth-first order.
#pragma once

#include <cstdint>
#include <vector>

namespace turnwise {

// Rows of one stream: row i is tokens[starts[i]] .. tokens[ends[i] - 1].
struct TokenRows {
    const int64_t* tokens;  // the stream
    const int64_t* starts;  // [count], in tokens
    const int64_t* ends;    // [count], in tokens
    int64_t count;          // rows
};

// The layout: unique tokens have places 0, 1, ... in depth-first order. Children are sorted by their tokens, so the
// order of the rows does not matter. A segment is a run of places without a branch. Its children follow it directly, up
// to its subtree's end, and each child continues at the depth after the segment's last one.
struct TokenTrie {
    std::vector<int64_t> source;  // [U] index of a place's token in the stream, in one of its rows
    std::vector<int64_t> depth;   // [U] index of a place's token in each of its rows

    std::vector<int64_t> begin;        // [S + 1] the first place of each segment, then the number of places
    std::vector<int64_t> parent;       // [S] the segment's parent, -1 for none
    std::vector<int64_t> subtree_end;  // [S] the place after the segment's subtree

    std::vector<int64_t> row_end;  // [rows] the place of the row's last token, -1 for an empty row

    int64_t places() const { return int64_t(source.size()); }
    int64_t segments() const { return int64_t(parent.size()); }
};

// Inserts rows in linear time: it compares only the part of a row that earlier rows share. It drops sharing that saves
// fewer than `least` tokens, because a branch costs time too; each child then has its own copy of the tokens above it.
TokenTrie build_trie(const TokenRows& rows, int64_t least);

// Writes to `places`, row after row, the places of positions firsts[i] .. firsts[i] + counts[i] - 1 of row i.
void trie_places(const TokenTrie& trie, const int64_t* firsts, const int64_t* counts, int64_t* places);

// Cuts the rows into parts of at most max_tokens unique tokens each. Minimizes the tokens that several parts compute
// plus a fixed cost per part, so rows that share much stay together. `order` receives the rows depth first, and
// `part[i]` the number of the part of row order[i]. A row longer than max_tokens shares its part only with equal rows.
// Returns the number of parts.
int64_t cut_trie(const TokenTrie& trie, const int64_t* lengths, int64_t max_tokens, int64_t* order, int64_t* part);

}  // namespace turnwise
