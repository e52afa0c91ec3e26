# SPDX-License-Identifier: BSD-3-Clause
"""Norms, rotary embedding and the head of torch_gpukern.nn, and `patch` on modules that compute the
same.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import generator, randn
from torch import nn

from torch_gpukern import nn as gnn


def same(ours, theirs, x, tolerance=1e-5):
    """Results and all gradients are equal."""
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    outs = [m(leaf) for m, leaf in zip((ours, theirs), leaves, strict=True)]
    grad = randn(generator("nn rows"), *outs[0].shape).to(outs[0].dtype)
    grads = [
        torch.autograd.grad(out, [leaf, *m.parameters()], grad)
        for out, leaf, m in zip(outs, leaves, (ours, theirs), strict=True)
    ]
    for got, want in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance * float(want.detach().abs().max())
        )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", (48, (6, 8)))
def test_norms(shape, dtype):
    x = randn(generator("norms of nn"), 5, 6, 8, dtype=dtype)
    x = x if isinstance(shape, tuple) else x.flatten(1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in ((gnn.RMSNorm, nn.RMSNorm), (gnn.LayerNorm, nn.LayerNorm)):
        for options in ({}, {"eps": 1e-3}, {"elementwise_affine": False}):
            a, b = ours(shape, dtype=dtype, **options), theirs(shape, dtype=dtype, **options)
            with torch.no_grad():
                for p, q in zip(a.parameters(), b.parameters(), strict=True):
                    q.copy_(torch.rand_like(q) + 0.5)
                    p.copy_(q)
            same(a, b, x, tolerance)
        norm = ours(shape, dtype=dtype)
        out, total = norm(x, x)
        assert torch.equal(total, x + x) and torch.equal(out, norm(x + x))
        with pytest.raises(ValueError, match=rf"{ours.__name__}: x must have shape \[\.\.\., "):
            norm(x[..., :-1])


def test_rms_norm_of_small_numbers_has_the_default_eps_of_torch():
    for dtype in (torch.float32, torch.bfloat16):
        x = (randn(generator("small"), 4, 64) * 1e-3).to(dtype)
        got, want = gnn.RMSNorm(64, dtype=dtype)(x), nn.RMSNorm(64, dtype=dtype)(x)
        torch.testing.assert_close(got, want, rtol=1e-2, atol=0)


def test_weight_offset():
    norm, x = gnn.RMSNorm(16, eps=1e-6, weight_offset=1.0), randn(generator("offset"), 3, 16)
    assert (norm.weight == 0).all()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), None, 1e-6))


class Held(torch.Tensor):
    """A tensor subclass that dispatches its own ops, as quantised and sharded weights do. No gpukern
    kernel may read it."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device
        )

    def __init__(self, held):
        self.held = held

    def __tensor_flatten__(self):
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner, _, size, stride):
        return Held(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace == "gpukern":
            raise NotImplementedError(f"{func} of a tensor that no kernel reads")
        plain = torch.utils._pytree.tree_map_only(Held, lambda t: t.held, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return Held(out) if func is torch.ops.aten.detach.default else out


def norm_of_four(offset):
    norm = gnn.RMSNorm(4, eps=1e-6, weight_offset=offset)
    with torch.no_grad():
        norm.weight.add_(torch.tensor([0.0, 0.5, 1.0, 1.5]))
    return norm


FOUR = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-2.0, 1.0, 0.5, 3.0]])


def by_hand(x):
    y = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    return (y * torch.tensor([1.0, 1.5, 2.0, 2.5], dtype=torch.float64)).float()


@pytest.mark.parametrize("offset", (0.0, 1.0))
def test_weight_offset_where_the_weight_is_no_plain_tensor(offset):
    norm = norm_of_four(offset)
    norm.weight = nn.Parameter(Held(norm.weight.detach()), requires_grad=False)
    torch.testing.assert_close(norm(FOUR), by_hand(FOUR))
    out, total = norm(FOUR, FOUR)
    torch.testing.assert_close(out, by_hand(2 * FOUR))
    assert torch.equal(total, 2 * FOUR)


@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("kind", (gnn.RMSNorm, gnn.LayerNorm))
def test_an_exported_norm_is_ours(kind, strict):
    norm = norm_of_four(1.0) if kind is gnn.RMSNorm else gnn.LayerNorm(4)
    program = torch.export.export(norm, (FOUR,), strict=strict)
    assert any(str(node.target).startswith("gpukern.") for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(FOUR), norm(FOUR))
    if kind is gnn.RMSNorm:
        torch.testing.assert_close(program.module()(FOUR), by_hand(FOUR))


