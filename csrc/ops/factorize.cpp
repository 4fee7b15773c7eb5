#include "ops/factorize.h"

#include <algorithm>
#include <vector>

namespace turnwise {
namespace {

uint64_t mix(uint64_t key) {
    key = (key ^ (key >> 32)) * 0x9e3779b97f4a7c15u;
    return key ^ (key >> 29);
}

// For keys in a narrow range: a table indexed by key - low.
template <class Key>
int64_t by_table(Key key, int64_t count, int64_t low, int64_t range, int64_t* ids) {
    std::vector<int32_t> table(size_t(range), -1);
    int32_t distinct = 0;
    for (int64_t i = 0; i < count; ++i) {
        int32_t& id = table[size_t(key(i) - low)];
        if (id < 0) id = distinct++;
        ids[i] = id;
    }
    return distinct;
}

// For any keys: a hash table with linear probing, at most half full.
template <class Key>
int64_t by_hash(Key key, int64_t count, int64_t* ids) {
    size_t capacity = 16;
    while (capacity < size_t(count) * 2) capacity *= 2;
    struct Slot {
        int64_t key;  // undefined if free
        int64_t id;   // -1: free
    };
    std::vector<Slot> slots(capacity, Slot{0, -1});
    int64_t distinct = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t wanted = key(i);
        size_t place = mix(uint64_t(wanted)) & (capacity - 1);
        while (slots[place].id >= 0 && slots[place].key != wanted) place = (place + 1) & (capacity - 1);
        if (slots[place].id < 0) slots[place] = {wanted, distinct++};
        ids[i] = slots[place].id;
    }
    return distinct;
}

template <class Key>
int64_t number(Key key, int64_t count, int64_t* ids) {
    if (count == 0) return 0;
    // The range of the keys decides between the two tables.
    int64_t low = key(0), high = low;
    for (int64_t i = 1; i < count; ++i) {
        low = std::min(low, key(i));
        high = std::max(high, key(i));
    }
    const uint64_t range = uint64_t(high) - uint64_t(low);  // unsigned: the full int64 range must not overflow
    if (range < uint64_t(count) * 4 + 256 && count < INT32_MAX)
        return by_table(key, count, low, int64_t(range) + 1, ids);
    return by_hash(key, count, ids);
}

}  // namespace

int64_t factorize(const int64_t* keys, int64_t count, int64_t* ids) {
    return number([keys](int64_t i) { return keys[i]; }, count, ids);
}

int64_t factorize_pairs(const int64_t* first, const int64_t* second, int64_t seconds, int64_t count, int64_t* ids) {
    // Both ids are below count, so the product fits int64 for any batch that fits memory.
    return number([=](int64_t i) { return first[i] * seconds + second[i]; }, count, ids);
}

}  // namespace turnwise
