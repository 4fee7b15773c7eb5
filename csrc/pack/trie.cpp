#include "pack/trie.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace turnwise {
namespace {

constexpr int64_t kPart = 512;  // cost of one more part, in tokens: products of small matrices are slow

// A node and the edge to it: the tokens from its parent's end to its own. Node 0 is the root, which has no tokens.
struct Node {
    int64_t source;  // index of its first token in the stream
    int64_t length;  // in tokens
    int64_t parent;  // index of the parent node; -1 for the root
};

// A hash table: (node, token) -> the child of the node that begins with the token. At most half full.
class Children {
  public:
    Children() : slots_(256, Slot{-1, 0, 0}) {}

    int64_t find(int64_t node, int64_t token) const {
        for (size_t at = place(node, token);; at = (at + 1) & mask()) {
            const Slot& slot = slots_[at];
            if (slot.node < 0) return -1;
            if (slot.node == node && slot.token == token) return slot.child;
        }
    }

    void put(int64_t node, int64_t token, int64_t child) {
        if ((used_ + 1) * 2 > slots_.size()) grow();
        Slot& slot = slots_[free_or_same(node, token)];
        used_ += slot.node < 0;
        slot = Slot{node, token, child};
    }

  private:
    struct Slot {
        int64_t node, token, child;  // (node, token) -> child; node is -1 in a free slot
    };

    size_t mask() const { return slots_.size() - 1; }

    size_t place(int64_t node, int64_t token) const {
        uint64_t hash = uint64_t(node) * 0x9E3779B97F4A7C15u ^ uint64_t(token) * 0xC2B2AE3D27D4EB4Fu;
        hash ^= hash >> 29;
        hash *= 0xBF58476D1CE4E5B9u;
        return size_t(hash ^ (hash >> 32)) & mask();
    }

    size_t free_or_same(int64_t node, int64_t token) const {
        size_t at = place(node, token);
        while (slots_[at].node >= 0 && !(slots_[at].node == node && slots_[at].token == token)) at = (at + 1) & mask();
        return at;
    }

    void grow() {
        std::vector<Slot> old(slots_.size() * 4, Slot{-1, 0, 0});
        old.swap(slots_);
        for (const Slot& slot : old) {
            if (slot.node >= 0) slots_[free_or_same(slot.node, slot.token)] = slot;
        }
    }

    std::vector<Slot> slots_;  // a power of two
    size_t used_ = 0;          // slots that are not free
};

// The length of the common prefix of two rows, at most `most`; blocks are compared by memcmp. Rows that lie on one
// another have all of it in common.
int64_t common_prefix(const int64_t* a, const int64_t* b, int64_t most) {
    if (a == b) return most;
    constexpr int64_t kBlock = 64;
    int64_t i = 0;
    while (i + kBlock <= most && std::memcmp(a + i, b + i, kBlock * sizeof(int64_t)) == 0) i += kBlock;
    while (i < most && a[i] == b[i]) ++i;
    return i;
}

class Builder {
  public:
    explicit Builder(const TokenRows& rows) : rows_(rows), nodes_{Node{0, 0, -1}}, last_(size_t(rows.count)) {
        for (int64_t i = 0; i < rows.count; ++i) last_[size_t(i)] = insert(rows.starts[i], rows.ends[i]);
    }

    TokenTrie lay_out(int64_t least);

  private:
    // Inserts tokens [at, end) of the stream. Returns the node that they end with.
    int64_t insert(int64_t at, int64_t end) {
        int64_t node = 0;
        while (at < end) {
            const int64_t token = rows_.tokens[at];
            int64_t child = children_.find(node, token);
            if (child < 0) {
                nodes_.push_back(Node{at, end - at, node});
                child = int64_t(nodes_.size()) - 1;
                children_.put(node, token, child);
                return child;
            }
            // Follow the edge as far as the tokens agree, and split it if they differ within it.
            const Node edge = nodes_[size_t(child)];
            const int64_t most = std::min(edge.length, end - at);
            const int64_t same = common_prefix(rows_.tokens + edge.source, rows_.tokens + at, most);
            node = same < edge.length ? split(child, same) : child;
            at += same;
        }
        return node;
    }

