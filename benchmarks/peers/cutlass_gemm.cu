// SPDX-License-Identifier: BSD-3-Clause
// a @ b by CUTLASS 3.x, to be read beside csrc/cuda/product/gemm/gemm_sm90a.cu: its collective
// builder for Hopper, two consumer warpgroups, pairs of blocks, persistent. peers/cutlass_gemm.py
// compiles it with the headers of the wheel nvidia-cutlass.
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

using namespace cute;
using bf16 = cutlass::bfloat16_t;
using Row = cutlass::layout::RowMajor;
using BlockTile = Shape<_128, _256, _64>;
using Cluster = Shape<_2, _1, _1>;

using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, BlockTile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row, 8, bf16, Row, 8,
    cutlass::epilogue::TmaWarpSpecializedCooperative>::CollectiveOp;
using Mainloop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, bf16, Row, 8, bf16, Row, 8, float,
    BlockTile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<(int)sizeof(
        typename Epilogue::SharedStorage)>,
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue,
                                                    cutlass::gemm::PersistentScheduler>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

static Gemm::Arguments arguments(const void *a, const void *b, void *out, int m, int n, int k) {
    const auto stride = [](auto kind, int rows, int cols) {
        return cutlass::make_cute_packed_stride(decltype(kind){}, make_shape(rows, cols, 1));
    };
    return {cutlass::gemm::GemmUniversalMode::kGemm,
            {m, n, k, 1},
            {(const bf16 *)a, stride(Kernel::StrideA{}, m, k), (const bf16 *)b,
             stride(Kernel::StrideB{}, n, k)},
            {{1, 0},
             nullptr,
             stride(Kernel::StrideC{}, m, n),
             (bf16 *)out,
             stride(Kernel::StrideD{}, m, n)}};
}

extern "C" size_t cutlass_gemm_workspace_bytes(int m, int n, int k) {
    return Gemm::get_workspace_size(arguments(nullptr, nullptr, nullptr, m, n, k));
}

// 0, or the number of a cutlass::Status.
extern "C" int cutlass_gemm(const void *a, const void *b, void *out, int m, int n, int k,
                            void *workspace, void *stream) {
    const Gemm::Arguments args = arguments(a, b, out, m, n, k);
    const cutlass::Status able = Gemm::can_implement(args);
    return (int)(able != cutlass::Status::kSuccess
                     ? able
                     : Gemm().run(args, workspace, (cudaStream_t)stream));
}
