// The loops of attention over a trie. Compiled once per instruction set with TW_ISA naming the function that it
// exports, so nothing here may be an inline function with external linkage.
//
// Keys and values of the pieces above a query lie contiguously on a stack, by their depth: a depth-first walk puts each
// piece there once. Their gradients accumulate on the same stack, and leave it with the piece. Scores are those of a
// block of queries and a block of keys, with an online softmax (https://arxiv.org/abs/2205.14135).
#include "ops/tree_attention_kernel.h"

#include "core/simd_real.h"

namespace turnwise {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 8;  // rows of a product in registers; with two vectors each they fill half of 32 registers
#else
constexpr int kRows = 4;
#endif
constexpr int64_t kQueries = 64;  // rows of queries per block: tokens times the heads that share keys
constexpr int64_t kKeys = 128;    // keys per block

TW_INLINE int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}
TW_INLINE int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}
TW_INLINE int64_t rounded_up(int64_t n, int64_t unit) {
    return (n + unit - 1) / unit * unit;
}

// ---- Products ------------------------------------------------------------------------------------------------------
// A matrix whose elements are read one by one: element (i, k) is at i * row + k * step.
template <class T>
struct Left {
    const T* data;  // element (0, 0)
    int64_t row;    // elements from a row to the next
    int64_t step;   // elements from a column to the next
};

// C += A B, or C = A B if not `add`, for R rows of C with N vectors each. B and C have contiguous rows.
template <class T, int R, int N>
TW_INLINE void product(Left<T> a, const T* b, int64_t b_row, int64_t steps, T* c, int64_t c_row, bool add) {
    using S = Simd<T>;
    typename S::V sum[R][N];
    for (int i = 0; i < R; ++i) {
        for (int n = 0; n < N; ++n) sum[i][n] = add ? load(c + i * c_row + n * S::lanes) : S::set(0);
    }
    for (int64_t k = 0; k < steps; ++k) {
        typename S::V right[N];
        for (int n = 0; n < N; ++n) right[n] = load(b + k * b_row + n * S::lanes);
        for (int i = 0; i < R; ++i) {
            const typename S::V left = S::set(a.data[i * a.row + k * a.step]);
            for (int n = 0; n < N; ++n) sum[i][n] = S::multiply_add(left, right[n], sum[i][n]);
        }
    }
    for (int i = 0; i < R; ++i) {
        for (int n = 0; n < N; ++n) store(c + i * c_row + n * S::lanes, sum[i][n]);
    }
}

// The last rows, fewer than kRows.
template <class T, int R, int N>
TW_INLINE void last_rows(int64_t rows, Left<T> a, const T* b, int64_t b_row, int64_t steps, T* c, int64_t c_row,
                         bool add) {
    if constexpr (R > 0) {
        if (rows == R) return product<T, R, N>(a, b, b_row, steps, c, c_row, add);
        last_rows<T, R - 1, N>(rows, a, b, b_row, steps, c, c_row, add);
    }
}

template <class T, int N>
void column(int64_t rows, Left<T> a, const T* b, int64_t b_row, int64_t steps, T* c, int64_t c_row, bool add) {
    for (; rows >= kRows; rows -= kRows) {
        product<T, kRows, N>(a, b, b_row, steps, c, c_row, add);
        a.data += kRows * a.row;
        c += kRows * c_row;
    }
    last_rows<T, kRows - 1, N>(rows, a, b, b_row, steps, c, c_row, add);
}

// C += A B for matrices whose rows have `width` elements, a multiple of the lanes.
template <class T>
TW_INLINE void multiply(int64_t rows, Left<T> a, const T* b, int64_t steps, T* c, int64_t width, bool add) {
    constexpr int lanes = Simd<T>::lanes;
    int64_t at = 0;
    for (; at + 2 * lanes <= width; at += 2 * lanes) column<T, 2>(rows, a, b + at, width, steps, c + at, width, add);
    if (at < width) column<T, 1>(rows, a, b + at, width, steps, c + at, width, add);
}

// ---- The stack of a chain of pieces --------------------------------------------------------------------------------
// Rows of the stack are padded to whole vectors. Transposed matrices are cut into panels of two vectors of keys,
// [panel][size][panel's keys].
template <class T>
struct Stack {
    static constexpr int64_t kPanel = 2 * Simd<T>::lanes;  // keys

    TW_INLINE Stack(const TreeHeads& heads, int64_t longest, T* memory)
        : size(heads.size), width(rounded_up(size, Simd<T>::lanes)) {
        const int64_t keys = rounded_up(longest, kPanel), rows = most(kQueries, heads.group);
        T** const parts[] = {&value, &key, &d_value, &d_key, &value_t, &key_t};
        for (T** part : parts) {
            *part = memory;
            memory += keys * width;
        }
        T** const blocks[] = {&query, &out, &d_out, &d_query};
        for (T** block : blocks) {
            *block = memory;
            memory += rows * width;
        }
        score = memory;
        d_score = score + rows * kKeys;
        max = d_score + rows * kKeys;
        sum = max + rows;
    }