    // Moves the first `length` tokens of `child` into a new node above it. The children of `child` keep their parent.
    int64_t split(int64_t child, int64_t length) {
        const Node edge = nodes_[size_t(child)];
        const int64_t upper = int64_t(nodes_.size());
        nodes_.push_back(Node{edge.source, length, edge.parent});
        nodes_[size_t(child)] = Node{edge.source + length, edge.length - length, upper};
        children_.put(edge.parent, rows_.tokens[edge.source], upper);
        children_.put(upper, rows_.tokens[edge.source + length], child);
        return upper;
    }

    using Kids = std::vector<std::vector<int64_t>>;
    void dissolve(Kids& kids, int64_t least);
    void sort(std::vector<int64_t>& siblings) const;
    std::vector<int64_t> preorder(const Kids& kids) const;

    const TokenRows& rows_;
    std::vector<Node> nodes_;    // the root first
    Children children_;          // of all nodes
    std::vector<int64_t> last_;  // [rows]: the node that each row ends with
};

std::vector<int64_t> Builder::preorder(const Kids& kids) const {
    std::vector<int64_t> order, stack{0};
    order.reserve(nodes_.size());
    while (!stack.empty()) {
        order.push_back(stack.back());
        stack.pop_back();
        const std::vector<int64_t>& below = kids[size_t(order.back())];
        stack.insert(stack.end(), below.rbegin(), below.rend());
    }
    return order;
}

// Goes from the leaves up and removes nodes whose sharing saves too little. Their children then start at the end of the
// node's parent. A child's tokens come from a row that has the node's tokens just before them, so the child only needs
// to begin earlier in the stream.
void Builder::dissolve(Kids& kids, int64_t least) {
    const std::vector<int64_t> order = preorder(kids);
    std::vector<char> gone(nodes_.size(), 0);
    for (size_t i = order.size(); i-- > 0;) {
        const size_t node = size_t(order[i]);
        // Children that went are replaced by their own children.
        std::vector<int64_t> below;
        for (const int64_t child : kids[node]) {
            if (gone[size_t(child)])
                below.insert(below.end(), kids[size_t(child)].begin(), kids[size_t(child)].end());
            else
                below.push_back(child);
        }
        kids[node] = std::move(below);
        // Removing the node costs one copy of its tokens per child, less the one that is there.
        const Node here = nodes_[node];
        const int64_t copies = int64_t(kids[node].size()) - 1;
        if (node == 0 || copies < 1 || copies * here.length >= least) continue;
        gone[node] = 1;
        for (const int64_t child : kids[node]) {
            Node& edge = nodes_[size_t(child)];
            edge = Node{edge.source - here.length, edge.length + here.length, here.parent};
        }
    }
}

// Sorts siblings by their tokens.
void Builder::sort(std::vector<int64_t>& siblings) const {
    const auto text = [this](int64_t node) { return rows_.tokens + nodes_[size_t(node)].source; };
    std::sort(siblings.begin(), siblings.end(), [&](int64_t a, int64_t b) {
        return std::lexicographical_compare(text(a), text(a) + nodes_[size_t(a)].length, text(b),
                                            text(b) + nodes_[size_t(b)].length);
    });
}

TokenTrie Builder::lay_out(int64_t least) {
    // The tree with sorted children, before and after nodes dissolve.
    const size_t count = nodes_.size();
    Kids kids(count);
    for (size_t node = 1; node < count; ++node) kids[size_t(nodes_[node].parent)].push_back(int64_t(node));
    for (std::vector<int64_t>& siblings : kids) sort(siblings);
    const Kids exact = kids;  // includes the nodes that dissolve
    dissolve(kids, least);
    for (std::vector<int64_t>& siblings : kids) sort(siblings);

    // Give every token of every node a place, and begin a segment at every branch.
    const std::vector<int64_t> order = preorder(kids);
    int64_t total = 0;
    for (const int64_t node : order) total += nodes_[size_t(node)].length;
    TokenTrie trie;
    trie.source.reserve(size_t(total));
    trie.depth.reserve(size_t(total));
    std::vector<int64_t> node_end(count, -1);  // the place of each node's last token
    std::vector<int64_t> segment_of(count, -1);
    for (size_t i = 1; i < order.size(); ++i) {
        const size_t node = size_t(order[i]), parent = size_t(nodes_[node].parent);
        const bool top = parent == 0;
        if (!top && kids[parent].size() == 1) {
            segment_of[node] = segment_of[parent];  // no branch between them, only the end of a row
        } else {
            segment_of[node] = trie.segments();
            trie.begin.push_back(trie.places());
            trie.parent.push_back(top ? -1 : segment_of[parent]);
        }
        const int64_t above = top ? 0 : trie.depth[size_t(node_end[parent])] + 1;
        for (int64_t k = 0; k < nodes_[node].length; ++k) {
            trie.source.push_back(nodes_[node].source + k);
            trie.depth.push_back(above + k);
        }
        node_end[node] = trie.places() - 1;
    }
    // A segment's subtree ends with the last of its descendants.
    trie.begin.push_back(trie.places());
    trie.subtree_end.assign(trie.begin.begin() + 1, trie.begin.end());
    for (size_t segment = trie.parent.size(); segment-- > 0;) {  // children come after their parents
        if (trie.parent[segment] < 0) continue;
        int64_t& end = trie.subtree_end[size_t(trie.parent[segment])];
        end = std::max(end, trie.subtree_end[segment]);
    }

    // Find each row's last token: in the node that it ends with or, if that dissolved, in a descendant that holds a
    // copy.
    trie.row_end.reserve(last_.size());
    for (size_t row = 0; row < last_.size(); ++row) {
        size_t node = size_t(last_[row]);
        while (node != 0 && node_end[node] < 0) node = size_t(exact[node].front());
        const int64_t length = rows_.ends[row] - rows_.starts[row];
        const int64_t end = node_end[node];
        trie.row_end.push_back(length == 0 ? -1 : end - (trie.depth[size_t(end)] - (length - 1)));
    }
    return trie;
}

}  // namespace

