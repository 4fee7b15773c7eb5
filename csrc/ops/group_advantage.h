// Advantages within groups; statistics in float64.
#pragma once

#include "core/view.h"

namespace turnwise {

enum class Center { mean, leave_one_out, none, length_weighted };
enum class Scale { std, none };
enum class Singleton { zero, raw, error };

struct GroupAdvantageOptions {
    bool by_trajectory;
    Center center;
    Scale scale;
    Singleton singleton;
    int ddof;
    double eps;
    double min_std;
};

struct GroupAdvantageInput {
    View rewards;         // [B] f32, f64, bf16, f16
    View group_ids;       // [B] i64
    View trajectory_ids;  // [B] i64, or none
    View lengths;         // [B] f64, or none
    View valid;           // [B] boolean, or none
    int64_t num_groups;   // -1: the largest id of a valid row decides
};

// Shapes, types and layouts. Throws InvalidInput.
void check_group_advantage(const GroupAdvantageInput& input, const GroupAdvantageOptions& options,
                           const View& advantages);

// Writes advantages [B] (dtype of rewards, contiguous). All inputs contiguous. Throws InvalidInput.
void group_advantage(const GroupAdvantageInput& input, const GroupAdvantageOptions& options, const View& advantages,
                     int threads = 1);

}  // namespace turnwise
