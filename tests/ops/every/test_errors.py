# SPDX-License-Identifier: BSD-3-Clause
"""Invalid input: the exact type and text of errors, nothing written, no crash."""

import json
import re

import pytest
import torch
from conftest import ops, run_python, snapshot, torch_gpukern
from registry import (
    BF16,
    F64,
    IN_PLACE,
    INDEX_ERRORS,
    OPS,
    VALUE_ERRORS,
    VARIANTS,
    dense,
    paged,
    t,
    write,
)

ids = [f"{op}: {text}" for op, _, text in VALUE_ERRORS + INDEX_ERRORS]
cases = [(*c, ValueError) for c in VALUE_ERRORS] + [(*c, IndexError) for c in INDEX_ERRORS]


def test_the_good_calls_are_good():
    """The unchanged calls are valid, so each line of the table tests only its change."""
    for name, op in OPS.items():
        getattr(ops, name)(**op.make())


@pytest.mark.parametrize("op,kwargs,text,error", cases, ids=ids)
def test_error(op, kwargs, text, error):
    """The exact type and text of each error; no argument has changed."""
    unchanged = snapshot(**kwargs)
    with pytest.raises(error) as caught:
        getattr(ops, op)(**kwargs)
    assert type(caught.value) is error
    assert str(caught.value) == f"gpukern::{op}: {text}"
    unchanged()


@pytest.mark.parametrize(
    "op,kwargs,text,error", [c for c in cases if c[0] in OPS and OPS[c[0]].raw][::5]
)
def test_other_doors_say_the_same(op, kwargs, text, error):
    """The raw op, the public function, explain, and a call with gradients raise the same error."""
    doors = [getattr(ops, OPS[op].raw), getattr(torch_gpukern, op)]
    if error is ValueError:
        doors.append(getattr(ops, f"explain_{op}"))
    for door in doors:
        with pytest.raises(error, match=re.escape(f"gpukern::{op}: {text}")):
            door(**kwargs)
    leaf = {
        n: x.detach().requires_grad_() if n in ("a", "q") and x.is_floating_point() else x
        for n, x in kwargs.items()
    }
    if OPS[op].gradients:
        with pytest.raises(error, match=re.escape(f"gpukern::{op}: {text}")):
            getattr(ops, op)(**leaf)


def backward_args(**change):
    q, k, v = (x for x in dense().values())
    out, lse = ops.flash_attn_fwd(q, k, v)
    return dict(grad_out=torch.ones_like(out), q=q, k=k, v=v, out=out, lse=lse) | change


