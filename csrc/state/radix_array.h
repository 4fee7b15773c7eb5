// A persistent array: chunks of items under a radix tree. Copies of the array share the tree. A write copies the chunk
// and the few blocks above it, unless they already carry the writer's epoch.
//
// Items are moved by memcpy. `ItemPolicy<Item>` takes and drops the references that an item holds.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "state/counted.h"

namespace turnwise::state {

// The default, for plain numbers: they hold no references.
template <class Item>
struct ItemPolicy {
    static constexpr bool counted = false;  // items hold references
    static void take(const Item&) noexcept {}
    static void drop(const Item&) noexcept {}
};

template <class Item, unsigned kLeafBits>
class RadixArray {
    static_assert(std::is_trivially_copyable_v<Item>);
    static constexpr unsigned kFanBits = 5;
    static constexpr size_t kFan = size_t{1} << kFanBits;  // most children of an inner block
    using Policy = ItemPolicy<Item>;

  public:
    static constexpr size_t kLeaf = size_t{1} << kLeafBits;  // items of a full chunk

    // A chunk of items (height 0) or an inner block; the items or children follow it in memory.
    struct Block {
        Count count;        // references from arrays and inner blocks
        uint16_t used;      // number of items or children
        uint16_t capacity;  // items or children that fit
        Epoch epoch;        // of the heap that may write to it

        Item* items() noexcept { return reinterpret_cast<Item*>(this + 1); }
        Block** children() noexcept { return reinterpret_cast<Block**>(this + 1); }
    };
    static_assert(sizeof(Block) % alignof(Item) == 0);

    RadixArray() noexcept = default;
    RadixArray(const RadixArray& other) noexcept : root_(other.root_), size_(other.size_), height_(other.height_) {
        if (root_) root_->count.up();
    }
    RadixArray(RadixArray&& other) noexcept
        : root_(std::exchange(other.root_, nullptr)),
          size_(std::exchange(other.size_, 0)),
          height_(std::exchange(other.height_, 0)) {}
    RadixArray& operator=(RadixArray other) noexcept {
        swap(other);
        return *this;
    }
    ~RadixArray() { drop(root_, height_); }
    void swap(RadixArray& other) noexcept {
        std::swap(root_, other.root_);
        std::swap(size_, other.size_);
        std::swap(height_, other.height_);
    }

    size_t size() const noexcept { return size_; }
    bool empty() const noexcept { return size_ == 0; }
    // Arrays with equal identity hold equal items, so a diff or a file writer can skip one of them.
    const void* identity() const noexcept { return root_; }

    const Item& operator[](size_t index) const noexcept {
        assert(index < size_);
        Block* block = root_;
        for (unsigned level = height_; level > 0; --level) block = block->children()[child_of(index, level)];
        return block->items()[index & (kLeaf - 1)];
    }

    // The items from `index` to the end of its chunk.
    struct Run {
        const Item* items;  // the first one
        size_t count;       // number of items
    };
    Run run(size_t index) const noexcept {
        const Item* first = &(*this)[index];
        return {first, std::min(kLeaf - (index & (kLeaf - 1)), size_ - index)};
    }

    // The item, for writing. Afterwards its chunk carries `epoch`.
    Item& own(size_t index, Epoch epoch) {
        assert(index < size_);
        return own_leaf(index, epoch, 0)->items()[index & (kLeaf - 1)];
    }

    // The item for writing if its chunk already carries `epoch`, else null.
    Item* owned(size_t index, Epoch epoch) const noexcept {
        Block* block = root_;
        for (unsigned level = height_; level > 0; --level) block = block->children()[child_of(index, level)];
        return block->epoch == epoch ? &block->items()[index & (kLeaf - 1)] : nullptr;
    }

    // Appends an item and takes over the references that it holds.
    void push_back(const Item& item, Epoch epoch) {
        // An empty array gets its first chunk, a full tree another level.
        if (size_ == 0 && root_ == nullptr) {
            root_ = allocate(epoch, roomy(1, true), true);
            height_ = 0;
        } else if (size_ == capacity(height_)) {
            Block* above = allocate(epoch, 2, false);
            above->children()[0] = root_;
            above->used = 1;
            root_ = above;
            ++height_;
        }
        Block* leaf = own_leaf(size_, epoch, 1);
        leaf->items()[leaf->used++] = item;
        ++size_;
    }

