"""SGLang's engine on the CPU with this library's attention: the tokens of its own backend and of Transformers."""

import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
pytest.importorskip("sglang.srt.layers.attention.base_attn_backend", exc_type=ImportError)

from oracle import attention  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MHATokenToKVPoolMXFP8, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.models.gemma3_mm import Gemma3ForConditionalGeneration  # noqa: E402
from sglang.srt.models.gemma4_mm import Gemma4ForConditionalGeneration  # noqa: E402

import lean_attention.sglang  # noqa: E402
from lean_attention._sglang_backend import LeanAttentionBackend  # noqa: E402

HERE = pathlib.Path(__file__).parent
SMALL = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=96,
    initializer_range=0.2,  # wide enough that the next token depends on the keys
)  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=16, sliding_window=16, attn_logit_softcapping=5.0, query_pre_attn_scalar=16, hidden_act="gelu_pytorch_tanh"
    ),
}
UNEVEN = [[5, 6, 7, 8, 9, 10, 11], [3, 4, 5], list(range(20, 60))]
SHARED = [list(range(20, 60)) + [7, 7], list(range(20, 90))]  # begin as the third of the first batch
MANY = [[2 + (7 * i + j) % 90 for j in range(1 + 3 * i)] for i in range(24)]
NEW_TOKENS = 12


def cases():
    """Name: model, the engine's arguments, batches of prompts."""
    lean, theirs = dict(attention_backend="lean"), dict(attention_backend="torch_native")
    found = {name: (name, lean, [UNEVEN, SHARED]) for name in MODELS}
    found.update({f"{name}-theirs": (name, theirs, [UNEVEN, SHARED]) for name in ("llama", "qwen3")})
    found["decode-alone"] = ("llama", dict(prefill_attention_backend="torch_native", decode_attention_backend="lean"), [UNEVEN, SHARED])
    found["chunks-beside-decode"] = ("qwen3", dict(lean, chunked_prefill_size=16, enable_mixed_chunk=True), [MANY])
    found["crowded"] = ("llama", dict(lean, max_total_tokens=300, max_running_requests=8), [MANY])
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models, which their engine and Transformers load."""
    path = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config())
        for weight_name, weight in model.named_parameters():  # Gemma-2's layers would add little to its embeddings, which say again what was said
            if "layernorm" in weight_name and "post" in weight_name and name == "gemma2":
                torch.nn.init.constant_(weight, 10.0)
        model.save_pretrained(path / name)
    return path


@pytest.fixture(scope="module")
def results(folders, tmp_path_factory):
    """What sglang_engine.py wrote, all cases in one run."""
    path = tmp_path_factory.mktemp("results")
    asked = {
        name: dict(model=str(folders / model), engine=engine, batches=batches, new_tokens=NEW_TOKENS)
        for name, (model, engine, batches) in cases().items()
    }
    (path / "cases").write_text(json.dumps(asked))
    search = os.pathsep.join([str(HERE / "sglang_stubs"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, HERE / "sglang_engine.py", path / "cases", path], env=environment, check=True)
    return {name: json.loads((path / f"{name}.json").read_text()) for name in asked}


@pytest.fixture(scope="module")
def expected(folders):
    """Greedy tokens of Transformers' eager attention, each prompt alone."""
    models, seen = {}, {}

    def tokens_of(name, prompt):
        if name not in models:
            models[name] = transformers.AutoModelForCausalLM.from_pretrained(
                folders / name, attn_implementation="eager", dtype=torch.float32
            ).eval()
        if (name, *prompt) not in seen:
            ids = torch.tensor([prompt])
            limits = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
            found = models[name].generate(ids, attention_mask=torch.ones_like(ids), **limits)
            seen[(name, *prompt)] = found[0, len(prompt) :].tolist()
        return seen[(name, *prompt)]

    return tokens_of


@pytest.mark.parametrize("name", [name for name in cases() if not name.endswith("-theirs")])
def test_tokens_are_those_of_transformers(name, results, expected):
    model, _, batches = cases()[name]
    assert "tokens" in results[name], results[name]["error"]
    tokens = [[expected(model, prompt) for prompt in batch] for batch in batches]
    assert results[name]["tokens"] == tokens
    assert len({token for batch in tokens for row in batch for token in row}) > 20  # a model that repeats itself would prove nothing


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tokens_are_those_of_its_own_backend(name, results):
    assert "tokens" in results[f"{name}-theirs"], results[f"{name}-theirs"]["error"]
    assert results[name]["tokens"] == results[f"{name}-theirs"]["tokens"]


