// SPDX-License-Identifier: BSD-3-Clause
// measure: checks the variants of a pattern against a computation on the host, and times them.
#ifndef MEASURE_CUH
#define MEASURE_CUH

#include "pattern.cuh"

static inline float *make(size_t count, bool host) {
    void *p = NULL;
    MUST(host ? cudaMallocHost(&p, count * sizeof(float)) : cudaMalloc(&p, count * sizeof(float)));
    return (float *)p;
}
static inline void drop(float *p, bool host) { MUST(host ? cudaFreeHost(p) : cudaFree(p)); }

static inline float *make_input(const pattern &p, int n, float *on_host) {
    for (int i = 0; i < n; ++i) on_host[i] = p.value(i);
    float *in = make(n, p.host);
    MUST(cudaMemcpy(in, on_host, n * sizeof *in, cudaMemcpyDefault));
    return in;
}

// Runs every variant on one size and returns how many were wrong. The result buffer holds NaN
// before each run. errors[i] is the worst error of variant i so far.
static inline int check(const pattern &p, const variant *v, int num, int rows, int cols,
                        double *errors) {
    const int n = rows * cols, m = p.out_size(rows, cols);
    int wrong = 0;
    float *in = (float *)malloc(n * sizeof *in), *out = (float *)malloc(m * sizeof *out);
    float *in_g = make_input(p, n, in), *out_g = make(m, p.host);
    for (int i = 0; i < num; ++i) {
        memset(out, 0xff, m * sizeof *out); // NaN
        MUST(cudaMemcpy(out_g, out, m * sizeof *out, cudaMemcpyDefault));
        if (v[i].before) v[i].before(in_g, rows, cols);
        v[i].launch(in_g, out_g, rows, cols);
        MUST(cudaGetLastError());
        MUST(cudaDeviceSynchronize());
        MUST(cudaMemcpy(out, out_g, m * sizeof *out, cudaMemcpyDefault));
        worst_error = errors[i];
        const bool good = (v[i].good ? v[i].good : p.good)(in, out, rows, cols);
        errors[i] = worst_error;
        if (good) continue;
        printf("WRONG  %s, %d x %d, error %.2g\n", v[i].name, rows, cols, worst_error);
        ++wrong;
    }
    drop(in_g, p.host);
    drop(out_g, p.host);
    free(in);
    free(out);
    return wrong;
}

static inline void copy(const float *in, float *out, int rows, int cols) {
    MUST(cudaMemcpyAsync(out, in, (size_t)rows * cols * sizeof *in, cudaMemcpyDeviceToDevice));
}

// The median of 21 launches, in us.
static inline double median_us(void (*launch)(const float *, float *, int, int), const float *in,
                               float *out, int rows, int cols,
                               void (*before)(const float *, int, int) = NULL) {
    float us[21];
    cudaEvent_t begin, end;
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    for (int i = -3; i < 21; ++i) {
        float ms;
        if (before) before(in, rows, cols);
        MUST(cudaEventRecord(begin));
        launch(in, out, rows, cols);
        MUST(cudaEventRecord(end));
        MUST(cudaEventSynchronize(end));
        MUST(cudaEventElapsedTime(&ms, begin, end));
        int at = i < 0 ? 0 : i;
        for (; i > 0 && at > 0 && us[at - 1] > ms * 1000; --at) us[at] = us[at - 1];
        us[at] = ms * 1000;
    }
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    return us[10];
}

// PATTERN_ONCE: launches each variant once at the measured size, for a profiler.
static inline int launch_once(const pattern &p, const variant *v, int num) {
    float *on_host = (float *)malloc((size_t)p.rows * p.cols * sizeof *on_host);
    float *in = make_input(p, p.rows * p.cols, on_host),
          *out = make(p.out_size(p.rows, p.cols), p.host);
    for (int i = 0; i < num; ++i) {
        if (v[i].before) v[i].before(in, p.rows, p.cols);
        v[i].launch(in, out, p.rows, p.cols);
        MUST(cudaDeviceSynchronize());
    }
    free(on_host);
    drop(in, p.host);
    drop(out, p.host);
    return 0;
}

// The main program of every pattern: checks, measures and prints. main returns its result.
template <int NUM, int SIZES>
static inline int run(const pattern &p, const variant (&v)[NUM], const int (&sizes)[SIZES][2]) {
    const char *most = getenv("PATTERN_CHECK");
    if (FIGURES.gpu && getenv("PATTERN_ONCE")) return launch_once(p, v, NUM);
    int wrong = 0;
    double errors[NUM] = {};
    for (int s = 0; FIGURES.gpu && s < SIZES; ++s) {
        if (!most || sizes[s][0] * sizes[s][1] <= atoi(most))
            wrong += check(p, v, NUM, sizes[s][0], sizes[s][1], errors);
    }
    if (most) return printf("%s: %d wrong\n", p.title, wrong), wrong != 0;

    const int n = p.rows * p.cols;
    float *in = NULL, *out = NULL;
    printf("%s, %d x %d floats", p.title, p.rows, p.cols);
    if (FIGURES.gpu) {
        float *on_host = (float *)malloc(n * sizeof *in);
        in = make_input(p, n, on_host);
        out = make(p.out_size(p.rows, p.cols) > n ? p.out_size(p.rows, p.cols) : n, p.host);
        free(on_host);
        if (p.bytes > 0 && !p.host)
            printf("; a copy: %.0f GB/s", 8e-3 * n / median_us(copy, in, out, p.rows, p.cols));
    }
    printf("%s\n", FIGURES.gpu ? "" : "; no GPU: predictions for an H200 alone");
    for (int i = 0; i < NUM; ++i) {
        printf("  %-26s predicted %5.0f %s, by %-15s", v[i].name, v[i].predicted, unit_of(p),
               v[i].limiter);
        if (FIGURES.gpu) {
            const double got =
                figure(p, median_us(v[i].launch, in, out, p.rows, p.cols, v[i].before));
            printf("  measured %5.0f, %.2f of it", got,
                   p.bytes > 0 ? got / v[i].predicted : v[i].predicted / got);
            if (errors[i] > 0) printf(", error %.1e", errors[i]);
        }
        printf("  see %s\n", v[i].counter);
    }
    if (FIGURES.gpu) {
        drop(in, p.host);
        drop(out, p.host);
    }
    return wrong != 0;
}

#endif
