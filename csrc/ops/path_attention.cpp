#include "ops/path_attention.h"

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "core/isa.h"
#include "core/parallel.h"
#include "ops/path_attention_kernel.h"

namespace turnwise {

const PathAttentionKernels& path_attention_kernels_baseline();
#if defined(TURNWISE_X86)
const PathAttentionKernels& path_attention_kernels_avx2();
const PathAttentionKernels& path_attention_kernels_avx512();
#endif

namespace {

constexpr int64_t kPartWork = 1 << 18;  // least work of a thread: pairs of query and key times elements

const PathAttentionKernels& kernels() {
#if defined(TURNWISE_X86)
    if (isa() == Isa::avx2) return path_attention_kernels_avx2();
    if (isa() == Isa::avx512) return path_attention_kernels_avx512();
#endif
    return path_attention_kernels_baseline();
}

// Checks every index, and returns the most places that a row attends to.
int64_t checked_places(const PathTensors& tensors, int64_t rows, int64_t places) {
    for (const View* view : {&tensors.begin, &tensors.end}) {
        require_dtype("begin, end", *view, {DType::i64});
        require_shape("begin, end", *view, {rows});
        require(is_contiguous_1d(*view), "begin, end: expected contiguous tensors of one dimension");
    }
    const View& path = tensors.path;
    require_dtype("path", path, {DType::i64});
    if (path.dims != 2 || path.shape[0] != rows) reject_shape("path", path, "[R, S]");
    require(has_contiguous_rows(path), "path: expected contiguous rows");
    const int64_t *begin = tensors.begin.as<int64_t>(), *end = tensors.end.as<int64_t>();
    int64_t longest = 0;
    for (int64_t r = 0; r < rows; ++r) {
        require(0 <= begin[r] && begin[r] <= end[r] && end[r] <= places, "begin, end: expected places of key");
        const int64_t* own = path.as<int64_t>() + r * path.stride[0];
        int64_t count = end[r] - begin[r];
        for (int64_t s = 0; s < path.shape[1]; ++s) {
            require(-1 <= own[s] && own[s] < places, "path: expected places of key, or -1");
            count += own[s] >= 0;
        }
        require(count > 0, "begin, end, path: expected at least one place for each row");
        longest = std::max(longest, count);
    }
    return longest;
}

// E is the type of the elements, T what they are computed in.
template <class E, class T>
void run(const PathTensors& tensors, const View& out, int64_t longest, int threads,
         void (*kernel)(const PathCall<E>&, int64_t, int64_t, T*)) {
    const int64_t rows = out.shape[0], size = tensors.query.shape[1] / tensors.heads;
    const PathCall<E> call{tensors.query.as<E>(),
                           tensors.key.as<E>(),
                           tensors.value.as<E>(),
                           out.as<E>(),
                           tensors.begin.as<int64_t>(),
                           tensors.end.as<int64_t>(),
                           tensors.path.as<int64_t>(),
                           tensors.query.stride[0],
                           tensors.key.stride[0],
                           tensors.value.stride[0],
                           out.stride[0],
                           tensors.path.stride[0],
                           tensors.path.shape[1],
                           longest,
                           tensors.kv_heads,
                           tensors.heads / tensors.kv_heads,
                           size,
                           tensors.scale};
    const int64_t work = rows * longest * tensors.heads * size;
    const int64_t parts = std::clamp<int64_t>(work / kPartWork, 1, std::max(1, threads));
    const int64_t room = call.group * (longest + kPathPadding);
    std::vector<T> scratch(size_t(parts * room));
    run_parts(int(parts), [&](int part) {
        kernel(call, rows * part / parts, rows * (part + 1) / parts, scratch.data() + part * room);
    });
}

}  // namespace

void path_attention(const PathTensors& tensors, const View& out, int threads) {
    const View& query = tensors.query;
    const int64_t rows = query.shape[0], heads = tensors.heads, kv_heads = tensors.kv_heads;
    if (query.dims != 2) reject_shape("query", query, "[R, heads * size]");
    require_dtype("query", query, {DType::f32, DType::f64, DType::bf16, DType::f16});
    require(kv_heads > 0 && heads > 0 && heads % kv_heads == 0 && query.shape[1] % heads == 0 && query.shape[1] > 0,
            "heads, kv_heads: expected a divisor of the width of query, and one of its own");
    const int64_t width = kv_heads * (query.shape[1] / heads), places = tensors.key.shape[0];
    require_rows("query", query, rows, query.shape[1], query.dtype);
    require_rows("key", tensors.key, places, width, query.dtype);
    require_rows("value", tensors.value, places, width, query.dtype);
    require_rows("out", out, rows, query.shape[1], query.dtype);
    const int64_t longest = checked_places(tensors, rows, places);
    switch (query.dtype) {
        case DType::f64:
            return run(tensors, out, longest, threads, kernels().f64);
        case DType::bf16:
            return run(tensors, out, longest, threads, kernels().bf16);
        case DType::f16:
            return run(tensors, out, longest, threads, kernels().f16);
        default:
            return run(tensors, out, longest, threads, kernels().f32);
    }
}

}  // namespace turnwise