@pytest.mark.parametrize("change,text", [
    (dict(grad_out=t(2, 4, 5, 8)), "grad_out must have shape [2, 4, 5, 16], got [2, 4, 5, 8]"),
    (dict(grad_out=t(2, 4, 5, 16, dtype=BF16)), "grad_out has dtype bfloat16, q has float32; they "
                                                "must match"),
    (dict(out=t(2, 4, 6, 16)), "out must have shape [2, 4, 5, 16], got [2, 4, 6, 16]"),
    (dict(lse=t(2, 5, 4)), "lse must have shape [2, 4, 5], got [2, 5, 4]"),
    (dict(lse=t(2, 4, 5, dtype=F64)), "lse must be float32, got float64"),
    (dict(grad_lse=t(2, 4)), "grad_lse must have shape [2, 4, 5], got [2, 4]"),
    (dict(window_left=-9), "window_left must be -1 (unbounded), 0 or more, got -9"),
    (dict(sinks=t(5)), "sinks must have shape [4], got [5]"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_backward_errors(change, text):
    with pytest.raises(ValueError) as caught:
        ops.flash_attn_bwd(**backward_args(**change))
    assert str(caught.value) == f"gpukern::flash_attn_bwd: {text}"


def test_overlapping_caches_are_refused():
    """Caches may be views of one tensor, but must not share memory."""
    both = torch.zeros(5, 2, 4, 2, 8)
    good = write(v=t(3, 2, 8), k_cache=both[:, 0], v_cache=both[:, 1])
    ops.kv_cache_write(**good)
    assert both[0, 0, 0].eq(1).all() and both[4, 1, 3].eq(1).all()
    heads = torch.zeros(5, 4, 4, 8)
    ops.kv_cache_write(**write(v=t(3, 2, 8), k_cache=heads[:, :, :2], v_cache=heads[:, :, 2:]))
    lanes = torch.zeros(5, 4, 2, 16)
    ops.kv_cache_write(**write(v=t(3, 2, 8), k_cache=lanes[..., ::2], v_cache=lanes[..., 1::2]))
    assert lanes[0, 0].eq(1).all()
    text = "gpukern::kv_cache_write: v_cache overlaps k_cache; they may be views of one tensor but must not share memory"  # noqa: E501
    for k_cache, v_cache in (
        (both[:, 0], both[:, 0]),
        (both.view(-1)[:320].view(5, 4, 2, 8), both.view(-1)[8:328].view(5, 4, 2, 8)),
    ):
        unchanged = snapshot(both)
        with pytest.raises(ValueError) as caught:
            ops.kv_cache_write(**write(v=t(3, 2, 8), k_cache=k_cache, v_cache=v_cache))
        assert str(caught.value) == text
        unchanged()
    with pytest.raises(ValueError, match="gpukern::kv_cache_write: k_cache"):
        ops.kv_cache_write(**write(k_cache=torch.zeros(1, 4, 2, 8).expand(5, 4, 2, 8)))


def test_a_read_only_cache_of_stride_zero_is_fine():
    cache = torch.ones(1, 4, 2, 8)
    ops.paged_attn(**paged(k_cache=cache.expand(5, 4, 2, 8), v_cache=cache.expand(5, 4, 2, 8)))


# every tensor after the first, in a call that has it
TENSORS = {
    (name, argument): op.make(**change)
    for name, op in OPS.items()
    for change in op.variants.values()
    for argument, x in list(op.make(**change).items())[1:]
    if isinstance(x, torch.Tensor)
}


@pytest.mark.gpu
@pytest.mark.parametrize("op,argument", TENSORS)
def test_tensors_on_two_devices(op, argument):
    kwargs = TENSORS[op, argument]
    first = next(iter(kwargs))
    moved = {
        n: x.cuda() if isinstance(x, torch.Tensor) and n != argument else x
        for n, x in kwargs.items()
    }
    with pytest.raises(ValueError) as caught:
        getattr(ops, op)(**moved)
    assert (
        str(caught.value)
        == f"gpukern::{op}: {argument} is on cpu, {first} is on cuda:0; they must be on one device"
    )


@pytest.mark.parametrize("op,kwargs", [(name, op.make()) for name, op in OPS.items()], ids=OPS)
def test_one_tensor_on_meta_beside_the_cpu(op, kwargs):
    """Each argument on meta gives an error, never a crash."""
    tensors = [name for name, x in kwargs.items() if isinstance(x, torch.Tensor)]
    for name, x in kwargs.items():
        if name in tensors and len(tensors) > 1:
            with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
                getattr(ops, op)(**kwargs | {name: x.to("meta")})


@pytest.mark.parametrize("op,variant", [(n, v) for n, v in VARIANTS if n not in IN_PLACE])
def test_meta(op, variant):
    """With all tensors on meta, results have the right shapes and dtypes."""
    kwargs = OPS[op].make(**OPS[op].variants[variant])
    moved = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
    got, want = getattr(ops, op)(**moved), getattr(ops, op)(**kwargs)
    for x, y in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want))):
        assert x.is_meta and x.shape == y.shape and x.dtype == y.dtype and x.stride() == y.stride()


