// A persistent array: chunks of items under a radix tree. Copies of the array share the tree. A write copies the chunk
// and the few blocks above it, unless they already carry the writer's epoch.
//
// With `kRelaxes`, inserting or removing a few items far from the end makes the blocks above them relaxed, instead of
// moving all items that follow.
#pragma once

#include <utility>

#include "state/relaxed_tree.h"

namespace turnwise::state {

template <class Item, unsigned kLeafBits, bool kRelaxes = false>
class RadixArray {
  public:
    using Tree = Blocks<Item, kLeafBits>;
    using Block = typename Tree::Block;
    static constexpr size_t kLeaf = Tree::kLeaf;  // items of a full chunk

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
    ~RadixArray() { Tree::drop(root_, height_); }
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
        return chunk_of(index)->items()[index];
    }

    // The items from `index` to the end of its chunk.
    struct Run {
        const Item* items;  // the first one
        size_t count;       // number of items
    };
    Run run(size_t index) const noexcept {
        assert(index < size_);
        Block* chunk = chunk_of(index);
        return {chunk->items() + index, chunk->used - index};
    }

    // The item, for writing. Afterwards its chunk carries `epoch`.
    Item& own(size_t index, Epoch epoch) {
        assert(index < size_);
        return own_chunk(index, epoch, 0)->items()[index];
    }

    // The item for writing if its chunk already carries `epoch`, else null.
    Item* owned(size_t index, Epoch epoch) const noexcept {
        Block* chunk = chunk_of(index);
        return chunk->epoch == epoch ? &chunk->items()[index] : nullptr;
    }

    // Appends an item and takes over the references that it holds.
    void push_back(const Item& item, Epoch epoch) {
        if (relaxed()) return insert(size_, item, epoch);
        // An empty array gets its first chunk, a full tree another level.
        if (size_ == 0 && root_ == nullptr) {
            root_ = Tree::allocate(epoch, 2, Tree::Chunk);
            height_ = 0;
        } else if (size_ == Tree::full_size(height_)) {
            Block* above = Tree::allocate(epoch, 2, Tree::Regular);
            above->children()[0] = root_;
            above->used = 1;
            root_ = above;
            ++height_;
        }
        size_t index = size_;
        Block* chunk = own_chunk(index, epoch, 1);
        chunk->items()[chunk->used++] = item;
        ++size_;
    }

    // Removes the last item. The caller gets its references.
    Item pop_back(Epoch epoch) {
        if (relaxed()) return erase(size_ - 1, epoch);
        size_t index = size_ - 1;
        Block* chunk = own_chunk(index, epoch, 0);
        const Item item = chunk->items()[index];
        --chunk->used;
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
        for (size_t i = 0; i < kept;) {
            size_t index = start + i;
            Block* chunk = own_chunk(index, epoch, 0);
            for (; index < chunk->used && i < kept; ++index, ++i) {
                out.push_back(chunk->items()[index]);
                chunk->items()[index] = items[i];
            }
        }
        const size_t at = start + kept, added = count - kept, gone = removed - kept;
        if (at + gone == size_) {
            for (size_t i = at; i < size_; ++i) out.push_back((*this)[i]);
            while (size_ > at) pop_back(epoch);
            for (size_t i = 0; i < added; ++i) push_back(items[kept + i], epoch);
            return;
        }
        if constexpr (kRelaxes) {
            // A regular tree moves what follows, a relaxed one is rebuilt first. One item that comes or goes in a
            // relaxed tree takes the time of about kLeaf moves.
            const size_t moved = relaxed() ? size_ : size_ - at;
            if (moved > kLeaf * (1 + added + gone)) {
                for (size_t i = 0; i < added; ++i) insert(at + i, items[kept + i], epoch);
                for (size_t i = 0; i < gone; ++i) out.push_back(erase(at, epoch));
                return;
            }
            if (relaxed()) flatten(epoch);
        }
        if (added > 0) {
            open_gap(at, added, epoch);
            for (size_t i = 0; i < added; ++i) own(at + i, epoch) = items[kept + i];
        } else if (gone > 0) {
            for (size_t i = 0; i < gone; ++i) out.push_back((*this)[at + i]);
            close_gap(at, gone, epoch);
        }
    }

    void clear() noexcept {
        RadixArray gone;
        swap(gone);
    }

    // Calls f(const Item*, count) for each chunk in order.
    template <class Function>
    void for_each_chunk(Function&& f) const {
        for (size_t index = 0; index < size_;) {
            const Run items = run(index);
            f(items.items, items.count);
            index += items.count;
        }
    }

    // Calls f(Item*, count) for the chunks that carry `epoch`. The other chunks were written before the last fork.
    template <class Function>
    void for_each_owned_chunk(Epoch epoch, Function&& f) const {
        if (root_) Tree::visit_owned(root_, height_, epoch, f);
    }

    // The bytes of the tree plus of(const Item&) for each item. `seen` remembers each block: `learn(block, sum, own)`
    // stores its bytes with and without what is below it, and `known(block)` returns a pointer to `sum`, or null.
    template <class Seen, class Of>
    size_t bytes(Seen& seen, Of&& of) const {
        return root_ ? Tree::sum_bytes(root_, height_, seen, of) : 0;
    }

