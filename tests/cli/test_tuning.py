# SPDX-License-Identifier: BSD-3-Clause
"""Tuned instances: their file, its use at import, the command line, and on a GPU the calls that run
them."""

import contextlib
import io
import json
import os
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch
from conftest import (
    assert_close_as,
    f64,
    generator,
    ops,
    randn,
    reference,
    run_python,
    same_bits,
    torch_gemm,
    torch_gpukern,
)

from torch_gpukern.cli import main
from torch_gpukern.tuning import cache, gemm, timing

KERNELS = ops.cuda_kernels().split(",")
VERSION = torch_gpukern.__version__
GPU = "A GPU that is nowhere"
BF16_ROW = "gemm_sm80_bf16_64x64x64"
with_kernels = pytest.mark.skipif(
    BF16_ROW not in KERNELS, reason="the library is built without CUDA kernels"
)


def class_of(m=32, n=48, k=64, layout="NN", dtype="bfloat16"):
    return f"{m}x{n}x{k}:{layout} batch=1 dtype={dtype} out={dtype} precision=ieee activation=none c=0 preact=0 aligned=abo"  # noqa: E501


def stored(entries=None, device=GPU, version=VERSION, **top):
    """The text of a valid file, or of one with a test's changes."""
    return {
        "format": 1,
        "devices": {
            device: {"gpukern": version, "gemm": entries or {class_of(): {"row": BF16_ROW}}}
        },
    } | top


@pytest.fixture(autouse=True)
def _nothing_preferred():
    """Removes preferred instances, which are process state."""
    yield
    ops.gemm_prefer_none()
    cache._warned.clear()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuned.json"


