#include "cuda/logprob.h"

#include "cuda/block.h"
#include "ops/logprob_math.h"
#include "ops/scalar_math.h"

namespace turnwise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kScratchBytes = 32 * int(sizeof(double));  // for block_sum

// ---- Reading a row -------------------------------------------------------------------------------------------------
// A block takes kThreads * kStep columns at a time, kStep per thread. A thread takes them in groups of G adjacent
// columns, one 16-byte word of the narrower of input and output; adjacent threads take adjacent groups. All words are
// requested before the first is used. The rest of a row is taken in steps of one group per thread, and what is left one
// column at a time, as are rows whose addresses are not multiples of 16.
template <class T>
constexpr int kWord = 16 / int(sizeof(T));  // values per 16-byte word
constexpr int kStep = 16;

struct Columns {
    const float* bias;   // [width]; or null
    float scale;         // 1 / temperature
    Softcap cap;         // read by the kernels with has_cap alone
    int64_t width;       // columns of the tile
    int64_t row_stride;  // in elements
    bool aligned;        // every row begins at a multiple of 16 bytes
};

// The column of a thread's i-th value in the step that starts at column `begin`.
template <int G>
__device__ __forceinline__ int64_t column_of(int64_t begin, int i) {
    return begin + (int64_t(i / G) * kThreads + threadIdx.x) * G + i % G;
}

template <bool has_cap>
__device__ __forceinline__ float finished(float logit, const Columns& c) {
    return has_cap ? capped<ScalarMath>(logit, c.cap) : logit * c.scale;
}

template <bool has_cap, class T>
__device__ __forceinline__ float logit_at(const T* row, const Columns& c, int64_t column) {
    const float bias = c.bias ? c.bias[column] : 0.0f;
    return finished<has_cap>(to_float(row[column]) + bias, c);
}

// A thread's n scaled logits of one step.
template <bool has_cap, int G, int n, class T>
__device__ __forceinline__ void load_step(const T* row, const Columns& c, int64_t begin, float* x) {
    constexpr int kSize = kWord<T>;
    Loaded<T, kSize> words[n / kSize];
#pragma unroll
    for (int i = 0; i < n; i += kSize) words[i / kSize] = load_streaming<T, kSize>(row + column_of<G>(begin, i));
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = to_float(words[i / kSize][i % kSize]);
    if (c.bias) {
#pragma unroll
        for (int i = 0; i < n; ++i) x[i] += c.bias[column_of<G>(begin, i)];
    }
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = finished<has_cap>(x[i], c);
}

// The number of columns that steps of n per thread cover.
template <int n>
__device__ __forceinline__ int64_t covered(const Columns& c) {
    return c.aligned ? c.width / (kThreads * n) * (kThreads * n) : 0;
}

// ---- Scan ----------------------------------------------------------------------------------------------------------
// A thread's sums so far, relative to its maximum so far.
struct Running {
    float max;       // largest x; -infinity if none
    float sum;       // sum of exp(x - max)
    float weighted;  // sum of exp(x - max) (x - max)
};

// Adds n logits: rescales the sums if the maximum grows, then adds each logit's weight.
template <bool weighted, int n>
__device__ __forceinline__ void add_logits(Running& r, const float* x) {
    float top = r.max;
#pragma unroll
    for (int i = 0; i < n; ++i) top = fmaxf(x[i], top);  // ignores NaN, which still reaches the sum
    if (top > r.max) {
        if (r.max > -INFINITY) {
            const float shift = r.max - top, factor = expf(shift);
            if (weighted) r.weighted = factor * (r.weighted + (shift > -INFINITY ? shift : 0.0f) * r.sum);
            r.sum *= factor;
        }
        r.max = top;
    }
    const float reference = top > -INFINITY ? top : 0.0f;
#pragma unroll
    for (int i = 0; i < n; ++i) {
        const Weight<ScalarMath> w = softmax_weight<ScalarMath>(x[i] - reference);
        r.sum += w.value;
        if (weighted) r.weighted += w.value * w.log;
    }
}

