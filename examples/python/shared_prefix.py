"""A prefix that requests share, read once for all of them: two calls, and merge_states() makes one result of both."""

import numpy as np

import lean_attention

REQUESTS, Q_HEADS, KV_HEADS, DIM, PREFIX, OWN = 16, 8, 2, 64, 2048, 200
random = np.random.default_rng(0)
q = random.standard_normal((REQUESTS, Q_HEADS, DIM), np.float32)
prefix_k, prefix_v = random.standard_normal((2, 1, KV_HEADS, PREFIX, DIM), np.float32)
own_k, own_v = random.standard_normal((2, REQUESTS, KV_HEADS, OWN, DIM), np.float32)

# The prefix is one sequence, whose query tokens are the requests: each key is read once for all 16.
of_prefix = lean_attention.decode(q.transpose(1, 0, 2)[None], prefix_k, prefix_v, return_lse=True)
out_prefix, lse_prefix = of_prefix[0][0].transpose(1, 0, 2), of_prefix[1][0].T
out_own, lse_own = lean_attention.decode(q, own_k, own_v, return_lse=True)
out, lse = lean_attention.merge_states(np.ascontiguousarray(out_prefix), np.ascontiguousarray(lse_prefix), out_own, lse_own)

whole = [np.concatenate((np.broadcast_to(p, (REQUESTS, *p.shape[1:])), o), 2) for p, o in ((prefix_k, own_k), (prefix_v, own_v))]
difference = np.abs(out - lean_attention.decode(q, *whole)).max()
print(f"{out.shape}, {lse.shape}, largest difference from one call over whole sequences {difference:.1e}")
assert difference < 1e-5
