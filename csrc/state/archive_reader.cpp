#include <algorithm>
#include <iterator>
#include <unordered_map>

#include "state/archive.h"

namespace turnwise::state {
namespace {

using namespace archive;

[[noreturn]] void damaged(const char* what) {
    throw Damaged(what);
}

// Calls f(items, count, true) for the chunks that only `a` has, and f(items, count, false) for those that only `b` has.
// The position of a chunk does not matter.
template <class Array, class Function>
void each_unshared(const Array& a, const Array& b, Function&& f) {
    using Block = typename Array::Block;
    std::vector<Block*> ours, theirs;
    // From the top level of both trees down: drop the blocks that both have, and look into the others.
    for (unsigned height = std::max(a.height(), b.height());; --height) {
        if (a.root() && a.height() == height) ours.push_back(a.root());
        if (b.root() && b.height() == height) theirs.push_back(b.root());
        std::vector<Block*> only_ours, only_theirs;
        std::sort(ours.begin(), ours.end());
        std::sort(theirs.begin(), theirs.end());
        std::set_difference(ours.begin(), ours.end(), theirs.begin(), theirs.end(), std::back_inserter(only_ours));
        std::set_difference(theirs.begin(), theirs.end(), ours.begin(), ours.end(), std::back_inserter(only_theirs));
        if (height == 0) {
            for (Block* block : only_ours) f(block->items(), size_t{block->used}, true);
            for (Block* block : only_theirs) f(block->items(), size_t{block->used}, false);
            return;
        }
        ours.clear();
        theirs.clear();
        for (Block* block : only_ours) ours.insert(ours.end(), block->children(), block->children() + block->used);
        for (Block* block : only_theirs) {
            theirs.insert(theirs.end(), block->children(), block->children() + block->used);
        }
    }
}

// Checks, heap after heap, that every slot that is referred to holds a container. It looks only at the differences from
// the heap before.
class Checker {
  public:
    explicit Checker(size_t archive_bytes) : steps_left_(kSteps + kStepsPerByte * archive_bytes) {}

    void move_to(const Heap::Table& table, Value root, SlotIndex free) {
        if (table.size() >= kNoSlot) damaged("a table with too many slots");
        slots_ = table.size();
        if (referred_.size() < slots_) {
            referred_.resize(slots_);
            lives_.resize(slots_);
        }
        // Count references and containers wherever the two tables differ.
        bool chain_changed = free != free_;
        tuples_.clear();
        Heap::Table::compare(table, table_, [&](size_t slot, const Place* ours, const Place* theirs) {
            step();
            if (ours && theirs && ours->word == theirs->word) return;
            const Node* now = ours ? ours->node() : nullptr;
            const Node* before = theirs ? theirs->node() : nullptr;
            chain_changed = chain_changed || (ours && !now) || (theirs && !before);
            set_alive(slot, now != nullptr);
            refer(now, before);
            if (now && now->kind == Kind::Tuple) tuples_.push_back(static_cast<SlotIndex>(slot));
        });
        // The counts, the root, the free slots and the tuples must be right.
        if (dangling_ > 0) damaged("a reference to a slot that holds nothing");
        if (root.is_slot() && (root.slot() >= slots_ || !lives_[root.slot()])) damaged("a root that does not exist");
        if (chain_changed) check_chain(table, free);
        if (!tuples_.empty()) check_tuples(table);
        table_ = table;
        free_ = free;
    }
    size_t alive() const noexcept { return alive_; }

  private:
    // Few bytes can name large heaps again and again, in turns that differ everywhere.
    static constexpr size_t kSteps = 100'000'000, kStepsPerByte = 100;