// The sums of the whole block, in every thread.
__device__ __forceinline__ Seen block_seen(const Running& r, double* scratch, bool weighted) {
    const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
    float* tops = reinterpret_cast<float*>(scratch);
    const float warp_top = warp_max(r.max);
    if (lane == 0) tops[warp] = warp_top;
    __syncthreads();
    const float top = warp_max(lane < int(blockDim.x) / kWarp ? tops[lane] : -INFINITY);
    const Seen mine = relative_to({r.max, r.sum, r.weighted}, top);
    const double sum = block_sum(mine.sum, scratch);
    return {top, sum, weighted ? block_sum(mine.weighted, scratch) : 0.0};
}

struct Targets {
    const void* ids;  // i64 or i32
    bool wide;        // i64
    int64_t stride;   // in elements
    int64_t ignore;   // see LogitTile

    __device__ __forceinline__ int64_t id(int64_t row) const {
        const int64_t place = row * stride;
        return wide ? static_cast<const int64_t*>(ids)[place] : static_cast<const int32_t*>(ids)[place];
    }
    __device__ __forceinline__ bool ignored(int64_t id) const { return ignore != kIgnoreNone && id == ignore; }
};

// One block per row: writes the row's state.
template <class T, bool weighted, bool has_cap>
__global__ void __launch_bounds__(kThreads) scan_kernel(const T* logits, Columns c, Targets targets, double* state) {
    const int64_t row = blockIdx.x, rows = gridDim.x, id = targets.id(row);
    if (targets.ignored(id)) {  // one token of probability 1, the target
        if (threadIdx.x < 4) state[threadIdx.x * rows + row] = threadIdx.x == 1 ? 1.0 : 0.0;
        return;
    }
    const T* mine = logits + row * c.row_stride;
    Running running{-INFINITY, 0.0f, 0.0f};
    constexpr int G = kWord<T>;
    const int64_t whole = covered<kStep>(c), end = covered<G>(c);
    for (int64_t i = 0; i < whole; i += kThreads * kStep) {
        float x[kStep];
        load_step<has_cap, G, kStep>(mine, c, i, x);
        add_logits<weighted, kStep>(running, x);
    }
    for (int64_t i = whole; i < end; i += kThreads * G) {
        float x[G];
        load_step<has_cap, G, G>(mine, c, i, x);
        add_logits<weighted, G>(running, x);
    }
    for (int64_t i = end + threadIdx.x; i < c.width; i += kThreads) {
        const float x = logit_at<has_cap>(mine, c, i);
        add_logits<weighted, 1>(running, &x);
    }
    // Thread 0 stores the block's sums, and the target's x if the tile has it.
    const Seen seen = block_seen(running, shared<double>(), weighted);
    if (threadIdx.x != 0) return;
    state[row] = seen.max;
    state[rows + row] = seen.sum;
    state[2 * rows + row] = seen.weighted;
    state[3 * rows + row] = id >= 0 && id < c.width ? double(logit_at<has_cap>(mine, c, id)) : double(NAN);
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(const double* state, int64_t rows, float* logprob, float* lse, float* entropy) {
    const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (row >= rows) return;
    const Seen seen{state[row], state[rows + row], state[2 * rows + row]};
    const double sum = log_sum_exp(seen);
    logprob[row] = float(state[3 * rows + row] - sum);
    lse[row] = float(sum);
    if (entropy) entropy[row] = float(entropy_of(seen));
}

// ---- Gradient ------------------------------------------------------------------------------------------------------
// The inputs of the gradient, see LogprobGradient.
struct Upstream {
    const float *lse, *grad_logprob, *entropy, *grad_entropy;                 // the last two: both given or both null
    int64_t lse_stride, logprob_stride, entropy_stride, grad_entropy_stride;  // in elements
};

template <class T>
__device__ __forceinline__ void store_word(T* to, const float* values) {
    Pack<T, kWord<T>> word;
#pragma unroll
    for (int i = 0; i < kWord<T>; ++i) word.value[i] = from_float<T>(values[i]);
    uint4 bits;
    memcpy(&bits, &word, sizeof bits);
    __stcg(reinterpret_cast<uint4*>(to), bits);  // into the L2, because a matrix product reads it next
}

// Writes d(x, column) of a row's scaled logits x to `to`, which may be the row itself. Narrow values then fill its
// first half, over logits of steps before and of this one, so all of a step are read before any is written.
template <bool has_cap, class T, class Out, class Value>
__device__ __forceinline__ void write_columns(const T* mine, const Columns& c, Out* to, const Value& d) {
    constexpr int G = kWord<Out>;
    constexpr bool narrows = sizeof(Out) < sizeof(T);
    const int64_t whole = covered<kStep>(c), end = covered<G>(c);
    for (int64_t i = 0; i < whole; i += kThreads * kStep) {
        float x[kStep];
        load_step<has_cap, G, kStep>(mine, c, i, x);
        if (narrows) __syncthreads();
#pragma unroll
        for (int k = 0; k < kStep; ++k) x[k] = d(x[k], column_of<G>(i, k));
#pragma unroll
        for (int k = 0; k < kStep; k += G) store_word(to + column_of<G>(i, k), x + k);
    }
    for (int64_t i = whole; i < end; i += kThreads * G) {
        float x[G];
        load_step<has_cap, G, G>(mine, c, i, x);
        if (narrows) __syncthreads();
#pragma unroll
        for (int k = 0; k < G; ++k) x[k] = d(x[k], column_of<G>(i, k));
        store_word(to + column_of<G>(i, 0), x);
    }
    for (int64_t begin = end; begin < c.width; begin += kThreads) {
        const int64_t i = begin + threadIdx.x;
        const float x = i < c.width ? logit_at<has_cap>(mine, c, i) : 0.0f;
        if (narrows) __syncthreads();
        if (i < c.width) to[i] = from_float<Out>(d(x, i));
    }
}

// One block per row: writes the gradient of the row's logits in this tile.
template <class T, class Out, bool has_cap>
__global__ void __launch_bounds__(kThreads)
    grad_kernel(const T* logits, Columns c, Targets targets, Upstream up, Out* out, int64_t out_stride) {
    const int64_t row = blockIdx.x;
    const T* mine = logits + row * c.row_stride;
    Out* to = out + row * out_stride;
    const int64_t id = targets.id(row);
    const RowGradient g =
        row_gradient(up.lse[row * up.lse_stride], up.entropy ? up.entropy[row * up.entropy_stride] : 0,
                     up.grad_logprob[row * up.logprob_stride],
                     up.entropy ? up.grad_entropy[row * up.grad_entropy_stride] : 0, c.scale);
    if (is_zero(g) || targets.ignored(id)) {  // the token does not train, so even NaN logits get 0
        for (int64_t i = threadIdx.x; i < c.width; i += kThreads) to[i] = from_float<Out>(0.0f);
        return;
    }
    const auto d = [&](float x, int64_t column) {
        const float gradient = logit_gradient<ScalarMath>(x, g) + (column == id ? g.target : 0.0f);
        return has_cap ? gradient * cap_slope<ScalarMath>(x, c.cap) : gradient;
    };
    write_columns<has_cap>(mine, c, to, d);
}

// ---- Host ----------------------------------------------------------------------------------------------------------
void check_tile(const LogitTile& tile) {
    check_logit_tile(tile);
    require_one_device(tile.logits, {&tile.targets, &tile.bias});
}

bool rows_aligned(const View& view, size_t size) {
    return is_aligned(view.data, 16) && (view.shape[0] <= 1 || size_t(view.stride[0]) * size % 16 == 0);
}

Columns columns_of(const LogitTile& tile, bool aligned) {
    return {tile.bias ? tile.bias.as<const float>() : nullptr,
            tile.scale,
            softcap_of(tile.cap, tile.scale),
            tile.logits.shape[1],
            tile.logits.stride[0],
            aligned};
}

Targets targets_of(const LogitTile& tile) {
    const View& ids = tile.targets;
    return {ids.data, ids.dtype == DType::i64, ids.stride[0], tile.ignore};
}

// Calls body(T{}) with the type T of the logits.
template <class Body>
void dispatch(DType dtype, const Body& body) {
    switch (dtype) {
        case DType::f32:
            return body(float{});
        case DType::bf16:
            return body(BFloat16{});
        case DType::f16:
            return body(Half{});
        default:
            throw InvalidInput("logits: expected float32, bfloat16 or float16");
    }
}

template <class T, class Out>
void run_grad(const LogitTile& tile, const Upstream& up, const View& out, Stream stream) {
    const bool aligned = rows_aligned(tile.logits, sizeof(T)) && rows_aligned(out, sizeof(Out));
    const auto kernel = tile.cap > 0 ? grad_kernel<T, Out, true> : grad_kernel<T, Out, false>;
    launch(kernel, tile.logits.shape[0], kThreads, 0, stream, tile.logits.as<const T>(), columns_of(tile, aligned),
           targets_of(tile), up, out.as<Out>(), out.stride[0]);
}

}  // namespace

