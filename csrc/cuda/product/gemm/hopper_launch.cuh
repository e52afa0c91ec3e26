/* SPDX-License-Identifier: BSD-3-Clause */
/* hopper_launch.cuh: the host's half of Hopper's gemm kernels, the same for each schedule. It
 * makes tensor maps and parameters and launches the kernel that sm90_plan.c chose. */
#ifndef GPUKERN_CUDA_GEMM_HOPPER_LAUNCH_CUH
#define GPUKERN_CUDA_GEMM_HOPPER_LAUNCH_CUH

#include "../../host/launch.cuh"
#include "hopper.cuh"
#include "sm90_plan.h"

namespace {

static_assert((int)SM90_ROW_BYTES == (int)WGMMA_ROW_BYTES, "the plan rounds k up to whole rows");

/* What the host needs to know about an instance of a kernel. */
struct Instance {
    bool along_m, along_n; /* a is M-major, b is N-major */
    /* Rows of one box, by the shape of the cluster: a_box[in_row], b_box[!in_row]. */
    int a_box[2], b_box[2];
    bool by_panels, by_tma; /* how results are stored */
    smem_box panel;         /* the box of results that TMA stores */
    gk_dtype result;        /* the kernel's narrow result type */
    gk_status (*launch)(const gk_context *ctx, unsigned clusters, const GemmParams &x);
};

template <class P>
gk_status launch_instance(const gk_context *ctx, unsigned clusters, const GemmParams &x) {
    return launch_clusters<P>("gk_gemm", ctx, x, clusters);
}

template <class P> constexpr Instance instance_of() {
    typedef typename P::S S;
    typedef typename P::InRow InRow;
    typedef typename P::InColumn InColumn;
    return {S::ALONG_M,
            S::ALONG_N,
            {InColumn::APart::box_rows, InRow::APart::box_rows},
            {InRow::BPart::box_rows, InColumn::BPart::box_rows},
            S::BY_PANELS,
            BY_TMA<typename P::T, typename P::Size>,
            S::Panel::box(element<typename P::T>::bits / 8),
            element<typename P::T>::dtype,
            launch_instance<P>};
}

/* Makes an operand's tensor map, and a second map with a lower box if its last rows do not fill
 * a box. */
gk_status make_maps(const TensorShape &x, int box, int end, CUtensorMap *inside,
                    CUtensorMap *last) {
    const int each = (int)gk_dtype_bytes(x.dtype);
    const gk_status status = make_tensor_map("gk_gemm", x, wgmma_box(each, box), inside);
    return status == GK_OK && end > 0 ? make_tensor_map("gk_gemm", x, wgmma_box(each, end), last)
                                      : status;
}

gk_status start(const gk_cuda_instance *instance, const Instance &in, const gk_context *ctx,
                const HopperPlan &plan, TensorShape a, TensorShape b, GemmParams *x) {
    const gk_dtype dtype = in.result;
    const bool swapab = is(instance, SWAPAB);
    x->in_row = plan.in_row;
    x->whole = plan.whole;
    a.tf32 = b.tf32 = instance->dtype == GK_F32;
    const int a_box = in.a_box[x->in_row], b_box = in.b_box[!x->in_row];
    const int a_end = in.along_m ? 0 : (int)(x->p.m % a_box),
              b_end = in.along_n ? 0 : (int)(x->p.n % b_box);
    gk_status status = make_maps(a, a_box, a_end, &x->a, &x->a_end);
    if (status == GK_OK) status = make_maps(b, b_box, b_end, &x->b, &x->b_end);
    if (status != GK_OK) return status;
    const GemmEpilogue &e = x->p.epilogue;
    const int64_t cols = swapab ? x->p.m : x->p.n;
    const bool alike = e.out_dtype == dtype && (!e.c || (dtype != GK_F32 && e.c_vectors));
    /* Activations of float32 results are exact, which is too many instructions to repeat in
     * every panel's code. */
    const bool by_panels =
        in.by_panels && alike &&
        (dtype != GK_F32 || e.activation == GK_ACT_NONE || e.activation == GK_ACT_RELU);
    const TensorShape out = result_of(&x->p, swapab, false),
                      preact = result_of(&x->p, swapab, true);
    const bool chunks = whole_chunks(&x->p, dtype, swapab);
    const auto maps = [&](const TensorShape &t, CUtensorMap *map) {
        return tensor_map_fits(t) && make_tensor_map("gk_gemm", t, in.panel, map) == GK_OK;
    };
    x->plain = by_panels && chunks &&
               (!in.by_tma || (maps(out, &x->out) && (!e.preact || maps(preact, &x->preact))));
    /* Two columns share the reciprocal of an activation. Beside an odd last column stands an
     * undefined value, so the result would differ from run to run. */
    x->unaligned = by_panels && !x->plain && !e.c && dtype != GK_F32 &&
                   (cols % 2 == 0 || e.activation <= GK_ACT_RELU);
    x->cheap_epilogue = x->plain && !e.c &&
                        (dtype == GK_F32 ||
                         (e.activation <= GK_ACT_RELU && !e.preact && (!e.bias || e.bias_vectors)));
    x->no_epilogue = (x->plain || (!in.by_panels && chunks)) && !e.c && !e.bias && !e.preact &&
                     e.activation == GK_ACT_NONE;
    if (is(instance, PING_PONG) && !x->plain)
        return gk_fail(GK_ERR_UNSUPPORTED,
                       "a ping-pong instance stores by TMA, which it cannot here");
    x->batched = x->p.ndim > 0;
    x->keep = x->p.m * x->p.n * x->p.batch * gk_bits_of(dtype) <= 8 * KEEP_BYTES;
    x->order = tile_order(x->p.tiles_m, x->p.tiles_n, x->p.group);
    /* The store reads the bias two columns at a time. */
    if (x->unaligned && cols % 2 != 0) x->p.epilogue.bias_vectors = false;
    x->across = !swapab && !x->unaligned && !e.out_vectors;
    if (x->across) x->p.epilogue = gemm_swapped(&x->p).epilogue;
    return in.launch(ctx, plan.clusters, *x);
}

gk_status run_instance(const Instance *of_mode, const gk_context *ctx, const void *args,
                       const gk_plan *plan, void *workspace) {
    const gk_cuda_instance *instance = (const gk_cuda_instance *)plan->kernel;
    const HopperPlan &own = gk_own<HopperPlan>(plan);
    const Instance &in = of_mode[instance->dtype == GK_F32 ? 0 : own.operands.mode];
    GemmParams x;
    if (own.operands.bytes == 0) {
        x.p = own_problem(own.operands.p, args);
        return start(instance, in, ctx, own, own.operands.x[0], own.operands.x[1], &x);
    }
    Operands o = own.operands;
    const int copies = place_copies(workspace, &o);
    const gk_status status = realign("gk_gemm", ctx, o.copies, copies);
    if (status != GK_OK) return status;
    x.p = own_problem(o.p, args);
    return start(instance, in, ctx, own, o.x[0], o.x[1], &x);
}

/* Runs a call by the policy P of 16-bit operands, one for each mode. */
template <template <class, class, int> class P, class T, class Shape>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    static constexpr Instance of_mode[] = {
        instance_of<P<T, Shape, 0>>(), instance_of<P<T, Shape, 1>>(), instance_of<P<T, Shape, 2>>(),
        instance_of<P<T, Shape, 3>>()};
    return run_instance(of_mode, ctx, args, plan, workspace);
}

/* The most over all modes, since narrower panels may leave room for more stages. */
template <class T, class Tile> constexpr int smem_of() {
    constexpr int some[] = {Smem<T, Tile, 0>::BYTES, Smem<T, Tile, 1>::BYTES,
                            Smem<T, Tile, 2>::BYTES, Smem<T, Tile, 3>::BYTES};
    int most = 0;
    for (int bytes : some) most = bytes > most ? bytes : most;
    return most;
}

} // namespace

/* The launch of an instance of instances.def. */
#define HOPPER_LAUNCH(id, T, type, bytes, ...)                            \
    static_assert(smem_of<T, type>() == (bytes), "instances.def: BYTES"); \
    GK_DEFINE_LAUNCH(id, __VA_ARGS__)
#define HOPPER_LAUNCH_16(file, P, type, bytes)                                                 \
    HOPPER_LAUNCH(file##_bf16_##type, __nv_bfloat16, type, bytes, run<P, __nv_bfloat16, type>) \
    HOPPER_LAUNCH(file##_f16_##type, __half, type, bytes, run<P, __half, type>)

#endif
