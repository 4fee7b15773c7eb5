// Inserts and removes single items anywhere in a tree of blocks, in logarithmic time. The blocks on the way to the item
// become relaxed, as in a B-tree whose inner blocks count items. All chunks stay at the same depth.
//
// Both functions go down once and prepare each block before they enter it: `insert` splits full blocks, `erase` joins
// small neighbours. If memory runs out on the way, the tree is still whole and holds the same items.
#pragma once

#include "state/block.h"

namespace turnwise::state {

template <class Blocks>
class RelaxedTree {
    using Block = typename Blocks::Block;
    using Item = typename Blocks::Item;

  public:
    // The tree below `root`, which holds `size` items. The functions update `root` and `height`.
    RelaxedTree(Block*& root, uint32_t& height, size_t size, Epoch epoch) noexcept
        : root_(root), height_(height), size_(size), epoch_(epoch) {}

    // Inserts an item before `index`, or at the end, and takes over the references that it holds.
    void insert(size_t index, const Item& item) {
        const Side side = index == 0 ? Front : index == size_ ? Back : Middle;
        // A full root gets a level above it, so that it can split like any other block.
        if (root_->used == Blocks::most(height_)) {
            Block* above = Blocks::allocate(epoch_, 2, Blocks::Relaxed);
            above->children()[0] = root_;
            above->ends()[0] = static_cast<uint32_t>(size_);
            above->used = 1;
            root_ = above;
            ++height_;
        }
        Block** place = &root_;
        size_t size = size_;
        for (unsigned level = height_; level > 0; --level) {
            Block* block = *place = Blocks::own_relaxed(*place, level, size, epoch_, 1);
            // Between two children, the item goes to the end of the first.
            size_t child = index == 0 ? 0 : Blocks::relaxed_child_of(block, index - 1, level);
            if (block->children()[child]->used == Blocks::most(level - 1)) {
                split(block, child, level - 1, side);
                if (side == Back || index > block->ends()[child]) ++child;
            }
            place = enter(block, child, level, index, size);
        }
        Block* chunk = *place = Blocks::own(*place, 0, epoch_, 1);
        Item* items = chunk->items();
        std::memmove(static_cast<void*>(items + index + 1), items + index, (chunk->used - index) * sizeof(Item));
        items[index] = item;
        ++chunk->used;
        count(1);
    }

    // Removes an item. The caller gets its references. Without its only item the tree is an empty block.
    Item erase(size_t index) {
        Block** place = &root_;
        size_t size = size_;
        for (unsigned level = height_; level > 0; --level) {
            Block* block = *place = Blocks::own_relaxed(*place, level, size, epoch_, 0);
            size_t child = Blocks::relaxed_child_of(block, index, level);
            if (child > 0 && join(block, child - 1, level - 1))
                --child;
            else if (child + 1 < block->used)
                join(block, child, level - 1);
            if (block == root_ && block->used == 1) {
                lower();
                continue;
            }
            place = enter(block, child, level, index, size);
        }
        Block* chunk = *place = Blocks::own(*place, 0, epoch_, 0);
        Item* items = chunk->items();
        const Item item = items[index];
        --chunk->used;
        std::memmove(static_cast<void*>(items + index), items + index + 1, (chunk->used - index) * sizeof(Item));
        count(-1);
        // Remove the blocks on the way that became empty.
        for (unsigned level = 1; level <= height_; ++level) {
            const auto [block, child] = way_[level];
            if (block->children()[child]->used > 0) break;
            remove(block, child, level - 1);
        }
        while (height_ > 0 && root_->used == 1) lower();
        return item;
    }

  private:
    // Where an item is inserted. Blocks at the front and the back split unevenly: there, more items are likely to come,
    // and the blocks that they leave behind shall be full.
    enum Side { Front, Middle, Back };

    // Notes the way down. `index` and `size` become those of the child; returns the pointer to it.
    Block** enter(Block* block, size_t child, unsigned level, size_t& index, size_t& size) noexcept {
        way_[level] = {block, child};
        const size_t start = block->start(child);
        index -= start;
        size = block->ends()[child] - start;
        return &block->children()[child];
    }
    // Corrects the ends on the way down after an item came (1) or went (-1).
    void count(int change) noexcept {
        for (unsigned level = 1; level <= height_; ++level) {
            const auto [block, child] = way_[level];
            uint32_t* ends = block->ends();
            for (size_t i = child; i < block->used; ++i) ends[i] += static_cast<uint32_t>(change);
        }
    }

