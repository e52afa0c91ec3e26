# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2 with Fp8Linear: what is gathered in 8 bits has the bits of what is gathered and rounded."""

from pathlib import Path

import pytest
import torch
from conftest import run_python
from torch import nn

import torch_gpukern.nn as gnn

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)


def test_two_ranks_gather_codes(tmp_path):
    """Losses, weights after AdamW and gradients that accumulate, beside FSDP2 without it; float32,
    bfloat16, a mixed-precision policy, parts of unequal and of no rows."""
    run_python(f"""
        import sys
        import torch.multiprocessing
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import fsdp_fp8

        torch.multiprocessing.start_processes(
            fsdp_fp8.main, ({str(tmp_path / "store")!r},), nprocs=2, start_method="fork"
        )
    """)


def test_without_fsdp_nothing_changes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    gnn.quantize(model, "fp8-train", skip=(), say=None)
    model[2].weight = model[1].weight
    x = torch.randn(3, 32, requires_grad=True)
    want = model(x)
    grads = torch.autograd.grad(want.sum(), [x, *model.parameters()])
    assert gnn.fp8_all_gather(model) == ["0", "1", "2"] == gnn.fp8_all_gather(model)
    assert model[2].weight is model[1].weight
    got = model(x)
    assert type(got) is torch.Tensor and torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got.sum(), [x, *model.parameters()]), grads, strict=True):
        assert torch.equal(a, b)


def test_refusals():
    with pytest.raises(
        ValueError, match="fp8_all_gather: the model has no Fp8Linear; call nn.quan"
    ):
        gnn.fp8_all_gather(nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(32, 16))
    gnn.quantize(model, "fp8-train-delayed", skip=(), say=None)
    with pytest.raises(ValueError, match="fp8_all_gather: 0 has delayed scaling, expected"):
        gnn.fp8_all_gather(model)
