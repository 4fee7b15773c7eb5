// The memory of versions, and the memory that they would need if they shared nothing.
#pragma once

#include <unordered_map>

#include "state/heap.h"

namespace turnwise::state {

class Account {
  public:
    void add(const Heap& heap);

    size_t containers() const noexcept { return containers_; }
    // Of blocks and nodes, each once; leaves are the host's.
    size_t bytes() const noexcept { return bytes_; }
    // The same, counted again for each version that holds it.
    size_t unshared_bytes() const noexcept { return unshared_; }

    const size_t* known(const void* block) const {
        const auto found = seen_.find(block);
        return found == seen_.end() ? nullptr : &found->second;
    }
    void learn(const void* block, size_t sum, size_t own) {
        seen_.emplace(block, sum);
        bytes_ += own;
    }

  private:
    size_t of_node(const Node* node);

    std::unordered_map<const void*, size_t> seen_;
    size_t containers_ = 0;
    size_t bytes_ = 0;
    size_t unshared_ = 0;
};

}  // namespace turnwise::state