    // Elements of the memory that the constructor takes, which must be zero at first.
    static TW_INLINE int64_t elements(const TreeHeads& heads, int64_t longest) {
        const int64_t rows = most(kQueries, heads.group), width = rounded_up(heads.size, Simd<T>::lanes);
        return (6 * rounded_up(longest, kPanel) + 4 * rows) * width + rows * (2 * kKeys + 2);
    }

    // Puts the keys and values of a piece on the stack.
    TW_INLINE void push(const TreeForward& call, const TreePiece& piece, int64_t head, bool backward) {
        for (int64_t i = 0; i < piece.length; ++i) {
            const int64_t at = piece.depth + i, place = piece.begin + i;
            const T* k = static_cast<const T*>(call.key.data) + place * call.key.stride + head * size;
            const T* v = static_cast<const T*>(call.value.data) + place * call.value.stride + head * size;
            T* k_panel = key_t + at / kPanel * size * kPanel + at % kPanel;
            T* v_panel = value_t + at / kPanel * size * kPanel + at % kPanel;
            for (int64_t d = 0; d < size; ++d) k_panel[d * kPanel] = k[d];
            std::memcpy(value + at * width, v, size_t(size) * sizeof(T));
            if (!backward) continue;
            for (int64_t d = 0; d < size; ++d) v_panel[d * kPanel] = v[d];
            std::memcpy(key + at * width, k, size_t(size) * sizeof(T));
            std::memset(d_key + at * width, 0, size_t(width) * sizeof(T));
            std::memset(d_value + at * width, 0, size_t(width) * sizeof(T));
        }
    }

    // Writes to `scores` [rows, kKeys] the products of `rows` rows with keys [first, first + keys) of a transposed
    // matrix; `first` begins a panel.
    TW_INLINE void scores_of(int64_t rows, const T* left, const T* transposed, int64_t first, int64_t keys, T* scores) {
        for (int64_t at = 0; at < keys; at += kPanel) {
            const T* panel = transposed + (first + at) * size;
            column<T, 2>(rows, {left, width, 1}, panel, kPanel, size, scores + at, kKeys, false);
        }
    }

    int64_t size, width;               // elements of a head, without and with padding
    T *value, *key, *d_value, *d_key;  // [keys, width] by depth
    T *value_t, *key_t;                // [panels, size, kPanel]
    T *query, *out, *d_out, *d_query;  // [rows, width]: a block of queries
    T *score, *d_score;                // [rows, kKeys]
    T *max, *sum;                      // [rows]: largest score, and sum of weights relative to it
};

// A block of queries: `tokens` of a piece from its token `first` on, with `group` rows each.
struct Block {
    int64_t place;  // of its first token
    int64_t depth;  // of its first token
    int64_t rows;   // tokens * group
    int64_t group;  // rows of a token

    int64_t keys() const { return depth + rows / group; }  // those that its last token attends to
    // Keys of [first, first + count) to which a row attends.
    int64_t seen(int64_t row, int64_t first, int64_t count) const {
        return most(0, least(count, depth + row / group + 1 - first));
    }
};

template <class T>
TW_INLINE T* row_of(const TreeRows& rows, const Block& block, int64_t row, int64_t head, int64_t size) {
    return static_cast<T*>(rows.data) + (block.place + row / block.group) * rows.stride +
           (head * block.group + row % block.group) * size;
}

template <class T, class Body>
TW_INLINE void each_block(const TreePiece& piece, int64_t group, const Body& body) {
    const int64_t tokens = most(1, kQueries / group);
    for (int64_t at = 0; at < piece.length; at += tokens) {
        body(Block{piece.begin + at, piece.depth + at, least(tokens, piece.length - at) * group, group});
    }
}

