// Input errors. The bindings turn InvalidInput into ValueError; the Python side then names the value as well.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "core/view.h"

namespace turnwise {

struct InvalidInput : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

inline void require(bool condition, const char* message) {
    if (!condition) throw InvalidInput(message);
}

const char* name_of(DType dtype);        // PyTorch's name: "float32"
std::string shape_of(const View& view);  // "[8, 256]"

// These throw InvalidInput for the tensor called `name`. The message gives what was expected and what was passed. The
// checks below run on every call of an op, so they build a message only if they fail.
void reject_shape(const char* name, const View& view, const std::string& expected);
void reject_dtype(const char* name, const View& view, std::initializer_list<DType> expected);
void reject_bytes(const char* name, const View& view, int64_t least);
void reject_missing(const char* name, const char* needed_for);

inline bool has_shape(const View& view, std::initializer_list<int64_t> shape) {
    if (view.dims != int(shape.size())) return false;
    const int64_t* expected = shape.begin();
    for (int d = 0; d < view.dims; ++d) {
        if (view.shape[d] != expected[d]) return false;
    }
    return true;
}
inline bool has_shape_of(const View& view, const View& other) {
    if (view.dims != other.dims) return false;
    for (int d = 0; d < view.dims; ++d) {
        if (view.shape[d] != other.shape[d]) return false;
    }
    return true;
}

inline void require_shape(const char* name, const View& view, std::initializer_list<int64_t> shape) {
    if (has_shape(view, shape)) return;
    View expected;
    expected.dims = int(shape.size());
    for (int d = 0; d < expected.dims; ++d) expected.shape[d] = shape.begin()[d];
    reject_shape(name, view, shape_of(expected));
}
inline void require_shape_of(const char* name, const View& view, const char* other_name, const View& other) {
    if (!has_shape_of(view, other)) reject_shape(name, view, shape_of(other) + ", the shape of " + other_name);
}
inline void require_dtype(const char* name, const View& view, std::initializer_list<DType> expected) {
    for (DType dtype : expected) {
        if (view.dtype == dtype) return;
    }
    reject_dtype(name, view, expected);
}
// The dtypes of token streams.
inline void require_float_stream(const char* name, const View& view) {
    require_dtype(name, view, {DType::f32, DType::bf16, DType::f16});
}
inline void require_given(const char* name, const View& view, const char* needed_for) {
    if (!view) reject_missing(name, needed_for);
}
// Throws unless the scratch memory has at least `least` bytes.
inline void require_bytes(const char* name, const View& view, int64_t least) {
    if (view.size() * bytes_of(view.dtype) < least) reject_bytes(name, view, least);
}

// A matrix of this dtype with contiguous rows.
inline void require_rows(const char* name, const View& view, int64_t rows, int64_t width, DType dtype) {
    require_shape(name, view, {rows, width});
    require_dtype(name, view, {dtype});
    if (!has_contiguous_rows(view)) throw InvalidInput(std::string(name) + ": expected contiguous rows");
}

}  // namespace turnwise
