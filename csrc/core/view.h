// A tensor as the core sees it: address, dtype, shape and strides. A view does not own the memory.
#pragma once

#include <cstdint>

namespace turnwise {

enum class DType : int8_t { f32, f64, bf16, f16, i64, i32, i16, i8, u8, boolean };

struct View {
    void* data = nullptr;        // the first element; the tensor was not given if this is null and dims is 0
    DType dtype = DType::f32;    // type of the elements
    int dims = 0;                // 0, 1 or 2
    int64_t shape[2] = {1, 1};   // the first `dims` entries are valid; the rest are 1
    int64_t stride[2] = {0, 0};  // in elements
    int device = -1;             // index of the CUDA device that holds it; -1: the CPU

    explicit operator bool() const { return dims > 0 || data != nullptr; }
    int64_t size() const { return dims == 2 ? shape[0] * shape[1] : dims == 1 ? shape[0] : 1; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data);
    }
};

inline bool is_floating(DType dtype) {
    return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::bf16 || dtype == DType::f16;
}

inline int bytes_of(DType dtype) {
    switch (dtype) {
        case DType::f64:
        case DType::i64:
            return 8;
        case DType::f32:
        case DType::i32:
            return 4;
        case DType::bf16:
        case DType::f16:
        case DType::i16:
            return 2;
        default:
            return 1;
    }
}

inline bool is_contiguous(const View& view) {
    if (view.size() <= 1 || view.dims == 0) return true;
    if (view.dims == 1) return view.stride[0] == 1;
    return (view.shape[1] == 1 || view.stride[1] == 1) && (view.shape[0] == 1 || view.stride[0] == view.shape[1]);
}

// Takes a matrix. An empty matrix may have any strides.
inline bool has_contiguous_rows(const View& view) {
    return view.size() == 0 || view.shape[1] == 1 || view.stride[1] == 1;
}

inline bool is_contiguous_1d(const View& view) {
    return view.dims == 1 && (view.shape[0] <= 1 || view.stride[0] == 1);
}

}  // namespace turnwise
