# SPDX-License-Identifier: BSD-3-Clause
"""torch_gpukern.layout's atoms against independent descriptions of the hardware.

Fragments are compared with the formulas of the PTX ISA, TMA boxes with a model of the bytes that
TMA writes, descriptors with the fields that the ISA states, and bank conflicts with cases worked
out by hand.
"""

import re

import pytest
from conftest import run_python

from torch_gpukern import layout as L
from torch_gpukern.layout import atoms, banks


def elements(tv, rows):
    """Maps (lane, value) to (row, column)."""
    lanes = tv[0].size
    return {(i % lanes, i // lanes): (o % rows, o // rows) for i, o in enumerate(tv.offsets)}


# By (k, bits): the element (row, k) of A and (k, n) of B that value i of a lane holds. Lane l is
# thread t = l % 4 of group g = l / 4. PTX ISA 9.0, 9.7.14.5.
PTX_MMA = {
    (8, 16): (
        lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)),
        lambda g, t, i: (t * 2 + (i & 1), g),
    ),
    (16, 16): (
        lambda g, t, i: (
            g if i < 2 or 4 <= i < 6 else g + 8,
            t * 2 + (i & 1) + (8 if i >= 4 else 0),
        ),
        lambda g, t, i: (t * 2 + (i & 1) + (8 if i >= 2 else 0), g),
    ),
    (4, 32): (lambda g, t, i: (g if i == 0 else g + 8, t), lambda g, t, i: (t, g)),
    (8, 32): (
        lambda g, t, i: (g if i in (0, 2) else g + 8, t if i in (0, 1) else t + 4),
        lambda g, t, i: (t if i == 0 else t + 4, g),
    ),
    (16, 8): (
        lambda g, t, i: (g if i < 4 else g + 8, t * 4 + (i & 3)),
        lambda g, t, i: (t * 4 + (i & 3), g),
    ),
    (32, 8): (
        lambda g, t, i: (
            g if i < 4 or 8 <= i < 12 else g + 8,
            t * 4 + (i & 3) + (16 if i >= 8 else 0),
        ),
        lambda g, t, i: (t * 4 + (i & 3) + (16 if i >= 4 else 0), g),
    ),
    (4, 64): (lambda g, t, i: (g, t), lambda g, t, i: (t, g)),
}


