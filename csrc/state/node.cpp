#include "state/node.h"

namespace turnwise::state {

Epoch next_epoch() noexcept {
#ifdef TURNWISE_STATE_THREADS
    static std::atomic<Epoch> last{0};
#else
    static Epoch last = 0;
#endif
    return ++last;
}

void Node::drop(Node* node) noexcept {
    if (!node || !node->count.down()) return;
    switch (node->kind) {
        case Kind::Dict:
            delete static_cast<DictNode*>(node);
            break;
        case Kind::List:
            delete static_cast<ListNode*>(node);
            break;
        case Kind::Tuple:
            delete static_cast<TupleNode*>(node);
            break;
        case Kind::Tokens:
            delete static_cast<TokensNode*>(node);
            break;
        case Kind::Opaque:
            delete static_cast<OpaqueNode*>(node);
            break;
    }
}

Node* Node::copy(Epoch epoch) const {
    switch (kind) {
        case Kind::Dict:
            return new DictNode(epoch, *static_cast<const DictNode*>(this));
        case Kind::List:
            return new ListNode(epoch, *static_cast<const ListNode*>(this));
        case Kind::Tuple:
            return new TupleNode(epoch, *static_cast<const TupleNode*>(this));
        case Kind::Tokens:
            return new TokensNode(epoch, *static_cast<const TokensNode*>(this));
        case Kind::Opaque: {
            const auto* opaque = static_cast<const OpaqueNode*>(this);
            return new OpaqueNode(epoch, birth, opaque->object, opaque->policy);
        }
    }
    return nullptr;
}

void DictNode::insert(int64_t hash, Leaf* key, Value value) {
    entries.push_back(Entry{hash, key, value}, epoch);
    ++live;
    ++changes;
    // The index is at most two thirds full, erased cells included, so that probes stay short.
    if (entries.size() > kScanned && (index.empty() || (taken + 1) * 3 > index.size() * 2)) {
        rebuild();
    } else if (!index.empty()) {
        put_in_index(hash, entries.size() - 1);
    }
}

Entry DictNode::erase(size_t place) {
    if (!index.empty()) index.own(bucket_of(entries[place].hash, place), epoch) = 1;
    Entry& held = entries.own(place, epoch);
    const Entry gone = held;
    held = Entry{0, nullptr, Value()};
    --live;
    ++changes;
    // Remove trailing erased entries at once; otherwise popitem in a loop would take quadratic time.
    while (!entries.empty() && entries[entries.size() - 1].key == nullptr) entries.pop_back(epoch);
    if (entries.empty()) {
        index.clear();
        taken = 0;
    } else if (entries.size() > kScanned && live * 2 < entries.size()) {
        rebuild();
    }
    return gone;
}

size_t DictNode::next(size_t place) const noexcept {
    while (place < entries.size() && entries[place].key == nullptr) ++place;
    return place;
}

// Drops the erased entries and makes a new index.
void DictNode::rebuild() {
    if (live < entries.size()) {
        RadixArray<Entry, 5> packed;
        entries.for_each_chunk([&](const Entry* chunk, size_t count) {
            for (size_t i = 0; i < count; ++i) {
                if (!chunk[i].key) continue;
                ItemPolicy<Entry>::take(chunk[i]);
                packed.push_back(chunk[i], epoch);
            }
        });
        entries.swap(packed);
    }
    reindex();
}

size_t DictNode::reindex(size_t most) {
    index.clear();
    taken = 0;
    if (entries.size() <= kScanned) return 0;
    size_t buckets = 16;
    while (buckets < entries.size() * 3) buckets *= 2;
    if (buckets > most) return buckets;
    for (size_t i = 0; i < buckets; ++i) index.push_back(0, epoch);
    size_t place = 0, steps = buckets;
    entries.for_each_chunk([&](const Entry* chunk, size_t count) {
        for (size_t i = 0; i < count && steps <= most; ++i, ++place) {
            if (chunk[i].key) steps += put_in_index(chunk[i].hash, place);
        }
    });
    return steps;
}

size_t DictNode::assemble(const RadixArray<Entry, 5>& whole, size_t living, const DictNode* like, size_t most) {
    entries = whole;
    live = static_cast<uint32_t>(living);
    if (entries.size() <= kScanned || !like || like->index.empty()) return reindex(most);
    // Start with the other dict's index and correct it where the keys differ.
    index = like->index;
    taken = like->taken;
    bool full = false;
    size_t steps = 0;
    RadixArray<Entry, 5>::compare(entries, like->entries, [&](size_t place, const Entry* ours, const Entry* theirs) {
        const Leaf* old_key = theirs ? theirs->key : nullptr;
        const Leaf* new_key = ours ? ours->key : nullptr;
        ++steps;
        if (full || steps > most || old_key == new_key) return;
        if (old_key) index.own(bucket_of(theirs->hash, place), epoch) = 1;
        if (new_key) steps += put_in_index(ours->hash, place);
        full = (taken + 1) * 3 > index.size() * 2;
    });
    if (full && steps <= most) steps += reindex(most - steps);
    return steps;
}

size_t DictNode::put_in_index(int64_t hash, size_t place) {
    const size_t mask = index.size() - 1;
    size_t at = bucket(hash, mask), steps = 1;
    for (; index[at] > 1; ++steps) at = (at + 1) & mask;
    uint32_t& held = index.own(at, epoch);
    if (held == 0) ++taken;
    held = static_cast<uint32_t>(place + 2);
    return steps;
}

size_t DictNode::bucket_of(int64_t hash, size_t place) const noexcept {
    const size_t mask = index.size() - 1;
    size_t at = bucket(hash, mask);
    while (index[at] != place + 2) at = (at + 1) & mask;
    return at;
}

}  // namespace turnwise::state