    // Adds a child to a block that has room.
    static void add(Block* block, size_t child, Block* fresh, size_t end) noexcept {
        Block** children = block->children();
        uint32_t* ends = block->ends();
        std::memmove(children + child + 1, children + child, (block->used - child) * sizeof(Block*));
        std::memmove(ends + child + 1, ends + child, (block->used - child) * sizeof(uint32_t));
        children[child] = fresh;
        ends[child] = static_cast<uint32_t>(end);
        ++block->used;
    }
    // Removes a child; the ends of the others must be right already.
    static void remove(Block* block, size_t child, unsigned height) noexcept {
        Block** children = block->children();
        uint32_t* ends = block->ends();
        Blocks::drop(children[child], height);
        --block->used;
        std::memmove(children + child, children + child + 1, (block->used - child) * sizeof(Block*));
        std::memmove(ends + child, ends + child + 1, (block->used - child) * sizeof(uint32_t));
    }
    // Replaces a root that has one child by that child.
    void lower() noexcept {
        Block* child = root_->children()[0];
        child->count.up();
        Blocks::drop(root_, height_);
        root_ = child;
        --height_;
    }

    // Splits a full child, at `height`, of a block that has room for one more.
    void split(Block* block, size_t child, unsigned height, Side side) {
        const size_t start = block->start(child), end = block->ends()[child];
        if (height == 0 && side != Middle) {
            Block* fresh = Blocks::allocate(epoch_, 2, Blocks::Chunk);
            side == Back ? add(block, child + 1, fresh, end) : add(block, child, fresh, start);
            return;
        }
        Block*& place = block->children()[child];
        const size_t used = place->used;
        const size_t kept = side == Middle ? used / 2 : side == Front ? 1 : used - 1;
        if (height == 0) {
            Block* left = place = Blocks::own(place, 0, epoch_, 0);
            Block* right = Blocks::allocate(epoch_, Blocks::kLeaf, Blocks::Chunk);
            const size_t moved = used - kept;
            std::memcpy(static_cast<void*>(right->items()), left->items() + kept, moved * sizeof(Item));
            right->used = static_cast<uint16_t>(moved);
            left->used = static_cast<uint16_t>(kept);
            add(block, child + 1, right, end);
            block->ends()[child] = static_cast<uint32_t>(start + kept);
            return;
        }
        Block* left = place = Blocks::own_relaxed(place, height, end - start, epoch_, 0);
        Block* right = Blocks::allocate(epoch_, Blocks::kFan, Blocks::Relaxed);
        const size_t middle = left->ends()[kept - 1];
        for (size_t i = kept; i < used; ++i) {
            right->children()[i - kept] = left->children()[i];
            right->ends()[i - kept] = static_cast<uint32_t>(left->ends()[i] - middle);
        }
        right->used = static_cast<uint16_t>(used - kept);
        left->used = static_cast<uint16_t>(kept);
        add(block, child + 1, right, end);
        block->ends()[child] = static_cast<uint32_t>(start + middle);
    }

    // Joins a child, at `height`, and the next one, if both together leave a quarter of a block free. Returns whether
    // it did.
    bool join(Block* block, size_t child, unsigned height) {
        Block*& place = block->children()[child];
        Block* right = block->children()[child + 1];
        if ((place->used + right->used) * 4u > Blocks::most(height) * 3) return false;
        const size_t start = block->start(child), middle = block->ends()[child], end = block->ends()[child + 1];
        const size_t used = place->used;
        if (height == 0) {
            place = Blocks::own(place, 0, epoch_, right->used);
        } else {
            place = Blocks::own_relaxed(place, height, middle - start, epoch_, right->used);
            for (size_t i = 0; i < right->used; ++i) {
                const size_t inner = Blocks::end_of(right, i, height, end - middle);
                place->ends()[used + i] = static_cast<uint32_t>(middle - start + inner);
            }
        }
        Blocks::append(place, right, height);
        block->ends()[child] = static_cast<uint32_t>(end);
        remove(block, child + 1, height);
        return true;
    }

    struct Step {
        Block* block;  // owned and relaxed
        size_t child;  // the one that was entered
    };
    Block*& root_;
    uint32_t& height_;
    const size_t size_;  // items before the change
    const Epoch epoch_;
    Step way_[16];  // by level; 2^32 items need fewer levels
};

}  // namespace turnwise::state