def used(path):
    """(the number of entries that the library took, the warnings)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        taken = cache.use(path)
    return taken, [str(w.message) for w in caught]


# --------------------------------------------------------------------------------------------------
# where the file is


def test_the_file_follows_the_environment(monkeypatch):
    monkeypatch.delenv("GPUKERN_TUNED", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert cache.default_path() == Path("/some/cache/gpukern/tuned.json")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.default_path() == Path("/home/someone/.cache/gpukern/tuned.json")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.default_path() == Path("/home/someone/Library/Caches/gpukern/tuned.json")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    assert cache.default_path() is None
    monkeypatch.setenv("GPUKERN_TUNED", "here.json")
    assert cache.default_path() == Path("here.json")
    for word in ("off", "OFF"):
        monkeypatch.setenv("GPUKERN_TUNED", word)
        assert cache.default_path() is None and cache.use() == 0


# --------------------------------------------------------------------------------------------------
# what is in it


@with_kernels
def test_a_good_file_is_used_without_a_word(path):
    path.write_text(
        json.dumps(
            stored({class_of(): {"row": BF16_ROW}, class_of(m=7): {"row": BF16_ROW, "us": 1.5}})
        )
    )
    assert used(path) == (2, [])
    assert used(path.with_name("none.json")) == (0, [])


WHOLE_FILE = {
    "empty": (b"", "it is not JSON"),
    "cut off": (json.dumps(stored()).encode()[:-9], "it is not JSON"),
    "binary": (bytes(range(256)), "it is not JSON"),
    "not utf-8": (b'{"format": 1, "devices": {"\xff": 3}}', "it is not JSON"),
    "nested for ever": (b"[" * 200_000, "it is not JSON"),
    "a list": (b"[1, 2]", "it is not of format 1"),
    "null": (b"null", "it is not of format 1"),
    "another format": (json.dumps(stored(format=2)).encode(), "it is not of format 1"),
    "no devices": (b'{"format": 1}', "it has no devices"),
    "a list of devices": (b'{"format": 1, "devices": []}', "it has no devices"),
}
ONE_DEVICE = {
    "a device that is a number": (stored(devices={GPU: 3}), "has no entries for gemm"),
    "no gemm": (stored(devices={GPU: {"gpukern": VERSION}}), "has no entries for gemm"),
    "a list of entries": (
        stored(devices={GPU: {"gpukern": VERSION, "gemm": []}}),
        "has no entries for gemm",
    ),
    "another version": (
        stored(version="0.0.9"),
        f"was measured by gpukern 0.0.9, this is {VERSION}",
    ),
    "no version": (stored(version=None), f"was measured by gpukern None, this is {VERSION}"),
    "a row of tomorrow": (
        stored({class_of(): {"row": "gemm_tomorrow"}}),
        "instance 'gemm_tomorrow' does not exist",
    ),
    "another op's row": (
        stored({class_of(): {"row": "attn_merge"}}),
        "instance 'attn_merge' does not exist",
    ),
    "a row of another dtype": (
        stored({class_of(dtype="float16"): {"row": BF16_ROW}}),
        "the class for float16",
    ),
    "not a class": (stored({"32x48": {"row": BF16_ROW}}), "'32x48' is not a class of gemm calls"),
    "a class that no one writes": (
        stored({class_of() + "\0": {"row": BF16_ROW * 90}}),
        "does not exist",
    ),
    "a surrogate": (stored({"\ud800": {"row": BF16_ROW}}), "that this library refuses"),
    "an entry that is a string": (stored({class_of(): BF16_ROW}), "has 1 entries without a row"),
    "a row that is a number": (stored({class_of(): {"row": 3}}), "has 1 entries without a row"),
    "an empty row": (stored({class_of(): {"row": ""}}), "has 1 entries without a row"),
}


@with_kernels
@pytest.mark.parametrize("name", WHOLE_FILE)
def test_a_damaged_file_is_reported_once_and_not_used(path, name):
    content, words = WHOLE_FILE[name]
    path.write_bytes(content)
    taken, texts = used(path)
    assert taken == 0 and len(texts) == 1 and "\n" not in texts[0]
    assert texts[0].startswith(f"torch_gpukern: tuned kernels in {path} are not used: {words}")
    assert texts[0].endswith(": run `python -m torch_gpukern tune gemm` again, or delete the file")
    assert used(path) == (0, [])


@with_kernels
@pytest.mark.parametrize("name", ONE_DEVICE)
def test_what_is_wrong_with_one_device_spares_the_others(path, name):
    content, words = ONE_DEVICE[name]
    content["devices"]["Another"] = stored()["devices"][GPU]
    path.write_text(json.dumps(content))
    taken, texts = used(path)
    assert (
        taken == 1
        and len(texts) == 1
        and "\n" not in texts[0]
        and f" are not used: {GPU} " in texts[0]
    )
    assert words in texts[0] and "Another" not in texts[0]
    assert used(path) == (1, [])


@with_kernels
def test_a_file_that_cannot_be_read(path, tmp_path):
    path.mkdir()
    (tmp_path / "file").touch()
    for bad in (path, tmp_path / "file" / "tuned.json"):
        taken, texts = used(bad)
        assert taken == 0 and len(texts) == 1 and "it cannot be read (" in texts[0]


@with_kernels
def test_a_file_that_was_named_and_is_not_there(path, monkeypatch):
    monkeypatch.setenv("GPUKERN_TUNED", str(path))
    taken, texts = used(None)
    assert (
        taken == 0
        and len(texts) == 1
        and f"{path} are not used: GPUKERN_TUNED names it" in texts[0]
    )
    assert texts[0].endswith("to make it, or unset GPUKERN_TUNED")
    cache._warned.clear()
    # sys.argv as it is during the import
    monkeypatch.setattr(sys, "argv", ["-m", "tune", "gemm", "--shapes", "8x8x8"])
    assert used(None) == (0, [])


# --------------------------------------------------------------------------------------------------
# import


def imported(code="", **env):
    """The standard error of a process that imports the package."""
    env = {"XDG_CACHE_HOME": "/nowhere", "GPUKERN_TUNED": "", **env}
    return run_python(
        f"import torch, torch_gpukern\nassert not "
        f"torch.cuda.is_initialized()\n{textwrap.dedent(code)}",
        env=env,
    ).stderr


@with_kernels
def test_import_reads_the_file_and_warns_once(tmp_path):
    file = tmp_path / "gpukern" / "tuned.json"
    file.parent.mkdir()
    file.write_text(json.dumps(stored()))
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    again = "from torch_gpukern.tuning import cache\nassert cache.use() == "
    assert imported(again + "1", **home) == ""
    assert imported(again + "1", GPUKERN_TUNED=str(file)) == ""
    file.write_text("{")
    text = imported(again + "0", **home)
    assert (
        text.count("torch_gpukern: tuned kernels in") == 1
        and f"{file} are not used: it is not JSON" in text
    )
    assert imported(again + "0", **home, GPUKERN_TUNED="off") == ""


@pytest.mark.skipif(BF16_ROW in KERNELS, reason="the library is built with CUDA kernels")
def test_a_build_without_cuda(path):
    path.write_text("{")
    assert used(path) == (0, [])
    with pytest.raises(
        ValueError, match="gpukern::gemm_prefer: this library was built without CUDA kernels"
    ):
        ops.gemm_prefer(GPU, class_of(), BF16_ROW)
    assert run_cli("tune", "gemm", "--shapes", "8x8x8") == (
        1,
        "",
        "tune: this build of gpukern has no CUDA kernels\n",
    )


@with_kernels
@pytest.mark.parametrize("args,text", [
    ((GPU, class_of(), "gemm_tomorrow"), "instance 'gemm_tomorrow' does not exist in this library; "
                                         "gk_cuda_kernels() names those that do"),
    ((GPU, class_of(dtype="float32"), BF16_ROW), f"instance '{BF16_ROW}' is for bfloat16, the class "
                                                 f"for float32"),
    ((GPU, "32x48", BF16_ROW), "'32x48' is not a class of gemm calls as gk_gemm_class writes it"),
    (("", class_of(), BF16_ROW), "device or gemm_class is missing"),
])  # fmt: skip
def test_the_library_refuses(args, text):
    with pytest.raises(ValueError) as caught:
        ops.gemm_prefer(*args)
    assert str(caught.value) == f"gpukern::gemm_prefer: {text}"


# --------------------------------------------------------------------------------------------------
# writing


def test_entries_of_others_stay(path):
    cache.save(path, GPU, {"x": {"row": "r"}, "y": {"row": "s"}})
    cache.save(path, "Another", {"x": {"row": "t"}})
    cache.save(path, GPU, {"x": {"row": "u"}, "y": None, "z": None})
    want = {
        GPU: {"gpukern": VERSION, "gemm": {"x": {"row": "u"}}},
        "Another": {"gpukern": VERSION, "gemm": {"x": {"row": "t"}}},
    }
    assert cache.read(path) == (want, "") and os.listdir(path.parent) == [path.name]


def test_what_is_stale_or_damaged_makes_way(path):
    path.write_text(json.dumps(stored(version="0.0.9")))
    cache.save(path, "Another", {"x": {"row": "t"}})
    assert cache.read(path)[0][GPU]["gpukern"] == "0.0.9"
    cache.save(path, GPU, {"x": {"row": "t"}})
    assert cache.entries_of(cache.read(path)[0][GPU]) == ({"x": {"row": "t"}}, "")
    path.write_text("{")
    cache.save(path, GPU, {"x": {"row": "t"}})
    assert list(cache.read(path)[0]) == [GPU]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError):
        cache.save(tmp_path / "file" / "tuned.json", GPU, {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        cache.save(tmp_path / "folder", GPU, {})
    assert (
        sorted(os.listdir(tmp_path)) == ["file", "folder"]
        and (tmp_path / "file").read_text() == "kept"
    )
    if os.getuid() != 0:  # root can write everything
        (tmp_path / "folder").chmod(0o500)
        with pytest.raises(PermissionError):
            cache.save(tmp_path / "folder" / "tuned.json", GPU, {})


def test_a_write_that_fails_leaves_the_old_file(path, monkeypatch):
    cache.save(path, GPU, {"x": {"row": "t"}})
    before = path.read_bytes()

    def disk_full(value, file, **_):
        file.write('{"format": 1, "dev')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.json, "dump", disk_full)
    with pytest.raises(OSError, match="No space left"):
        cache.save(path, GPU, {"y": {"row": "t"}})
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_writers_at_once_lose_nothing_and_readers_see_whole_files(path):
    cache.save(path, GPU, {"first": {"row": "t"}})
    done = run_python(f"""
        import os
        from pathlib import Path
        from torch_gpukern.tuning import cache

        path, gpu, writers = Path({str(path)!r}), {GPU!r}, []
        for number in range(4):
            if not (child := os.fork()):
                for i in range(25):
                    cache.save(path, gpu, {{f"{{number}} {{i}}": {{"row": "t" * 500}}}})
                os._exit(0)
            writers.append(child)
        reads = 0
        while writers:
            devices, problem = cache.read(path)
            assert not problem and "first" in devices[gpu]["gemm"]
            reads += 1
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended:
                assert status == 0
                writers.remove(ended)
        print(reads)
    """)
    assert int(done.stdout) > 10
    names = {f"{number} {i}" for number in range(4) for i in range(25)} | {"first"}
    assert set(cache.read(path)[0][GPU]["gemm"]) == names and os.listdir(path.parent) == [path.name]


# --------------------------------------------------------------------------------------------------
# problems, the judge, the command line


def test_shapes():
    assert gemm.parse_shape("512x28672x4096:NT") == {
        "m": 512,
        "n": 28672,
        "k": 4096,
        "layout": "NT",
        "batch": 1,
    }
    assert gemm.parse_shape("8x1x2x3") == {"m": 1, "n": 2, "k": 3, "layout": "NN", "batch": 8}
    for text in (
        "",
        "1x2",
        "1x2x3x4x5",
        "0x2x3",
        "1x2x3:NX",
        "1x2x3:N",
        "-1x2x3",
        "axbxc",
        " 1x2x3",
        "1x2x3:NT ",
    ):
        with pytest.raises(ValueError, match="is not MxNxK"):
            gemm.parse_shape(text)


def test_classes_are_problems_again():
    assert gemm.parse_class(class_of(layout="TN")) == gemm.Problem(32, 48, 64, "TN")
    text = "9x5x7:NT batch=3 dtype=float16 out=float32 precision=ieee activation=silu c=1 preact=1 aligned=---"
    want = gemm.Problem(
        9, 5, 7, "NT", 3, "float16", "float32", activation="silu", c=True, preact=True
    )
    assert (
        gemm.parse_class(text) == want
        and str(want) == "3x9x5x7:NT float16 c preact silu to float32"
    )
    for text in (
        "",
        "32x48",
        class_of(layout="SN"),
        class_of().replace("c=0", "c"),
        class_of().replace("batch=1", ""),
    ):
        assert gemm.parse_class(text) is None


@pytest.mark.parametrize("layout", ("NN", "NT", "TN", "TT"))
@pytest.mark.parametrize("batch", (1, 3))
def test_problems_are_the_calls_that_they_say(layout, batch):
    problem = gemm.Problem(5, 7, 9, layout, batch, "float32", activation="gelu", bias=True, c=True)
    inputs = problem.inputs(torch.device("cpu"))
    a, b = inputs["a"], inputs["b"]
    assert (
        a.shape[-2:] == (5, 9)
        and b.shape[-2:] == (9, 7)
        and a.dim() == b.dim() == (3 if batch > 1 else 2)
    )
    assert (a.stride(-1) == 1) == (layout[0] == "N") and (b.stride(-1) == 1) == (layout[1] == "N")
    exact = reference.gemm(
        f64(a), f64(b), f64(inputs["bias"]), c=f64(inputs["c"]), activation="gelu"
    )
    torch.testing.assert_close(problem.torch(inputs, torch.float64), exact)
    torch.testing.assert_close(problem.ours(inputs), problem.torch(inputs))
    assert same_bits(
        gemm.Problem(5, 7, 9, layout, batch, "float32", activation="gelu", preact=True).ours(
            inputs | {"bias": None, "c": None}
        ),
        ops.gemm(a, b, activation="gelu"),
    )


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_the_judge(dtype):
    problem = gemm.Problem(64, 48, 256, dtype=dtype)
    inputs = problem.inputs(torch.device("cpu"))
    judge, out = gemm.Judge(problem, inputs), problem.ours(inputs)
    # As in tune(). For some draws of these inputs, PyTorch's largest error is less than half of ours by
    # luck; the root-mean-square error is not.
    assert gemm.Judge(problem, inputs).takes_as_default(out) and judge.accepts(
        problem.torch(inputs)
    )
    assert gemm.errors_of(out, judge.exact)[1] <= judge.bounds[1]
    one_wrong = out.clone()
    one_wrong[3, 5] += out.abs().max() / 8
    assert (
        not judge.accepts(one_wrong)
        and not judge.accepts(torch.zeros_like(out))
        and not judge.accepts(out.mT.reshape(64, 48))
    )
    assert not judge.takes_as_default(one_wrong)
    one_wrong[3, 5] = torch.nan
    assert not judge.accepts(one_wrong) and not judge.takes_as_default(one_wrong)
    # The default instance's order of sums may err more than twice as much as PyTorch's. Then the other
    # instances may err as much as it, but not more.
    exact, between, worse = (judge.exact.to(out.dtype, copy=True) for _ in range(3))
    between[3, 5] += 5 * judge.own[0] + judge.rounding
    worse[3, 5] += 10 * judge.own[0] + 3 * judge.rounding
    assert judge.accepts(exact) and not judge.accepts(between)
    assert judge.takes_as_default(between) and judge.accepts(between) and not judge.accepts(worse)


def run_cli(*args):
    """Exit status, standard output, standard error."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main(args)
    return status, out.getvalue(), err.getvalue()


