#include "ops/rms_norm.h"

#include <algorithm>

#include "core/check.h"
#include "core/isa.h"
#include "core/parallel.h"
#include "ops/rms_norm_kernel.h"

namespace turnwise {

const RmsNormKernels& rms_norm_kernels_baseline();
#if defined(TURNWISE_X86)
const RmsNormKernels& rms_norm_kernels_avx2();
const RmsNormKernels& rms_norm_kernels_avx512();
#endif

namespace {

constexpr int64_t kPartElements = 1 << 15;  // least work of a thread

const RmsNormKernels& kernels() {
#if defined(TURNWISE_X86)
    if (isa() == Isa::avx2) return rms_norm_kernels_avx2();
    if (isa() == Isa::avx512) return rms_norm_kernels_avx512();
#endif
    return rms_norm_kernels_baseline();
}

void check(const NormTensors& tensors) {
    const View &x = tensors.x, &weight = tensors.weight;
    if (x.dims != 2) reject_shape("x", x, "[n, h]");
    require_float_stream("x", x);
    require_rows("x", x, x.shape[0], x.shape[1], x.dtype);
    require_shape("weight", weight, {x.shape[1]});
    require_dtype("weight", weight, {x.dtype});
    require(is_contiguous_1d(weight), "weight: expected a contiguous tensor");
}

void check_inverse(const View& inverse, int64_t rows) {
    require_shape("inverse", inverse, {rows});
    require_dtype("inverse", inverse, {DType::f32});
    require(is_contiguous_1d(inverse), "inverse: expected a contiguous tensor");
}

// Calls body(first, last) on runs of `units`, one per thread.
template <class Body>
void share(int64_t units, int64_t elements, int threads, const Body& body) {
    const int64_t most = std::min<int64_t>(units, elements / kPartElements);
    const int parts = int(std::clamp<int64_t>(most, 1, std::max(1, threads)));
    run_parts(parts, [&](int part) { body(units * part / parts, units * (part + 1) / parts); });
}

// Calls body(kernels of E, an empty call with the inputs).
template <class Body>
void with_type(const NormTensors& tensors, const Body& body) {
    const View &x = tensors.x, &weight = tensors.weight;
    const auto run = [&](auto* element, const auto& own) {
        using E = std::remove_pointer_t<decltype(element)>;
        NormCall<E> call{};
        call.x = x.as<E>(), call.weight = weight.as<E>();
        call.x_row = x.stride[0], call.width = x.shape[1], call.eps = tensors.eps;
        body(own, call);
    };
    if (x.dtype == DType::bf16) return run((BFloat16*)nullptr, kernels().bf16);
    if (x.dtype == DType::f16) return run((Half*)nullptr, kernels().f16);
    run((float*)nullptr, kernels().f32);
}

}  // namespace

void rms_norm(const NormTensors& tensors, const View& out, const View& inverse, int threads) {
    check(tensors);
    const int64_t rows = tensors.x.shape[0], width = tensors.x.shape[1];
    require_rows("out", out, rows, width, tensors.x.dtype);
    if (inverse) check_inverse(inverse, rows);
    with_type(tensors, [&](const auto& own, auto call) {
        call.out = out.as<std::remove_pointer_t<decltype(call.out)>>();
        call.out_row = out.stride[0];
        call.inverse = inverse ? inverse.as<float>() : nullptr;
        share(rows, rows * width, threads, [&](int64_t first, int64_t last) { own.normalize(call, first, last); });
    });
}

void rms_norm_grad(const NormTensors& tensors, const View& inverse, const View& upstream, const View& grad_x,
                   const View& grad_weight, int threads) {
    check(tensors);
    const int64_t rows = tensors.x.shape[0], width = tensors.x.shape[1];
    const int64_t blocks = (rows + kNormBlock - 1) / kNormBlock;
    check_inverse(inverse, rows);
    require_rows("upstream", upstream, rows, width, tensors.x.dtype);
    require_rows("grad_x", grad_x, rows, width, tensors.x.dtype);
    if (grad_weight) {
        require_rows("grad_weight", grad_weight, blocks, width, DType::f32);
        require(blocks < 2 || grad_weight.stride[0] == width, "grad_weight: expected a contiguous tensor");
    }
    with_type(tensors, [&](const auto& own, auto call) {
        using E = std::remove_pointer_t<decltype(call.grad_x)>;
        call.upstream = upstream.as<E>(), call.upstream_row = upstream.stride[0];
        call.grad_x = grad_x.as<E>(), call.grad_x_row = grad_x.stride[0];
        call.inverse = inverse.as<float>();
        share(blocks, rows * width, threads, [&](int64_t first, int64_t last) {
            auto part = call;
            for (int64_t block = first; block < last; ++block) {
                part.grad_weight = grad_weight ? grad_weight.as<float>() + block * width : nullptr;
                own.differentiate(part, block * kNormBlock, std::min(rows, (block + 1) * kNormBlock));
            }
        });
    });
}

}  // namespace turnwise
