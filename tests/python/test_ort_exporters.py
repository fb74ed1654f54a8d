"""Models as exporters write them, of tiny random Transformers models: the same 64 tokens as Transformers', with and without us."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from ort_models import needs_operators, session_of  # noqa: E402

import lean_attention.ort  # noqa: E402

pytestmark = needs_operators

STEPS, CAPACITY, VOCABULARY = 64, 256, 130  # no projection has as many rows: genai tells the last one by that
PROMPT = np.array([[5, 17, 33, 8, 90]])
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=CAPACITY, initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", dict(original_max_position_embeddings=CAPACITY)),  # no rescaled positions
}
MOBIUS = ["mobius", "build", "--dtype", "f32"]
EXPORTERS = {
    "genai": ["onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"],
    "mobius": MOBIUS,
    "mobius static cache": [*MOBIUS, "--static-cache", "--max-seq-len", str(CAPACITY)],
    "mobius GQA": [*MOBIUS, "--optimize=group_query_attention"],
}


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """A folder with a model and a tokenizer, and the tokens that Transformers generates."""
    from tokenizers import Tokenizer, models

    config, model, more = MODELS[request.param]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES, **more)).float().eval()
    folder = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    names = dict(unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w0")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder / "model")
    with torch.no_grad():
        tokens = made.generate(torch.from_numpy(PROMPT), max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    return folder, tokens[:, PROMPT.shape[1] :].numpy()


def exported(folder: pathlib.Path, exporter: str) -> pathlib.Path:
    module, *arguments = EXPORTERS[exporter]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"no {module.partition('.')[0]}")
    out = folder / exporter.replace(" ", "_")
    if (out / "model.onnx").exists():
        return out
    if module == "mobius":
        arguments = [*arguments, "--model", str(folder / "model"), str(out)]
    else:
        arguments = [*arguments, "-i", str(folder / "model"), "-o", str(out), "-c", str(folder / "cache")]
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def generate(session, steps: int = STEPS) -> np.ndarray:
    """Greedy, by whichever inputs the exporter gave the model."""
    shapes = {x.name: [n if isinstance(n, int) else 0 for n in x.shape] for x in session.get_inputs()}
    caches = {name: np.zeros([1, *shape[1:]], np.float32) for name, shape in shapes.items() if "key" in name or "value" in name}
    for name, x in caches.items():  # an extent without a number: the head's for the last axis, no tokens yet for another
        if x.ndim == 4 and x.shape[3] == 0:
            caches[name] = np.zeros((*x.shape[:3], SIZES["hidden_size"] // SIZES["num_attention_heads"]), np.float32)
    tokens, past, made = PROMPT, 0, []
    for _ in range(steps):
        total = past + tokens.shape[1]
        known = {
            "input_ids": tokens,
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(past, total)[None],
            "write_indices": np.array([past]),
            "nonpad_kv_seqlen": np.array([total]),
        }
        logits, *present = session.run(None, {name: known.get(name, caches.get(name)) for name in shapes})
        outputs = [x.name for x in session.get_outputs()][1:]
        by_name = {name.replace("present", "past_key_values").replace("updated_", ""): x for name, x in zip(outputs, present)}
        caches = {name: by_name[name] for name in caches}
        tokens, past = logits[:, -1:].argmax(-1), total
        made.append(tokens)
    return np.concatenate(made, 1)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_exported_models_generate_what_transformers_does(saved, exporter):
    folder, expected = saved
    assert len(np.unique(expected)) > 16
    path = str(exported(folder, exporter) / "model.onnx")
    np.testing.assert_array_equal(generate(session_of(path, ours=False)), expected)
    np.testing.assert_array_equal(generate(session_of(path, override=True)), expected)


@pytest.mark.parametrize("ours", [False, True])
def test_genai_runs_the_library_that_its_config_names(saved, ours, tmp_path):
    genai = pytest.importorskip("onnxruntime_genai")
    folder, expected = saved
    model = shutil.copytree(exported(folder, "genai"), tmp_path / "model")
    library = model / "liblean_attention_ort.so"
    if ours:
        config = json.loads((model / "genai_config.json").read_text())
        shutil.copy(lean_attention.ort.library_path(), library)
        config["model"]["decoder"]["session_options"] |= {"custom_ops_library": library.name, "lean_attention.override": "1"}
        (model / "genai_config.json").write_text(json.dumps(config))
    loaded = genai.Model(str(model))
    parameters = genai.GeneratorParams(loaded)
    parameters.set_search_options(max_length=PROMPT.size + STEPS, do_sample=False)
    generator = genai.Generator(loaded, parameters)
    generator.append_tokens(PROMPT.astype(np.int32))
    made = []
    while not generator.is_done():  # at its end-of-sequence token too, which Transformers was told to pass
        generator.generate_next_token()
        made.append(generator.get_next_tokens()[0])
    assert len(made) > 8
    np.testing.assert_array_equal(made, expected[0, : len(made)])
    assert (str(library) in pathlib.Path("/proc/self/maps").read_text()) == ours


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_exported_models_can_be_rewritten(saved, exporter):
    import onnx

    folder, expected = saved
    path = exported(folder, exporter) / "model.onnx"
    model, report = lean_attention.ort.rewrite(onnx.load(path))
    assert len(report.rewritten) == 2 and report.left == {}
    np.testing.assert_array_equal(generate(session_of(model.SerializeToString())), expected)


class Step(torch.nn.Module):
    """What torch's exporter makes of a decode step: past and new tokens joined outside, and a mask of all keys."""

    def forward(self, q, k, v, past_k, past_v, mask):
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), k, v


@pytest.mark.parametrize("opset", [23, 24])
def test_attention_of_torchs_exporter(opset):
    pytest.importorskip("onnxscript")

    def inputs(past):
        shapes = [(2, 4, 1, 16), (2, 2, 1, 16), (2, 2, 1, 16), (2, 2, past, 16), (2, 2, past, 16)]
        return (*(torch.randn(shape) for shape in shapes), torch.rand(2, 1, 1, past + 1) > 0.3)

    torch.manual_seed(0)
    past = torch.export.Dim("past", min=2, max=1000)
    dynamic = (None, None, None, {2: past}, {2: past}, {3: past + 1})
    program = torch.onnx.export(Step(), inputs(9), dynamo=True, opset_version=opset, dynamic_shapes=dynamic, verbose=False)
    assert [node.op_type for node in program.model_proto.graph.node].count("Attention") == 1
    session = session_of(program.model_proto.SerializeToString(), override=True)
    names = [x.name for x in session.get_inputs()]
    for tokens in (9, 40, 300):
        given = inputs(tokens)
        ours = session.run(None, dict(zip(names, (x.numpy() for x in given))))
        for x, y in zip(ours, Step()(*given)):
            np.testing.assert_allclose(x, y.numpy(), rtol=0, atol=2e-6)
