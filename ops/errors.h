// SPDX-License-Identifier: BSD-3-Clause
// errors.h: every exception of ops/. A text names the op and the argument, what was expected and
// what was passed:
//   "gpukern::flash_attn: k has head_dim 64, q has 128; they must match"
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include "core/io.h"

// The text of the exception that made the last shim call fail. Torch has it since 2.13; in older
// versions the symbol is null.
extern "C" __attribute__((weak)) const char *torch_exception_get_what_without_backtrace();

namespace gk {

extern const char *const ops_namespace; // namespace.cpp

template <class... Parts> std::string error_text(const char *op, const Parts &...parts) {
    std::ostringstream text;
    text << ops_namespace << "::" << op << ": ";
    (text << ... << parts);
    return text.str();
}

// For a wrong shape, dtype, device or value: ValueError in Python.
template <class... Parts>
[[noreturn]] __attribute__((cold, noinline)) void bad_argument(const char *op,
                                                               const Parts &...parts) {
    throw std::invalid_argument(error_text(op, parts...));
}

// For failures that are not the caller's arguments: RuntimeError in Python.
template <class... Parts>
[[noreturn]] __attribute__((cold, noinline)) void failed(const char *op, const Parts &...parts) {
    throw std::runtime_error(error_text(op, parts...));
}

// Throws if a call into torch failed. The exception has torch's text, so that "out of memory"
// reaches the user.
inline void torch_ok(const char *op, AOTITorchError code) {
    if (code == TORCH_SUCCESS) return;
    if (torch_exception_get_what_without_backtrace) {
        failed(op, torch_exception_get_what_without_backtrace());
    }
    failed(op, "a call into torch failed (torch prints the reason to stderr)");
}

// Throws the exception for a failed status of csrc. The text begins with the op that the user
// called.
inline void status_ok(const char *op, gk_status status) {
    if (status == GK_OK) return;
    const std::string text =
        error_text(op, *gk_last_detail() ? gk_last_detail() : gk_status_name(status));
    switch (status) {
    case GK_ERR_ARGUMENT:
    case GK_ERR_UNSUPPORTED: throw std::invalid_argument(text);
    case GK_ERR_INDEX: throw std::out_of_range(text); // contents of index tensors: IndexError
    default: throw std::runtime_error(text);
    }
}

} // namespace gk