def test_reset_parameters_of_a_norm_with_an_offset():
    norm = norm_of_four(1.0)
    norm.reset_parameters()
    assert norm.weight.eq(0).all()
    with torch.device("meta"):
        norm = gnn.RMSNorm(4, weight_offset=0.25)
    norm.to_empty(device="cpu").reset_parameters()
    assert norm.weight.eq(0.75).all()


@pytest.mark.parametrize(
    "how", ("to_empty", "to_empty of tables that were there", "reset", "assign", "compile", "move")
)
def test_rotary_tables_of_a_module_made_on_meta(how):
    want = gnn.RotaryEmbedding(4, 8)
    q, k = randn(generator("meta rotary"), 1, 2, 8, 4), randn(generator("meta rotary"), 1, 1, 8, 4)
    with torch.device("meta"):
        rotary = gnn.RotaryEmbedding(4, 8)
    if how == "to_empty of tables that were there":
        rotary = gnn.RotaryEmbedding(4, 8)
    if how.startswith("to_empty"):
        rotary.to_empty(device="cpu")
        assert torch.equal(rotary.cos, want.cos) and torch.equal(rotary.sin, want.sin)
    elif how == "reset":
        rotary.to_empty(device="cpu")
        rotary.cos.zero_()
        rotary.reset_parameters()
    elif how == "move":
        rotary = gnn.RotaryEmbedding(4, 8).to("meta").to_empty(device="cpu").to(torch.float64)
    else:
        rotary.load_state_dict({}, assign=True)
    call = (
        torch.compile(rotary, backend="aot_eager", fullgraph=True) if how == "compile" else rotary
    )
    for got, right in zip(call(q, k), want(q, k), strict=True):
        assert torch.equal(got, right)
    assert torch.equal(rotary.cos, want.cos) and rotary.cos.dtype is torch.float32


@pytest.mark.parametrize("interleaved", (False, True))
def test_rotary_embedding(interleaved):
    rotary = gnn.RotaryEmbedding(8, 32, base=100.0, interleaved=interleaved)
    gen = generator("rotary")
    q, k = randn(gen, 2, 4, 9, 16), randn(gen, 2, 2, 9, 16)
    positions = torch.randint(32, (2, 9), generator=gen)
    angle = positions[:, None, :, None].double() * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    for x, got in zip((q, k), rotary(q, k, positions), strict=True):
        first, second = (
            (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
        )
        want, x1, x2 = x.double(), x[..., first].double(), x[..., second].double()
        want[..., first], want[..., second] = (
            x1 * angle.cos() - x2 * angle.sin(),
            x2 * angle.cos() + x1 * angle.sin(),
        )
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    table = rotary.cos.clone()
    assert not rotary.state_dict() and torch.equal(rotary.bfloat16().cos, table)
    with pytest.raises(ValueError, match="rotary_dim must be even and 2 or more, got 7"):
        gnn.RotaryEmbedding(7, 4)


def test_linear_cross_entropy():
    torch.manual_seed(0)
    head = gnn.LinearCrossEntropy(
        16, 33, bias=True, softcap=4.0, logit_scale=0.5, label_smoothing=0.1
    )
    x, target = randn(generator("head"), 2, 5, 16), torch.randint(33, (2, 5))
    logits = 4.0 * torch.tanh(F.linear(x, head.weight, head.bias) * 0.5 / 4.0)
    torch.testing.assert_close(head(x), logits)
    want = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(head(x, target), want)


class PlainRMSNorm(nn.Module):
    """Llama's RMSNorm, or Gemma's with an offset of 1."""

    def __init__(self, n, offset=0.0):
        super().__init__()
        self.weight, self.variance_epsilon, self.offset = nn.Parameter(torch.rand(n)), 1e-5, offset

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return ((self.weight.float() + self.offset) * h).to(x.dtype)


class OtherRMSNorm(PlainRMSNorm):
    def forward(self, x):
        return super().forward(x) * 1.25


class PlainMLP(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(24, 40),
            nn.Linear(24, 40),
            nn.Linear(40, 24),
        )
        self.act_fn = activation

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def block():
    torch.manual_seed(0)
    activations = (nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.Tanh())
    norms = PlainRMSNorm(24), PlainRMSNorm(24, 1.0), nn.RMSNorm(24, eps=1e-5), nn.LayerNorm(24)
    return nn.Sequential(
        *(m for pair in zip(norms, map(PlainMLP, activations), strict=True) for m in pair)
    )


@pytest.mark.parametrize("what", ("another activation", "its approximation", "its forward", "eps"))
def test_what_is_changed_after_patch(what):
    def change(model):
        if what == "another activation":
            model[1].act_fn = nn.GELU()
        elif what == "its approximation":
            model[3].act_fn.approximate = "tanh"
        elif what == "its forward":
            model[1].act_fn.forward = torch.tanh
        else:
            model[0].variance_epsilon = 1.0
        return model

    model, x = block(), randn(generator("changed"), 3, 24)
    done = gnn.patch(model, say=None)
    change(model)
    want = change(block())(x)
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(copy.deepcopy(model)(x), want, rtol=1e-4, atol=1e-4)
    done.restore()
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)


