// A value in one word: nothing, a leaf, or the slot of a container in the same heap.
#pragma once

#include <cstdint>

namespace turnwise::state {

// An object of the host: Python's or a test's. The store counts references to it and never looks inside. Its address is
// even. `release` must not call back into the store.
struct Leaf;
void retain(Leaf* leaf) noexcept;
void release(Leaf* leaf) noexcept;

using SlotIndex = uint32_t;
constexpr SlotIndex kNoSlot = 0x7fffffff;  // no slot; also the end of the chain of free slots

class Value {
  public:
    constexpr Value() noexcept = default;
    static Value of(Leaf* leaf) noexcept { return Value(reinterpret_cast<uintptr_t>(leaf)); }
    static Value of(SlotIndex slot) noexcept { return Value(uintptr_t{slot} << 1 | 1); }

    bool empty() const noexcept { return word_ == 0; }
    bool is_slot() const noexcept { return word_ & 1; }
    bool is_leaf() const noexcept { return word_ != 0 && !is_slot(); }
    SlotIndex slot() const noexcept { return static_cast<SlotIndex>(word_ >> 1); }
    Leaf* leaf() const noexcept { return reinterpret_cast<Leaf*>(word_); }
    bool operator==(Value other) const noexcept { return word_ == other.word_; }
    bool operator!=(Value other) const noexcept { return word_ != other.word_; }

    // A Value itself holds no reference. The array or node that contains it takes and drops one by these functions.
    void take() const noexcept {
        if (is_leaf()) retain(leaf());
    }
    void drop() const noexcept {
        if (is_leaf()) release(leaf());
    }

  private:
    explicit constexpr Value(uintptr_t word) noexcept : word_(word) {}
    uintptr_t word_ = 0;  // 0: nothing; even: a leaf's address; odd: slot << 1 | 1
};

}  // namespace turnwise::state
