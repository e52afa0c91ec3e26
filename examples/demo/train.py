# SPDX-License-Identifier: BSD-3-Clause
"""Trains a byte-level GPT on the Python standard library with every matrix product and attention
on torch_gpukern, generates from it through the paged cache, and repeats steps and generation on
PyTorch's built-ins.

python examples/demo/train.py [--steps 700] [--backend gpukern|torch] [--device cpu|cuda] [--out build/demo]
python examples/demo/train.py --compare-only [--compare-steps 200]

If torch finds a GPU of compute capability 8.0 or later and the library has kernels for it, the demo
runs there with a larger model.

Prints the held-out bits per byte beside those of gzip -9, step times, tokens per second and the
differences in loss and logits. Writes loss.png, checkpoint.pt, curves.csv and curves.png. The
number of steps is fixed, so a slow or busy machine reaches the same result later. After the first
steps, it prints how long the run will take.

torch.compile needs Python.h (python3-dev). Without it everything runs uncompiled, and a line says
so.

--compare-only trains a fresh model on torch_gpukern and on each of PyTorch's built-ins, side by side
and uncompiled. It writes only their loss curves: curves.csv and curves.png.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import statistics
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from curves import compare_curves, plot, write_curves
from data import Corpus, batches, load_corpus, windows
from generate import PaddedRunner, PagedRunner, Request, for_inference, generate
from model import GPT, OPS, Config, TorchOps
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parents[2]
BATCH = {"cpu": 8, "cuda": 32}
CONFIG = {
    "cpu": Config(),
    "cuda": Config(
        context=1024, layers=8, dim=768, heads_q=12, heads_kv=4, head_dim=64, hidden=2304
    ),
}
# PyTorch's built-ins by device: a dtype and SDPA's backend (None: PyTorch's choice). We compare with
# the fastest of them, which depends on the machine: on a CPU without AVX-512, bfloat16 is a plain
# loop, and on a GPU PyTorch's choice need not be the fastest.
BUILT_INS = {
    "cpu": {"bfloat16": (torch.bfloat16, None), "float32": (torch.float32, None)},
    "cuda": {
        "bfloat16": (torch.bfloat16, None),
        "bfloat16, cuDNN": (torch.bfloat16, SDPBackend.CUDNN_ATTENTION),
    },
}
# Our dtypes. The fastest one is used; on a CPU a gradient step of each finds it.
OURS = {
    "cpu": {"bfloat16": torch.bfloat16, "float32": torch.float32},
    "cuda": {"bfloat16": torch.bfloat16},
}
STEPS = {"cpu": 700, "cuda": 2000}  # training steps
COMPARED, COMPARED_ALONE = 24, 200  # steps; the smoothed curves need more than `curves.SMOOTH`
# Sequences per step with --compare-only. A quarter of the training batch suffices on a GPU: the
# curves are the same.
BATCH_ALONE = {"cpu": 8, "cuda": 8}
GZIP_SHARE = 0.9  # the goal: bits per byte below this share of gzip's

# Rates and decays found by a search over short runs: see docs/worklog/demo.md.
MUON_LR, ADAMW_LR = 0.01, {"cpu": 0.03, "cuda": 0.005}
WARMUP = 0.05  # share of the run

PROMPTS = (
    "import os\nimport sys\n\ndef main(",
    "class Queue:\n    def __init__(self",
    "def read(self, size=-1):\n        ",
    "    try:\n        import ",
    '"""Utilities for ',
    "    for name, value in ",
    "    if not isinstance(",
    "        raise ValueError(",
    "    def __repr__(self):\n        return ",
    "# This module ",
)


def found_device() -> str:
    """cuda if torch, the GPU and the library's build support it, otherwise cpu."""
    import torch_gpukern  # noqa: F401 (defines the ops)

    usable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return "cuda" if usable and torch.ops.gpukern.cuda_kernels() else "cpu"


def device_of(model: GPT) -> torch.device:
    return model.embed.device


def batch_of(model: GPT) -> int:
    return BATCH[device_of(model).type]


class ProductsOnGemm(TorchFunctionMode):
    """A mode in which PyTorch's matrix products go through an `Ops`. Muon's products are bfloat16,
    for which PyTorch has only a plain loop on a CPU without AVX-512. On a GPU they are not
    replaced, because they are bound by their launches."""

    def __init__(self, gemm: Callable[..., Tensor]) -> None:
        super().__init__()
        self.gemm = gemm

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (Tensor.matmul, Tensor.__matmul__):
            return self.gemm(*args, **kwargs)
        if func is torch.addmm:
            c, a, b = args
            return self.gemm(a, b, c=c, **kwargs)
        return func(*args, **kwargs)