    void step() {
        if (steps_left_-- == 0) damaged("versions that take too long to compare");
    }
    void set_alive(size_t slot, bool alive) {
        if (lives_[slot] == alive) return;
        lives_[slot] = alive;
        alive ? ++alive_ : --alive_;
        if (referred_[slot] > 0) alive ? --dangling_ : ++dangling_;
    }
    void add(Value value) {
        step();
        if (!value.is_slot()) return;
        if (value.slot() >= slots_) damaged("a reference to a slot beyond the table");
        if (referred_[value.slot()]++ == 0 && !lives_[value.slot()]) ++dangling_;
    }
    void remove(Value value) {
        step();
        if (value.is_slot() && --referred_[value.slot()] == 0 && !lives_[value.slot()]) --dangling_;
    }
    // Counts the references of `now` and uncounts those of `before`. Two dicts or two lists: only where they differ.
    void refer(const Node* now, const Node* before) {
        if (now && before && now->kind == before->kind) {
            if (now->kind == Kind::Dict) {
                const auto value = [](const Entry* entry) { return entry && entry->key ? entry->value : Value(); };
                DictNode* ours = nullptr;
                decltype(ours->entries)::compare(static_cast<const DictNode*>(now)->entries,
                                                 static_cast<const DictNode*>(before)->entries,
                                                 [&](size_t, const Entry* a, const Entry* b) {
                                                     add(value(a));
                                                     remove(value(b));
                                                 });
                return;
            }
            if (now->kind == Kind::List) {
                each_unshared(static_cast<const ListNode*>(now)->items, static_cast<const ListNode*>(before)->items,
                              [&](const Value* values, size_t count, bool ours) {
                                  for (size_t i = 0; i < count; ++i) ours ? add(values[i]) : remove(values[i]);
                              });
                return;
            }
        }
        if (now) now->for_each_value([&](Value value) { add(value); });
        if (before) before->for_each_value([&](Value value) { remove(value); });
    }

    void check_chain(const Heap::Table& table, SlotIndex free) {
        for (size_t steps = 0; free != kNoSlot; ++steps) {
            step();
            if (free >= table.size() || table[free].node() || steps > table.size()) damaged("a broken chain of slots");
            free = table[free].next_free();
        }
    }

    // Refuses tuples that hold each other in a cycle: reading such a tuple would never end.
    void check_tuples(const Heap::Table& table) {
        std::unordered_map<SlotIndex, bool> done;
        std::vector<SlotIndex> open(tuples_);
        while (!open.empty()) {
            const SlotIndex slot = open.back();
            const auto [entry, fresh] = done.emplace(slot, false);
            if (!fresh) {  // everything below it was checked
                entry->second = true;
                open.pop_back();
                continue;
            }
            table[slot].node()->for_each_value([&](Value value) {
                step();
                if (!value.is_slot() || table[value.slot()].node()->kind != Kind::Tuple) return;
                const auto known = done.find(value.slot());
                if (known == done.end())
                    open.push_back(value.slot());
                else if (!known->second)
                    damaged("a tuple that holds itself");
            });
        }
    }

    size_t steps_left_;                            // slots and values that may still be looked at
    Heap::Table table_;                            // of the last heap
    SlotIndex free_ = kNoSlot;                     // its first free slot
    size_t slots_ = 0, alive_ = 0, dangling_ = 0;  // slots; those with a container; those referred to, without one
    std::vector<uint32_t> referred_;               // [slots]: references to each slot
    std::vector<char> lives_;                      // [slots]: 1 if the slot holds a container
    std::vector<SlotIndex> tuples_;                // slots whose tuple is new in this heap
};

// All blocks of one array type, in the order of the archive.
template <class Array>
struct ReadBlocks {
    using Block = typename Array::Block;
    struct Info {
        Block* block;       // holds a reference
        unsigned height;    // 0: a block of items
        uint64_t position;  // index among the blocks of its height
        size_t size;        // items in it and below
        size_t living;      // entries in it and below that were not erased; 0 for other arrays
    };
    ~ReadBlocks() {
        for (const Info& info : infos) Array::Tree::drop(info.block, info.height);
    }
    std::vector<Info> infos;  // each holds a reference to its block
};

// Items that are not yet in a block. Drops their references if an error keeps them from getting there.
template <class Item>
struct Items {
    ~Items() {
        for (const Item& item : items) ItemPolicy<Item>::drop(item);
    }
    std::vector<Item> items;  // each holds its references
};

class Reader {
  public:
    Reader(const uint8_t* bytes, size_t size, LeafReader& leaves)
        : at_(bytes),
          end_(bytes + size),
          leaves_(leaves),
          index_steps_(kIndexSteps + kIndexStepsPerByte * size),
          checker_(size) {}
    ~Reader() {
        for (Node* node : nodes_) Node::drop(node);
    }

