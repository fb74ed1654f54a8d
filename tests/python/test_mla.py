"""Multi-head latent attention: FlashMLA's function and FlashInfer's wrapper, values that are the first dims of the keys."""

import math

import pytest

torch = pytest.importorskip("torch")

from oracle import attention  # noqa: E402
from pages import csr, paged, tensors  # noqa: E402

from lean_attention.compat.flash_mla import (  # noqa: E402
    flash_mla_with_kvcache, flash_mla_with_kvcache_fp8, get_mla_metadata, get_mla_metadata_dense_fp8,
)
from lean_attention.compat.flashinfer import BatchMLAPagedAttentionWrapper  # noqa: E402

LENGTHS = [96, 0, 41, 7]


def latent(dim, value_dim, heads, q_tokens, page=16, dtype="float32"):
    """q, k of one head with ragged lengths, pages of k, their table."""
    q, k, _ = (x.to(getattr(torch, dtype)) for x in tensors(
        batch=len(LENGTHS), q_heads=heads, kv_heads=1, q_tokens=q_tokens, kv_tokens=96, dim=dim, value_dim=value_dim,
    ))  # fmt: skip
    pool, _, table = paged(k, k, page)
    return q, k, pool, table


@pytest.mark.parametrize("heads, q_tokens, dtype", [(16, 1, "bfloat16"), (128, 1, "float32"), (16, 4, "float16"), (5, 2, "float32")])
@pytest.mark.parametrize("dim, value_dim", [(576, 512), (40, 24)])
def test_flash_mla(heads, q_tokens, dtype, dim, value_dim):
    q, k, pool, table = latent(dim, value_dim, heads, q_tokens, dtype=dtype)
    given = torch.tensor(LENGTHS, dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(
        q.transpose(1, 2), pool, table, given, value_dim, *get_mla_metadata(given, heads, 1), causal=True, softmax_scale=0.1
    )
    assert out.shape == (len(LENGTHS), q_tokens, heads, value_dim) and lse.shape == (len(LENGTHS), heads, q_tokens)
    exact = attention(q, k, k[..., :value_dim], seqlens=LENGTHS, scale=0.1, causal=True, dtype=dtype)
    exact.check(out.transpose(1, 2), lse)


def test_flash_mla_scales_by_the_keys_dims_where_nothing_is_said():
    q, k, pool, table = latent(40, 24, 5, 1)
    given = torch.tensor(LENGTHS, dtype=torch.int32)
    out, _ = flash_mla_with_kvcache(q.transpose(1, 2), pool, table, given, 24)
    attention(q, k, k[..., :24], seqlens=LENGTHS, scale=40**-0.5).check(out.transpose(1, 2))


@pytest.mark.parametrize("float8_queries", [False, True])
@pytest.mark.parametrize("heads, q_tokens, dim, value_dim", [(16, 1, 576, 512), (5, 2, 40, 24)])
def test_flash_mla_of_float8_rows(heads, q_tokens, dim, value_dim, float8_queries):
    """Rows count times their scale, and float8 queries times theirs; vLLM's function for them is the same."""
    q, k, _, _ = latent(dim, value_dim, heads, q_tokens, dtype="bfloat16")
    of_q, of_k = torch.tensor([0.5]), torch.tensor([0.25])
    k = (k / of_k).to(torch.float8_e4m3fn)
    pool, _, table = paged(k, k, 16)
    if float8_queries:
        q = (q / of_q).to(torch.float8_e4m3fn)
    given = torch.tensor(LENGTHS, dtype=torch.int32)
    metadata = get_mla_metadata_dense_fp8(given, heads, 1)
    call = (q.transpose(1, 2), pool, table, given, value_dim, *metadata)
    scales = dict(descale_k=of_k, descale_q=of_q if float8_queries else None)
    out, lse = flash_mla_with_kvcache(*call, causal=True, softmax_scale=0.1, is_fp8_kvcache=True, **scales)
    assert out.dtype == torch.bfloat16
    exact_q = q.float() * (of_q if float8_queries else 1)
    keys = k.float() * of_k
    exact = attention(exact_q, keys, keys[..., :value_dim], seqlens=LENGTHS, scale=0.1, causal=True, dtype="bfloat16")
    exact.check(out.transpose(1, 2), lse)
    same, same_lse = flash_mla_with_kvcache_fp8(*call, 0.1, True, scales["descale_q"], of_k)
    assert torch.equal(same, out) and torch.equal(same_lse, lse)


def test_flash_mla_refuses_by_name():
    q, _, pool, table = latent(40, 24, 5, 1)
    call = (q.transpose(1, 2), pool, table, torch.tensor(LENGTHS, dtype=torch.int32))
    for refused in ("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"):
        with pytest.raises(NotImplementedError, match=refused):
            flash_mla_with_kvcache(*call, 24, **{refused: torch.ones(5)})
    with pytest.raises(TypeError, match="is_fp8_kvcache: k_cache is torch.float32"):
        flash_mla_with_kvcache(*call, 24, is_fp8_kvcache=True)
    with pytest.raises(NotImplementedError, match="is_fp8_kvcache: rows of 656 elements"):  # what they hold is not one number a dim
        flash_mla_with_kvcache(call[0], pool.new_zeros(2, 64, 1, 656).to(torch.float8_e4m3fn), *call[2:], 24, is_fp8_kvcache=True)
    with pytest.raises(NotImplementedError, match="descale_k: k_cache is torch.float32"):
        flash_mla_with_kvcache(*call, 24, descale_k=torch.ones(1))
    codes = (call[0], pool.to(torch.float8_e4m3fn), *call[2:])
    for given in (call, codes):  # not left out in silence, beside whatever cache; a number of 1 asks for nothing
        for scale in (torch.ones(1), 0.5):
            with pytest.raises(NotImplementedError, match="descale_q: q is torch.float32"):
                flash_mla_with_kvcache(*given, 24, descale_q=scale)
        assert torch.equal(flash_mla_with_kvcache(*given, 24, descale_q=1.0, descale_k=1.0)[0], flash_mla_with_kvcache(*given, 24)[0])
    with pytest.raises(TypeError, match="q: torch.float8_e4m3fn: k and v are torch.float32"):
        flash_mla_with_kvcache(call[0].to(torch.float8_e4m3fn), *call[1:], 24)
    with pytest.raises(TypeError, match="sink: flash_mla_with_kvcache"):
        flash_mla_with_kvcache(*call, 24, sink=None)
    for dims in (0, 41):
        with pytest.raises(ValueError, match=f"head_dim_v = {dims}"):
            flash_mla_with_kvcache(*call, dims)
    with pytest.raises(ValueError, match=r"k_cache: shape .*: expected \[pages, page, Hkv, d\]"):
        flash_mla_with_kvcache(call[0], pool[:, :, 0], *call[2:], 24)
    with pytest.raises(TypeError, match="head_dim_v = 2.5"):
        flash_mla_with_kvcache(*call, 2.5)
    with pytest.raises(ValueError, match="block_table: None"):
        flash_mla_with_kvcache(*call[:2], None, call[3], 24)


@pytest.mark.parametrize("rows_hold_both", [True, False])
@pytest.mark.parametrize("heads, q_tokens", [(16, 1), (5, 3)])
def test_flashinfer(rows_hold_both, heads, q_tokens, ckv=32, kpe=8, page=16):
    q, k, pool, table = latent(ckv + kpe, ckv, heads, q_tokens, page)
    cache = pool[:, :, 0].split((ckv, kpe), -1)
    if not rows_hold_both:
        cache = tuple(part.contiguous() for part in cache)
    packed = q.transpose(1, 2).flatten(0, 1)
    indptr, indices, _ = csr(table, LENGTHS, page)
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1))
    queries = torch.arange(len(LENGTHS) + 1, dtype=torch.int32) * q_tokens
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    wrapper.plan(queries, indptr, indices, lengths, heads, ckv, kpe, page, True, 0.2, torch.float32, torch.float32)
    out, lse = wrapper.run(packed[..., :ckv], packed[..., ckv:], *cache, return_lse=True)
    by_sequence = out.view(len(LENGTHS), q_tokens, heads, ckv).transpose(1, 2)
    rows = lse.view(len(LENGTHS), q_tokens, heads).transpose(1, 2) / math.log2(math.e)
    attention(q, k, k[..., :ckv], seqlens=LENGTHS, scale=0.2, causal=True).check(by_sequence, rows)
    natural = torch.empty_like(lse)
    given = torch.empty_like(out)
    wrapper.run(packed[..., :ckv], packed[..., ckv:], *cache, given, natural, return_lse=True, return_lse_base_on_e=True)
    assert torch.equal(given, out)
    torch.testing.assert_close(natural * math.log2(math.e), lse)