TokenTrie build_trie(const TokenRows& rows, int64_t least) {
    return Builder(rows).lay_out(least);
}

void trie_places(const TokenTrie& trie, const int64_t* firsts, const int64_t* counts, int64_t* places) {
    for (size_t row = 0; row < trie.row_end.size(); ++row) {
        int64_t left = counts[row];
        if (left > 0) {
            int64_t place = trie.row_end[row];
            size_t segment =
                size_t(std::upper_bound(trie.begin.begin(), trie.begin.end(), place) - trie.begin.begin()) - 1;
            // Go from the row's end upwards, segment by segment, to the first position that was asked for.
            const int64_t lowest = firsts[row], highest = firsts[row] + left - 1;
            int64_t* out = places + left;
            for (int64_t position = trie.depth[size_t(place)]; position >= lowest; --position) {
                if (position <= highest) *--out = place;
                if (place == trie.begin[segment] && position > lowest) {
                    segment = size_t(trie.parent[segment]);
                    place = trie.begin[segment + 1];
                }
                --place;
            }
        }
        places += left;
    }
}

int64_t cut_trie(const TokenTrie& trie, const int64_t* lengths, int64_t max_tokens, int64_t* order, int64_t* part) {
    const size_t rows = trie.row_end.size();
    std::iota(order, order + rows, int64_t(0));
    std::stable_sort(order, order + rows,
                     [&](int64_t a, int64_t b) { return trie.row_end[size_t(a)] < trie.row_end[size_t(b)]; });
    // In depth-first order a row adds the places between the end of the row before it and its own end. A row that
    // begins a part also repeats the tokens that it shares with the row before it. best[j] is the least cost of the
    // first j rows, and from[j] is the index of the row that begins the last of their parts.
    const auto end = [&](size_t i) { return trie.row_end[size_t(order[i])]; };
    const auto length = [&](size_t i) { return lengths[order[i]]; };
    std::vector<int64_t> best(rows + 1, 0);
    std::vector<size_t> from(rows + 1, 0);
    for (size_t j = 1; j <= rows; ++j) {
        best[j] = -1;
        for (size_t i = j; i-- > 0;) {
            const int64_t added = end(j - 1) - end(i);
            if (added >= max_tokens) break;
            if (added > 0 && added + length(i) > max_tokens) continue;
            const int64_t again = i == 0 ? 0 : length(i) - (end(i) - end(i - 1));
            const int64_t cost = best[i] + again + kPart;
            if (best[j] < 0 || cost < best[j]) best[j] = cost, from[j] = i;
        }
    }
    // Follow from[] back to the rows that begin parts, then number the parts.
    std::vector<size_t> begins;
    for (size_t j = rows; j > 0; j = from[j]) begins.push_back(from[j]);
    int64_t number = -1;
    for (size_t i = 0; i < rows; ++i) {
        if (!begins.empty() && begins.back() == i) {
            begins.pop_back();
            ++number;
        }
        part[i] = number;
    }
    return number + 1;
}

}  // namespace turnwise