    Restored read() {
        if (byte() != kFormat) damaged("an unknown format");
        for (size_t size : kBlockSizes) {
            if (number() != size) damaged("blocks of another size: a turnwise of another version wrote it");
        }
        while (at_ != end_) record(byte());
        restored_.leaves = leaf_count_;
        return std::move(restored_);
    }

  private:
    void record(uint8_t op) {
        switch (op / 4) {
            case OfValues:
                return block<Values>(op % 4);
            case OfEntries:
                return block<Entries>(op % 4);
            case OfTokens:
                return block<Tokens>(op % 4);
            case OfPlaces:
                return block<Heap::Table>(op % 4);
        }
        if (op == kHeap) return heap();
        if (op == kRelaxed) return block<Values>(Inner, true);
        if (op == kRelaxedLike) return block<Values>(InnerLike, true);
        const bool like = op >= kNodeLike;
        const unsigned kind = op - (like ? kNodeLike : kNode);
        if (kind > static_cast<unsigned>(Kind::Opaque)) damaged("an unknown record");
        nodes_.push_back(nullptr);
        nodes_.back() = node(static_cast<Kind>(kind), like);
    }

    // ---- numbers and items
    uint8_t byte() {
        if (at_ == end_) damaged("it ends too early");
        return *at_++;
    }
    uint64_t number() {
        uint64_t value = 0;
        for (unsigned shift = 0;; shift += 7) {
            const uint8_t part = byte();
            if (shift == 63 && part > 1) damaged("a number that is too large");
            value |= uint64_t{part & 127u} << shift;
            if (part < 128) return value;
        }
    }
    uint64_t number(uint64_t least, uint64_t most, const char* what) {
        const uint64_t value = number();
        if (value < least || value > most) damaged(what);
        return value;
    }
    // Reads how far back a thing of `known` is, and returns it.
    template <class Thing>
    const Thing& earlier(const std::vector<Thing>& known) {
        return known[known.size() - number(1, known.size(), "a reference to what does not exist")];
    }

    // Decodes a value; a leaf comes with its own reference.
    Value value(Use use, uint64_t code) {
        const uint64_t payload = code >> 2;
        switch (code & 3) {
            case IsSlot:
                if (payload >= kNoSlot || use != Use::Value) damaged("a slot where there is none");
                return Value::of(static_cast<SlotIndex>(payload));
            case IsInteger:
                if (use != Use::Value && use != Use::Key) damaged("a number where there is none");
                return Value::of(leaves_.integer(unzigzag(payload)));
            case IsEmpty:
                return Value();
        }
        if (payload > leaf_count_) damaged("a reference to a leaf that does not exist");
        Leaf* leaf = leaves_.leaf(payload == 0 ? leaf_count_++ : payload - 1, use);
        if (!leaf) damaged("a leaf that may not stand where it does");
        retain(leaf);
        return Value::of(leaf);
    }
    void read_item(Value& item) {
        item = value(Use::Value, number());
        if (item.empty()) damaged("a list with a hole");
    }
    void read_item(Entry& entry) {
        entry = Entry{0, nullptr, Value()};
        const Value key = value(Use::Key, number());
        if (key.empty()) return;
        entry.key = key.leaf();
        try {
            entry.hash = leaves_.hash(entry.key);
            read_item(entry.value);
        } catch (...) {
            key.drop();
            throw;
        }
    }
    void read_item(int32_t& token) {
        const int64_t wide = unzigzag(number());
        token = static_cast<int32_t>(wide);
        if (token != wide) damaged("a token that does not fit 32 bits");
    }
    void read_item(Place& place) {
        const uint64_t code = number();
        if (code & 1) {
            if (code >> 1 > kNoSlot) damaged("a slot that is too large");
            place = Place::free(code >> 1 == 0 ? kNoSlot : static_cast<SlotIndex>((code >> 1) - 1));
            return;
        }
        if (code == 0 || code >> 1 > nodes_.size()) damaged("a container that does not exist");
        place = Place::of(nodes_[nodes_.size() - (code >> 1)]);
        place.node()->up();
    }