@pytest.mark.parametrize("k, bits", PTX_MMA)
def test_mma_sync_fragments(k, bits):
    atom = atoms.mma_sync(k, bits)
    m, n, _ = atom.shape
    of_a, of_b = PTX_MMA[k, bits]
    for (lane, i), at in elements(atom.a, m).items():
        assert at == of_a(lane // 4, lane % 4, i)
    for (lane, i), at in elements(atom.b, n).items():
        assert at[::-1] == of_b(lane // 4, lane % 4, i)
    for (lane, i), at in elements(atom.c, m).items():
        assert at == (lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1))
    for x, size in ((atom.a, m * k), (atom.b, n * k), (atom.c, m * n)):
        assert sorted(x.offsets) == list(range(size))


@pytest.mark.parametrize("n", [8, 64, 256])
def test_wgmma_fragments(n):
    for (t, i), at in elements(atoms.wgmma(n).c, 64).items():
        warp, lane = t // 32, t % 32
        assert at == (16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + lane % 4 * 2 + i % 2)
    for bits in (8, 16, 32):
        atom = atoms.wgmma(n, bits, a_from_registers=True)
        # each warp's 16 rows are laid out as in mma.sync
        of_a, _ = PTX_MMA[{8: 32, 16: 16, 32: 8}[bits], bits]
        for (t, i), (row, col) in elements(atom.a, 64).items():
            assert (row - 16 * (t // 32), col) == of_a(t % 32 // 4, t % 4, i)
        assert sorted(atom.a.offsets) == list(range(64 * atom.shape[2]))


def test_two_accumulators_are_one_a_fragment():
    """The accumulators C of two products with n = 8 have the layout of an operand A with k = 16.
    Attention can therefore multiply P from registers."""
    c = L.TiledMma(atoms.mma_sync(16, 16)).tv("c", (16, 16))
    assert c.offsets == atoms.mma_sync(16, 16).a.offsets


@pytest.mark.parametrize("layout", ["TN", "TT", "NN", "NT"])
@pytest.mark.parametrize("c_bits", [16, 32])
def test_quadpair_fragments(layout, c_bits):
    """m8n8k4 with .f16 in the PTX ISA, for the lanes of quad pair 0."""
    atom = atoms.quadpair(layout, c_bits)
    for t in range(8):
        lane = atom.lanes(t)
        assert lane in (*range(4), *range(16, 20))
        high = 4 * (lane >= 16)
        for i in range(4):
            along, across = (
                lane % 4 + high,
                (i, lane % 4),
            )  # consecutive k: a thread holds a row of a
            a, b = atom.a(t, i), atom.b(t, i)
            assert (a % 8, a // 8) == ((along, i) if layout[0] == "T" else (i + high, across[1]))
            assert (b % 8, b // 8) == ((along, i) if layout[1] == "N" else (i + high, across[1]))
        for i in range(8):
            row = (lane & 1) + (i & 2) + high if c_bits == 32 else lane % 4 + high
            column = (i & 4) + (lane & 2) + (i & 1) if c_bits == 32 else i
            assert (atom.c(t, i) % 8, atom.c(t, i) // 8) == (row, column)
    assert atom.threads == 8 and sorted(atom.c.offsets) == list(range(64))
    with pytest.raises(ValueError, match="expected TN, TT, NN or NT, and 16 or 32"):
        atoms.quadpair(layout, 64)


def test_multiply_adds_by_threads():
    """16 x 16 threads with 4 x 4 elements each, 16 apart."""
    mma = L.TiledMma(atoms.fma(), (16, 16, 1))
    assert mma.threads == 256 and mma.shape == (16, 16, 1)
    c = "(64,64):(64,1)"
    assert sorted(o for t in range(256) for o in mma.partition(c, t, "c").offsets) == list(
        range(4096)
    )
    assert sorted(mma.partition(c, 16 * 3 + 2, "c").offsets) == [
        64 * (2 + 16 * i) + 3 + 16 * j for i in range(4) for j in range(4)
    ]
    assert mma.partition("(64,8):(8,1)", 16 * 3 + 2, "a").offsets[:4] == [
        8 * (2 + 16 * i) for i in range(4)
    ]


@pytest.mark.parametrize("num", [1, 2, 4])
def test_ldmatrix_stmatrix_movmatrix(num):
    for trans in (False, True):
        load, store = atoms.ldmatrix(num, trans), atoms.stmatrix(num, trans)
        assert load.dst == store.src and load.src == store.dst
        for lane in range(32):
            for i in range(num):
                for half in range(2):
                    down, along = lane // 4, lane % 4 * 2 + half
                    row, col = (along, down) if trans else (down, along)
                    assert load.dst(lane, half + 2 * i) == row + 8 * col + 64 * i
        assert all(
            load.src(8 * i + r, c) == r + 8 * c + 64 * i
            for i in range(num)
            for r in range(8)
            for c in range(8)
        )
    move = atoms.movmatrix()
    assert [o % 8 * 8 + o // 8 for o in move.src.offsets] == move.dst.offsets


def test_tiled_copies_and_products_cover_each_element_once():
    a = L.Tensor("(64,32):(32,1)")
    mma = L.TiledMma(atoms.mma_sync(16, 16), (2, 2, 1))
    for operand, shape, times in (
        ("a", "(64,32):(32,1)", 2),
        ("b", "(32,32):(32,1)", 2),
        ("c", "(64,32):(32,1)", 1),
    ):
        seen = sorted(
            o for t in range(mma.threads) for o in mma.partition(shape, t, operand).offsets
        )
        size = L.Layout(shape).size
        assert seen == sorted(list(range(size)) * times)
        tv = mma.tv(operand, tuple(m.size for m in L.Layout(shape)))
        assert sorted(tv.offsets) == sorted(list(range(size)) * times)
    copy = L.TiledCopy(atoms.ldmatrix(4), tv=atoms.mma_sync(16, 16).a, shape=(16, 16))
    for side in ("src", "dst"):
        assert sorted(o for t in range(32) for o in copy.partition(a, t, side).offsets) == list(
            range(64 * 32)
        )
    # ldmatrix fills a lane's registers as mma.sync reads them
    for lane in range(32):
        got = copy.partition("(16,16):(16,1)", lane, "dst").offsets
        assert got == [
            o % 16 * 16 + o // 16 for o in (atoms.mma_sync(16, 16).a(lane, v) for v in range(8))
        ]
    wide = L.TiledCopy(atoms.vector_copy(16, 2), "(16,8):(8,1)", "(1,8):(8,1)")
    assert sorted(
        o for t in range(128) for o in wide.partition("(32,128):(128,1)", t, "src").offsets
    ) == list(range(4096))
    part = wide.partition("(32,128):(128,1)", 9, "src").offsets
    assert part[:8] == list(range(part[0], part[0] + 8))
    with pytest.raises(L.Refusal, match="no multiple of the 32"):
        mma.partition("(40,32):(32,1)", 0, "a")


# ---- TMA -----------------------------------------------------------------------------------------


def tma_bytes(rows, row_bytes, span):
    """A model of TMA's writes, from the figures of the CUDA guide. It maps each byte of the box to a
    byte of shared memory.

    With a swizzle of `span` bytes, the row of a 16-byte chunk decides where the chunk goes. Without
    a swizzle, chunks stay in order.
    """
    place = {}
    for byte in range(rows * row_bytes):
        line, chunk = divmod(byte // 16, 8)  # 128-byte lines of 8 chunks
        if span == 128:
            chunk ^= line % 8
        elif span == 64:  # two rows a line, four chunks each; the pattern of 4 lines
            chunk = chunk // 4 * 4 + (chunk % 4 ^ line % 4)
        elif span == 32:  # four rows a line, two chunks each
            chunk = chunk // 2 * 2 + (chunk % 2 ^ line % 2)
        place[byte] = line * 128 + chunk * 16 + byte % 16
    return place


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("elem_bytes", [1, 2, 4])
def test_tma_boxes_against_a_model_of_the_bytes(span, elem_bytes):
    cols, rows = (span or 64) // elem_bytes, 24
    box = L.tma_box(
        "(m=512,k=1024):(1024,1)", {"m": rows, "k": cols}, elem_bytes=elem_bytes, swizzle=span
    )
    place = tma_bytes(rows, cols * elem_bytes, span)
    for r in range(rows):
        for c in range(cols):
            assert box.smem(r, c) * elem_bytes == place[(r * cols + c) * elem_bytes]
    assert (
        box.box == (cols, rows)
        and box.sizes == (1024, 512)
        and box.strides_bytes == (1024 * elem_bytes,)
    )
    assert box.bytes == rows * cols * elem_bytes


@pytest.mark.parametrize(
    "tensor, box, options, mode, text",
    [
        ("(m=512,k=1024):(1024,1)", (257, 64), {}, 0, "takes 257"),
        ("(m=512,k=1024):(1024,1)", (64, 128), {"swizzle": 128}, 1, "256 bytes"),
        ("(m=512,k=1020):(1020,1)", (64, 64), {}, 0, "2040 bytes"),
        ("(m=512,k=1024):(1024,1)", (64, 4), {}, 1, "8 bytes"),
        ("(m=512,k=1024):(1024,2)", (64, 64), {}, None, "stride 1"),
        ("(m=512,k=1024):(-1024,1)", (64, 64), {}, 0, "-2048 bytes"),
        ("(m=512,k=1024):(1024,1)", (64, 64), {"base": 8}, None, "byte 8"),
        ("(m=512,k=1024):(1024,1)", (64, 64), {"steps": (9, 1)}, 0, "element stride is 9"),
    ],
)
def test_tma_refusals(tensor, box, options, mode, text):
    with pytest.raises(L.Refusal, match=text) as caught:
        L.tma_box(tensor, box, elem_bytes=2, **options)
    assert caught.value.mode == mode


def test_wgmma_descriptors():
    k_major = L.wgmma_descriptor("Sw<3,3,3> o 0 o (128,64):(64,1)", address=0x400)
    assert (k_major.major, k_major.leading, k_major.stride) == ("k", 16, 1024)
    # as csrc/cuda/layout/wgmma.cuh writes it
    assert k_major.bits == 0x400 >> 4 | 1 << 16 | 64 << 32 | 1 << 62
    mn_major = L.wgmma_descriptor("Sw<3,3,3> o 0 o ((64,2),64):((1,4096),64)")
    assert (mn_major.major, mn_major.leading, mn_major.stride) == ("mn", 8192, 1024)
    plain = L.wgmma_descriptor("((8,8),(8,2)):((8,64),(1,512))")
    assert (plain.swizzle, plain.leading, plain.stride) == (0, 1024, 128)
    for d in (k_major, mn_major, plain):
        assert L.WgmmaDescriptor.of_bits(d.bits, d.major) == d
    for span, row in ((32, 16), (64, 32)):
        d = L.wgmma_descriptor(
            L.Swizzled(L.tma.span_swizzle(span, 2), L.Layout((64, row), (row, 1)))
        )
        assert (d.swizzle, d.stride) == (span, 8 * span)
    with pytest.raises(L.Refusal, match=r"element \(1,0\) lies at byte 256"):
        L.wgmma_descriptor("Sw<3,3,3> o 0 o (64,128):(128,1)")


# ---- banks ---------------------------------------------------------------------------------------


def test_bank_conflicts_of_known_cases():
    """learn/claims.md has these as a table."""
    word = [4 * i for i in range(32)]
    assert (
        L.ways(word, 4) == 1
        and L.ways([8 * i for i in range(32)], 4) == 2
        and L.ways([0] * 32, 4) == 1
    )
    # a contiguous 128-bit access is free, in four phases
    assert L.ways([16 * i for i in range(32)], 16) == 1
    assert L.wavefronts([16 * i for i in range(32)], 16) == 4
    column = [[row * pitch * 4 for row in range(32)] for pitch in (32, 33)]
    assert [L.ways(c, 4) for c in column] == [32, 1]
    half = [[row * pitch * 2 for row in range(32)] for pitch in (128, 129, 130)]
    assert [L.ways(c, 2) for c in half] == [32, 2, 1]
    assert L.sectors(word, 4) == 4 and L.sectors([128 * i for i in range(32)], 4) == 32


@pytest.mark.parametrize(
    "text, down",
    [
        ("(8,64):(64,1)", 8),
        ("Sw<3,3,3> o 0 o (8,64):(64,1)", 1),
        ("Sw<3,3,3> o 0 o (8,128):(128,1)", 2),
        ("Sw<3,3,4> o 0 o (8,128):(128,1)", 1),
    ],
)
def test_ldmatrix_rows(text, down):
    assert banks.accesses(text, 2, 16)[0].ways == down


def test_layouts_agree_with_the_header_on_tiles():
    """The swizzle is that of smem_tile in csrc/cuda/layout/banks.cuh. Its rows of 32, 64 and 128
    bytes have TMA's layout."""
    for span in (32, 64, 128):
        bits = {32: 1, 64: 2, 128: 3}[span]
        tile = L.Swizzled(L.tma.span_swizzle(span), L.Layout((16, span), (span, 1)))
        for row in range(16):
            for chunk in range(span // 16):
                assert (
                    tile(row, 16 * chunk)
                    == row * span + (chunk ^ ((row >> (3 - bits)) & ((1 << bits) - 1))) * 16
                )


# ---- pictures and the command line ---------------------------------------------------------------


def test_picture_as_text():
    picture = L.Layout("(2,3):(3,1)").svg()
    rows = [re.findall(r"<tspan[^>]*>(\d+)<", line) for line in picture.splitlines()]
    assert [row for row in rows if row] == [
        *(["0", "1", "2"], ["0"], ["1"]),  # columns and rows
        *(["0", "1", "2"], ["3", "4", "5"]),
    ]
    owners = atoms.mma_sync(16, 16).c.svg(kind="owners", shape=(16, 8))
    assert owners.count("M") == 128 and ">T31 V3<" in owners
    assert (
        L.Layout("(2,2)").svg() == L.Layout("(2,2)")._repr_svg_() == L.Layout("(2,2):(1,2)").svg()
    )
    with pytest.raises(ValueError, match="at most"):
        L.Layout("(1024,1024)").svg()


def test_png():
    pytest.importorskip("matplotlib")
    assert L.Layout("(4,8):(8,1)").png(kind="banks")[:8] == b"\x89PNG\r\n\x1a\n"


def run(*arguments):
    from torch_gpukern import cli

    return cli.main(["layout", *arguments])


def test_command_line(tmp_path, capsys):
    out = tmp_path / "out.svg"
    assert run("(4,8):(8,1)", "--swizzle", "3,3,3", "--access", "16", "--svg", str(out)) == 0
    said = capsys.readouterr().out
    assert (
        "(4,8):(8,1): 32 elements" in said
        and "free of conflicts" in said
        and out.read_text().startswith("<svg")
    )
    assert (
        run("10:1", "--divide", "4") == 0 and "2 elements past the end" in capsys.readouterr().out
    )
    for wrong, text in (
        (["(4,8:(8,1)"], "expected ','"),
        (["(4,8):(8,1)", "--swizzle", "3"], "bits,base,shift"),
        (["(4,6):(6,1)", "--access", "8"], "mode 1, 6:1"),
        (["(4,8)", "--atom", "mma.a"], "give a layout"),
    ):
        assert run(*wrong) == 1 and text in capsys.readouterr().err


def test_import_is_lazy():
    run_python("""
        import sys, torch_gpukern
        assert "torch_gpukern.layout" not in sys.modules
        assert torch_gpukern.layout.size("(4,8)") == 32
        """)
