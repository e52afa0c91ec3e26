# SPDX-License-Identifier: BSD-3-Clause
"""A rank of tests/integrations/test_integrations_peft.py: LoRA over a w4 base under FSDP2,
at once and resumed from a checkpoint."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model, batches, optimizer=None):
    optimizer = optimizer or adamw(model)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def make():
    import peft
    from test_integrations_peft import causal_model, lora

    from torch_gpukern.integrations import peft as gkpeft
    from torch_gpukern.integrations import transformers as gk

    gkpeft.register()
    model = causal_model()
    gk.accelerate(model, "w4", say=None)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, lora())
    model.gradient_checkpointing_enable()
    return model


def sharded():
    model = make()
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def resumed(folder, mine):
    """Losses and model of two steps, a checkpoint, and the last step by another model."""
    options = StateDictOptions(ignore_frozen_params=True)
    model = sharded()
    optimizer = adamw(model)
    losses = train(model, mine[:2], optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options)))
    dcp.save(state, checkpoint_id=folder)
    model = sharded()
    optimizer = adamw(model)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        options=StateDictOptions(ignore_frozen_params=True, strict=False),
    )  # fmt: skip
    return losses + train(model, mine[2:], optimizer), model


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    gen = torch.Generator().manual_seed(5)
    batches = [torch.randint(3, 70, (4, 16), generator=gen) for _ in range(3)]
    alone = make()
    want = train(alone, batches)
    model, mine = sharded(), [ids[2 * rank : 2 * rank + 2] for ids in batches]
    got = train(model, mine)
    mean = torch.stack(got)
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / 2, torch.stack(want), rtol=1e-3, atol=1e-3)
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        if q.requires_grad:
            whole = p.full_tensor()
            torch.testing.assert_close(whole, q, rtol=2e-2, atol=2e-3, msg=name)
    again, other = resumed(f"{store}_checkpoint", mine)
    assert torch.equal(torch.stack(again), torch.stack(got))
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor()), name
    dist.destroy_process_group()