    // ---- blocks
    using Entries = decltype(DictNode::entries);
    using Tokens = decltype(TokensNode::tokens);

    template <class Array>
    void block(unsigned shape, bool relaxed = false) {
        auto& infos = std::get<type_of<Array>()>(blocks_).infos;
        typename ReadBlocks<Array>::Info info{nullptr, 0, 0, 0, 0};
        const typename ReadBlocks<Array>::Info* like = nullptr;
        if (shape == LeavesLike || shape == InnerLike) {
            like = &earlier(infos);
            if ((like->height > 0) != (shape == InnerLike)) damaged("a block like one of another height");
            info.height = like->height;
            info.position = like->position;
        } else {
            if (shape == Inner) {
                const unsigned highest = relaxed ? kMaxRelaxedHeight : kMaxHeight;
                info.height = static_cast<unsigned>(number(1, highest, "a tree that is too high"));
            }
            info.position = number(0, uint64_t{1} << 40, "a block too far out");
        }
        if (info.height == 0)
            leaves<Array>(info, like);
        else
            inner<Array>(info, like, infos, relaxed);
        try {
            infos.push_back(info);
        } catch (...) {
            Array::Tree::drop(info.block, info.height);
            throw;
        }
    }

    // True if each block of such arrays has one position. No tree has a block twice then.
    template <class Array>
    static constexpr bool positioned() {
        return !std::is_same_v<Array, Values>;
    }

    template <class Array, class Info>
    void leaves(Info& info, const Info* like) {
        using Item = std::decay_t<decltype(*info.block->items())>;
        Items<Item> read;
        auto& items = read.items;
        const size_t count = number(1, Array::kLeaf, "a block of an impossible size");
        const auto read_one = [&](Item& to) {
            Item item;
            read_item(item);
            ItemPolicy<Item>::drop(std::exchange(to, item));
        };
        items.reserve(count);
        // Copy the common items of the earlier block, replace those that changed, then read the rest.
        if (like) {
            const Item* old = like->block->items();
            items.assign(old, old + std::min<size_t>(count, like->block->used));
            for (const Item& item : items) ItemPolicy<Item>::take(item);
            each_change(items.size(), [&](size_t i) { read_one(items[i]); });
        }
        while (items.size() < count) {
            Item item;
            read_item(item);
            items.push_back(item);
        }
        info.size = count;
        if constexpr (std::is_same_v<Array, Values>) values_ += count;
        if constexpr (std::is_same_v<Item, Entry>) {
            for (const Entry& entry : items) info.living += entry.key != nullptr;
        }
        info.block = Array::Tree::make_leaf(items.data(), count);
        items.clear();  // the block has their references now
    }

