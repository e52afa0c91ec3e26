// tensor.h: an owned torch tensor and its metadata as a gk_tensor, read once; allocation of
// results.
#pragma once

#include <cstdint>
#include <utility>

#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

#include "errors.h"

namespace gk {

// ---- dtypes -------------------------------------------------------------------------------------
struct Dtype {
    int32_t code;     // torch's number
    const char *name; // as Python spells it
    int32_t gk;       // gk_dtype, -1 = no op takes it
};

constexpr const char *kFloats = "float32, bfloat16, float16 or float64";

// The headers of torch know it, the shim of torch 2.10 has no function for it.
constexpr int32_t float8_e8m0fnu = static_cast<int32_t>(torch::headeronly::ScalarType::Float8_e8m0fnu);

// The first whose field holds the value.
inline const Dtype *find_dtype(int32_t Dtype::*field, int32_t value) {
    static const Dtype table[] = {
        {aoti_torch_dtype_float32(), "float32", GK_F32},
        {aoti_torch_dtype_bfloat16(), "bfloat16", GK_BF16},
        {aoti_torch_dtype_float16(), "float16", GK_F16},
        {aoti_torch_dtype_int32(), "int32", GK_I32},
        {aoti_torch_dtype_float64(), "float64", GK_F64},
        {aoti_torch_dtype_int64(), "int64", GK_I64},
        {aoti_torch_dtype_bool(), "bool", -1},
        {aoti_torch_dtype_uint8(), "uint8", GK_U8},
        {aoti_torch_dtype_int8(), "int8", GK_I8},
        {aoti_torch_dtype_int16(), "int16", -1},
        {aoti_torch_dtype_uint16(), "uint16", -1},
        {aoti_torch_dtype_uint32(), "uint32", -1},
        {aoti_torch_dtype_uint64(), "uint64", -1},
        {aoti_torch_dtype_complex32(), "complex32", -1},
        {aoti_torch_dtype_complex64(), "complex64", -1},
        {aoti_torch_dtype_complex128(), "complex128", -1},
        {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn", GK_E4M3},
        {aoti_torch_dtype_float8_e5m2(), "float8_e5m2", GK_E5M2},
        {float8_e8m0fnu, "float8_e8m0fnu", GK_E8M0},
        {aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz", -1},
        {aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz", -1},
    };
    static const Dtype other = {-1, "a dtype unknown to gpukern", -1};
    for (const Dtype &row : table) {
        if (row.*field == value) return &row;
    }
    return &other;
}

inline const Dtype *find_dtype(int32_t code) { return find_dtype(&Dtype::code, code); }
inline const Dtype *dtype_of(gk_dtype dtype) { return find_dtype(&Dtype::gk, dtype); }

// ---- devices ------------------------------------------------------------------------------------
struct Device {
    int32_t type, index;

    bool operator==(const Device &other) const { return type == other.type && (index == other.index || type == cpu()); }
    bool operator!=(const Device &other) const { return !(*this == other); }
    bool is_cpu() const { return type == cpu(); }

    std::string name() const {
        const char *word = type == cpu()                           ? "cpu"
                           : type == aoti_torch_device_type_cuda() ? "cuda"
                           : type == aoti_torch_device_type_meta() ? "meta"
                                                                   : "another device";
        return index < 0 || is_cpu() ? word : std::string(word) + ":" + std::to_string(index);
    }

  private:
    static int32_t cpu() {
        static const int32_t code = aoti_torch_device_type_cpu();
        return code;
    }
};

// ---- tensors ------------------------------------------------------------------------------------
// Owns a handle. What describes the tensor is valid after read() or where empty() made it.
class Tensor {
  public:
    const char *name = nullptr; // the argument's
    const Dtype *dtype = nullptr;
    Device device{};
    gk_tensor view; // shape and stride are filled up to GK_MAX_DIMS; ndim may be larger

    Tensor() : view{} {}
    explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
    Tensor(Tensor &&other) noexcept
        : name(other.name), dtype(other.dtype), device(other.device), view(other.view),
          handle_(std::exchange(other.handle_, nullptr)) {}
    Tensor &operator=(Tensor &&other) noexcept {
        std::swap(name, other.name);
        std::swap(dtype, other.dtype);
        std::swap(device, other.device);
        std::swap(view, other.view);
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~Tensor() {
        if (handle_) aoti_torch_delete_tensor_object(handle_);
    }

    explicit operator bool() const { return handle_ != nullptr; }
    AtenTensorHandle get() const { return handle_; }
    AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
    // The form of optional arguments in the C API.
    const gk_tensor *view_or_null() const { return handle_ ? &view : nullptr; }

    int64_t size(int d) const { return view.shape[d]; }
    int64_t stride(int d) const { return view.stride[d]; }
    int last() const { return view.ndim - 1; }
    int64_t numel() const {
        int64_t n = 1;
        for (int d = 0; d < view.ndim; ++d) n *= view.shape[d];
        return n;
    }

    // `writable` where the op writes the tensor: a copy-on-write storage then becomes real.
    void read(const char *op, const char *argument, bool writable = false) {
        static const int32_t strided = aoti_torch_layout_strided();
        name = argument;
        int32_t layout, code;
        torch_ok(op, aoti_torch_get_layout(handle_, &layout));
        if (layout != strided) bad_argument(op, name, " must be a strided (dense) tensor");
        torch_ok(op, aoti_torch_get_dtype(handle_, &code));
        dtype = find_dtype(code);
        if (dtype->gk >= 0) view.dtype = static_cast<gk_dtype>(dtype->gk);
        torch_ok(op, aoti_torch_get_device_type(handle_, &device.type));
        torch_ok(op, aoti_torch_get_device_index(handle_, &device.index));
        int64_t ndim, *sizes, *strides;
        torch_ok(op, aoti_torch_get_dim(handle_, &ndim));
        torch_ok(op, aoti_torch_get_sizes(handle_, &sizes));
        torch_ok(op, aoti_torch_get_strides(handle_, &strides));
        view.ndim = static_cast<int32_t>(ndim);
        for (int d = 0; d < ndim && d < GK_MAX_DIMS; ++d) {
            view.shape[d] = sizes[d];
            view.stride[d] = strides[d];
        }
        read_data(op, writable);
        if (!view.data && ndim <= GK_MAX_DIMS && numel() > 0) {
            bad_argument(op, name, " has no memory behind it; a subclass must unwrap it first");
        }
    }

    void read_data(const char *op, bool writable) {
        if (writable) {
            torch_ok(op, torch_get_mutable_data_ptr(handle_, &view.data));
        } else {
            const void *data;
            torch_ok(op, torch_get_const_data_ptr(handle_, &data));
            view.data = const_cast<void *>(data);
        }
    }

  private:
    AtenTensorHandle handle_ = nullptr;
};

// A `Tensor?` of a schema; false where it is None.
class OptTensor : public Tensor {
  public:
    using Tensor::Tensor;
    OptTensor(Tensor &&other) noexcept : Tensor(std::move(other)) {}
};

// ---- results ------------------------------------------------------------------------------------
struct Shape {
    int32_t ndim = 0;
    int64_t size[GK_MAX_DIMS];
};

// An uninitialised tensor, dense in the order of its dimensions; with `tokens_first` a
// [B, H, S, D] tensor is stored as [B, S, H, D].
inline Tensor empty(const char *op, const Shape &shape, const Dtype *dtype, Device device, bool tokens_first = false) {
    static const int stored[4] = {3, 1, 2, 0}; // innermost first
    int64_t stride[GK_MAX_DIMS], dense = 1;
    bool fits = true;
    for (int i = 0; i < shape.ndim; ++i) {
        int d = tokens_first ? stored[i] : shape.ndim - 1 - i;
        stride[d] = dense;
        fits &= !__builtin_mul_overflow(dense, shape.size[d] > 1 ? shape.size[d] : 1, &dense);
    }
    if (!fits || dense > INT64_C(1) << 59) { // its bytes are counted in 64 bits too
        failed(op, "out of memory: the sizes of a result multiply to more than 2^59");
    }
    AtenTensorHandle handle;
    torch_ok(op,
             aoti_torch_empty_strided(shape.ndim, shape.size, stride, dtype->code, device.type, device.index, &handle));
    Tensor t(handle);
    t.dtype = dtype;
    t.device = device;
    t.view.dtype = static_cast<gk_dtype>(dtype->gk);
    t.view.ndim = shape.ndim;
    for (int d = 0; d < shape.ndim; ++d) {
        t.view.shape[d] = shape.size[d];
        t.view.stride[d] = stride[d];
    }
    t.read_data(op, true);
    return t;
}

inline Shape shape_of(const Tensor &t) {
    Shape shape;
    shape.ndim = t.view.ndim;
    for (int d = 0; d < shape.ndim; ++d) shape.size[d] = t.view.shape[d];
    return shape;
}

inline void zero(const char *op, Tensor &t) { torch_ok(op, aoti_torch_zero_(t.get())); }

// Replaces t by a dense copy.
inline void copy_dense(const char *op, Tensor &t) {
    Tensor dense = empty(op, shape_of(t), t.dtype, t.device);
    torch_ok(op, aoti_torch_copy_(dense.get(), t.get(), 0));
    dense.name = t.name;
    t = std::move(dense);
}

// The attention kernels walk the last dimension with stride 1: any other tensor is copied first.
inline void make_last_dense(const char *op, Tensor &t) {
    int d = t.last();
    if (t.view.shape[d] > 1 && t.view.stride[d] != 1 && t.numel() > 0) copy_dense(op, t);
    t.view.stride[d] = 1;
}

inline void make_dense(const char *op, Tensor &t) {
    int64_t dense = 1;
    for (int d = t.last(); d >= 0; --d) {
        if (t.view.shape[d] != 1 && t.view.stride[d] != dense && t.numel() > 0) {
            return copy_dense(op, t);
        }
        t.view.stride[d] = dense;
        dense *= t.view.shape[d] > 1 ? t.view.shape[d] : 1;
    }
}

} // namespace gk
