"""merge_states(): split + merge = whole."""

import numpy as np
import pytest
from conftest import arrays
from oracle import attention

import lean_attention
from lean_attention import decode, merge_states


@pytest.mark.parametrize("cut", [0, 1, 20, 37])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_two_halves_make_the_whole(cut, framework):
    q, k, v = arrays()
    if framework == "torch":
        torch = pytest.importorskip("torch")
        q, k, v = (torch.from_numpy(x) for x in (q, k, v))
    first = decode(q, k[:, :, :cut], v[:, :, :cut], return_lse=True)
    second = decode(q, k[:, :, cut:], v[:, :, cut:], return_lse=True)
    out, lse = merge_states(*first, *second)
    assert type(out) is type(q)
    attention(q, k, v).check(out, lse)


def test_inputs_are_left_alone():
    o, lse = np.ones((3, 4), np.float32), np.zeros(3, np.float32)
    merge_states(o, lse, o * 2, lse)
    assert (o == 1).all() and (lse == 0).all()


def test_nothing_and_nothing_is_nothing():
    o, lse = np.ones((1, 4), np.float32), np.full(1, -np.inf, np.float32)
    out, merged = merge_states(o, lse, o, lse)
    assert (out == 0).all() and merged == -np.inf


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("nothing", [-np.inf, np.inf])
def test_an_empty_state_changes_nothing_whatever_its_o_holds(framework, nothing):
    o, lse = np.full((2, 4), 5, np.float32), np.array([1.5, 3e38], np.float32)
    empty, none = np.full((2, 4), np.nan, np.float32), np.full(2, nothing, np.float32)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        o, lse, empty, none = (torch.from_numpy(x) for x in (o, lse, empty, none))
    for out, merged in (merge_states(o, lse, empty, none), merge_states(empty, none, o, lse)):
        assert (out == o).all() and (merged == lse).all()
    out, merged = merge_states(empty, none, empty, none)
    assert (out == 0).all() and (merged == -np.inf).all()


def test_shapes_must_fit():
    o, lse = np.ones((3, 4), np.float32), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="^o_b"):
        merge_states(o, lse, o[:2], lse[:2])
    with pytest.raises(ValueError, match="^o_a"):
        lean_attention.merge_states(o, lse[:2], o, lse)


def test_masked_arrays_are_refused():
    o, lse = np.ones((3, 4), np.float32), np.zeros(3, np.float32)
    with pytest.raises(TypeError, match="^o_b: a masked array"):
        merge_states(o, lse, np.ma.masked_array(o, True), lse)
