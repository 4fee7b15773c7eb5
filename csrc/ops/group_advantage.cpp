#include "ops/group_advantage.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "core/check.h"
#include "core/float16.h"
#include "core/parallel.h"
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

// Sums of a group's values as offsets from its first value, so that equal values give exact zeros. Because the first
// value is a member of the group, sum of squares minus squared sum loses at most log2(n) bits (Samuelson's inequality).
struct Sums {
    int64_t count = 0;  // members
    double base = 0;    // the first value
    double sum = 0;     // sum of value - base
    double square = 0;  // sum of (value - base)^2

    double add(double value) {
        if (count == 0) base = value;
        return add_to(value);
    }
    // For a group whose base is set.
    double add_to(double value) {
        const double offset = value - base;
        ++count;
        sum += offset;
        square += offset * offset;
        return offset;
    }
    double mean_offset() const { return sum / double(count); }
};

// Reciprocals of a group's size. They are kept for the next group, because groups often have the same size and
// divisions are slow.
struct Shares {
    int64_t count = 0;       // members
    double of_mean = 0;      // 1 / members
    double of_variance = 0;  // 1 / (members - ddof)

    void prepare(int64_t members, int ddof) {
        if (members == count) return;
        count = members;
        of_mean = 1 / double(members);
        of_variance = members > ddof ? 1 / double(members - ddof) : 0;
    }
};

// The range of a group's values, and the largest magnitude of the rewards that they come from.
struct Range {
    double low = std::numeric_limits<double>::infinity();
    double high = -std::numeric_limits<double>::infinity();
    double largest = 0;

    void add(double value, double magnitude) {
        low = std::min(low, value);
        high = std::max(high, value);
        largest = std::max(largest, magnitude);
    }
    // True if the values differ by rounding only.
    bool is_tied(double tie) const { return high - low <= tie * largest; }
};

// Sums for Center::length_weighted.
struct Weights {
    double total = 0;     // sum of lengths
    double weighted = 0;  // sum of length * (value - base)

    void add(double length, double offset) {
        total += length;
        weighted += length * offset;
    }
};

// advantage = (value * scale - center) * factor
struct Line {
    double scale = 1;   // kSmaller for groups whose values are too large to be squared, else 1
    double center = 0;  // see Center; times scale
    double factor = 0;  // 1 / (std + eps), or 1 (leave_one_out: times n / (n - 1)); divided by scale; 0: no advantage
};

constexpr double kSmaller = 0x1p-600;  // makes the square of the largest double finite; a power of two is exact

bool is_finite(double value) {
    return value - value == 0;
}

// The line of a group of one member.
Line lone(const GroupAdvantageOptions& o) {
    require(o.singleton != Singleton::error, "group_ids: a group has a single member, and singleton='error'");
    if (o.singleton == Singleton::zero) return {};
    return {1, 0, o.scale == Scale::std ? 1 / (1 + o.eps) : 1};
}

// The line of a group. `tied`: its values differ by rounding only. `scale`: what the group's values were multiplied by
// before they were summed.
inline Line line_of(const Sums& g, const Weights* weights, bool tied, const GroupAdvantageOptions& o, Shares& shares,
                    double scale = 1) {
    if (g.count == 0) return {};
    const bool compared = o.center != Center::none || o.scale != Scale::none;
    if (g.count == 1 && compared) return lone(o);
    if (tied && compared) return {};
    shares.prepare(g.count, o.ddof);
    const double mean = g.sum * shares.of_mean;
    Line line{scale, 0, 1};
    if (o.center != Center::none) line.center = g.base + mean;
    if (o.center == Center::leave_one_out) line.factor = double(g.count) / double(g.count - 1);
    if (o.center == Center::length_weighted && weights->total > 0) {
        line.center = g.base + weights->weighted / weights->total;
    }
    const double std = std::sqrt(std::max(0.0, g.square - g.sum * mean) * shares.of_variance);
    if (std < o.min_std * scale || (o.scale == Scale::std && (std == 0 || g.square == 0))) return {};
    line.factor /= o.scale == Scale::std ? std + o.eps * scale : scale;
    return line;
}

struct Rows {
    int64_t count;         // rows
    const int64_t* group;  // [count]
    const bool* valid;     // [count]: rows that enter the statistics; null: all
    const double* length;  // [count]: weights; null: 1

    bool enters(int64_t row) const { return valid == nullptr || valid[row]; }
};

int64_t checked_group(const Rows& rows, int64_t row, int64_t groups) {
    const int64_t group = rows.group[row];
    if (uint64_t(group) >= uint64_t(groups)) throw InvalidInput("group_ids: an id is out of range");
    return group;
}

