# SPDX-License-Identifier: BSD-3-Clause
"""Which element each thread of an instruction holds, as layouts (thread, value) -> index.

An MMA's operands are indexed colexicographically: A by m + M k, B by n + N k, C by m + M n. A
copy's matrices are indexed row + 8 column + 64 matrix. Values count elements; of 16 bits, two lie
in a register, the low half first.
"""

from __future__ import annotations

from dataclasses import dataclass

from .core import Layout


@dataclass(frozen=True)
class MmaAtom:
    """One matrix instruction: C[M, N] += A[M, K] B[N, K].

    a, b, c: (thread, value) -> index. An operand that is read from shared memory has every element
    for every thread (stride 0). lanes: thread -> lane of the warp, where the two differ.
    """

    name: str
    shape: tuple[int, int, int]
    a: Layout
    b: Layout
    c: Layout
    lanes: Layout | None = None

    @property
    def threads(self) -> int:
        return self.c[0].size


@dataclass(frozen=True)
class CopyAtom:
    """One copy instruction: (thread, value) -> element, on the side it reads and on the side it
    writes.

    ref: "src" or "dst", the side whose threads and values a tiled copy's layout speaks of: that of
    the registers.
    """

    name: str
    src: Layout
    dst: Layout
    ref: str
    elem_bits: int


def _tv(text: str) -> Layout:
    return Layout(text).named("thr", "val")


_C = _tv("((4,8),(2,2)):((32,1),(16,8))")
# m16n8 of mma.sync by (k, bits of an element of A and B): A and B.
_MMA_SYNC = {
    (8, 16): ("((4,8),(2,2)):((32,1),(16,8))", "((4,8),2):((16,1),8)"),
    (16, 16): ("((4,8),(2,2,2)):((32,1),(16,8,128))", "((4,8),(2,2)):((16,1),(8,64))"),
    (4, 32): ("((4,8),2):((16,1),8)", "((4,8),1):((8,1),0)"),
    (8, 32): ("((4,8),(2,2)):((16,1),(8,64))", "((4,8),2):((8,1),32)"),
    (16, 8): ("((4,8),(4,2)):((64,1),(16,8))", "((4,8),4):((32,1),8)"),
    (32, 8): ("((4,8),(4,2,2)):((64,1),(16,8,256))", "((4,8),(4,2)):((32,1),(8,128))"),
}


def mma_sync(k: int, bits: int) -> MmaAtom:
    """mma.sync of m16n8k<k> (float64: m8n8k4), elements of A and B of 8, 16, 32 (tf32) or 64 bits."""
    if (k, bits) == (4, 64):
        tv = _tv("((4,8),1):((8,1),0)")
        return MmaAtom("mma.sync.m8n8k4 (64 bits)", (8, 8, 4), tv, tv, _tv("((4,8),2):((16,1),8)"))
    if (k, bits) not in _MMA_SYNC:
        known = ", ".join(f"k{k} of {bits} bits" for k, bits in [*_MMA_SYNC, (4, 64)])
        raise ValueError(
            f"mma_sync: k is {k} and elements have {bits} bits; expected one of {known}"
        )
    a, b = _MMA_SYNC[k, bits]
    return MmaAtom(f"mma.sync.m16n8k{k} ({bits} bits)", (16, 8, k), _tv(a), _tv(b), _C)


def fma() -> MmaAtom:
    """One multiply-add of one thread: what a TiledMma without tensor cores is made of."""
    one = _tv("(1,1):(0,0)")
    return MmaAtom("fma", (1, 1, 1), one, one, one)


# mma.sync.m8n8k4 of Volta: a row-major a (column-major b) has a row a thread, the other a column a
# thread.
_QUAD_ROW, _QUAD_COLUMN = "(8,4):(1,8)", "((4,2),4):((8,4),1)"
_QUAD_C = {16: "(8,8):(1,8)", 32: "((2,2,2),(2,2,2)):((1,16,4),(8,2,32))"}


