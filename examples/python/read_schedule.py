"""Who computes what: one long request beside short ones, under four policies, for a GPU of 132 multiprocessors."""

import lean_attention

LENGTHS = [65536] + [2048] * 15
for policy in ("lean", "fixed_split", "data_parallel", "fixed_chunk"):
    options = lean_attention.Options(policy=policy, workers=132)
    schedule = lean_attention.schedule(LENGTHS, q_heads=32, kv_heads=8, head_dim=128, options=options)
    busy = [share for share in schedule.shares if share["segments"]]
    longest = max(sum(s["tile_end"] - s["tile_begin"] for s in share["segments"]) for share in busy)
    print(f"{policy:14} {len(busy):4} workers with work, the longest has {longest} of {schedule.summary['tiles']} tiles")
