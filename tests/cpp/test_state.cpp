// The state store without Python: run by test_state.py, under sanitizers by `make test-sanitize`. One line per failure,
// exit status 1 if there is any; the seeds are fixed, and printed with a failure.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "state/account.h"
#include "state/heap.h"
#include "state_leaves.h"

// ---- RadixArray -----------------------------------------------------------------------------------------------------
// The number of items below a block. A regular block has regular children, all full but the last. A relaxed one has
// the right ends, and no child is empty.
template <class Tree>
static size_t checked_size(typename Tree::Block* block, unsigned height) {
    EXPECT(block->used > 0 && block->used <= block->capacity && block->capacity <= Tree::most(height));
    if (height == 0) return block->used;
    size_t size = 0;
    for (size_t i = 0; i < block->used; ++i) {
        auto* child = block->children()[i];
        const size_t part = checked_size<Tree>(child, height - 1);
        size += part;
        if (block->relaxed) {
            EXPECT(block->ends()[i] == size);
        } else {
            EXPECT(!child->relaxed && (i + 1 == block->used || part == Tree::full_size(height - 1)));
        }
    }
    return size;
}

template <unsigned kBits, bool kRelaxes>
struct Copies {
    using Array = RadixArray<Value, kBits, kRelaxes>;
    struct Copy {
        Array array;
        std::vector<Leaf*> model;
        Epoch epoch;
    };
    std::vector<Copy> copies;

    void check() const {
        for (const Copy& copy : copies) {
            EXPECT(copy.array.size() == copy.model.size());
            if (!copy.array.empty()) {
                const size_t size = checked_size<typename Array::Tree>(copy.array.root(), copy.array.height());
                EXPECT(size == copy.model.size());
            }
            size_t at = 0;
            copy.array.for_each_chunk([&](const Value* values, size_t count) {
                for (size_t i = 0; i < count; ++i, ++at) EXPECT(values[i].leaf() == copy.model[at]);
            });
            EXPECT(at == copy.model.size());
            for (size_t i = 0; i < copy.model.size(); i += 7) EXPECT(copy.array[i].leaf() == copy.model[i]);
        }
    }
};

// Single items come and go at a place: the front, the back, one in the middle, or others each time.
template <class Copy>
static void write_singly(Random& random, Leaves& leaves, Copy& copy, size_t times) {
    auto& [array, model, epoch] = copy;
    const size_t place = random() % 5, mostly = random() % 3;
    const size_t middle = random();
    for (; times > 0; --times) {
        const size_t size = model.size();
        const bool adds = size == 0 || (mostly == 2 ? random() % 2 : mostly);
        const size_t bound = size + adds;
        const size_t at = place == 0 ? 0 : place == 1 ? bound - 1 : place == 2 ? middle % bound : below(random, bound);
        const size_t which = random();
        const Value item = Value::of(leaves[which]);
        if (adds) item.take();
        Released out;
        array.splice(at, !adds, &item, adds, epoch, out);
        EXPECT(out.size() == size_t(!adds));
        for (Value gone : out) {
            EXPECT(gone.leaf() == model[at]);
            gone.drop();
        }
        const auto position = model.begin() + std::ptrdiff_t(at);
        adds ? void(model.insert(position, leaves[which])) : void(model.erase(position));
    }
}

