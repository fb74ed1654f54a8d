"""Placement: which rank holds which token of a sequence, when the K/V of one sequence lies on several."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

#: A token, a number of tokens, or a tensor of them.
Tokens = Any


@dataclasses.dataclass(frozen=True)
class Placement:
    """Tokens dealt out block-cyclically: block j of a sequence, tokens [j x block, (j + 1) x block), lies on rank j % ranks.

    A rank keeps its blocks end to end, in order. So each holds an equal part, its shard, of every sequence, to within one
    block, whatever the lengths are and however they grow; where a token lies never changes.

    ranks: processes that every sequence is dealt out to.
    block_tokens: tokens of a block. Shards differ by at most that many, so a small number is a good one; it must be a multiple
        of the page size where K/V is paged.

    All methods take Python integers or integer tensors, and compute on the tensor's device without waiting for it.
    """

    ranks: int
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("ranks", "block_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value!r}: an integer of 1 or more is needed")

    def rank_of(self, token: Tokens) -> Tokens:
        """The rank that holds a token, and where a token appended to `token` others goes."""
        return token // self.block_tokens % self.ranks

    def local_index(self, token: Tokens) -> Tokens:
        """Where its rank keeps a token: its index among the tokens of the sequence there."""
        return token // (self.block_tokens * self.ranks) * self.block_tokens + token % self.block_tokens

    def token_at(self, local_index: Tokens, rank: int) -> Tokens:
        """The token that `rank` keeps at `local_index`: the inverse of rank_of() and local_index()."""
        return (local_index // self.block_tokens * self.ranks + rank) * self.block_tokens + local_index % self.block_tokens

    def local_tokens(self, tokens: Tokens, rank: int) -> Tokens:
        """How many of a sequence's first `tokens` tokens `rank` holds."""
        round_tokens = self.block_tokens * self.ranks
        rest = tokens % round_tokens - rank * self.block_tokens
        if isinstance(rest, torch.Tensor):
            rest = rest.clamp(0, self.block_tokens)
        else:
            rest = min(max(rest, 0), self.block_tokens)
        return tokens // round_tokens * self.block_tokens + rest

    def capacity(self, tokens: int) -> int:
        """Tokens that every rank needs room for, so that a sequence of `tokens` fits: what rank 0 holds, which holds most."""
        return self.local_tokens(tokens, 0)

    def shard(self, x: torch.Tensor, rank: int, axis: int = 2) -> torch.Tensor:
        """`rank`'s tokens of a tensor `x` whose `axis` is a sequence's tokens from 0 on: a copy, capacity() long on every rank.

        Ragged sequences of a padded batch are sharded by the same call. What stands past the last token is 0.
        """
        self._check_rank(rank)
        tokens = x.shape[axis]
        held = torch.arange(self.local_tokens(tokens, rank), device=x.device)
        shape = list(x.shape)
        shape[axis] = self.capacity(tokens)
        shard = x.new_zeros(shape)
        shard.narrow(axis, 0, len(held)).copy_(x.index_select(axis, self.token_at(held, rank)))
        return shard

    def shard_packed(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor, rank: int, axis: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rank`'s tokens of sequences packed end to end along `axis` of `x`, by their `cu_seqlens` ``[B + 1]``, and the shards' own
        cumulative lengths. Waits for a device.
        """
        self._check_rank(rank)
        bounds = cu_seqlens.tolist()
        if bounds[:1] != [0] or bounds[-1] > x.shape[axis] or any(end < begin for begin, end in zip(bounds, bounds[1:])):
            raise ValueError(f"cu_seqlens = {bounds}: must ascend from 0, up to the {x.shape[axis]} tokens of axis {axis}")
        held = [
            begin + self.token_at(torch.arange(self.local_tokens(end - begin, rank)), rank)
            for begin, end in zip(bounds, bounds[1:])
        ]
        return x.index_select(axis, torch.cat(held).to(x.device)), self.local_cu_seqlens(cu_seqlens, rank)

    def local_cu_seqlens(self, cu_seqlens: torch.Tensor, rank: int) -> torch.Tensor:
        """Cumulative lengths of `rank`'s shards, from `cu_seqlens` ``[B + 1]``, those of the sequences."""
        shards = self.local_tokens(cu_seqlens.diff(), rank).cumsum(0, dtype=torch.int32)
        return torch.nn.functional.pad(shards, (1, 0))

    def local_block_table(self, block_table: torch.Tensor, page_tokens: int, rank: int) -> torch.Tensor:
        """`rank`'s columns of `block_table` ``[B, pages of a sequence]``: a copy, as wide on every rank, filled up with page 0.

        A page holds `page_tokens` tokens. Page j of a sequence is one of the pool of the rank that holds its tokens.
        """
        return self._pages(page_tokens).shard(block_table, rank, axis=1)

    def local_page_list(
        self, page_indptr: torch.Tensor, page_indices: torch.Tensor, page_tokens: int, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rank`'s page_indptr and page_indices, of pages of `page_tokens` tokens. Waits for a device."""
        indices, indptr = self._pages(page_tokens).shard_packed(page_indices, page_indptr, rank, axis=0)
        return indptr, indices

    def need_whole_pages(self, page_tokens: int) -> None:
        """Raises ValueError where a page of `page_tokens` tokens would lie on several ranks."""
        if not isinstance(page_tokens, int) or page_tokens < 1:
            raise ValueError(f"page_tokens = {page_tokens!r}: an integer of 1 or more is needed")
        if self.block_tokens % page_tokens != 0:
            raise ValueError(
                f"block_tokens = {self.block_tokens}: must be a multiple of the page size, {page_tokens}: a page lies on one rank"
            )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank = {rank}: allowed 0 to {self.ranks - 1}")

    def _pages(self, page_tokens: int) -> Placement:
        """How pages are placed where these tokens are."""
        self.need_whole_pages(page_tokens)
        return Placement(self.ranks, self.block_tokens // page_tokens)
