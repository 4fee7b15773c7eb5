// The containers of a heap. Nodes refer to each other by slot, never by pointer, so no node owns another: cycles need
// no special care, and freeing a node never recurses.
#pragma once

#include <string>
#include <vector>

#include "state/counted.h"
#include "state/radix_array.h"
#include "state/value.h"

namespace turnwise::state {

// An entry of a dict.
struct Entry {
    int64_t hash;  // of the key, computed by the host
    Leaf* key;     // null if the entry was erased
    Value value;   // empty if the entry was erased
};

template <>
struct ItemPolicy<Value> {
    static constexpr bool counted = true;
    static void take(const Value& value) noexcept { value.take(); }
    static void drop(const Value& value) noexcept { value.drop(); }
};

template <>
struct ItemPolicy<Entry> {
    static constexpr bool counted = true;
    static void take(const Entry& entry) noexcept {
        if (entry.key) retain(entry.key);
        entry.value.take();
    }
    static void drop(const Entry& entry) noexcept {
        if (entry.key) release(entry.key);
        entry.value.drop();
    }
};

// The type of a node: DictNode, ListNode, ...
enum class Kind : uint8_t { Dict, List, Tuple, Tokens, Opaque };

struct Node {
    Count count;           // references, mostly from tables of heaps
    const Kind kind;       // the derived type
    bool pending = false;  // it is in the owner's list of nodes to settle before the next fork
    Epoch epoch;           // of the heap that may write to it
    const Epoch birth;  // the container's identity; all its copies in all versions keep it; never reused, unlike slots

    static void* operator new(size_t bytes) {
        if (void* memory = host_allocate(bytes)) return memory;
        throw std::bad_alloc();
    }
    static void operator delete(void* memory) noexcept { host_free(memory); }

    void up() noexcept { count.up(); }
    static void drop(Node* node) noexcept;
    // A copy that carries `epoch` and shares the chunks.
    Node* copy(Epoch epoch) const;
    // Calls f(Value) for each value in the container.
    template <class Function>
    void for_each_value(Function&& f) const;

  protected:
    Node(Kind kind, Epoch epoch, Epoch birth) noexcept : kind(kind), epoch(epoch), birth(birth) {}
    ~Node() = default;
};

using Values = RadixArray<Value, 4, true>;
using Released = std::vector<Value>;

struct ListNode : Node {
    explicit ListNode(Epoch epoch) noexcept : Node(Kind::List, epoch, epoch_as_birth()) {}
    ListNode(Epoch epoch, const ListNode& other) noexcept : Node(Kind::List, epoch, other.birth), items(other.items) {}

    Values items;  // in order

  private:
    static Epoch epoch_as_birth() noexcept { return next_epoch(); }
};

// A tuple that holds containers; a tuple of leaves is itself a leaf. Nothing writes to it once it is built.
struct TupleNode : Node {
    explicit TupleNode(Epoch epoch, Leaf* type) noexcept : Node(Kind::Tuple, epoch, next_epoch()), type(type) {
        if (type) retain(type);
    }
    TupleNode(Epoch epoch, const TupleNode& other) noexcept
        : Node(Kind::Tuple, epoch, other.birth), items(other.items), type(other.type) {
        if (type) retain(type);
    }
    ~TupleNode() {
        if (type) release(type);
    }

    Values items;      // in order
    Leaf* const type;  // the named tuple's class; null for a plain tuple
};

// An insertion-ordered dict: entries in order, with erased ones in between. More than kScanned entries also get an
// open-addressing index of their places.
struct DictNode : Node {
    static constexpr size_t kScanned = 8;            // largest number of entries without an index
    static constexpr size_t kMissing = ~size_t{0};   // results of find: no such key,
    static constexpr size_t kAgain = kMissing - 1;   // the dict changed meanwhile: search again,
    static constexpr size_t kFailed = kMissing - 2;  // `equal` failed

    explicit DictNode(Epoch epoch) noexcept : Node(Kind::Dict, epoch, next_epoch()) {}
    DictNode(Epoch epoch, const DictNode& other) noexcept
        : Node(Kind::Dict, epoch, other.birth),
          entries(other.entries),
          index(other.index),
          live(other.live),
          taken(other.taken),
          changes(other.changes) {}

    size_t size() const noexcept { return live; }

    // The place of the entry, or kMissing. Compares keys by identity first, and if the hashes agree by equal(Leaf*).
    // `equal` returns 1, 0, or a negative number to stop: -1 gives kFailed, -2 gives kAgain.
    template <class Equal>
    size_t find(int64_t hash, const Leaf* key, Equal&& equal) const;

    // Whether another entry has the key of the one at `place`. Counts the entries that it looks at in `steps`.
    template <class Equal>
    bool is_twice(size_t place, Equal&& equal, size_t& steps) const;

    // The entry whose key is this very object. Searches only dicts without an index; for others it returns null.
    const Entry* find_identical(const Leaf* key) const noexcept {
        if (!index.empty() || entries.empty()) return nullptr;
        const auto run = entries.run(0);
        for (size_t place = 0; place < run.count; ++place) {
            if (run.items[place].key == key) return &run.items[place];
        }
        return nullptr;
    }
    // Appends an entry for a key that the dict does not have. Takes over the references of key and value.
    void insert(int64_t hash, Leaf* key, Value value);
    // Removes the entry. The caller gets its references.
    Entry erase(size_t place);
    void clear() noexcept {
        entries.clear();
        index.clear();
        live = taken = 0;
        ++changes;
    }
    // Takes entries that were built elsewhere, `living` of them not erased. `like`, if not null, is a similar dict;
    // this one shares as much of its index as possible.
    size_t assemble(const RadixArray<Entry, 5>& whole, size_t living, const DictNode* like, size_t most);
    // The first live place at or after `place`, or entries.size().
    size_t next(size_t place) const noexcept;