    // Removes the last item. The caller gets its references.
    Item pop_back(Epoch epoch) {
        Item item = own(size_ - 1, epoch);
        own_leaf(size_ - 1, epoch, 0)->used--;
        --size_;
        shrink();
        return item;
    }

    // Replaces `removed` items from `start` on by `count` others and takes over their references. The removed items and
    // their references go to `out`.
    template <class Out>
    void splice(size_t start, size_t removed, const Item* items, size_t count, Epoch epoch, Out& out) {
        assert(start + removed <= size_);
        const size_t kept = std::min(removed, count);
        // Exchange items one for one, then make room for the rest or close the gap.
        for (size_t i = 0; i < kept; ++i) {
            Item& item = own(start + i, epoch);
            out.push_back(item);
            item = items[i];
        }
        if (count > removed) {
            if (start + kept == size_) {
                for (size_t i = kept; i < count; ++i) push_back(items[i], epoch);
            } else {
                open_gap(start + kept, count - removed, epoch);
                for (size_t i = kept; i < count; ++i) own(start + i, epoch) = items[i];
            }
        } else if (removed > count) {
            for (size_t i = kept; i < removed; ++i) out.push_back(own(start + i, epoch));
            close_gap(start + kept, removed - count, epoch);
        }
    }

    void clear() noexcept {
        RadixArray gone;
        swap(gone);
    }

    // Calls f(const Item*, count) for each chunk in order.
    template <class Function>
    void for_each_chunk(Function&& f) const {
        for (size_t index = 0; index < size_; index += kLeaf) {
            const Run items = run(index);
            f(items.items, items.count);
        }
    }

    // Calls f(Item*, count) for the chunks that carry `epoch`. The other chunks were written before the last fork.
    template <class Function>
    void for_each_owned_chunk(Epoch epoch, Function&& f) const {
        if (root_) visit_owned(root_, height_, epoch, f);
    }

    // The bytes of the tree plus of(const Item&) for each item. `seen` remembers each block: `learn(block, sum, own)`
    // stores its bytes with and without what is below it, and `known(block)` returns a pointer to `sum`, or null.
    template <class Seen, class Of>
    size_t bytes(Seen& seen, Of&& of) const {
        return root_ ? sum_bytes(root_, height_, seen, of) : 0;
    }

    // Calls f(index, ours, theirs) for each index of the chunks that `a` and `b` don't share. A pointer is null if that
    // array has no such item.
    template <class Function>
    static void compare(const RadixArray& a, const RadixArray& b, Function&& f) {
        compare_blocks(a.root_, a.height_, b.root_, b.height_, 0, f);
    }

    // ---- for files: building arrays block by block. These blocks have epoch 0, which no heap has, and belong to the
    // caller.
    unsigned height() const noexcept { return height_; }
    Block* root() const noexcept { return root_; }
    static constexpr size_t capacity(unsigned height) noexcept { return kLeaf << (kFanBits * height); }
    // Makes a chunk and takes over the references of the items.
    static Block* make_leaf(const Item* items, size_t count) {
        Block* block = allocate(0, count, true);
        block->used = static_cast<uint16_t>(count);
        std::memcpy(static_cast<void*>(block->items()), items, count * sizeof(Item));
        return block;
    }
    // Makes an inner block, which takes its own references to the children.
    static Block* make_inner(Block* const* children, size_t count) {
        Block* block = allocate(0, count, false);
        block->used = static_cast<uint16_t>(count);
        for (size_t i = 0; i < count; ++i) {
            block->children()[i] = children[i];
            children[i]->count.up();
        }
        return block;
    }
    // An array of `size` items under `root`, to which it takes its own reference.
    static RadixArray of(Block* root, size_t size, unsigned height) noexcept {
        RadixArray array;
        array.root_ = root;
        array.size_ = static_cast<uint32_t>(size);
        array.height_ = height;
        if (root) root->count.up();
        return array;
    }
    static void drop(Block* block, unsigned height) noexcept {
        if (!block || !block->count.down()) return;
        if (height > 0) {
            for (size_t i = 0; i < block->used; ++i) drop(block->children()[i], height - 1);
        } else if constexpr (Policy::counted) {
            for (size_t i = 0; i < block->used; ++i) Policy::drop(block->items()[i]);
        }
        host_free(block);
    }