@pytest.mark.parametrize("name", ["llama", "decode-alone"])
def test_a_shared_prefix_is_not_computed_again(name, results):
    assert results[name]["cached"] == [[0, 0, 0], [40, 40]]


# The backend by itself, over SGLang's own pools.

HEADS, KV_HEADS, DIM, SLOTS = 6, 2, 40, 160


class Requests:
    """Three requests in a pool of tokens, whose slots lie anywhere; of pages, whose tokens lie side by side."""

    def __init__(self, page=1, dtype=torch.float32, lengths=(37, 1, 12), pool=None):
        torch.manual_seed(0)
        self.lengths, self.page = lengths, page
        sizes = dict(dtype=dtype, head_num=KV_HEADS, head_dim=DIM, device="cpu", enable_memory_saver=False)
        self.pool = pool or MHATokenToKVPool(size=SLOTS, page_size=page, layer_num=2, **sizes)
        self.rows = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
        pages = torch.randperm(SLOTS // page)[: 3 * (48 // page)] + 1
        slots = (pages[:, None] * page + torch.arange(page)).flatten().view(3, 48)
        self.indices = torch.tensor([3, 1, 2])
        for row, of_request, count in zip(self.indices, slots, lengths):
            self.rows.req_to_token[row, :count] = of_request[:count].int()
        self.slots = [of_request[:count] for of_request, count in zip(slots, lengths)]
        self.k, self.v = torch.randn(2, 3, max(lengths), KV_HEADS, DIM)
        self.server_args = types.SimpleNamespace(speculative_algorithm=None, enable_deterministic_inference=False)
        self.model_config = types.SimpleNamespace(is_encoder_decoder=False, is_multimodal=False)
        self.model, self.prefill_attention_backend_str = None, "lean"
        self.req_to_token_pool, self.token_to_kv_pool = self.rows, self.pool

    def layer(self, **rules):
        return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=0, **rules)

    def batch(self, new):
        """The step whose last `new` tokens of each request are new."""
        lengths, new = torch.tensor(self.lengths), torch.tensor(new)
        decodes = bool((new == 1).all())
        last = torch.cat([slots[len(slots) - count :] for slots, count in zip(self.slots, new.tolist())])
        return types.SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND, batch_size=3, req_pool_indices=self.indices,
            seq_lens=lengths, seq_lens_cpu=lengths, out_cache_loc=last, extend_seq_lens=None if decodes else new,
            extend_seq_lens_cpu=None if decodes else new.tolist(),
        )  # fmt: skip

    def write_old(self, layer, new):
        for b, (slots, count) in enumerate(zip(self.slots, new)):
            old = len(slots) - count
            self.pool.set_kv_buffer(layer, slots[:old], self.k[b, :old].clone(), self.v[b, :old].clone())

    def fresh(self, x, new):
        return torch.cat([x[b, length - count : length] for b, (length, count) in enumerate(zip(self.lengths, new))])


def outputs(requests, layer, new, graph=False, **arguments):
    """(q [tokens, Hq, d], the backend's result in its shape)."""
    requests.write_old(layer, new)
    backend, batch = LeanAttentionBackend(requests), requests.batch(new)
    if graph:
        backend.init_cuda_graph_state(4, 4)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
    else:
        backend.init_forward_metadata(batch)
    q = torch.randn(sum(new), HEADS, DIM)
    k, v = (requests.fresh(x, new).clone() for x in (requests.k, requests.v))
    forward = backend.forward_decode if batch.extend_seq_lens is None else backend.forward_extend
    return q, forward(q.flatten(1), k, v, layer, batch, **arguments).view(q.shape)


def check(requests, q, out, new, k=None, **rules):
    keys, values = (x.transpose(1, 2) for x in (requests.k if k is None else k, requests.v))
    for b, (one, result) in enumerate(zip(q.split(list(new)), out.split(list(new)))):
        length = requests.lengths[b]
        answer = attention(one.transpose(0, 1)[None], keys[b : b + 1, :, :length], values[b : b + 1, :, :length], causal=True, **rules)
        answer.check(result.transpose(0, 1)[None])


STEPS = {"decode": (1, 1, 1), "prefill": (37, 1, 12), "chunks_beside_decode": (9, 1, 1)}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("page", [1, 4, 16])
def test_every_step_over_pages_of_any_size(step, page):
    requests = Requests(page)
    q, out = outputs(requests, requests.layer(), STEPS[step])
    check(requests, q, out, STEPS[step])


