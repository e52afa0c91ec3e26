# SPDX-License-Identifier: BSD-3-Clause
"""a @ b in CuTe DSL by TMA and wgmma, to be read beside learn/ladder/18_short_sm90a.cu, which does
the same. Needs nvidia-cutlass-dsl and a Hopper GPU; compiled when it is first called."""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    PipelineTmaAsync,
    PipelineUserType,
    make_pipeline_state,
)
from cutlass.utils import LayoutEnum, SmemAllocator, hopper_helpers

BM, BN, BK, STAGES, THREADS = 128, 256, 64, 4, 256
BF16 = cutlass.BFloat16


@cute.kernel
def kernel(
    mma: cute.TiledMma,
    a_copy: cute.CopyAtom,
    a: cute.Tensor,
    b_copy: cute.CopyAtom,
    b: cute.Tensor,
    out: cute.Tensor,
    a_layout: cute.ComposedLayout,
    b_layout: cute.ComposedLayout,
):
    """A block has a tile of out; warp 0 asks for the step that is three ahead when all have done
    with the one before."""
    thread = cute.arch.thread_idx()[0]
    col, row, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    barriers = smem.allocate_array(cutlass.Int64, 2 * STAGES)
    a_s = smem.allocate_tensor(BF16, a_layout.outer, 1024, swizzle=a_layout.inner)
    b_s = smem.allocate_tensor(BF16, b_layout.outer, 1024, swizzle=b_layout.inner)
    ring = PipelineTmaAsync.create(
        num_stages=STAGES,
        producer_group=CooperativeGroup(Agent.Thread),
        consumer_group=CooperativeGroup(Agent.Thread, THREADS // 32),
        tx_count=(BM + BN) * BK * 2,
        barrier_storage=barriers,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )
    a_tiles = cute.local_tile(a, (BM, BK), (row, None))
    b_tiles = cute.local_tile(b, (BN, BK), (col, None))
    one = cute.make_layout(1)
    a_to, a_from = cpasync.tma_partition(
        a_copy, 0, one, cute.group_modes(a_s, 0, 2), cute.group_modes(a_tiles, 0, 2)
    )
    b_to, b_from = cpasync.tma_partition(
        b_copy, 0, one, cute.group_modes(b_s, 0, 2), cute.group_modes(b_tiles, 0, 2)
    )
    groups = cute.make_layout(THREADS // 128, stride=128)
    group_mma = mma.get_slice(groups(cute.arch.make_warp_uniform(thread // 128)))
    a_frag, b_frag = (
        mma.make_fragment_A(group_mma.partition_A(a_s)),
        mma.make_fragment_B(group_mma.partition_B(b_s)),
    )
    sums = cute.make_rmem_tensor(group_mma.partition_shape_C((BM, BN)), cutlass.Float32)
    steps = cute.size(a_tiles, mode=[2])
    write = make_pipeline_state(PipelineUserType.Producer, STAGES)
    read = make_pipeline_state(PipelineUserType.Consumer, STAGES)
    done = make_pipeline_state(PipelineUserType.Consumer, STAGES)
    if warp == 0:
        for step in cutlass.range(cutlass.min(STAGES - 1, steps), unroll=1):
            ring.producer_acquire(write)
            barrier = ring.producer_get_barrier(write)
            cute.copy(a_copy, a_from[None, step], a_to[None, write.index], tma_bar_ptr=barrier)
            cute.copy(b_copy, b_from[None, step], b_to[None, write.index], tma_bar_ptr=barrier)
            write.advance()
    mma.set(warpgroup.Field.ACCUMULATE, False)
    for step in cutlass.range(steps, unroll=1):
        ring.consumer_wait(read)
        warpgroup.fence()
        for kk in cutlass.range_constexpr(BK // 16):
            cute.gemm(
                mma,
                sums,
                a_frag[None, None, kk, read.index],
                b_frag[None, None, kk, read.index],
                sums,
            )
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        read.advance()
        if step > 0:
            ring.consumer_release(done)
            done.advance()
        if warp == 0 and step + STAGES - 1 < steps:
            ring.producer_acquire(write)
            barrier = ring.producer_get_barrier(write)
            cute.copy(
                a_copy,
                a_from[None, step + STAGES - 1],
                a_to[None, write.index],
                tma_bar_ptr=barrier,
            )
            cute.copy(
                b_copy,
                b_from[None, step + STAGES - 1],
                b_to[None, write.index],
                tma_bar_ptr=barrier,
            )
            write.advance()
    warpgroup.wait_group(0)
    mine = mma.get_slice(thread)
    to = mine.partition_C(cute.local_tile(out, (BM, BN), (row, col)))
    where = mine.partition_C(
        cute.local_tile(cute.make_identity_tensor(out.shape), (BM, BN), (row, col))
    )
    for i in cutlass.range_constexpr(cute.size(to)):
        if cute.elem_less(where[i], out.shape):
            to[i] = sums[i].to(BF16)


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: CUstream):
    """a (M, K) and b (N, K), K along a's rows and N along b's; out (M, N)."""
    mma = hopper_helpers.make_trivial_tiled_mma(
        BF16,
        BF16,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        cutlass.Float32,
        (BM // 64, 1, 1),
        (64, BN),
    )
    tile = (BM, BN, BK)
    a_layout = hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, BF16, STAGES)
    b_layout = hopper_helpers.make_smem_layout_b(LayoutEnum.COL_MAJOR, tile, BF16, STAGES)
    load = cpasync.CopyBulkTensorTileG2SOp()
    a_copy, a_map = cpasync.make_tiled_tma_atom(
        load, a, cute.slice_(a_layout, (None, None, 0)), (BM, BK)
    )
    b_copy, b_map = cpasync.make_tiled_tma_atom(
        load, b, cute.slice_(b_layout, (None, None, 0)), (BN, BK)
    )
    grid = [cute.ceil_div(out.shape[1], BN), cute.ceil_div(out.shape[0], BM), 1]
    call = kernel(mma, a_copy, a_map, b_copy, b_map, out, a_layout, b_layout)
    call.launch(grid=grid, block=[THREADS, 1, 1], stream=stream)


COMPILED = []


def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N] in bfloat16, dense rows, K and N multiples of 8."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    views = [from_dlpack(x, assumed_align=16) for x in (a, b.t(), out)]
    for view, leading in zip(views, (1, 0, 1)):
        view.mark_layout_dynamic(leading_dim=leading).mark_compact_shape_dynamic(
            mode=leading, stride_order=(1, 0) if leading == 0 else (0, 1), divisibility=8
        )
    stream = CUstream(torch.cuda.current_stream().cuda_stream)
    if not COMPILED:
        COMPILED.append(cute.compile(launch, *views, stream))
    COMPILED[0](*views, stream)
    return out
