# SPDX-License-Identifier: BSD-3-Clause
"""The ops on DTensors, in tensor-parallel layers and under FSDP2: two processes (gloo) against
one."""

import contextlib
import traceback

import pytest
import torch
import torch.nn.functional as F
from conftest import generator, processes, randn, run_python

import torch_gpukern as gk
from torch_gpukern import nn as gnn
from torch_gpukern.ops import parallel

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)


# ---- what both ranks do --------------------------------------------------------------------------


def on_mesh(mesh, placements, *tensors):
    """Leaves that require a gradient, distributed."""
    from torch.distributed.tensor import distribute_tensor

    made = [
        x if x is None else distribute_tensor(x.detach(), mesh, list(p))
        for x, p in zip(tensors, placements)
    ]
    return [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in made]


def same(call, plain, sharded, placement):
    """A call has the same result and gradients with leaves of this process and with DTensors. The
    result has the given placement."""
    for x in plain:
        if x is not None and x.is_floating_point():
            x.requires_grad_()
    found = []
    for leaves in (plain, sharded):
        out = call(*leaves)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        found.append((out, *torch.autograd.grad(out.square().sum(), wanted)))
    assert list(found[1][0].placements) == list(placement), (
        f"{found[1][0].placements}, expected {placement}"
    )
    for want, got in zip(*found):
        torch.testing.assert_close(got.full_tensor(), want)


def check_gemm_rows_columns_batch_and_k(mesh):
    from torch.distributed.tensor import Partial, Replicate, Shard

    gen, one = generator("gemm"), Replicate()
    a, b, bias = (randn(gen, *shape, dtype=torch.float64) for shape in ((4, 6, 8), (8, 10), (10,)))
    c = randn(gen, 4, 1, 10, dtype=torch.float64)
    for activation in ("none", "gelu"):
        k_result = Partial() if activation == "none" else one
        for where, result in (
            ((one, one, one, one), one),
            ((Shard(0), one, one, Shard(0)), Shard(0)),
            ((Shard(1), one, one, one), Shard(1)),
            ((one, Shard(1), Shard(0), Shard(2)), Shard(2)),
            ((Shard(2), Shard(0), one, one), k_result),
        ):
            rules = {"alpha": 0.5, "beta": 2.0, "activation": activation}
            call = lambda a, b, bias, c, rules=rules: gk.gemm(a, b, bias, c=c, **rules)  # noqa: E731
            same(
                call, [a, b, bias, c], on_mesh(mesh, [(p,) for p in where], a, b, bias, c), [result]
            )
    two = on_mesh(mesh, [(Shard(1),)] * 2, a, c.expand(4, 6, 10))
    # the sharded dimension is the first, so each rank's rows are one matrix
    rows = parallel.as_rows(*two)
    assert all(list(x.placements) == [Shard(0)] and x.shape[0] == 24 for x in rows)
    torch.testing.assert_close(
        (rows[0].mT @ rows[1]).full_tensor(), torch.einsum("abk,abn->kn", a, c.expand(4, 6, 10))
    )
    assert parallel.as_rows(two[0], on_mesh(mesh, [(Shard(0),)], a)[0]) is None
    batched = randn(gen, 4, 8, 10, dtype=torch.float64)
    same(gk.gemm, [a, batched], on_mesh(mesh, [(Shard(0),)] * 2, a, batched), [Shard(0)])
    three = randn(gen, 3, 6, 8, dtype=torch.float64)  # uneven parts
    same(gk.gemm, [three, b], on_mesh(mesh, [(Shard(0),), (one,)], three, b), [Shard(0)])
    # neither a batch of 1 nor an absent batch can be sharded
    one_row = randn(gen, 1, 6, 8, dtype=torch.float64)
    same(gk.gemm, [one_row, b], on_mesh(mesh, [(one,)] * 2, one_row, b), [one])


def check_what_a_rule_said_is_not_taken_for_another_call(mesh):
    """Cached rules must not be used for another call: K in parts without an activation, then relu
    with otherwise equal arguments; or c in the place of a bias."""
    from torch.distributed.tensor import Replicate, Shard

    gen = generator("cache")
    a, b, x = randn(gen, 6, 8), randn(gen, 8, 10), randn(gen, 10)
    A, B, X = on_mesh(mesh, [(Shard(1),), (Shard(0),), (Replicate(),)], a, b, x)
    for _ in range(2):
        for activation in ("none", "relu", "none", "silu"):
            got = torch.ops.gpukern.gemm(A, B, None, None, 1.0, 1.0, activation, None, "ieee")
            want = torch.ops.gpukern.gemm(a, b, None, None, 1.0, 1.0, activation, None, "ieee")
            torch.testing.assert_close(got.full_tensor(), want)
        for mine, theirs in (((X, None), (x, None)), ((None, X), (None, x))):
            got = torch.ops.gpukern.gemm(A, B, *mine, 1.0, 3.0, "none", None, "ieee")
            want = torch.ops.gpukern.gemm(a, b, *theirs, 1.0, 3.0, "none", None, "ieee")
            torch.testing.assert_close(got.full_tensor(), want)


