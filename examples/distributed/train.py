# SPDX-License-Identifier: BSD-3-Clause
"""Trains the demo's model on many ranks. Flags choose the kind of parallelism.

    torchrun --nproc-per-node 2 examples/distributed/train.py                                  data parallel (DDP)
    torchrun --nproc-per-node 2 examples/distributed/train.py --zero 3                         FSDP2; 1 and 2 likewise
    torchrun --nproc-per-node 2 examples/distributed/train.py --tensor 2 [--sequence]          tensor, and sequence parallel
    torchrun --nproc-per-node 2 examples/distributed/train.py --context 2 [--mode ring]        context parallel
    torchrun --nproc-per-node 2 examples/distributed/train.py --pipeline 2 [--schedule 1f1b]   pipeline
    torchrun --nproc-per-node 2 examples/distributed/train.py --experts 8 [--top-k 2]          expert parallel, beside data and context
    torchrun --nproc-per-node 8 examples/distributed/train.py --tensor 2 --context 2 --accumulate 4 --recompute

Ranks that the flags do not use are data parallel. With a GPU per rank it uses NCCL in bfloat16,
otherwise gloo in float32. A step takes --batch sequences, whatever the flags, so that its losses
are those of one process (python examples/distributed/train.py).

Prints the loss of each step. For the last steps it also prints tokens per second of all ranks, the
memory of a rank, the bytes that it sends and, on GPUs, the share of its communication that overlaps
with other kernels. --trace writes the timeline of one step.
"""  # noqa: E501

from __future__ import annotations

import argparse
import functools
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, Dataset, DistributedSampler

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "demo"):
    sys.path.insert(0, str(folder))

from data import load_corpus  # noqa: E402
from forms import Form, OneStage, Stage, average_experts, experts_of, inputs, sum_shares  # noqa: E402
from model import GPT, Config  # noqa: E402
from timeline import watch  # noqa: E402

CONFIG = {
    "cpu": Config(context=256, layers=4, heads_q=4, heads_kv=2, head_dim=32),
    "cuda": Config(
        context=4096, layers=8, dim=2048, heads_q=16, heads_kv=8, head_dim=128, hidden=5632
    ),
}
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
}


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("tensor", "context", "pipeline"):
        parser.add_argument(f"--{name}", type=int, default=1, help="ranks of this form")
    parser.add_argument(
        "--zero", type=int, choices=range(4), default=0, help="what FSDP2 shards; 0 is DDP"
    )
    parser.add_argument("--sequence", action="store_true", help="sequence parallel beside --tensor")
    parser.add_argument(
        "--mode",
        choices=("auto", "all_gather", "ring", "ulysses"),
        default="auto",
        help="how --context exchanges keys",
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of --pipeline")
    parser.add_argument("--microbatches", type=int, default=4, help="of --pipeline")
    parser.add_argument(
        "--experts",
        type=int,
        default=0,
        help="experts of each block's MLP, divided over the data and context ranks",
    )
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token")
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        help="micro steps whose gradients are summed, in float32",
    )
    parser.add_argument(
        "--recompute", action="store_true", help="keep no activations inside of blocks"
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, of all ranks")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--trace", type=Path, help="Chrome trace of the last step of rank 0")
    return parser.parse_args(given)


# ---- data ----------------------------------------------------------------------------------------


class Windows(Dataset):
    """Consecutive windows of a text: (tokens, targets), both [seq_len] int64."""

    def __init__(self, text: Tensor, seq_len: int) -> None:
        self.text, self.seq_len = text, seq_len

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        window = self.text[i * self.seq_len : (i + 1) * self.seq_len + 1].long()
        return window[:-1], window[1:]


