"""Arguments that are numbers: tensors that want a gradient are refused by name, and floats that float32 cannot hold have
their limit or are refused.
"""

import pytest
import torch
from conftest import ops, torch_gpukern


def calls(device):
    """op -> (a call of it that wants gradients, its arguments that are numbers)."""
    x = torch.ones(1, 2, 4, 8, device=device, requires_grad=True)
    packed = torch.ones(4, 2, 8, device=device, requires_grad=True)
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    cache = torch.ones(2, 4, 2, 8, device=device)
    table, lens = torch.zeros(4, 1, dtype=torch.int32, device=device), torch.ones(4, dtype=torch.int32, device=device)
    out, lse = ops.flash_attn_fwd(x.detach(), x.detach(), x.detach())
    packed_out = ops.flash_attn_varlen_fwd(*(packed.detach(),) * 3, cu, cu, 4, 4)
    dense = ("is_causal", "scale", "diagonal", "window_left", "window_right", "softcap")
    rest = ("max_seqlen_q", "max_seqlen_k", "is_causal", "scale", "window_left", "window_right", "softcap")
    paged = ("max_seqlen_q", "scale", "window_left", "softcap", "is_causal")
    varlen = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4)
    pages = dict(q=packed, k_cache=cache, v_cache=cache, block_table=table, seq_lens=lens)
    qkv, tokens = dict(q=x, k=x, v=x), dict(q=packed, k=packed, v=packed, **varlen)
    product = dict(a=x, b=x.detach().mT)
    return {
        "gemm": (product, ("alpha", "beta")),
        "gemm_fwd": (product, ("alpha", "beta")),
        "flash_attn": (qkv, dense),
        "flash_attn_fwd": (qkv, dense),
        "flash_attn_bwd": (dict(grad_out=out, **qkv, out=out, lse=lse), (*dense, "deterministic")),
        "flash_attn_varlen": (tokens, rest),
        "flash_attn_varlen_fwd": (tokens, rest),
        "flash_attn_varlen_bwd": (
            dict(grad_out=packed_out[0], **tokens, out=packed_out[0], lse=packed_out[1]), (*rest, "deterministic"),
        ),
        "paged_attn": (pages, paged),
        "paged_attn_fwd": (pages, paged),
    }  # fmt: skip


def learnable(argument, device):
    """Of a value that the call would take; of the default where there is one, which no shortcut may drop."""
    value = {"alpha": 1, "beta": 1, "scale": 1, "diagonal": 0, "softcap": 0, "max_seqlen_q": 4, "max_seqlen_k": 4,
             "is_causal": 1, "deterministic": 1}.get(argument, -1)  # fmt: skip
    return torch.nn.Parameter(torch.tensor(float(value), device=device))


def ways_in(op):
    packet = getattr(ops, op)
    public = getattr(torch_gpukern, op, None)
    return [f for f in (public, packet, packet.default) if f is not None]


@pytest.mark.parametrize("op", calls("cpu"))
def test_a_number_that_wants_a_gradient_is_refused_by_name(op, device):
    call, numbers = calls(device)[op]
    schema = [str(a.type) for a in getattr(ops, op).default._schema.arguments]
    assert len(numbers) == sum(t in ("float", "Optional[float]", "int", "SymInt", "bool") for t in schema)
    for argument in numbers:
        for f in ways_in(op):
            with pytest.raises(ValueError) as error:
                f(**call | {argument: learnable(argument, device)})
            assert str(error.value) == (
                f"gpukern::{op}: {argument} is a number without a gradient, got a tensor that requires one; "
                f"pass {argument}.detach()"
            )


@pytest.mark.parametrize("op", ("gemm", "flash_attn", "flash_attn_varlen", "paged_attn"))
def test_it_is_refused_by_position_too_and_taken_without_a_gradient(op, device):
    call, numbers = calls(device)[op]
    argument = "alpha" if op == "gemm" else "scale"
    names = [a.name for a in getattr(ops, op).default._schema.arguments]
    defaults = [a.default_value for a in getattr(ops, op).default._schema.arguments]
    place = names.index(argument)
    args = [call.get(n, d) for n, d in zip(names[:place], defaults, strict=False)]
    number = torch.tensor(0.5, device=device, requires_grad=True)
    for f in ways_in(op):
        with pytest.raises(ValueError, match=f"^gpukern::{op}: {argument} is a number"):
            f(*args, number)
        want = f(*args, 0.5)
        assert torch.equal(f(*args, number.detach()), want)
        with torch.no_grad():  # no gradient is asked for, so none is lost
            assert torch.equal(f(*args, number), want)


def test_a_number_with_a_tangent_is_refused():
    x = torch.ones(1, 1, 4, 8)
    for f in ways_in("flash_attn"):
        with pytest.raises(ValueError, match="scale is a number without a gradient"):
            torch.func.jvp(lambda s, f=f: f(x, x, x, scale=s), (torch.tensor(1.0),), (torch.tensor(1.0),))
        with pytest.raises(ValueError, match="scale is a number without a gradient"):
            torch.func.grad(lambda s, f=f: f(x, x, x, scale=s).sum())(torch.tensor(1.0))


@pytest.mark.parametrize("fullgraph", (True, False))
def test_compiled_code_refuses_it_by_name(fullgraph):
    x, s = torch.ones(1, 1, 4, 8, requires_grad=True), torch.nn.Parameter(torch.tensor(1.0))
    for f in (torch_gpukern.flash_attn, ops.flash_attn.default):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, s, f=f: f(x, x, x, softcap=s), backend="aot_eager", fullgraph=fullgraph)
        with pytest.raises(Exception, match="softcap"):
            compiled(x, s)
    torch._dynamo.reset()
