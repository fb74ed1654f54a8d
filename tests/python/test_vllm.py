"""vLLM itself with this library's attention, on the CPU: the tokens of its own attention, whatever the scheduler does.

Runs in .venv-vllm (tools/setup.sh), and nowhere else; tests/python/test_vllm_call.py has what needs no engine.
"""

import importlib.util
import os

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("no vllm", allow_module_level=True)

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process, where calls can be counted
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np
from vllm_models import choose, engine, folder_of, generate, log_probabilities, prompts

from lean_attention import _vllm_call
from lean_attention import vllm as plugin

KINDS = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "opt", "bloom")
UNEVEN = (5, 130, 33, 300, 64, 1, 17, 201)
SAME_LOGPROB = 1e-3  # fp32 through two layers, sums in another order; measured: 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return lambda kind: folder_of(kind, folder)


@pytest.fixture
def calls(monkeypatch):
    """What the layers of this library are asked for: (longest query, requests, whether K and V are written)."""
    seen = []
    attend = _vllm_call.PagedLayer.attend

    def noted(self, query, key, value, pages, batch, out, scales=(1.0, 1.0)):
        seen.append((batch.max_query_len, len(batch.seq_lens), self.writes))
        return attend(self, query, key, value, pages, batch, out, scales)

    monkeypatch.setattr(_vllm_call.PagedLayer, "attend", noted)
    return seen


def assert_same(ours, theirs):
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for (_, mine), (_, other) in zip(ours, theirs):
        np.testing.assert_allclose(mine, other, atol=SAME_LOGPROB, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_engines_own_attention(kind, models, calls):
    """Long uneven prompts in chunks of 64 tokens beside decode rows; then again, from cached prefixes."""
    given = prompts(UNEVEN)
    longer = [prompt + [7, 8, 9] for prompt in given]
    with engine(models(kind), ours=False) as llm:
        theirs, theirs_longer = generate(llm, given), generate(llm, longer)
    assert not calls
    with engine(models(kind), ours=True) as llm:
        ours, ours_longer = generate(llm, given), generate(llm, longer)
    assert_same(ours, theirs)
    assert_same(ours_longer, theirs_longer)
    longest, requests = [call[0] for call in calls], [call[1] for call in calls]
    assert max(longest) > 8 and min(longest) == 1 and max(requests) > 4
    assert any(length > 1 and count > 1 for length, count in zip(longest, requests))  # prefill and decode in one call
