# SPDX-License-Identifier: BSD-3-Clause
"""A rank of tests/integrations/test_integrations_peft.py: LoRA over a w4 base under FSDP2."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def train(model, batches):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
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


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    gen = torch.Generator().manual_seed(5)
    batches = [torch.randint(3, 70, (4, 16), generator=gen) for _ in range(3)]
    alone = make()
    want = train(alone, batches)
    model = make()
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    got = train(model, [ids[2 * rank : 2 * rank + 2] for ids in batches])
    mean = torch.stack(got)
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / 2, torch.stack(want), rtol=1e-3, atol=1e-3)
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        if q.requires_grad:
            whole = p.full_tensor()
            torch.testing.assert_close(whole, q, rtol=2e-2, atol=2e-3, msg=name)
    dist.destroy_process_group()
