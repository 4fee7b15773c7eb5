// Reference counts of the store's blocks and nodes. In the Python module the GIL guards them. Builds that share
// versions between threads without a lock, such as the C++ tests, define TURNWISE_STATE_THREADS, which makes the counts
// atomic.
#pragma once

#include <cstddef>
#include <cstdint>
#ifdef TURNWISE_STATE_THREADS
#include <atomic>
#endif

namespace turnwise::state {

class Count {
  public:
#ifdef TURNWISE_STATE_THREADS
    void up() noexcept { value_.fetch_add(1, std::memory_order_relaxed); }
    // True if this was the last reference.
    bool down() noexcept { return value_.fetch_sub(1, std::memory_order_acq_rel) == 1; }
    uint32_t value() const noexcept { return value_.load(std::memory_order_relaxed); }

  private:
    std::atomic<uint32_t> value_{1};  // references
#else
    void up() noexcept { ++value_; }
    bool down() noexcept { return --value_ == 0; }
    uint32_t value() const noexcept { return value_; }

  private:
    uint32_t value_ = 1;  // references
#endif
};

// Each heap has an epoch, and may write in place only the blocks and nodes that carry it. A fork gives both sides new
// epochs, so neither may write in place what existed at that moment.
using Epoch = uint64_t;
Epoch next_epoch() noexcept;

// The host's allocator; returns null if memory runs out. Python's allocator has no header per small block, and most
// blocks are small.
void* host_allocate(size_t bytes) noexcept;
void* host_resize(void* memory, size_t bytes) noexcept;
void host_free(void* memory) noexcept;

}  // namespace turnwise::state