def test_patch_and_restore():
    model, lines = block(), []
    plain = copy.deepcopy(model)
    done = gnn.patch(model, say=lines.append)
    kinds = [type(m).__name__ for m in model]
    assert kinds == ["SimilarRMSNorm", "SimilarMLP"] * 2 + [
        "RMSNorm",
        "SimilarMLP",
        "LayerNorm",
        "PlainMLP",
    ]
    assert any(line.startswith("gpukern: 2 PlainRMSNorm -> RMSNorm: 0, 2") for line in lines)
    assert any(line.startswith("gpukern: 1 PlainMLP -> MLP with swiglu: 1") for line in lines)
    same(model, plain, randn(generator("patched"), 2, 7, 24), 1e-4)
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.profiler.profile() as run:
        model(torch.ones(1, 24))
    seen = {event.key for event in run.key_averages()}
    assert {"gpukern::rms_norm", "gpukern::layer_norm", "gpukern::swiglu", "gpukern::geglu"} <= seen
    gnn.patch(model, say=None)  # finds nothing else to patch
    assert [type(m).__name__ for m in model] == kinds
    done.restore()
    assert [type(m) for m in model] == [type(m) for m in plain]
    assert all("_gpukern_rule" not in vars(m) for m in model)


class LlamaLikeRMSNorm(PlainRMSNorm):
    """A float32 weight makes the result of a 16-bit input float32. The argument of forward has
    another name than nn.RMSNorm's."""

    def forward(self, hidden_states):
        h = hidden_states.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * h.to(hidden_states.dtype)


@pytest.mark.parametrize("weight", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", (PlainRMSNorm, LlamaLikeRMSNorm, nn.RMSNorm, nn.LayerNorm))
def test_the_dtype_of_a_patched_norm_s_result(kind, weight):
    plain = nn.Sequential(kind(24)).to(weight)
    patched = copy.deepcopy(plain)
    gnn.patch(patched, say=None)
    assert type(patched[0]) is not kind
    for where in (torch.float32, torch.bfloat16):  # the second is cast later
        plain.to(where), patched.to(where)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = randn(generator("dtypes of norms"), 3, 24, dtype=dtype)
            try:
                want = plain(x)
            except RuntimeError:  # nn.LayerNorm refuses this pair of dtypes
                continue
            got = patched(x)
            assert got.dtype is want.dtype, (where, dtype)
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_arguments_of_patched_modules_by_name():
    """Arguments have the names that torch's ModuleInfo and transformers use."""
    x = randn(generator("by name"), 3, 24)
    model = nn.Sequential(
        nn.Linear(24, 24),
        nn.LayerNorm(24),
        nn.RMSNorm(24),
        LlamaLikeRMSNorm(24),
        PlainMLP(nn.SiLU()),
    )
    names = ("input", "input", "x", "hidden_states", "x")
    want = [m(**{name: x}) for m, name in zip(model, names, strict=True)]
    gnn.patch(model, say=None)
    for m, name, right in zip(model, names, want, strict=True):
        assert type(m).__module__.startswith("torch_gpukern")
        torch.testing.assert_close(m(**{name: x}), right, rtol=1e-4, atol=1e-4)
        with pytest.raises(TypeError):
            m(another=x)
        with pytest.raises(TypeError):
            m()
    compiled = torch.compile(model[3], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden_states=x), want[3], rtol=1e-4, atol=1e-4)


