// Numbers keys 0, 1, ... in the order of first appearance.
#pragma once

#include <cstdint>

namespace turnwise {

// Sets ids[i] to the number of keys[i] among the distinct keys. Returns how many distinct keys there are. `ids` may be
// the same memory as `keys`.
int64_t factorize(const int64_t* keys, int64_t count, int64_t* ids);

// The same for pairs (first[i], second[i]). Both must be dense ids already; `seconds` is the number of distinct values
// of `second`. `ids` may be the same memory as `first`.
int64_t factorize_pairs(const int64_t* first, const int64_t* second, int64_t seconds, int64_t count, int64_t* ids);

}  // namespace turnwise
