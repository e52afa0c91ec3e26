/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_epilogue.h: what an epilogue of your own is written with (docs/epilogue.md).
 *
 * An epilogue is a struct with the name of the op. Its members are the op's arguments after a and
 * b, and its function `finish` turns the sum of one element of a b into the result's element:
 *
 *   struct squared_relu {
 *       gk_per_row scale;
 *       GK_ARGUMENTS(scale)
 *       GK_FINISH float finish(float sum, int row, int column) const { .. }
 *   };
 *
 * row is in [0, M) and column in [0, N), always. finish runs in any order, and for elements outside
 * the result too, whose value is dropped: it must not write memory. */
#ifndef GPUKERN_EPILOGUE_H
#define GPUKERN_EPILOGUE_H

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define GK_FINISH __host__ __device__ __forceinline__
#define GK_VISIT __device__ __forceinline__
#else
#define GK_FINISH inline
#define GK_VISIT inline
#endif

/* The types of members. A float is a number of the schema. The others are float32 tensors of any
 * strides. */
struct gk_per_row { /* [M] */
    const float *data;
    int64_t step;
    GK_FINISH float operator[](int row) const { return data[row * step]; }
};
struct gk_per_column { /* [N] */
    const float *data;
    int64_t step;
    GK_FINISH float operator[](int column) const { return data[column * step]; }
};
struct gk_per_element { /* [M, N] */
    const float *data;
    int64_t row_step, column_step;
    GK_FINISH float operator()(int row, int column) const {
        return data[row * row_step + column * column_step];
    }
};

/* Names the members in the order of the schema. arguments() calls a function with each of them. */
#define GK_ARGUMENTS(...)                                                            \
    static constexpr const char *argument_names() { return #__VA_ARGS__; }           \
    template <class Visitor> GK_VISIT void arguments(const Visitor &visitor) {       \
        gk_visit_arguments(visitor, ##__VA_ARGS__);                                  \
    }                                                                                \
    template <class Visitor> GK_VISIT void arguments(const Visitor &visitor) const { \
        gk_visit_arguments(visitor, ##__VA_ARGS__);                                  \
    }

template <class Visitor, class... Argument>
GK_VISIT void gk_visit_arguments(const Visitor &visitor, Argument &...argument) {
    (visitor(argument), ...);
}

#endif
