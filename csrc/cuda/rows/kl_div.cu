// SPDX-License-Identifier: BSD-3-Clause
/* kl_div: the kernel of kl_div.cuh with one block a row, for every GPU, dtype and alignment.
 * Threads load 16-byte vectors if every row starts at a multiple of 16 bytes and has whole vectors,
 * otherwise single elements. A row's later passes find it in L2. Serves gk_kl_div; on Hopper
 * kl_div_sm90a.cu serves rows of whole vectors. No workspace. */
#include "kl_div.cuh"

namespace {

using namespace kl_div;

template <class T> gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_kl_div_args *a = (const gk_kl_div_args *)args;
    Params p = params_of(a);
    const dim3 grid(row_blocks(p.rows));
    const bool whole = rows_whole(a->logits, &a->teacher_logits, a->dlogits);
    p.part = whole ? p.n / row_vec<T> : p.n;
    return of_dtypes<T>(a, [&](auto which) {
        typedef decltype(which) C;
        constexpr auto OF_VECTORS = kl_div_kernel<T, typename C::D, row_vec<T>, 1, C::KIND>;
        constexpr auto OF_ELEMENTS = kl_div_kernel<T, typename C::D, 1, 1, C::KIND>;
        return whole ? launch<OF_VECTORS>("gk_kl_div", ctx, grid, THREADS, 0, p)
                     : launch<OF_ELEMENTS>("gk_kl_div", ctx, grid, THREADS, 0, p);
    });
}

bool plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *to) {
    to->tasks = num_rows(((const gk_kl_div_args *)args)->logits);
    return true;
}

const gk_cuda_instance rows[] = {
    {"kl_div_f32", GK_F32, plan, run<float>, {}, NULL},
    {"kl_div_bf16", GK_BF16, plan, run<__nv_bfloat16>, {}, NULL},
    {"kl_div_f16", GK_F16, plan, run<__half>, {}, NULL},
    {"kl_div_f64", GK_F64, plan, run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_kl_div_table = {rows, sizeof rows / sizeof rows[0], 80, NULL};
