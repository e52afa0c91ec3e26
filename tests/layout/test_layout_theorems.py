# SPDX-License-Identifier: BSD-3-Clause
"""torch_gpukern.layout: the theorems of the algebra as properties, and Step, identity tensors,
group and DLPack beside plain indexing.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_gpukern import layout as L
from torch_gpukern.layout import Layout, Refusal

few = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def compact(draw, most=4):
    """A bijection onto 0 .. size - 1: up to three modes in any order."""
    shape = tuple(draw(st.lists(st.integers(1, most), min_size=1, max_size=3)))
    strides, before = [0] * len(shape), 1
    for m in draw(st.permutations(range(len(shape)))):
        strides[m], before = before, before * shape[m]
    return Layout(shape, tuple(strides))


@st.composite
def injective(draw):
    """A layout whose modes leave room between them: no two coordinates share an offset."""
    inner = draw(compact())
    spread = draw(st.integers(1, 3))
    return Layout(inner.shape, tuple(spread * d for d in inner.stride))


def defined(op, *args):
    try:
        return None if None in args else op(*args)
    except Refusal:
        return None


# ---- theorems ------------------------------------------------------------------------------------


@few
@given(injective(), compact(), compact(most=3))
def test_composition_is_associative(a, b, c):
    """(a o b) o c = a o (b o c), as functions, wherever both are defined."""
    left, right = (
        defined(L.compose, defined(L.compose, a, b), c),
        defined(L.compose, a, defined(L.compose, b, c)),
    )
    if left is not None and right is not None:
        assert left.offsets == right.offsets == [a(b(c(i))) for i in range(c.size)]


def test_associativity_is_not_empty():
    """The property above is not vacuous: for many small layouts both sides are defined."""
    both = 0
    shapes = ("8:1", "(2,4):(4,1)", "(4,2):(2,1)", "4:2", "(2,2):(1,4)", "2:1")
    for a, b, c in itertools.product(shapes, repeat=3):
        left, right = (
            defined(L.compose, defined(L.compose, a, b), c),
            defined(L.compose, a, defined(L.compose, b, c)),
        )
        both += left is not None and right is not None and left.offsets == right.offsets
    assert both > 60


@few
@given(injective(), st.integers(1, 6), st.integers(1, 3))
def test_a_division_is_the_composition_with_tiler_and_complement(a, size, stride):
    """a / b = a o (b, b*), with b* the complement of b in size(a). Nothing is lost, and tile j is b
    moved by b*(j)."""
    b = Layout(size, stride)
    if a.size % (size * stride):  # otherwise it rounds up, which test_layout_algebra.py covers
        return
    rest = L.complement(b, a.size)
    divided = defined(L.logical_divide, a, b)
    assert (divided is None) == (defined(L.compose, a, L.join(b, rest)) is None)
    if divided is None:
        return
    assert divided[0].offsets == [a(b(i)) for i in range(b.size)]
    assert divided[1].offsets == [a(rest(j)) for j in range(rest.size)]
    assert [divided(i, j) for j in range(rest.size) for i in range(b.size)] == [
        a(b(i) + rest(j)) for j in range(rest.size) for i in range(b.size)
    ]
    assert sorted(divided.offsets) == sorted(a.offsets)


@few
@given(injective(), compact(most=3))
def test_a_product_repeats_a_in_the_offsets_that_it_leaves(a, b):
    """a x b = (a, a* o b), with a* the complement of a. The first mode is a, copies do not overlap,
    and a reordered b reorders the copies."""
    product = defined(L.logical_product, a, b)
    if product is None:
        return
    free = L.complement(a, a.size * b.cosize)
    assert product[0] == a and product[1].offsets == [free(b(j)) for j in range(b.size)]
    assert product.injective and product.size == a.size * b.size
    assert [product(i, j) for j in range(b.size) for i in range(a.size)] == [
        a(i) + free(b(j)) for j in range(b.size) for i in range(a.size)
    ]


@few
@given(compact(most=3), compact(most=3), compact(most=3))
def test_products_of_bijections_are_associative(a, b, c):
    """(a x b) x c and a x (b x c) are the same function of the index."""
    left = L.logical_product(L.logical_product(a, b), c)
    right = L.logical_product(a, L.logical_product(b, c))
    assert left.offsets == right.offsets and sorted(left.offsets) == list(
        range(a.size * b.size * c.size)
    )


@few
@given(compact(), compact(most=3))
def test_dividing_undoes_a_product(a, b):
    """(a x b) / size(a) has a as its first mode and its copies as the second."""
    product = L.logical_product(a, b)
    again = L.logical_divide(product, a.size)
    assert again[0].offsets == a.offsets and again[1].offsets == product[1].offsets


@few
@given(compact())
def test_inverses(a):
    for inverse in (L.right_inverse(a), L.left_inverse(a)):
        assert (
            [a(inverse(i)) for i in range(a.size)]
            == list(range(a.size))
            == [inverse(a(i)) for i in range(a.size)]
        )


# ---- Step ----------------------------------------------------------------------------------------


def test_local_tile_with_a_step_takes_what_the_tensor_has():
    """One tiler and one block coordinate serve all three operands of a product; compared with plain
    slices."""
    m, n, k, tiler = 24, 20, 16, (8, 4, 2)
    of = {"a": ((m, k), (1, None, 1)), "b": ((n, k), (None, 1, 1)), "c": ((m, n), (1, 1, None))}
    for shape, step in of.values():
        memory = np.arange(shape[0] * shape[1])
        tensor = L.Tensor(Layout(shape, (shape[1], 1)), memory)
        for coord in ((0, 0, 0), (2, 3, 5), (1, 4, 7)):
            tile = L.local_tile(tensor, tiler, coord, step=step)
            rows, cols = (
                slice(c * t, (c + 1) * t)
                for c, t, keep in zip(coord, tiler, step, strict=True)
                if keep
            )
            assert tile.values() == memory.reshape(shape)[rows, cols].T.reshape(-1).tolist()
    steps = L.local_tile(Layout((m, k), (k, 1)), tiler, (1, 4, None), step=(1, None, 1))
    assert str(steps.layout) == "((8,2),8):((16,1),2)"  # the tile, then its steps of k


def test_local_partition_with_a_step_shares_along_the_missing_mode():
    """Threads (m=2, n=4) partition a, which has no n. Threads that differ only in n get the same
    elements, and together they get each element once."""
    threads = Layout((2, 4), (4, 1))
    a = Layout((6, 1), (1, 0))
    mine = {
        (m, n): L.local_partition(Layout(6), threads, threads(m, n), step=(1, None)).offsets
        for m in range(2)
        for n in range(4)
    }
    assert (
        all(mine[m, n] == mine[m, 0] for m, n in mine)
        and sorted(mine[0, 0] + mine[1, 0]) == a.offsets
    )


@pytest.mark.parametrize(
    "call, what",
    [
        (
            lambda: L.local_tile("(8,8):(8,1)", (4, 4), (0, 0), step=(1, None, 1)),
            "tiler is (4, 4); expected a tuple",
        ),
        (
            lambda: L.local_tile("8:1", (4, 2), 0, step=(1, None)),
            "coord is 0; expected a tuple with an entry for each",
        ),
        (
            lambda: L.local_partition("8:1", "(2,2):(2,1)", 1, step=(1,)),
            "thr's shape is (2, 2); expected a tuple",
        ),
    ],
)
def test_a_step_that_does_not_fit(call, what):
    with pytest.raises(ValueError) as error:
        call()
    assert what in str(error.value)


# ---- identity tensors ----------------------------------------------------------------------------


@few
@given(
    st.recursive(
        st.integers(1, 5), lambda x: st.lists(x, min_size=1, max_size=3).map(tuple), max_leaves=4
    )
)
def test_the_element_at_a_coordinate_is_the_coordinate(shape):
    tensor = L.identity_tensor(shape)
    assert tensor.values() == list(tensor.layout.coords())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 11), st.integers(1, 11), st.integers(1, 5), st.integers(1, 5))
def test_identity_tiles_are_the_predicate(rows, cols, tile_rows, tile_cols):
    """In every tile, also the last, each coordinate is that of its element, and `inside` gives the
    coordinates within the shape."""
    for i in range(-(-rows // tile_rows)):
        for j in range(-(-cols // tile_cols)):
            where = L.local_tile(
                L.identity_tensor((rows, cols)), (tile_rows, tile_cols), (i, j)
            ).values()
            assert where == [
                (i * tile_rows + r, j * tile_cols + c)
                for c in range(tile_cols)
                for r in range(tile_rows)
            ]
            mask = L.inside(Layout((rows, cols)), (tile_rows, tile_cols), (i, j))
            assert [r < rows and c < cols for r, c in where] == mask


def test_identity_follows_data_through_partitions():
    """A thread's fragment of c holds the rows and columns that the MMA atom states."""
    mma = L.TiledMma(L.atoms.mma_sync(16, 16), (2, 1, 1))
    shape = (mma.shape[0], mma.shape[1])
    data = L.Tensor(Layout(shape, (shape[1], 1)), list(range(shape[0] * shape[1])))
    for thread in (0, 5, 63):
        where = mma.partition(L.identity_tensor(shape), thread, "c").values()
        assert mma.partition(data, thread, "c").values() == [r * shape[1] + c for r, c in where]


