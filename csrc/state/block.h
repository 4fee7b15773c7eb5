// The blocks of persistent arrays: chunks of items, and inner blocks above them. Arrays share blocks. A block may be
// written in place only under the epoch that it carries.
//
// An inner block is regular or relaxed. A regular block has regular children, all full but the last, so an index is
// enough to find a child. A relaxed block has children of any size and of both kinds, and counts their items.
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

template <class ItemType, unsigned kLeafBits>
struct Blocks {
    using Item = ItemType;
    using Policy = ItemPolicy<Item>;
    static_assert(std::is_trivially_copyable_v<Item>);
    static constexpr unsigned kFanBits = 5;
    static constexpr size_t kFan = size_t{1} << kFanBits;    // most children of an inner block
    static constexpr size_t kLeaf = size_t{1} << kLeafBits;  // items of a full chunk

    // The items, or the children and in a relaxed block their ends, follow the block in memory.
    struct Block {
        Count count;             // references from arrays and inner blocks
        uint16_t used;           // number of items or children
        uint16_t capacity : 15;  // items or children that fit
        uint16_t relaxed : 1;    // 1: an inner block with ends
        Epoch epoch;             // of the heap that may write to it

        Item* items() noexcept { return reinterpret_cast<Item*>(this + 1); }
        Block** children() noexcept { return reinterpret_cast<Block**>(this + 1); }
        // Of a relaxed block: the number of items in the first child, in the first two, ...
        uint32_t* ends() noexcept { return reinterpret_cast<uint32_t*>(children() + capacity); }
        size_t start(size_t child) noexcept { return child ? ends()[child - 1] : 0; }
    };
    static_assert(sizeof(Block) % alignof(Item) == 0);

    enum Shape { Chunk, Regular, Relaxed };
    static Shape shape_of(const Block* block, unsigned height) noexcept {
        return height == 0 ? Chunk : block->relaxed ? Relaxed : Regular;
    }
    // Number of items of a full regular tree.
    static constexpr size_t full_size(unsigned height) noexcept { return kLeaf << (kFanBits * height); }
    // Most items or children of a block.
    static constexpr size_t most(unsigned height) noexcept { return height == 0 ? kLeaf : kFan; }

    // The child of a regular block at `height` that holds `index`.
    static constexpr size_t child_of(size_t index, unsigned height) noexcept {
        return (index >> (kLeafBits + kFanBits * (height - 1))) & (kFan - 1);
    }
    // The first child of a relaxed block that ends after `index`. No child is larger than a full regular tree, so the
    // search starts where the child would be in a regular block. If blocks are half empty it is further on.
    static size_t relaxed_child_of(Block* block, size_t index, unsigned height) noexcept {
        const uint32_t* ends = block->ends();
        size_t child = index >> (kLeafBits + kFanBits * (height - 1));
        while (child + 8 < block->used && ends[child + 7] <= index) child += 8;
        while (ends[child] <= index) ++child;
        return child;
    }
    // The end of a child, as in `ends`, of a block that holds `size` items.
    static size_t end_of(Block* block, size_t child, unsigned height, size_t size) noexcept {
        return block->relaxed ? block->ends()[child] : std::min((child + 1) * full_size(height - 1), size);
    }

