#include "cuda/group_advantage.h"

#include <algorithm>

#include "cuda/group_table.h"

namespace turnwise::cuda {
namespace {

constexpr int kThreads =
    512;  // 64k rows are then about one block per multiprocessor (132), which makes the grid barriers fastest

__device__ __forceinline__ double to_double(double value) {
    return value;
}
template <class T>
__device__ __forceinline__ double to_double(T value) {
    return double(to_float(value));
}
__device__ __forceinline__ void put(double* to, double value) {
    *to = value;
}
template <class T>
__device__ __forceinline__ void put(T* to, double value) {
    *to = from_float<T>(float(value));
}

// Trajectories within groups: a hash table of rows. A slot holds the first row that arrived with its pair of ids.
// Timing decides which row that is, and no result depends on it.
struct Trajectories {
    const int64_t* ids;  // [rows]; null: every row is a member by itself
    int* slots;          // [capacity]: rows; -1: empty
    int64_t capacity;    // a power of two, at least twice the rows
    int* entry;          // [rows]: the row that represents this row's trajectory; -1: none
    GroupTable table;    // [rows]: the trajectories' sums, at the row that represents each
};

template <class T>
struct Input {
    const T* rewards;          // [rows]
    const int64_t* group_ids;  // [rows]
    const bool* valid;         // [rows]: rows that enter the statistics; null: all
    const double* lengths;     // [rows]: weights; null: 1
    int64_t rows;              // number of rows
};

// The row's group; kNotValid or kOutside if it is no member of one.
template <class T>
__device__ __forceinline__ int64_t group_of(const Input<T>& in, int64_t row, int64_t groups) {
    if (in.valid != nullptr && !in.valid[row]) return kNotValid;
    const int64_t group = in.group_ids[row];
    return group >= 0 && group < groups ? group : kOutside;
}

template <class T>
__device__ __forceinline__ Member member_of(const Input<T>& in, int64_t row, int64_t slot) {
    return {slot, to_double(in.rewards[row]), in.lengths ? in.lengths[row] : 1};
}

__device__ __forceinline__ Word mixed(Word key) {
    key = (key ^ key >> 32) * 0x9e3779b97f4a7c15ull;
    key = (key ^ key >> 29) * 0xbf58476d1ce4e5b9ull;
    return key ^ key >> 32;
}

// Returns the row that represents this row's trajectory, and adds the row to the hash table if there is none.
template <class T>
__device__ int find_entry(const Input<T>& in, const Trajectories& t, int64_t row) {
    const int64_t group = in.group_ids[row], id = t.ids[row];
    Word place = mixed(Word(group) ^ mixed(Word(id)));
    for (;; ++place) {
        int* slot = t.slots + (place & Word(t.capacity - 1));
        const int found = atomicCAS(slot, -1, int(row));
        if (found == -1) return int(row);
        if (in.group_ids[found] == group && t.ids[found] == id) return found;
    }
}

// Finds every row's entry (-1: none), and sums the trajectories' rows.
template <bool weighted, class T>
__device__ void pool_rows(const Input<T>& in, const Trajectories& t, const BlockTable& block, int64_t groups) {
    for (int64_t row = thread_of_grid(); row < in.rows; row += threads_of_grid()) {
        t.entry[row] = group_of(in, row, groups) >= 0 ? find_entry(in, t, row) : -1;
    }
    grid_barrier();
    const auto member = [&](int64_t row) { return member_of(in, row, t.entry[row]); };
    add_extremes<weighted>(t.table, block, in.rows, member);
    grid_barrier();
    add_offsets<weighted>(t.table, block, in.rows, member);
    grid_barrier();
}

// Finds the largest magnitude of the rows of each group, from those of its trajectories.
template <class T>
__device__ void add_magnitudes(const Input<T>& in, const Trajectories& t, const GroupTable& table) {
    for (int64_t row = thread_of_grid(); row < in.rows; row += threads_of_grid()) {
        if (t.entry[row] != int(row)) continue;
        Word* largest = table.largest + in.group_ids[row];
        const Word found = Word(__double_as_longlong(magnitude_of(t.table.sums[row])));
        if (__ldcg(largest) < found) atomicMax(largest, found);
    }
}

// `pooled`: statistics of the mean of each trajectory, not of rows. `weighted`: for Center::length_weighted.
template <class T, bool pooled, bool weighted>
__global__ void __launch_bounds__(kThreads)
    group_kernel(Input<T> in, Trajectories t, GroupTable table, GroupAdvantageOptions o, T* advantages) {
    const BlockTable block(shared<char>());
    // A thread keeps its first row, so memory is read once unless rows outnumber the grid's threads. All others it
    // reads again.
    const int64_t mine = thread_of_grid();
    const auto read = [&](int64_t row) -> Member {
        if (!pooled) {
            const int64_t group = group_of(in, row, table.slots);
            return group >= 0 ? member_of(in, row, group) : Member{group};
        }
        if (t.entry[row] != int(row)) return {};
        return {in.group_ids[row], mean_of(t.table.sums[row]), weighted ? length_of(t.table.weights[row]) : 1};
    };
    Member first;
    if (!pooled && mine < in.rows) first = read(mine);
    const auto member = [&](int64_t row) { return !pooled && row == mine ? first : read(row); };
    // Clear the tables, then average the rows of each trajectory.
    clear_table(table);
    if (pooled) {
        clear_table(t.table);
        for (int64_t i = thread_of_grid(); i < t.capacity; i += threads_of_grid()) t.slots[i] = -1;
    }
    grid_barrier();
    if (pooled) {
        pool_rows<weighted>(in, t, block, table.slots);
        add_magnitudes(in, t, table);
    }
    // Statistics of the groups.
    add_extremes<weighted>(table, block, in.rows, member);
    grid_barrier();
    add_offsets<weighted>(table, block, in.rows, member);
    grid_barrier();
    // Every row's advantage; NaN for a group id out of range. A mean's own error counts as rounding.
    const double tie = pooled ? fmax(kTie<T>, 4 / kSteps) : kTie<T>;
    for (int64_t row = thread_of_grid(); row < in.rows; row += threads_of_grid()) {
        Member m = pooled ? Member{group_of(in, row, table.slots)} : member(row);
        if (pooled && m.slot >= 0) m.value = mean_of(t.table.sums[t.entry[row]]);
        put(advantages + row, advantage_of(m, table, o, tie));
    }
}

int64_t capacity_of(int64_t rows) {
    int64_t capacity = 16;
    while (capacity < 2 * rows) capacity *= 2;
    return capacity;
}

// Hands out 16-byte aligned slices of a workspace, one after the other.
class WorkspaceSlices {
  public:
    explicit WorkspaceSlices(void* start) : next_(static_cast<char*>(start)) {}
    template <class T>
    T* take(int64_t count) {
        T* slice = reinterpret_cast<T*>(next_);
        next_ += (count * int64_t(sizeof(T)) + 15) / 16 * 16;
        return slice;
    }
    GroupTable take_table(int64_t slots, bool weighted) {
        GroupSums* sums = take<GroupSums>(slots);
        return {sums, weighted ? take<GroupWeights>(slots) : nullptr, nullptr, slots};
    }
    int64_t bytes() const { return next_ - static_cast<char*>(nullptr); }

