"""An engine of vLLM in a process of its own, whose ranks may share the tokens of every sequence (decode context parallelism).

As a script it prints, as one line of JSON, greedy tokens and their log-probabilities, and those of the tokens of the prompts:

    python tests/python/vllm_ranks.py MODEL '{"tensor_parallel_size": 2, "decode_context_parallel_size": 2}'

On the CPU vLLM places no tokens over ranks ("Context Parallelism is not supported on CPU."). stand_in(), which vLLM calls as a
plug-in in each of its processes where the entry point of plug_in() is found, puts there what is missing, in plain torch: slots,
writing by them, and the arithmetic of cp_lse_ag_out_rs. Block tables, lengths, processes, groups and gathering stay the engine's.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

import torch

from lean_attention.distributed import merge_in_order

LENGTHS = (5, 130, 33, 70, 64, 1, 17, 100)  # of the prompts; one shorter than there are ranks
MARK = "vllm_ranks: "


def plug_in(folder: pathlib.Path) -> dict[str, str]:
    """The environment of a process whose vLLM, and vLLM's own processes, call stand_in()."""
    package = folder / "stand_in-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\nstand_in = vllm_ranks:stand_in\n")
    paths = [str(folder), str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "LEAN_ATTENTION_VLLM": "0"}


def combine_in_torch(out: torch.Tensor, lse: torch.Tensor, group: Any, return_lse: bool = True) -> tuple[torch.Tensor, ...]:
    """Stands for the engine's cp_lse_ag_out_rs, whose arithmetic is a Triton kernel: the same by this library's merge."""
    assert return_lse and out.shape[:2] == lse.shape
    states = zip(group.all_gather(out[None], dim=0), group.all_gather(lse[None].contiguous(), dim=0))
    return tuple(x.chunk(group.world_size, 1)[group.rank_in_group] for x in merge_in_order(list(states), out.dtype))


def stand_in() -> None:
    from vllm.utils import cpu_triton_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    cpu_triton_utils._compute_slot_mapping_kernel_impl = slots_of_a_rank
    register_backend(AttentionBackendEnum.CPU_ATTN, "vllm_ranks.RankedBackend")


def slots_of_a_rank(
    num_tokens: int, max_num_tokens: int, query_start_loc: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor,
    block_table_stride: int, slot_mapping: torch.Tensor, KV_CACHE_BLOCK_SIZE: int, TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0, CP_KV_CACHE_INTERLEAVE_SIZE: int = 1, PAD_ID: int = -1, BLOCK_SIZE: int = 1024,
) -> None:  # fmt: skip
    """Line by line what vLLM's Triton kernel computes (ComputeSlotMappingKernel)."""
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    request = torch.arange(len(query_start_loc) - 1).repeat_interleave(query_start_loc.diff())
    virtual_block_size = KV_CACHE_BLOCK_SIZE * TOTAL_CP_WORLD_SIZE
    pos = positions[: len(request)]
    offset = pos % virtual_block_size
    is_local = offset // CP_KV_CACHE_INTERLEAVE_SIZE % TOTAL_CP_WORLD_SIZE == TOTAL_CP_RANK
    run = TOTAL_CP_WORLD_SIZE * CP_KV_CACHE_INTERLEAVE_SIZE
    local = offset // run * CP_KV_CACHE_INTERLEAVE_SIZE + offset % CP_KV_CACHE_INTERLEAVE_SIZE
    block = block_table[request, pos // virtual_block_size].long()
    slot_mapping[: len(request)] = torch.where(is_local, block * KV_CACHE_BLOCK_SIZE + local, PAD_ID)


def __getattr__(name: str) -> Any:
    """RankedBackend, made when vLLM asks for it: this module is imported where there is no vLLM too."""
    if name != "RankedBackend":
        raise AttributeError(name)
    from vllm.distributed.parallel_state import get_dcp_group

    from lean_attention._vllm_call import Ranks, halves
    from lean_attention._vllm_cpu import LeanCpuBackend, LeanCpuImpl

    class RankedImpl(LeanCpuImpl):
        __module__ = "lean_attention"  # what vLLM derives from a layer changes what it gets, and is refused
        writes = False
        can_return_lse_for_decode = supports_dcp = True

        def ranks_of(self, count: int, of_layer: dict[str, Any]) -> Ranks:
            assert not any(value is not None for value in of_layer.values())
            group = get_dcp_group()
            return Ranks(
                gather_heads=lambda query: group.all_gather(query, dim=1),
                combine=lambda out, lse: combine_in_torch(out, lse, group),
            )

        def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
            mine = slot_mapping >= 0
            slots = slot_mapping[mine]
            for pool, new in zip(halves(kv_cache), (key, value)):
                page = pool.shape[2]
                pool[slots // page, :, slots % page] = new[: len(mine)][mine]

    class RankedBackend(LeanCpuBackend):
        @staticmethod
        def get_impl_cls() -> type:
            return RankedImpl

    return RankedBackend


def save_model(folder: str, kv_heads: int = 1, head_dim: int = 64, dtype: str = "float32") -> None:
    """One K/V head, so that two ranks have the same one; weights are so large that attention decides which token comes next."""
    import transformers

    torch.manual_seed(2)
    configuration = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=8, head_dim=head_dim,
        num_key_value_heads=kv_heads, max_position_embeddings=1024, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(configuration).to(getattr(torch, dtype)).save_pretrained(folder)


def result_of(process: Any) -> dict[str, Any]:
    """What a finished process of this script found."""
    lines = [line for line in process.stdout.splitlines() if line.startswith(MARK)]
    assert process.returncode == 0 and lines, (process.stdout + process.stderr)[-6000:]
    return json.loads(lines[-1].removeprefix(MARK))


def main(model: str, settings: str) -> None:
    import vllm
    from vllm_models import prompts

    given: dict[str, Any] = dict(
        skip_tokenizer_init=True, max_model_len=1024, max_num_batched_tokens=16, max_num_seqs=8, disable_log_stats=True,
        enable_prefix_caching=False,
    )  # fmt: skip
    llm = vllm.LLM(model=model, **{**given, **json.loads(settings)})
    parameters = vllm.SamplingParams(
        temperature=0, max_tokens=12, logprobs=0, prompt_logprobs=0, detokenize=False, ignore_eos=True
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(LENGTHS, 4)]
    found: dict[str, Any] = dict(vllm=vllm.__version__, greedy=[], new=[], given=[])
    for output in llm.generate(asked, parameters, use_tqdm=False):
        tokens, known = list(output.outputs[0].token_ids), output.prompt_token_ids[1:]
        found["greedy"].append(tokens)
        found["new"].append([at[token].logprob for token, at in zip(tokens, output.outputs[0].logprobs)])
        found["given"].append([at[token].logprob for token, at in zip(known, output.prompt_logprobs[1:])])
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