    // ---- memory
    static size_t bytes(size_t capacity, Shape shape) noexcept {
        const size_t each = shape == Chunk     ? sizeof(Item)
                            : shape == Regular ? sizeof(Block*)
                                               : sizeof(Block*) + sizeof(uint32_t);
        return sizeof(Block) + capacity * each;
    }
    // A capacity of at least `wanted` items or children: the next power of two, so that blocks grow rarely.
    static size_t roomy(size_t wanted, Shape shape) noexcept {
        size_t capacity = 2;
        while (capacity < wanted) capacity *= 2;
        return std::min(capacity, shape == Chunk ? kLeaf : kFan);
    }
    static Block* allocate(Epoch epoch, size_t capacity, Shape shape) {
        void* memory = host_allocate(bytes(capacity, shape));
        if (!memory) throw std::bad_alloc();
        Block* block = new (memory) Block;
        block->used = 0;
        block->capacity = static_cast<uint16_t>(capacity);
        block->relaxed = shape == Relaxed;
        block->epoch = epoch;
        return block;
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
    // Appends what `from` holds, with new references, to a block that has room. Leaves the ends alone.
    static void append(Block* block, Block* from, unsigned height) noexcept {
        if (height > 0) {
            std::memcpy(block->children() + block->used, from->children(), from->used * sizeof(Block*));
            for (size_t i = 0; i < from->used; ++i) from->children()[i]->count.up();
        } else {
            std::memcpy(static_cast<void*>(block->items() + block->used), from->items(), from->used * sizeof(Item));
            if constexpr (Policy::counted) {
                for (size_t i = 0; i < from->used; ++i) Policy::take(from->items()[i]);
            }
        }
        block->used = static_cast<uint16_t>(block->used + from->used);
    }

    // Returns `block`, or a copy, that carries `epoch` and has room for `extra` more items. Takes over the reference to
    // `block`.
    static Block* own(Block* block, unsigned height, Epoch epoch, size_t extra) {
        const size_t wanted = block->used + extra;
        return block->epoch == epoch && wanted <= block->capacity ? block : grow_or_copy(block, height, epoch, extra);
    }
    [[gnu::noinline]] static Block* grow_or_copy(Block* block, unsigned height, Epoch epoch, size_t extra) {
        const Shape shape = shape_of(block, height);
        const size_t wanted = block->used + extra;
        // A block of this epoch grows in place.
        if (block->epoch == epoch) {
            const size_t roomier = roomy(wanted, shape);
            void* memory = host_resize(static_cast<void*>(block), bytes(roomier, shape));
            if (!memory) throw std::bad_alloc();
            block = static_cast<Block*>(memory);
            const uint32_t* ends = block->ends();
            block->capacity = static_cast<uint16_t>(roomier);
            if (shape == Relaxed) std::memmove(block->ends(), ends, block->used * sizeof(uint32_t));
            return block;
        }
        // Any other block is copied; the copy takes references to what it holds.
        Block* copy = allocate(epoch, extra ? roomy(wanted, shape) : wanted, shape);
        append(copy, block, height);
        if (shape == Relaxed) std::memcpy(copy->ends(), block->ends(), block->used * sizeof(uint32_t));
        drop(block, height);
        return copy;
    }
    // The same for an inner block, which becomes relaxed. `size` is the number of its items.
    static Block* own_relaxed(Block* block, unsigned height, size_t size, Epoch epoch, size_t extra) {
        if (block->relaxed) return own(block, height, epoch, extra);
        Block* copy = allocate(epoch, extra ? roomy(block->used + extra, Relaxed) : block->used, Relaxed);
        append(copy, block, height);
        for (size_t i = 0; i < copy->used; ++i) {
            copy->ends()[i] = static_cast<uint32_t>(end_of(block, i, height, size));
        }
        drop(block, height);
        return copy;
    }

    // A reference to the block; to a copy that carries `fresh` if it carries `epoch`, and so on below it.
    static Block* frozen(Block* block, unsigned height, Epoch epoch, Epoch fresh) {
        if (block->epoch != epoch) {
            block->count.up();
            return block;
        }
        Block* copy = allocate(fresh, block->used, shape_of(block, height));
        append(copy, block, height);
        if (height == 0) return copy;
        if (block->relaxed) std::memcpy(copy->ends(), block->ends(), block->used * sizeof(uint32_t));
        try {
            for (size_t i = 0; i < copy->used; ++i) {
                Block* below = frozen(copy->children()[i], height - 1, epoch, fresh);
                drop(std::exchange(copy->children()[i], below), height - 1);
            }
        } catch (...) {
            drop(copy, height);
            throw;
        }
        return copy;
    }

    // ---- for files: these blocks have epoch 0, which no heap has, and belong to the caller.
    // Makes a chunk and takes over the references of the items.
    static Block* make_leaf(const Item* items, size_t count) {
        Block* block = allocate(0, count, Chunk);
        block->used = static_cast<uint16_t>(count);
        std::memcpy(static_cast<void*>(block->items()), items, count * sizeof(Item));
        return block;
    }
    // Makes an inner block, which takes its own references to the children; relaxed if `ends` is not null.
    static Block* make_inner(Block* const* children, size_t count, const uint32_t* ends) {
        Block* block = allocate(0, count, ends ? Relaxed : Regular);
        block->used = static_cast<uint16_t>(count);
        for (size_t i = 0; i < count; ++i) {
            block->children()[i] = children[i];
            children[i]->count.up();
        }
        if (ends) std::memcpy(block->ends(), ends, count * sizeof(uint32_t));
        return block;
    }

    // ---- walks
    // Calls f(Item*, count) for the chunks that carry `epoch`.
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
        const size_t own = bytes(block->capacity, shape_of(block, height));
        size_t sum = own;
        for (size_t i = 0; i < block->used; ++i) {
            sum += height == 0 ? of(block->items()[i]) : sum_bytes(block->children()[i], height - 1, seen, of);
        }
        seen.learn(block, sum, own);
        return sum;
    }
};

}  // namespace turnwise::state
