// SPDX-License-Identifier: BSD-3-Clause
// words.h: parses string arguments into the enums of the C API. An unknown word is refused with a
// text that lists the valid ones.
#pragma once

#include "run.h"

namespace gk {

// Returns the index of `word` in `words`.
template <size_t n>
int parse_word(const char *op, const char *argument, std::string_view word,
               const char *const (&words)[n]) {
    std::string all;
    for (size_t i = 0; i < n; ++i) {
        if (word == words[i]) return static_cast<int>(i);
        all += (i == 0 ? "" : i + 1 < n ? ", " : " or ") + std::string(words[i]);
    }
    bad_argument(op, argument, " must be ", all, ", got '", word, "'");
}

inline gk_activation parse_activation(const char *op, std::string_view word) {
    static const char *const words[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
    return static_cast<gk_activation>(parse_word(op, "activation", word, words));
}

inline gk_granularity parse_granularity(const char *op, std::string_view word) {
    static const char *const words[] = {"tensor", "row", "1x128", "128x128", "1x32"};
    return static_cast<gk_granularity>(parse_word(op, "granularity", word, words));
}

inline gk_accumulate parse_accumulate(const char *op, std::string_view word) {
    static const char *const words[] = {"precise", "fast"};
    return static_cast<gk_accumulate>(parse_word(op, "accumulate", word, words));
}

inline gk_weight_format parse_format(const char *op, std::string_view word) {
    static const char *const words[] = {"int4", "uint4", "int8", "e4m3", "mxfp4", "nvfp4"};
    return static_cast<gk_weight_format>(parse_word(op, "format", word, words));
}

} // namespace gk
