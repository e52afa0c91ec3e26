// SPDX-License-Identifier: BSD-3-Clause
// box.h: converts torch's stack of StableIValues into a struct of arguments, and results back.
//
// A kernel is a function R kernel(Args &). Args is a plain struct whose members are the schema's
// arguments, in order. torch calls boxed<kernel>.
//
// torch's own TORCH_BOX is not used: its reader of `str` never frees the string, and it allocates a
// shared_ptr for each tensor. Both show in a call of 10 us.
#pragma once

#include <cstring>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "tensor.h"

namespace gk {

// ---- arguments that are not tensors -------------------------------------------------------------
class String { // owns torch's string
  public:
    explicit String(StringHandle handle) : handle_(handle) {
        size_t length = 0;
        const char *data = "";
        torch_string_length(handle, &length);
        torch_string_c_str(handle, &data);
        text_ = std::string_view(data, length);
    }
    String(const String &) = delete;
    ~String() { torch_delete_string(handle_); }
    operator std::string_view() const { return text_; }

  private:
    StringHandle handle_;
    std::string_view text_;
};

struct OptDouble {
    bool given = false;
    double value = 0;
};

// A `Tensor[]` or `Tensor(a!)[]` of a schema. It owns its items.
class TensorList {
  public:
    explicit TensorList(StableListHandle list) {
        size_t n = 0;
        if (torch_list_size(list, &n) != TORCH_SUCCESS)
            throw std::runtime_error("gpukern: torch could not read a list");
        items_.reserve(n);
        for (size_t i = 0; i < n; ++i) {
            StableIValue item = 0;
            if (torch_list_get_item(list, i, &item) != TORCH_SUCCESS)
                throw std::runtime_error("gpukern: torch could not read a list");
            AtenTensorHandle handle = nullptr;
            std::memcpy(&handle, &item, sizeof handle);
            items_.emplace_back(handle);
        }
        torch_delete_list(list);
    }
    std::vector<Tensor> &items() { return items_; }

  private:
    std::vector<Tensor> items_;
};

struct OptDtype {
    bool given = false;
    int32_t code = 0; // torch's number
};

// ---- from the stack -----------------------------------------------------------------------------
template <class T> T bits_as(StableIValue value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(value));
    T result;
    std::memcpy(&result, &value, sizeof result); // the build requires a little-endian machine
    return result;
}

// The value of an optional is in a heap cell that the kernel must delete. A null pointer is None.
template <class T> bool take_optional(StableIValue value, T *inner) {
    StableIValue *cell = bits_as<StableIValue *>(value);
    if (!cell) return false;
    *inner = bits_as<T>(*cell);
    delete cell;
    return true;
}

// An entry of the stack. It converts to the type of the struct's member that it initialises.
struct Slot {
    StableIValue value;

    template <class T> operator T() const {
        if constexpr (std::is_same_v<T, Tensor> || std::is_same_v<T, WrittenTensor>) {
            return T(bits_as<AtenTensorHandle>(value));
        } else if constexpr (std::is_same_v<T, OptTensor>) {
            AtenTensorHandle handle = nullptr;
            take_optional(value, &handle);
            return OptTensor(handle);
        } else if constexpr (std::is_same_v<T, TensorList>) {
            return TensorList(bits_as<StableListHandle>(value));
        } else if constexpr (std::is_same_v<T, String>) {
            return String(bits_as<StringHandle>(value));
        } else if constexpr (std::is_same_v<T, OptDouble>) {
            OptDouble x{};
            x.given = take_optional(value, &x.value);
            return x;
        } else if constexpr (std::is_same_v<T, OptDtype>) {
            OptDtype x{};
            x.given = take_optional(value, &x.code);
            return x;
        } else {
            static_assert(std::is_same_v<T, bool> || std::is_same_v<T, int64_t> ||
                          std::is_same_v<T, double>);
            return bits_as<T>(value);
        }
    }
};

// The number of members of Args: the largest n for which Args{Slot, ... n times} is valid.
template <class Args, class Sequence, class = void> struct takes : std::false_type {};
template <class Args, size_t... I>
struct takes<Args, std::index_sequence<I...>,
             std::void_t<decltype(Args{(static_cast<void>(I), std::declval<Slot>())...})>>
    : std::true_type {};

template <class Args, size_t n = 40> constexpr size_t count_members() {
    if constexpr (takes<Args, std::make_index_sequence<n>>::value)
        return n;
    else
        return count_members<Args, n - 1>();
}

template <class Args, size_t... I>
Args unbox(const StableIValue *stack, std::index_sequence<I...>) {
    return Args{Slot{stack[I]}...};
}

// ---- to the stack -------------------------------------------------------------------------------
template <class T> StableIValue bits_of(T x) {
    StableIValue value = 0;
    std::memcpy(&value, &x, sizeof x);
    return value;
}

// The deleted template prevents implicit conversions, for example of an int to bool.
template <class T> StableIValue give(T) = delete;
inline StableIValue give(bool x) { return bits_of(x); }
inline StableIValue give(int64_t x) { return bits_of(x); }
inline StableIValue give(Tensor &t) { return bits_of(t.release()); }
inline StableIValue give(const std::string &text) {
    StringHandle handle = nullptr;
    if (torch_new_string_handle(text.data(), text.size(), &handle) != TORCH_SUCCESS) {
        throw std::runtime_error("gpukern: torch could not make a string");
    }
    return bits_of(handle);
}

template <class T> void box(StableIValue *stack, T &&result) { stack[0] = give(result); }
template <class... T> void box(StableIValue *stack, std::tuple<T...> &&results) {
    std::apply([&](auto &...result) { ((*stack++ = give(result)), ...); }, results);
}

// ---- what torch calls ---------------------------------------------------------------------------
template <class Args> Args read_args(const StableIValue *stack, uint64_t n) {
    constexpr size_t members = count_members<Args>();
    if (n != members) throw std::logic_error("gpukern: a schema and its kernel differ");
    return unbox<Args>(stack, std::make_index_sequence<members>());
}

template <class Args, class R> void call(R (*kernel)(Args &), StableIValue *stack, uint64_t n) {
    Args args = read_args<Args>(stack, n);
    if constexpr (std::is_void_v<R>)
        kernel(args);
    else
        box(stack, kernel(args));
}

template <class R> void call(R (*kernel)(), StableIValue *stack, uint64_t) {
    if constexpr (std::is_void_v<R>)
        kernel();
    else
        box(stack, kernel());
}

template <auto kernel> void boxed(StableIValue *stack, uint64_t num_args, uint64_t) {
    call(kernel, stack, num_args);
}

using Library = torch::stable::detail::StableLibrary;

// Does what STABLE_TORCH_LIBRARY and STABLE_TORCH_LIBRARY_IMPL do, but its namespace need not be a
// literal. So one object file serves plugins of any name (namespace.cpp).
struct Registered {
    Library library;
    Registered(Library::Kind kind, const char *key, void (*add_ops)(Library &), const char *file)
        : library(kind, ops_namespace, key, file, 0) {
        add_ops(library);
    }
};

} // namespace gk
