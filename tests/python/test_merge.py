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


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("name", ["o_a", "lse_a", "o_b", "lse_b"])
@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_numbers_that_would_be_cut_are_refused(framework, name, dtype):
    states = dict(zip(("o_a", "lse_a", "o_b", "lse_b"), 2 * (np.ones((2, 4), np.float32), np.zeros(2, np.float32))))
    states[name] = states[name].astype(dtype)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        states = {key: torch.from_numpy(x) for key, x in states.items()}
    with pytest.raises(TypeError, match=f"^{name}: .*{dtype}"):
        merge_states(**states)


def test_strides_mean_nothing():
    o = np.arange(12, dtype=np.float32).reshape(4, 3)
    lse = np.arange(8, dtype=np.float32)[::2]
    for a, b in zip(merge_states(o.T.copy().T, lse, o.T.copy().T, lse), merge_states(o, lse.copy(), o, lse.copy())):
        assert (a == b).all()


def test_shapes_must_fit():
    o, lse = np.ones((3, 4), np.float32), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="^o_b"):
        merge_states(o, lse, o[:2], lse[:2])
    with pytest.raises(ValueError, match="^o_a"):
        lean_attention.merge_states(o, lse[:2], o, lse)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(3, 0), (0, 0), ()])
def test_states_without_dims_are_refused_by_name(shape, framework):
    of = np.ones if framework == "numpy" else pytest.importorskip("torch").ones
    o, lse = of(shape), of(shape[:-1])
    with pytest.raises(ValueError, match="^o_a: shape .*: its head dim must not be 0"):
        merge_states(o, lse, o, lse)


def test_masked_arrays_are_refused():
    o, lse = np.ones((3, 4), np.float32), np.zeros(3, np.float32)
    with pytest.raises(TypeError, match="^o_b: a masked array"):
        merge_states(o, lse, np.ma.masked_array(o, True), lse)


def torch_states(torch, dtype, rows=6, dims=5):
    torch.manual_seed(3)
    return [x for _ in range(2) for x in (torch.randn(rows, dims).to(dtype), torch.randn(rows))]


@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("bfloat16", "float32"), ("float64", "float64")])
def test_torch_states_of_any_type_and_strides(dtypes):
    torch = pytest.importorskip("torch")
    o_a, lse_a, o_b, lse_b = torch_states(torch, torch.float32)
    o_a, o_b = (o.to(getattr(torch, name)) for o, name in zip((o_a, o_b), dtypes))
    weights = torch.softmax(torch.stack((lse_a, lse_b)).double(), 0).unsqueeze(-1)
    expected = (weights[0] * o_a.double() + weights[1] * o_b.double()).to(o_a.dtype)
    for a, b in ((o_a, o_b), (o_a.T.contiguous().T, o_b.T.contiguous().T)):
        out, lse = merge_states(a, lse_a, b, lse_b)
        assert out.dtype == o_a.dtype and lse.dtype == torch.float32
        torch.testing.assert_close(out, expected, atol=1e-6 if o_a.dtype == torch.float64 else 2e-2, rtol=0)
        torch.testing.assert_close(lse, torch.logaddexp(lse_a, lse_b))


@pytest.mark.parametrize("at", range(4))
def test_gradients_are_refused_by_name(at):
    torch = pytest.importorskip("torch")
    states = torch_states(torch, torch.float32)
    states[at].requires_grad_()
    name = ("o_a", "lse_a", "o_b", "lse_b")[at]
    for merge in (merge_states, torch.compile(merge_states, backend="eager"), torch.ops.lean_attention.merge_states):
        with pytest.raises(RuntimeError, match=f"{name}: requires a gradient"):
            merge(*states)
    with torch.no_grad():
        merge_states(*states)


def test_the_operator_keeps_torchs_rules_and_is_recorded():
    torch = pytest.importorskip("torch")
    states = torch_states(torch, torch.bfloat16)
    torch.library.opcheck(torch.ops.lean_attention.merge_states.default, states, test_utils=("test_schema", "test_faketensor"))
    others = torch_states(torch, torch.bfloat16)[2:] + torch_states(torch, torch.bfloat16)[:2]
    for recorded in (torch.jit.trace(merge_states, tuple(states)), torch.compile(merge_states, fullgraph=True, backend="eager")):
        assert all(torch.equal(*pair) for pair in zip(recorded(*others), merge_states(*others)))
