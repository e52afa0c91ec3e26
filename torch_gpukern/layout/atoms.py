# SPDX-License-Identifier: BSD-3-Clause
"""Atoms: the elements that each thread of an instruction holds, as layouts (thread, value) ->
index.

An MMA's operands are indexed colexicographically: A by m + M k, B by n + N k, C by m + M n. A
copy's matrices are indexed by row + 8 column + 64 matrix. Values count elements. A register holds
two 16-bit elements, the low half first.
"""

from __future__ import annotations

from dataclasses import dataclass

from .core import Layout


@dataclass(frozen=True)
class MmaAtom:
    """One matrix instruction: C[M, N] += A[M, K] B[N, K].

    Attributes:
        a, b, c: (thread, value) -> index. An operand in shared memory belongs to every thread: its
            thread mode has stride 0.
        lanes: thread -> lane of the warp, if the two differ.
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
    """One copy instruction.

    Attributes:
        src, dst: (thread, value) -> element, for the side that is read and the side that is
            written.
        ref: "src" or "dst": the side that a tiled copy's layout describes, which is that of the
            registers.
    """

    name: str
    src: Layout
    dst: Layout
    ref: str
    elem_bits: int


def _tv(text: str) -> Layout:
    return Layout(text).named("thr", "val")


_C = _tv("((4,8),(2,2)):((32,1),(16,8))")
# mma.sync.m16n8: the layouts of A and B by (k, bits of an element of A and B).
_MMA_SYNC = {
    (8, 16): ("((4,8),(2,2)):((32,1),(16,8))", "((4,8),2):((16,1),8)"),
    (16, 16): ("((4,8),(2,2,2)):((32,1),(16,8,128))", "((4,8),(2,2)):((16,1),(8,64))"),
    (4, 32): ("((4,8),2):((16,1),8)", "((4,8),1):((8,1),0)"),
    (8, 32): ("((4,8),(2,2)):((16,1),(8,64))", "((4,8),2):((8,1),32)"),
    (16, 8): ("((4,8),(4,2)):((64,1),(16,8))", "((4,8),4):((32,1),8)"),
    (32, 8): ("((4,8),(4,2,2)):((64,1),(16,8,256))", "((4,8),(4,2)):((32,1),(8,128))"),
}


def mma_sync(k: int, bits: int) -> MmaAtom:
    """mma.sync.m16n8k<k>. A and B have elements of 8, 16, 32 (TF32) or 64 bits; with 64 bits it is
    m8n8k4."""
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
    """One multiply-add of one thread, the atom of a TiledMma without tensor cores."""
    one = _tv("(1,1):(0,0)")
    return MmaAtom("fma", (1, 1, 1), one, one, one)


# Volta's mma.sync.m8n8k4: with a row-major (b column-major) a thread holds a row of the operand,
# otherwise a column.
_QUAD_ROW, _QUAD_COLUMN = "(8,4):(1,8)", "((4,2),4):((8,4),1)"
_QUAD_C = {16: "(8,8):(1,8)", 32: "((2,2,2),(2,2,2)):((1,16,4),(8,2,32))"}


def quadpair(layout: str = "TN", c_bits: int = 32) -> MmaAtom:
    """Volta's mma.sync.m8n8k4 with 16-bit operands. Each of a warp's four quad pairs computes a
    product of its own; pair p has the lanes `lanes(thread)` + 4 p.

    layout: the layouts of a and b in BLAS's notation: TN is .row.col, with k contiguous in both.
    c_bits: 16 or 32.
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


# wgmma's A in registers, by the bits of an element: 64 rows and 32 bytes of k.
_WGMMA_A = {
    8: "((4,8,4),(4,2,2)):((256,1,16),(64,8,1024))",
    16: "((4,8,4),(2,2,2)):((128,1,16),(64,8,512))",
    32: "((4,8,4),(2,2)):((64,1,16),(8,256))",
}


def wgmma(n: int, bits: int = 16, a_from_registers: bool = False) -> MmaAtom:
    """wgmma.m64n<n> with 32 bytes of k. A and B have elements of 8, 16 or 32 (TF32) bits. n is a
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


# 8 x 8 matrices of 16-bit elements: the row whose address each lane gives, and the elements in its
# registers.
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
    """ldmatrix.x<num>: lane l gives the address of row l % 8 of matrix l / 8. Register i of a lane
    gets two elements of matrix i."""
    _check_num("ldmatrix", num)
    return CopyAtom(
        f"ldmatrix.x{num}{'.trans' if trans else ''}", _rows(num), _registers(num, trans), "dst", 16
    )


def stmatrix(num: int = 4, trans: bool = False) -> CopyAtom:
    """stmatrix.x<num>: stores what ldmatrix loads."""
    _check_num("stmatrix", num)
    return CopyAtom(
        f"stmatrix.x{num}{'.trans' if trans else ''}", _registers(num, trans), _rows(num), "src", 16
    )


def movmatrix() -> CopyAtom:
    """movmatrix.trans: transposes a matrix in registers. src gives the element (row, column) of
    each lane's value before, dst the element of each lane's value after."""
    return CopyAtom("movmatrix.trans", _registers(1, False), _registers(1, True), "dst", 16)


def vector_copy(access_bytes: int, elem_bytes: int) -> CopyAtom:
    """A load, store or cp.async of one thread: access_bytes contiguous bytes."""
    if access_bytes not in (1, 2, 4, 8, 16) or access_bytes % elem_bytes:
        raise ValueError(
            f"vector_copy: {access_bytes} bytes of elements of {elem_bytes}; expected 1, 2, 4, 8 "
            f"or 16 bytes"
        )
    n = access_bytes // elem_bytes
    tv = Layout((1, n), (0, 1), ("thr", "val"))
    return CopyAtom(f"{8 * access_bytes}-bit access", tv, tv, "src", 8 * elem_bytes)
