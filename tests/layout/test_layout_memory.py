# SPDX-License-Identifier: BSD-3-Clause
"""torch_gpukern.layout: memory tags, tensors that own their data, and the instruction that a copy
compiles to.
"""

import pytest
import torch

from torch_gpukern import layout as L


def at(text, memory, offset=0):
    return L.Tensor(text, memory=memory, offset=offset)


def test_parts_have_the_memory_of_the_whole():
    whole = at("Sw<3,3,3> o 0 o (8,64):(64,1)", "shared")
    assert L.local_tile(whole, (8, 8), (0, 1)).memory == whole[None, 3].memory == "shared"
    assert at("(4,8):(8,1)", "global").group(0, 2).memory == "global"
    assert "in shared" in repr(at("8:1", "shared")) and L.Tensor("8:1").memory is None
    with pytest.raises(ValueError, match="memory is 'texture'; expected registers, shared, global"):
        at("8:1", "texture")


OWNED = ["(4,8):(8,1)", "(4,8):(1,-4)", "Sw<3,3,3> o 0 o (8,64):(64,1)", "(2,3):(0,1)"]


@pytest.mark.parametrize(
    "text", [*OWNED, "Sw<1,0,2> o 0 o (4,2):(-2,1)", "Sw<2,0,2> o 3 o (4,4):(4,-1)"]
)
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_an_owning_tensor_has_all_its_elements(text, dtype):
    tensor = L.make_tensor(text, "shared", dtype)
    values = list(tensor.values())
    assert tensor.memory == "shared" and values == [0] * tensor.size
    inner = tensor.layout.layout if isinstance(tensor.layout, L.Swizzled) else tensor.layout
    assert min(tensor.offsets) >= 0 and max(tensor.offsets) == len(tensor.data) - 1
    for coord in inner.coords():
        tensor[coord] = 1
    assert list(tensor.values()) == [1] * tensor.size
    assert L.make_tensor(text, "shared", dtype).values()[0] == 0  # it owns its data


def test_a_fragment_is_compact_and_keeps_what_is_near():
    part = L.local_tile(at("(64,64):(64,1)", "global"), (8, 4), (1, 2))
    fragment = L.fragment_like(part, torch.float32)
    assert (
        str(fragment.layout) == "(8,4):(4,1)"
        and fragment.memory == "registers"
        and fragment.data.dtype == torch.float32
    )
    assert str(L.fragment_like("((2,4),3):((0,7),1)").layout) == "((2,4),3):((0,3),1)"
    source = L.Tensor(part.layout, list(range(4096)), part.offset)
    L.copy(source, fragment)
    assert fragment.values().tolist() == source.values()


@pytest.mark.parametrize(
    "src, dst, elem_bytes, arch, want",
    [
        # 8 consecutive halves of a column in both
        (
            ("(8,4):(1,64)", "global"),
            ("(8,4):(1,8)", "shared"),
            2,
            90,
            ("4 x cp.async.cg.shared.global (16 bytes)"),
        ),
        (
            ("(8,4):(1,64)", "global"),
            ("(8,4):(1,8)", "shared"),
            2,
            75,
            ("4 x ld.global.v4.b32 + st.shared.v4.b32 (16 bytes)"),
        ),
        # the column's step reduces the alignment to 4 bytes, then 2
        (
            ("(8,4):(1,66)", "global"),
            ("(8,4):(1,8)", "shared"),
            2,
            90,
            ("16 x cp.async.ca.shared.global (4 bytes)"),
        ),
        (
            ("(8,4):(1,65)", "global"),
            ("(8,4):(1,8)", "shared"),
            2,
            90,
            ("32 x ld.global.b16 + st.shared.b16 (2 bytes)"),
        ),
        # transposed: no elements are consecutive in both
        (
            ("(8,8):(8,1)", "global"),
            ("(8,8):(1,8)", "registers"),
            4,
            90,
            ("64 x ld.global.b32 (4 bytes)"),
        ),
        # a swizzle of 16-byte chunks keeps 16 bytes together, one of 8-byte chunks 8
        (
            ("(8,8):(64,1)", "registers"),
            ("Sw<3,3,3> o 0 o (8,8):(64,1)", "shared"),
            2,
            90,
            ("8 x st.shared.v4.b32 (16 bytes)"),
        ),
        (
            ("(8,8):(64,1)", "registers"),
            ("Sw<3,2,4> o 0 o (8,8):(64,1)", "shared"),
            2,
            90,
            ("16 x st.shared.v2.b32 (8 bytes)"),
        ),
        (
            ("4:1", "shared"),
            ("4:1", "global"),
            8,
            90,
            ("2 x ld.shared.v4.b32 + st.global.v4.b32 (16 bytes)"),
        ),
        (("8:1", "registers"), ("8:1", "registers"), 2, 90, ("8 x mov.b16 (2 bytes)")),
        (("8:1", "registers"), ("8:1", "registers"), 8, 90, ("16 x mov.b32 (4 bytes)")),
    ],
)
def test_the_instruction_of_a_copy(src, dst, elem_bytes, arch, want):
    assert str(L.choose_copy(at(*src), at(*dst), elem_bytes, arch)) == want


def test_an_offset_counts_too():
    to = at("8:1", "registers")
    assert [L.choose_copy(at("8:1", "global", o), to, 2).bytes for o in (0, 8, 4, 2, 1)] == [
        16,
        16,
        8,
        4,
        2,
    ]


def test_data_begin_where_their_memory_does():
    """A torch tensor that starts at its second element: a 16-byte access would be misaligned and
    stop a kernel. A tensor of step 2 allows no vectors."""
    memory, to = torch.arange(32, dtype=torch.float32), L.make_tensor("8:1", "registers")
    bytes_ = [
        L.choose_copy(L.Tensor("8:1", memory[o:], memory="global"), to, 4).bytes
        for o in (0, 1, 2, 3, 4)
    ]
    assert bytes_ == [16, 4, 8, 4, 16]
    assert L.choose_copy(L.Tensor("8:1", memory[::2], memory="global"), to).bytes == 4
    # the offset restores the alignment
    assert L.choose_copy(L.Tensor("8:1", memory[1:], 3, "global"), to).bytes == 16


def test_moves_between_registers_keep_the_order():
    """Two bytes move together only if they are neighbours in both, in the same order."""
    here = at("8:1", "registers")
    for src, want in (("8:1", "4 x mov.b16 (2 bytes)"), ("(2,4):(4,1)", "8 x mov.b16 (1 bytes)")):
        assert str(L.choose_copy(at(src, "registers"), here, 1)) == want
    assert str(L.choose_copy(at("(4,2):(2,1)", "registers"), here, 4)) == "8 x mov.b32 (4 bytes)"


def test_what_no_copy_can_be():
    for call, what in (
        (
            lambda: L.choose_copy(L.Tensor("8:1"), at("8:1", "shared"), 2),
            "src = 8:1 does not say its memory",
        ),
        (
            lambda: L.choose_copy(at("8:1", "shared"), at("4:1", "shared"), 2),
            "8 elements, 4:1 has 4",
        ),
        (lambda: L.choose_copy(at("8:1", "shared"), at("8:1", "shared")), "give elem_bytes"),
        (
            lambda: L.choose_copy(at("8:1", "shared"), at("8:1", "shared"), 3),
            "elements have 3 bytes",
        ),
        (
            lambda: L.choose_copy(L.make_tensor("8:1", dtype=torch.half), at("8:1", "shared"), 4),
            r"\[2, 4\] bytes",
        ),
    ):
        with pytest.raises(ValueError, match=what):
            call()
