# SPDX-License-Identifier: BSD-3-Clause
"""The demo's model on our ops beside the same model on PyTorch's built-ins: a gradient step, and a
step of decoding.

python benchmarks/bench_model.py [--quick] [--only gradient decode vocabulary large lora] [--rows
    eager compiled] [--layers 22] [--device cpu|cuda]

- Gradient step: forward, loss and backward under bf16 autocast, eager and compiled. The optimizer
  is the same on both sides and left out. FLOPs: 6 per weight and token, and those of attention. On
  CUDA the step also runs with our gemm and PyTorch's attention.
- Decode: one token for each sequence, with lengths of half to all of the context, and bf16 weights.
  Ours keeps keys and values in pages. The built-ins keep a padded row per sequence and use a mask.
  GB/s counts weights, and the keys and values that are seen. On the CPU the built-ins also run in
  float32.
- Vocabulary: a gradient step of a model with many outputs, 131072 on CUDA. Ours uses
  linear_cross_entropy. The built-ins use cross_entropy on logits, and in eager mode torch's own
  linear_cross_entropy if torch has it. On CUDA the peak memory of a step is stated, too.
- Large, only on CUDA: a model of 1.0e9 weights with heads of 128. Prefill of 8192 and of 32768
  tokens, and a gradient step of 4 x 2048.
- Lora, only on CUDA: the large model with frozen bf16 weights and adapters of rank 16 or 64 on
  every projection. Forward, loss and the adapters' gradients.

On CUDA both sides run with their launches and as CUDA graphs. The eager step is captured as a
whole, the compiled one runs with mode="reduce-overhead".

Each contestant is compiled once for each row, in a time that grows with the layers. --layers takes
fewer of the 22 (of the 8 of vocabulary), and --rows selects rows:
python benchmarks/bench_model.py --device cuda --quick --layers 6 --only large lora
    --rows "8192 tokens, compiled" "2048 tokens, compiled" "rank 16, compiled"
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import shapes
import torch
import torch.nn.functional as F
from harness import Case, Run, arguments, open_device
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_gpukern

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "demo"))
from generate import for_inference  # noqa: E402
from model import GPT, Config, GpukernOps, Positions, TorchOps, among_themselves, grams_of  # noqa: E402
from train import CONFIG  # noqa: E402

# label -> options of torch.compile (None: eager), and whether the harness captures the step as a
# CUDA graph
MODES = {
    "cpu": {"eager": (None, False), "compiled": ({}, False)},
    "cuda": {
        "eager": (None, False),
        "eager, CUDA graph": (None, True),
        "compiled": ({}, False),
        "compiled, reduce-overhead": ({"mode": "reduce-overhead"}, False),
    },
}


# peer -> its dtype, and the backend of scaled_dot_product_attention that it asks for (None: PyTorch
# chooses)
BUILT_INS = {
    "cpu": {
        "torch built-ins": (torch.bfloat16, None),
        "torch built-ins, float32": (torch.float32, None),
    },
    "cuda": {
        "torch built-ins": (torch.bfloat16, None),
        "torch built-ins, cuDNN": (torch.bfloat16, SDPBackend.CUDNN_ATTENTION),
    },
}


class OurGemm(GpukernOps):
    """Our products with PyTorch's attention. It shows what our products alone do to a step."""

    backend = None
    causal_attention = TorchOps.causal_attention


# group -> the class of operations that is ours
GROUPS = {"gradient step": GpukernOps, "gradient step, gemm alone": OurGemm}


def mode_of(label: str, device: torch.device) -> tuple[dict | None, bool]:
    """The entry of a row in MODES. Drops what earlier rows compiled."""
    options, replayed = MODES[device.type][label]
    if options is not None:
        torch.compiler.reset()  # otherwise each step first checks the graphs of earlier rows
    return options, replayed