    template <class Array, class Info>
    void inner(Info& info, const Info* like, const std::vector<Info>& infos, bool relaxed) {
        using Block = typename Array::Block;
        Block* blocks[32];
        uint32_t ends[32];
        const size_t count = number(1, 32, "a block of an impossible size");
        // Start with the children of the earlier block, replace those that changed, then read the rest.
        const size_t common = like ? std::min<size_t>(count, like->block->used) : 0;
        for (size_t i = 0; i < common; ++i) blocks[i] = like->block->children()[i];
        const auto read_one = [&](size_t i) {
            const Info& child = earlier(infos);
            if (child.height != info.height - 1) damaged("a block of another height");
            if (positioned<Array>() && child.position != info.position * 32 + i) damaged("a block at another's place");
            blocks[i] = child.block;
        };
        if (like) each_change(common, read_one);
        for (size_t i = common; i < count; ++i) read_one(i);
        // Add up the sizes of all children, changed or not. They are remembered by block, so this is one look-up each.
        auto& known = sizes_[type_of<Array>()];
        for (size_t i = 0; i < count; ++i) {
            const auto [size, living] = known_size(known, blocks[i], infos);
            if (!relaxed && i + 1 < count && size != Array::Tree::full_size(info.height - 1)) {
                damaged("a block that is not full");
            }
            if (!relaxed && blocks[i]->relaxed) damaged("a relaxed block below a regular one");
            info.size += size;
            info.living += living;
            // No chunk is twice in a tree. Otherwise a few bytes could make a tree that is too large to walk.
            if (!positioned<Array>() && info.size > values_) damaged("a list of more items than there are");
            ends[i] = static_cast<uint32_t>(info.size);
        }
        info.block = Array::Tree::make_inner(blocks, count, relaxed ? ends : nullptr);
    }
    using Sizes = std::unordered_map<const void*, std::pair<size_t, size_t>>;
    struct KnownSizes {
        Sizes of;         // block -> (size, living), see Info
        size_t read = 0;  // number of infos that `of` has
    };
    template <class Info>
    static std::pair<size_t, size_t> known_size(KnownSizes& known, const void* block, const std::vector<Info>& infos) {
        for (; known.read < infos.size(); ++known.read) {
            const Info& info = infos[known.read];
            known.of.emplace(info.block, std::pair{info.size, info.living});
        }
        return known.of.at(block);
    }

    // Calls f(i) for each index below `common` that the archive lists as changed.
    template <class Function>
    void each_change(size_t common, Function&& f) {
        size_t next = 0;
        for (uint64_t left = number(0, common, "more changes than places"); left > 0; --left) {
            const uint64_t gap = number();
            if (gap >= common - next) damaged("a change beyond the block");
            f(next + gap);
            next += gap + 1;
        }
    }

    template <class Array>
    Array array(size_t* living = nullptr) {
        const auto& infos = std::get<type_of<Array>()>(blocks_).infos;
        const uint64_t back = number(0, infos.size(), "a reference to what does not exist");
        if (back == 0) return Array();
        const auto& info = infos[infos.size() - back];
        if (info.size > 0xffffffff) damaged("an array that is too large");
        if (positioned<Array>() && info.position != 0) damaged("an array that starts in its middle");
        if (living) *living = info.living;
        return Array::of(info.block, info.size, info.height);
    }

    // ---- nodes and heaps
    Node* node(Kind kind, bool is_like) {
        Node* like = nullptr;
        if (is_like) {
            // The last element of nodes_ is reserved for the node that is being read.
            like = nodes_[nodes_.size() - 1 - number(1, nodes_.size() - 1, "a reference to what does not exist")];
            if (like->kind != kind) damaged("a container like one of another kind");
        }
        const Epoch epoch = next_epoch();  // no heap has it; the index of a dict is written with it
        const auto fresh = [&](auto* none) {
            using NodeType = std::remove_pointer_t<decltype(none)>;
            return like ? static_cast<NodeType*>(like->copy(epoch)) : new NodeType(epoch);
        };
        // Each kind: the array of its contents, then a new node or a copy of the earlier one with that array.
        if (kind == Kind::Dict) {
            size_t living = 0;
            const Entries entries = array<Entries>(&living);
            if (!entries.empty() && !entries[entries.size() - 1].key) damaged("a dict that ends in an erased entry");
            if (entries.size() >= 0x7fffffff) damaged("a dict that is too large");
            Owned<DictNode> node(fresh(static_cast<DictNode*>(nullptr)));
            const size_t steps = node->assemble(entries, living, static_cast<DictNode*>(like), index_steps_);
            if (steps > index_steps_) damaged("dicts that take too long to index");
            index_steps_ -= steps;
            check_keys(*node.get(), static_cast<const DictNode*>(like));
            return node.release();
        }
        if (kind == Kind::List) {
            Values items = array<Values>();
            auto* node = fresh(static_cast<ListNode*>(nullptr));
            node->items = std::move(items);
            return node;
        }
        if (kind == Kind::Tokens) {
            Tokens tokens = array<Tokens>();
            auto* node = fresh(static_cast<TokensNode*>(nullptr));
            node->tokens = std::move(tokens);
            return node;
        }
        if (kind == Kind::Tuple) {
            Values items = array<Values>();
            Items<Value> type;  // drops its reference, because the node takes its own
            if (!like) type.items.push_back(value(Use::TupleType, number()));
            auto* node = like ? static_cast<TupleNode*>(like->copy(epoch)) : new TupleNode(epoch, type.items[0].leaf());
            node->items = std::move(items);
            return node;
        }
        Items<Value> object;
        object.items.push_back(value(Use::Object, number()));
        if (object.items[0].empty()) damaged("an object that is missing");
        Leaf* leaf = object.items[0].leaf();
        Leaf* policy = leaves_.policy(leaf);
        // Epoch 0 belongs to no heap: the node is a snapshot, copied when a version asks for the object.
        return new OpaqueNode(0, like ? like->birth : epoch, leaf, policy);
    }

