#include "cuda/grouped_policy_loss.h"

#include <algorithm>

#include "cuda/group_table.h"
#include "cuda/policy_loss.h"
#include "cuda/policy_loss_launch.h"

// Two launches. The first is cooperative. Its warps take the same spans as in policy_loss.cu and add up rewards and the
// counts that the loss needs. After grid barriers they sum each row, gather rows into groups and write advantages. The
// second launch is loss_grad_kernel.
namespace turnwise::cuda {
namespace {

using loss::kThreads;
using loss::kWarps;
using loss::Params;

// The kernel parameters of the rewards and advantages.
struct Grouping {
    AnyStream token_rewards;   // one value per token
    const int64_t* group_ids;  // [rows]
    const bool* valid;         // [rows]: rows that enter the statistics; null: all
    const double* lengths;     // [rows]: weights for Center::length_weighted; null: 1
    GroupTable table;          // by group id
    GroupAdvantageOptions options;
    double* reward_partials;  // [rows + warps]: a span's part of a row's reward, at index row + span
    float* sums;              // [rows]: sum of the row's rewards
    float* advantages;        // [rows]
};

// A token's reward, and a number other than 0 if it trains.
template <class Mask>
struct Reward {
    float value;
    Mask trains;
};

// Returns this lane's share of a segment's rewards, and adds its share of the trained tokens to `count`.
template <class T, bool fast, bool short_rows>
__device__ double sum_rewards(const Params& p, const AnyStream& rewards, const RowSegment& segment, int& count) {
    constexpr int kPack = 16 / int(sizeof(T));
    const int lane = int(threadIdx.x) % kWarp;
    double sum = 0;
    if constexpr (short_rows) {
        const auto add = [&](const auto& reward) {
            if (reward.trains == 0) return;
            count += 1;
            sum += double(reward.value);
        };
        const auto value = [&](int64_t i) { return value_at<T, fast>(rewards, segment, i); };
        const auto byte = [&](int64_t i) -> Reward<uint8_t> {
            return {value(i), static_cast<const uint8_t*>(p.mask.data)[i]};
        };
        const auto any = [&](int64_t i) -> Reward<bool> { return {value(i), truth_at<fast>(p.mask, segment, i)}; };
        if (fast && p.mask.bytes) {
            each_token<8>(segment, p.rows.lanes, byte, add);
        } else {
            each_token<4>(segment, p.rows.lanes, any, add);
        }
    } else {
#pragma unroll 2
        for (int64_t i = segment.begin / kPack * kPack + lane * kPack; i < segment.end; i += kWarp * kPack) {
            const PackAt<T, fast> at{segment, i};
            const auto mask = at.ask(p.mask);
            const auto pack = at.load(rewards);
            const auto trained = at.truths(p.mask, mask);
            count += trained.number();
#pragma unroll
            for (int k = 0; k < kPack; ++k) {
                if (trained[k]) sum += double(to_float(pack[k]));
            }
        }
    }
    return sum;
}

// Calls body(segment, place) on every segment of every span; `place` is the number of the span.
template <bool short_rows, class Body>
__device__ void each_segment(const Params& p, const Body& body) {
    const int64_t step = int64_t(gridDim.x) * kWarps;
    for (int64_t place = int64_t(blockIdx.x) * kWarps + int(threadIdx.x) / kWarp; place < p.warps; place += step) {
        RowSegments<short_rows> segments(p.rows, place);
        for (RowSegment segment; segments.next(segment);) body(segment, place);
    }
}

// Adds up the rewards of the rows that spans cut, a warp per span: that of the row which begins in the span and goes on
// after it.
__device__ void join_rewards(const Params& p, const Grouping& g) {
    const int lane = int(threadIdx.x) % kWarp;
    const int64_t step = int64_t(gridDim.x) * kWarps;
    for (int64_t place = int64_t(blockIdx.x) * kWarps + int(threadIdx.x) / kWarp; place < p.warps; place += step) {
        const int64_t begin = place * p.rows.span, end = begin + p.rows.span;
        if (end >= p.rows.tokens) break;
        const int64_t row = warp_find_row(p.rows, end - 1);
        const RowRange range = row_range(p.rows, row);
        if (range.begin < begin || range.end <= end) continue;
        double sum = 0;
        for (int64_t i = place + lane; i <= (range.end - 1) / p.rows.span; i += kWarp) {
            sum += __ldcg(g.reward_partials + row + i);
        }
        sum = warp_sum(sum);
        if (lane == 0) g.sums[row] = float(sum);
    }
}

// Group statistics of the rows' rewards, then every row's advantage. NaN for a group id out of range.
template <bool weighted>
__device__ void write_advantages(const Params& p, const Grouping& g) {
    const BlockTable block(shared<char>());
    const auto member = [&](int64_t row) -> Member {
        if (g.valid != nullptr && !g.valid[row]) return {};
        const int64_t group = g.group_ids[row];
        if (group < 0 || group >= g.table.slots) return {kOutside};
        return {group, double(__ldcg(g.sums + row)), weighted && g.lengths ? g.lengths[row] : 1};
    };
    add_extremes<weighted>(g.table, block, p.rows.rows, member);
    grid_barrier();
    add_offsets<weighted>(g.table, block, p.rows.rows, member);
    grid_barrier();
    for (int64_t row = thread_of_grid(); row < p.rows.rows; row += threads_of_grid()) {
        g.advantages[row] = float(advantage_of(member(row), g.table, g.options, kTie<float>));
    }
}

template <class T, bool fast, bool short_rows>
__global__ void __launch_bounds__(kThreads)
    rewards_to_advantages_kernel(const Params p, const Grouping g, int64_t zeroed) {
    // GMPO's row sums depend on the sign of the advantage, so they come after it. All others come first.
    const bool late = p.options.variant.kind == VariantKind::gmpo;
    // Clear the counts and the group table.
    int* words = reinterpret_cast<int*>(p.counts);
    for (int64_t i = thread_of_grid(); i < zeroed / 4; i += threads_of_grid()) words[i] = 0;
    for (int64_t row = thread_of_grid(); row < p.rows.rows; row += threads_of_grid()) g.sums[row] = 0;
    clear_table(g.table);
    grid_barrier();
    // Rewards, counts and row sums in one pass over the tokens.
    const int lanes = lanes_of<short_rows>(p.rows);
    const bool leads = lane_of_group(lanes) == 0;
    loss::SpanCounts counts;
    each_segment<short_rows>(p, [&](const RowSegment& segment, int64_t place) {
        int count = 0;
        const double reward = group_sum(sum_rewards<T, fast, short_rows>(p, g.token_rewards, segment, count), lanes);
        if (leads && !segment.empty()) {
            if (segment.whole) {
                g.sums[segment.row] = float(reward);
            } else {
                g.reward_partials[segment.row + place] = reward;
            }
        }
        double sums[loss::kRowSums] = {};
        if (p.sum_rows && !late) loss::sum_segment<T, fast, short_rows>(p, segment, sums);
        loss::record_segment<short_rows>(p, segment, place, count, sums, p.sum_rows && !late, counts);
    });
    loss::record_span(p, counts);
    grid_barrier();
    // Rewards of cut rows, all rows' advantages, and for GMPO the row sums.
    join_rewards(p, g);
    grid_barrier();
    g.table.weights ? write_advantages<true>(p, g) : write_advantages<false>(p, g);
    if (!late) return;
    grid_barrier();
    each_segment<short_rows>(p, [&](const RowSegment& segment, int64_t place) {
        double sums[loss::kRowSums] = {};
        loss::sum_segment<T, fast, short_rows>(p, segment, sums);
#pragma unroll
        for (int k = 0; k < loss::kRowSums; ++k) {
            const double total = group_sum(sums[k], lanes);
            if (leads && !segment.empty()) p.row_partials[(segment.row + place) * loss::kRowSums + k] = total;
        }
    });
}

// Offsets into the workspace in bytes, after the part of the loss.
struct GroupLayout {
    GroupLayout(int64_t loss_bytes, int64_t rows, int64_t warps, int64_t groups, bool weighted) {
        slots = groups < 0 ? rows : groups;
        sums = loss_bytes;
        weights = sums + slots * int64_t(sizeof(GroupSums));
        reward_partials = weights + (weighted ? slots * int64_t(sizeof(GroupWeights)) : 0);
        bytes = reward_partials + (rows + warps) * 8;
    }
    int64_t slots;                           // of the group table: groups, or rows if the number of groups is not given
    int64_t sums, weights, reward_partials;  // GroupSums, GroupWeights, Grouping::reward_partials
    int64_t bytes;                           // total size
};

void check_inputs(const GroupedPolicyLossInput& in, const GroupAdvantageOptions& group,
                  const PolicyLossOptions& options, const PolicyLossOutput& output) {
    check_group_advantage(in.group, group, in.loss.advantages);
    loss::check_inputs(in.loss, options, output);
    require_shape_of("token_rewards", in.token_rewards, "logprobs", in.loss.logprobs);
    require_float_stream("token_rewards", in.token_rewards);
    require_one_device(in.loss.logprobs,
                       {&in.token_rewards, &in.group.rewards, &in.group.group_ids, &in.group.lengths, &in.group.valid});
    require_dtype("sums", in.group.rewards, {DType::f32});
    require_dtype("advantages", in.loss.advantages, {DType::f32});
    require_shape("group_ids", in.group.group_ids, {token_rows(in.loss.logprobs, in.loss.cu_seqlens, "logprobs").rows});
    require(!group.by_trajectory, "pool='trajectory': this kernel takes every row by itself, expected 'rows'");
}

Grouping bind(const GroupedPolicyLossInput& in, const GroupAdvantageOptions& group) {
    Grouping g{};
    g.token_rewards = any_stream(in.token_rewards);
    g.group_ids = in.group.group_ids.as<const int64_t>();
    g.valid = in.group.valid.as<const bool>();
    g.lengths = group.center == Center::length_weighted ? in.group.lengths.as<const double>() : nullptr;
    g.options = group;
    g.sums = in.group.rewards.as<float>();
    g.advantages = in.loss.advantages.as<float>();
    return g;
}

// Divides the workspace after the part of the loss.
void plan(Grouping& g, const Params& p, int64_t num_groups, const View& workspace) {
    const bool weighted = g.options.center == Center::length_weighted;
    const loss::Layout common(p.rows.rows, loss::most_warps(), p.options.num_actors);
    const GroupLayout layout(common.bytes, p.rows.rows, loss::most_warps(), num_groups, weighted);
    require_bytes("workspace", workspace, layout.bytes);
    char* base = workspace.as<char>();
    GroupWeights* weights = weighted ? reinterpret_cast<GroupWeights*>(base + layout.weights) : nullptr;
    g.table = {reinterpret_cast<GroupSums*>(base + layout.sums), weights, nullptr, layout.slots};
    g.reward_partials = reinterpret_cast<double*>(base + layout.reward_partials);
}

void launch_advantages(const Params& p, const Grouping& g, Stream stream) {
    const int64_t zeroed = loss::Layout(p.rows.rows, loss::most_warps(), p.options.num_actors).zeroed;
    const bool fast = p.fast && loss::fits_fast(p.rows, g.token_rewards, p.grad_dtype);
    loss::dispatch(fast, p.grad_dtype, [&](auto kind) {
        using K = decltype(kind);
        loss::dispatch_rows(p.rows, [&](auto short_rows) {
            const auto kernel = rewards_to_advantages_kernel<typename K::Type, K::fast, short_rows.value>;
            const int64_t wanted = std::max(loss::blocks_of(p), (p.rows.rows + kThreads - 1) / kThreads);
            const int shared_bytes = BlockTable::bytes(kThreads);
            const int64_t grid = std::min<int64_t>(wanted, resident_blocks(kernel, kThreads, shared_bytes));
            launch_cooperative(kernel, grid, kThreads, shared_bytes, stream, p, g, zeroed);
        });
    });
}

}  // namespace

int64_t grouped_policy_loss_workspace(int64_t rows, int64_t tokens, int num_actors, int64_t groups, bool weighted,
                                      int device) {
    const int64_t bytes = policy_loss_workspace(rows, tokens, num_actors, device);
    const DeviceGuard guard(device);
    return GroupLayout(bytes, rows, loss::most_warps(), groups, weighted).bytes;
}

void grouped_policy_loss(const GroupedPolicyLossInput& input, const GroupAdvantageOptions& group,
                         const PolicyLossOptions& options, const PolicyLossOutput& output, const View& workspace,
                         Stream stream) {
    check_inputs(input, group, options, output);
    require_one_device(input.loss.logprobs, {&workspace});
    const DeviceGuard guard(input.loss.logprobs.device);
    Params p = loss::bind(input.loss, options, output);
    Grouping g = bind(input, group);
    loss::plan(p, workspace);
    plan(g, p, input.group.num_groups, workspace);
    launch_advantages(p, g, stream);
    loss::launch_loss_grad(p, stream);
}

}  // namespace turnwise::cuda