def compiled(step: Callable, options: dict | None) -> Callable:
    """The step, compiled unless options is None."""
    if options is None:
        return step
    forward = torch.compile(step, fullgraph=True, **options)

    def run(*inputs):
        if options:  # allows this step to overwrite the results of the last
            torch.compiler.cudagraph_mark_step_begin()
        return forward(*inputs)

    return run


def gradient_step(
    model: GPT,
    ops,
    device: torch.device,
    options: dict | None,
    dtype: torch.dtype = torch.bfloat16,
    loss_of: Callable[..., Tensor] = GPT.loss,
):
    """(tokens, targets) -> (loss, gradient of every parameter)"""

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return loss_of(model, tokens, targets, ops)

    forward = compiled(loss, options)
    parameters = list(model.parameters())

    def run(tokens: Tensor, targets: Tensor):
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            value = forward(tokens, targets)
        return value, *torch.autograd.grad(value, parameters)

    return run


def on_device(config: Config, device: torch.device) -> GPT:
    """Makes the model on its device: a CPU takes ten seconds for 1.0e9 random weights."""
    with device:
        return GPT(config)


def random_model(config: Config, device: torch.device) -> GPT:
    """The model with random weights only. Training starts some weights at zero, which would make
    gradients zero."""
    torch.manual_seed(0)
    model = on_device(config, device)
    for block in model.blocks:
        torch.nn.init.normal_(block.attn_out, std=0.02)
        torch.nn.init.normal_(block.mlp_out, std=0.02)
    torch.nn.init.normal_(model.head, std=0.02)
    return model


def double_of(model: GPT, device: torch.device) -> GPT:
    """The same weights in float64."""
    wide = on_device(model.config, device).double()
    wide.load_state_dict(model.state_dict())
    return wide


def streamed(model: GPT) -> int:
    """Weights that a token uses: all except the embedding table."""
    return sum(p.numel() for p in model.parameters()) - model.embed.numel()