def test_flashinfer_of_float8_rows(ckv=32, kpe=8, page=16, heads=5):
    """Both parts have one scale, which keys and values count times."""
    q, k, _, _ = latent(ckv + kpe, ckv, heads, 1, page, dtype="bfloat16")
    k = (4 * k).to(torch.float8_e4m3fn)
    pool, _, table = paged(k, k, page)
    packed = q.transpose(1, 2).flatten(0, 1)
    indptr, indices, _ = csr(table, LENGTHS, page)
    wrapper = BatchMLAPagedAttentionWrapper()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    wrapper.plan(torch.arange(len(LENGTHS) + 1, dtype=torch.int32), indptr, indices, lengths, heads, ckv, kpe, page, True, 0.2)
    out = wrapper.run(packed[..., :ckv], packed[..., ckv:], *pool[:, :, 0].split((ckv, kpe), -1), ckv_scale=0.25, kpe_scale=0.25)
    keys = 0.25 * k.float()
    exact = attention(q, keys, keys[..., :ckv], seqlens=LENGTHS, scale=0.2, causal=True, dtype="bfloat16")
    exact.check(out.view(len(LENGTHS), 1, heads, ckv).transpose(1, 2))


def test_flashinfer_refuses_by_name():
    wrapper = BatchMLAPagedAttentionWrapper()
    part = torch.zeros(1, 5, 8)
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(part, part, part, part)
    one = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="use_profiler"):
        wrapper.plan(one, one, one[:1], one[1:], 5, 8, 8, 5, False, 1.0, use_profiler=True)
    wrapper.plan(one, one, one[:1], one[1:], 5, 8, 8, 5, False, 1.0)
    with pytest.raises(ValueError, match=r"^q_nope, q_pe: shapes .*\(heads, ckv dims, kpe dims\) = \(5, 8, 8\)"):
        wrapper.run(part, part[..., :4], part, part)
    with pytest.raises(ValueError, match="^q_nope, q_pe: shapes"):
        wrapper.run(part, part[:, :1], part, part)
    for dims in (7, 9):  # of 16 in all: queries and keys would be cut at different places
        with pytest.raises(ValueError, match=r"^ckv_cache, kpe_cache: shapes .*\(ckv dims, kpe dims, page\) = \(8, 8, 5\)"):
            wrapper.run(part, part, torch.zeros(1, 5, dims), torch.zeros(1, 5, 16 - dims))
    with pytest.raises(ValueError, match=r"^lse: shape \(9,\): expected \(1, 5\)"):
        wrapper.run(part, part, part, part, out := torch.full_like(part, 3), torch.empty(9), return_lse=True)
    assert (out == 3).all()
    lse = torch.full((1, 5), torch.nan)
    assert wrapper.run(part, part, part, part, lse=lse).shape == part.shape and not lse.isnan().any()
    with pytest.raises(NotImplementedError, match="page_table"):
        wrapper.run(part, part, part, part, page_table=one)
    with pytest.raises(TypeError, match="^q_pe: torch.float16: q_nope's torch.float32 is needed"):
        wrapper.run(part, part.half(), part, part)
    with pytest.raises(TypeError, match="^kpe_cache: torch.float8_e4m3fn: ckv_cache's torch.float32 is needed"):
        wrapper.run(part, part, part, part.to(torch.float8_e4m3fn))
    codes = part.to(torch.float8_e4m3fn)
    for name, value in (("ckv_scale", 0.5), ("kpe_scale", torch.ones(1)), ("kpe_scale", 0.0)):  # 0 is a scale, 1 is none
        for cache in (part, codes):
            with pytest.raises(NotImplementedError, match=f"^{name}: both parts of float8 rows"):
                wrapper.run(part, part, cache, cache, **{name: value})
    with pytest.raises(NotImplementedError, match="^ckv_scale: both parts of float8 rows"):
        wrapper.run(part, part, codes, codes, ckv_scale=0.5, kpe_scale=0.25)
    with pytest.raises(NotImplementedError, match="^ckv_scale_arr: both parts of float8 rows"):
        wrapper.run(part, part, codes, codes, ckv_scale_arr=torch.ones(5), kpe_scale=1.0)
    wrapper.run(part, part, part, part, ckv_scale=1.0, kpe_scale=None)
    with pytest.raises(ValueError, match="kpe_cache: shape"):
        wrapper.run(part, part, part, torch.zeros(2, 5, 8))
    with pytest.raises(NotImplementedError, match="cutlass"):
        BatchMLAPagedAttentionWrapper(backend="cutlass")