@pytest.fixture
def one_rank():
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ("distribute_module", "SequenceParallel"))
def test_patched_modules_whose_tensors_become_dtensors(how, one_rank):
    from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    parts = [PlainRMSNorm(24), PlainRMSNorm(24, 1.0), nn.RMSNorm(24), nn.LayerNorm(24)]
    if how == "distribute_module":
        parts += [PlainMLP(nn.SiLU()), PlainMLP(nn.GELU()), nn.Linear(24, 24)]
    x = randn(generator("dtensor"), 2, 3, 24)
    for plain in parts:
        model = nn.Sequential(copy.deepcopy(plain))
        want = plain(x)
        gnn.patch(model, say=None)
        given = x
        if how == "distribute_module":
            distribute_module(model, one_rank)
            given = distribute_tensor(x, one_rank, [Replicate()])
        else:
            parallelize_module(model, one_rank, {"0": SequenceParallel()})
        got = model(given)
        assert isinstance(got, DTensor)
        got = got.full_tensor()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        got.sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_patch_leaves_a_norm_that_computes_something_else():
    model = nn.Sequential(OtherRMSNorm(24))
    assert gnn.patch(model, say=None).replaced == {}


def causal_model(**config):
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    kind = config.pop("kind", "Llama")
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=70, head_dim=8, **{**sizes, **config}
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def test_loss_of_a_causal_model():
    model = causal_model()
    plain, lines = copy.deepcopy(model), []
    done = gnn.patch(model, say=lines.append, fused_linear_cross_entropy=True)
    assert any("LlamaRMSNorm -> RMSNorm" in line for line in lines)
    assert any("LlamaMLP -> MLP with swiglu" in line for line in lines)
    assert "gpukern: 1 loss -> linear_cross_entropy: LlamaForCausalLM" in lines
    ids = torch.randint(70, (2, 11))
    labels = ids.masked_fill(ids < 9, -100)
    for more in ({}, {"num_items_in_batch": 7}):
        got, want = (m(input_ids=ids, labels=labels, **more) for m in (model, plain))
        assert got.logits is None and want.logits is not None
        torch.testing.assert_close(got.loss, want.loss)
        got.loss.backward(), want.loss.backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=name)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert type(model).__name__ == "LlamaForCausalLM" and type(model) is not type(plain)
    done.restore()
    assert type(model) is type(plain) and model(input_ids=ids, labels=labels).logits is not None


@pytest.mark.parametrize(
    "kind, config",
    [
        ("Gemma2", {"final_logit_softcapping": 5.0}),
        ("Gemma2", {"final_logit_softcapping": None}),
        ("Granite", {"logits_scaling": 3.0}),
        ("Cohere", {"logit_scale": 0.25, "pad_token_id": 0}),
        ("HyperCLOVAX", {"logits_scaling": 3.0}),
        (
            "FalconH1",
            {"lm_head_multiplier": 3.0, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
        ),
        ("Mixtral", {"num_local_experts": 4}),
    ],
)
def test_loss_of_a_model_whose_logits_are_changed(kind, config):
    model = causal_model(kind=kind, **config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    plain = copy.deepcopy(model)
    done = gnn.patch(model, say=None, fused_linear_cross_entropy=True)
    assert done.replaced[f"{kind}ForCausalLM"] == "loss -> linear_cross_entropy"
    ids = torch.randint(70, (2, 11))
    got, want = (m(input_ids=ids, labels=ids) for m in (model, plain))
    assert got.logits is None
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-5)
    if kind == "Mixtral":  # with the routers' loss, the model's own forward runs
        got, want = (
            m(input_ids=ids, labels=ids, output_router_logits=True) for m in (model, plain)
        )
        assert got.logits is not None
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-5)


def test_loss_of_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=70, n_embd=32, n_layer=1, n_head=4)
    ).eval()
    plain = copy.deepcopy(model)
    gnn.patch(model, say=None, fused_linear_cross_entropy=True)
    ids = torch.randint(70, (2, 11))
    got, want = (m(input_ids=ids, labels=ids) for m in (model, plain))
    assert got.logits is None and type(got) is type(want)
    torch.testing.assert_close(got.loss, want.loss)


