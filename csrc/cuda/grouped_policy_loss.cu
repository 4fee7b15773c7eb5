#include "cuda/grouped_policy_loss.h"

#include <algorithm>

#include "cuda/group_table.h"
#include "cuda/policy_loss_kernel.h"

// The first launch is cooperative: its warps walk the spans of policy_loss.cu and add up rewards, and counts where the
// loss needs them; then, barrier by barrier, rows become groups and groups advantages.
namespace turnwise::cuda {
namespace {

using loss::kThreads;
using loss::kWarps;
using loss::Params;

struct Grouping {
    AnyStream token_rewards;
    const int64_t* group_ids;
    const bool* valid;
    const double* lengths;
    GroupTable table;
    GroupAdvantageOptions options;
    double* records;  // [rows + warps]: of the piece of a row in a warp's span
    float *sums, *advantages;
};

// The sum of a piece's rewards, this lane's share; counts its trained tokens.
template <class T, bool fast>
__device__ double sum_rewards(const Params& p, const AnyStream& rewards, const RowPiece& piece, long long& count) {
    constexpr int kPack = 16 / int(sizeof(T));
    const int lane = int(threadIdx.x) % kWarp;
    double sum = 0;
#pragma unroll 2
    for (int64_t i = piece.begin / kPack * kPack + lane * kPack; i < piece.end; i += kWarp * kPack) {
        const PackAt<T, fast> at{piece, i};
        const auto mask = at.ask(p.mask);
        const auto pack = at.load(rewards);
        const unsigned trained = at.truths(p.mask, mask);
        count += __popc(trained);
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            if (trained >> k & 1) sum += double(to_float(pack[k]));
        }
    }
    return sum;
}

// Calls body(piece, place) on all pieces of all spans.
template <class Body>
__device__ void each_piece(const Params& p, const Body& body) {
    const int64_t step = int64_t(gridDim.x) * kWarps;
    for (int64_t place = int64_t(blockIdx.x) * kWarps + int(threadIdx.x) / kWarp; place < p.warps; place += step) {
        RowPieces pieces(p.rows, place);
        for (RowPiece piece; pieces.next(piece);) body(piece, place);
    }
}

// Each row's reward, by a warp.
__device__ void join_rewards(const Params& p, const Grouping& g) {
    const int lane = int(threadIdx.x) % kWarp;
    const int64_t step = int64_t(gridDim.x) * kWarps;
    for (int64_t row = int64_t(blockIdx.x) * kWarps + int(threadIdx.x) / kWarp; row < p.rows.rows; row += step) {
        const int64_t start = row_start(p.rows, row), stop = row_start(p.rows, row + 1);
        double sum = 0;
        if (start < stop) {
            const int64_t last = (stop - 1) / p.rows.span;
            for (int64_t piece = start / p.rows.span + lane; piece <= last; piece += kWarp) {
                sum += __ldcg(g.records + row + piece);
            }
        }
        sum = warp_sum(sum);
        if (lane == 0) g.sums[row] = float(sum);
    }
}

__device__ void write_advantages(const Params& p, const Grouping& g) {
    const auto member = [&](int64_t row) -> Member {
        const int64_t group = g.group_ids[row];
        const bool enters = (g.valid == nullptr || g.valid[row]) && group >= 0 && group < g.table.slots;
        return enters ? Member{group, double(__ldcg(g.sums + row)), g.lengths ? g.lengths[row] : 1} : Member{};
    };
    add_extremes(g.table, p.rows.rows, member);
    grid_barrier();
    add_offsets(g.table, p.rows.rows, member);
    grid_barrier();
    for (int64_t row = thread_of_grid(); row < p.rows.rows; row += threads_of_grid()) {
        const Member m = member(row);
        double advantage = 0;
        if (m.slot >= 0) {
            const GroupWeights* weights = g.table.weights ? g.table.weights + m.slot : nullptr;
            advantage = advantage_of(m.value, g.table.sums[m.slot], weights, g.options);
        } else if (g.valid == nullptr || g.valid[row]) {
            advantage = __longlong_as_double(0x7ff8LL << 48);  // an id out of range
        }
        g.advantages[row] = float(advantage);
    }
}

template <class T, bool fast>
__global__ void __launch_bounds__(kThreads) group_kernel(const Params p, const Grouping g, int64_t zeroed) {
    // Only GMPO's sums depend on the sign of the advantage, and so must wait for it.
    const bool late = p.options.variant.kind == VariantKind::gmpo;
    int* words = reinterpret_cast<int*>(p.counts);
    for (int64_t i = thread_of_grid(); i < zeroed / 4; i += threads_of_grid()) words[i] = 0;
    clear_table(g.table);
    grid_barrier();
    long long all = 0;
    each_piece(p, [&](const RowPiece& piece, int64_t place) {
        long long count = 0;
        const double reward = warp_sum(sum_rewards<T, fast>(p, g.token_rewards, piece, count));
        if (threadIdx.x % kWarp == 0) g.records[piece.row + place] = reward;
        double sums[loss::kRowSums] = {};
        if (p.sum_rows && !late) loss::sum_piece<T, fast>(p, piece, sums);
        loss::record_piece(p, piece, place, count, sums, p.sum_rows && !late, all);
    });
    loss::record_span(p, all);
    grid_barrier();
    join_rewards(p, g);
    grid_barrier();
    write_advantages(p, g);
    if (!late) return;
    grid_barrier();
    each_piece(p, [&](const RowPiece& piece, int64_t place) {
        double sums[loss::kRowSums] = {};
        loss::sum_piece<T, fast>(p, piece, sums);
#pragma unroll
        for (int k = 0; k < loss::kRowSums; ++k) {
            const double total = warp_sum(sums[k]);
            if (threadIdx.x % kWarp == 0) p.records[(piece.row + place) * loss::kRowSums + k] = total;
        }
    });
}

// What stands in the workspace behind the loss's own.
struct GroupLayout {
    GroupLayout(int64_t loss_bytes, int64_t rows, int64_t warps, int64_t groups, bool weighted) {
        slots = groups < 0 ? rows : groups;
        sums = loss_bytes;
        weights = sums + slots * int64_t(sizeof(GroupSums));
        records = weights + (weighted ? slots * int64_t(sizeof(GroupWeights)) : 0);
        bytes = records + (rows + warps) * 8;
    }
    int64_t slots, sums, weights, records, bytes;
};

void check(const GroupedPolicyLossInput& in, const GroupAdvantageOptions& group) {
    check_group_advantage(in.group, group, in.loss.advantages);
    check_same_shape(in.loss.logprobs, in.token_rewards, "token_rewards: wrong shape");
    require_one_device(in.loss.logprobs,
                       {&in.token_rewards, &in.group.rewards, &in.group.group_ids, &in.group.lengths, &in.group.valid});
    require(is_floating(in.token_rewards.dtype) && in.token_rewards.dtype != DType::f64,
            "token_rewards: expected float32, bf16 or f16");
    require(in.group.rewards.dtype == DType::f32 && in.loss.advantages.dtype == DType::f32,
            "sums, advantages: expected float32");
    require(!group.by_trajectory, "pool: this kernel takes every row by itself");
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
    check(input, group);
    const DeviceGuard guard(input.loss.logprobs.device);
    const Params p = loss::plan(input.loss, options, output, workspace);
    require(p.rows.rows == input.group.rewards.shape[0], "group_ids: expected one per sequence");
    const bool weighted = group.center == Center::length_weighted;
    const loss::Layout common(p.rows.rows, loss::most_warps(), p.actors);
    const GroupLayout layout(common.bytes, p.rows.rows, loss::most_warps(), input.group.num_groups, weighted);
    require(workspace.size() >= layout.bytes, "workspace: too small");
    char* base = workspace.as<char>();
    const GroupTable table{reinterpret_cast<GroupSums*>(base + layout.sums),
                           weighted ? reinterpret_cast<GroupWeights*>(base + layout.weights) : nullptr, layout.slots};
    const Grouping g{any_stream(input.token_rewards),
                     input.group.group_ids.as<const int64_t>(),
                     input.group.valid.as<const bool>(),
                     weighted ? input.group.lengths.as<const double>() : nullptr,
                     table,
                     group,
                     reinterpret_cast<double*>(base + layout.records),
                     input.group.rewards.as<float>(),
                     input.loss.advantages.as<float>()};
    const bool fast = p.fast && loss::fits_fast(p.rows, g.token_rewards, p.grad_dtype);
    loss::dispatch(fast, p.grad_dtype, [&](auto kind) {
        using K = decltype(kind);
        const auto kernel = group_kernel<typename K::Type, K::fast>;
        const int64_t wanted = std::max(loss::blocks_of(p), (p.rows.rows + kThreads - 1) / kThreads);
        const int64_t grid = std::min<int64_t>(wanted, resident_blocks(kernel, kThreads));
        launch_cooperative(kernel, grid, kThreads, 0, stream, p, g, common.zeroed);
    });
    loss::launch_main(p, stream);
}

}  // namespace turnwise::cuda
