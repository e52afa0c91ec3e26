# SPDX-License-Identifier: BSD-3-Clause
"""The machine code that ptxas made of the CUDA kernels: it uses no local memory, and as many
registers as docs/resources.csv lists.

It needs the compiled library and the disassemblers, but no GPU. The notes of ptxas on Hopper's
kernels are in logs that the build keeps beside the objects (cmake/ptxas_log.sh). No object contains
them, and making them again would be a second build.

A build with GPUKERN_CUDA_DRAFT has no machine code of sources from which docs/resources.csv was
made (cmake/judged.py). The tests judge the rows of that file for their kernels. All other kernels
are read from the build.
"""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ALL

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "cmake")]
import judged  # noqa: E402
import ptxas_report  # noqa: E402

BUILD = Path(os.environ.get("GPUKERN_BUILD_DIR", ROOT / "build"))
LIBRARY = BUILD / "libgpukern.so"
LISTED = ROOT / "docs" / "resources.csv"


def attention_tiles(*headers):
    """name -> (head_dim, head_dim of values, keys) of the tiles of Hopper's forward, read from their
    headers."""
    room, found = ROOT / "csrc" / "cuda" / "attn", {}
    text = "".join((room / name).read_text() for name in headers)
    for name, base, body in re.findall(
        r"struct FwdHopper(\w+)(?: : FwdHopper(\w+))? \{(.*?)\n\};", text, re.DOTALL
    ):
        found[name] = found.get(base, {}) | dict(
            re.findall(r"\b(HEAD_DIM|HEAD_DIM_V|BKV) = (\d+)", body)
        )
    return {
        name: tuple(int(tile[key]) for key in ("HEAD_DIM", "HEAD_DIM_V", "BKV"))
        for name, tile in found.items()
    }


ATTENTION = attention_tiles("tiles.h", "wide_tiles.h")
MASKED = attention_tiles("tiles.h", "forward/masked_tiles.h")
# head_dim and keys of flash_attn_fp8_sm90a's tiles
CODES = {
    "64": (64, 128),
    "128": (128, 128),
    "128Wide": (128, 96),
    "192": (192, 128),
    "256": (256, 128),
}


def split_steps(tile, modified):
    """Consumer::SPLIT: whether blocks that every row sees completely have a loop of their own."""
    return modified == "false" or tile != "64"


def early_scores(tile, modified):
    """Consumer::EARLY: whether the first scores of the next tile are issued behind the last values
    of this one."""
    return modified == "false" and tile in ("64Short", "96", "128")


def test_tiles_of_attention_are_those_listed():
    listed = re.findall(r"flash_attn_fwd_sm90a_kernel<\w+, FwdHopper(\w+), ", LISTED.read_text())
    assert set(ATTENTION) == set(listed)


def rows(text):
    return {row["kernel"]: row for row in csv.DictReader(text.splitlines())}


def drafts():
    """The sources of which this build has no machine code."""
    file = BUILD / "cuda_drafts.txt"
    return file.read_text().split() if file.exists() else []


def source_of(built):
    """The source of an object or of its log."""
    return built.relative_to(BUILD).as_posix().split(".dir/", 1)[1].split(".cu.", 1)[0] + ".cu"


def declared(built):
    """The kernels of an object without machine code, by the host's stubs of their launches."""
    table = subprocess.run(["nm", built], capture_output=True, text=True, check=True).stdout
    # local for a template's instance, global for a kernel that is no template
    stubs = re.findall(r" [tT] _ZL?(\d+)__device_stub_(_Z\w+)$", table, re.MULTILINE)
    return [stub[: int(length) - len("__device_stub_")] for length, stub in stubs]


