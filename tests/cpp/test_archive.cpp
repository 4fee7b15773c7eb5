// Versions as bytes and back, without Python: bytes that are whole, damaged, or make no sense.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "state/archive.h"
#include "state/edges.h"
#include "state_leaves.h"

static constexpr size_t kLeaves = 120;  // every third stands for a whole number

static int64_t hash_of(const Leaf* leaf) {
    return leaf->id * 1103515245 % 1009;
}

class Numbered final : public LeafWriter {
  public:
    uint64_t number_of(Leaf* leaf) override {
        const auto [known, fresh] = numbers_.emplace(leaf, order.size());
        if (fresh) order.push_back(leaf);
        return known->second;
    }
    bool as_integer(Leaf* leaf, int64_t& integer) override {
        integer = leaf->id;
        return leaf->id % 3 == 0;
    }
    std::vector<Leaf*> order;

  private:
    std::map<Leaf*, uint64_t> numbers_;
};

class Table final : public LeafReader {
  public:
    Table(const std::vector<Leaf*>& order, Leaves& leaves) : order_(order), leaves_(leaves) {}
    Leaf* leaf(uint64_t number, Use) override { return number < order_.size() ? order_[number] : nullptr; }
    Leaf* integer(int64_t value) override {
        if (value < 0 || value >= int64_t(kLeaves)) throw Damaged("a number that the tests don't write");
        return leaves_.taken(size_t(value));
    }
    int64_t hash(Leaf* key) override { return hash_of(key); }
    bool equal(Leaf* key, Leaf* other) override { return key->id == other->id; }
    Leaf* policy(Leaf*) override { return leaves_[1]; }

  private:
    const std::vector<Leaf*>& order_;
    Leaves& leaves_;
};

using Heaps = std::vector<std::unique_ptr<Heap>>;

static size_t place_of(const DictNode* dict, Leaf* key) {
    return dict->find(hash_of(key), key, [&](Leaf* other) { return other->id == key->id; });
}

static Node* fresh_node(Random& random, Heap& heap, Leaves& leaves) {
    const Epoch epoch = heap.epoch();
    switch (random() % 8) {
        case 0:
        case 1:
            return new ListNode(epoch);
        case 2: {
            auto* tokens = new TokensNode(epoch);
            for (size_t i = below(random, 1200); i-- > 0;) tokens->tokens.push_back(int32_t(random()), epoch);
            return tokens;
        }
        case 3: {
            auto* tuple = new TupleNode(epoch, random() % 2 ? leaves[5] : nullptr);
            for (size_t i = below(random, 40); i-- > 0;) {
                tuple->items.push_back(Value::of(leaves.taken(random() % kLeaves)), epoch);
            }
            return tuple;
        }
        case 4:
            return new OpaqueNode(random() % 2 ? epoch : 0, leaves[random() % kLeaves], leaves[1]);
        default:
            return new DictNode(epoch);
    }
}

// Items come and go one by one at the front or in the middle, so that the tree of a long list becomes relaxed.
static void write_inside(Random& random, Values& items, Epoch epoch, Leaves& leaves) {
    const size_t place = random() % 3 ? 0 : below(random, items.size());
    for (size_t times = 1 + below(random, 40); times-- > 0;) {
        const bool adds = random() % 3 > 0;
        const size_t at = place == 0 ? 0 : below(random, items.size());
        const Value item = Value::of(leaves[random() % kLeaves]);
        if (adds) item.take();
        Released out;
        items.splice(at, !adds, &item, adds, epoch, out);
        for (Value gone : out) gone.drop();
    }
}

// Some writes to random containers; new ones go into old ones.
static void write(Random& random, Heap& heap, Leaves& leaves) {
    for (size_t step = 1 + below(random, 12); step-- > 0;) {
        const auto slot = static_cast<SlotIndex>(below(random, heap.table().size()));
        const Node* node = heap.at(slot);
        if (!node || (node->kind != Kind::Dict && node->kind != Kind::List)) continue;
        for (size_t times = random() % 4 ? 3 : 90; times-- > 0;) {
            const bool inner = random() % 6 == 0;
            const auto value = [&] {
                return inner ? Value::of(heap.add(fresh_node(random, heap, leaves)))
                             : Value::of(leaves.taken(random() % kLeaves));
            }();
            if (node->kind == Kind::List) {
                auto& items = heap.own<ListNode>(slot)->items;
                if (items.size() > 200 && random() % 8 == 0) write_inside(random, items, heap.epoch(), leaves);
                if (!items.empty() && random() % 3 == 0)
                    std::exchange(items.own(below(random, items.size()), heap.epoch()), value).drop();
                else
                    items.push_back(value, heap.epoch());
                if (items.size() > 1 && random() % 4 == 0) items.pop_back(heap.epoch()).drop();
                continue;
            }
            auto* dict = heap.own<DictNode>(slot);
            Leaf* key = leaves[random() % kLeaves];
            const size_t place = place_of(dict, key);
            if (place == DictNode::kMissing) {
                retain(key);
                dict->insert(hash_of(key), key, value);
            } else if (random() % 2) {
                std::exchange(dict->entries.own(place, dict->epoch).value, value).drop();
            } else {
                value.drop();
                ItemPolicy<Entry>::drop(dict->erase(place));
            }
        }
    }
    if (random() % 5 == 0) heap.collect({});
}