template <class T>
TW_INLINE T top_of(typename Simd<T>::V a) {
    T lanes[Simd<T>::lanes];
    store(lanes, a);
    for (int half = Simd<T>::lanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    }
    return lanes[0];
}
template <class T>
TW_INLINE T sum_of(typename Simd<T>::V a) {
    T lanes[Simd<T>::lanes];
    store(lanes, a);
    for (int half = Simd<T>::lanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

template <class T>
TW_INLINE T dot(const T* a, const T* b, int64_t size) {
    using S = Simd<T>;
    typename S::V sum = S::set(0);
    int64_t at = 0;
    for (; at + S::lanes <= size; at += S::lanes) sum = S::multiply_add(load(a + at), load(b + at), sum);
    T total = sum_of<T>(sum);
    for (; at < size; ++at) total += a[at] * b[at];
    return total;
}

// Zeros the scores of a row from `seen` on.
template <class T>
TW_INLINE void clear_after(T* score, int64_t seen, int64_t keys) {
    for (int64_t at = seen; at < keys; ++at) score[at] = 0;
}

// ---- Forward -------------------------------------------------------------------------------------------------------
// Turns the scores of a row into weights relative to the largest score so far, and adds them to the row's sum.
template <class T>
TW_INLINE void weigh(T* score, int64_t seen, int64_t keys, bool first, T& max, T& sum, T* out, int64_t width) {
    using S = Simd<T>;
    using V = typename S::V;
    constexpr int lanes = S::lanes;
    if (seen == 0) return clear_after(score, 0, keys);
    const V lowest = S::set(T(-__builtin_inf()));
    V top = first ? lowest : S::set(max);
    int64_t at = 0;
    for (; at + lanes <= seen; at += lanes) top = S::larger(load(score + at), top);  // ignores NaN
    if (at < seen) top = S::larger(S::first(seen - at, load(score + at), lowest), top);
    const T largest = top_of<T>(top);
    const V reference = S::set(largest > T(-__builtin_inf()) ? largest : T(0));
    V total = S::set(0);
    for (at = 0; at + lanes <= seen; at += lanes) {
        const V weight = S::exp(load(score + at) - reference);
        store(score + at, weight);
        total = total + weight;
    }
    if (at < seen) {
        const V weight = S::first(seen - at, S::exp(load(score + at) - reference), S::set(0));
        store(score + at, weight);
        total = total + weight;
    }
    clear_after(score, seen, keys);
    // Scale what earlier keys gave.
    if (!first && largest != max) {
        const T factor = T(__builtin_exp(double(max - largest)));
        sum *= factor;
        for (int64_t d = 0; d < width; ++d) out[d] *= factor;
    }
    sum = (first ? 0 : sum) + sum_of<T>(total);
    max = largest;
}

template <class T>
TW_INLINE void pack_query(const TreeForward& call, const Block& block, int64_t head, const Stack<T>& stack) {
    const T scale = T(call.heads.scale);
    for (int64_t row = 0; row < block.rows; ++row) {
        const T* from = row_of<T>(call.query, block, row, head, stack.size);
        for (int64_t d = 0; d < stack.size; ++d) stack.query[row * stack.width + d] = from[d] * scale;
    }
}

template <class T>
void forward_block(const TreeForward& call, const Block& block, int64_t head, Stack<T>& stack) {
    const int64_t size = stack.size, width = stack.width;
    pack_query(call, block, head, stack);
    for (int64_t first = 0; first < block.keys(); first += kKeys) {
        const int64_t keys = least(kKeys, block.keys() - first);
        stack.scores_of(block.rows, stack.query, stack.key_t, first, keys, stack.score);
        for (int64_t row = 0; row < block.rows; ++row) {
            weigh(stack.score + row * kKeys, block.seen(row, first, keys), keys, first == 0, stack.max[row],
                  stack.sum[row], stack.out + row * width, width);
        }
        multiply<T>(block.rows, {stack.score, kKeys, 1}, stack.value + first * width, keys, stack.out, width,
                    first > 0);
    }
    // Divide by the sums of the weights.
    for (int64_t row = 0; row < block.rows; ++row) {
        const T factor = 1 / stack.sum[row];
        T* to = row_of<T>(call.out, block, row, head, size);
        for (int64_t d = 0; d < size; ++d) to[d] = stack.out[row * width + d] * factor;
        *row_of<T>(call.lse, block, row, head, 1) = stack.max[row] + T(__builtin_log(double(stack.sum[row])));
    }
}

template <class T>
void forward(const TreeForward& call, const TreePieces& chunk, int64_t head, void* scratch) {
    Stack<T> stack(call.heads, chunk.longest, static_cast<T*>(scratch));
    for (int64_t i = 0; i < chunk.count; ++i) {
        stack.push(call, chunk.pieces[i], head, false);
        if (i < chunk.above) continue;
        each_block<T>(chunk.pieces[i], call.heads.group,
                      [&](const Block& block) { forward_block(call, block, head, stack); });
    }
}

// ---- Backward ------------------------------------------------------------------------------------------------------
// Turns a row's scores into weights, and the gradients of its weights into those of its scores.
template <class T>
TW_INLINE void grade(T* score, T* d_score, int64_t seen, int64_t keys, T lse, T delta) {
    using S = Simd<T>;
    using V = typename S::V;
    const V reference = S::set(lse), mean = S::set(delta), zero = S::set(0);
    for (int64_t at = 0; at < seen; at += S::lanes) {
        V weight = S::exp(load(score + at) - reference), gradient = weight * (load(d_score + at) - mean);
        if (at + S::lanes > seen) {
            weight = S::first(seen - at, weight, zero);
            gradient = S::first(seen - at, gradient, zero);
        }
        store(score + at, weight);
        store(d_score + at, gradient);
    }
    clear_after(score, seen, keys);
    clear_after(d_score, seen, keys);
}

template <class T>
void backward_block(const TreeBackward& call, const Block& block, int64_t head, Stack<T>& stack) {
    const int64_t size = stack.size, width = stack.width;
    pack_query(call.forward, block, head, stack);
    // The gradient of the softmax needs the product of each row's output with its gradient.
    for (int64_t row = 0; row < block.rows; ++row) {
        const T* gradient = row_of<T>(call.d_out, block, row, head, size);
        const T* out = row_of<T>(call.forward.out, block, row, head, size);
        std::memcpy(stack.d_out + row * width, gradient, size_t(size) * sizeof(T));
        stack.sum[row] = dot(gradient, out, size);
        stack.max[row] = *row_of<T>(call.forward.lse, block, row, head, 1);
    }
    for (int64_t first = 0; first < block.keys(); first += kKeys) {
        const int64_t keys = least(kKeys, block.keys() - first);
        stack.scores_of(block.rows, stack.query, stack.key_t, first, keys, stack.score);
        stack.scores_of(block.rows, stack.d_out, stack.value_t, first, keys, stack.d_score);
        for (int64_t row = 0; row < block.rows; ++row) {
            grade(stack.score + row * kKeys, stack.d_score + row * kKeys, block.seen(row, first, keys), keys,
                  stack.max[row], stack.sum[row]);
        }
        multiply<T>(block.rows, {stack.d_score, kKeys, 1}, stack.key + first * width, keys, stack.d_query, width,
                    first > 0);
        multiply<T>(keys, {stack.score, 1, kKeys}, stack.d_out, block.rows, stack.d_value + first * width, width, true);
        multiply<T>(keys, {stack.d_score, 1, kKeys}, stack.query, block.rows, stack.d_key + first * width, width, true);
    }
    const T scale = T(call.forward.heads.scale);
    for (int64_t row = 0; row < block.rows; ++row) {
        T* to = row_of<T>(call.d_query, block, row, head, size);
        for (int64_t d = 0; d < size; ++d) to[d] = stack.d_query[row * width + d] * scale;
    }
}

template <class T>
void backward(const TreeBackward& call, const TreePieces& chunk, int64_t head, void* shared, void* scratch) {
    Stack<T> stack(call.forward.heads, chunk.longest, static_cast<T*>(scratch));
    const int64_t size = stack.size;
    const int64_t depth = chunk.above ? chunk.pieces[chunk.above].depth : 0;
    // Takes pieces off the stack, from `top` up to but not including `last`, and writes their gradients.
    const auto pop = [&](int64_t top, int64_t last) {
        for (; top != last; top = chunk.pieces[top].parent) {
            const TreePiece& piece = chunk.pieces[top];
            for (int64_t i = 0; i < piece.length; ++i) {
                const int64_t at = piece.depth + i, place = piece.begin + i;
                T* to_key = static_cast<T*>(call.d_key.data) + place * call.d_key.stride + head * size;
                T* to_value = static_cast<T*>(call.d_value.data) + place * call.d_value.stride + head * size;
                if (top < chunk.above) {
                    to_key = static_cast<T*>(shared) + at * size;
                    to_value = to_key + depth * size;
                }
                std::memcpy(to_key, stack.d_key + at * stack.width, size_t(size) * sizeof(T));
                std::memcpy(to_value, stack.d_value + at * stack.width, size_t(size) * sizeof(T));
            }
        }
    };
    for (int64_t i = 0; i < chunk.count; ++i) {
        pop(i - 1, chunk.pieces[i].parent);
        stack.push(call.forward, chunk.pieces[i], head, true);
        if (i < chunk.above) continue;
        each_block<T>(chunk.pieces[i], call.forward.heads.group,
                      [&](const Block& block) { backward_block(call, block, head, stack); });
    }
    pop(chunk.count - 1, -1);
}

template <class T>
int64_t scratch(const TreeHeads& heads, int64_t longest) {
    return Stack<T>::elements(heads, longest) * int64_t(sizeof(T));
}

constexpr TreeAttentionKernelSet kKernels = {{scratch<float>, forward<float>, backward<float>},
                                             {scratch<double>, forward<double>, backward<double>}};

}  // namespace

const TreeAttentionKernelSet& TW_ISA() {
    return kKernels;
}

}  // namespace turnwise
