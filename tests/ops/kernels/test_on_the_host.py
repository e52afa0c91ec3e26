# SPDX-License-Identifier: BSD-3-Clause
"""Code of CUDA kernels, compiled for the host (tests/csrc/check_*.cpp)."""

from host_program import assert_passes, compiled


def test_misaligned_matrices(tmp_path):
    """Copies of them (csrc/cuda/product/gemm/realign.cuh) and loads of their rows to shared memory
    (misaligned.cuh): contents are right, and nothing outside is read."""
    assert_passes(compiled("check_realign", tmp_path))


def test_tiles_operands_and_registers_of_attention(tmp_path):
    """flash_attn_fwd_sm90a: its tile order (csrc/cuda/attn/forward/fwd_schedule.cuh), its operands
    in shared memory (wgmma_panels of csrc/cuda/layout/wgmma.cuh), and the registers that two
    products share. test_pipeline_attn.py tests its barriers."""
    assert_passes(compiled("check_attn_sm90a", tmp_path))