def check_flash_attn_batch_and_heads(mesh):
    from torch.distributed.tensor import Replicate, Shard

    start = torch.tensor([0, 2], dtype=torch.int32)
    for heads_q, heads_kv in ((4, 2), (6, 3), (4, 1)):
        gen = generator("attention", heads_q)
        q, k, v = (
            randn(gen, 2, h, 5, 8, dtype=torch.float64) for h in (heads_q, heads_kv, heads_kv)
        )
        sinks = randn(gen, heads_q, dtype=torch.float64)
        for place in (Shard(0), Shard(1), Shard(2), Replicate()):
            if place == Shard(1) and heads_kv == 1:
                continue
            # 6 heads over 3 in two parts: rank 1 would read other heads' keys, so no part is
            # computed alone.
            alone = place == Shard(0) or (place == Shard(1) and heads_kv % 2 == 0)
            leaves = [(place,)] * 3 + [(Replicate(),)] * 2

            def call(q, k, v, sinks, start):
                return gk.flash_attn(q, k, v, is_causal=True, sinks=sinks, kv_start=start)

            plain = [q, k, v, sinks, start]
            same(call, plain, on_mesh(mesh, leaves, *plain), [place if alone else Replicate()])


def check_dropout_takes_no_shards(mesh):
    """If each rank computed its part alone, it would use the mask of the first rows."""
    from torch.distributed.tensor import Replicate, Shard

    gen, seed = generator("dropout"), torch.tensor([5, 1])
    plain = [randn(gen, 2, 4, 6, 8, dtype=torch.float64) for _ in range(3)] + [seed]
    call = lambda q, k, v, seed: gk.flash_attn(  # noqa: E731
        q, k, v, is_causal=True, dropout_p=0.5, dropout_seed=seed
    )  # noqa: E731
    for place in (Shard(0), Shard(1)):
        same(call, plain, on_mesh(mesh, [(place,)] * 3 + [(Replicate(),)], *plain), [Replicate()])