def test_the_command_says_what_it_needs():
    status, out, err = run_cli("tune", "gemm", "--shapes", "8x8x8", "--device", "cpu")
    assert (
        (status, out) == (1, "")
        and err.startswith("tune: device is cpu; only CUDA is tuned")
        and err.count("\n") == 1
    )
    if BF16_ROW in KERNELS and not torch.cuda.is_available():
        status, out, err = run_cli("tune", "gemm", "--shapes", "8x8x8")
        assert (
            (status, out) == (1, "")
            and err.endswith("finds no CUDA device\n")
            and err.count("\n") == 1
        )


NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="asks for a CUDA device that is not there"
)


@pytest.mark.parametrize(
    "device", ("banana", "meta", "mps", "cpu:x", pytest.param("cuda", marks=NO_GPU), "cuda:99")
)
@pytest.mark.parametrize(
    "command",
    (("explain", "gemm", "4", "4", "4"), ("explain", "paged_attn"), ("bench", "gemm", "--small")),
    ids="-".join,
)
def test_a_device_that_is_not_there(command, device):
    """The error is one line without a traceback, and nothing is measured on another device."""
    status, out, err = run_cli(*command, "--device", device)
    assert (
        (status, out) == (1, "")
        and err.startswith(f"{command[0]}: device is {device}")
        and err.count("\n") == 1
    )


