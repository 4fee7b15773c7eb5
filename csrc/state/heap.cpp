#include "state/heap.h"

namespace turnwise::state {

void Heap::fork_into(Heap& child) noexcept {
    child.clear();
    child.table_ = table_;
    child.root_ = root_;
    root_.take();
    child.free_ = free_;
    child.added_ = added_;
    child.kept_ = kept_;
    child.epoch_ = next_epoch();
    epoch_ = next_epoch();
}

void Heap::restore(Heap& version) noexcept {
    const uint64_t stamp = stamp_;
    version.fork_into(*this);
    stamp_ = stamp + 1;
}

void Heap::clear() noexcept {
    Table gone;
    table_.swap(gone);
    ++stamp_;
    free_ = kNoSlot;
    added_ = kept_ = 0;
    std::exchange(root_, Value()).drop();
}

void Heap::assemble(const Table& table, Value root, SlotIndex free, size_t containers) noexcept {
    clear();
    table_ = table;
    root_ = root;
    free_ = free;
    kept_ = static_cast<uint32_t>(containers);
}

Node* Heap::own_copy(SlotIndex slot, Node* node) {
    Place& place = table_.own(slot, epoch_);
    Node* copy = node->copy(epoch_);
    place = Place::of(copy);
    ++stamp_;
    Node::drop(node);
    return copy;
}

SlotIndex Heap::add(Node* node) {
    ++added_;
    if (free_ == kNoSlot) {
        table_.push_back(Place::of(node), epoch_);
        return static_cast<SlotIndex>(table_.size() - 1);
    }
    const SlotIndex slot = free_;
    Place& place = table_.own(slot, epoch_);
    free_ = place.next_free();
    place = Place::of(node);
    ++stamp_;
    return slot;
}

SlotIndex Heap::plan(Cursor& cursor) const noexcept {
    if (cursor.free == kNoSlot) return cursor.end++;
    return std::exchange(cursor.free, table_[cursor.free].next_free());
}

void Heap::replace(SlotIndex slot, Node* node) {
    Place& place = table_.own(slot, epoch_);
    Node* gone = place.node();
    place = Place::of(node);
    ++stamp_;
    Node::drop(gone);
}

void Heap::mark(std::vector<bool>& marked, std::vector<SlotIndex> open) const {
    marked.assign(table_.size(), false);
    if (root_.is_slot()) open.push_back(root_.slot());
    while (!open.empty()) {
        const SlotIndex slot = open.back();
        open.pop_back();
        const Node* node = at(slot);
        if (!node || marked[slot]) continue;
        marked[slot] = true;
        node->for_each_value([&](Value value) {
            if (value.is_slot()) open.push_back(value.slot());
        });
    }
}

size_t Heap::collect(const std::vector<SlotIndex>& roots) {
    std::vector<bool> marked;
    mark(marked, roots);
    size_t freed = 0;
    kept_ = 0;
    added_ = 0;
    // Backwards, so that the chain of free slots starts with the low ones.
    for (size_t slot = marked.size(); slot-- > 0;) {
        Node* node = at(static_cast<SlotIndex>(slot));
        if (!node) continue;
        if (marked[slot]) {
            ++kept_;
            continue;
        }
        replace(static_cast<SlotIndex>(slot), nullptr);
        table_.own(slot, epoch_) = Place::free(free_);
        free_ = static_cast<SlotIndex>(slot);
        ++freed;
    }
    return freed;
}

}  // namespace turnwise::state
