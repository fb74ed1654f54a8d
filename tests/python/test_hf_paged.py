"""Sequences of Transformers packed end to end: generate_batch(), and calls of the attention function by hand."""

import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.57")

import test_hf  # noqa: E402
from test_hf import VERSION, model_of  # noqa: E402

import lean_attention.hf  # noqa: E402
from lean_attention import decode  # noqa: E402
from lean_attention._hf_masks import KeyRanges  # noqa: E402
from lean_attention.hf import attention_forward  # noqa: E402

_one_thread = test_hf._one_thread


def same_tokens_in_batches(name, implementation):
    """generate_batch(): the tokens of the paged eager implementation, for prompts of uneven length."""
    pytest.importorskip("psutil")  # what Transformers asks how much memory a CPU has
    arguments = dict(
        generation_config=transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=16),  # by default most of the memory
        progress_bar=False,
    )
    tokens = []
    for each in ("paged|eager", implementation):
        model = model_of(name, "eager")
        model.set_attn_implementation(each)
        result = model.generate_batch(inputs=[[5, 6, 7, 8, 9, 10, 11], [3, 4, 5], list(range(20, 50))], **arguments)
        tokens.append([result[key].generated_tokens for key in sorted(result)])
    assert tokens[0] == tokens[1] and len(tokens[0]) == 3


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("implementation", ["paged|lean_flash", "lean_flash"])
@pytest.mark.filterwarnings("ignore:The `paged")
def test_continuous_batching(name, implementation):
    """generate_batch(): the tokens of the paged eager implementation, for prompts of uneven length."""
    if VERSION < (5, 23):
        pytest.skip("transformers below 5.23")
    same_tokens_in_batches(name, implementation)


def packed(**changes):
    """Two sequences, of 3 and 1 new tokens with 5 and 9 keys, as generate_batch() of transformers 5.24 calls the attention."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 4, 16), torch.randn(1, 2, 14, 16), torch.randn(1, 2, 14, 16)
    keywords = dict(
        cu_seq_lens_q=torch.tensor([0, 3, 4]), cu_seq_lens_k=torch.tensor([0, 5, 14]), max_length_q=3, max_length_k=9, is_causal=True,
        read_index=[torch.arange(10)], write_index=[torch.arange(4)], block_table=None,
    )  # fmt: skip
    module = types.SimpleNamespace(layer_idx=0, num_key_value_groups=2)
    tensors = dict(query=q, key=k, value=v)
    tensors.update({name: changes.pop(name) for name in tensors if name in changes})
    return attention_forward(module, *tensors.values(), changes.pop("mask", None), **{**keywords, **changes})[0], q, k, v


def each_alone(q, k, v, **rules):
    parts = [(q[:, :, :3], k[:, :, :5], v[:, :, :5]), (q[:, :, 3:], k[:, :, 5:], v[:, :, 5:])]
    return torch.cat([decode(*part, **rules) for part in parts], 2).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
def test_every_sequence_sees_its_own_keys(causal):
    out, q, k, v = packed(is_causal=causal)
    torch.testing.assert_close(out, each_alone(q, k, v, causal=causal))


def test_a_packed_window():
    out, q, k, v = packed(sliding_window=2)
    torch.testing.assert_close(out, each_alone(q, k, v, causal=True, window=(1, -1)))


def test_tokens_of_no_sequence_are_zero():
    out, q, k, v = packed(query=torch.nn.functional.pad(packed()[1], (0, 0, 0, 5)))
    torch.testing.assert_close(out[:, :4], each_alone(q, k, v, causal=True))
    assert out.shape[1] == 9 and not out[:, 4:].any()


def test_a_mask_beside_the_lengths_says_who_sees_whom():
    keys = torch.arange(14)
    mask = torch.stack([keys < 3, keys < 4, keys < 5, keys >= 5])[None, None]
    out, q, k, v = packed(is_causal=False, mask=mask)
    torch.testing.assert_close(out, each_alone(q, k, v, causal=True))


@pytest.mark.parametrize(
    "error, words, changes",
    [
        (ValueError, "^cu_seq_lens_q: is missing", dict(cu_seq_lens_q=None)),
        (ValueError, "^cu_seq_lens_k: is missing", dict(cu_seq_lens_k=None)),
        (ValueError, "^cu_seq_lens_k: dict of all kinds", dict(cu_seq_lens_k=dict(full_attention=torch.tensor([0, 5, 14])))),
        (ValueError, "^max_length_k: dict of all kinds", dict(max_length_k=dict(full_attention=9))),
        (ValueError, "^query, key: 2 and 1 rows", dict(query=torch.randn(2, 4, 4, 16))),
        (NotImplementedError, "^block_table: ", dict(block_table=torch.zeros(2, 4, dtype=torch.int32))),
        (NotImplementedError, "^indices: is not here for packed", dict(indices=torch.zeros(1, 4, 2, dtype=torch.int32))),
        (NotImplementedError, "^dropout: is not here for packed", dict(dropout=0.1)),
        (NotImplementedError, "^position_bias: ", dict(position_bias=torch.zeros(1, 4, 4, 14))),
        (NotImplementedError, "^sliding_window=2 with is_causal=False", dict(sliding_window=2, is_causal=False)),
    ],
)
def test_a_packed_call_that_cannot_be_read_is_refused(error, words, changes):
    with pytest.raises(error, match=words):
        packed(**changes)


def test_a_mask_that_is_causal_and_no_more_does_not_hide_the_lengths():
    """Models whose layers share keys have one where others have none."""
    starts, ends = torch.zeros(1, dtype=torch.int32), torch.full((1,), 4, dtype=torch.int32)
    mask = KeyRanges(starts, ends, 0, 4, 14, plain=True)
    out, q, k, v = packed(mask=mask, is_causal=None)
    torch.testing.assert_close(out, each_alone(q, k, v, causal=True))


@pytest.mark.skipif(VERSION < (5, 0), reason="transformers below 5: no bias")
def test_a_bias_beside_a_mask_and_lengths_is_added():
    keys = torch.arange(14)
    mask = torch.stack([keys < 3, keys < 4, keys < 5, keys >= 5])[None, None]
    bias = torch.linspace(-1, 1, 14).expand(1, 4, 4, 14)
    out, q, k, v = packed(is_causal=False, mask=mask, position_bias=bias)
    expected = decode(q, k, v, mask=torch.where(mask, bias, -torch.inf))
    torch.testing.assert_close(out.transpose(1, 2), expected)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "read_index", "block_table"])
def test_any_of_the_signs_makes_a_call_packed(name):
    none = dict.fromkeys(["cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index", "block_table"])
    with pytest.raises((ValueError, NotImplementedError), match="missing|of all kinds|^block_table"):
        packed(**{**none, name: [torch.arange(4)]})