    RadixArray<Entry, 5> entries;   // in order of insertion, erased ones included
    RadixArray<uint32_t, 8> index;  // 0: free, 1: erased, else place in `entries` + 2
    uint32_t live = 0;              // entries that are not erased
    uint32_t taken = 0;             // index cells that are not free; a search ends at a free cell, so some must be left
    uint32_t changes = 0;           // counts changes of the set of keys; changed values do not count

  private:
    static size_t bucket(int64_t hash, size_t mask) noexcept {
        return static_cast<size_t>((static_cast<uint64_t>(hash) * 0x9E3779B97F4A7C15u) >> 20) & mask;
    }
    void rebuild();
    size_t reindex(size_t most = SIZE_MAX);           // returns its steps; with more than `most` it stops
    size_t put_in_index(int64_t hash, size_t place);  // returns its steps
    size_t bucket_of(int64_t hash, size_t place) const noexcept;
};

// An array of token ids.
struct TokensNode : Node {
    explicit TokensNode(Epoch epoch) noexcept : Node(Kind::Tokens, epoch, next_epoch()) {}
    TokensNode(Epoch epoch, const TokensNode& other) noexcept
        : Node(Kind::Tokens, epoch, other.birth), tokens(other.tokens) {}
    ~TokensNode() { forget(); }
    void forget() noexcept {
        if (cached) release(cached);
        cached = nullptr;
    }

    RadixArray<int32_t, 9> tokens;  // token ids
    Leaf* cached = nullptr;         // the host's flat copy of them, made on demand; null: not made yet
};

// An object that the store cannot look into. In the heap that owns the node it is the host's live object. In other
// heaps it is a snapshot, which is copied before it is handed out.
struct OpaqueNode : Node {
    OpaqueNode(Epoch epoch, Leaf* object, Leaf* policy) noexcept : OpaqueNode(epoch, next_epoch(), object, policy) {}
    OpaqueNode(Epoch epoch, Epoch birth, Leaf* object, Leaf* policy) noexcept
        : Node(Kind::Opaque, epoch, birth), object(object), policy(policy) {
        retain(object);
        retain(policy);
    }
    ~OpaqueNode() {
        release(object);
        release(policy);
    }

    Leaf* const object;  // the live object or the snapshot
    Leaf* const policy;  // the host's rule for copying it
};

// ---- inline ---------------------------------------------------------------------------------------------------------
template <class Function>
void Node::for_each_value(Function&& f) const {
    if (kind == Kind::Dict) {
        static_cast<const DictNode*>(this)->entries.for_each_chunk([&](const Entry* entries, size_t count) {
            for (size_t i = 0; i < count; ++i) {
                if (entries[i].key) f(entries[i].value);
            }
        });
    } else if (kind == Kind::List || kind == Kind::Tuple) {
        const Values& items =
            kind == Kind::List ? static_cast<const ListNode*>(this)->items : static_cast<const TupleNode*>(this)->items;
        items.for_each_chunk([&](const Value* values, size_t count) {
            for (size_t i = 0; i < count; ++i) f(values[i]);
        });
    }
}

template <class Equal>
size_t DictNode::find(int64_t hash, const Leaf* key, Equal&& equal) const {
    const auto check = [&](const Entry& entry) -> int {
        if (entry.key == key) return 1;
        return entry.key && entry.hash == hash ? equal(entry.key) : 0;
    };
    // A small dict: look for the key object itself, then for an equal key.
    if (index.empty()) {
        const size_t count = entries.size();
        if (count == 0) return kMissing;
        const Entry* all = entries.run(0).items;
        for (size_t place = 0; place < count; ++place) {
            if (all[place].key == key) return place;
        }
        // `equal` may run the host's code, which may change the dict: read everything again after each call.
        for (size_t place = 0; place < entries.size(); ++place) {
            const int found = check(entries[place]);
            if (found > 0) return place;
            if (found < 0) return found == -1 ? kFailed : kAgain;
        }
        return kMissing;
    }
    // Probe the index up to the first free cell.
    const size_t mask = index.size() - 1;
    for (size_t at = bucket(hash, mask);; at = (at + 1) & mask) {
        const uint32_t held = index[at];
        if (held == 0) return kMissing;
        if (held == 1) continue;
        const int found = check(entries[held - 2]);
        if (found > 0) return held - 2;
        if (found < 0) return found == -1 ? kFailed : kAgain;
    }
}

template <class Equal>
bool DictNode::is_twice(size_t place, Equal&& equal, size_t& steps) const {
    const Entry mine = entries[place];
    const auto has_key = [&](size_t other) {
        ++steps;
        const Entry entry = entries[other];
        return other != place && entry.key && entry.hash == mine.hash && (entry.key == mine.key || equal(entry.key));
    };
    if (index.empty()) {
        for (size_t other = 0; other < entries.size(); ++other) {
            if (has_key(other)) return true;
        }
        return false;
    }
    const size_t mask = index.size() - 1;
    for (size_t at = bucket(mine.hash, mask); index[at] != 0; at = (at + 1) & mask) {
        if (index[at] > 1 && has_key(index[at] - 2)) return true;
    }
    return false;
}

}  // namespace turnwise::state