def float32_product(
    a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """alpha a @ b + beta c by PyTorch's float32 product, returned in a's dtype. It serves built-ins
    that compute in float32."""
    out = alpha * torch.mm(a.float(), b.float())
    return (out if c is None else out + beta * c.float()).to(a.dtype)


class Optimizer:
    """Muon for the matrices of the blocks, AdamW for embedding and head. After a short warmup,
    learning rates fall linearly to 0 at the end of the run."""

    def __init__(self, model: GPT, ops, dtype: torch.dtype = torch.bfloat16) -> None:
        matrices = list(model.blocks.parameters())
        self.parts = (
            torch.optim.Muon(
                matrices,
                lr=MUON_LR,
                momentum=0.9,
                weight_decay=0.2,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                [model.embed, model.head],
                lr=ADAMW_LR[device_of(model).type],
                betas=(0.9, 0.95),
                weight_decay=0.0,
                fused=True,
            ),
        )
        self.peaks = [part.param_groups[0]["lr"] for part in self.parts]
        self.products = contextlib.nullcontext()
        if ops.name == "gpukern" and device_of(model).type == "cpu":
            self.products = ProductsOnGemm(ops.gemm)
        elif dtype == torch.float32:
            self.products = ProductsOnGemm(float32_product)

    def step(self, share: float) -> None:
        """share: how much of the run is done, in [0, 1)."""
        factor = min((share + 0.01) / WARMUP, (1 - share) / (1 - WARMUP), 1.0)
        for part, peak in zip(self.parts, self.peaks):
            part.param_groups[0]["lr"] = peak * factor
            with self.products:
                part.step()
            part.zero_grad()


class Progress:
    """A tqdm bar on a terminal; elsewhere, or without tqdm, a line for every tenth of the work.
    Both show the remaining seconds."""

    def __init__(self, end: float, unit: str, what: str) -> None:
        self.end, self.unit, self.what, self.tenth = end, unit, what, -1
        self.began, self.bar = time.perf_counter(), None
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            if sys.stdout.isatty():
                form = "{desc}: {percentage:3.0f}% |{bar}| {n:,.0f}/{total:,.0f} {unit} [{elapsed}<{remaining}{postfix}]"  # noqa: E501
                self.bar = tqdm(
                    total=end,
                    desc=what,
                    unit=unit,
                    file=sys.stdout,
                    bar_format=form,
                    dynamic_ncols=True,
                )

    def show(self, done: float, text: str = "") -> None:
        done = min(done, self.end)
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(done - self.bar.n)
            if done == self.end:
                self.bar.close()
            return
        tenth = int(10 * done / self.end)
        if tenth == self.tenth:
            return
        self.tenth = tenth
        elapsed = time.perf_counter() - self.began
        left = f"{elapsed * (self.end - done) / done:.0f} s left" if done else "just begun"
        bar = ("#" * round(30 * done / self.end)).ljust(30, ".")
        print(
            f"{self.what}: [{bar}] {done:4,.0f}/{self.end:,.0f} {self.unit}  {left}  {text}".rstrip(),
            flush=True,
        )


@contextlib.contextmanager
def waiting(what: str, seconds: float):
    """Shows a bar for work that takes about this many seconds and cannot report its progress. The
    bar moves with time and stops shortly before its end until the work is done."""
    progress, over, began = Progress(seconds, "s", what), threading.Event(), time.perf_counter()

    def tick() -> None:
        late = 0
        while not over.wait(0.5):
            elapsed = time.perf_counter() - began
            progress.show(
                min(elapsed, 0.99 * seconds), f"{elapsed:.0f} s so far" if elapsed > seconds else ""
            )
            if elapsed > seconds + 30 * (late + 1) and progress.bar is None:
                late = int((elapsed - seconds) / 30)
                print(
                    f"{what}: {elapsed:.0f} s so far, longer than an idle machine takes", flush=True
                )

    progress.show(0)
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        progress.show(seconds)


def synchronize(model: GPT) -> None:
    if device_of(model).type == "cuda":
        torch.cuda.synchronize()


def missing_header() -> str | None:
    """The path at which this Python's Python.h is missing; torch.compile needs it on CPUs and
    GPUs."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return None if header.exists() else str(header)


def compiled_loss(model: GPT, ops) -> Callable[[Tensor, Tensor], Tensor]:
    """(tokens, targets) -> loss in nats, as one graph; uncompiled without Python.h."""

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return model.loss(tokens, targets, ops)

    return loss if missing_header() else torch.compile(loss, fullgraph=True)


def gradient_step(
    loss_fn,
    tokens: Tensor,
    targets: Tensor,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Forward under autocast, and backward. Returns the loss in nats; a GPU may still be computing
    it."""
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = loss_fn(tokens.to(device), targets.to(device))
    loss.backward()
    return loss.detach()


def compile_now(
    model: GPT,
    loss_fn,
    corpus: Corpus,
    dtype: torch.dtype = torch.bfloat16,
    what: str = "",
    expected: float = 60,
) -> float:
    """Compiles forward and backward by a step that changes nothing, and returns the seconds.
    expected: the estimate that is shown."""
    start = time.perf_counter()
    feed = batches(corpus.train, batch_of(model), model.config.context, seed=0)
    with waiting(f"a first step on {what}" if missing_header() else f"compiling {what}", expected):
        gradient_step(loss_fn, *next(feed), device_of(model), dtype)
        model.zero_grad()
        synchronize(model)
    return time.perf_counter() - start


def train(
    model: GPT, ops, loss_fn, corpus: Corpus, steps: int, dtype: torch.dtype = torch.bfloat16
) -> list[tuple[float, float]]:
    """Trains for a number of steps and returns (seconds, bits per byte) of each."""
    optimizer, progress, curve = (
        Optimizer(model, ops, dtype),
        Progress(steps, "steps", "training"),
        [],
    )
    batch, context, device = batch_of(model), model.config.context, device_of(model)
    feed = batches(corpus.train, batch, context, seed=1)
    start, smooth = time.perf_counter(), None
    for step in range(steps):
        loss = gradient_step(loss_fn, *next(feed), device, dtype)
        optimizer.step(step / steps)
        # waits for the GPU, after the optimizer's launches
        bits = loss.item() / math.log(2)
        smooth = bits if smooth is None else 0.95 * smooth + 0.05 * bits
        elapsed = time.perf_counter() - start
        curve.append((elapsed, bits))
        progress.show(
            step + 1,
            f"{smooth:.3f} bits per byte  {len(curve) * batch * context / elapsed:,.0f} bytes/s",
        )
    return curve


@torch.no_grad()
def held_out_bits(model: GPT, ops, corpus: Corpus, dtype: torch.dtype = torch.bfloat16) -> float:
    """Bits per byte over all held-out bytes, each predicted from the bytes before it. The very
    first byte counts as 8 bits."""
    context, device, nats, done = model.config.context, device_of(model), 0.0, 0
    progress = Progress((len(corpus.held_out) - 1) / 1024, "KiB", "evaluating")
    for tokens, targets in windows(corpus.held_out, batch_of(model), context, overlap=context // 4):
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            nats += model.loss(tokens.to(device), targets.to(device), ops, reduction="sum").item()
        done += int((targets >= 0).sum())
        progress.show(done / 1024, f"{nats / math.log(2) / max(done, 1):.3f} bits per byte")
    return (nats / math.log(2) + 8) / len(corpus.held_out)


def show_text(requests: list[Request], count: int) -> None:
    for request in requests[:count]:
        text = (request.prompt + bytes(request.text)).decode("utf-8", errors="replace")
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
        print("  | " + text.replace("\n", "\n  | "))
        print("  +" + "-" * 40)


def fastest(
    calls: dict[str, Callable[[], object]], model: GPT, what: str = "built-ins"
) -> tuple[str, str]:
    """The name of the fastest call, and a text with all times. The second run of each call is timed.
    A call that fails is left out by name; SystemExit if all fail. what: whose calls they are."""
    seconds = {}
    for name, call in calls.items():
        try:
            for _ in range(2):
                start = time.perf_counter()
                call()
                synchronize(model)
                took = time.perf_counter() - start
        except RuntimeError as error:  # a backend that does not serve these shapes
            print(f"left out: {what} in {name}: {str(error).splitlines()[0]}")
        else:
            seconds[name] = took
    if not seconds:
        raise SystemExit(f"{what}: every one of {', '.join(calls)} failed, for the reasons above")
    best = min(seconds, key=seconds.__getitem__)
    return best, ", ".join(f"{name} {1e3 * x:.0f} ms" for name, x in seconds.items())


def compare_generation(model: GPT, our_dtype: torch.dtype = torch.bfloat16) -> None:
    """Generates the same continuous batch on both sides and compares them. The built-ins use their
    fastest dtype, and are given our generated bytes, so that the logits can be compared."""
    print(
        f"\ngenerating from {len(PROMPTS)} prompts, on ours and on PyTorch's built-ins", flush=True
    )
    places, new_bytes, device = 6, 160, device_of(model)

    def requests(count: int | None = None, most: int = new_bytes) -> list[Request]:
        return [
            Request(p.encode(), min(new_bytes - 12 * i, most))
            for i, p in enumerate(PROMPTS[:count])
        ]

    copied, built_ins = for_inference(model, our_dtype), {}
    paged = PagedRunner(model.config, places, our_dtype, device)
    for name, (dtype, backend) in BUILT_INS[device.type].items():
        same = copied if dtype == our_dtype else for_inference(model, dtype)
        built_ins[name] = same, PaddedRunner(model.config, places, dtype, device, backend)

    def probe(model: GPT, runner: PaddedRunner) -> Callable[[], object]:
        return lambda: generate(model, runner, requests(4, 12), places, temperature=0.7)

    # a warmup, which starts thread pools and loads code
    generate(copied, paged, requests(2), places, temperature=0.7)
    best, times = fastest({name: probe(*side) for name, side in built_ins.items()}, model)
    ours, theirs = requests(), requests()
    a = generate(copied, paged, ours, places, temperature=0.7)
    follow = [bytes(request.text) for request in ours]
    b = generate(*built_ins[best], theirs, places, temperature=0.7, follow=follow)
    print(
        f"generation: {len(ours)} prompts through a continuous batch of {places}, {a.steps} steps"
    )
    show_text(ours, 4)
    same = (a.logits.argmax(-1) == b.logits.argmax(-1)).float().mean().item()
    difference = (a.logits - b.logits).abs().max().item()
    name = next(name for name, dtype in OURS[device.type].items() if dtype == our_dtype)
    print(f"ours in {name}, the built-ins in {best}, their fastest here (a short run: {times})")
    print(f"{'':<28}{'gpukern':>12}{'built-ins':>12}{'ratio':>8}")
    ratio = b.seconds / a.seconds
    print(
        f"{'generated bytes/s':<28}{a.new_bytes / a.seconds:>12,.0f}{b.new_bytes / b.seconds:>12,.0f}{ratio:>7.2f}x"
    )
    print(
        f"logits: largest difference {difference:.3f} of {a.logits.abs().max().item():.1f}, "
        f"same most likely byte in {100 * same:.1f}% of {len(a.logits)} places"
    )


def compare_training(model: GPT, sides: dict, corpus: Corpus, steps: int) -> dict[str, list[float]]:
    """Trains both sides alternately, with the same steps from the same weights, and prints their
    times. `sides` maps a name to (copy of the model, its `Ops`, its compiled loss, its dtype).
    Returns the bits per byte of every step, by side."""
    feed = batches(corpus.train, batch_of(model), model.config.context, seed=2)
    optimizers = {
        name: Optimizer(copied, ops, dtype) for name, (copied, ops, _, dtype) in sides.items()
    }
    gradient_ms: dict[str, list[float]] = {name: [] for name in sides}
    step_ms: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    progress = Progress(steps, "steps", "beside the built-ins")
    for i in range(steps):
        tokens, targets = next(feed)
        order = list(sides) if i % 2 else list(reversed(sides))
        for name in order:
            start = time.perf_counter()
            copied, _, loss_fn, dtype = sides[name]
            loss = gradient_step(loss_fn, tokens, targets, device_of(copied), dtype)
            losses[name].append(loss.item() / math.log(2))
            gradient_ms[name].append(1e3 * (time.perf_counter() - start))
            optimizers[name].step(share=0.5)
            synchronize(model)
            step_ms[name].append(1e3 * (time.perf_counter() - start))
        progress.show(i + 1)
    ours, theirs = sides
    bytes_per_step = batch_of(model) * model.config.context
    print(f"\ntraining: {steps} steps from the same weights on the same batches, medians")
    print(f"{'':<28}{'gpukern':>12}{'built-ins':>12}{'ratio':>8}")
    for label, times in (("gradient step, ms", gradient_ms), ("with the optimizer, ms", step_ms)):
        a, b = (statistics.median(times[name]) for name in (ours, theirs))
        print(f"{label:<28}{a:>12.1f}{b:>12.1f}{b / a:>7.2f}x")
    a, b = (1e3 * bytes_per_step / statistics.median(step_ms[name]) for name in (ours, theirs))
    print(f"{'trained bytes/s':<28}{a:>12,.0f}{b:>12,.0f}{a / b:>7.2f}x")
    a, b = losses[ours], losses[theirs]
    print(
        f"loss in bits per byte: first step {a[0]:.5f} and {b[0]:.5f}, "
        f"largest difference in {steps} steps {max(abs(x - y) for x, y in zip(a, b)):.5f}"
    )
    return losses


def small_step(model: GPT, ops, corpus: Corpus, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A call that makes an eager gradient step of two sequences, to be timed."""
    tokens, targets = next(batches(corpus.train, 2, model.config.context, seed=3))

    def loss_fn(tokens: Tensor, targets: Tensor) -> Tensor:
        return model.loss(tokens, targets, ops)

    return lambda: gradient_step(loss_fn, tokens, targets, device_of(model), dtype)


def fastest_built_ins(model: GPT, corpus: Corpus) -> tuple[str, str]:
    """The fastest of BUILT_INS by `small_step`: its name, and a text with all times."""
    steps = {
        name: small_step(model, TorchOps(backend), corpus, dtype)
        for name, (dtype, backend) in BUILT_INS[device_of(model).type].items()
    }
    found = fastest(steps, model)
    model.zero_grad()
    return found


def fastest_of_ours(model: GPT, ops, corpus: Corpus) -> tuple[str, str]:
    """The fastest of OURS by `small_step`, as `fastest_built_ins`. The text is empty if there is
    only one, or if PyTorch's built-ins train."""
    dtypes = OURS[device_of(model).type]
    if len(dtypes) == 1 or ops.name != "gpukern":
        return next(iter(dtypes)), ""
    steps = {name: small_step(model, ops, corpus, dtype) for name, dtype in dtypes.items()}
    found = fastest(steps, model, ops.name)
    model.zero_grad()
    return found


def compare_alone(args: argparse.Namespace, began: float) -> None:
    """Runs --compare-only, which compiles, generates and times nothing."""
    corpus, model = load_corpus(), GPT(CONFIG[args.device]).to(args.device)
    steps = args.compare_steps or COMPARED_ALONE
    feed = batches(corpus.train, BATCH_ALONE[args.device], model.config.context, seed=2)
    runs = {"gpukern": (copy.deepcopy(model), OPS["gpukern"](), torch.bfloat16)}
    for name, (dtype, backend) in BUILT_INS[args.device].items():
        runs[f"built-ins, {name}"] = copy.deepcopy(model), TorchOps(backend), dtype
    sides = {name: learner(*run) for name, run in runs.items()}
    losses = compare_curves(sides, feed, steps, began)
    print(f"wrote {write_curves(losses, args.out)}; {time.perf_counter() - began:.0f} s in all")


def learner(model: GPT, ops, dtype: torch.dtype) -> Callable[[Tensor, Tensor, float], Tensor]:
    """A function of (tokens, targets, share of the run that is done) that makes a step and returns
    the loss in nats before it."""
    optimizer = Optimizer(model, ops, dtype)

    def step(tokens: Tensor, targets: Tensor, share: float) -> Tensor:
        def loss_fn(tokens: Tensor, targets: Tensor) -> Tensor:
            return model.loss(tokens, targets, ops)

        loss = gradient_step(loss_fn, tokens, targets, device_of(model), dtype)
        optimizer.step(share)
        return loss

    return step


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ", ".join(f"{n} on {device}" for device, n in STEPS.items())
    parser.add_argument("--steps", type=positive, help=f"steps of training; default: {default}")
    parser.add_argument("--backend", choices=tuple(OPS), default="gpukern", help="what trains")
    found = found_device()
    parser.add_argument(
        "--device", choices=tuple(CONFIG), default=found, help=f"default here: {found}"
    )
    parser.add_argument(
        "--compare-steps",
        type=positive,
        help=f"steps of the comparison; default: {COMPARED}, or {COMPARED_ALONE} with "
        f"--compare-only",
    )
    parser.add_argument(
        "--compare-only",
        action="store_true",
        help="loss curves beside the built-ins' and nothing else",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo")
    return parser.parse_args()


def announce(steps: int) -> None:
    """Prints what will happen, before the first thing that takes long."""
    print(
        f"{steps} steps of training; before them and after them it compiles, evaluates, generates "
        f"and compares",
        flush=True,
    )
    if header := missing_header():
        print(
            f"{header} is missing (Debian, Ubuntu: apt-get install python3-dev), so nothing is "
            f"compiled: steps take longer"
        )


def describe(corpus: Corpus, model: GPT, device: str) -> None:
    print(
        f"text: Python {sys.version.split()[0]}'s standard library, {len(corpus.train):,} bytes to "
        f"train on, {len(corpus.held_out):,} held out: {', '.join(corpus.held_out_modules)}"
    )
    c = model.config
    print(
        f"model: {sum(p.numel() for p in model.parameters()):,} weights, {c.layers} layers, width "
        f"{c.dim}, {c.heads_q} query heads on {c.heads_kv} of keys, context {c.context} bytes, on "
        f"{device}"
    )


def report(
    model: GPT, ops, corpus: Corpus, curve: list[tuple[float, float]], dtype: torch.dtype, out: Path
) -> None:
    """Evaluates the trained model on the held-out text, and writes checkpoint.pt and loss.png."""
    bits, gzip_bits = held_out_bits(model, ops, corpus, dtype), corpus.gzip_bits_per_byte
    verdict = "held" if bits <= GZIP_SHARE * gzip_bits else "missed"
    print(
        f"held out: {bits:.3f} bits per byte after {len(curve)} steps; gzip -9: {gzip_bits:.3f}; "
        f"aim {GZIP_SHARE} of gzip = {GZIP_SHARE * gzip_bits:.3f}: {verdict}"
    )
    torch.save({"config": model.config, "weights": model.state_dict()}, out / "checkpoint.pt")
    plotted = plot(curve, bits, gzip_bits, out / "loss.png")
    second = f"and {out / 'loss.png'}" if plotted else "without a plot: matplotlib is not installed"
    print(f"wrote {out / 'checkpoint.pt'} {second}")


def sides_of_comparison(
    model: GPT, ops, loss_fn, corpus: Corpus, our_dtype: torch.dtype, compile_seconds: float
) -> dict[str, tuple]:
    """The two sides for `compare_training`: gpukern, and the fastest of PyTorch's built-ins. A side
    that has not been compiled is compiled here."""
    best, times = fastest_built_ins(model, corpus)
    dtype, backend = BUILT_INS[device_of(model).type][best]
    print(
        f"built-ins in {best}, their fastest here (a gradient step of two sequences, not "
        f"compiled: {times})"
    )
    sides: dict[str, tuple] = {}
    for name in OPS:
        if name == ops.name == "gpukern":
            sides[name] = model, ops, loss_fn, our_dtype  # its graph is compiled already
            continue
        copied = copy.deepcopy(model)
        copied_ops = TorchOps(backend) if name == "torch" else OPS[name]()
        copied_dtype = dtype if name == "torch" else our_dtype
        copied_loss = compiled_loss(copied, copied_ops)
        sides[name] = copied, copied_ops, copied_loss, copied_dtype
        compile_now(copied, copied_loss, corpus, copied_dtype, copied_ops.name, compile_seconds)
    return sides


def main() -> None:
    args = parse_arguments()
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.compare_only:
        compare_alone(args, began)
        return

    steps = args.steps or STEPS[args.device]
    announce(steps)
    corpus = load_corpus()
    model, ops = GPT(CONFIG[args.device]).to(args.device), OPS[args.backend]()
    describe(corpus, model, args.device)
    ours, times = fastest_of_ours(model, ops, corpus)
    our_dtype = OURS[args.device][ours]
    if times:
        print(f"{ops.name} in {ours}, its fastest here (a gradient step of two sequences: {times})")
    loss_fn = compiled_loss(model, ops)
    compile_seconds = compile_now(model, loss_fn, corpus, our_dtype, ops.name)
    curve = train(model, ops, loss_fn, corpus, steps, our_dtype)
    report(model, ops, corpus, curve, our_dtype, args.out)

    compare_generation(model, our_dtype)

    print(flush=True)
    sides = sides_of_comparison(model, ops, loss_fn, corpus, our_dtype, compile_seconds)
    losses = compare_training(model, sides, corpus, args.compare_steps or COMPARED)
    print(f"wrote {write_curves(losses, args.out)}")
    made = [args.out / name for name in ("loss.png", "curves.png") if (args.out / name).exists()]
    print(
        f"\n{time.perf_counter() - began:.0f} s in all. Open "
        f"{' and '.join(map(str, made)) or args.out / 'curves.csv'}"
    )


if __name__ == "__main__":
    main()
