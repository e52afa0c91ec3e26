/* SPDX-License-Identifier: BSD-3-Clause */
/* io.h: what the check of a call says about its tensors.
 *
 * The check of an op, gk_check_<op>, holds every rule on shape, dtype and value, and gives the
 * shapes and dtypes of the results. Entry points and the plugin (ops/) both call it before
 * anything is allocated. */
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

/* How much of a call's tensors exists yet. */
typedef enum gk_depth {
    GK_SHAPES,  /* sizes and dtypes only: a compiler's tensors have no data */
    GK_DATA,    /* data too, but perhaps not written yet: the workspace is being sized */
    GK_CONTENTS /* on the CPU also the contents of index tensors: the call will run */
} gk_depth;

/* The strides that a kernel requires. */
typedef enum gk_strides {
    GK_ANY_STRIDES,
    GK_DENSE_LAST, /* 1 in the last dimension */
    GK_CONTIGUOUS
} gk_strides;

typedef struct gk_input {
    const char *name;
    const gk_tensor *tensor;
    gk_strides strides; /* an entry point refuses others; the plugin makes a copy that has them */
    bool written;       /* written in place: no other input may share its memory */
} gk_input;

typedef struct gk_result {
    const char *name;
    gk_tensor as; /* its dtype, ndim and shape; contiguous strides, no data */
    /* the caller's tensor, in the arguments; the plugin allocates it after the check */
    const gk_tensor *given;
    gk_strides strides;
    bool optional; /* not wanted if it has no data or `given` is NULL */
    bool in_place; /* may be an input itself: the same elements, not shifted ones */
} gk_result;

/* The tensors of a call, in the order of its arguments. */
typedef struct gk_io {
    gk_depth depth;
    int num_inputs, num_results;
    /* gk_dtype_name, or the caller's own function if it knows more types than this library */
    const char *(*dtype_name)(gk_dtype);
    gk_input input[GK_MAX_INPUTS];
    gk_result result[GK_MAX_RESULTS];
} gk_io;

/* Every check begins with it. It counts the check (gk_count_calls). */
void gk_io_begin(gk_io *io, gk_depth depth);

/* Checks that the inputs have the strides that the kernels require. Entry points do this after
 * all other checks of the inputs. */
gk_status gk_check_strides(gk_io *io);
/* gk_check_given: result i, as the caller gave it, has the right dtype, shape and strides.
 * gk_check_apart: it shares memory with no input. */
gk_status gk_check_given(gk_io *io, int i);
gk_status gk_check_apart(gk_io *io, int i);

bool gk_has_strides(const gk_tensor *t, gk_strides strides);
/* True if an element of x and an element of y share a byte. */
bool gk_shares_memory(const gk_tensor *x, const gk_tensor *y);

/* True if attention on this device has kernels for q, k or v of this head_dim. */
bool gk_serves_head_dim(gk_device device, int64_t head_dim);

/* This thread's last failure, without the name of the entry point that gk_last_error() puts in
 * front. */
const char *gk_last_detail(void);

#ifdef __cplusplus
}
#endif
#endif