void logprob_scan(const LogitTile& tile, const View& state, bool weighted, Stream stream) {
    const int64_t rows = tile.logits.shape[0];
    check_tile(tile);
    check_logprob_state(state, rows);
    require_one_device(tile.logits, {&state});
    if (rows == 0) return;
    const DeviceGuard guard(tile.logits.device);
    dispatch(tile.logits.dtype, [&](auto example) {
        using T = decltype(example);
        const auto plain = weighted ? scan_kernel<T, true, false> : scan_kernel<T, false, false>;
        const auto with_cap = weighted ? scan_kernel<T, true, true> : scan_kernel<T, false, true>;
        launch(tile.cap > 0 ? with_cap : plain, rows, kThreads, kScratchBytes, stream, tile.logits.as<const T>(),
               columns_of(tile, rows_aligned(tile.logits, sizeof(T))), targets_of(tile), state.as<double>());
    });
}

void logprob_finish(const View& state, const View& logprob, const View& lse, const View& entropy, Stream stream) {
    const int64_t rows = logprob.size();
    check_logprob_state(state, rows);
    const auto check_output = [&](const char* name, const View& out) {
        check_row_floats(name, out, rows);
        require(is_contiguous_1d(out), "logprob, lse, entropy: expected contiguous tensors");
    };
    check_output("logprob", logprob);
    check_output("lse", lse);
    if (entropy) check_output("entropy", entropy);
    require_one_device(state, {&logprob, &lse, &entropy});
    if (rows == 0) return;
    const DeviceGuard guard(state.device);
    launch(finish_kernel, (rows + kThreads - 1) / kThreads, kThreads, 0, stream, state.as<const double>(), rows,
           logprob.as<float>(), lse.as<float>(), entropy ? entropy.as<float>() : nullptr);
}