template <unsigned kBits, bool kRelaxes>
static void test_array(int steps, size_t most) {
    Random random(seed);
    Leaves leaves(50);
    Copies<kBits, kRelaxes> all;
    bool met_relaxed = false;
    unsigned highest = 0;
    all.copies.push_back({{}, {}, next_epoch()});
    for (int step = 0; step < steps; ++step) {
        auto& [array, model, epoch] = all.copies[below(random, all.copies.size())];
        const size_t size = model.size();
        switch (random() % 10) {
            case 8:
            case 9:
                write_singly(random, leaves, all.copies[below(random, all.copies.size())],
                             below(random, kRelaxes ? most / 4 : 9));  // others move all that follows
                break;
            case 0:
            case 1:
                for (size_t i = below(random, most / 4); i-- > 0;) {
                    const size_t which = random();
                    array.push_back(Value::of(leaves.taken(which)), epoch);
                    model.push_back(leaves[which]);
                }
                break;
            case 2:
                for (size_t i = std::min(size, below(random, most / 4)); i-- > 0;) {
                    const Value gone = array.pop_back(epoch);
                    EXPECT(gone.leaf() == model.back());
                    gone.drop();
                    model.pop_back();
                }
                break;
            case 3:
                for (size_t i = 0; size && i < 5; ++i) {
                    const size_t at = below(random, size), which = random();
                    Value& item = array.own(at, epoch);
                    std::exchange(item, Value::of(leaves.taken(which))).drop();
                    model[at] = leaves[which];
                }
                break;
            case 4:
            case 5: {
                const size_t start = below(random, size + 1);
                const size_t removed =
                    below(random, random() % 2 ? std::min<size_t>(size - start, 3) + 1 : size - start + 1);
                const size_t count = below(random, random() % 2 ? 4 : most / 4);
                std::vector<Value> items;
                std::vector<Leaf*> put;
                for (size_t i = 0; i < count; ++i) {
                    const size_t which = random();
                    items.push_back(Value::of(leaves.taken(which)));
                    put.push_back(leaves[which]);
                }
                Released out;
                array.splice(start, removed, items.data(), count, epoch, out);
                EXPECT(out.size() == removed);
                for (size_t i = 0; i < out.size(); ++i) {
                    EXPECT(out[i].leaf() == model[start + i]);
                    out[i].drop();
                }
                const auto first = model.begin() + std::ptrdiff_t(start);
                model.erase(first, first + std::ptrdiff_t(removed));
                model.insert(model.begin() + std::ptrdiff_t(start), put.begin(), put.end());
                break;
            }
            case 6:
                if (random() % 4 == 0) {
                    array.clear();
                    model.clear();
                }
                break;
            case 7:
                if (all.copies.size() < 6) {
                    // Both sides get new epochs, as a fork gives them.
                    epoch = next_epoch();
                    all.copies.push_back({array, model, next_epoch()});
                } else {
                    all.copies.erase(all.copies.begin() + std::ptrdiff_t(below(random, 6)));
                }
                break;
        }
        for (auto& copy : all.copies) {
            if (copy.model.size() <= most) continue;
            copy.array.clear();
            copy.model.clear();
        }
        all.check();
        for (auto& copy : all.copies) {
            const bool relaxed = copy.array.root() && copy.array.root()->relaxed;
            met_relaxed = met_relaxed || relaxed;
            if (relaxed) highest = std::max(highest, copy.array.height());
        }
        // No chunk that bears an epoch is reached from a copy of another.
        for (auto& copy : all.copies) {
            size_t owned = 0;
            copy.array.for_each_owned_chunk(copy.epoch, [&](Value*, size_t count) { owned += count; });
            EXPECT(owned <= copy.model.size());
        }
    }
    EXPECT(met_relaxed == kRelaxes && (!kRelaxes || highest >= 2 || most < 2000));
    size_t held = 0;
    std::map<const void*, size_t> chunks;
    for (auto& copy : all.copies) {
        copy.array.for_each_chunk([&](const Value* values, size_t count) { chunks[values] = count; });
    }
    for (auto& [chunk, count] : chunks) held += count;
    EXPECT(leaves.held() == int(held));  // each chunk holds its leaves once
}

// ---- DictNode -------------------------------------------------------------------------------------------------------
struct Map {
    DictNode* node;
    std::vector<std::pair<long, long>> model;  // key and value, in order

    auto find(long key) {
        return std::find_if(model.begin(), model.end(), [&](const auto& pair) { return pair.first == key; });
    }
};

// Several keys to a hash, so that probes are long.
static int64_t hash_of(long key) {
    return key % 97 == 0 ? -1 : (key / 3) * 0x10001;
}

static size_t place_of(const DictNode* node, Leaves& keys, long key, bool by_identity) {
    static Leaf stranger;
    const Leaf* asked = by_identity ? keys[size_t(key)] : &stranger;
    return node->find(hash_of(key), asked, [&](Leaf* held) { return int(held->id == key); });
}