def check_flash_attn_varlen_heads(mesh):
    from torch.distributed.tensor import Replicate, Shard

    gen = generator("varlen")
    q, k, v = (randn(gen, 9, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)

    def call(q, k, v, cu):
        s = slopes if cu is plain[3] else on_mesh(mesh, [(Replicate(),)], slopes)[0].detach()
        return gk.flash_attn_varlen(q, k, v, cu, cu, 5, 5, is_causal=True, alibi_slopes=s)

    plain = [q, k, v, cu]
    same(call, plain, on_mesh(mesh, [(Shard(1),)] * 3 + [(Replicate(),)], *plain), [Shard(1)])


def check_dropout_keeps_what_one_process_keeps(mesh):
    """The mask follows from a row's number among all rows, so shards are gathered first. A seed
    must be given."""
    from torch.distributed.tensor import Replicate, Shard

    gen, one = generator("dropout"), Replicate()
    q, k, v = (randn(gen, 2, h, 5, 8, dtype=torch.float64) for h in (4, 2, 2))
    cu, seed = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([3, 7])

    def dense(q, k, v, cu, seed):
        return gk.flash_attn(q, k, v, is_causal=True, dropout_p=0.4, dropout_seed=seed)

    def packed(q, k, v, cu, seed):
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        return gk.flash_attn_varlen(q, k, v, cu, cu, 6, 6, dropout_p=0.4, dropout_seed=seed)

    for call in (dense, packed):
        for place in (Shard(0), Shard(1), one) if call is dense else (Shard(1), one):
            plain = [q, k, v, cu, seed]
            same(call, plain, on_mesh(mesh, [(place,)] * 3 + [(one,)] * 2, *plain), [one])
        with pytest.raises(ValueError, match="dropout_seed must be given where q is a DTensor"):
            call(*on_mesh(mesh, [(one,)] * 4, q, k, v, cu), None)


def check_decoding_over_heads(mesh):
    """Each rank writes and reads its heads. If the ranks do not divide the heads, or with other
    placements, tensors are gathered or the call is refused."""
    from torch.distributed.tensor import Replicate, Shard

    one = Replicate()
    for heads_q, heads_kv, placed, result in (
        (4, 2, True, Shard(1)),
        (4, 2, False, one),
        (6, 3, False, one),
    ):
        gen = generator("decode", heads_q)
        k, v = (randn(gen, 5, heads_kv, 8) for _ in range(2))
        caches = [torch.zeros(4, 4, heads_kv, 8) for _ in range(2)]
        q, sinks = randn(gen, 2, heads_q, 8), randn(gen, heads_q)
        slots = torch.tensor([9, 10, 0, -1, 1])
        table, lens = (
            torch.tensor([[0], [2]], dtype=torch.int32),
            torch.tensor([2, 3], dtype=torch.int32),
        )
        scale = torch.linspace(0.5, 2, heads_kv)
        at = lambda dim, placed=placed: (Shard(dim) if placed else one,)  # noqa: E731
        D = on_mesh(
            mesh, [at(1), at(1), at(2), at(2), at(1), (one,), (one,), (one,), (one,), (one,)],
            k, v, *caches, q, sinks, slots, table, lens, scale,
        )  # fmt: skip
        D = [x.detach() for x in D]

        def decode(k, v, k_cache, v_cache, q, sinks, slots, table, lens, scale):
            gk.kv_cache_write(k, v, k_cache, v_cache, slots, k_scale=scale)
            return gk.paged_attn(
                q, k_cache, v_cache, table, lens, sinks=sinks, k_scale=scale, return_lse=True
            )

        want = decode(k, v, *caches, q, sinks, slots, table, lens, scale)
        for call in (decode, torch.compile(decode, fullgraph=True, backend="aot_eager")):
            for x in D[2:4]:
                x.to_local().zero_()
            got = call(*D)
            for a, b in zip([*got, *D[2:4]], [*want, *caches], strict=True):
                torch.testing.assert_close(a.full_tensor(), b)
            assert list(got[0].placements) == [result]
        torch._dynamo.reset()
    sharded = D[2].redistribute(mesh, [Shard(0)])
    with pytest.raises(
        ValueError, match="must be DTensors that are replicated or sharded in dimension 2"
    ):
        gk.kv_cache_write(D[0], D[1], sharded, sharded, D[6])
    uneven = [x.redistribute(mesh, [Shard(2)]) for x in D[2:4]]
    with pytest.raises(ValueError, match="the 3 heads of k_cache are not a multiple"):
        gk.kv_cache_write(D[0], D[1], *uneven, D[6])
    with pytest.raises(ValueError, match="k must be a DTensor"):
        gk.kv_cache_write(k, v, *D[2:4], slots)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = gnn.Attention(32, 4, 2, bias=True)
        self.up, self.down = gnn.Linear(32, 64, activation="gelu"), gnn.Linear(64, 32)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.down(self.up(x))


def model(blocks):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(blocks))).double()


def step(net, x, to_full=lambda t: t):
    out = net(x)
    out.square().mean().backward()
    grads = {name.replace("_orig_mod.", ""): to_full(p.grad) for name, p in net.named_parameters()}
    return {"out": out.detach(), **grads}


