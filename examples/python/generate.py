"""generate() with this library as the attention. Give the name of a model of the Hugging Face hub, or none: a small random Phi-3."""

import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3Config

import lean_attention.hf

lean_attention.hf.register()
if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="lean_attention")
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    inputs = tokenizer("Attention in the decode phase", return_tensors="pt")
else:
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2)
    config = Phi3Config(vocab_size=1000, pad_token_id=0, eos_token_id=None, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lean_attention")
    inputs = dict(input_ids=torch.randint(1, 1000, (2, 20)), attention_mask=torch.ones(2, 20, dtype=torch.long))

cache = lean_attention.hf.LeanStaticCache(model.config, max_cache_len=256)  # read only as far as there are tokens
release = tuple(map(int, transformers.__version__.split(".")[:2]))
name = "cache" if release >= (5, 24) else "past_key_values"  # what Transformers calls it
tokens = model.generate(**inputs, **{name: cache}, max_new_tokens=32, do_sample=False, disable_compile=True)
print(tokenizer.decode(tokens[0]) if len(sys.argv) > 1 else tokens[:, 20:])
