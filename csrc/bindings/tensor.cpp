#include "bindings/tensor.h"

#include <pybind11/gil_safe_call_once.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/dlpack.h"
#include "cuda/device.h"

namespace py = pybind11;

namespace turnwise {
namespace {

// torch's types and attribute names. torch.dtype objects are singletons, so a dtype is found by its address. Filled at
// the first tensor and never freed.
struct TorchNames {
    TorchNames() {
        const py::module_ torch = py::module_::import("torch");
        const std::pair<const char*, DType> names[] = {
            {"float32", DType::f32}, {"float64", DType::f64}, {"bfloat16", DType::bf16}, {"float16", DType::f16},
            {"int64", DType::i64},   {"int32", DType::i32},   {"int16", DType::i16},     {"int8", DType::i8},
            {"uint8", DType::u8},    {"bool", DType::boolean}};
        for (const auto& [name, dtype] : names)
            dtypes.emplace_back(py::object(torch.attr(name)).release().ptr(), dtype);
        tensor_type = reinterpret_cast<PyTypeObject*>(py::object(torch.attr("Tensor")).release().ptr());
        const py::object capsule = py::getattr(torch.attr("Tensor"), dlpack::kTypeAttribute, py::none());
        if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsuleName)) return;  // torch before 2.10
        const auto* api =
            static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
        if (api->major == dlpack::kMajorVersion) exchange = api->view;
    }
    PyTypeObject* tensor_type = nullptr;                           // torch.Tensor
    int (*exchange)(void* object, dlpack::Tensor* out) = nullptr;  // ExchangeApi::view; null before torch 2.10
    std::vector<std::pair<PyObject*, DType>> dtypes;               // torch.dtype -> DType
    PyObject* dtype = PyUnicode_InternFromString("dtype");
    PyObject* shape = PyUnicode_InternFromString("shape");
    PyObject* stride = PyUnicode_InternFromString("stride");
    PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
    PyObject* is_cuda = PyUnicode_InternFromString("is_cuda");
    PyObject* get_device = PyUnicode_InternFromString("get_device");
};

// Importing torch may release the GIL to another thread. With a plain static the two threads could wait for each other.
const TorchNames& torch_names() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<const TorchNames*> names;
    return *names.call_once_and_store_result([]() -> const TorchNames* { return new TorchNames; }).get_stored();
}

py::object checked(PyObject* result) {
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

[[noreturn]] void reject(const char* name, const std::string& reason) {
    throw py::type_error(name + (": " + reason));
}

void read_pair(const py::object& sizes, int64_t* to) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sizes.ptr()); ++i) {
        to[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
    }
}

bool known_dtype(const dlpack::Tensor& tensor, DType& dtype) {
    using dlpack::Code;
    static constexpr struct {
        Code code;
        uint8_t bits;
        DType dtype;
    } kinds[] = {{Code::floating, 32, DType::f32},       {Code::integer, 64, DType::i64},
                 {Code::boolean, 8, DType::boolean},     {Code::bfloat, 16, DType::bf16},
                 {Code::floating, 16, DType::f16},       {Code::floating, 64, DType::f64},
                 {Code::unsigned_integer, 8, DType::u8}, {Code::integer, 32, DType::i32},
                 {Code::integer, 16, DType::i16},        {Code::integer, 8, DType::i8}};
    for (const auto& kind : kinds) {
        if (kind.code != tensor.code || kind.bits != tensor.bits || tensor.lanes != 1) continue;
        dtype = kind.dtype;
        return true;
    }
    return false;
}

// Reads the view without a call into Python, in a tenth of the time. False if that is not possible; `read` then finds
// out why.
bool read_by_exchange(py::handle tensor, dlpack::DeviceType device, View& view, const TorchNames& names) {
    if (names.exchange == nullptr || !PyObject_TypeCheck(tensor.ptr(), names.tensor_type)) return false;
    dlpack::Tensor found;
    if (names.exchange(tensor.ptr(), &found) != 0) {
        PyErr_Clear();
        return false;
    }
    if (found.device_type != device || found.dims > 2 || !known_dtype(found, view.dtype)) return false;
    view.data = static_cast<char*>(found.data) + found.byte_offset;
    view.dims = found.dims;
    for (int i = 0; i < found.dims; ++i) {
        view.shape[i] = found.shape[i];
        view.stride[i] = found.strides[i];
    }
    if (device == dlpack::DeviceType::cuda) view.device = found.device;
    return true;
}