# what a result's shape and dtype follow from
FAKE = [
    (op, kwargs, text)
    for op, kwargs, text in VALUE_ERRORS
    if op in OPS.keys() - IN_PLACE
    and text.split()[0]
    in (
        "a",
        "b",
        "q",
        "k",
        "v",
        "k_cache",
        "v_cache",
        "block_table",
        "seq_lens",
        "out_b",
        "lse_a",
        "lse_b",
    )
    and not re.search("it must be 1 |at most 8|must broadcast|tokens must be a multiple", text)
]


@pytest.mark.parametrize("op,kwargs,text", FAKE, ids=[f"{op}: {text}" for op, _, text in FAKE])
def test_fake_functions_refuse_the_same(op, kwargs, text):
    """Tracing a compiled model with a wrong shape raises the same error."""
    moved = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
    with pytest.raises(ValueError) as caught:
        getattr(ops, op)(**moved)
    assert str(caught.value) == f"gpukern::{op}: {text}"


HOSTILE = """
import json, os, sys
import torch
import torch_gpukern
from registry import OPS

class Plain(torch.Tensor):
    pass

class Logged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})

def wrapper():
    from torch.testing._internal.two_tensor import TwoTensor
    return lambda x: TwoTensor(x, x.clone())

def sparse_csr(x):
    return x.reshape(-1, x.shape[-1]).to_sparse_csr()

kinds = {
    "int8": lambda x: x.to(torch.int8), "int64": lambda x: x.long(), "bool": lambda x: x.bool(), "uint16": lambda x: x.to(torch.uint16),
    "complex64": lambda x: x.to(torch.complex64), "complex32": lambda x: x.to(torch.complex32),
    "float8": lambda x: x.to(torch.float8_e5m2), "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
    "sparse_coo": lambda x: x.to_sparse(), "sparse_csr": sparse_csr, "mkldnn": lambda x: x.float().to_mkldnn(),
    "meta": lambda x: x.to("meta"), "zero_dim": lambda x: x.reshape(-1)[0], "nine_dims": lambda x: x.reshape((1,) * (9 - x.dim()) + x.shape),
    "no_elements": lambda x: x[:0], "conj": lambda x: x.to(torch.complex64).conj(), "neg_view": lambda x: torch._neg_view(x),
    "nested": lambda x: torch.nested.nested_tensor([x, x]), "subclass": lambda x: x.as_subclass(Plain), "function": lambda x: x.as_subclass(Logged),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False), "buffer": lambda x: torch.nn.Buffer(x), "wrapper": wrapper(),
    "zero_tensor": lambda x: torch._efficientzerotensor(x.shape), "freed": lambda x: freed(x), "batched": None,
}

def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x

def run(name, make):
    op = getattr(torch.ops.gpukern, name)
    for kind, turn in kinds.items():
        for argument, value in make().items():
            if not isinstance(value, torch.Tensor):
                continue
            print("START", name, argument, kind, flush=True)
            try:
                if turn is None:
                    result = torch.vmap(lambda x: op(**make(**{argument: x})))(value[None])
                else:
                    try:
                        bad = turn(value)
                    except Exception as error:
                        print("SKIP", json.dumps([name, argument, kind]), flush=True)
                        continue
                    result = op(**make(**{argument: bad}))
            except Exception as error:
                print("DONE", json.dumps([name, argument, kind, type(error).__name__, str(error)]), flush=True)
            else:
                print("DONE", json.dumps([name, argument, kind, None, None]), flush=True)
    print("END")

for name, entry in OPS.items():  # a process for each, which has all that is imported
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            run(name, entry.make)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    print("EXIT", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    import torch._dynamo  # which some kinds import: the first op meets them without, the others need not import it each
"""  # noqa: E501