def test_identity_says_its_basis():
    tensor = L.identity_tensor((10, (4, 2)))
    assert repr(tensor) == "Tensor((10,(4,2)):(1@0,(1@1,1@2)) from (0,(0,0)))"
    assert (
        repr(L.local_tile(L.identity_tensor((8, 8)), (4, 2), (1, 2)))
        == "Tensor((4,2):(1@0,1@1) from (4,4))"
    )
    assert repr(tensor.layout and L.Tensor(Layout(2, (1 << 32) + 3), tensor.data)).startswith(
        "Tensor(2:3@0+1@1"
    )


# ---- group and DLPack ----------------------------------------------------------------------------


def test_group():
    x = Layout("(m=2,n=3,k=5):(15,5,1)")
    assert str(x.group(1, 3)) == "(m=2,(3,5)):(15,(5,1))" and x.group(0, 3)[0].shape == (2, 3, 5)
    for first, last in itertools.combinations(range(4), 2):
        assert x.group(first, last).offsets == x.offsets and x.group(first, last).rank == 4 - (
            last - first
        )
    assert L.Tensor(x, offset=7).group(0, 2)(5, 4) == 7 + x(1, 2, 4)
    swizzled = L.Swizzled(L.Swizzle(2, 0, 2), Layout("(4,2,4):(8,4,1)"))
    assert swizzled.group(0, 2).offsets == swizzled.offsets and swizzled.group(0, 2).rank == 2
    for first, last in ((1, 1), (-1, 2), (1, 4)):
        with pytest.raises(IndexError, match=r"group: modes .* of the 3"):
            x.group(first, last)


