/* SPDX-License-Identifier: BSD-3-Clause */
/* io.h: what a check says of a call's tensors. The check of an op, gk_check_<op>, holds every law
 * of shape, dtype and value, and finds the results' shapes and dtypes; entry points and the plugin
 * both ask it, before anything is allocated. */
#ifndef GPUKERN_IO_H
#define GPUKERN_IO_H

#include "gpukern.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    GK_MAX_INPUTS = 24,
    GK_MAX_RESULTS = 8
};

/* How much of a call's tensors there is to look at. */
typedef enum gk_depth {
    GK_SHAPES,  /* sizes and dtypes: the tensors of a compiler, which have no data */
    GK_DATA,    /* and data, which may not have been written yet: the workspace is sized */
    GK_CONTENTS /* and, on the CPU, what index tensors hold: the call will run */
} gk_depth;

/* What a kernel asks of a tensor's strides. */
typedef enum gk_strides {
    GK_ANY_STRIDES,
    GK_DENSE_LAST, /* 1 in the last dimension */
    GK_CONTIGUOUS
} gk_strides;

typedef struct gk_input {
    const char *name;
    const gk_tensor *tensor;
    gk_strides strides; /* an entry point refuses others; the plugin makes a copy that has them */
    bool written;       /* in place: no other input may share its memory */
} gk_input;

typedef struct gk_result {
    const char *name;
    gk_tensor as;           /* dtype, ndim and shape that it has; contiguous strides, no data */
    const gk_tensor *given; /* where the arguments have it; the plugin has not made it yet */
    gk_strides strides;
    bool optional; /* without data, or given NULL: not wanted */
    bool in_place; /* it may be an input: the very same elements, none of them shifted */
} gk_result;

/* A call's tensors, in the order of its arguments. */
typedef struct gk_io {
    gk_depth depth;
    int num_inputs, num_results;
    /* gk_dtype_name, or that of a caller who knows more types than this library */
    const char *(*dtype_name)(gk_dtype);
    gk_input input[GK_MAX_INPUTS];
    gk_result result[GK_MAX_RESULTS];
} gk_io;

/* What a check begins with; it counts the check (gk_count_calls). */
void gk_io_begin(gk_io *io, gk_depth depth);

/* Whether the inputs have the strides that the kernels ask for: the last of what an entry point
 * refuses. */
gk_status gk_check_strides(gk_io *io);
/* Whether result i, as it is given, is what it has to be; and whether it shares memory with no
 * input. */
gk_status gk_check_given(gk_io *io, int i);
gk_status gk_check_apart(gk_io *io, int i);

bool gk_has_strides(const gk_tensor *t, gk_strides strides);
/* Whether an element of x and one of y share a byte. */
bool gk_shares_memory(const gk_tensor *x, const gk_tensor *y);

/* Whether attention on such a device has kernels for q, k or v of this head_dim. */
bool gk_serves_head_dim(gk_device device, int64_t head_dim);

/* This thread's last failure without the name of the entry point that gk_last_error() has in front
 * of it. */
const char *gk_last_detail(void);

#ifdef __cplusplus
}
#endif
#endif
