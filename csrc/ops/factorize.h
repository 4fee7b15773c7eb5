// Dense ids in order of first appearance.
#pragma once

#include <cstdint>

namespace turnwise {

// ids[i] = number of keys[i] among the distinct keys; returns how many there are. ids may be keys.
int64_t factorize(const int64_t* keys, int64_t count, int64_t* ids);

// The same for pairs (first[i], second[i]); both already dense, with `seconds` values of second. ids may be first.
int64_t factorize_pairs(const int64_t* first, const int64_t* second, int64_t seconds, int64_t count, int64_t* ids);

}  // namespace turnwise
