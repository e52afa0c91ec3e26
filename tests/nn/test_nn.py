# SPDX-License-Identifier: BSD-3-Clause
"""torch_gpukern.nn: layers against PyTorch's with the same weights; patch and restore."""

import copy

import pytest
import torch
from conftest import assert_close_as, generator, randn
from torch import nn

from torch_gpukern import PagedKVCache, attn_mask_of, reference
from torch_gpukern import nn as gnn


def with_gradients(module, x, call=None):
    """{name: value} of the output, and of the gradients of x and the parameters."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    out = (call or module)(x)
    (out * randn(generator("grad"), *out.shape).to(out)).sum().backward()
    return {
        "out": out,
        "dx": x.grad,
        **{name: p.grad.clone() for name, p in module.named_parameters()},
    }


def as_near(ours, theirs, x, call=None, plain_call=None):
    """Ours in float32 is as near to theirs in float64 as theirs in float32 is."""
    got = with_gradients(ours, x, call and call(ours))
    yard = with_gradients(theirs, x, plain_call and plain_call(theirs))
    exact = copy.deepcopy(theirs).double()
    want = with_gradients(exact, x.double(), plain_call and plain_call(exact))
    assert got.keys() == want.keys()
    for name, ref in want.items():
        assert_close_as(yard[name], got[name], ref, name)


class Plain(nn.Module):
    """A module with the weights of another and a function as its forward."""

    def __init__(self, like, function):
        super().__init__()
        for name, child in like.named_children():
            if isinstance(child, nn.Linear):
                plain = nn.Linear(child.in_features, child.out_features, child.bias is not None)
                plain.load_state_dict(child.state_dict())
                self.add_module(name, plain)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
def test_linear(activation):
    torch.manual_seed(0)
    ours = gnn.Linear(24, 40, activation=activation)
    holder = nn.Module()
    holder.linear = ours
    theirs = Plain(holder, lambda m, x: reference.ACTIVATIONS[activation](m.linear(x)))
    wrapped = nn.Module()
    wrapped.linear = ours
    wrapped.forward = lambda x: ours(x)
    as_near(wrapped, theirs, randn(generator("linear"), 3, 17, 24))
    assert (
        ours.extra_repr() == f"in_features=24, out_features=40, bias=True, activation={activation}"
    )
    with pytest.raises(
        ValueError,
        match="Linear: activation must be one of none, relu, gelu, gelu_tanh, silu, got 'tanh'",
    ):
        gnn.Linear(2, 2, activation="tanh")


def test_mlp():
    torch.manual_seed(0)
    ours = gnn.MLP(32, 48)
    theirs = Plain(
        ours, lambda m, x: m.down_proj(nn.functional.silu(m.gate_proj(x)) * m.up_proj(x))
    )
    as_near(ours, theirs, randn(generator("mlp"), 2, 9, 32))


def angles(seq, d):
    turn = torch.arange(seq, dtype=torch.float64)[:, None] * 100.0 ** (-torch.arange(0, d, 2) / d)
    return torch.cat([turn.cos()] * 2, -1), torch.cat([turn.sin()] * 2, -1)


def plain_attention(heads, heads_kv, d, window=None, is_causal=True):
    def forward(m, x):
        batch, seq, _ = x.shape
        q, k, v = (
            p(x).view(batch, seq, -1, d).transpose(1, 2) for p in (m.q_proj, m.k_proj, m.v_proj)
        )
        cos, sin = (a.to(x) for a in angles(seq, d))
        half = torch.cat([torch.zeros(d // 2, d // 2), torch.eye(d // 2)], 1)
        other = torch.cat(
            [-half, torch.cat([torch.eye(d // 2), torch.zeros(d // 2, d // 2)], 1)]
        ).to(x)
        q, k = (t * cos + t @ other.mT * sin for t in (q, k))
        i = torch.arange(seq)
        seen = (i <= i[:, None]) if is_causal else torch.ones(seq, seq, dtype=torch.bool)
        if window is not None:
            seen = seen & ((i[:, None] - i).abs() < window)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return m.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))

    return forward


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"window": 4, "is_causal": False}], ids=str)
def test_attention(options):
    torch.manual_seed(0)
    ours = gnn.Attention(32, 4, 2, bias=True, **options)
    theirs = Plain(ours, plain_attention(4, 2, 8, **options))
    x = randn(generator("attention"), 2, 11, 32)
    rotary = [a.float() for a in angles(11, 8)]
    # without rotation the gradient of the key's bias is only rounding; here keys are rotated
    as_near(ours, theirs, x, call=lambda m: lambda x: m(x, rotary))


def test_attention_over_a_cache():
    """A prefill and steps of one token give the same as the whole sequence."""
    torch.manual_seed(0)
    layer, x = gnn.Attention(32, 4, 2, window=5), randn(generator("cache"), 2, 9, 32)
    cos, sin = (a.float() for a in angles(9, 8))
    cache = PagedKVCache(num_blocks=16, block_size=4, heads_kv=2, head_dim=8, layers=1)
    sequences = [cache.allocate() for _ in range(2)]
    with torch.no_grad():
        whole, parts = layer(x, (cos, sin)), []
        for at, end in ((0, 6), (6, 7), (7, 9)):
            slots = cache.extend(sequences, end - at)
            where = {
                "block_table": cache.block_table(sequences),
                "seq_lens": cache.seq_lens(sequences),
                "slots": slots,
            }
            parts.append(
                layer(
                    x[:, at:end],
                    (cos[at:end], sin[at:end]),
                    cache=(cache.k[0], cache.v[0]),
                    **where,
                )
            )
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    with pytest.raises(ValueError, match="cache needs block_table, seq_lens and slots"):
        layer(x, cache=(cache.k[0], cache.v[0]))
    with pytest.raises(ValueError, match="num_heads 4 must be a multiple of num_kv_heads 3"):
        gnn.Attention(32, 4, 3)


@pytest.mark.parametrize("shape", ((0, 4), (2, 0), (0, 0)))
def test_attention_of_no_tokens(shape):
    layer = gnn.Attention(16, 2)
    x = torch.zeros(*shape, 16, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert out.shape == x.grad.shape == x.shape


def test_attention_of_a_padded_batch():
    torch.manual_seed(0)
    layer, x = gnn.Attention(32, 4), randn(generator("padded"), 2, 9, 32)
    start = torch.tensor([0, 4], dtype=torch.int32)
    want = layer(x[1:, 4:])[0]
    torch.testing.assert_close(layer(x, kv_start=start)[1, 4:], want)
    cache = PagedKVCache(num_blocks=16, block_size=4, heads_kv=4, head_dim=8, layers=1)
    sequences = [cache.allocate() for _ in range(2)]
    with torch.no_grad():
        slots = cache.extend(sequences, 9)
        where = {
            "block_table": cache.block_table(sequences),
            "seq_lens": cache.seq_lens(sequences),
            "slots": slots,
        }
        over_pages = layer(x, kv_start=start, cache=(cache.k[0], cache.v[0]), **where)
    torch.testing.assert_close(over_pages[1, 4:], want)
    with pytest.raises(
        ValueError, match="with a cache, kv_end must be None and is_causal must be True"
    ):
        layer(x, kv_end=start, cache=(cache.k[0], cache.v[0]), **where)


def test_attention_with_a_mask():
    """A tree of new tokens: at once as a mask of the whole sequence, and over a cache."""
    torch.manual_seed(0)
    layer, x = gnn.Attention(32, 4, 2, is_causal=False), randn(generator("masked"), 2, 9, 32)
    tree = torch.eye(3, dtype=torch.bool)
    tree[1, 0] = tree[2, 0] = True
    sees = torch.ones(9, 9, dtype=torch.bool).tril()
    sees[6:, 6:] = tree
    q, k, v = (
        p(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    want = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)
    want = layer.o_proj(want.transpose(1, 2).flatten(2))
    for mask in (sees, sees[None, None], attn_mask_of(sees)):
        torch.testing.assert_close(layer(x, attn_mask=mask), want)
    causal = gnn.Attention(32, 4, 2)  # which also hides what the rule hides
    causal.load_state_dict(layer.state_dict())
    both = torch.ones(9, 9, dtype=torch.bool)
    both[6:, 6:] = tree
    torch.testing.assert_close(causal(x, attn_mask=both), want)

    cache = PagedKVCache(num_blocks=16, block_size=4, heads_kv=2, head_dim=8, layers=1)
    sequences, parts = [cache.allocate() for _ in range(2)], []
    with torch.no_grad():
        for at, end, mask in ((0, 6, None), (6, 9, tree.expand(2, 3, 3))):
            where = {"slots": cache.extend(sequences, end - at), "cache": (cache.k[0], cache.v[0])}
            where |= {
                "block_table": cache.block_table(sequences),
                "seq_lens": cache.seq_lens(sequences),
            }
            parts.append(causal(x[:, at:end], attn_mask=mask, **where))
    torch.testing.assert_close(torch.cat(parts, 1), want)


# ---- patch ---------------------------------------------------------------------------------------


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer, self.a, self.b = (
            base,
            nn.Linear(16, 2, bias=False),
            nn.Linear(2, 16, bias=False),
        )

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


class Odd(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def model():
    torch.manual_seed(0)
    shared = nn.Linear(16, 16)
    return nn.Sequential(
        nn.Sequential(nn.Linear(16, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 16), nn.ReLU()),
        nn.Sequential(shared, nn.ReLU(), shared),
        Lora(nn.Linear(16, 16)),
        Odd(16, 16),
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0),
    )


def test_attention_drops_in_training_alone():
    layer, x = gnn.Attention(32, 4, dropout=0.5), torch.randn(2, 9, 32)
    runs = []
    for training, seed in ((True, 1), (True, 1), (True, 2), (False, 1), (False, 2)):
        torch.manual_seed(seed)
        runs.append(layer.train(training)(x))
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[3], runs[4])
    assert not torch.equal(runs[0], runs[2]) and not torch.equal(runs[0], runs[3])
    with pytest.raises(ValueError, match="Attention: dropout must be between 0 and 1, got 1.5"):
        gnn.Attention(32, 4, dropout=1.5)


def test_patch_and_restore():
    plain, patched = model(), model()
    x, kinds, printed = (
        randn(generator("patch"), 2, 5, 16),
        [type(m) for m in patched.modules()],
        [],
    )
    seen = []
    patched[0][2].register_forward_hook(lambda m, i, o: seen.append(o))
    done = gnn.patch(patched, printed.append)
    assert done.replaced == {
        "0.0": "Linear + gelu_tanh",
        "0.2": "Linear",
        "1.0": "Linear",
        "2.base_layer": "Linear",
        "2.a": "Linear",
        "2.b": "Linear",
    }
    assert set(done.skipped) == {"3", "4.self_attn.out_proj", "4.linear1", "4.linear2"}
    assert "gpukern: 1 nn.Linear -> Linear + gelu_tanh: 0.0" in printed
    assert "gpukern: 3 left: Odd has a forward of its own" in printed
    assert patched.state_dict().keys() == plain.state_dict().keys()
    got, want = with_gradients(patched, x), with_gradients(plain, x)
    for name, ref in want.items():
        torch.testing.assert_close(got[name], ref)
    assert len(seen) == 1, "hooks stay"
    for training in (True, False):
        with torch.no_grad():
            torch.testing.assert_close(patched.train(training)(x), plain.train(training)(x))
    done.restore()
    assert [type(m) for m in patched.modules()] == kinds and not done.replaced
    assert "activation" not in vars(patched[0][0])
    done.restore()
    with gnn.patch(patched, None) as again:
        assert len(again.replaced) == 6 and type(patched[0][0]) is gnn.Linear
        assert not gnn.patch(patched, None).replaced
    assert [type(m) for m in patched.modules()] == kinds


def test_patch_says_that_there_is_nothing(capsys):
    gnn.patch(nn.ReLU())
    assert capsys.readouterr().out == "gpukern: nothing to replace\n"


def test_a_forward_that_was_replaced_stays():
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    layer[0].forward = lambda x: x
    done = gnn.patch(layer, None)
    assert done.skipped == {"0": "its forward was replaced before"} and not done.replaced
    assert type(layer[1]) is nn.ReLU


class Scaled(torch.Tensor):
    """A weight that implements F.linear itself, as quantised weights do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, w, *rest = args
            return nn.functional.linear(x, 2 * w.as_subclass(torch.Tensor), *rest)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclass_weights_keep_their_own_linear():
    layer = nn.Sequential(nn.Linear(4, 6, bias=False), nn.SiLU())
    x, weight = randn(generator("subclass"), 3, 4), layer[0].weight.detach().clone()
    layer[0].weight = nn.Parameter(weight.as_subclass(Scaled), requires_grad=False)
    gnn.patch(layer, None)
    torch.testing.assert_close(
        layer(x).as_subclass(torch.Tensor), nn.functional.silu(x @ (2 * weight).mT)
    )


def test_patched_model_compiles():
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    x = randn(generator("compile"), 3, 8)
    want = layer(x)
    gnn.patch(layer, None)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), want)