void logprob_grad(const LogitTile& tile, const LogprobGradient& gradient, const View& out, Stream stream) {
    const int64_t rows = tile.logits.shape[0];
    check_tile(tile);
    check_logprob_gradient(gradient, rows);
    require_one_device(tile.logits,
                       {&gradient.lse, &gradient.grad_logprob, &gradient.entropy, &gradient.grad_entropy, &out});
    require_shape_of("out", out, "logits", tile.logits);
    require(has_contiguous_rows(out), "out: expected contiguous rows");
    if (tile.logits.dtype != DType::f32) require_dtype("out", out, {tile.logits.dtype});
    require_float_stream("out", out);
    if (rows == 0) return;
    const Upstream up{gradient.lse.as<const float>(),
                      gradient.grad_logprob.as<const float>(),
                      gradient.entropy ? gradient.entropy.as<const float>() : nullptr,
                      gradient.entropy ? gradient.grad_entropy.as<const float>() : nullptr,
                      gradient.lse.stride[0],
                      gradient.grad_logprob.stride[0],
                      gradient.entropy.stride[0],
                      gradient.grad_entropy.stride[0]};
    const DeviceGuard guard(tile.logits.device);
    dispatch(tile.logits.dtype, [&](auto example) {
        using T = decltype(example);
        if (out.dtype == tile.logits.dtype) return run_grad<T, T>(tile, up, out, stream);
        if (out.dtype == DType::bf16) return run_grad<float, BFloat16>(tile, up, out, stream);
        return run_grad<float, Half>(tile, up, out, stream);
    });
}

}  // namespace turnwise::cuda
