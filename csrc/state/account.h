// Measures the memory of versions, and the memory that they would need if they shared nothing.
#pragma once

#include <unordered_map>

#include "state/heap.h"

namespace turnwise::state {

class Account {
  public:
    void add(const Heap& heap);

    // Number of distinct containers.
    size_t containers() const noexcept { return containers_; }
    // Bytes of blocks and nodes, each counted once. Leaves belong to the host and are not counted.
    size_t bytes() const noexcept { return bytes_; }
    // The same bytes, counted again for each version that holds them.
    size_t unshared_bytes() const noexcept { return unshared_; }

    // The sum below a block that was met before, or null; see RadixArray::bytes.
    const size_t* known(const void* block) const {
        const auto found = seen_.find(block);
        return found == seen_.end() ? nullptr : &found->second;
    }
    // Remembers a block: `sum` bytes including everything below it, `own` bytes by itself.
    void learn(const void* block, size_t sum, size_t own) {
        seen_.emplace(block, sum);
        bytes_ += own;
    }

  private:
    size_t of_node(const Node* node);

    std::unordered_map<const void*, size_t> seen_;  // block or node -> bytes including everything below it
    size_t containers_ = 0;
    size_t bytes_ = 0;
    size_t unshared_ = 0;
};

}  // namespace turnwise::state