static void test_dict(int steps, long most) {
    Random random(seed);
    Leaves keys(size_t(most) + 1), values(31);
    std::vector<Map> maps;
    Epoch epoch = next_epoch();
    maps.push_back({new DictNode(epoch), {}});
    const auto put = [&](Map& map, long key) {
        const size_t value = random() % 31;
        const size_t place = place_of(map.node, keys, key, random() % 2);
        const auto known = map.find(key);
        EXPECT((place == DictNode::kMissing) == (known == map.model.end()));
        if (place == DictNode::kMissing) {
            map.node->insert(hash_of(key), keys.taken(size_t(key)), Value::of(values.taken(value)));
            map.model.emplace_back(key, long(value));
        } else {
            Entry& entry = map.node->entries.own(place, map.node->epoch);
            std::exchange(entry.value, Value::of(values.taken(value))).drop();
            known->second = long(value);
        }
    };
    const auto remove = [&](Map& map, long key) {
        const size_t place = place_of(map.node, keys, key, random() % 2);
        const auto known = map.find(key);
        EXPECT((place == DictNode::kMissing) == (known == map.model.end()));
        if (place == DictNode::kMissing) return;
        ItemPolicy<Entry>::drop(map.node->erase(place));
        map.model.erase(known);
    };
    for (int step = 0; step < steps; ++step) {
        Map& map = maps[below(random, maps.size())];
        const long low = long(below(random, size_t(most))),
                   span = 1 + long(below(random, random() % 2 ? 5 : size_t(most)));
        switch (random() % 6) {
            case 0:
            case 1:
                for (long key = low; key < std::min(low + span, most); ++key) put(map, key);
                break;
            case 2:
                for (long key = low; key < std::min(low + span, most); key += 1 + long(random() % 2)) remove(map, key);
                break;
            case 3:  // keys come and go at the end, the size stays: the index must not fill up with erased places
                for (int i = 0; i < 200; ++i) {
                    const long key = long(below(random, size_t(most)));
                    if (map.find(key) != map.model.end()) continue;
                    put(map, key);
                    if (random() % 8) remove(map, key);
                }
                break;
            case 4:
                if (random() % 6 == 0) {
                    map.node->clear();
                    map.model.clear();
                }
                break;
            case 5:
                if (maps.size() < 5) {
                    map.node->epoch = next_epoch();  // what both hold is nobody's own now
                    auto* copy = static_cast<DictNode*>(map.node->copy(next_epoch()));
                    EXPECT(copy->birth == map.node->birth);
                    auto model = map.model;
                    maps.push_back({copy, std::move(model)});
                } else {
                    const size_t gone = below(random, maps.size());
                    Node::drop(maps[gone].node);
                    maps.erase(maps.begin() + std::ptrdiff_t(gone));
                }
                break;
        }
        for (Map& each : maps) {
            EXPECT(each.node->size() == each.model.size());
            size_t place = each.node->next(0);
            for (auto& [key, value] : each.model) {
                EXPECT(place < each.node->entries.size());
                if (place >= each.node->entries.size()) break;
                const Entry& entry = each.node->entries[place];
                EXPECT(entry.key->id == key && entry.value.leaf()->id == value && entry.hash == hash_of(key));
                place = each.node->next(place + 1);
            }
            EXPECT(each.node->next(place) == each.node->entries.size());
            for (int i = 0; i < 10; ++i) {
                const long key = long(below(random, size_t(most)));
                const size_t found = place_of(each.node, keys, key, i % 2);
                EXPECT((found == DictNode::kMissing) == (each.find(key) == each.model.end()));
                EXPECT(found == DictNode::kMissing || each.node->entries[found].key->id == key);
            }
            // Erased entries don't pile up.
            EXPECT(each.node->entries.size() <= std::max<size_t>(DictNode::kScanned, 2 * each.node->size() + 1));
        }
    }
    for (Map& map : maps) Node::drop(map.node);
}

// ---- Heap -----------------------------------------------------------------------------------------------------------
// A model of a version: lists that hold leaves (>= 0) and other lists (~slot), by slot.
struct Version {
    std::unique_ptr<Heap> heap = std::make_unique<Heap>();
    std::map<SlotIndex, std::vector<long>> lists;
    std::map<SlotIndex, Epoch> births;
};