// One entry per (group, trajectory), with the mean of its rows.
struct Entries {
    std::vector<int64_t> of_row;  // [rows]: the row's entry
    std::vector<int64_t> group;   // [entries]: the entry's group
    std::vector<Sums> sums;       // [entries]: sums of its rewards
    std::vector<double> largest;  // [entries]: largest magnitude of its rewards
    std::vector<double> length;   // [entries]: sum of its rows' lengths
};

template <class T>
Entries pool_trajectories(const T* rewards, const Rows& rows, const int64_t* trajectories, int64_t groups) {
    Entries entries;
    entries.of_row.assign(size_t(rows.count), 0);
    // Collect the rows that enter the statistics.
    std::vector<int64_t> chosen, group, trajectory;
    for (int64_t row = 0; row < rows.count; ++row) {
        if (!rows.enters(row)) continue;
        chosen.push_back(row);
        group.push_back(checked_group(rows, row, groups));
        trajectory.push_back(trajectories[row]);
    }
    const int64_t count = int64_t(chosen.size());
    std::vector<int64_t> entry(chosen.size());
    // Number the pairs of group and trajectory. Both ids are made dense first, so that a pair fits one key.
    factorize(group.data(), count, entry.data());
    const int64_t distinct = factorize(trajectory.data(), count, trajectory.data());
    const int64_t found = factorize_pairs(entry.data(), trajectory.data(), distinct, count, entry.data());
    // Add each row to its entry.
    entries.sums.resize(size_t(found));
    entries.group.resize(size_t(found));
    entries.largest.resize(size_t(found));
    entries.length.resize(size_t(found));
    for (int64_t i = 0; i < count; ++i) {
        const size_t e = size_t(entry[size_t(i)]);
        entries.of_row[size_t(chosen[size_t(i)])] = entry[size_t(i)];
        entries.group[e] = group[size_t(i)];
        const double reward = to_double(rewards[chosen[size_t(i)]]);
        entries.sums[e].add(reward);
        entries.largest[e] = std::max(entries.largest[e], std::abs(reward));
        entries.length[e] += rows.length ? rows.length[chosen[size_t(i)]] : 1;
    }
    return entries;
}

// The line of every group. each(visit) calls visit(group, value, length, magnitude) for all values that enter the
// statistics; the magnitude is that of the largest reward in the value.
template <class Each>
std::vector<Line> lines_of(const Each& each, int64_t groups, const GroupAdvantageOptions& o, double tie) {
    const bool weighted = o.center == Center::length_weighted;
    std::vector<Sums> sums(static_cast<size_t>(groups));
    std::vector<Range> ranges(sums.size());
    std::vector<Weights> weights(weighted ? sums.size() : 0);
    std::vector<double> scale;
    each([&](int64_t group, double value, double, double magnitude) { ranges[size_t(group)].add(value, magnitude); });
    const auto accumulate = [&](int64_t group, double value, double length, double) {
        const size_t g = size_t(group);
        const double offset = sums[g].add(scale.empty() ? value : value * scale[g]);
        if (weighted) weights[g].add(length, offset);
    };
    each(accumulate);
    // Groups whose squares overflow are summed again, with smaller values.
    const auto overflows = [](const Sums& g) { return !is_finite(g.square); };
    if (std::any_of(sums.begin(), sums.end(), overflows)) {
        each(
            [](int64_t, double value, double, double) { require(is_finite(value), "rewards: a value is not finite"); });
        for (const Sums& g : sums) scale.push_back(overflows(g) ? kSmaller : 1);
        std::fill(sums.begin(), sums.end(), Sums{});
        std::fill(weights.begin(), weights.end(), Weights{});
        each(accumulate);
    }
    std::vector<Line> lines(sums.size());
    Shares shares;
    for (size_t g = 0; g < lines.size(); ++g) {
        const double by = scale.empty() ? 1 : scale[g];
        lines[g] = line_of(sums[g], weighted ? &weights[g] : nullptr, ranges[g].is_tied(tie), o, shares, by);
    }
    return lines;
}

double apply(const Line& line, double value) {
    return (value * line.scale - line.center) * line.factor;
}

// The fast path for rows sorted by group, as rollouts of one prompt usually are. It needs no table, and threads share
// the groups. `run` returns false if rows are not sorted or an input is wrong; by_rows then computes the result or
// reports the error. Both paths give the same bits.
template <class T>
class Runs {
  public:
    Runs(const T* rewards, const Rows& rows, int64_t groups, const GroupAdvantageOptions& o, T* advantages)
        : rewards_(rewards),
          rows_(rows),
          groups_(groups < 0 ? std::numeric_limits<int64_t>::max() : groups),
          o_(o),
          advantages_(advantages) {}