  private:
    static constexpr size_t child_of(size_t index, unsigned level) noexcept {
        return (index >> (kLeafBits + kFanBits * (level - 1))) & (kFan - 1);
    }
    // A capacity of at least `wanted` items or children: the next power of two, so that blocks grow rarely.
    static size_t roomy(size_t wanted, bool leaf) noexcept {
        size_t capacity = 2;
        while (capacity < wanted) capacity *= 2;
        return std::min(capacity, leaf ? kLeaf : kFan);
    }

    static size_t block_bytes(size_t capacity, bool leaf) noexcept {
        return sizeof(Block) + capacity * (leaf ? sizeof(Item) : sizeof(Block*));
    }
    static Block* allocate(Epoch epoch, size_t capacity, bool leaf) {
        void* memory = host_allocate(block_bytes(capacity, leaf));
        if (!memory) throw std::bad_alloc();
        Block* block = new (memory) Block;
        block->used = 0;
        block->capacity = static_cast<uint16_t>(capacity);
        block->epoch = epoch;
        return block;
    }

    // Returns `block`, or a copy, that carries `epoch` and has room for `extra` more items. Takes over the reference to
    // `block`.
    static Block* own_block(Block* block, unsigned height, Epoch epoch, size_t extra) {
        const bool leaf = height == 0;
        const size_t wanted = block->used + extra;
        // A block of this epoch grows in place.
        if (block->epoch == epoch) {
            if (wanted <= block->capacity) return block;
            const size_t roomier = roomy(wanted, leaf);
            void* memory = host_resize(static_cast<void*>(block), block_bytes(roomier, leaf));
            if (!memory) throw std::bad_alloc();
            block = static_cast<Block*>(memory);
            block->capacity = static_cast<uint16_t>(roomier);
            return block;
        }
        // Any other block is copied; the copy takes references to what it holds.
        Block* copy = allocate(epoch, extra ? roomy(wanted, leaf) : wanted, leaf);
        copy->used = block->used;
        if (!leaf) {
            std::memcpy(copy->children(), block->children(), block->used * sizeof(Block*));
            for (size_t i = 0; i < copy->used; ++i) copy->children()[i]->count.up();
        } else {
            std::memcpy(static_cast<void*>(copy->items()), block->items(), block->used * sizeof(Item));
            if constexpr (Policy::counted) {
                for (size_t i = 0; i < copy->used; ++i) Policy::take(copy->items()[i]);
            }
        }
        drop(block, height);
        return copy;
    }

    // The chunk of `index`, carrying `epoch`, with room for `extra` more items. Adds a chunk if `index` is the size.
    Block* own_leaf(size_t index, Epoch epoch, size_t extra) {
        Block** place = &root_;
        for (unsigned level = height_; level > 0; --level) {
            const size_t child = child_of(index, level);
            const bool at_end = child == (*place)->used;
            Block* block = *place = own_block(*place, level, epoch, at_end);
            if (at_end) block->children()[block->used++] = allocate(epoch, 2, level == 1);
            place = &block->children()[child];
        }
        return *place = own_block(*place, 0, epoch, extra);
    }

    // Moves the items from `start` on to the right by `by`. The items left in the gap hold no references.
    void open_gap(size_t start, size_t by, Epoch epoch) {
        const size_t old_size = size_;
        own_from(start, epoch);
        for (size_t i = 0; i < by; ++i) push_back(Item{}, epoch);
        for (size_t end = old_size; end > start;) {
            // The longest stretch that ends at `end` and is in a single chunk both before and after the move.
            const size_t target = end + by;
            const size_t length =
                std::min({end - start, ((end - 1) & (kLeaf - 1)) + 1, ((target - 1) & (kLeaf - 1)) + 1});
            end -= length;
            std::memmove(static_cast<void*>(&own(end + by, epoch)), &own(end, epoch), length * sizeof(Item));
        }
    }