@pytest.mark.parametrize("step", STEPS)
def test_score_rules(step):
    requests, sinks = Requests(), torch.linspace(-1, 2, HEADS)
    layer = requests.layer(logit_cap=3.0, sliding_window_size=5)
    q, out = outputs(requests, layer, STEPS[step], sinks=sinks)
    check(requests, q, out, STEPS[step], softcap=3.0, window=(5, -1), sinks=sinks)


@pytest.mark.parametrize("page", [1, 4])
def test_a_graph_finds_what_a_launched_step_does(page):
    requests = Requests(page)
    q, out = outputs(requests, requests.layer(), (1, 1, 1), graph=True)
    check(requests, q, out, (1, 1, 1))


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("graph", [False, True])
def test_layers_with_a_window_have_a_pool_of_their_own(page, graph):
    pool = SWAKVPool(
        size=SLOTS, size_swa=SLOTS, page_size=page, dtype=torch.float32, head_num=KV_HEADS, head_dim=DIM, swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1], device="cpu",
    )  # fmt: skip
    order = torch.randperm(SLOTS // page) + 1
    mapping = torch.full((SLOTS + page + 1,), -1)
    mapping[page : SLOTS + page] = (order[:, None] * page + torch.arange(page)).flatten()
    requests = Requests(page, pool=pool)
    gone = requests.slots[0][: 24 // page * page]  # of the first request: they left the window, and their slots are others'
    layer, new = requests.layer(sliding_window_size=8), (1, 1, 1)
    pool.full_to_swa_index_mapping = mapping
    for b, slots in enumerate(requests.slots):
        pool.swa_kv_pool.k_buffer[0][mapping[slots]] = requests.k[b, : len(slots)]
        pool.swa_kv_pool.v_buffer[0][mapping[slots]] = requests.v[b, : len(slots)]
    requests.write_old = lambda *_: None
    mapping[gone] = -1
    q, out = outputs(requests, layer, new, graph=graph)
    check(requests, q, out, new, window=(8, -1))


def test_a_float8_cache_with_scales():
    """Keys and values that float8 and a scale hold exactly, so that nothing but the call's own rounding is left."""
    requests, new, scale = Requests(dtype=torch.float8_e4m3fn), (1, 1, 1), 0.5
    requests.k, requests.v = (x.to(torch.float8_e4m3fn).float() * scale for x in (requests.k, requests.v))
    layer = requests.layer()
    layer.k_scale = layer.v_scale = torch.tensor(scale)
    layer.k_scale_float = layer.v_scale_float = scale
    for b, slots in enumerate(requests.slots):
        old = slice(len(slots) - 1)
        requests.pool.set_kv_buffer(layer, slots[old], requests.k[b, old] / scale, requests.v[b, old] / scale)
    backend, batch = LeanAttentionBackend(requests), requests.batch(new)
    backend.init_forward_metadata(batch)
    q = torch.randn(3, HEADS, DIM).bfloat16()
    k, v = (requests.fresh(x, new).bfloat16() for x in (requests.k, requests.v))
    before = k.clone()
    out = backend.forward_decode(q.flatten(1), k, v, layer, batch).view(q.shape)
    assert torch.equal(k, before)  # the pool divides in place, and others read k after us
    check(requests, q, out, new, dtype="bfloat16")


@pytest.mark.parametrize(
    "words, change",
    [
        ("speculative_algorithm = EAGLE", lambda r: setattr(r.server_args, "speculative_algorithm", "EAGLE")),
        ("an encoder's keys", lambda r: setattr(r.model_config, "is_encoder_decoder", True)),
        ("dcp_size = 2", lambda r: setattr(r.server_args, "dcp_size", 2)),
        ("enable_prefill_cp", lambda r: setattr(r.server_args, "enable_prefill_cp", True)),
    ],
)
def test_a_server_that_cannot_be_served_is_refused(words, change):
    requests = Requests()
    change(requests)
    with pytest.raises(NotImplementedError, match=f"^lean: {words}.*not here"):
        LeanAttentionBackend(requests)


@pytest.mark.parametrize(
    "model, prefill, option",
    [
        (Gemma3ForConditionalGeneration, "lean", "--attention-backend"),
        (Gemma3ForConditionalGeneration, "triton", "--attention-backend"),  # it looks for one backend of both
        (Gemma4ForConditionalGeneration, "lean", "--prefill-attention-backend"),
        (Gemma4ForConditionalGeneration, "triton", ""),
    ],
)
def test_a_model_whose_images_would_be_causal_in_silence_is_refused(model, prefill, option):
    requests = Requests()
    requests.model, requests.prefill_attention_backend_str = object.__new__(model), prefill
    LeanAttentionBackend(requests)  # without --enable-multimodal there are no images
    requests.model_config.is_multimodal = True
    if not option:
        LeanAttentionBackend(requests)
        return
    with pytest.raises(NotImplementedError, match=f"^lean: {model.__name__}: image tokens .* not here: take {option} triton"):
        LeanAttentionBackend(requests)


@pytest.mark.parametrize("page", [1, 128])
def test_a_cache_with_scales_of_blocks_is_refused(page):
    """Its keys are float8 as they come from others, and read without these scales wrong."""
    sizes = dict(dtype=torch.float8_e4m3fn, head_num=KV_HEADS, head_dim=64, device="cpu", enable_memory_saver=False)
    requests = Requests(pool=MHATokenToKVPoolMXFP8(size=128, page_size=page, layer_num=1, **sizes))
    with pytest.raises(NotImplementedError, match=r"^lean: kv_cache_dtype: scales of blocks \(mxfp8\) are not read"):
        LeanAttentionBackend(requests)


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "SPLIT_PREFILL", "DLLM_EXTEND"])
def test_a_step_that_cannot_be_computed_is_refused(mode):
    requests = Requests()
    batch = requests.batch((1, 1, 1))
    batch.forward_mode = ForwardMode[mode]
    with pytest.raises(NotImplementedError, match=f"^lean: forward_mode = {mode}: not here"):
        LeanAttentionBackend(requests).init_forward_metadata(batch)


