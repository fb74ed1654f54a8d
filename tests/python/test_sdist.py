"""The source distribution: what the wheel is built from, and nothing else that lies in the tree."""

import pathlib
import tarfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("cmake", "include", "src", "integrations", "python")
FILES = {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}


def test_sdist_holds_what_the_wheel_is_built_from(tmp_path, monkeypatch):
    backend = pytest.importorskip("scikit_build_core.build")
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / backend.build_sdist(str(tmp_path))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    sources = {name for name in sources if "__pycache__" not in name and not name.endswith((".pyc", ".so"))}
    assert len(sources) > 100
    assert held == sources | FILES
