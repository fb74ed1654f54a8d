"""tools/check_results.py must notice what the schema of result files forbids."""

import importlib.util
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("check_results", ROOT / "tools" / "check_results.py")
check_results = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_results)

SCHEMA = json.loads((ROOT / "bench" / "results" / "schema.json").read_text())
LINE = {"row": "8x8k", "impl": "lean", "us": 2.0, "us_min": 1.0, "us_max": 3.0, "device": "a GPU", "date": "2026-11-25"}


def faults(line, folder, name="results.jsonl"):
    file = folder / name
    file.write_text(json.dumps(line) + "\n")
    return list(check_results.file_faults(file, SCHEMA))


def test_a_measured_line_and_one_with_its_reason_pass(tmp_path):
    assert not faults(LINE, tmp_path)
    assert not faults({**LINE, "us": None, "note": "no kernel for it"}, tmp_path)


@pytest.mark.parametrize("change", [{"us": -1.0}, {"us": "2"}, {"us": None}, {"device": ""}, {"date": "yesterday"}, {"lens": []},
                                    {"lens": [1.5]}, {"dtype": "float16"}, {"error_ratio": 1.01}, {"ceiling_us": 0},
                                    {"us": None, "note": ""}, {"quick": True}])
def test_a_wrong_line_is_found(tmp_path, change):
    assert faults({**LINE, **change}, tmp_path)


@pytest.mark.parametrize("name", LINE)
def test_a_line_that_lacks_a_field_is_found(tmp_path, name):
    assert faults({key: value for key, value in LINE.items() if key != name}, tmp_path)


def test_only_experiments_may_have_fields_of_their_own(tmp_path):
    line = {"in_flight_kb": 96, "us": 2.0, "device": "a GPU"}
    assert faults(line, tmp_path)
    (tmp_path / "experiments").mkdir()
    assert not faults(line, tmp_path / "experiments")
    assert faults({"us": 2.0}, tmp_path / "experiments")
