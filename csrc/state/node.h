// The containers of a heap. Nodes refer to each other by slot, never by pointer, so that none owns another: cycles cost
// nothing, and freeing one never recurses.
#pragma once

#include <string>
#include <vector>

#include "state/counted.h"
#include "state/radix_array.h"
#include "state/value.h"

namespace turnwise::state {

struct Entry {
    int64_t hash;  // of the key, as the host gave it
    Leaf* key;     // null where the entry was erased
    Value value;
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

enum class Kind : uint8_t { Dict, List, Tuple, Tokens, Opaque };

struct Node {
    Count count;  // references from tables of heaps
    const Kind kind;
    bool pending = false;  // in the owner's list of nodes to settle before the next fork
    Epoch epoch;           // of the heap that may write to it
    const Epoch birth;  // the container's identity, kept by all its copies in all versions; unlike slots never reused

    static void* operator new(size_t bytes) {
        if (void* memory = host_allocate(bytes)) return memory;
        throw std::bad_alloc();
    }
    static void operator delete(void* memory) noexcept { host_free(memory); }

    void up() noexcept { count.up(); }
    static void drop(Node* node) noexcept;
    // A copy that bears `epoch` and shares the chunks.
    Node* copy(Epoch epoch) const;
    // Calls f(Value) for each value that it holds.
    template <class Function>
    void for_each_value(Function&& f) const;

  protected:
    Node(Kind kind, Epoch epoch, Epoch birth) noexcept : kind(kind), epoch(epoch), birth(birth) {}
    ~Node() = default;
};

using Values = RadixArray<Value, 4>;
using Released = std::vector<Value>;

struct ListNode : Node {
    explicit ListNode(Epoch epoch) noexcept : Node(Kind::List, epoch, epoch_as_birth()) {}
    ListNode(Epoch epoch, const ListNode& other) noexcept : Node(Kind::List, epoch, other.birth), items(other.items) {}

    Values items;

  private:
    static Epoch epoch_as_birth() noexcept { return next_epoch(); }
};

// A tuple that holds containers. (Tuples of leaves alone are leaves.) Never written after it was made.
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

    Values items;
    Leaf* const type;  // the named tuple's class, or null
};

// Insertion-ordered: entries in order, erased ones in between; beyond a few, an open-addressing index of their places.
struct DictNode : Node {
    static constexpr size_t kScanned = 8;
    static constexpr size_t kMissing = ~size_t{0};
    static constexpr size_t kAgain = kMissing - 1;
    static constexpr size_t kFailed = kMissing - 2;

    explicit DictNode(Epoch epoch) noexcept : Node(Kind::Dict, epoch, next_epoch()) {}
    DictNode(Epoch epoch, const DictNode& other) noexcept
        : Node(Kind::Dict, epoch, other.birth),
          entries(other.entries),
          index(other.index),
          live(other.live),
          taken(other.taken),
          changes(other.changes) {}

    size_t size() const noexcept { return live; }

    // The place of the entry, or kMissing. Keys are compared by identity first, then, where hashes agree, by
    // equal(Leaf*) -> 1 or 0, or a negative number to stop: -1 gives kFailed, -2 kAgain (the dict changed meanwhile).
    template <class Equal>
    size_t find(int64_t hash, const Leaf* key, Equal&& equal) const;

    // The entry of this very key object in a dict that has no index; null says nothing about dicts with one.
    const Entry* find_identical(const Leaf* key) const noexcept {
        if (!index.empty() || entries.empty()) return nullptr;
        const auto run = entries.run(0);
        for (size_t place = 0; place < run.count; ++place) {
            if (run.items[place].key == key) return &run.items[place];
        }
        return nullptr;
    }
    // Appends an entry whose key is not there yet; takes over the references of key and value.
    void insert(int64_t hash, Leaf* key, Value value);
    // Removes the entry and hands its references to the caller.
    Entry erase(size_t place);
    void clear() noexcept {
        entries.clear();
        index.clear();
        live = taken = 0;
        ++changes;
    }
    // Takes over entries that were put together elsewhere, `living` of them not erased. `like`, if there is one, is a
    // dict of which much is the same: what can be shared of its index is.
    void assemble(const RadixArray<Entry, 5>& whole, size_t living, const DictNode* like);
    // The first live place at or after `place`, or entries.size().
    size_t next(size_t place) const noexcept;

    RadixArray<Entry, 5> entries;
    RadixArray<uint32_t, 8> index;  // 0: free, 1: erased, else a place + 2
    uint32_t live = 0;
    uint32_t taken = 0;    // places of the index that are not free: probes end at a free one, so some must be left
    uint32_t changes = 0;  // of the set of keys, not of values

  private:
    static size_t bucket(int64_t hash, size_t mask) noexcept {
        return static_cast<size_t>((static_cast<uint64_t>(hash) * 0x9E3779B97F4A7C15u) >> 20) & mask;
    }
    void rebuild();
    void reindex();
    void put_in_index(int64_t hash, size_t place);
    size_t bucket_of(int64_t hash, size_t place) const noexcept;
};

// Token ids. `cached` is the host's flat copy of them, made when asked for.
struct TokensNode : Node {
    explicit TokensNode(Epoch epoch) noexcept : Node(Kind::Tokens, epoch, next_epoch()) {}
    TokensNode(Epoch epoch, const TokensNode& other) noexcept
        : Node(Kind::Tokens, epoch, other.birth), tokens(other.tokens) {}
    ~TokensNode() { forget(); }
    void forget() noexcept {
        if (cached) release(cached);
        cached = nullptr;
    }

    RadixArray<int32_t, 9> tokens;
    Leaf* cached = nullptr;  // null: not made yet
};

// An object that the store cannot look into. In the heap of its epoch it is the host's live object; in other heaps it
// is a snapshot, which is copied before it is handed out.
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

    Leaf* const object;
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
    if (index.empty()) {
        const size_t count = entries.size();
        if (count == 0) return kMissing;
        const Entry* all = entries.run(0).items;
        for (size_t place = 0; place < count; ++place) {
            if (all[place].key == key) return place;
        }
        // `equal` may run the host's code, so nothing is remembered across it.
        for (size_t place = 0; place < entries.size(); ++place) {
            const int found = check(entries[place]);
            if (found > 0) return place;
            if (found < 0) return found == -1 ? kFailed : kAgain;
        }
        return kMissing;
    }
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

}  // namespace turnwise::state