@pytest.mark.parametrize(
    "option, value, least",
    (
        ("--block-size", "0", 1),
        ("--block-size", "-1", 1),
        ("--heads-kv", "0", 1),
        ("--head-dim", "0", 1),
        ("--heads", "-1", 0),
        ("--batch", "-1", 0),
        ("--seq-q", "-1", 0),
        ("--seq-k", "-1", 0),
    ),
)
def test_a_size_that_no_call_has(option, value, least, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "paged_attn", option, value])
    assert f"argument {option}: must be {least} or more, got {value}" in capsys.readouterr().err


def test_explain_takes_empty_sizes():
    for args in (
        ("gemm", "0", "4", "4"),
        ("flash_attn", "--seq-k", "0"),
        ("paged_attn", "--batch", "0"),
    ):
        status, out, err = run_cli("explain", *args)
        assert (status, err) == (0, "") and "tasks" in out
    assert "FLOPs               0" in run_cli("explain", "flash_attn", "--seq-k", "0")[1]


def test_explain_measures():
    for op, *sizes in (
        ("gemm", "16", "16", "16"),
        ("flash_attn", "--seq-q", "32"),
        ("flash_attn_bwd", "--seq-q", "32"),
        ("flash_attn_varlen", "--seq-q", "8"),
        ("paged_attn", "--seq-k", "32"),
    ):
        status, out, err = run_cli("explain", op, *sizes, "--measure")
        assert status == 0 and not err
        [line] = [line for line in out.splitlines() if line.startswith("measured")]
        assert float(line.split()[1]) > 0 and "GFLOP/s" in line
    assert "measured" not in run_cli("explain", "gemm", "16", "16", "16")[1]
    assert torch_gpukern.explain("gemm", torch.ones(4, 4), torch.ones(4, 4))["preferred"] is False


