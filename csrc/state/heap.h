// One version of a state: a persistent table from slots to containers, and the root. Copying a heap is a fork; both
// sides must then take a new epoch, so that neither writes what the other sees.
#pragma once

#include <vector>

#include "state/node.h"

namespace turnwise::state {

// A place of the table: a container, or a link of the chain of free slots.
struct Place {
    uintptr_t word = 0;

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

    // Another version with the same contents, in constant time.
    void fork_into(Heap& child) noexcept;
    // This heap takes the contents of `version`; slots that only this one had are not given out again before `collect`.
    void restore(Heap& version) noexcept;
    void clear() noexcept;
    // Takes over a table that was put together elsewhere, `containers` of them in it, and the reference of `root`.
    void assemble(const Table& table, Value root, SlotIndex free, size_t containers) noexcept;

    Epoch epoch() const noexcept { return epoch_; }
    // Changes whenever the table holds another node than before: a pointer to a node is good as long as this stands
    // still.
    uint64_t stamp() const noexcept { return stamp_; }
    const Table& table() const noexcept { return table_; }
    SlotIndex first_free() const noexcept { return free_; }

    Value root() const noexcept { return root_; }
    // Takes over the reference of `root` and hands that of the old one to the caller.
    Value exchange_root(Value root) noexcept { return std::exchange(root_, root); }

    // Null for a slot that holds nothing.
    Node* at(SlotIndex slot) const noexcept { return slot < table_.size() ? table_[slot].node() : nullptr; }
    bool owns(const Node* node) const noexcept { return node->epoch == epoch_; }
    // The container, for writing.
    template <class NodeType>
    NodeType* own(SlotIndex slot) {
        Node* node = table_[slot].node();
        return static_cast<NodeType*>(owns(node) ? node : own_copy(slot, node));
    }
    // Takes over the reference of `node`.
    SlotIndex add(Node* node);
    // The slots that the next calls of `add` will give, without adding anything.
    struct Cursor {
        SlotIndex free;  // head of the chain of free slots
        SlotIndex end;   // the first slot behind the table
    };
    Cursor cursor() const noexcept { return {free_, static_cast<SlotIndex>(table_.size())}; }
    SlotIndex plan(Cursor& cursor) const noexcept;
    // Puts `node` where another was; takes over its reference.
    void replace(SlotIndex slot, Node* node);

    // How many containers were added since the last collection, and how many it left.
    size_t added() const noexcept { return added_; }
    bool wants_collection() const noexcept { return added_ > 64 && added_ > kept_; }
    // Frees every container that can't be reached from the root or from `roots`. Returns how many went.
    size_t collect(const std::vector<SlotIndex>& roots);
    // Marks what can be reached; `marked` is indexed by slot.
    void mark(std::vector<bool>& marked, std::vector<SlotIndex> roots) const;

    // Which slots hold a container that differs from the other heap's, or that leads to such a one; indexed by slot.
    std::vector<bool> differing(const Heap& other) const;

  private:
    Node* own_copy(SlotIndex slot, Node* node);

    Table table_;
    Value root_;
    Epoch epoch_;
    uint64_t stamp_ = 1;
    SlotIndex free_ = kNoSlot;
    uint32_t added_ = 0;
    uint32_t kept_ = 0;
};

}  // namespace turnwise::state