  private:
    char* next_;  // start of the next slice
};

// The division of the workspace.
struct Layout {
    GroupTable table;             // by group id
    Trajectories trajectories{};  // all null unless by_trajectory

    Layout(WorkspaceSlices& slices, int64_t rows, int64_t groups, bool by_trajectory, bool weighted)
        : table(slices.take_table(groups < 0 ? rows : groups, weighted)) {
        if (!by_trajectory) return;
        table.largest = slices.take<Word>(table.slots);
        trajectories.capacity = capacity_of(rows);
        trajectories.slots = slices.take<int>(trajectories.capacity);
        trajectories.entry = slices.take<int>(rows);
        trajectories.table = slices.take_table(rows, weighted);
    }
};

void check_inputs(const GroupAdvantageInput& in, const GroupAdvantageOptions& o, const View& advantages,
                  const View& workspace) {
    check_group_advantage(in, o, advantages);
    require_one_device(in.rewards,
                       {&in.group_ids, &in.trajectory_ids, &in.lengths, &in.valid, &advantages, &workspace});
    const int64_t rows = in.rewards.shape[0];
    require(rows < (int64_t(1) << 30), "rewards: expected fewer than 2**30 rows");
    const bool weighted = o.center == Center::length_weighted;
    require_bytes("workspace", workspace, group_advantage_workspace(rows, in.num_groups, o.by_trajectory, weighted));
}

template <class T>
Input<T> bind(const GroupAdvantageInput& in, const GroupAdvantageOptions& o) {
    return {in.rewards.as<const T>(), in.group_ids.as<const int64_t>(), in.valid.as<const bool>(),
            o.center == Center::length_weighted ? in.lengths.as<const double>() : nullptr, in.rewards.shape[0]};
}

Layout plan(const GroupAdvantageInput& in, const GroupAdvantageOptions& o, const View& workspace) {
    WorkspaceSlices slices(workspace.data);
    Layout layout(slices, in.rewards.shape[0], in.num_groups, o.by_trajectory, o.center == Center::length_weighted);
    if (o.by_trajectory) layout.trajectories.ids = in.trajectory_ids.as<const int64_t>();
    return layout;
}

template <class T, bool pooled, bool weighted>
void launch_groups(const Input<T>& input, const Layout& layout, const GroupAdvantageOptions& o, T* advantages,
                   Stream stream) {
    const auto kernel = group_kernel<T, pooled, weighted>;
    const int shared_bytes = BlockTable::bytes(kThreads);
    const int64_t blocks = (input.rows + kThreads - 1) / kThreads;
    const int64_t grid = std::min<int64_t>(blocks, resident_blocks(kernel, kThreads, shared_bytes));
    launch_cooperative(kernel, grid, kThreads, shared_bytes, stream, input, layout.trajectories, layout.table, o,
                       advantages);
}

template <class T>
void launch_kernel(const GroupAdvantageInput& in, const Layout& layout, const GroupAdvantageOptions& o, T* advantages,
                   Stream stream) {
    const bool weighted = o.center == Center::length_weighted;
    const auto run = o.by_trajectory ? (weighted ? launch_groups<T, true, true> : launch_groups<T, true, false>)
                                     : (weighted ? launch_groups<T, false, true> : launch_groups<T, false, false>);
    run(bind<T>(in, o), layout, o, advantages, stream);
}

}  // namespace

int64_t group_advantage_workspace(int64_t rows, int64_t groups, bool by_trajectory, bool weighted) {
    WorkspaceSlices slices(nullptr);
    Layout(slices, rows, groups, by_trajectory, weighted);
    return slices.bytes();
}

void group_advantage(const GroupAdvantageInput& input, const GroupAdvantageOptions& options, const View& advantages,
                     const View& workspace, Stream stream) {
    check_inputs(input, options, advantages, workspace);
    if (input.rewards.shape[0] == 0) return;
    const DeviceGuard guard(input.rewards.device);
    const Layout layout = plan(input, options, workspace);
    const auto run = [&](auto type) {
        using T = decltype(type);
        launch_kernel(input, layout, options, advantages.as<T>(), stream);
    };
    switch (input.rewards.dtype) {
        case DType::f32:
            return run(float{});
        case DType::f64:
            return run(double{});
        case DType::bf16:
            return run(BFloat16{});
        case DType::f16:
            return run(Half{});
        default:
            throw InvalidInput(std::string("rewards.dtype=") + name_of(input.rewards.dtype) + ": expected a float");
    }
}

}  // namespace turnwise::cuda