    // Refuses a key that is twice in a dict. The entries of an earlier dict were checked with it.
    void check_keys(const DictNode& node, const DictNode* like) {
        Entries::compare(node.entries, like ? like->entries : Entries(),
                         [&](size_t place, const Entry* ours, const Entry* theirs) {
                             if (!ours || !ours->key || (theirs && theirs->key == ours->key)) return;
                             size_t steps = 0;
                             const auto equal = [&](Leaf* other) { return leaves_.equal(ours->key, other); };
                             if (node.is_twice(place, equal, steps)) damaged("a dict with a key twice");
                             if (steps > index_steps_) damaged("dicts that take too long to index");
                             index_steps_ -= steps;
                         });
    }

    void heap() {
        const auto table = array<Heap::Table>();
        Items<Value> root;
        root.items.push_back(value(Use::Value, number()));
        if (root.items[0].empty()) damaged("a version without contents");
        const uint64_t free = number(0, kNoSlot, "a slot that is too large");
        const SlotIndex first_free = free == 0 ? kNoSlot : static_cast<SlotIndex>(free - 1);
        checker_.move_to(table, root.items[0], first_free);
        restored_.heaps.push_back(std::make_unique<Heap>());
        restored_.heaps.back()->assemble(table, root.items[0], first_free, checker_.alive());
        root.items.clear();  // the heap has its reference now
    }

    // A node that is dropped unless it is released.
    template <class NodeType>
    class Owned {
      public:
        explicit Owned(NodeType* node) : node_(node) {}
        ~Owned() { Node::drop(node_); }
        NodeType* operator->() const { return node_; }
        NodeType* get() const { return node_; }
        NodeType* release() { return std::exchange(node_, nullptr); }

      private:
        NodeType* node_;
    };

    // A few bytes can name the entries of a large dict again, and keys can have hashes that are alike.
    static constexpr size_t kIndexSteps = 4'000'000, kIndexStepsPerByte = 64;

    const uint8_t* at_;   // the next byte
    const uint8_t* end_;  // the end of the archive
    LeafReader& leaves_;
    size_t index_steps_;       // buckets and probes that indices of dicts may still take
    uint64_t leaf_count_ = 0;  // leaves that were used so far
    uint64_t values_ = 0;      // items of all chunks of values so far
    std::tuple<ReadBlocks<Values>, ReadBlocks<Entries>, ReadBlocks<Tokens>, ReadBlocks<Heap::Table>> blocks_;
    KnownSizes sizes_[4];       // by ArrayType
    std::vector<Node*> nodes_;  // in the order of the archive; each holds a reference
    Checker checker_;
    Restored restored_;  // the result
};

}  // namespace

Restored read_archive(const uint8_t* bytes, size_t size, LeafReader& leaves) {
    return Reader(bytes, size, leaves).read();
}

}  // namespace turnwise::state