@pytest.fixture(scope="module")
def hostile():
    """For each op the lines that its process printed. The last one is its exit code."""
    lines, found = run_python(HOSTILE).stdout.splitlines(), []
    while lines:
        end = next(i for i, line in enumerate(lines) if line.startswith("EXIT ")) + 1
        found.append(lines[:end])
        lines = lines[end:]
    return dict(zip(OPS, found, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_hostile_tensors_never_crash(hostile, name):
    """Integer, complex, sparse, quantized, meta, nested, freed and subclass inputs in every place,
    in a process of their own."""
    *lines, code = hostile[name]
    assert lines[-1:] == ["END"] and code == "EXIT 0", f"{code} after {lines[-1:]}"
    results = [json.loads(line[5:]) for line in lines if line.startswith("DONE ")]
    tried = [line for line in lines if line.startswith("START ")]
    skipped = [line for line in lines if line.startswith("SKIP ")]
    tensors = sum(isinstance(x, torch.Tensor) for x in OPS[name].make().values())
    assert len(results) + len(skipped) == len(tried) == 26 * tensors, (
        "26 kinds in the place of every tensor"
    )
    assert len(skipped) <= 3 * tensors, f"torch itself refused to make {skipped}"
    silent = (
        "subclass",
        "function",
        "parameter",
        "buffer",
        "no_elements",
        "wrapper",
        "neg_view",
        "zero_tensor",
        "meta",
        "zero_dim",
        "nine_dims",
        "batched",
    )
    for op, argument, kind, error, text in results:
        floating = argument not in (
            "block_table",
            "seq_lens",
            "slots",
            "cu_seqlens_q",
            "cu_seqlens_k",
            "target",
            "seed",
            "place",
        )
        if kind in ("subclass", "function", "parameter", "buffer"):
            assert error is None, f"{op}: {argument} as {kind} raised {error}: {text}"
        if error is None and (
            floating or kind.startswith(("sparse", "mkldnn", "nested", "complex"))
        ):
            valid = kind == "int64" and argument in (
                "slots",
                "positions",
                "target",
                "seed",
                "place",
            )
            assert kind in silent or valid, f"{op}: {argument} as {kind} was taken without a word"
        if error is not None:
            assert error not in ("SystemError", "MemoryError"), (
                f"{op}: {argument} as {kind}: {error}: {text}"
            )


def test_results_of_subclasses_and_views():
    """Lazy conj and neg bits and zero tensors give values, not memory."""
    x = torch.randn(4, 4)
    neg = torch._neg_view(x)
    assert torch.allclose(ops.gemm(neg, x), -(x @ x), atol=1e-5)
    zero = torch._efficientzerotensor((4, 4))
    assert torch.equal(ops.gemm(zero, x), torch.zeros(4, 4))
    inferred = torch.nn.Parameter(x)
    assert torch.allclose(ops.gemm(inferred, x), x @ x, atol=1e-5)


def test_check_errors_has_nothing_to_say_on_the_cpu():
    with pytest.raises(IndexError):
        ops.kv_cache_write(**write(slots=torch.tensor([99, 0, 0])))
    assert torch_gpukern.check_errors() is None
    assert ops.check_errors() in (None, ())


def test_unknown_arguments_are_refused():
    """Arguments that only SDPA has raise an error; they are never ignored."""
    for name in ("attn_mask", "dropout", "bias"):
        with pytest.raises((TypeError, RuntimeError), match=name):
            ops.flash_attn(**dense(), **{name: None})
    for name in ("attention_mask", "dropout"):
        with pytest.raises(TypeError, match=name):
            torch_gpukern.flash_attn(**dense(), **{name: None})


def test_out_of_memory_keeps_its_text():
    """The error of a failed allocation names the op and says that there is no memory."""
    a, b = torch.ones(1, 1).expand(2**22, 1), torch.ones(1, 1).expand(1, 2**22)
    with pytest.raises(RuntimeError) as caught:
        ops.gemm(a, b)
    text = str(caught.value)
    assert text.startswith("gpukern::gemm: ") and "memory" in text.lower(), text


def test_messages_name_no_source_file():
    """No build path, no line number."""
    for op, kwargs, _, _ in cases[::7]:
        with pytest.raises((ValueError, IndexError)) as caught:
            getattr(ops, op)(**kwargs)
        assert not re.search(r"\.(cpp|c|h|py)\b|/(?! )", str(caught.value))
