#include "ops/group_advantage.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/check.h"
#include "core/float16.h"
#include "ops/factorize.h"

namespace turnwise {
namespace {

double to_double(double value) {
    return value;
}
double to_double(float value) {
    return value;
}
double to_double(BFloat16 value) {
    return to_float(value);
}
double to_double(Half value) {
    return to_float(value);
}

template <class T>
T from_double(double value);
template <>
double from_double<double>(double value) {
    return value;
}
template <>
float from_double<float>(double value) {
    return float(value);
}
template <>
BFloat16 from_double<BFloat16>(double value) {
    return to_bfloat16(float(value));
}
template <>
Half from_double<Half>(double value) {
    return to_half(float(value));
}

// Sums of a group's values, as offsets from its first: equal values then give exact zeros, and since the first value
// is a member of the group, sum of squares minus squared sum loses no more than log2(n) bits (Samuelson's inequality).
struct Sums {
    int64_t count = 0;
    double base = 0, sum = 0, square = 0;

    double add(double value) {
        if (count++ == 0) base = value;
        const double offset = value - base;
        sum += offset;
        square += offset * offset;
        return offset;
    }
    double mean_offset() const { return sum / double(count); }
};

struct Weights {
    double total = 0, weighted = 0;

    void add(double length, double offset) {
        total += length;
        weighted += length * offset;
    }
};

// What turns a value into an advantage: (value - center) * factor.
struct Line {
    double center = 0, factor = 0;
};

Line line_of(const Sums& g, const Weights* weights, const GroupAdvantageOptions& o) {
    if (g.count == 0) return {};
    require(g.square - g.square == 0, "rewards: a value is not finite");  // NaN and the infinities reach the sum
    const double n = double(g.count);
    const bool grouped = o.center != Center::none || o.scale != Scale::none;
    if (g.count == 1 && grouped) {
        require(o.singleton != Singleton::error, "group_ids: a group has a single member, and singleton='error'");
        if (o.singleton == Singleton::zero) return {};
        return {0, o.scale == Scale::std ? 1 / (1 + o.eps) : 1};
    }
    Line line{0, 1};
    if (o.center != Center::none) line.center = g.base + g.mean_offset();
    if (o.center == Center::leave_one_out) line.factor = n / (n - 1);
    if (o.center == Center::length_weighted && weights->total > 0) {
        line.center = g.base + weights->weighted / weights->total;
    }
    const double variance = std::max(0.0, g.square - g.sum * g.mean_offset()) / (n - o.ddof);
    const double std = g.square == 0 ? 0 : std::sqrt(variance);
    if (std < o.min_std || (o.scale == Scale::std && std == 0)) return {};
    if (o.scale == Scale::std) line.factor /= std + o.eps;
    return line;
}

struct Rows {
    int64_t count;
    const int64_t* group;
    const bool* valid;
    const double* length;

    bool enters(int64_t row) const { return valid == nullptr || valid[row]; }
};

int64_t checked_group(const Rows& rows, int64_t row, int64_t groups) {
    const int64_t group = rows.group[row];
    if (uint64_t(group) >= uint64_t(groups)) throw InvalidInput("group_ids: an id is out of range");
    return group;
}

// One entry per row, or per (group, trajectory): the mean of its rows.
struct Entries {
    std::vector<int64_t> of_row, group;
    std::vector<Sums> sums;
    std::vector<double> length;
};

template <class T>
Entries pool_trajectories(const T* rewards, const Rows& rows, const int64_t* trajectories, int64_t groups) {
    Entries entries;
    entries.of_row.assign(size_t(rows.count), 0);
    std::vector<int64_t> chosen, group, trajectory;
    for (int64_t row = 0; row < rows.count; ++row) {
        if (!rows.enters(row)) continue;
        chosen.push_back(row);
        group.push_back(checked_group(rows, row, groups));
        trajectory.push_back(trajectories[row]);
    }
    const int64_t count = int64_t(chosen.size());
    std::vector<int64_t> entry(chosen.size());
    // Group ids made dense first, so that the pair of both fits one key.
    factorize(group.data(), count, entry.data());
    const int64_t distinct = factorize(trajectory.data(), count, trajectory.data());
    const int64_t found = factorize_pairs(entry.data(), trajectory.data(), distinct, count, entry.data());
    entries.sums.resize(size_t(found));
    entries.group.resize(size_t(found));
    entries.length.resize(size_t(found));
    for (int64_t i = 0; i < count; ++i) {
        const size_t e = size_t(entry[size_t(i)]);
        entries.of_row[size_t(chosen[size_t(i)])] = entry[size_t(i)];
        entries.group[e] = group[size_t(i)];
        entries.sums[e].add(to_double(rewards[chosen[size_t(i)]]));
        entries.length[e] += rows.length ? rows.length[chosen[size_t(i)]] : 1;
    }
    return entries;
}

struct GroupTable {
    explicit GroupTable(int64_t groups, bool weighted) : sums(size_t(groups)), weights(weighted ? size_t(groups) : 0) {}

    std::vector<Line> lines(const GroupAdvantageOptions& options) const {
        std::vector<Line> result(sums.size());
        for (size_t g = 0; g < sums.size(); ++g) {
            result[g] = line_of(sums[g], weights.empty() ? nullptr : &weights[g], options);
        }
        return result;
    }

