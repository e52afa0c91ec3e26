# SPDX-License-Identifier: BSD-3-Clause
"""Parts of flash_attn_fwd_sm90a, compiled for the host: its tile order
(csrc/cuda/attn/forward/fwd_schedule.cuh), its operands in shared memory (wgmma_panels of
csrc/cuda/layout/wgmma.cuh), and the registers that two products share. test_pipeline_attn.py tests
its barriers.
"""

from host_program import assert_passes, compiled


def test_tiles_operands_and_registers(tmp_path):
    assert_passes(compiled("check_attn_sm90a", tmp_path))