@pytest.fixture(scope="module")
def report():
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY.name} is not built")
    command = [sys.executable, ROOT / "tools" / "ptxas_report.py", LIBRARY]
    found = rows(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    objects = BUILD.glob("CMakeFiles/gk_cuda_*.dir/**/*.cu.o")
    left = [built for built in objects if source_of(built) in drafts()]
    assert len(left) == len(drafts())
    if left:
        listed = rows(LISTED.read_text())
        kernels = sorted({kernel for built in left for kernel in declared(built)})
        unlisted = [name for name in ptxas_report.short(kernels) if name not in listed]
        assert not unlisted, "docs/resources.csv and docs/resources.txt are of different sources"
        # an inline kernel may be in an object with code, too, for another architecture
        found |= {name: listed[name] for name in ptxas_report.short(kernels)}
    if not found:
        pytest.skip("this build has no CUDA kernels")
    return found


def test_drafts_are_the_sources_of_the_list():
    """A source that changed after CMake ran would still be a draft, and no test would judge its
    kernels."""
    if not drafts():
        pytest.skip("this build has no drafts")
    cache = (BUILD / "CMakeCache.txt").read_text()
    nvcc = re.search(r"^CMAKE_CUDA_COMPILER:\w+=(.*)$", cache, re.MULTILINE)[1]
    assert set(drafts()) <= set(judged.drafts(judged.version(nvcc)))


def headers_with(function):
    """The headers that define a function."""
    body = re.compile(rf"^[^\n=;]*\b{function}\([^;{{}}]*\)[\w ]*\{{", re.MULTILINE)
    headers = (p for p in sorted((ROOT / "csrc").rglob("*")) if p.suffix in (".h", ".cuh"))
    return [p.name for p in headers if body.search(p.read_text())]


def test_an_inline_function_is_one_function():
    """If several objects define an inline function of one signature, the linker keeps one. So two
    headers must not define it differently. One definition may have several sizes, because the
    compiler may know the constants of its callers."""
    bodies = {}
    for built in sorted(BUILD.glob("CMakeFiles/gk_*.dir/**/*.o")):
        table = subprocess.run(
            ["nm", "-S", built], capture_output=True, text=True, check=True
        ).stdout
        # functions of namespaces are skipped, because those of std differ by flags
        for size, length, name in re.findall(r"^\w+ (\w+) W _Z(\d+)(\w+)$", table, re.MULTILINE):
            bodies.setdefault((name[: int(length)], name), {}).setdefault(size, built.name)
    if not bodies:
        pytest.skip("the objects of a build are not here")
    found = {function: headers_with(function) for function in {function for function, _ in bodies}}
    assert all(found.values()), found  # the pattern finds every definition
    assert {
        name: sizes for name, sizes in bodies.items() if len(sizes) > 1 and len(found[name[0]]) > 1
    } == {}


def test_no_kernel_uses_local_memory(report):
    spilled = {
        n: r for n, r in report.items() if int(r["local_bytes"]) or int(r["LDL"]) or int(r["STL"])
    }
    assert not spilled, spilled


def test_every_kernel_is_listed(report):
    """After a change run: python cmake/judged.py record build"""
    archs = {row["arch"] for row in report.values()}  # a build may lack Hopper's kernels
    assert set(report) == {
        name for name, row in rows(LISTED.read_text()).items() if row["arch"] in archs
    }


def test_registers_are_those_listed(report):
    """Another compiler may need a few more registers, and then fewer blocks fit. A large difference
    means another kernel."""
    listed = rows(LISTED.read_text())
    assert {
        n: (int(r["registers"]), int(listed[n]["registers"]))
        for n, r in report.items()
        if n in listed and int(r["registers"]) > int(listed[n]["registers"]) + 8
    } == {}


def test_matrix_kernels_multiply_on_tensor_cores(report):
    """A kernel named for sm80 has mma.sync in its hot loop, fed by ldmatrix."""
    tensor = {n: r for n, r in report.items() if re.search(r"_sm80_kernel", n)}
    assert not {n for n, r in tensor.items() if not int(r["HMMA"]) and not int(r["IMMA"])}


def hopper_tiles():
    """Hopper's tiles of csrc/cuda/product/gemm/instances.def by name with their numbers."""
    text = (ROOT / "csrc" / "cuda" / "product" / "gemm" / "instances.def").read_text()
    columns = "BM BN STAGES WGS PANELS TILES SPLITS K64".split()
    return {
        name: dict(zip(columns, map(int, re.findall(r"\d+", numbers))))
        | {"PING_PONG": kind == "PING_PONG"}
        for kind, name, numbers in re.findall(
            r"^SM90_(\w+)\((\w+), \w+, ([\d, ]+)\)$", text, re.MULTILINE
        )
    }


# Kernels that are sm_90a for TMA or clusters. They multiply nothing, or, as paged_, too small
# an M for wgmma
WITHOUT_PRODUCTS = (
    "realign_",
    "lift_keys_",
    "prepare_distances_",
    "transpose_",
    "decode_pages_",
    "scaled_decode_",
    "quantize_",
    "bwd_bias_",
    "flash_attn_bwd_round_",
    "cross_entropy_",
    "glu_",
    "kl_div",
    "rope_kv_write_",
    "sample_tokens",
    "norm_",
    "softmax_",
    "paged_",
    "weight_decode_",
    "weight_mma_",
)


def test_wgmma_kernels_multiply_by_their_tile(report):
    """The hot loop of a policy Gemm..<T, TILE, MODE> has the wgmma instructions that its tile
    asks for. A step is K64 times 64 of k. It has BM / WGS / 64 products for each 16 of k (ping-pong
    BM / 64) between one fence and one wait, and no others.

    tf32 has half as much of k. With swap-AB and fragments from registers, each of the four products
    has its own fence and wait. Copies (realign, lift_keys, prepare_distances, transpose),
    decode_pages, scaled_decode, quantize and operations along rows multiply nothing. Paged attention multiplies 8
    or 16 rows by mma.sync.
    """
    found = {
        n: r
        for n, r in report.items()
        if r["arch"] == "sm_90a" and not n.startswith(WITHOUT_PRODUCTS)
    }
    assert found or not logs(), "kernels of sm_90a were built, and none is listed"
    tiles = hopper_tiles()
    for name, row in found.items():
        assert any(int(row[products]) for products in ptxas_report.GMMA), name
        assert not int(row["LDL"]) and not int(row["STL"]), name
        if attention := re.search(r"flash_attn_fwd_sm90a_kernel<\w+, FwdHopper(\w+), (\w+)>", name):
            # the first block's scores and the last one's values; a step of blocks that every row
            # sees whole and one of others; the last values with the next tile's first scores
            head_dim, _, keys = ATTENTION[attention[1]]
            steps = 1 + split_steps(*attention.groups()) + 1 + early_scores(*attention.groups())
            assert int(row["HGMMA"]) == steps * (head_dim + keys) // 16, name
            assert int(row["USETMAXREG"]) == 2, name
        if masked := re.search(
            r"flash_attn_fwd_masked_sm90a_kernel<\w+, FwdMasked<FwdHopper(\w+), \d, (\d)> >", name
        ):
            # as above; the tile of head_dim 256 has one Q, so its next scores are not issued early.
            # A bias of keys is one more product of each block of scores.
            head_dim, _, keys = MASKED[masked[1]]
            steps = 3 if head_dim == 256 else 4
            assert int(row["HGMMA"]) == steps * ((head_dim + keys) // 16 + (masked[2] == "2")), name
            assert int(row["USETMAXREG"]) == 2, name
        if dropped := re.search(r"fwd_drop_sm90a_kernel<\w+, FwdDrop<FwdHopper(\w+)> >", name):
            # the first block's scores, a step with masks and one without, the last one's values
            head_dim, _, keys = ATTENTION[dropped[1]]
            assert int(row["HGMMA"]) == 3 * (head_dim + keys) // 16, name
            assert int(row["USETMAXREG"]) == 2, name
        if codes := re.search(r"flash_attn_fp8_sm90a_kernel<Fp8Hopper(\w+), ", name):
            # the first block's scores, a step with masks and one without, the last one's values; 32
            # of k each; where scores are not kept, those of a block that is taken again
            head_dim, keys = CODES[codes[1]]
            again = head_dim if codes[1] == "256" else 0
            assert int(row["QGMMA"]) == (3 * (head_dim + keys) + again) // 32, name
            assert int(row["USETMAXREG"]) == 2, name
        if backward := re.search(r"BwdConsumer<\w+, BwdHopper(\d+)(Score)?(Ordered)?, ", name):
            # S and dP of head_dim, dQ of 128 keys, dV and dK of the tile's rows
            head_dim = int(backward[1])
            rows = (
                48 if backward[3] else 64 if backward[2] else {64: 128, 96: 80, 128: 80}[head_dim]
            )
            assert int(row["HGMMA"]) == 2 * head_dim // 16 + 128 // 16 + 2 * rows // 16, name
            assert int(row["USETMAXREG"]) == 2, name
        if backward := re.search(r"BwdWideConsumer<\w+, BwdHopper(\w+), ", name):
            # S or dP of head_dim, dV or dK of 64 rows, 64 of d of dQ of the pair's 128 keys: of
            # each warpgroup a loop
            assert int(row["HGMMA"]) == 2 * (int(backward[1]) // 16 + 64 // 16 + 128 // 16), name
            assert int(row["USETMAXREG"]) == 2, name
        if not (kernel := re.search(r"<Gemm[A-Z]\w+<(?:b?f16, |float, )?(\w+)", name)):
            continue
        tile = tiles[kernel[1]]
        fragments = kernel[1].startswith("Tf32SwapAB")
        warpgroups = 1 if tile["PING_PONG"] else tile["WGS"]
        assert int(row["HGMMA"]) == 4 * tile["K64"] * (tile["BM"] // warpgroups // 64), name
        assert int(row["WARPGROUP"]) == (8 if fragments else 2), name
        assert (int(row["LDS"]) > 0) == fragments, name
        assert int(row["USETMAXREG"]) == (2 if tile["WGS"] > 1 else 0), name
        assert int(row["UTMALDG"]) >= 2 * tile["K64"], name


@pytest.fixture(scope="module")
def disassembled():
    """[(a cubin, its kernels as nvdisasm prints them)] of flash_attn_fwd_sm90a, of every object that
    has code if others are drafts, or of the whole library with GPUKERN_TEST_ALL=1."""
    # this cubin is a tenth of the library
    own = BUILD / "CMakeFiles/gk_cuda_90a.dir/csrc/cuda/attn/forward/flash_attn_fwd_sm90a.cu.o"
    if not own.exists():
        pytest.skip("this build has no kernels for sm_90a")
    left = set(drafts())
    objects = BUILD.glob("CMakeFiles/gk_cuda_*.dir/**/*.cu.o")
    compiled = [built for built in objects if source_of(built) not in left]
    found = []
    for built in [LIBRARY] if ALL else compiled if left else [own]:
        with ptxas_report.cubins(built, "sm_90", "sm_90a") as paths:
            found += [(path.read_bytes(), list(ptxas_report.disassembly(path))) for path in paths]
    return found


def test_powers_of_attention_run_under_the_products(disassembled):
    """In flash_attn_fwd_sm90a the exponentials of a block stand between the wait for its scores and
    the wait for the product of the block before. Without a fence ptxas moves them past the second
    wait silently, and the overlap is gone. Without OVERLAP a single wait covers both."""
    if "csrc/cuda/attn/forward/flash_attn_fwd_sm90a.cu" in drafts():
        pytest.skip("its source was judged when docs/resources.csv was made")
    found = {name: [opcode + rest for _, opcode, rest, _ in code]
             for _, kernels in disassembled
             for name, code in kernels
             if "flash_attn_fwd_sm90a_kernel" in name}  # fmt: skip
    assert found
    for name, code in zip(ptxas_report.short(list(found)), found.values()):
        tile, modified = re.search(r"FwdHopper(\w+), (\w+), \w+>", name).groups()
        scores = next(int(m[1]) for op in code if (m := re.match(r"HGMMA\.64x(\d+)x16", op)))
        first = [i for i, op in enumerate(code) if op.startswith("WARPGROUP.DEPBAR.LE gsb0, 0x1")]
        held = 0
        for i in first:
            last = next(
                k
                for k in range(i + 1, len(code))
                if code[k].startswith("WARPGROUP.DEPBAR.LE gsb0, 0x0")
            )
            held += sum(op.startswith("MUFU.EX2") for op in code[i:last]) >= scores // 2
        assert held == 2 * (tile != "64"), name  # one loop with a mask and one without
        assert len(first) == held + early_scores(tile, modified), name
        # weights are packed after the scores are issued, not before
        if tile in ("64Short", "96", "128"):
            syncs = [i for i, op in enumerate(code) if op.startswith("BAR.SYNC")]
            late = 0
            for i, op in enumerate(code):
                if (
                    op.startswith("HGMMA")
                    and "RZ, !UPT" in op
                    and (before := [k for k in syncs if k < i])
                ):
                    converts = sum(op.startswith("F2FP") for op in code[before[-1] : i])
                    assert converts <= 16, (name, converts)
                    late += converts > 0
            assert late <= 2, name


def test_powers_of_codes_run_under_the_products():
    """The same for flash_attn_fp8_sm90a, with a mask and without."""
    own = BUILD / "CMakeFiles/gk_cuda_90a.dir/csrc/cuda/attn/forward/flash_attn_fp8_sm90a.cu.o"
    if not own.exists():
        pytest.skip("this build has no kernels for sm_90a")
    with ptxas_report.cubins(own, "sm_90a") as paths:
        kernels = [(name, [op + rest for _, op, rest, _ in code])
                   for path in paths
                   for name, code in ptxas_report.disassembly(path)
                   if "flash_attn_fp8_sm90a_kernel" in name]  # fmt: skip
    assert kernels
    for name, code in zip(
        ptxas_report.short([name for name, _ in kernels]), (code for _, code in kernels)
    ):
        keys = CODES[re.search(r"Fp8Hopper(\w+), ", name)[1]][1]
        first = [i for i, op in enumerate(code) if op.startswith("WARPGROUP.DEPBAR.LE gsb0, 0x1")]
        assert len(first) == 2, name
        for i in first:
            last = next(
                k
                for k in range(i + 1, len(code))
                if code[k].startswith("WARPGROUP.DEPBAR.LE gsb0, 0x0")
            )
            assert sum(op.startswith("MUFU.EX2") for op in code[i:last]) >= keys // 2, name


def test_opcodes_and_branches_are_those_that_nvdisasm_prints(disassembled):
    """The report decodes machine code by a table of its own (NAMES of tools/ptxas_report.py). The
    table is compared with nvdisasm on the kernels of attention's forward, or with
    GPUKERN_TEST_ALL=1 on all kernels. None may have an opcode that the table lacks."""
    compared = 0
    for cubin, printed in disassembled:
        read = {name: found for name, *found in ptxas_report.decoded_kernels(cubin)}
        assert set(read) == {name for name, _ in printed}
        for name, code in printed:
            opcodes, to = read[name]
            # arrivals at a barrier of a cluster and waits have one number, and so have ERRBAR and
            # CGAERRBAR
            assert [
                re.sub("^(UCGABAR)_.*|^CGA(ERRBAR)", r"\1\2", opcode) for _, opcode, *_ in code
            ] == opcodes.tolist(), name
            assert [target // 16 for *_, target in code] == to.tolist(), name
            compared += len(code)
    assert compared > (10_000 if drafts() else 50_000)


@pytest.mark.parametrize("content", (None, "no library"))
def test_a_file_that_cannot_be_read_makes_no_empty_table(tmp_path, content):
    """docs/resources.csv is the output, so an error must not look like a library without kernels."""
    library = tmp_path / "lib.so"
    if content is not None:
        library.write_text(content)
    command = [sys.executable, ROOT / "tools" / "ptxas_report.py", library]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.startswith(f"ptxas_report: cuobjdump cannot read {library}")


def test_an_opcode_without_a_name_is_left_to_nvdisasm():
    names = set(ptxas_report.NAMES.values())
    assert names.issuperset(ptxas_report.OPCODES)
    with pytest.raises(ptxas_report.Unknown, match="0x1ff"):
        ptxas_report.decoded(b"\xff\x01" + bytes(14))


# Notes of ptxas on wgmma and setmaxnreg: serialised, waits or fences put in, registers that could
# not be had.
NOTES = re.compile(r"\(C(7508|751\d|7602)\)")


def logs():
    found, left = BUILD / "CMakeFiles" / "gk_cuda_90a.dir", set(drafts())
    return [log for log in sorted(found.rglob("*.cu.o.log")) if source_of(log) not in left]


def test_ptxas_has_no_notes_on_wgmma(report):
    if not any(r["arch"] == "sm_90a" for r in report.values()):
        pytest.skip("this build has no kernels for sm_90a")
    assert logs(), "the build kept no log of ptxas"
    for log in logs():
        text = log.read_text()
        assert text.count("Compiling entry function") == text.count("Used ") > 0, (
            f"{log.name} is not one of ptxas -v"
        )
        assert not [line for line in text.splitlines() if NOTES.search(line)], log.name
        assert "spill stores" in text and not re.search(r"[1-9]\d* bytes spill", text), log.name


def test_a_note_is_found():
    """The lines in the form in which ptxas 13.0 writes them."""
    text = "ptxas info    : (C{}) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
    assert all(NOTES.search(text.format(code)) for code in ("7508", "7510", "7514", "7519", "7602"))
    assert not NOTES.search("ptxas info    : (C7600) another note")