@pytest.mark.parametrize(
    "kind, config",
    [
        ("MiniCPM3", {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
                      "qk_rope_head_dim": 8, "v_head_dim": 8}),
    ],
)  # fmt: skip
def test_a_loss_that_is_not_understood_is_left(kind, config):
    """The model scales its hidden states before the head, so patch must not replace its loss."""
    model = causal_model(kind=kind, **config).eval()
    done = gnn.patch(model, say=None, fused_linear_cross_entropy=True)
    why = done.skipped[f"{kind}ForCausalLM"]
    assert "its forward does more than the head and the loss: " in why
    ids = torch.randint(70, (2, 11))
    assert model(input_ids=ids, labels=ids).logits is not None


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_export_of_a_head_with_a_dynamic_size(dtype, reduction):
    """The parameters require gradients, because the tensor saved for backward then has a size that
    depends on the number of rows."""
    head = gnn.LinearCrossEntropy(16, 33, bias=True, reduction=reduction, dtype=dtype)
    n = torch.export.Dim("n", min=2, max=100)
    gen = generator("exported head")

    def given(rows):
        return randn(gen, rows, 16, dtype=dtype), torch.randint(33, (rows,), generator=gen)

    program = torch.export.export(head, given(6), dynamic_shapes={"x": {0: n}, "target": {0: n}})
    for rows in (2, 31, 32, 33, 64, 65, 100):  # below and above 2 H
        x, target = given(rows)
        torch.testing.assert_close(program.module()(x, target), head(x, target))


class Knows(torch.Tensor):
    """A weight with an F.linear of its own: the weight itself times 2."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            x, weight, *bias = args
            return F.linear(x, weight.as_subclass(torch.Tensor) * 2, *bias, **(kwargs or {}))


def test_a_head_whose_weight_multiplies_by_itself():
    head = gnn.LinearCrossEntropy(16, 33, bias=True, softcap=4.0, z_loss=1e-2, reduction="sum")
    x, target = randn(generator("a head that knows"), 6, 16), torch.randint(33, (6,))
    target[2] = -100
    want_head = copy.deepcopy(head)
    with torch.no_grad():
        want_head.weight *= 2
    want = want_head(x, target)
    head.weight = nn.Parameter(head.weight.detach().as_subclass(Knows), requires_grad=False)
    for low_memory in (False, True):
        head.rules["low_memory"] = low_memory
        torch.testing.assert_close(head(x, target), want)


@pytest.mark.parametrize("how", ("weight", "forward", "activation"))
def test_fused_loss_of_a_head_that_computes_something_else(how):
    model = causal_model()
    if how == "weight":
        model.lm_head.weight = nn.Parameter(
            model.lm_head.weight.detach().as_subclass(Knows), requires_grad=False
        )
    elif how == "forward":
        model.lm_head.forward = lambda x: F.linear(x, model.lm_head.weight) * 2
    ids = torch.randint(70, (2, 11))
    want = model(input_ids=ids, labels=ids).loss
    gnn.patch(model, say=None, fused_linear_cross_entropy=True)
    if how == "activation":
        model.lm_head.activation = "relu"
        logits = model(input_ids=ids).logits[:, :-1]
        want = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, want)


def test_a_loss_that_the_user_sets_later_is_called():
    model = causal_model()
    gnn.patch(model, say=None, fused_linear_cross_entropy=True)
    ids = torch.randint(70, (2, 11))
    assert model(input_ids=ids, labels=ids).logits is None
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    got = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(got.loss, model(input_ids=ids).logits.square().mean())


def test_the_fused_loss_of_a_model_without_a_loss_type_compiles():
    """Every read of GPT2LMHeadModel.loss_function writes to a log, which would break the graph."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=70, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    gnn.patch(model, say=None, fused_linear_cross_entropy=True)
    ids = torch.randint(70, (2, 11))
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    got = compiled(input_ids=ids, labels=ids, use_cache=False)
    torch.testing.assert_close(got.loss, model(input_ids=ids, labels=ids).loss)


def test_a_model_with_the_fused_loss_pickles():
    import pickle

    model = causal_model()
    gnn.patch(model, say=None, fused_linear_cross_entropy=True)
    ids = torch.randint(70, (2, 11))
    want = model(input_ids=ids, labels=ids)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        got = other(input_ids=ids, labels=ids)
        assert got.logits is None and type(other) is type(model)
        torch.testing.assert_close(got.loss, want.loss)