def test_prefill_in_a_graph_is_refused():
    requests = Requests()
    backend = LeanAttentionBackend(requests)
    backend.init_cuda_graph_state(4, 64)
    with pytest.raises(NotImplementedError, match="^lean: prefill in a CUDA graph"):
        backend.init_forward_metadata_out_graph(requests.batch((9, 1, 1)))


@pytest.mark.parametrize(
    "words, rules, arguments",
    [
        ("attn_type = cross attention", dict(is_cross_attention=True), {}),
        ("attn_type = encoder_only", dict(attn_type=AttentionType.ENCODER_ONLY), {}),
        ("pos_encoding_mode = 'ALIBI'", dict(pos_encoding_mode="ALIBI"), {}),
        ("logit_capping_method = 'sigmoid'", dict(logit_cap=1.0, logit_capping_method="sigmoid"), {}),
        ("k_rope: not here", {}, dict(k_rope=torch.ones(1))),
        ("return_lse: not here", {}, dict(return_lse=True)),
    ],
)
def test_a_layer_that_cannot_be_computed_is_refused(words, rules, arguments):
    requests = Requests()
    with pytest.raises(NotImplementedError, match=f"^lean: layer 0: {words}"):
        outputs(requests, requests.layer(**rules), (1, 1, 1), **arguments)


def test_layers_in_chunks_are_refused():
    """Llama 4: a rotary layer sees its own chunk alone, and its pool may give the slots of older tokens away."""
    requests = Requests()
    q, out = outputs(requests, requests.layer(use_irope=True), (1, 1, 1))  # a model without chunks
    check(requests, q, out, (1, 1, 1))
    requests.attention_chunk_size = 8192
    with pytest.raises(NotImplementedError, match="^lean: layer 0: use_irope: attention in chunks of 8192 tokens"):
        outputs(requests, requests.layer(use_irope=True), (1, 1, 1))


def test_a_layer_of_a_pool_of_windows_has_a_window():
    requests = Requests()
    backend, batch = LeanAttentionBackend(requests), requests.batch((1, 1, 1))
    backend.init_forward_metadata(batch)
    backend._window_layers = {0}
    with pytest.raises(NotImplementedError, match="^lean: layer 0: sliding_window_size = -1: its pool"):
        backend.forward_decode(torch.randn(3, HEADS * DIM), None, None, requests.layer(), batch)


@pytest.mark.parametrize("older", ["0.5.9", "0.5.22.post1", "0.5.9rc1"])
def test_an_older_release_is_refused_by_its_number(older, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: older)
    with pytest.raises(ImportError, match=f"^sglang {older}: .* works with 0.5.23 and newer$"):
        lean_attention.sglang.register()


@pytest.mark.parametrize("newer", ["0.5.23", "0.5.24rc1", "0.5.23.post1", "0.5.24.dev20+g1a2b3c4", "0.6", "0.6rc1", "1.0.0"])
def test_releases_since_are_taken_candidates_among_them(newer, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: newer)
    lean_attention.sglang.register()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    assert "lean" in ATTENTION_BACKENDS