@pytest.mark.parametrize("version", ["DeepseekV2", "DeepseekV3"])
def test_models_of_transformers_generate_what_eager_attention_does(version):
    transformers = pytest.importorskip("transformers")
    from lean_attention import hf

    hf.register()
    torch.manual_seed(7)
    sizes = dict(
        vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=48, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16,
        max_position_embeddings=256, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    config = getattr(transformers, f"{version}Config")(**sizes)
    model = getattr(transformers, f"{version}ForCausalLM")(config).eval()
    prompt = torch.randint(1, 97, (2, 11))
    tokens = {}
    for name in ("eager", "lean_attention"):
        model.set_attn_implementation(name)
        tokens[name] = model.generate(prompt, max_new_tokens=24, do_sample=False)
    assert tokens["eager"].shape[1] == 35
    assert torch.equal(tokens["eager"], tokens["lean_attention"])


def test_lengths_have_the_callers_name():
    q, k, pool, table = latent(40, 24, 5, 1)
    given, cu = torch.tensor([*LENGTHS[:-1], 10**6], dtype=torch.int32), torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"^cache_seqlens\[{len(LENGTHS) - 1}\] = 1000000: allowed 0 to"):
        flash_mla_with_kvcache(q.transpose(1, 2), pool, table, given, 24)
    wrapper = BatchMLAPagedAttentionWrapper()
    wrapper.plan(cu, table.shape[1] * cu, table.flatten(), given, 5, 24, 16, pool.shape[1], False, 0.2)
    rows, parts = q[:, :, 0], pool[:, :, 0].split((24, 16), -1)
    with pytest.raises(ValueError, match=rf"^kv_len_arr\[{len(LENGTHS) - 1}\] = 1000000: allowed 0 to"):
        wrapper.run(*rows.split((24, 16), -1), *parts)