static std::vector<bool> reachable(const Version& version) {
    std::vector<bool> marked(version.heap->table().size());
    std::vector<SlotIndex> open{version.heap->root().slot()};
    while (!open.empty()) {
        const SlotIndex slot = open.back();
        open.pop_back();
        if (marked[slot]) continue;
        marked[slot] = true;
        for (long item : version.lists.at(slot)) {
            if (item < 0) open.push_back(SlotIndex(~item));
        }
    }
    return marked;
}

static void check_version(const Version& version) {
    for (auto& [slot, items] : version.lists) {
        const auto* node = static_cast<const ListNode*>(version.heap->at(slot));
        EXPECT(node && node->kind == Kind::List && node->birth == version.births.at(slot));
        if (!node) continue;
        EXPECT(node->items.size() == items.size());
        for (size_t i = 0; i < items.size(); ++i) {
            const Value value = node->items[i];
            EXPECT(items[i] < 0 ? value.is_slot() && value.slot() == SlotIndex(~items[i])
                                : value.is_leaf() && value.leaf()->id == items[i]);
        }
    }
}

static void test_heap(int steps) {
    Random random(seed);
    Leaves leaves(40);
    std::vector<Version> versions(1);
    const auto add_list = [](Version& version) {
        auto cursor = version.heap->cursor();
        const SlotIndex planned = version.heap->plan(cursor);
        auto* node = new ListNode(version.heap->epoch());
        const SlotIndex slot = version.heap->add(node);
        EXPECT(slot == planned);
        EXPECT(!version.lists.count(slot));  // a slot is given again only after it was freed
        version.lists[slot] = {};
        version.births[slot] = node->birth;
        return slot;
    };
    versions[0].heap->exchange_root(Value::of(add_list(versions[0]))).drop();
    for (int step = 0; step < steps; ++step) {
        Version& version = versions[below(random, versions.size())];
        Heap& heap = *version.heap;
        auto any = version.lists.begin();
        std::advance(any, std::ptrdiff_t(below(random, version.lists.size())));
        const SlotIndex slot = any->first;
        switch (random() % 7) {
            case 0:
            case 1: {  // a new list, or an old one at another place
                const SlotIndex inner = random() % 2 ? add_list(version) : version.lists.rbegin()->first;
                heap.own<ListNode>(slot)->items.push_back(Value::of(inner), heap.epoch());
                version.lists[slot].push_back(~long(inner));
                break;
            }
            case 2: {
                const uint64_t stamp = heap.stamp();
                const bool owned = heap.owns(heap.at(slot));
                for (size_t i = below(random, 20); i-- > 0;) {
                    const size_t which = random() % 40;
                    heap.own<ListNode>(slot)->items.push_back(Value::of(leaves.taken(which)), heap.epoch());
                    version.lists[slot].push_back(long(which));
                }
                EXPECT(!owned || heap.stamp() == stamp);
                break;
            }
            case 3: {
                auto& items = version.lists[slot];
                if (items.empty()) break;
                heap.own<ListNode>(slot)->items.pop_back(heap.epoch()).drop();
                items.pop_back();
                break;
            }
            case 4: {
                const auto marked = reachable(version);
                size_t gone = 0;
                for (auto at = version.lists.begin(); at != version.lists.end();) {
                    if (marked[at->first]) {
                        ++at;
                        continue;
                    }
                    version.births.erase(at->first);
                    at = version.lists.erase(at);
                    ++gone;
                }
                EXPECT(heap.collect({}) == gone);
                EXPECT(heap.collect({}) == 0);
                break;
            }
            case 5: {
                if (versions.size() >= 8) {
                    const size_t last = below(random, versions.size());
                    versions.erase(versions.begin() + std::ptrdiff_t(last));
                    break;
                }
                Version child;
                child.lists = version.lists;
                child.births = version.births;
                heap.fork_into(*child.heap);
                EXPECT(child.heap->epoch() != heap.epoch());
                versions.push_back(std::move(child));
                break;
            }
            case 6: {
                Version& from = versions[below(random, versions.size())];
                if (&from == &version || random() % 3) break;
                const uint64_t stamp = heap.stamp();
                heap.restore(*from.heap);
                EXPECT(heap.stamp() != stamp);
                version.lists = from.lists;
                version.births = from.births;
                break;
            }
        }
        for (const Version& each : versions) check_version(each);
    }
    Account account;
    for (const Version& each : versions) account.add(*each.heap);
    EXPECT(account.bytes() <= account.unshared_bytes());
}