# --------------------------------------------------------------------------------------------------
# on a GPU


def operands(m=256, n=384, k=512, dtype=torch.bfloat16, layout="NT"):
    gen = generator("tuning", m, n, k)
    a, b = (
        randn(gen, m, k, dtype=dtype, device="cuda"),
        randn(gen, k, n, dtype=dtype, device="cuda"),
    )
    return a, b.mT.contiguous().mT if layout == "NT" else b


def prefer(a, b, row, **how):
    plan = torch_gpukern.explain("gemm", a, b, **how)
    ops.gemm_prefer(plan["device"], plan["class"], row)


def checked(a, b, out, **how):
    assert_close_as(torch_gemm(a, b, **how), out, reference.gemm(f64(a), f64(b), **how))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", ((256, 384, 512), (9, 512, 1024), (70, 33, 257)), ids=str)
def test_every_row_can_be_preferred(shape, dtype):
    """explain reports the preferred instance, results are as close as PyTorch's, and after
    forgetting the default's bits return."""
    a, b = operands(*shape, dtype)
    before, want = torch_gpukern.explain("gemm", a, b), ops.gemm(a, b)
    assert (
        not before["preferred"]
        and before["instances"][0] == before["instance"]
        and len(set(before["instances"])) == len(before["instances"])
    )
    assert before["device"] == torch.cuda.get_device_name()[:63]
    for row in before["instances"]:
        prefer(a, b, row)
        plan = torch_gpukern.explain("gemm", a, b)
        assert (
            plan["preferred"]
            and plan["instance"] == row
            and plan["instances"] == before["instances"]
        )
        checked(a, b, ops.gemm(a, b))
        assert plan["workspace_bytes"] >= before["workspace_bytes"]
        # the class next to it is another one
        assert not torch_gpukern.explain("gemm", a, b, activation="silu")["preferred"]
        assert not torch_gpukern.explain("gemm", a[1:], b)["preferred"]
    prefer(a, b, "")
    assert torch_gpukern.explain("gemm", a, b) == before and same_bits(ops.gemm(a, b), want)


