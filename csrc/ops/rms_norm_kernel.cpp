// The loops of root-mean-square normalization. Compiled once per instruction set with TW_ISA naming the function that
// it exports, so nothing here may be an inline function with external linkage.
#include "ops/rms_norm_kernel.h"

#include <cmath>
#include <type_traits>

#include "core/simd_narrow.h"
#include "core/simd_real.h"

namespace turnwise {
namespace {

using Real = Simd<float>;

// The value as an element holds it.
template <class E>
TW_INLINE VecF rounded(VecF a) {
    if constexpr (std::is_same_v<E, float>) {
        return a;
    } else {
        E element[Real::lanes];
        store(element, a);
        return load(element);
    }
}

// Calls body(column, lanes) for whole vectors, then once for the rest.
template <class Body>
TW_INLINE void each_vector(int64_t width, const Body& body) {
    int64_t column = 0;
    for (; column + Real::lanes <= width; column += Real::lanes) body(column, std::integral_constant<int, 0>{});
    if (column < width) body(column, int(width - column));
}
// Lanes are whole where their number is the constant 0.
using Whole = std::integral_constant<int, 0>;
template <class E>
TW_INLINE VecF read(const E* p, Whole) {
    return load(p);
}
template <class E>
TW_INLINE VecF read(const E* p, int lanes) {
    return load_first(p, lanes, 0.0f);
}
template <class E>
TW_INLINE void write(E* p, Whole, VecF a) {
    store(p, a);
}
template <class E>
TW_INLINE void write(E* p, int lanes, VecF a) {
    store_first(p, lanes, a);
}

template <class E>
void normalize(const NormCall<E>& call, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const E* x = call.x + row * call.x_row;
        E* out = call.out + row * call.out_row;
        VecF squares = Real::set(0);
        each_vector(call.width, [&](int64_t column, auto lanes) {
            const VecF value = read(x + column, lanes);
            squares = Real::multiply_add(value, value, squares);
        });
        const float inverse = 1.0f / std::sqrt(Real::sum(squares) / float(call.width) + call.eps);
        const VecF scale = Real::set(inverse);
        each_vector(call.width, [&](int64_t column, auto lanes) {
            const VecF unit = rounded<E>(read(x + column, lanes) * scale);
            write(out + column, lanes, unit * read(call.weight + column, lanes));
        });
        if (call.inverse) call.inverse[row] = inverse;
    }
}

template <class E>
void differentiate(const NormCall<E>& call, int64_t first, int64_t last) {
    float* sums = call.grad_weight;
    for (int64_t column = 0; sums && column < call.width; ++column) sums[column] = 0;
    for (int64_t row = first; row < last; ++row) {
        const E* x = call.x + row * call.x_row;
        const E* upstream = call.upstream + row * call.upstream_row;
        E* grad_x = call.grad_x + row * call.grad_x_row;
        VecF dots = Real::set(0);
        each_vector(call.width, [&](int64_t column, auto lanes) {
            const VecF weighted = read(upstream + column, lanes) * read(call.weight + column, lanes);
            dots = Real::multiply_add(weighted, read(x + column, lanes), dots);
        });
        const float inverse = call.inverse[row];
        const VecF scale = Real::set(inverse);
        const VecF along = Real::set(Real::sum(dots) * inverse * inverse / float(call.width));
        each_vector(call.width, [&](int64_t column, auto lanes) {
            const VecF value = read(x + column, lanes), given = read(upstream + column, lanes);
            const VecF weighted = given * read(call.weight + column, lanes);
            write(grad_x + column, lanes, scale * (weighted - value * along));
            if (sums) {
                const VecF unit = rounded<E>(value * scale);
                write(sums + column, lanes, Real::multiply_add(given, unit, read(sums + column, lanes)));
            }
        });
    }
}

constexpr RmsNormKernels kKernels = {{normalize<float>, differentiate<float>},
                                     {normalize<BFloat16>, differentiate<BFloat16>},
                                     {normalize<Half>, differentiate<Half>}};

}  // namespace

const RmsNormKernels& TW_ISA() {
    return kKernels;
}

}  // namespace turnwise