def gradient_case(group: str, label: str, device: torch.device) -> Case:
    options, replayed = mode_of(label, device)
    config = CONFIG[device.type]
    model = random_model(config, device)
    batch, seq = shapes.MODEL_BATCH[device.type], config.context

    def make():
        tokens = torch.randint(config.vocab, (batch, seq + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def exact(tokens: Tensor, targets: Tensor):
        """The same step in float64 on PyTorch's own products."""
        wide = double_of(model, device)
        value = wide.loss(tokens, targets, TorchOps())
        grads = torch.autograd.grad(value, list(wide.parameters()))
        return value.detach(), *(g.double() for g in grads)

    peers = {
        name: gradient_step(model, TorchOps(backend), device, options, dtype)
        for name, (dtype, backend) in BUILT_INS[device.type].items()
    }
    weights = streamed(model)
    attention = 4.0 * config.layers * config.heads_q * seq * config.head_dim / 2 * 3.5
    return Case(
        group=group,
        label=label,
        dtype="bf16",
        make=make,
        ours=gradient_step(model, GROUPS[group](), device, options),
        peers=peers,
        reference=exact,
        flops=batch * seq * (6.0 * weights + attention),
        bytes=3.0 * 4 * weights,
        live=() if replayed else ("gpukern", *peers),
        optional=[name for name in peers if name != "torch built-ins"],
    )


# 22 x 45e6 weights in products; the embedding table is small beside them
LARGE = Config(
    context=32768, layers=22, dim=2048, heads_q=16, heads_kv=4, head_dim=128, hidden=5632
)
LARGE_PREFILL, LARGE_BATCH, LARGE_SEQ = (8192, 32768), 4, 2048
CHECKED = (
    256  # the first tokens of a prefill, whose logits are compared; later tokens do not change them
)


def large_row(label: str, prefill: int) -> tuple[str, str]:
    """Group and label of a row."""
    return (
        ("large, prefill", f"{prefill} tokens, {label}")
        if prefill
        else ("large, gradient step", f"{LARGE_BATCH} x {LARGE_SEQ} tokens, {label}")
    )


def large_case(label: str, prefill: int, device: torch.device, config: Config = LARGE) -> Case:
    """prefill: the tokens of one sequence; 0 for a gradient step."""
    options, replayed = mode_of(label, device)
    model = random_model(config, device)
    batch, seq = (1, prefill) if prefill else (LARGE_BATCH, LARGE_SEQ)

    def make():
        tokens = torch.randint(config.vocab, (batch, seq + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @torch.no_grad()
    def exact(tokens: Tensor, targets: Tensor):
        """The first logits of a prefill, the loss of a step, in float64."""
        wide = double_of(model, device)
        if prefill:
            return logits_of(wide, TorchOps(), None)(tokens[:, :CHECKED], targets).double()
        return wide.loss(tokens, targets, TorchOps())

    def step(ops, backend_model: GPT) -> Callable:
        return (
            logits_of(backend_model, ops, options)
            if prefill
            else gradient_step(model, ops, device, options)
        )

    narrow = for_inference(model, torch.bfloat16) if prefill else model
    peers = {
        name: step(TorchOps(backend), narrow) for name, (_, backend) in BUILT_INS["cuda"].items()
    }
    weights = streamed(model)
    attention = 4.0 * config.layers * config.heads_q * seq * config.head_dim / 2
    group, row = large_row(label, prefill)
    return Case(
        group=group,
        label=row + depth(config),
        dtype="bf16",
        make=make,
        ours=step(GpukernOps(), narrow),
        peers=peers,
        reference=exact,
        compare=(lambda logits: logits[:, :CHECKED]) if prefill else (lambda y: y[0]),
        flops=batch
        * seq
        * (2.0 * weights + attention if prefill else 6.0 * weights + 3.5 * attention),
        bytes=(2.0 if prefill else 3.0 * 4) * weights,
        live=() if replayed else ("gpukern", *peers),
        optional=[name for name in peers if name != "torch built-ins"],
    )


def depth(config: Config, full: Config = LARGE) -> str:
    """The part of a label that says that the model has fewer layers."""
    return "" if config.layers == full.layers else f", {config.layers} layers"


def logits_of(model: GPT, ops, options: dict | None) -> Callable:
    """(tokens, targets) -> logits [batch, seq, vocab]. targets are ignored."""

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return model(grams_of(tokens, LARGE.grams), positions, ops, among_themselves(ops))

    return torch.no_grad()(compiled(run, options))


# One embedding table, so that most weights are those of the head. The logits of a batch take 64 MB
# in float32 on the CPU and 4.3 GB on CUDA.
VOCABULARY = {
    "cpu": Config(
        vocab=32768,
        grams=1,
        context=256,
        layers=2,
        dim=256,
        heads_q=4,
        heads_kv=2,
        head_dim=64,
        hidden=768,
    ),
    "cuda": replace(LARGE, vocab=131072, grams=1, context=2048, layers=8),
}
VOCABULARY_BATCH = {"cpu": 2, "cuda": 4}


def fused_loss(model: GPT, tokens: Tensor, targets: Tensor, ops) -> Tensor:
    """GPT.loss without logits in memory."""
    return torch_gpukern.linear_cross_entropy(
        model.dense_states(tokens, ops), model.head.mT, targets
    )


def torch_fused_loss(model: GPT, tokens: Tensor, targets: Tensor, ops) -> Tensor:
    """The same by torch's op, which autocast does not know."""
    x, weight = model.dense_states(tokens, ops).bfloat16().flatten(0, 1), model.head.mT.bfloat16()
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x, weight, targets.flatten(), options=options)


def vocabulary_row(label: str, config: Config, batch: int) -> tuple[str, str]:
    """Group and label of a row."""
    return "vocabulary", f"{batch * config.context} tokens, {config.vocab} outputs, {label}"


def vocabulary_case(label: str, device: torch.device, config: Config) -> Case:
    options, replayed = mode_of(label, device)
    model = random_model(config, device)
    batch, seq = VOCABULARY_BATCH[device.type], config.context

    def make():
        tokens = torch.randint(config.vocab, (batch, seq + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @torch.no_grad()
    def exact(tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss in float64."""
        return double_of(model, device).loss(tokens, targets, TorchOps())

    peers = {
        name: gradient_step(model, TorchOps(), device, options, dtype)
        for name, (dtype, backend) in BUILT_INS[device.type].items()
        if backend is None
    }
    if (
        options is None
        and hasattr(F, "linear_cross_entropy")
        and hasattr(torch.nn, "LinearCrossEntropyOptions")
    ):
        name = "torch linear_cross_entropy"
        peers[name] = gradient_step(model, TorchOps(), device, options, loss_of=torch_fused_loss)
    weights = streamed(model)
    attention = 4.0 * config.layers * config.heads_q * seq * config.head_dim / 2 * 3.5
    group, row = vocabulary_row(label, config, batch)
    return Case(
        group=group,
        label=row + depth(config, VOCABULARY[device.type]),
        dtype="bf16",
        make=make,
        ours=gradient_step(model, GpukernOps(), device, options, loss_of=fused_loss),
        peers=peers,
        reference=exact,
        compare=lambda y: y[0],
        flops=batch * seq * (6.0 * weights + attention),
        bytes=3.0 * 4 * weights,
        live=() if replayed else ("gpukern", *peers),
        optional=[name for name in peers if name != "torch built-ins"],
    )


def peak_facts(run: Run, case: Case) -> None:
    """The peak memory of a step in GB beyond the weights, of each contestant that was measured."""
    inputs = case.make()
    for name, step in {"gpukern": case.ours, **case.peers}.items():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(*inputs)
        torch.cuda.synchronize()
        run.fact(
            "peak memory",
            f"{case.group}, {case.label}, {name}",
            (torch.cuda.max_memory_allocated() - before) / 1e9,
            "GB",
        )


class Adapted:
    """`ops` with LoRA: a product with a weight that has an adapter also adds the two products of
    the adapter."""

    def __init__(self, ops, adapters: dict[Tensor, tuple[Tensor, Tensor]]) -> None:
        self.ops, self.adapters, self.causal_attention = ops, adapters, ops.causal_attention

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """x [..., in], w [in, out], its adapter [in, rank] and [rank, out] -> [..., out]"""
        y = self.ops.linear(x, w)
        if w not in self.adapters:
            return y
        down, up = self.adapters[w]
        return y + self.ops.linear(self.ops.linear(x, down), up)


def adapters_of(model: GPT, rank: int) -> dict[Tensor, tuple[Tensor, Tensor]]:
    """Adapters for every projection of the blocks, in float32. They are not zero as at the start of
    training, because zeros would make gradients zero."""
    found = {}
    for block in model.blocks:
        for w in (block.qkv, block.attn_out, block.gate_up, block.mlp_out):
            rows, cols = w.shape
            down, up = (
                torch.randn(*size, device=w.device) for size in ((rows, rank), (rank, cols))
            )
            found[w] = (down * rows**-0.5).requires_grad_(), (0.02 * up).requires_grad_()
    return found


def lora_step(
    model: GPT, ops, adapters: dict, device: torch.device, options: dict | None
) -> Callable:
    """(tokens, targets) -> (loss, gradient of every adapter's two factors)"""
    adapted = Adapted(ops, adapters)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return model.loss(tokens, targets, adapted)

    forward = compiled(loss, options)
    factors = [factor for pair in adapters.values() for factor in pair]

    def run(tokens: Tensor, targets: Tensor):
        with torch.autocast(device.type, torch.bfloat16, enabled=model.head.dtype != torch.float64):
            value = forward(tokens, targets)
        return value, *torch.autograd.grad(value, factors)

    return run


def lora_row(label: str, rank: int) -> tuple[str, str]:
    """Group and label of a row."""
    return "lora", f"rank {rank}, {label}"


def lora_case(label: str, rank: int, device: torch.device, config: Config = LARGE) -> Case:
    options, replayed = mode_of(label, device)
    model = for_inference(random_model(config, device), torch.bfloat16)
    for weight in model.parameters():
        weight.requires_grad_(False)
    adapters = adapters_of(model, rank)
    batch, seq = (LARGE_BATCH, LARGE_SEQ) if config.context >= LARGE_SEQ else (1, config.context)

    def make():
        tokens = torch.randint(config.vocab, (batch, seq + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @torch.no_grad()
    def exact(tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss in float64, the adapters multiplied into the weights."""
        wide = double_of(model, device)
        for block, own in zip(wide.blocks, model.blocks, strict=True):
            for name, w in own.named_parameters():
                down, up = adapters[w]
                getattr(block, name).add_(down.double() @ up.double())
        return wide.loss(tokens, targets, TorchOps())

    peers = {
        name: lora_step(model, TorchOps(backend), adapters, device, options)
        for name, (_, backend) in BUILT_INS["cuda"].items()
    }
    weights, factors = streamed(model), sum(x.numel() for pair in adapters.values() for x in pair)
    attention = 4.0 * config.layers * config.heads_q * seq * config.head_dim / 2 * 3.5
    return Case(
        group="lora",
        label=lora_row(label, rank)[1] + depth(config),
        dtype="bf16",
        make=make,
        ours=lora_step(model, GpukernOps(), adapters, device, options),
        peers=peers,
        reference=exact,
        compare=lambda y: y[0],
        flops=batch * seq * (4.0 * weights + 6.0 * factors + attention),
        bytes=2.0 * 2 * weights + 3.0 * 4 * factors,
        live=() if replayed else ("gpukern", *peers),
        optional=[name for name in peers if name != "torch built-ins"],
    )


PAGE = 16


def paged_step(model: GPT, options: dict | None) -> Callable:
    """(grams, lens, pages, rows) -> logits [batch, vocab]. pages: keys and values of each layer,
    table, slots."""
    ops = GpukernOps()

    def step(grams: Tensor, lens: Tensor, pages: tuple, rows: dict) -> Tensor:
        keys, values, table, slots = pages

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, at: Positions) -> Tensor:
            where = at.cos, at.sin, at.positions, keys[layer], values[layer], slots
            q = torch_gpukern.rope_kv_write(q, k, v, *where, **at.norm())
            return torch_gpukern.paged_attn(q, keys[layer], values[layer], table, lens)

        return model(grams, lens.long() - 1, ops, attend, rotated=False)

    return torch.no_grad()(compiled(step, options))


def padded_step(model: GPT, options: dict | None, backend: SDPBackend | None) -> Callable:
    """The same from padded rows. rows: for each dtype keys and values of each layer, [batch,
    heads_kv, context, head_dim]."""
    ops = TorchOps()

    dtype = model.embed.dtype

    def step(grams: Tensor, lens: Tensor, pages: tuple, rows: dict) -> Tensor:
        keys, values = rows[dtype]
        last = lens.long() - 1
        each = torch.arange(len(lens), device=lens.device)
        seen = torch.arange(keys[0].shape[2], device=lens.device) < lens[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[layer][each, :, last] = k
            values[layer][each, :, last] = v
            with nullcontext() if backend is None else sdpa_kernel(backend):
                mask = seen[:, None, None]
                y = F.scaled_dot_product_attention(
                    q[:, :, None], keys[layer], values[layer], mask, enable_gqa=True
                )
            return y[:, :, 0]

        return model(grams, last, ops, attend)

    return torch.no_grad()(compiled(step, options))


def decode_case(label: str, device: torch.device) -> Case:
    options, replayed = mode_of(label, device)
    c = CONFIG[device.type]
    model = for_inference(random_model(c, device), torch.bfloat16)
    batch, blocks = shapes.MODEL_DECODE_BATCH[device.type], c.context // PAGE
    dtypes = {dtype for dtype, _ in BUILT_INS[device.type].values()}
    lens = torch.linspace(c.context / 2, c.context, batch).int()

    def make():
        grams = torch.randint(c.vocab, (batch, c.grams), device=device)
        table = torch.randperm(batch * blocks, device=device).view(batch, blocks)
        shape = batch * blocks, PAGE, c.heads_kv, c.head_dim
        # one tensor a layer: compiled code would copy a tensor of all layers for each write
        pages = [
            [torch.randn(shape, device=device).bfloat16() for _ in range(c.layers)]
            for _ in range(2)
        ]
        rows = [
            [x[table].flatten(1, 2).transpose(1, 2).contiguous() for x in side] for side in pages
        ]
        rows = {dtype: [[x.to(dtype) for x in side] for side in rows] for dtype in dtypes}
        for x in (
            *pages[0],
            *pages[1],
            *(x for two in rows.values() for side in two for x in side),
        ):  # without this mark there is no CUDA graph, because a step writes into them
            torch._dynamo.mark_static_address(x)
        seen = lens.to(device)
        last = seen.long() - 1
        slots = table[torch.arange(batch, device=device), last // PAGE] * PAGE + last % PAGE
        return grams, seen, (*pages, table.int(), slots), rows

    def exact(grams: Tensor, lens: Tensor, pages: tuple, rows: dict) -> Tensor:
        """In float64 on PyTorch's own products, from keys and values of its own."""
        wide = double_of(model, device)
        doubles = {torch.float64: [[x.double() for x in side] for side in rows[torch.bfloat16]]}
        return padded_step(wide, None, None)(grams, lens, pages, doubles).double()

    seen = int(lens.sum())
    weights, cached = streamed(model), 2 * c.layers * c.heads_kv * c.head_dim * seen
    peers = {
        name: padded_step(for_inference(model, dtype), options, backend)
        for name, (dtype, backend) in BUILT_INS[device.type].items()
    }
    return Case(
        group="decode",
        label=label,
        dtype="bf16",
        make=make,
        ours=paged_step(model, options),
        peers=peers,
        reference=exact,
        flops=2.0 * batch * weights + 2.0 * cached * c.heads_q / c.heads_kv,
        bytes=2.0 * (weights + cached),
        unit="GB/s",
        live=() if replayed else ("gpukern", *peers),
        optional=[name for name in peers if name != "torch built-ins"],
    )


def main() -> None:
    args = arguments(
        "model",
        more=lambda parser: parser.add_argument(
            "--layers", type=int, default=LARGE.layers, help="of large, lora, vocabulary"
        ),
    )
    device = open_device(args.device)
    run = Run("model", args, device)
    large = replace(LARGE, layers=args.layers)

    def add(group: str, row: str, make: Callable[..., Case], *options) -> None:
        if run.asks(group, row, "bf16"):
            run.add(make(*options))

    for group in GROUPS if device.kind == "cuda" else ("gradient step",):
        for label in MODES[device.kind]:
            add(group, label, gradient_case, group, label, device.device)
    for label in MODES[device.kind]:
        add("decode", label, decode_case, label, device.device)
    wide = VOCABULARY[device.kind]
    wide = replace(wide, layers=min(args.layers, wide.layers))
    for label in ("eager", "compiled"):
        group, row = vocabulary_row(label, wide, VOCABULARY_BATCH[device.kind])
        if run.asks(group, row, "bf16"):
            case = vocabulary_case(label, device.device, wide)
            run.add(case)
            if device.kind == "cuda":
                peak_facts(run, case)
    for label in ("eager", "compiled") if device.kind == "cuda" else ():
        for prefill in (*LARGE_PREFILL, 0):
            add(*large_row(label, prefill), large_case, label, prefill, device.device, large)
    for label in ("eager", "compiled") if device.kind == "cuda" else ():
        for rank in shapes.MODEL_LORA_RANKS:
            add(*lora_row(label, rank), lora_case, label, rank, device.device, large)
    run.finish(shapes.MODEL_BARS if device.kind == "cpu" else {})


if __name__ == "__main__":
    sys.exit(main())