    // Calls f(index, ours, theirs) for each index of the chunks that `a` and `b` don't share; for all of them if one is
    // relaxed, because its blocks have no fixed places. A pointer is null if that array has no such item.
    template <class Function>
    static void compare(const RadixArray& a, const RadixArray& b, Function&& f) {
        if (a.root_ == b.root_) return;
        if (!a.relaxed() && !b.relaxed()) return compare_blocks(a.root_, a.height_, b.root_, b.height_, 0, f);
        for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
            f(i, i < a.size() ? &a[i] : nullptr, i < b.size() ? &b[i] : nullptr);
        }
    }

    // The array as it is now. Blocks that carry `epoch`, which their heap may still write, are copied and carry
    // `fresh`.
    RadixArray frozen(Epoch epoch, Epoch fresh) const {
        RadixArray array;
        array.root_ = root_ ? Tree::frozen(root_, height_, epoch, fresh) : nullptr;
        array.size_ = size_;
        array.height_ = height_;
        return array;
    }

    // ---- for files: building arrays block by block; see Blocks
    unsigned height() const noexcept { return height_; }
    Block* root() const noexcept { return root_; }
    // An array of `size` items under `root`, to which it takes its own reference.
    static RadixArray of(Block* root, size_t size, unsigned height) noexcept {
        RadixArray array;
        array.root_ = root;
        array.size_ = static_cast<uint32_t>(size);
        array.height_ = height;
        if (root) root->count.up();
        return array;
    }

  private:
    bool relaxed() const noexcept { return kRelaxes && root_ && root_->relaxed; }

    // The chunk that holds `index`, which becomes an index into the chunk.
    Block* chunk_of(size_t& index) const noexcept {
        Block* block = root_;
        unsigned level = height_;
        if constexpr (kRelaxes) {
            for (; level > 0 && block->relaxed; --level) {
                const size_t child = Tree::relaxed_child_of(block, index, level);
                index -= block->start(child);
                block = block->children()[child];
            }
        }
        for (; level > 0; --level) block = block->children()[Tree::child_of(index, level)];
        index &= kLeaf - 1;
        return block;
    }

    // The same, for writing: carrying `epoch`, with room for `extra` more items. In a regular tree it adds a chunk if
    // `index` is the size.
    Block* own_chunk(size_t& index, Epoch epoch, size_t extra) {
        Block** place = &root_;
        unsigned level = height_;
        if (relaxed()) place = own_relaxed(index, epoch, level);
        for (; level > 0; --level) {
            const size_t child = Tree::child_of(index, level);
            const bool at_end = child == (*place)->used;
            Block* block = *place = Tree::own(*place, level, epoch, at_end);
            if (at_end) {
                block->children()[block->used++] = Tree::allocate(epoch, 2, level == 1 ? Tree::Chunk : Tree::Regular);
            }
            place = &block->children()[child];
        }
        index &= kLeaf - 1;
        return *place = Tree::own(*place, 0, epoch, extra);
    }

    // The part of own_chunk in the relaxed blocks: down to the block at `level`.
    [[gnu::noinline]] Block** own_relaxed(size_t& index, Epoch epoch, unsigned& level) {
        Block** place = &root_;
        for (; level > 0 && (*place)->relaxed; --level) {
            Block* block = *place = Tree::own(*place, level, epoch, 0);
            const size_t child = Tree::relaxed_child_of(block, index, level);
            index -= block->start(child);
            place = &block->children()[child];
        }
        return place;
    }

    // Inserts or removes one item in logarithmic time. Not inlined, which would slow down regular trees.
    [[gnu::noinline]] void insert(size_t index, const Item& item, Epoch epoch) {
        RelaxedTree<Tree>(root_, height_, size_, epoch).insert(index, item);
        ++size_;
    }
    [[gnu::noinline]] Item erase(size_t index, Epoch epoch) {
        const Item item = RelaxedTree<Tree>(root_, height_, size_, epoch).erase(index);
        if (--size_ == 0) clear();
        return item;
    }
    // Rebuilds the tree as a regular one.
    void flatten(Epoch epoch) {
        RadixArray flat;
        for_each_chunk([&](const Item* items, size_t count) {
            for (size_t i = 0; i < count; ++i) {
                flat.push_back(items[i], epoch);
                ItemPolicy<Item>::take(items[i]);
            }
        });
        swap(flat);
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
            Tree::drop(root_, height_);
            root_ = child;
            --height_;
        }
    }
    static bool prune_edge(Block* block, unsigned height) {
        if (height == 0) return block->used == 0;
        Block*& last = block->children()[block->used - 1];
        if (!prune_edge(last, height - 1)) return false;
        Tree::drop(last, height - 1);
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
        for (size_t i = 0; i < Tree::kFan; ++i) {
            Block* ours = child(a, height_a, i);
            Block* theirs = child(b, height_b, i);
            if (!ours && !theirs) break;
            compare_blocks(ours, std::min(height_a, height - 1), theirs, std::min(height_b, height - 1),
                           start + i * Tree::full_size(height - 1), f);
        }
    }

    Block* root_ = nullptr;  // null if nothing was added
    uint32_t size_ = 0;      // items
    uint32_t height_ = 0;    // levels of inner blocks above the chunks
};

}  // namespace turnwise::state