def batches(
    text: Tensor, seq_len: int, batch: int, rank: int, ranks: int
) -> Iterator[list[Tensor]]:
    """Yields this rank's sequences of each step's batch, endlessly. All ranks' sequences together
    are those of a single rank."""
    windows = Windows(text, seq_len)
    sampler = DistributedSampler(windows, ranks, rank, seed=0, drop_last=True)
    loader = DataLoader(windows, batch // ranks, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


# ---- steps ---------------------------------------------------------------------------------------


def wrapped(stage: Stage, form: Form, zero: int) -> nn.Module:
    """The model, wrapped so that gradients are averaged over the ranks of data and context."""
    net = OneStage(stage)
    if form.batch_size == 1:
        return net
    if zero == 0:
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            net, list(experts_of(net))
        )
        return nn.parallel.DistributedDataParallel(net, process_group=form.batch.get_group())
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # ZeRO 3 gathers weights for each use, ZeRO 2 once for forward and backward, ZeRO 1 once for all
    # micro steps.
    dtypes = MixedPrecisionPolicy(
        param_dtype=form.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for part in (*stage.blocks, net):
        fully_shard(part, mesh=form.batch, reshard_after_forward=zero == 3, mp_policy=dtypes)
    return net


class Trainer:
    """A model, its optimizer and its steps, on this rank."""

    def __init__(
        self, options: argparse.Namespace, config: Config, form: Form, device: torch.device
    ) -> None:
        self.options, self.config, self.form, self.device = options, config, form, device
        torch.manual_seed(0)
        with device:
            whole = GPT(config)
        # The demo's model starts with zeros, in which a wrong shard would not show.
        with torch.no_grad():
            for p in (whole.head, *(x for b in whole.blocks for x in (b.attn_out, b.mlp_out))):
                p.normal_(std=0.02)
        self.schedule, stages = None, form.size("pipeline")
        if stages > 1:
            self._pipeline(whole, stages)
        else:
            self.stages = [Stage(whole, form).to(device)]
            self.net = wrapped(self.stages[0], form, options.zero)
        modules = nn.ModuleList(self.stages) if self.schedule else self.net
        self.parameters = dict(modules.named_parameters())
        self.modules = modules
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=options.lr)

    def _pipeline(self, whole: GPT, ranks: int) -> None:
        from torch.distributed import pipelining

        name, rank, form = self.options.schedule, self.form.rank("pipeline"), self.form
        many = name in ("interleaved", "zbv")  # two stages on each rank
        stages = 2 * ranks if many else ranks
        mine = [rank]
        if name == "interleaved":
            mine.append(rank + ranks)
        elif name == "zbv":
            mine.append(stages - 1 - rank)
        self.stages = [Stage(whole, form, i, stages).to(self.device) for i in mine]
        group = form.group("pipeline")
        pipeline_stages = [
            pipelining.PipelineStage(s, i, stages, self.device, group=group)
            for s, i in zip(self.stages, mine, strict=True)
        ]
        last = self.stages[-1]
        loss_fn = last.loss if last.last else self._no_loss
        for stage in self.stages:
            if stage.last:
                loss_fn = stage.loss
        kind = getattr(pipelining, SCHEDULES[name])
        self.schedule = kind(
            pipeline_stages if many else pipeline_stages[0],
            self.options.microbatches,
            loss_fn=loss_fn,
        )

    @staticmethod
    def _no_loss(x: Tensor, targets: Tensor) -> Tensor:
        raise AssertionError("only the last stage has a loss")

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Makes one optimizer step and returns the mean loss over all ranks' tokens."""
        self.optimizer.zero_grad()
        loss = (
            self._by_pipeline(tokens, targets)
            if self.schedule
            else self._by_micro_steps(tokens, targets)
        )
        sum_shares(self.modules, self.form)
        average_experts(self.modules, self.form)
        self.optimizer.step()
        return self._mean_loss(loss)

    def _by_micro_steps(self, tokens: Tensor, targets: Tensor) -> Tensor:
        count, total = self.options.accumulate, torch.zeros((), device=self.device)
        for i, (t, y) in enumerate(zip(tokens.chunk(count), targets.chunk(count), strict=True)):
            last = i == count - 1
            with self._without_exchange(last):
                loss = (
                    self.net(*inputs(t.to(self.device), y.to(self.device), self.form, self.config))
                    / count
                )
                loss.backward()
            total += loss.detach()
        return total

    def _without_exchange(self, last: bool):
        """Context without exchange of gradients, for all micro steps but the last. With ZeRO 1,
        weights are not gathered again, either."""
        if isinstance(self.net, nn.parallel.DistributedDataParallel):
            return nullcontext() if last else self.net.no_sync()
        if hasattr(self.net, "set_requires_gradient_sync"):
            if self.options.zero == 1:
                self.net.set_requires_gradient_sync(last)
                self.net.set_reshard_after_backward(last)
        return nullcontext()

    def _by_pipeline(self, tokens: Tensor, targets: Tensor) -> Tensor:
        grams, y = inputs(tokens.to(self.device), targets.to(self.device), self.form, self.config)
        losses: list[Tensor] = []
        first = any(s.first for s in self.stages)
        last = any(s.last for s in self.stages)
        self.schedule.step(
            *([grams] if first else []), **(dict(target=y, losses=losses) if last else {})
        )
        if self.form.batch_size > 1:
            ranks = self.form.batch_size
            for p in self.parameters.values():
                dist.all_reduce(p.grad, group=self.form.batch.get_group())
                p.grad /= ranks
        loss = (
            torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self.device)
        )
        dist.all_reduce(loss, group=self.form.group("pipeline"))  # other stages have 0
        return loss

    def _mean_loss(self, loss: Tensor) -> float:
        if self.form.batch_size > 1:
            loss = loss.clone()
            dist.all_reduce(loss, group=self.form.batch.get_group())
            loss /= self.form.batch_size
        return loss.item()


