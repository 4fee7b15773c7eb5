// One version of a state: a persistent table from slots to containers, and the root. A fork copies a heap and gives
// both sides a new epoch, so that neither writes what the other sees.
#pragma once

#include <vector>

#include "state/node.h"

namespace turnwise::state {

// A place of the table: a container, or a link in the chain of free slots.
struct Place {
    uintptr_t word = 0;  // the address of a Node, 0, or next free slot << 1 | 1

    Node* node() const noexcept { return word & 1 ? nullptr : reinterpret_cast<Node*>(word); }
    SlotIndex next_free() const noexcept { return static_cast<SlotIndex>(word >> 1); }
    static Place of(Node* node) noexcept { return {reinterpret_cast<uintptr_t>(node)}; }
    static Place free(SlotIndex next) noexcept { return {uintptr_t{next} << 1 | 1}; }
};

template <>
struct ItemPolicy<Place> {
    static constexpr bool counted = true;
    static void take(const Place& place) noexcept {
        if (Node* node = place.node()) node->up();
    }
    static void drop(const Place& place) noexcept { Node::drop(place.node()); }
};

class Heap {
  public:
    using Table = RadixArray<Place, 3>;

    Heap() noexcept : epoch_(next_epoch()) {}
    Heap(const Heap&) = delete;
    Heap& operator=(const Heap&) = delete;
    ~Heap() { clear(); }

    // Makes `child` another version with the same contents, in constant time.
    void fork_into(Heap& child) noexcept;
    // Replaces this heap's contents by those of `version`, and the free slots too: `add` may give out slots that only
    // the old contents used.
    void restore(Heap& version) noexcept;
    void clear() noexcept;
    // Takes a table that was built elsewhere and holds `containers` containers. Takes over the reference of `root`.
    void assemble(const Table& table, Value root, SlotIndex free, size_t containers) noexcept;

    Epoch epoch() const noexcept { return epoch_; }
    // Changes whenever a slot gets another node. A pointer to a node is valid as long as the stamp does not change.
    uint64_t stamp() const noexcept { return stamp_; }
    const Table& table() const noexcept { return table_; }
    SlotIndex first_free() const noexcept { return free_; }

    Value root() const noexcept { return root_; }
    // Takes over the reference of `root`. The caller gets the old root and its reference.
    Value exchange_root(Value root) noexcept { return std::exchange(root_, root); }

    // The container in a slot; null if there is none.
    Node* at(SlotIndex slot) const noexcept { return slot < table_.size() ? table_[slot].node() : nullptr; }
    bool owns(const Node* node) const noexcept { return node->epoch == epoch_; }
    // The container in a slot, for writing: copies it first unless this heap owns it.
    template <class NodeType>
    NodeType* own(SlotIndex slot) {
        Node* node = table_[slot].node();
        return static_cast<NodeType*>(owns(node) ? node : own_copy(slot, node));
    }
    // Puts `node` into a free slot and takes over its reference.
    SlotIndex add(Node* node);
    // `plan` returns the slots that the next calls of `add` will return, without adding anything.
    struct Cursor {
        SlotIndex free;  // head of the chain of free slots, or kNoSlot
        SlotIndex end;   // the first slot after the table
    };
    Cursor cursor() const noexcept { return {free_, static_cast<SlotIndex>(table_.size())}; }
    SlotIndex plan(Cursor& cursor) const noexcept;
    // Replaces the node in a slot. Takes over the reference of `node`.
    void replace(SlotIndex slot, Node* node);

    // Number of containers added since the last collection.
    size_t added() const noexcept { return added_; }
    // True once more containers were added than the last collection kept.
    bool wants_collection() const noexcept { return added_ > 64 && added_ > kept_; }
    // Frees every container that can't be reached from the root or from `roots`. Returns their number.
    size_t collect(const std::vector<SlotIndex>& roots);
    // Marks the slots that can be reached from the root or from `roots`; `marked` is indexed by slot.
    void mark(std::vector<bool>& marked, std::vector<SlotIndex> roots) const;

  private:
    Node* own_copy(SlotIndex slot, Node* node);

    Table table_;               // slot -> container
    Value root_;                // holds a reference
    Epoch epoch_;               // what this heap may write carries it
    uint64_t stamp_ = 1;        // see stamp()
    SlotIndex free_ = kNoSlot;  // head of the chain of free slots
    uint32_t added_ = 0;        // containers added since the last collection
    uint32_t kept_ = 0;         // containers that the last collection kept
};

}  // namespace turnwise::state