def quadpair(layout: str = "TN", c_bits: int = 32) -> MmaAtom:
    """Volta's mma.sync.m8n8k4 of 16 bits: each of a warp's four pairs of quads has a product of its
    own.

    layout: of a and b, as BLAS has it: TN is .row.col, both with k on end. c_bits: 16 or 32. Pair p
    has the lanes `lanes(thread)` + 4 p.
    """
    if layout not in ("TN", "TT", "NN", "NT") or c_bits not in _QUAD_C:
        raise ValueError(
            f"quadpair: layout is {layout!r}, c has {c_bits} bits; expected TN, TT, NN or NT, and "
            f"16 or 32"
        )
    a = _QUAD_ROW if layout[0] == "T" else _QUAD_COLUMN
    b = _QUAD_ROW if layout[1] == "N" else _QUAD_COLUMN
    name = f"mma.sync.m8n8k4 ({layout}, c of {c_bits} bits)"
    return MmaAtom(name, (8, 8, 4), _tv(a), _tv(b), _tv(_QUAD_C[c_bits]), Layout("(4,2):(1,16)"))


# A of wgmma from registers, by bits: 64 rows and 32 bytes of k.
_WGMMA_A = {
    8: "((4,8,4),(4,2,2)):((256,1,16),(64,8,1024))",
    16: "((4,8,4),(2,2,2)):((128,1,16),(64,8,512))",
    32: "((4,8,4),(2,2)):((64,1,16),(8,256))",
}


def wgmma(n: int, bits: int = 16, a_from_registers: bool = False) -> MmaAtom:
    """wgmma of m64n<n>, k of 32 bytes: elements of A and B of 8, 16 or 32 (tf32) bits. n: a
    multiple of 8 up to 256."""
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"wgmma: n is {n}; expected a multiple of 8 from 8 to 256")
    if bits not in _WGMMA_A:
        raise ValueError(f"wgmma: elements have {bits} bits; expected 8, 16 or 32")
    k = 256 // bits
    c = Layout(((4, 8, 4), (2, 2, n // 8)), ((128, 1, 16), (64, 8, 512)), ("thr", "val"))
    a = (
        _tv(_WGMMA_A[bits])
        if a_from_registers
        else Layout((128, (64, k)), (0, (1, 64)), ("thr", "val"))
    )
    b = Layout((128, (n, k)), (0, (1, n)), ("thr", "val"))
    return MmaAtom(
        f"wgmma.m64n{n}k{k}" + (", A from registers" if a_from_registers else ""),
        (64, n, k),
        a,
        b,
        c,
    )


# 8 x 8 matrices of 16 bits: what each lane gives the address of (its row), and what its registers
# hold.
def _rows(num: int) -> Layout:
    return Layout(((8, num), 8), ((1, 64), 8), ("thr", "val"))


def _registers(num: int, trans: bool) -> Layout:
    return Layout(
        ((4, 8), (2, num)), ((2, 8), (1, 64)) if trans else ((16, 1), (8, 64)), ("thr", "val")
    )


def _check_num(op: str, num: int) -> None:
    if num not in (1, 2, 4):
        raise ValueError(f"{op}: {num} matrices; expected 1, 2 or 4")


def ldmatrix(num: int = 4, trans: bool = False) -> CopyAtom:
    """ldmatrix.x<num>: lane l gives the address of row l % 8 of matrix l / 8; register i of a lane
    holds two of matrix i."""
    _check_num("ldmatrix", num)
    return CopyAtom(
        f"ldmatrix.x{num}{'.trans' if trans else ''}", _rows(num), _registers(num, trans), "dst", 16
    )


def stmatrix(num: int = 4, trans: bool = False) -> CopyAtom:
    """stmatrix.x<num>: ldmatrix the other way round."""
    _check_num("stmatrix", num)
    return CopyAtom(
        f"stmatrix.x{num}{'.trans' if trans else ''}", _registers(num, trans), _rows(num), "src", 16
    )


def movmatrix() -> CopyAtom:
    """movmatrix.trans: a matrix in registers, transposed. Element (row, column) of the source is
    what a lane's value is; the result's element index says where in the transposed matrix the same
    lane's value lies."""
    return CopyAtom("movmatrix.trans", _registers(1, False), _registers(1, True), "dst", 16)


def vector_copy(access_bytes: int, elem_bytes: int) -> CopyAtom:
    """ld or st (or cp.async) of one thread: so many bytes that lie side by side."""
    if access_bytes not in (1, 2, 4, 8, 16) or access_bytes % elem_bytes:
        raise ValueError(
            f"vector_copy: {access_bytes} bytes of elements of {elem_bytes}; expected 1, 2, 4, 8 "
            f"or 16 bytes"
        )
    n = access_bytes // elem_bytes
    tv = Layout((1, n), (0, 1), ("thr", "val"))
    return CopyAtom(f"{8 * access_bytes}-bit access", tv, tv, "src", 8 * elem_bytes)
