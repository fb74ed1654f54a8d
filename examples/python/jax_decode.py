"""Inside jax.jit: one operation of XLA, on the CPU and on CUDA."""

import jax

import lean_attention.jax

q = jax.random.normal(jax.random.key(0), (2, 8, 1, 64))  # [B, Hq, n_q, d]
k, v = jax.random.normal(jax.random.key(1), (2, 2, 2, 4096, 64))

step = jax.jit(lambda q, k, v, seqlens: lean_attention.jax.decode(q, k, v, seqlens=seqlens))
print(step(q, k, v, jax.numpy.array([4096, 1234])).shape)
