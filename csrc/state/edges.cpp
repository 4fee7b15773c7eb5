#include "state/edges.h"

#include <algorithm>
#include <memory>

namespace turnwise::state {
namespace {

// The items of a list or tuple; null for other nodes.
const Values* items_of(const Node* node) {
    if (node && node->kind == Kind::List) return &static_cast<const ListNode*>(node)->items;
    return node && node->kind == Kind::Tuple ? &static_cast<const TupleNode*>(node)->items : nullptr;
}

const RadixArray<Entry, 5>* entries_of(const Node* node) {
    return node && node->kind == Kind::Dict ? &static_cast<const DictNode*>(node)->entries : nullptr;
}

Value value_at(const Node* node, size_t place) {
    if (const auto* entries = entries_of(node)) {
        return place < entries->size() && (*entries)[place].key ? (*entries)[place].value : Value();
    }
    const Values* items = items_of(node);
    return items && place < items->size() ? (*items)[place] : Value();
}

// A node with the same references that nobody writes. Only dicts and lists have one, and a dict has no index; other
// nodes that are written have no references.
Node* frozen(const Node* node, Epoch epoch, Epoch fresh) {
    if (node->kind == Kind::Dict) {
        auto copy = std::make_unique<DictNode>(fresh);
        copy->entries = static_cast<const DictNode*>(node)->entries.frozen(epoch, fresh);
        return copy.release();
    }
    if (node->kind != Kind::List) return nullptr;
    auto copy = std::make_unique<ListNode>(fresh);
    copy->items = static_cast<const ListNode*>(node)->items.frozen(epoch, fresh);
    return copy.release();
}

Heap::Table frozen(const Heap& heap) {
    const Epoch fresh = next_epoch();
    Heap::Table table = heap.table().frozen(heap.epoch(), fresh);
    table.for_each_owned_chunk(fresh, [&](Place* places, size_t count) {
        for (size_t i = 0; i < count; ++i) {
            Node* node = places[i].node();
            if (!node || !heap.owns(node)) continue;
            places[i] = Place::of(frozen(node, heap.epoch(), fresh));
            Node::drop(node);
        }
    });
    return table;
}

}  // namespace

void Edges::add(Value value, SlotIndex parent, size_t place) {
    if (!value.is_slot()) return;
    if (value.slot() >= first_.size()) first_.resize(std::max(size_t{value.slot()} + 1, 2 * first_.size()), 0);
    uint32_t& first = first_[value.slot()];
    edges_.push_back({parent, static_cast<uint32_t>(place), first});
    first = static_cast<uint32_t>(edges_.size());
}

void Edges::learn(SlotIndex slot, const Node* node, const Node* known) {
    if (const auto* entries = entries_of(node)) {
        const auto* before = entries_of(known);
        RadixArray<Entry, 5>::compare(*entries, before ? *before : RadixArray<Entry, 5>(),
                                      [&](size_t place, const Entry* entry, const Entry*) {
                                          if (entry && entry->key) add(entry->value, slot, place);
                                      });
    } else if (const Values* items = items_of(node)) {
        const Values* before = items_of(known);
        Values::compare(*items, before ? *before : Values(), [&](size_t place, const Value* value, const Value*) {
            if (value) add(*value, slot, place);
        });
    }
}

void Edges::learn(const Heap& heap) {
    Heap::Table::compare(heap.table(), known_, [&](size_t slot, const Place* ours, const Place* known) {
        const Node* node = ours ? ours->node() : nullptr;
        const Node* before = known ? known->node() : nullptr;
        if (node && node != before) learn(static_cast<SlotIndex>(slot), node, before);
    });
}

void Edges::move_to(const Heap& heap) {
    const bool again = known_.empty() || edges_.size() > most_;
    if (again) {
        known_.clear();
        first_.clear();
        edges_.clear();
    }
    learn(heap);
    if (again) most_ = 2 * edges_.size() + 1024;
    known_ = frozen(heap);
}

Edges::Marks Edges::differing(const Heap& ours, const Heap& theirs) {
    move_to(ours);
    Marks marks;
    std::vector<SlotIndex> open;
    Heap::Table::compare(ours.table(), theirs.table(), [&](size_t slot, const Place* left, const Place* right) {
        if ((left ? left->node() : nullptr) == (right ? right->node() : nullptr)) return;
        marks.try_emplace(static_cast<SlotIndex>(slot));
        open.push_back(static_cast<SlotIndex>(slot));
    });
    // Walk from the differing slots to everything that leads to them in `ours`. What leads there in `theirs` alone
    // differs itself. An edge of another version leads nowhere.
    while (!open.empty()) {
        const SlotIndex child = open.back();
        open.pop_back();
        for (uint32_t at = child < first_.size() ? first_[child] : 0; at; at = edges_[at - 1].next) {
            const auto [parent, place, next] = edges_[at - 1];
            if (value_at(ours.at(parent), place) != Value::of(child)) continue;
            const auto [found, is_new] = marks.try_emplace(parent);
            found->second.push_back(place);
            if (is_new) open.push_back(parent);
        }
    }
    return marks;
}

}  // namespace turnwise::state