static Heaps make(Random& random, Leaves& leaves, size_t count) {
    Heaps heaps;
    heaps.push_back(std::make_unique<Heap>());
    heaps[0]->exchange_root(Value::of(heaps[0]->add(new DictNode(heaps[0]->epoch())))).drop();
    heaps[0]->add(new ListNode(heaps[0]->epoch()));
    auto* list = new ListNode(heaps[0]->epoch());
    for (size_t i = 400 + below(random, 800); i-- > 0;) {
        list->items.push_back(Value::of(leaves.taken(random() % kLeaves)), list->epoch);
    }
    DictNode* root = heaps[0]->own<DictNode>(0);
    root->insert(hash_of(leaves[0]), leaves.taken(0), Value::of(heaps[0]->add(list)));
    write(random, *heaps[0], leaves);
    while (heaps.size() < count) {
        auto child = std::make_unique<Heap>();
        heaps[below(random, heaps.size())]->fork_into(*child);
        write(random, *child, leaves);
        heaps.push_back(std::move(child));
    }
    // A file may have a fork before what it was forked from.
    if (random() % 2) std::reverse(heaps.begin(), heaps.end());
    return heaps;
}

static std::string written(const Heaps& heaps, Numbered& numbers) {
    std::vector<const Heap*> all;
    for (const auto& heap : heaps) all.push_back(heap.get());
    return write_archive(all, numbers);
}
static Restored read(const std::string& bytes, Table& table) {
    return read_archive(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size(), table);
}

static std::string damaged(Random& random, std::string bytes) {
    for (size_t times = 1 + (random() % 3 == 0) * 3; times-- > 0 && !bytes.empty();) {
        const size_t place = below(random, bytes.size()), length = 1 + random() % 12;
        switch (random() % 6) {
            case 0:
                bytes[place] = char(bytes[place] ^ (1 << random() % 8));
                break;
            case 1:
                bytes[place] = char(random());
                break;
            case 2:
                bytes.erase(place, length);
                break;
            case 3:
                bytes.insert(place, bytes.substr(below(random, bytes.size()), length));
                break;
            case 4:
                bytes.replace(place, length, bytes.substr(below(random, bytes.size()), length));
                break;
            default:
                bytes.resize(place);
        }
    }
    return bytes;
}

// Every slot that something refers to holds a container.
static bool is_whole(const Heap& heap) {
    bool whole = true;
    for (SlotIndex slot = 0; slot < heap.table().size(); ++slot) {
        if (!heap.at(slot)) continue;
        heap.at(slot)->for_each_value(
            [&](Value value) { whole = whole && (!value.is_slot() || heap.at(value.slot())); });
    }
    return whole && (!heap.root().is_slot() || heap.at(heap.root().slot()));
}

// Whole bytes give versions that are written as the same bytes again. Damaged ones are refused, or are other versions
// that can be used; never more, and no reference is lost.
static void test_damage(int rounds) {
    Random random(seed);
    Leaves leaves(kLeaves);
    int refused = 0;
    for (int round = 0; round < rounds; ++round) {
        const Heaps heaps = make(random, leaves, 3);
        Numbered numbers;
        const std::string bytes = written(heaps, numbers);
        const int held = leaves.held();
        {
            Table table(numbers.order, leaves);
            const Restored whole = read(bytes, table);
            Numbered again;
            EXPECT(whole.leaves == numbers.order.size() && whole.heaps.size() == heaps.size());
            EXPECT(written(whole.heaps, again) == bytes);
        }
        for (int time = 0; time < 60; ++time) {
            Table table(numbers.order, leaves);
            const std::string bad = damaged(random, bytes);
            try {
                const Restored restored = read(bad, table);
                for (const auto& heap : restored.heaps) {
                    EXPECT(is_whole(*heap));
                    Heap fork;
                    heap->fork_into(fork);
                    Edges edges;
                    for (int turn = 0; turn < 2; ++turn) {
                        write(random, fork, leaves);
                        edges.differing(fork, *heap);
                    }
                    fork.collect({});
                    edges.differing(*heap, fork);
                }
            } catch (const Damaged&) {
                ++refused;
            }
            EXPECT(leaves.held() == held);
        }
    }
    EXPECT(refused > rounds * 25);
}

