# SPDX-License-Identifier: BSD-3-Clause
"""Code of CUDA kernels, compiled for the host (tests/csrc/check_*.cpp)."""

from host_program import assert_passes, compiled


def test_misaligned_matrices(tmp_path):
    """Misaligned matrices are copied (csrc/cuda/product/gemm/realign.cuh), and their rows are loaded
    to shared memory (misaligned.cuh). Contents are right, and no byte outside a matrix is read."""
    assert_passes(compiled("check_realign", tmp_path))


def test_tiles_operands_and_registers_of_attention(tmp_path):
    """Parts of flash_attn_fwd_sm90a: the tile order (csrc/cuda/attn/forward/fwd_schedule.cuh), the
    operands in shared memory (wgmma_panels of csrc/cuda/layout/wgmma.cuh), and the accumulators of S
    that become the A operand of P V. test_pipeline_attn.py tests the barriers."""
    assert_passes(compiled("check_attn_sm90a", tmp_path))