    std::vector<Sums> sums;
    std::vector<Weights> weights;
};

// The number of groups where the caller did not say; ids far above the number of rows, which would ask for any amount
// of memory, are numbered anew into `numbered`.
int64_t settle_groups(Rows& rows, int64_t groups, std::vector<int64_t>& numbered) {
    if (groups < 0) {
        int64_t largest = -1;
        for (int64_t row = 0; row < rows.count; ++row) {
            if (rows.enters(row)) largest = std::max(largest, rows.group[row]);
        }
        require(largest < std::numeric_limits<int64_t>::max(), "group_ids: an id is 2**63 - 1, expected less");
        groups = largest + 1;
    }
    if (groups <= 2 * rows.count + 1024) return groups;
    for (int64_t row = 0; row < rows.count; ++row) {
        if (rows.enters(row)) checked_group(rows, row, groups);
    }
    numbered.resize(size_t(rows.count));
    groups = factorize(rows.group, rows.count, numbered.data());
    rows.group = numbered.data();
    return groups;
}

void check_lengths(const Rows& rows) {
    bool bad = false;
    for (int64_t row = 0; rows.length && row < rows.count; ++row) bad |= rows.enters(row) && !(rows.length[row] >= 0);
    require(!bad, "lengths: a value is negative");
}

template <class T>
void by_rows(const T* rewards, const Rows& rows, int64_t groups, const GroupAdvantageOptions& o, T* advantages) {
    GroupTable table(groups, o.center == Center::length_weighted);
    // Rows of one group often stand together: the sums stay in registers until the group changes.
    Sums run;
    int64_t current = -1;
    for (int64_t row = 0; row < rows.count; ++row) {
        if (!rows.enters(row)) continue;
        if (rows.group[row] != current || current < 0) {
            if (current >= 0) table.sums[size_t(current)] = run;
            current = checked_group(rows, row, groups);
            run = table.sums[size_t(current)];
        }
        const double offset = run.add(to_double(rewards[row]));
        if (!table.weights.empty()) table.weights[size_t(current)].add(rows.length[row], offset);
    }
    if (current >= 0) table.sums[size_t(current)] = run;
    const std::vector<Line> lines = table.lines(o);
    for (int64_t row = 0; row < rows.count; ++row) {
        const bool enters = rows.enters(row);
        const Line line = enters ? lines[size_t(rows.group[row])] : Line{};
        const double value = enters ? to_double(rewards[row]) : 0;
        advantages[row] = from_double<T>((value - line.center) * line.factor);
    }
}

template <class T>
void by_trajectories(const T* rewards, const Rows& rows, const int64_t* trajectories, int64_t groups,
                     const GroupAdvantageOptions& o, T* advantages) {
    GroupTable table(groups, o.center == Center::length_weighted);
    const Entries entries = pool_trajectories(rewards, rows, trajectories, groups);
    std::vector<double> value(entries.sums.size());
    for (size_t e = 0; e < value.size(); ++e) {
        value[e] = entries.sums[e].base + entries.sums[e].mean_offset();
        const double offset = table.sums[size_t(entries.group[e])].add(value[e]);
        if (!table.weights.empty()) table.weights[size_t(entries.group[e])].add(entries.length[e], offset);
    }
    const std::vector<Line> lines = table.lines(o);
    for (int64_t row = 0; row < rows.count; ++row) {
        double advantage = 0;
        if (rows.enters(row)) {
            const size_t e = size_t(entries.of_row[size_t(row)]);
            const Line& line = lines[size_t(entries.group[e])];
            advantage = (value[e] - line.center) * line.factor;
        }
        advantages[row] = from_double<T>(advantage);
    }
}

template <class T>
void run(const GroupAdvantageInput& in, const GroupAdvantageOptions& o, const View& out) {
    Rows rows{in.rewards.shape[0], in.group_ids.as<int64_t>(), in.valid.as<bool>(), in.lengths.as<double>()};
    const T* rewards = in.rewards.as<T>();
    check_lengths(rows);
    std::vector<int64_t> numbered;
    const int64_t groups = settle_groups(rows, in.num_groups, numbered);
    if (o.by_trajectory) {
        by_trajectories(rewards, rows, in.trajectory_ids.as<int64_t>(), groups, o, out.as<T>());
    } else {
        by_rows(rewards, rows, groups, o, out.as<T>());
    }
}

}  // namespace

void group_advantage(const GroupAdvantageInput& input, const GroupAdvantageOptions& options, const View& advantages) {
    const View& rewards = input.rewards;
    require(rewards.dims == 1, "rewards: expected one dimension");
    for (const View* column : {&input.group_ids, &input.trajectory_ids, &input.lengths, &input.valid, &advantages}) {
        if (!*column) continue;
        require(column->dims == 1 && column->shape[0] == rewards.shape[0],
                "every column must have the shape of rewards");
        require(is_contiguous_1d(*column), "every column must be contiguous");
    }
    require(is_contiguous_1d(rewards) && advantages.dtype == rewards.dtype, "rewards: expected a contiguous tensor");
    require(input.group_ids.dtype == DType::i64, "group_ids: expected int64");
    require(!options.by_trajectory || input.trajectory_ids, "trajectory_ids: missing");
    require(!input.trajectory_ids || input.trajectory_ids.dtype == DType::i64, "trajectory_ids: expected int64");
    require(options.center != Center::length_weighted || input.lengths, "lengths: missing");
    require(!input.lengths || input.lengths.dtype == DType::f64, "lengths: expected float64");
    require(!input.valid || input.valid.dtype == DType::boolean, "valid: expected bool");
    switch (rewards.dtype) {
        case DType::f32:
            return run<float>(input, options, advantages);
        case DType::f64:
            return run<double>(input, options, advantages);
        case DType::bf16:
            return run<BFloat16>(input, options, advantages);
        case DType::f16:
            return run<Half>(input, options, advantages);
        default:
            throw InvalidInput("rewards: expected a floating type");
    }
}

}  // namespace turnwise