def check_tensor_parallel_layers_and_fsdp2(mesh):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    x = randn(generator("block"), 4, 6, 32, dtype=torch.float64)
    plan = {f"attention.{p}_proj": ColwiseParallel() for p in "qkv"}
    plan |= {
        "attention.o_proj": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for shape, compiled in (((1, 2), False), ((2, 1), False), ((1, 2), True)):
        both = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        blocks = 1 if compiled else 2
        want, net = step(model(blocks), x), model(blocks)
        for block in net:
            parallelize_module(block, both["tensor"], plan)
            if not compiled:
                fully_shard(block, mesh=both["data"])
        if compiled:
            net = torch.compile(net, fullgraph=True, backend="aot_eager")
        else:
            fully_shard(net, mesh=both["data"])
        parts = shape[0]  # each rank has its rows, and the mean of means is the mean
        mine = x.chunk(parts)[both["data"].get_local_rank()]
        found = step(net, mine, lambda t: t.full_tensor() if isinstance(t, DTensor) else t)
        rows = [torch.empty_like(found["out"]) for _ in range(2)]
        dist.all_gather(rows, found["out"])
        found["out"] = torch.cat(rows) if parts == 2 else rows[0]
        assert found.keys() == want.keys()
        for name, ref in want.items():
            torch.testing.assert_close(
                found[name], ref, msg=lambda text, n=(shape, compiled, name): f"{n}: {text}"
            )


def check_context_parallel_refuses(mesh):
    from torch.distributed.tensor.experimental import context_parallel

    gen = generator("cp")
    q = randn(gen, 1, 2, 8, 8)
    part = q.clone()
    cu = torch.tensor([0, 2], dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    calls = {
        "flash_attn": lambda: gk.flash_attn(part, part, part, is_causal=True),
        "flash_attn_fwd": lambda: torch.ops.gpukern.flash_attn_fwd(part, part, part),
        "flash_attn_varlen": lambda: gk.flash_attn_varlen(*[part[0].mT] * 3, cu, cu, 2, 2),
        "paged_attn": lambda: gk.paged_attn(part[0], part, part, table, table[:, 0]),
        "paged_attn.out": lambda: torch.ops.gpukern.paged_attn.out(
            part[0], part, part, table, table[:, 0], out=part[0]
        ),
    }
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: gk.flash_attn(x, x, x), backend="aot_eager", fullgraph=True)
    compiled(q[..., :4, :].contiguous())
    with context_parallel(mesh, buffers=[part], buffer_seq_dims=[2]):
        assert part.shape[2] == 4
        for name, call in calls.items():
            with pytest.raises(
                ValueError, match=f"^gpukern::{name}: called inside torch's context_parallel"
            ):
                call()
        with pytest.raises((ValueError, RuntimeError), match="context_parallel"):
            compiled(part)  # also code that was compiled outside
        gk.gemm(part[0], part[0].mT)
    assert part.shape[2] == 8
    torch.testing.assert_close(
        gk.flash_attn(part, part, part), F.scaled_dot_product_attention(q, q, q)
    )


# ---- the two processes ---------------------------------------------------------------------------


def _work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    failed = []
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check(mesh)
            except BaseException:
                failed.append(f"{name}\n{traceback.format_exc()}")
                break  # the other rank may be waiting for this one
    with open(f"{folder}/{rank}", "w") as report:
        report.write("\n".join(failed))
    with contextlib.suppress(Exception):
        if not failed:
            dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path):
    context = processes()
    ranks = [
        context.Process(target=_work, args=(rank, str(tmp_path)), daemon=True) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    ranks[0].join(120)
    ranks[1].join(20)
    for rank in ranks:
        rank.kill()
    reports = [
        (tmp_path / str(i)).read_text() if (tmp_path / str(i)).exists() else "no report"
        for i in range(2)
    ]
    assert reports == ["", ""], "\n\n".join(reports)


def test_rules_of_many_ranks_in_one_process():
    """torch simulates two, four and eight ranks. Every rank has its part of the result of one
    process."""
    pytest.importorskip("torch.distributed._local_tensor")
    run_python("""
        import torch, torch.distributed as dist
        import torch_gpukern as gk
        from torch.distributed._local_tensor import LocalTensorMode
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        gen, one = torch.Generator().manual_seed(0), Replicate()
        def randn(*shape):
            return torch.randn(*shape, generator=gen, dtype=torch.float64)

        a, b = randn(16, 24), randn(24, 32)
        q, k, v = randn(8, 16, 5, 8), randn(8, 8, 5, 8), randn(8, 8, 5, 8)
        product, attention = gk.gemm(a, b), gk.flash_attn(q, k, v, is_causal=True)
        for ranks in (2, 4, 8):
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
            with LocalTensorMode(ranks):
                mesh = init_device_mesh("cpu", (ranks,))
                def at(place, *tensors):
                    return [distribute_tensor(x, mesh, [p]) for x, p in zip(tensors, place)]

                for place, result in (((Shard(0), one), Shard(0)), ((one, Shard(1)), Shard(1)), ((Shard(1), Shard(0)), None)):
                    got = gk.gemm(*at(place, a, b))
                    assert got.placements[0].is_partial() if result is None else got.placements[0] == result
                    for rank, x in got.full_tensor()._local_tensors.items():
                        torch.testing.assert_close(x, product)
                for place in (Shard(0), Shard(1)):
                    got = gk.flash_attn(*at([place] * 3, q, k, v), is_causal=True)
                    assert got.placements[0] == place
                    for rank, x in got.to_local()._local_tensors.items():
                        torch.testing.assert_close(x, attention.chunk(ranks, place.dim)[rank])
            dist.destroy_process_group()
        """)  # noqa: E501


def test_nothing_of_it_is_imported():
    run_python("""
        import sys, torch
        before = "torch.distributed.tensor" in sys.modules
        import torch_gpukern
        x = torch.randn(1, 2, 8, 8, requires_grad=True)
        torch_gpukern.flash_attn(x, x, x).sum().backward()
        assert ("torch.distributed.tensor" in sys.modules) == before
        assert "torch_gpukern.integrations.distributed" not in sys.modules
    """)
