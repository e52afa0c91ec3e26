// SPDX-License-Identifier: BSD-3-Clause
// tensor.h: an owned torch tensor with a gk_tensor view of it, and the allocation of results.
// Every access to torch's metadata is a call through the stable ABI, so it is read once.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

#include "errors.h"
#include "core/op.h"

namespace gk {

// ---- dtypes -------------------------------------------------------------------------------------
struct Dtype {
    int32_t code; // torch's number
    // csrc's. A dtype that csrc does not know is kForeign + code, which only error texts show.
    gk_dtype gk;
    const char *name; // as Python spells it
};

constexpr int32_t kForeign = 256;

// torch's headers have this dtype, but the shim of torch 2.10 has no function that returns it.
constexpr int32_t float8_e8m0fnu =
    static_cast<int32_t>(torch::headeronly::ScalarType::Float8_e8m0fnu);

struct Dtypes {
    static constexpr int kMany = 21;
    Dtype table[kMany + 1];
    gk_dtype by_code[kForeign]; // every call looks up the dtypes of its tensors

    Dtypes()
        : table{{aoti_torch_dtype_float32(), GK_F32, nullptr},
                {aoti_torch_dtype_bfloat16(), GK_BF16, nullptr},
                {aoti_torch_dtype_float16(), GK_F16, nullptr},
                {aoti_torch_dtype_int32(), GK_I32, nullptr},
                {aoti_torch_dtype_float64(), GK_F64, nullptr},
                {aoti_torch_dtype_int64(), GK_I64, nullptr},
                {aoti_torch_dtype_uint8(), GK_U8, nullptr},
                {aoti_torch_dtype_int8(), GK_I8, nullptr},
                {aoti_torch_dtype_float8_e4m3fn(), GK_E4M3, nullptr},
                {aoti_torch_dtype_float8_e5m2(), GK_E5M2, nullptr},
                {float8_e8m0fnu, GK_E8M0, nullptr},
                foreign(aoti_torch_dtype_bool(), "bool"),
                foreign(aoti_torch_dtype_int16(), "int16"),
                foreign(aoti_torch_dtype_uint16(), "uint16"),
                foreign(aoti_torch_dtype_uint32(), "uint32"),
                foreign(aoti_torch_dtype_uint64(), "uint64"),
                foreign(aoti_torch_dtype_complex32(), "complex32"),
                foreign(aoti_torch_dtype_complex64(), "complex64"),
                foreign(aoti_torch_dtype_complex128(), "complex128"),
                foreign(aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz"),
                foreign(aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz"),
                foreign(-1, "a dtype unknown to gpukern")} {
        for (gk_dtype &gk : by_code) gk = table[kMany].gk;
        for (int i = kMany - 1; i >= 0; --i) by_code[table[i].code] = table[i].gk;
    }

    static Dtype foreign(int32_t code, const char *name) {
        return {code, static_cast<gk_dtype>(kForeign + code), name};
    }
    static const Dtypes &all() {
        static const Dtypes dtypes;
        return dtypes;
    }
    // The first entry for which is(entry) is true, or the last entry if there is none.
    template <class Is> const Dtype &find(Is is) const {
        int i = 0;
        while (i < kMany && !is(table[i])) ++i;
        return table[i];
    }
};

inline gk_dtype gk_of(int32_t code) {
    static const Dtypes &dtypes = Dtypes::all();
    return code >= 0 && code < kForeign ? dtypes.by_code[code] : dtypes.table[Dtypes::kMany].gk;
}
inline int32_t code_of(gk_dtype dtype) {
    return Dtypes::all().find([=](const Dtype &x) { return x.gk == dtype; }).code;
}
// The name of a dtype in error texts (gk_io.dtype_name).
inline const char *dtype_name(gk_dtype dtype) {
    const Dtype &found = Dtypes::all().find([=](const Dtype &x) { return x.gk == dtype; });
    return found.name ? found.name : gk_dtype_name(dtype);
}

// ---- devices ------------------------------------------------------------------------------------
struct Device {
    int32_t type, index;

    bool operator==(const Device &other) const {
        return type == other.type && (index == other.index || type == cpu());
    }
    bool operator!=(const Device &other) const { return !(*this == other); }
    bool is_cpu() const { return type == cpu(); }
    bool is_cuda() const { return type == aoti_torch_device_type_cuda(); }
    bool is_meta() const { return type == aoti_torch_device_type_meta(); }
    static Device meta() { return {aoti_torch_device_type_meta(), 0}; }

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
// The name of an op's i-th tensor. `names` lists them all: "x, weight".
inline std::string name_of(const char *names, int i) {
    for (; i > 0; --i) names = std::strchr(names, ',') + 2;
    return std::string(names, std::strcspn(names, ","));
}

// Owns a handle. `device` and `view` are valid after read_form(), or if empty() made the tensor;
// view.data is valid after read_data().
class Tensor {
  public:
    Device device{};
    // shape and stride hold at most GK_MAX_DIMS entries. csrc refuses a tensor of larger ndim.
    gk_tensor view;

    Tensor() {
        view.data = nullptr;
        view.ndim = 0;
    }
    explicit Tensor(AtenTensorHandle handle) : handle_(handle) {
        view.data = nullptr;
        view.ndim = 0;
    }
    Tensor(Tensor &&other) noexcept
        : device(other.device), view(other.view), handle_(std::exchange(other.handle_, nullptr)) {}
    Tensor &operator=(Tensor &&other) noexcept {
        device = other.device;
        view = other.view;
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~Tensor() {
        if (handle_) aoti_torch_delete_tensor_object(handle_);
    }

    explicit operator bool() const { return handle_ != nullptr; }
    AtenTensorHandle get() const { return handle_; }
    AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
    // Optional arguments of the C API are pointers, NULL if absent.
    const gk_tensor *view_or_null() const { return handle_ ? &view : nullptr; }

    int64_t size(int d) const { return view.shape[d]; }
    int64_t stride(int d) const { return view.stride[d]; }
    int64_t numel() const {
        int64_t n = 1;
        for (int d = 0; d < view.ndim; ++d) n *= view.shape[d];
        return n;
    }

    // Reads dtype, device, shape and strides, but not the data pointer.
    void read_form(const char *op) {
        int32_t code;
        torch_ok(op, aoti_torch_get_dtype(handle_, &code));
        view.dtype = gk_of(code);
        torch_ok(op, aoti_torch_get_device_type(handle_, &device.type));
        torch_ok(op, aoti_torch_get_device_index(handle_, &device.index));
        int64_t ndim, *sizes, *strides;
        torch_ok(op, aoti_torch_get_dim(handle_, &ndim));
        torch_ok(op, aoti_torch_get_sizes(handle_, &sizes));
        torch_ok(op, aoti_torch_get_strides(handle_, &strides));
        view.data = nullptr;
        view.ndim = static_cast<int32_t>(ndim);
        for (int d = 0; d < ndim && d < GK_MAX_DIMS; ++d) {
            view.shape[d] = sizes[d];
            view.stride[d] = strides[d];
        }
    }

    bool is_strided(const char *op) const {
        static const int32_t strided = aoti_torch_layout_strided();
        int32_t layout;
        torch_ok(op, aoti_torch_get_layout(handle_, &layout));
        return layout == strided;
    }

    // `writable`: the op writes the tensor, so a copy-on-write storage must be copied now.
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

// A `Tensor?` of a schema. It is false if the argument is None.
class OptTensor : public Tensor {
  public:
    using Tensor::Tensor;
    OptTensor(Tensor &&other) noexcept : Tensor(std::move(other)) {}
};

// A `Tensor(a!)` of a schema, which the op writes.
class WrittenTensor : public Tensor {
  public:
    using Tensor::Tensor;
};

// ---- results ------------------------------------------------------------------------------------
// An uninitialised tensor with the dtype and shape of `form`, dense in the order of its dimensions.
// With `tokens_first` a [B, H, S, D] tensor is stored as [B, S, H, D].
inline Tensor empty(const char *op, const gk_tensor &form, Device device,
                    bool tokens_first = false) {
    static const int stored[4] = {3, 1, 2, 0}; // innermost first
    int64_t stride[GK_MAX_DIMS], dense = 1;
    bool fits = true;
    for (int i = 0; i < form.ndim; ++i) {
        int d = tokens_first ? stored[i] : form.ndim - 1 - i;
        stride[d] = dense;
        fits &= !__builtin_mul_overflow(dense, form.shape[d] > 1 ? form.shape[d] : 1, &dense);
    }
    if (!fits || dense > INT64_C(1) << 59) { // its bytes must fit 64 bits too
        failed(op, "out of memory: the sizes of a result multiply to more than 2^59");
    }
    AtenTensorHandle handle;
    torch_ok(op, aoti_torch_empty_strided(form.ndim, form.shape, stride, code_of(form.dtype),
                                          device.type, device.index, &handle));
    Tensor t(handle);
    t.device = device;
    t.view.dtype = form.dtype;
    t.view.ndim = form.ndim;
    for (int d = 0; d < form.ndim; ++d) {
        t.view.shape[d] = form.shape[d];
        t.view.stride[d] = stride[d];
    }
    t.view.data = nullptr;
    if (!device.is_meta()) t.read_data(op, true);
    return t;
}

inline void zero(const char *op, Tensor &t) { torch_ok(op, aoti_torch_zero_(t.get())); }

// Replaces t by a dense copy.
inline void copy_dense(const char *op, Tensor &t) {
    Tensor dense = empty(op, t.view, t.device);
    torch_ok(op, aoti_torch_copy_(dense.get(), t.get(), 0));
    t = std::move(dense);
}

} // namespace gk