// Records that can be read one by one and make no sense together; numbers as they stand in the bytes.
static void test_nonsense() {
    Leaves leaves(kLeaves);
    const std::vector<Leaf*> order{leaves[1]};
    uint8_t format = 2;
    const auto accepts = [&](std::vector<uint8_t> records) {
        std::vector<uint8_t> bytes{format, 16, 32, 0x80, 4, 8};  // the head
        bytes.insert(bytes.end(), records.begin(), records.end());
        Table table(order, leaves);
        try {
            return read_archive(bytes.data(), bytes.size(), table).heaps.size() == 1;
        } catch (const Damaged&) {
            return false;
        }
    };
    constexpr uint8_t kOne = 10, kSlot0 = 1, kSlot1 = 5, kSlot5 = 21, kEmpty = 3, kLeaf = 0;
    constexpr uint8_t kList = 17, kDict = 16, kTuple = 18, kTokens = 19, kLike = 8, kTable = 12, kVersion = 32;
    EXPECT(accepts({kList, 0, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));
    EXPECT(accepts({0, 0, 1, kLeaf, kList, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));
    const std::vector<uint8_t> sixteen(16, kOne);
    const auto with_sixteen = [&](std::vector<uint8_t> rest) {
        std::vector<uint8_t> records{0, 0, 16};
        records.insert(records.end(), sixteen.begin(), sixteen.end());
        records.insert(records.end(), rest.begin(), rest.end());
        const std::vector<uint8_t> end{kList, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0};
        records.insert(records.end(), end.begin(), end.end());
        return records;
    };
    EXPECT(accepts(with_sixteen({0, 1, 1, kOne, 2, 1, 0, 2, 2, 1})));
    EXPECT(!accepts(with_sixteen({2, 1, 0, 2, 1, 1})));                 // one block at two places
    EXPECT(!accepts(with_sixteen({0, 1, 1, kOne, 2, 1, 0, 2, 1, 2})));  // two blocks, exchanged
    EXPECT(!accepts(with_sixteen({0, 1, 1, kOne, 2, 2, 0, 2, 2, 1})));  // of the wrong height
    EXPECT(!accepts(with_sixteen({0, 1, 1, kOne, 2, 7, 0, 2, 2, 1})));  // too high
    EXPECT(!accepts(with_sixteen({1, 1, 16, 1, 16, kOne})));            // a change beyond the block
    EXPECT(!accepts(with_sixteen({1, 1, 16, 17})));                     // more changes than places
    EXPECT(!accepts({0, 0, 1, kOne, 0, 1, 1, kOne, 2, 1, 0, 2, 2, 1, kList, 1, kTable, 0, 1, 2, kVersion, 1, 1, 0}));
    for (const uint8_t value : {kSlot5, kSlot1, kEmpty}) {  // nothing there; no hole in a list
        EXPECT(!accepts({0, 0, 1, value, kList, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));
        EXPECT(!accepts({kList, 0, kTable, 0, 1, 2, kVersion, 1, value, 0}));
    }
    EXPECT(!accepts({0, 0, 1, kSlot1, kList, 1, kTable, 0, 2, 2, 1, kVersion, 1, kSlot0, 2}));  // a free slot
    EXPECT(accepts({kList, 0, kTable, 0, 3, 2, 7, 1, kVersion, 1, kSlot0, 2}));
    EXPECT(!accepts({kList, 0, kTable, 0, 3, 2, 7, 5, kVersion, 1, kSlot0, 2}));  // a chain in a circle
    EXPECT(!accepts({kList, 0, kTable, 0, 3, 2, 7, 1, kVersion, 1, kSlot0, 1}));  // one through a list
    EXPECT(!accepts({kList, 0, kTable, 0, 3, 2, 7, 1, kVersion, 1, kSlot0, 9}));  // one from outside
    EXPECT(accepts({0, 0, 1, kOne, kTuple, 1, kEmpty, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));
    EXPECT(!accepts({0, 0, 1, kSlot0, kTuple, 1, kEmpty, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));  // holds itself
    EXPECT(!accepts({0, 0,      1,      kSlot1, 0, 0, 1, kSlot0,   kTuple, 2,      kEmpty, kTuple,
                     1, kEmpty, kTable, 0,      2, 4, 2, kVersion, 1,      kSlot0, 0}));  // two that hold each other
    EXPECT(!accepts({kList, 0, kDict + kLike, 1, 0, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));    // like another kind
    EXPECT(!accepts({kList + kLike, 1, 0, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));              // like itself
    EXPECT(!accepts({4, 0, 1, kEmpty, kDict, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));        // ends erased
    EXPECT(!accepts({4, 0, 1, kSlot0, kOne, kDict, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));  // a slot as key
    EXPECT(!accepts({0, 0, 1, 8, kList, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));             // an unknown leaf
    EXPECT(!accepts({0, 0, 2, kLeaf, kLeaf, kList, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));  // one too many
    EXPECT(!accepts({8, 0, 1, 0x80, 0x80, 0x80, 0x80, 0x20, kTokens, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));
    EXPECT(accepts({8, 0, 1, 2, kTokens, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));
    EXPECT(!accepts({8, 1, 1, 2, kTokens, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));  // without its beginning
    EXPECT(!accepts({0, 0, 0, kList, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));       // a block of nothing
    EXPECT(!accepts({0, 0, 17, kList, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}));      // and of too much
    EXPECT(!accepts({kList, 0, kTable, 0, 1, 4, kVersion, 1, kSlot0, 0}));                // an unknown node
    EXPECT(!accepts({kList, 0, kTable, 0, 1, 0, kVersion, 1, kSlot0, 0}));                // and none
    EXPECT(!accepts({kList, 0, kTable, 0, 1, 2, kVersion, 2, kSlot0, 0}));                // an unknown table
    EXPECT(!accepts({kList, 0, kTable, 0, 1, 2, kVersion, 0, kSlot0, 0}));                // and none
    for (const uint8_t unknown : {21, 22, 23, 29, 31, 33, 255}) EXPECT(!accepts({unknown, 0, 0}));
    EXPECT(!accepts({kList, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1}));
    EXPECT(!accepts({kList, 0, kTable, 0, 1, 2, kVersion, 1, kSlot0}));  // cut off

    // Relaxed blocks: a block of values has no certain position.
    constexpr uint8_t kRelaxed = 33, kRelaxedLike = 34, kInner = 2;
    const auto with_two = [&](std::vector<uint8_t> rest) {
        std::vector<uint8_t> records{0, 0, 1, kOne, 0, 5, 2, kOne, kOne};  // a chunk of one and a chunk of two
        const std::vector<uint8_t> end{kList, 1, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0};
        records.insert(records.end(), rest.begin(), rest.end());
        records.insert(records.end(), end.begin(), end.end());
        return records;
    };
    for (format = 0; format < 5; ++format) {
        EXPECT(accepts({kList, 0, kTable, 0, 1, 2, kVersion, 1, kSlot0, 0}) == (format == 2));
    }
    format = 2;
    EXPECT(accepts(with_two({kRelaxed, 1, 0, 2, 2, 1})));
    EXPECT(accepts(with_two({kRelaxed, 1, 0, 2, 2, 1, kRelaxedLike, 1, 2, 0})));      // like another
    EXPECT(accepts(with_two({kInner, 1, 0, 1, 1, kRelaxedLike, 1, 2, 1, 0, 3, 2})));  // like a regular one
    EXPECT(!accepts(with_two({kRelaxedLike, 1, 2, 0})));                              // like a chunk
    EXPECT(!accepts(with_two({kInner, 1, 0, 2, 2, 1})));                              // regular, but not full
    EXPECT(!accepts(with_two({kRelaxed, 1, 0, 2, 2, 1, kInner, 2, 0, 1, 1})));        // a regular one above it
    EXPECT(!accepts(with_two({kRelaxed, 2, 0, 2, 2, 1})));                            // of the wrong height
    EXPECT(!accepts(with_two({kRelaxed, 12, 0, 2, 2, 1})));                           // too high
    EXPECT(!accepts(with_two({kRelaxed, 1, 0, 0})));                                  // a block of nothing
    EXPECT(!accepts(with_two({kRelaxed, 1, 0, 2, 1, 1})));                            // more items than there are
    EXPECT(!accepts(with_two({kRelaxed, 1, 0, 2, 2, 1, kRelaxed, 2, 0, 3, 1, 1, 1})));
    EXPECT(accepts(with_sixteen({0, 1, 1, kOne})));  // at any position
}

int main() {
    test_nonsense();
    for (seed = 1; seed <= 10; ++seed) test_damage(12);
    if (failures) std::printf("%d failures\n", failures.load());
    return failures != 0;
}
