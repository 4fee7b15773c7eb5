// Advantages of rewards within groups. The statistics are computed in float64.
#pragma once

#include "core/view.h"

namespace turnwise {

// Values of a group that differ by at most this share of its rewards' largest magnitude differ by rounding only: four
// roundings of the rewards' type. Narrower types than float have coarser steps, so only equal values tie.
template <class T>
constexpr double kTie = sizeof(T) == 8 ? 0x1p-50 : 0x1p-21;

// The value that is subtracted from a reward.
enum class Center {
    mean,             // of the group
    leave_one_out,    // mean of the group's other members
    none,             // 0
    length_weighted,  // sum(length * reward) / sum(length) of the group
};
// The value that a centred reward is divided by.
enum class Scale {
    std,   // the group's standard deviation + eps
    none,  // 1
};
// The advantage of a group's only member.
enum class Singleton {
    zero,   // 0
    raw,    // its reward; divided by 1 + eps for Scale::std
    error,  // InvalidInput
};

struct GroupAdvantageOptions {
    bool by_trajectory;   // statistics use one value per trajectory, the mean of its rows
    Center center;        // subtracted from the rewards
    Scale scale;          // divides the centred rewards
    Singleton singleton;  // for groups of one member; unused if neither center nor scale is on
    int ddof;             // the variance is divided by members - ddof
    double eps;           // added to the standard deviation
    double min_std;       // groups with a smaller standard deviation get 0
};

struct GroupAdvantageInput {
    View rewards;         // [B] f32, f64, bf16, f16
    View group_ids;       // [B] i64
    View trajectory_ids;  // [B] i64; or none
    View lengths;         // [B] f64, the weights of Center::length_weighted; or none
    View valid;           // [B] boolean, rows that enter the statistics; or none: all
    int64_t num_groups;   // ids are below it; -1: one more than the largest id of a valid row
};

// Checks shapes, types and layouts. Throws InvalidInput.
void check_group_advantage(const GroupAdvantageInput& input, const GroupAdvantageOptions& options,
                           const View& advantages);

// Writes advantages [B] (dtype of rewards, contiguous); rows that are not valid get 0. All inputs must be contiguous.
// Throws InvalidInput.
void group_advantage(const GroupAdvantageInput& input, const GroupAdvantageOptions& options, const View& advantages,
                     int threads = 1);

}  // namespace turnwise
