"""pytest plugin of run.py for Transformers' tests of models: this library's attention under the name "sdpa", outcomes as plugin.py sorts them."""

from __future__ import annotations

import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from lean_attention import hf
from lean_attention._hf_masks import attention_mask
from plugin import pytest_runtest_makereport  # noqa: F401  pytest finds it here


def pytest_configure() -> None:
    for interface, ours in ((AttentionInterface, hf.attention_forward), (AttentionMaskInterface, attention_mask)):
        interface._global_mapping["sdpa"] = ours  # register() would refuse the name in models that have sdpa alone


def pytest_report_header() -> str:
    return f"transformers {transformers.__version__}, sdpa by lean_attention"