@pytest.mark.parametrize("dtype", ["float32", "int16", "complex64"])
def test_dlpack_in(dtype):
    array = np.arange(60).astype(dtype).reshape(3, 4, 5).transpose(2, 0, 1)[1:, :, ::2]
    tensor = L.Tensor.of(array)
    assert tensor.layout.stride == tuple(step // array.itemsize for step in array.strides)
    assert [complex(x) for x in tensor.values()] == [
        complex(array[c]) for c in tensor.layout.coords()
    ]
    array[2, 1, 1] = 99
    assert tensor[2, 1, 1] == 99  # the same memory


def test_dlpack_in_with_strides_below_0():
    """torch.from_dlpack ends the process at a negative stride. Reversed NumPy views keep their
    strides and their memory all the same."""
    whole = np.arange(60).reshape(3, 4, 5)
    for part in (whole[::-1], whole[:, ::-2, 1:], whole[::-1, 1::-1, ::-3].T, np.arange(1)[::-1]):
        tensor = L.Tensor.of(part)
        assert (
            tensor.layout.stride == tuple(step // part.itemsize for step in part.strides)
            or part.size == 1
        )
        assert [int(tensor[c]) for c in tensor.layout.coords()] == [
            part[c] for c in tensor.layout.coords()
        ]
    L.Tensor.of(whole[::-1])[0, 3, 4] = 99
    assert whole[2, 3, 4] == 99


def test_dlpack_out():
    memory = torch.arange(100)
    tensor = L.Tensor("((2,3),4):((20,1),5)", memory, offset=7)
    array = np.from_dlpack(tensor)
    assert (
        array.shape == (2, 3, 4)
        and [array.T.flat[i] for i in range(24)] == tensor.values().tolist()
    )
    array[1, 2, 3] = -5
    assert tensor[(1, 2), 3] == -5 and memory[7 + 20 + 2 + 15] == -5
    assert torch.from_dlpack(tensor[None, 2]).tolist() == tensor.view()[..., 2].tolist()
    assert L.Tensor.of(np.from_dlpack(tensor)).offsets == [o - 7 for o in tensor.offsets]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_view_of_data_that_have_a_step(step):
    """The view takes over stride and start of the data, so it has the values of the tensor."""
    memory = torch.arange(100)[4::step]
    tensor = L.Tensor("((2,3),4):((1,8),2)", memory, offset=3)
    assert tensor.view().permute(2, 1, 0).reshape(-1).tolist() == tensor.values().tolist()
    assert np.from_dlpack(tensor[None, 2])[1, 2] == tensor[(1, 2), 2] == memory[3 + 1 + 16 + 4]
    with pytest.raises(
        IndexError, match=f"reaches offset {len(memory)} of data with {len(memory)} elements"
    ):
        L.Tensor("2:1", memory, offset=len(memory) - 1).view()
    with pytest.raises(IndexError, match="reaches offset -1 of data"):
        L.Tensor("2:1", memory, offset=-1).view()
    with pytest.raises(ValueError, match="the data have 2 dimensions"):
        L.Tensor("2:1", memory.reshape(1, -1)).view()


def test_dlpack_refuses_what_strides_cannot_say():
    memory = torch.arange(64)
    with pytest.raises(Refusal, match="Sw<3,0,3> is no sum of strides"):
        np.from_dlpack(L.Tensor("Sw<3,0,3> o 0 o (8,8):(8,1)", memory))
    with pytest.raises(Refusal, match=r"mode 1, 8:-1, .*torch has no strides below 0"):
        L.Tensor("(8,8):(8,-1)", memory, offset=7).view()
    with pytest.raises(IndexError, match=r"reaches offset 64 of data with 64 elements"):
        L.Tensor("(8,8):(8,1)", memory, offset=1).view()
    with pytest.raises(TypeError, match="the data are list; expected a torch tensor"):
        L.Tensor("8:1", list(range(8))).view()
    with pytest.raises(ValueError, match="has no data"):
        L.Tensor("8:1").view()