@pytest.mark.gpu
def test_a_batch_of_rows_is_of_the_class_of_its_matrix():
    a, b = operands()
    row = torch_gpukern.explain("gemm", a, b)["instances"][-1]
    prefer(a, b, row)
    assert torch_gpukern.explain("gemm", a.view(4, 64, -1), b)["instance"] == row
    assert not torch_gpukern.explain("gemm", a.view(4, 64, -1), b.expand(4, *b.shape).contiguous())[
        "preferred"
    ]


@pytest.mark.gpu
def test_a_row_that_cannot_take_a_call_is_not_used():
    a, b = operands(256, 384, 512)
    plan = torch_gpukern.explain("gemm", a, b)
    for row in sorted(
        {name for name in KERNELS if name.startswith("gemm_") and "_bf16_" in name}
        - set(plan["instances"])
    ):
        prefer(a, b, row)
        now = torch_gpukern.explain("gemm", a, b)
        assert not now["preferred"] and now["instance"] == plan["instance"]
        checked(a, b, ops.gemm(a, b))
    x, y = operands(256, 384, 512, torch.float32)
    tf32 = "gemm_sm80_tf32_64x64x32"
    assert tf32 in torch_gpukern.explain("gemm", x, y, fp32_precision="tf32")["instances"]
    prefer(x, y, tf32)  # a call that asks for ieee keeps it
    assert not torch_gpukern.explain("gemm", x, y)["preferred"]


@pytest.mark.gpu
def test_graphs_keep_their_row():
    a, b = operands(256, 384, 4096)
    want, graph = ops.gemm(a, b), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.gemm(a, b)
    for row in torch_gpukern.explain("gemm", a, b)["instances"]:
        prefer(a, b, row)
        out.fill_(torch.nan)
        graph.replay()
        assert same_bits(out, want)
        second = torch.cuda.CUDAGraph()
        ours = ops.gemm(a, b)
        with torch.cuda.graph(second):
            captured = ops.gemm(a, b)
        prefer(a, b, "")
        second.replay()
        assert same_bits(captured, ours)


@pytest.mark.gpu
def test_preferences_may_change_under_running_calls():
    """Preferences for instances with other workspaces change in one thread while another thread
    calls."""
    a, b = operands(64, 512, 8192)
    plan, exact = torch_gpukern.explain("gemm", a, b), reference.gemm(f64(a), f64(b))
    sizes, stop, failures = set(), threading.Event(), []
    for row in plan["instances"]:
        prefer(a, b, row)
        sizes.add(torch_gpukern.explain("gemm", a, b)["workspace_bytes"])
    assert len(sizes) > 1

    def change():
        try:
            while not stop.is_set():
                for row in (*plan["instances"], ""):
                    ops.gemm_prefer(plan["device"], plan["class"], row)
        except Exception as error:
            failures.append(error)

    worker = threading.Thread(target=change)
    worker.start()
    try:
        outs = [ops.gemm(a, b) for _ in range(2000)]
    finally:
        stop.set()
        worker.join()
    assert not failures, failures
    # more than one row has served
    assert len({out.view(torch.int16).sum().item() for out in outs}) > 1
    for out in outs[::100]:
        assert_close_as(torch_gemm(a, b), out, exact)