// Reads dtype, shape, strides and address of a tensor on any device through its attributes.
View read(py::handle tensor, const char* name, const TorchNames& names) {
    View view;
    const py::object dtype = checked(PyObject_GetAttr(tensor.ptr(), names.dtype));
    bool known = false;
    for (const auto& [object, value] : names.dtypes) {
        if (object != dtype.ptr()) continue;
        view.dtype = value;
        known = true;
        break;
    }
    if (!known) reject(name, "a dtype that is not read here");
    const py::object shape = checked(PyObject_GetAttr(tensor.ptr(), names.shape));
    view.dims = int(PyTuple_GET_SIZE(shape.ptr()));
    if (view.dims > 2) reject(name, "expected at most two dimensions");
    read_pair(shape, view.shape);
    read_pair(checked(PyObject_CallMethodNoArgs(tensor.ptr(), names.stride)), view.stride);
    // data_ptr() raises for tensors inside torch.func's transforms. They have no address, like other wrappers.
    PyObject* address = PyObject_CallMethodNoArgs(tensor.ptr(), names.data_ptr);
    if (address == nullptr && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
        return view;
    }
    view.data = PyLong_AsVoidPtr(checked(address).ptr());
    return view;
}

// Reads a NumPy array or another buffer, so that callers without torch need none.
View read_buffer(py::handle array, const char* name) {
    const py::buffer_info found = py::reinterpret_borrow<py::buffer>(array).request();
    const std::string& format = found.format;
    const bool wide = found.itemsize == sizeof(int64_t);
    View view;
    if (format == "d")
        view.dtype = DType::f64;
    else if (format == "f")
        view.dtype = DType::f32;
    else if (wide && (format == "l" || format == "q"))
        view.dtype = DType::i64;
    else if (format == "?")
        view.dtype = DType::boolean;
    else
        reject(name, "expected an array of float64, float32, int64 or bool");
    if (found.ndim > 2) reject(name, "expected at most two dimensions");
    view.dims = int(found.ndim);
    for (py::ssize_t i = 0; i < found.ndim; ++i) {
        view.shape[i] = found.shape[size_t(i)];
        view.stride[i] = found.strides[size_t(i)] / found.itemsize;
    }
    view.data = found.ptr;
    return view;
}

// Refuses tensors without memory. Wrappers such as DTensor or those of torch.func report a device but have no memory.
View with_memory(const View& view, const char* name) {
    if (view.data == nullptr && view.size() > 0)
        reject(name,
               "expected a tensor with memory of its own, not a wrapper such as a DTensor: pass x.full_tensor(), or "
               "inside torch.func use backend='torch'");
    return view;
}

bool is_true(py::handle tensor, PyObject* attribute) {
    return checked(PyObject_GetAttr(tensor.ptr(), attribute)).ptr() == Py_True;
}

}  // namespace

View view_of(py::handle tensor, const char* name) {
    if (tensor.is_none()) return {};
    if (PyObject_CheckBuffer(tensor.ptr())) return read_buffer(tensor, name);
    const TorchNames& names = torch_names();
    View view;
    if (read_by_exchange(tensor, dlpack::DeviceType::cpu, view, names)) return with_memory(view, name);
    if (!is_true(tensor, names.is_cpu)) reject(name, "expected a CPU tensor");
    return with_memory(read(tensor, name, names), name);
}

View cuda_view_of(py::handle tensor, const char* name) {
    if (tensor.is_none()) return {};
    if (cuda::emulated()) {
        const View view = view_of(tensor, name);
        cuda::allow(view);
        return view;
    }
    const TorchNames& names = torch_names();
    View view;
    if (read_by_exchange(tensor, dlpack::DeviceType::cuda, view, names)) return with_memory(view, name);
    if (!is_true(tensor, names.is_cuda)) reject(name, "expected a CUDA tensor");
    view = read(tensor, name, names);
    view.device = int(PyLong_AsLong(checked(PyObject_CallMethodNoArgs(tensor.ptr(), names.get_device)).ptr()));
    return with_memory(view, name);
}

}  // namespace turnwise
