"""schedule(): the tile map as text, JSON, SVG and a plot."""

import json
import subprocess
import sys

import pytest

import lean_attention
from lean_attention import Options


def shown(**options):
    return lean_attention.schedule([5000, 37, 1], q_heads=32, kv_heads=8, head_dim=128, options=Options(workers=13, **options))


def test_every_tile_of_every_output_is_owned_once():
    schedule = shown()
    owned = {}
    for share in schedule.shares:
        for segment in share["segments"]:
            tiles = owned.setdefault((segment["sequence"], segment["kv_head"], segment["row_block"]), [])
            tiles += range(segment["tile_begin"], segment["tile_end"])
    assert len(owned) == schedule.summary["outputs"] == 24
    assert all(sorted(tiles) == list(range(len(tiles))) for tiles in owned.values())
    assert sum(len(tiles) for tiles in owned.values()) == schedule.summary["tiles"]


def test_forms():
    schedule = shown()
    assert json.loads(schedule.to_json()) == schedule.to_dict()
    assert "13 of 13 busy" in str(schedule)
    assert "<svg" in schedule.to_svg() and schedule.to_svg().endswith("</svg>\n")
    assert schedule._repr_svg_() == schedule.to_svg()
    assert repr(schedule).startswith("<Schedule lean:")


def test_policies_differ():
    assert shown(policy="data_parallel").summary["worker_tiles"]["balance"] < shown().summary["worker_tiles"]["balance"]


def test_plot_draws_a_bar_for_each_segment():
    pytest.importorskip("matplotlib").use("Agg")
    schedule = shown()
    axes = schedule.plot()
    assert len(axes.patches) == schedule.summary["segments"]


def test_misuse():
    with pytest.raises(ValueError, match="^dtype"):
        lean_attention.schedule([1], q_heads=1, dtype="float64")
    with pytest.raises(ValueError, match="^q: heads"):
        lean_attention.schedule([1], q_heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="^leftpad"):
        lean_attention.schedule([1, 2], q_heads=1, leftpad=[0])
    with pytest.raises(TypeError, match="^seqlens = .*integers"):
        lean_attention.schedule([1.9, 2], q_heads=1)
    with pytest.raises(ValueError, match="^seqlens = .*allowed 0"):
        lean_attention.schedule([-1, 2], q_heads=1)
    with pytest.raises(ValueError, match="must fit 32 bits"):
        lean_attention.schedule([1], q_heads=2**32 + 1)


@pytest.mark.parametrize(
    "message, given",
    [
        ("causal: 'no': True or False is needed", dict(causal="no")),
        ("causal: 0.5: True or False is needed", dict(causal=0.5)),
        ("window: 3: a pair", dict(window=3)),
        (r"window: \(True, 1\): a pair", dict(window=(True, 1))),
        (r"leftpad = \[4\]: allowed 0 to each sequence's length, \[3\]", dict(leftpad=[4])),
    ],
)
def test_what_decode_refuses_is_refused_here(message, given):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        lean_attention.schedule([3], q_heads=4, **given)


def test_the_doctor_passes():
    done = subprocess.run([sys.executable, "-m", "lean_attention", "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "self-test  ok" in done.stdout, done.stdout + done.stderr


def test_importing_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import numpy, lean_attention; a = numpy.ones((1, 1, 8), 'f'); lean_attention.decode(a, a[None], a[None])"
    subprocess.run([sys.executable, "-c", code], check=True)
