# SPDX-License-Identifier: BSD-3-Clause
"""Misaligned matrices, with the kernels' code compiled for the host: copies of them
(csrc/cuda/product/gemm/realign.cuh) and loads of their rows to shared memory (misaligned.cuh).
Contents must be right, and nothing outside may be read.
"""

from host_program import assert_passes, compiled


def test_misaligned_on_the_host(tmp_path):
    assert_passes(compiled("check_realign", tmp_path))