    bool run(int threads) {
        const int most = rows_.valid == nullptr ? threads : 1;
        const int parts = int(std::max<int64_t>(1, std::min<int64_t>(most, rows_.count / kRowsPerThread)));
        std::atomic<bool> fine{true};
        run_parts(parts, [&](int part) {
            const int64_t begin = start_of(part, parts), end = start_of(part + 1, parts);
            if (!(rows_.valid ? walk<true>(begin, end) : walk<false>(begin, end))) fine = false;
        });
        return fine;
    }

  private:
    static constexpr int64_t kRowsPerThread = 16384;  // below this a second thread costs more than it gains

    // The first row of a part. A part begins where a group does.
    int64_t start_of(int part, int parts) const {
        int64_t row = rows_.count * part / parts;
        if (part == 0 || part == parts) return row;
        while (row < rows_.count && rows_.group[row] == rows_.group[row - 1]) ++row;
        return row;
    }

    // Sums the group that begins at `row`, over its valid rows. Returns the row where it ends.
    template <bool has_valid>
    int64_t sum_up(int64_t row, int64_t end, Sums& sums) const {
        const int64_t group = rows_.group[row];
        sums = {1, to_double(rewards_[row]), 0, 0};
        sums.square = sums.base - sums.base;  // NaN if the reward is not finite
        if constexpr (has_valid) {
            while (++row < end && (!rows_.valid[row] || rows_.group[row] == group)) {
                if (rows_.valid[row]) sums.add_to(to_double(rewards_[row]));
            }
            return row;
        }
        const int64_t first = row;
        while (++row < end && rows_.group[row] == group) {
        }
        for (int64_t i = first + 1; i < row; ++i) sums.add_to(to_double(rewards_[i]));
        return row;
    }

    // False if a group's squared offsets are too large for a tie. Saves most groups the search for their range.
    static bool may_tie(const Sums& sums) {
        const double most = 2 * kTie<T> * sums.base;  // twice the largest offset within a tie
        return sums.square <= double(sums.count) * (most * most);
    }

    // The range of rows [begin, end), which belong to one group.
    template <bool has_valid>
    Range range_of(int64_t begin, int64_t end) const {
        Range range;
        for (int64_t i = begin; i < end; ++i) {
            const double value = to_double(rewards_[i]);
            if (!has_valid || rows_.valid[i]) range.add(value, std::abs(value));
        }
        return range;
    }

    // Writes the advantages of rows [begin, end), group by group. False if by_rows must take over.
    template <bool has_valid>
    bool walk(int64_t begin, int64_t end) const {
        int64_t before = begin > 0 ? rows_.group[begin - 1] : -1;
        Shares shares;
        Sums sums;
        for (int64_t row = begin, next; row < end; row = next) {
            next = row + 1;
            if (has_valid && !rows_.valid[row]) {
                advantages_[row] = from_double<T>(0);
                continue;
            }
            const int64_t group = rows_.group[row];
            if (group <= before || group >= groups_) return false;
            before = group;
            next = sum_up<has_valid>(row, end, sums);
            if (!is_finite(sums.square) || (sums.count == 1 && o_.singleton == Singleton::error)) return false;
            const bool tied = may_tie(sums) && range_of<has_valid>(row, next).is_tied(kTie<T>);
            const Line line = line_of(sums, nullptr, tied, o_, shares);  // its scale is 1
            const T* __restrict from = rewards_;
            T* __restrict to = advantages_;
            for (int64_t i = row; i < next; ++i) {
                const double advantage = (to_double(from[i]) - line.center) * line.factor;
                to[i] = from_double<T>(!has_valid || rows_.valid[i] ? advantage : 0);
            }
        }
        return true;
    }

    const T* rewards_;  // [rows]
    const Rows& rows_;
    int64_t groups_;  // ids are below it
    const GroupAdvantageOptions& o_;
    T* advantages_;  // [rows], output
};

// Returns the number of groups, and finds it if the caller gave none. If ids are far above the number of rows,
// renumbers them into `numbered`, because a table indexed by them would need unbounded memory.
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

