// Reference counts of the store's blocks and nodes. Python's lock guards them in the module; builds that share versions
// between free threads (the C++ tests do) define TURNWISE_STATE_THREADS, which makes them atomic.
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
    // True when the last reference went.
    bool down() noexcept { return value_.fetch_sub(1, std::memory_order_acq_rel) == 1; }
    uint32_t value() const noexcept { return value_.load(std::memory_order_relaxed); }

  private:
    std::atomic<uint32_t> value_{1};
#else
    void up() noexcept { ++value_; }
    bool down() noexcept { return --value_ == 0; }
    uint32_t value() const noexcept { return value_; }

  private:
    uint32_t value_ = 1;
#endif
};

// Who may write a block or node in place: the one heap whose epoch it bears. A fork gives both sides new epochs, so
// that everything that exists at that moment belongs to neither.
using Epoch = uint64_t;
Epoch next_epoch() noexcept;

// The host's allocator: null where memory runs out. (Python's wastes no header on small blocks, and most are small.)
void* host_allocate(size_t bytes) noexcept;
void* host_resize(void* memory, size_t bytes) noexcept;
void host_free(void* memory) noexcept;

}  // namespace turnwise::state
