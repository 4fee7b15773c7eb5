// The host of the tests in C++: leaves that know how often they are held, and what a failure prints.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "state/heap.h"

namespace turnwise::state {

// The tests' leaf: an object that knows how often it is held, exactly.
struct Leaf {
    std::atomic<int> count{0};
    long id = 0;
};
void* host_allocate(size_t bytes) noexcept {
    return std::malloc(bytes);
}
void* host_resize(void* memory, size_t bytes) noexcept {
    return std::realloc(memory, bytes);
}
void host_free(void* memory) noexcept {
    std::free(memory);
}
void retain(Leaf* leaf) noexcept {
    leaf->count.fetch_add(1, std::memory_order_relaxed);
}
void release(Leaf* leaf) noexcept {
    leaf->count.fetch_sub(1, std::memory_order_acq_rel);
}

}  // namespace turnwise::state

using namespace turnwise::state;

static std::atomic<int> failures{0};
static unsigned seed = 0;

#define EXPECT(condition)                                                                                   \
    do {                                                                                                    \
        if (!(condition)) {                                                                                 \
            if (failures++ < 20) std::printf("%s:%d: seed %u: %s\n", __FILE__, __LINE__, seed, #condition); \
        }                                                                                                   \
    } while (false)

// Leaves by number; each test ends with all of them at zero.
class Leaves {
  public:
    explicit Leaves(size_t size) : leaves_(new Leaf[size]), size_(size) {
        for (size_t i = 0; i < size; ++i) leaves_[i].id = long(i);
    }
    ~Leaves() {
        for (size_t i = 0; i < size_; ++i) EXPECT(leaves_[i].count == 0);
    }
    Leaf* operator[](size_t i) { return &leaves_[i % size_]; }
    // A leaf with a reference, for who takes it over.
    Leaf* taken(size_t i) {
        retain((*this)[i]);
        return (*this)[i];
    }
    int held() const {
        int sum = 0;
        for (size_t i = 0; i < size_; ++i) sum += leaves_[i].count;
        return sum;
    }

  private:
    std::unique_ptr<Leaf[]> leaves_;
    size_t size_;
};

using Random = std::mt19937;
static size_t below(Random& random, size_t bound) {
    return bound ? random() % bound : 0;
}