// A long chain is forked, collected and freed without a recursion.
static void test_deep_chain() {
    Leaves leaves(1);
    Heap heap;
    SlotIndex below_it = kNoSlot;
    for (int i = 0; i < 300000; ++i) {
        auto* node = new ListNode(heap.epoch());
        node->items.push_back(below_it == kNoSlot ? Value::of(leaves.taken(0)) : Value::of(below_it), heap.epoch());
        below_it = heap.add(node);
    }
    heap.exchange_root(Value::of(below_it)).drop();
    {
        Heap child;
        heap.fork_into(child);
        EXPECT(heap.collect({}) == 0);
        heap.exchange_root(Value()).drop();
        EXPECT(heap.collect({}) == 300000);
        EXPECT(leaves[0]->count == 1);
        EXPECT(child.collect({}) == 0);
    }
    EXPECT(leaves[0]->count == 0);
}

#ifdef TURNWISE_STATE_THREADS
// Readers of a version that stands still, and writers of their own forks of it, all at once.
static void test_threads() {
    Leaves leaves(64);
    Heap commit;
    std::vector<SlotIndex> slots;
    for (int i = 0; i < 50; ++i) {
        auto* node = new ListNode(commit.epoch());
        for (size_t j = 0; j < 300; ++j) node->items.push_back(Value::of(leaves.taken(j)), commit.epoch());
        slots.push_back(commit.add(node));
    }
    std::vector<std::unique_ptr<Heap>> heaps;
    for (int i = 0; i < 4; ++i) {
        heaps.push_back(std::make_unique<Heap>());
        commit.fork_into(*heaps.back());
    }
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            Random random(t);
            Heap& heap = *heaps[t];
            for (int round = 0; round < 60; ++round) {
                Heap child;
                heap.fork_into(child);
                for (int i = 0; i < 20; ++i) {
                    const SlotIndex slot = slots[below(random, slots.size())];
                    auto* list = child.own<ListNode>(slot);
                    const size_t at = below(random, list->items.size());
                    std::exchange(list->items.own(at, child.epoch()), Value::of(leaves.taken(random()))).drop();
                    list->items.push_back(Value::of(leaves.taken(random())), child.epoch());
                }
                if (round % 7 == 0) child.collect(slots);
                if (round % 3 == 0) heap.restore(child);
            }
        });
        threads.emplace_back([&, t] {
            Random random(100 + t);
            for (int round = 0; round < 3000; ++round) {
                const SlotIndex slot = slots[below(random, slots.size())];
                const auto* list = static_cast<const ListNode*>(commit.at(slot));
                const size_t at = below(random, list->items.size());
                EXPECT(list->items[at].leaf()->id == long(at % 64));
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (SlotIndex slot : slots) {
        const auto* list = static_cast<const ListNode*>(commit.at(slot));
        EXPECT(list->items.size() == 300);
        for (size_t j = 0; j < 300; ++j) EXPECT(list->items[j].leaf()->id == long(j % 64));
    }
}
#endif

int main() {
    for (seed = 1; seed <= 12; ++seed) {
        test_array<2, false>(300, 200);
        test_array<3, false>(200, 3000);
        test_array<7, false>(60, 9000);
        test_array<1, true>(80, 2500);
        test_array<2, true>(200, 600);
        if (seed % 4 == 0) test_array<4, true>(60, 20000);
        test_dict(120, 12);
        test_dict(150, 60);
        test_dict(60, 1500);
        test_heap(1500);
    }
    test_deep_chain();
#ifdef TURNWISE_STATE_THREADS
    for (seed = 1; seed <= 5; ++seed) test_threads();
#endif
    if (failures) std::printf("%d failures\n", failures.load());
    return failures != 0;
}
