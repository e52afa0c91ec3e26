# SPDX-License-Identifier: BSD-3-Clause
"""A rank of tests/integrations/test_integrations_fsdp.py: Fp8Linear under FSDP2, whose weights are
gathered in 16 or 32 bits, or in 8."""

import copy
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_gpukern.nn as gnn
from torch_gpukern.optim import AdamW

# the function that FSDP2 calls
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Gathered:
    """Counts the bytes that FSDP2 gathers."""

    def __init__(self, own):
        self.bytes, self.own = 0, own

    def __call__(self, out, given, *args, **kwargs):
        self.bytes += given.numel() * given.element_size()
        return self.own(out, given, *args, **kwargs)


def net(dtype):
    torch.manual_seed(3)
    # 33 rows over two ranks are 17 and 16; one weight is one row, so a rank has nothing of it
    model = nn.Sequential(
        nn.Linear(32, 33), nn.ReLU(), nn.Linear(33, 16, bias=False), nn.ReLU(), nn.Linear(16, 1)
    )
    gnn.quantize(model.to(dtype), "fp8-train", skip=(), say=None)
    assert all(type(m) is gnn.Fp8Linear for m in model if isinstance(m, nn.Linear))
    return model


def train(rank, dtype, policy, gather, optimizer_of, poison=False):
    """Losses of four steps, the whole parameters, and the bytes that were gathered."""
    model = net(dtype)
    if gather:
        assert gnn.fp8_all_gather(model) == ["0", "2", "4"]
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = optimizer_of(model.parameters())
    gen = torch.Generator().manual_seed(rank)
    own = getattr(dist, GATHER)
    losses, sizes = [], Gathered(own)
    setattr(dist, GATHER, sizes)
    try:
        for step in range(4):
            if poison and step == 3 and rank == 1:
                with torch.no_grad():
                    model[0].weight.to_local()[0, 0] = torch.inf
            x = torch.randn(6, 32, generator=gen).to(policy.param_dtype or dtype)
            loss = model(x).float().square().mean()
            loss.backward()
            if step == 1:  # accumulate: the next backward adds to this gradient
                continue
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    finally:
        setattr(dist, GATHER, own)
    model.reshard()
    whole = {n: p.detach().full_tensor() for n, p in model.named_parameters()}
    return model, losses, whole, sizes.bytes


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ours = lambda ps: AdamW(ps, lr=1e-2)  # noqa: E731
    masters = lambda ps: AdamW(ps, lr=1e-2, master_weights=True)  # noqa: E731
    torchs = lambda ps: torch.optim.AdamW(ps, lr=1e-2)  # noqa: E731
    plain, half = MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for dtype, policy, optimizer in (
        (torch.float32, plain, ours),
        (torch.float32, plain, torchs),
        (torch.float32, half, ours),
        (torch.bfloat16, plain, masters),
    ):
        _, want, want_ps, want_bytes = train(rank, dtype, policy, False, optimizer)
        model, got, got_ps, got_bytes = train(rank, dtype, policy, True, optimizer)
        assert torch.equal(torch.stack(got), torch.stack(want)) and len(set(map(float, got))) == 3
        for name, p in want_ps.items():
            assert type(got_ps[name]) is torch.Tensor and torch.equal(got_ps[name], p), name
        assert not torch.equal(got_ps["0.weight"], net(dtype)[0].weight)
        assert got_bytes < (0.6 if dtype is torch.bfloat16 or policy is half else 0.4) * want_bytes
    # a checkpoint holds plain tensors
    part = model[0].weight.to_local()
    assert type(part) is not torch.Tensor
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert type(again) is torch.Tensor and torch.equal(again, part)
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    model.load_state_dict(state)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach().full_tensor(), got_ps[name]), name
    # an infinity of one rank is NaN on both
    *_, whole, _ = train(rank, torch.float32, plain, True, ours, poison=True)
    assert whole["0.weight"].isnan().any()
    dist.destroy_process_group()