@functools.cache
def mesh_of(device: str, shape: tuple[int, ...]):
    """The mesh, and the same with data and context as one dimension."""
    from torch.distributed.device_mesh import init_device_mesh

    names = ("pipeline", "data", "context", "tensor")  # the last are adjacent ranks, on one host
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    return mesh, mesh["data", "context"]._flatten("batch")


def form_of(options: argparse.Namespace, device: torch.device) -> Form:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    form = Form(
        None,
        None,
        options.mode,
        options.sequence,
        options.recompute,
        dtype,
        options.experts,
        options.top_k,
    )
    if options.experts and (options.zero or options.tensor > 1 or options.pipeline > 1):
        raise SystemExit(
            "--experts goes beside data and context ranks: leave out --zero, --tensor and "
            "--pipeline"
        )
    others = options.tensor * options.context * options.pipeline
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks % others:
        raise SystemExit(
            f"{ranks} ranks are no multiple of tensor x context x pipeline, which is {others}"
        )
    if options.batch % (ranks // others * options.accumulate):
        raise SystemExit(
            f"--batch {options.batch} is no multiple of {ranks // others} ranks x "
            f"{options.accumulate} steps"
        )
    if options.pipeline > 1 and (options.zero or options.accumulate > 1):
        raise SystemExit(
            "a pipeline accumulates by --microbatches, and its weights are whole: leave out "
            "--accumulate and --zero"
        )
    if ranks > 1:
        shape = (options.pipeline, ranks // others, options.context, options.tensor)
        form.mesh, form.batch = mesh_of(device.type, shape)
    return form


def losses_of(
    options: argparse.Namespace,
    text: Tensor,
    config: Config,
    device: torch.device,
    form: Form | None = None,
) -> tuple[list[float], dict]:
    """Trains, prints on rank 0, and returns the losses of the steps and the cost of the last ones.
    form: used instead of the one that the flags choose."""
    form = form_of(options, device) if form is None else form
    seq_len = options.seq_len or config.context
    if seq_len % form.size("context"):  # ranks' mean losses are averaged with equal weights
        raise SystemExit(f"--seq-len {seq_len} is no multiple of --context {form.size('context')}")
    # sequence parallelism cuts rows only between tokens
    if form.sequence and seq_len // form.size("context") % form.size("tensor"):
        raise SystemExit(
            f"--sequence: --tensor {form.size('tensor')} does not divide a rank's tokens of "
            f"--seq-len {seq_len}"
        )
    trainer = Trainer(options, config, form, device)
    data = batches(text, seq_len, options.batch, form.rank("data"), form.size("data"))
    told: dict = {}
    chief, losses, times = not dist.is_initialized() or dist.get_rank() == 0, [], []
    for step in range(options.steps):
        batch = next(data)
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(trainer.step(*batch))  # waits: it reads the loss
        times.append(time.perf_counter() - start)
        if chief:
            print(
                f"step {step + 1:>4}  loss {losses[-1]:.6f}  {times[-1] * 1e3:.1f} ms", flush=True
            )
    if options.steps > 3:
        batch, ranks = next(data), form.batch_size
        seen = watch(
            lambda: trainer.step(*batch),
            max(ranks, options.tensor),
            options.trace if chief else None,
        )
        took = statistics.median(times[2:])
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device)
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        told = dict(
            tokens_per_s=options.batch * seq_len / took,
            step_ms=took * 1e3,
            memory_mib=memory / 2**20,
            sent=seen.sent,
            communication_ms=seen.communication_ms,
            hidden=seen.hidden,
        )
        if chief:
            hidden = (
                ""
                if seen.hidden is None
                else f", {seen.communication_ms:.1f} ms of it, {seen.hidden:.0%} beside kernels"
            )
            print(f"{options.batch * seq_len / took:.0f} tokens/s, {took * 1e3:.1f} ms a step, "
                  f"{memory / 2**20:.0f} MiB a rank, "
                  f"{seen.sent / 1e6:.2f} MB sent a rank{hidden}", flush=True)  # fmt: skip
    return losses, told


@record  # so that torchrun's summary, its last output, says why a rank failed
def main() -> None:
    try:
        run(parse())
    except SystemExit as refused:  # @record ignores SystemExit
        if "RANK" in os.environ and isinstance(refused.code, str):
            raise ValueError(refused.code) from None
        raise


def run(options: argparse.Namespace) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", 1)
    )
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    elif ranks > 1:
        torch.set_num_threads(max(1, math.floor((os.cpu_count() or 1) / ranks)))
    if ranks > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    losses_of(options, load_corpus().train, CONFIG[device.type], device)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
