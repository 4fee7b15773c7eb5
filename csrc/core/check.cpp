#include "core/check.h"

namespace turnwise {

const char* name_of(DType dtype) {
    switch (dtype) {
        case DType::f32:
            return "float32";
        case DType::f64:
            return "float64";
        case DType::bf16:
            return "bfloat16";
        case DType::f16:
            return "float16";
        case DType::i64:
            return "int64";
        case DType::i32:
            return "int32";
        case DType::i16:
            return "int16";
        case DType::i8:
            return "int8";
        case DType::u8:
            return "uint8";
        case DType::boolean:
            return "bool";
    }
    return "unknown";
}

std::string shape_of(const View& view) {
    std::string text = "[";
    for (int d = 0; d < view.dims; ++d) text += (d ? ", " : "") + std::to_string(view.shape[d]);
    return text + "]";
}

void reject_shape(const char* name, const View& view, const std::string& expected) {
    throw InvalidInput(std::string(name) + ".shape=" + shape_of(view) + ": expected " + expected);
}

void reject_dtype(const char* name, const View& view, std::initializer_list<DType> expected) {
    std::string names;
    for (const DType* dtype = expected.begin(); dtype != expected.end(); ++dtype) {
        if (dtype != expected.begin()) names += dtype + 1 == expected.end() ? " or " : ", ";
        names += name_of(*dtype);
    }
    throw InvalidInput(std::string(name) + ".dtype=" + name_of(view.dtype) + ": expected " + names);
}

void reject_bytes(const char* name, const View& view, int64_t least) {
    throw InvalidInput(std::string(name) + ": expected at least " + std::to_string(least) + " bytes, got " +
                       std::to_string(view.size() * bytes_of(view.dtype)));
}

void reject_missing(const char* name, const char* needed_for) {
    throw InvalidInput(std::string(name) + "=None: expected a tensor, as " + needed_for);
}

}  // namespace turnwise