// Every row is a member of its group.
template <class T>
void by_rows(const T* rewards, const Rows& rows, int64_t groups, const GroupAdvantageOptions& o, T* advantages) {
    const auto each = [&](const auto& visit) {
        for (int64_t row = 0; row < rows.count; ++row) {
            if (!rows.enters(row)) continue;
            const double value = to_double(rewards[row]);
            visit(checked_group(rows, row, groups), value, rows.length ? rows.length[row] : 1, std::abs(value));
        }
    };
    const std::vector<Line> lines = lines_of(each, groups, o, kTie<T>);
    for (int64_t row = 0; row < rows.count; ++row) {
        const bool enters = rows.enters(row);
        advantages[row] = from_double<T>(enters ? apply(lines[size_t(rows.group[row])], to_double(rewards[row])) : 0);
    }
}

// The mean of each trajectory's rows is a member of the group; all its rows get the trajectory's advantage.
template <class T>
void by_trajectories(const T* rewards, const Rows& rows, const int64_t* trajectories, int64_t groups,
                     const GroupAdvantageOptions& o, T* advantages) {
    const Entries entries = pool_trajectories(rewards, rows, trajectories, groups);
    std::vector<double> value(entries.sums.size());
    for (size_t e = 0; e < value.size(); ++e) value[e] = entries.sums[e].base + entries.sums[e].mean_offset();
    const auto each = [&](const auto& visit) {
        for (size_t e = 0; e < value.size(); ++e) {
            visit(entries.group[e], value[e], entries.length[e], entries.largest[e]);
        }
    };
    const std::vector<Line> lines = lines_of(each, groups, o, kTie<T>);
    for (int64_t row = 0; row < rows.count; ++row) {
        double advantage = 0;
        if (rows.enters(row)) {
            const size_t e = size_t(entries.of_row[size_t(row)]);
            advantage = apply(lines[size_t(entries.group[e])], value[e]);
        }
        advantages[row] = from_double<T>(advantage);
    }
}

template <class T>
void run(const GroupAdvantageInput& in, const GroupAdvantageOptions& o, const View& out, int threads) {
    Rows rows{in.rewards.shape[0], in.group_ids.as<int64_t>(), in.valid.as<bool>(), in.lengths.as<double>()};
    const T* rewards = in.rewards.as<T>();
    check_lengths(rows);
    if (!o.by_trajectory && o.center != Center::length_weighted) {
        if (Runs<T>(rewards, rows, in.num_groups, o, out.as<T>()).run(threads)) return;
    }
    std::vector<int64_t> numbered;
    const int64_t groups = settle_groups(rows, in.num_groups, numbered);
    if (o.by_trajectory) {
        by_trajectories(rewards, rows, in.trajectory_ids.as<int64_t>(), groups, o, out.as<T>());
    } else {
        by_rows(rewards, rows, groups, o, out.as<T>());
    }
}

}  // namespace

void check_group_advantage(const GroupAdvantageInput& input, const GroupAdvantageOptions& options,
                           const View& advantages) {
    const View& rewards = input.rewards;
    if (rewards.dims != 1) reject_shape("rewards", rewards, "[B]");
    require(is_contiguous_1d(rewards), "rewards: expected a contiguous tensor");
    const auto check_column = [&](const char* name, const View& column, DType dtype) {
        if (!column) return;
        require_shape_of(name, column, "rewards", rewards);
        require(is_contiguous_1d(column),
                "group_ids, trajectory_ids, lengths, valid, advantages: expected contiguous tensors");
        require_dtype(name, column, {dtype});
    };
    if (options.by_trajectory) require_given("trajectory_ids", input.trajectory_ids, "pool is 'trajectory'");
    if (options.center == Center::length_weighted) {
        require_given("lengths", input.lengths, "center is 'length_weighted'");
    }
    check_column("group_ids", input.group_ids, DType::i64);
    check_column("trajectory_ids", input.trajectory_ids, DType::i64);
    check_column("lengths", input.lengths, DType::f64);
    check_column("valid", input.valid, DType::boolean);
    check_column("advantages", advantages, rewards.dtype);
}

void group_advantage(const GroupAdvantageInput& input, const GroupAdvantageOptions& options, const View& advantages,
                     int threads) {
    check_group_advantage(input, options, advantages);
    switch (input.rewards.dtype) {
        case DType::f32:
            return run<float>(input, options, advantages, threads);
        case DType::f64:
            return run<double>(input, options, advantages, threads);
        case DType::bf16:
            return run<BFloat16>(input, options, advantages, threads);
        case DType::f16:
            return run<Half>(input, options, advantages, threads);
        default:
            throw InvalidInput(std::string("rewards.dtype=") + name_of(input.rewards.dtype) + ": expected a float");
    }
}

}  // namespace turnwise