@pytest.mark.gpu
def test_import_prefers_on_the_device_of_that_name(path):
    """In a new process: nothing uses the GPU before the first call."""
    a, b = operands()
    plan = torch_gpukern.explain("gemm", a, b)
    path.write_text(
        json.dumps(stored({plan["class"]: {"row": plan["instances"][1]}}, plan["device"]))
    )
    imported(
        f"""
        a, b = torch.randn(256, 512, device="cuda").bfloat16(), torch.randn(384, 512, device="cuda").bfloat16().mT
        plan = torch_gpukern.explain("gemm", a, b)
        assert plan["preferred"] and plan["instance"] == {plan["instances"][1]!r}, plan
        """,
        GPUKERN_TUNED=str(path),
    )


@pytest.mark.gpu
def test_tune_end_to_end(path):
    shapes = ("--shapes", "128x256x512", "16x512x1024:NT", "2x64x64x64")
    status, out, err = run_cli(
        "tune", "gemm", *shapes, "--bias", "--activation", "gelu", "--cache", str(path)
    )
    assert status == 0, err
    devices, problem = cache.read(path)
    assert not problem and list(devices) == [torch.cuda.get_device_name()[:63]]
    entries, problem = cache.entries_of(devices[torch.cuda.get_device_name()[:63]])
    assert not problem and len(entries) <= 3 and f"GPUKERN_TUNED={path}" in out
    table = [line for line in out.splitlines() if line.startswith(("128x", "16x", "2x"))]
    assert len(table) == 3 and f"{len(entries)} of 3 have an instance faster" in out
    assert sum("the same" in line for line in table) == 3 - len(entries)
    for text, entry in entries.items():
        problem = gemm.parse_class(text)
        assert (
            entry["row"] in KERNELS
            and entry["us"] * gemm.NOISE < entry["default_us"]
            and entry["cublas_us"] > 0
        )
        inputs = problem.inputs(torch.device("cuda"))
        plan = problem.explain(inputs)
        assert plan["class"] == text and plan["preferred"] and plan["instance"] == entry["row"]
        checked(inputs["a"], inputs["b"], problem.ours(inputs), activation="gelu")
    status, out, err = run_cli("tune", "gemm", "--check", "--cache", str(path))
    assert f"of {len(entries)} instances are no longer the fastest" in out and status == (
        not out.splitlines()[-1].startswith("0")
    )
    assert cache.read(path)[0] == devices


@pytest.mark.gpu
def test_a_wrong_row_does_not_win(path, monkeypatch):
    """The results of all instances but the default are made wrong here. None of them is kept, and
    all are reported."""
    right = gemm.Problem.ours

    def wrong(problem, inputs):
        out = right(problem, inputs)
        plan = problem.explain(inputs)
        return out if plan["instance"] == plan["instances"][0] else out.zero_()

    monkeypatch.setattr(gemm.Problem, "ours", wrong)
    status, out, err = run_cli("tune", "gemm", "--shapes", "64x64x64", "--cache", str(path))
    assert status == 1 and "the same" in out and err.count("is wrong, it was left out") >= 3
    monkeypatch.setattr(
        gemm.Problem, "ours", lambda problem, inputs: right(problem, inputs).zero_()
    )
    status, out, err = run_cli("tune", "gemm", "--shapes", "64x64x64", "--cache", str(path))
    assert status == 1 and "is wrong: please report this" in err


@pytest.mark.gpu
def test_times_are_of_the_device():
    a, b = operands(2048, 2048, 2048)
    large = timing.median_us(lambda: ops.gemm(a, b), torch.device("cuda"))
    small = timing.median_us(lambda: ops.gemm(a[:64, :64], b[:64, :64]), torch.device("cuda"))
    assert 0.5 < small < large < 10_000
