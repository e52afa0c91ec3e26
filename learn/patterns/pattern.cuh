// SPDX-License-Identifier: BSD-3-Clause
// pattern: what every example here shares: a table of variants, their check on awkward sizes, their
// time, one line each.
//
// A variant states its bound before it runs, by the model of csrc/cuda/layout/banks.cuh and a few
// figures of the device. Without a GPU the predictions are printed alone. PATTERN_CHECK=N checks
// the sizes up to N elements and measures nothing: for the sanitizers.
#ifndef PATTERN_CUH
#define PATTERN_CUH

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/layout/banks.cuh"

#define MUST(call)                                                        \
    do {                                                                  \
        cudaError_t error_ = (call);                                      \
        if (error_ != cudaSuccess) {                                      \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                    cudaGetErrorString(error_));                          \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

// What the predictions stand on; an H200 where there is no GPU.
struct figures {
    bool gpu;
    int sms;
    double ghz;
    double
        // 0.865 of the nominal rate: what reading reaches on an H200
        // (benchmarks/results/nvidia-h200.json)
        memory_gbs;
    // to and from all SMs, in whole sectors of 32 bytes (learn/benchmarks/ladder_model.py)
    double l2_gbs;
};

static inline figures find_figures() {
    figures f = {false, 132, 1.98, 4250, 8000};
    int devices = 0, khz = 0, memory_khz = 0, bits = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return f;
    f.gpu = true;
    MUST(cudaDeviceGetAttribute(&f.sms, cudaDevAttrMultiProcessorCount, 0));
    MUST(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
    MUST(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, 0));
    MUST(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, 0));
    f.ghz = khz * 1e-6;
    f.memory_gbs = 0.865 * 2 * memory_khz * 1e3 * bits / 8 * 1e-9;
    return f;
}
static const figures FIGURES = find_figures();

struct variant {
    const char *name;
    void (*launch)(const float *in, float *out, int rows, int cols);
    double predicted;                                                    // in the pattern's unit
    const char *limiter;                                                 // what it waits for
    const char *counter;                                                 // the one to look at
    bool (*good)(const float *in, const float *out, int rows, int cols); // NULL: the pattern's
    void (*before)(const float *in, int rows, int cols);                 // each launch, untimed
};

struct pattern {
    const char *title;
    int (*out_size)(int rows, int cols);
    bool (*good)(const float *in, const float *out, int rows, int cols); // on the host
    int rows, cols;                                                      // when measured
    double bytes;          // that it needs to move then (or FLOPs); 0: say us
    float (*value)(int i); // of the input
    bool host;             // in and out are pinned memory of the host
    const char *unit;      // of predictions; NULL: GB/s or us
    // with ns: of one launch, one behind the other; what is predicted is a step's time
    double steps;
};

// The unit of what is predicted, and that of a launch of so many us in it.
static inline const char *unit_of(const pattern &p) {
    return p.unit ? p.unit : p.bytes > 0 ? "GB/s" : "us";
}
static inline double figure(const pattern &p, double us) {
    return p.bytes > 0 ? p.bytes / 1e3 / us : p.steps > 0 ? us * 1e3 / p.steps : us;
}

// A check that allows for rounding tells how far off the worst element was, and the line of the
// variant says it.
static double worst_error;
static inline bool within(double error, double most) {
    worst_error = fmax(worst_error, error);
    return error <= most; // NaN is not
}

static inline float small_integer(int i) {
    return (float)(i % 13 * 7 % 13 - 6);
} // their sums are exact in any order
static inline int same_size(int rows, int cols) { return rows * cols; }

// ---- bounds, in GB/s: at most what memory gives -------------------------------------------------

static inline double memory_gbs() { return FIGURES.memory_gbs; }
static inline double capped(double gbs) { return fmin(gbs, FIGURES.memory_gbs); }
// For a warp's 32 elements, of which `bytes` are useful: so many clocks of an SM, or so many
// sectors of L2.
static inline double sm_gbs(double clocks, double bytes) {
    return capped(FIGURES.sms * FIGURES.ghz * bytes / clocks);
}
static inline double l2_gbs(double sectors, double bytes) {
    return capped(FIGURES.l2_gbs * bytes / (32 * sectors));
}

#endif
