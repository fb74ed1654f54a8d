"""lean_attention.hf_kernel: the folder that `kernels` loads, and models of Transformers that name it without register()."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")
kernels = pytest.importorskip("kernels", minversion="0.17.2")

import test_hf  # noqa: E402
from test_hf import generated, model_of, prompts  # noqa: E402
from test_hf_paged import same_tokens_in_batches  # noqa: E402
from transformers.utils import is_kernels_available  # noqa: E402

from lean_attention import hf_kernel  # noqa: E402
from lean_attention.compat import flash_attn  # noqa: E402

if not is_kernels_available():
    pytest.skip(f"transformers {transformers.__version__} does not take kernels {kernels.__version__}", allow_module_level=True)

_one_thread = test_hf._one_thread
NAME = hf_kernel.REPOSITORY
FUNCTIONS = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """`kernels` reads the variable once a process."""
    path = tmp_path_factory.mktemp("kernel")
    assert hf_kernel.main([str(path)]) == 0
    before = os.environ.get("LOCAL_KERNELS")
    os.environ["LOCAL_KERNELS"] = f"{NAME}={path}"
    yield path
    del os.environ["LOCAL_KERNELS"]
    if before is not None:
        os.environ["LOCAL_KERNELS"] = before


@pytest.fixture
def calls(monkeypatch):
    """Names of the kernel's functions that Transformers called."""
    from transformers import modeling_flash_attention_utils as utils

    utils.lazy_import_flash_attention(NAME)
    seen = set()
    for name in ("_flash_fn", "_flash_varlen_fn"):
        function = getattr(utils, name)

        def call(*args, name=name, function=function, **kwargs):
            seen.add(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(utils, name, call)
    return seen


def test_the_folder_is_a_kernel(folder):
    kernel = kernels.get_local_kernel(pathlib.Path(folder))
    assert sorted(kernel.__all__) == FUNCTIONS
    assert all(getattr(kernel, name) is getattr(flash_attn, name) for name in FUNCTIONS)
    assert kernels.get_kernel(NAME, version=1) is kernel


def test_every_variant_is_whole(folder):
    for variant in (folder / "build").iterdir():
        read = kernels.Metadata.read_from_file(variant / "metadata.json")
        assert str(read.backend.backend_type).lower().endswith(variant.name.removeprefix("torch-"))
        assert read.id.isidentifier() and read.license == "Apache-2.0"
    ids = [json.loads(path.read_text())["id"] for path in (folder / "build").glob("*/metadata.json")]
    assert len(set(ids)) == len(hf_kernel.DEVICES) == len(ids)


@pytest.mark.parametrize("name", [name for name in test_hf.MODELS if name != "gpt_oss"])
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left_padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_same_tokens_as_eager(name, padded, cache, calls):
    arguments = {} if cache == "dynamic" else dict(cache_implementation="static", disable_compile=True)
    inputs = prompts(3, padded)
    expected = generated(model_of(name, "eager"), inputs, **arguments)
    assert len(set(expected[:, 11:].flatten().tolist())) > 6  # a model that repeats itself would prove nothing
    assert torch.equal(generated(model_of(name, NAME), inputs, **arguments), expected)
    assert calls


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_continuous_batching(name, calls):
    """generate_batch(): the tokens of the paged eager implementation, for prompts of uneven length."""
    same_tokens_in_batches(name, NAME)
    assert calls == {"_flash_varlen_fn"}


def test_packed_sequences_do_not_see_each_other(calls):
    ids = torch.arange(5, 17)[None]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]])
    with torch.no_grad():
        got = model_of("llama", NAME)(input_ids=ids, position_ids=positions, use_cache=False).logits
        eager = model_of("llama", "eager")
        expected = torch.cat([eager(input_ids=part).logits for part in ids.split([5, 4, 3], 1)], 1)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert calls == {"_flash_varlen_fn"}


def test_without_the_package_the_kernel_says_what_it_needs(folder):
    path = folder / "build" / "torch-cpu" / "__init__.py"
    done = subprocess.run([sys.executable, "-I", "-S", str(path)], text=True, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("which is not installed: pip install lean-attention")


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SystemExit, match="2"):
        hf_kernel.main([str(file)])
    assert "FOLDER: " in capsys.readouterr().err