    // Moves the items after a gap of `by` at `start` to the left, over the items in the gap.
    void close_gap(size_t start, size_t by, Epoch epoch) {
        own_from(start, epoch);
        for (size_t from = start + by; from < size_;) {
            const size_t to = from - by;
            const size_t length = std::min({size_ - from, kLeaf - (from & (kLeaf - 1)), kLeaf - (to & (kLeaf - 1))});
            std::memmove(static_cast<void*>(&own(to, epoch)), &own(from, epoch), length * sizeof(Item));
            from += length;
        }
        for (size_t i = 0; i < by; ++i) pop_back(epoch);
    }

    // Makes all chunks from the one of `start` on carry `epoch`.
    void own_from(size_t start, Epoch epoch) {
        for (size_t i = start & ~(kLeaf - 1); i < size_; i += kLeaf) own(i, epoch);
    }

    // After a pop: removes empty blocks at the right edge, and replaces a root that has one child by that child.
    void shrink() {
        if (size_ == 0) {
            clear();
            return;
        }
        if (height_ > 0 && (size_ & (kLeaf - 1)) == 0) prune_edge(root_, height_);
        while (height_ > 0 && root_->used == 1) {
            Block* child = root_->children()[0];
            child->count.up();
            drop(root_, height_);
            root_ = child;
            --height_;
        }
    }
    static bool prune_edge(Block* block, unsigned height) {
        if (height == 0) return block->used == 0;
        Block*& last = block->children()[block->used - 1];
        if (!prune_edge(last, height - 1)) return false;
        drop(last, height - 1);
        return --block->used == 0;
    }

    template <class Function>
    static void compare_blocks(Block* a, unsigned height_a, Block* b, unsigned height_b, size_t start, Function& f) {
        if (a == b) return;
        const unsigned height = std::max(a ? height_a : 0, b ? height_b : 0);
        if (height == 0) {
            const size_t places = std::max<size_t>(a ? a->used : 0, b ? b->used : 0);
            for (size_t i = 0; i < places; ++i) {
                f(start + i, a && i < a->used ? &a->items()[i] : nullptr, b && i < b->used ? &b->items()[i] : nullptr);
            }
            return;
        }
        // If the heights differ, the lower tree covers the range of the higher one's first child.
        const auto child = [height](Block* block, unsigned at, size_t i) -> Block* {
            if (!block || (at < height && i > 0)) return nullptr;
            return at < height ? block : i < block->used ? block->children()[i] : nullptr;
        };
        for (size_t i = 0; i < kFan; ++i) {
            Block* ours = child(a, height_a, i);
            Block* theirs = child(b, height_b, i);
            if (!ours && !theirs) break;
            compare_blocks(ours, std::min(height_a, height - 1), theirs, std::min(height_b, height - 1),
                           start + i * capacity(height - 1), f);
        }
    }

    template <class Function>
    static void visit_owned(Block* block, unsigned height, Epoch epoch, Function& f) {
        if (block->epoch != epoch) return;
        if (height == 0) {
            f(block->items(), size_t{block->used});
            return;
        }
        for (size_t i = 0; i < block->used; ++i) visit_owned(block->children()[i], height - 1, epoch, f);
    }
    template <class Seen, class Of>
    static size_t sum_bytes(Block* block, unsigned height, Seen& seen, Of& of) {
        if (const size_t* known = seen.known(block)) return *known;
        const size_t own = block_bytes(block->capacity, height == 0);
        size_t sum = own;
        for (size_t i = 0; i < block->used; ++i) {
            sum += height == 0 ? of(block->items()[i]) : sum_bytes(block->children()[i], height - 1, seen, of);
        }
        seen.learn(block, sum, own);
        return sum;
    }

    Block* root_ = nullptr;  // null if nothing was ever added
    uint32_t size_ = 0;      // items
    uint32_t height_ = 0;    // levels of inner blocks above the chunks
};

}  // namespace turnwise::state
