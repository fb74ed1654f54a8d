"""Where new tokens go: each rank writes those that are its own, without anybody asking a device whose they are."""

from __future__ import annotations

from typing import Any

import torch

from lean_attention.distributed._local_call import Form, Lengths, Shard, kv_head_axis, page_tokens, room_of


def append(shard: Shard, form: Form, lengths: Lengths, caches: tuple, news: tuple, arguments: dict[str, Any]) -> None:
    """Writes news = (append_k, append_v), the sequences' last n_q tokens, to caches = (k, v) where this rank holds them.

    As in decode(), a token whose page lies outside the pool is left out, and so are all of a sequence whose lengths are none.
    """
    rows = [_rows(name, new, form, cache) for name, cache, new in zip(("append_k", "append_v"), caches, news)]
    queries = torch.arange(form.q_tokens, device=lengths.ends.device)
    tokens = (lengths.ends[:, None] - form.q_tokens + queries).flatten().long()  # a row for each new token
    mine = (shard.placement.rank_of(tokens) == shard.rank) & _there(shard, form, lengths, tokens, caches[0], arguments)
    place = shard.placement.local_index(tokens.clamp(min=0))
    row = torch.arange(form.batch, device=tokens.device).repeat_interleave(form.q_tokens)
    table = arguments.get("block_table")
    if table is not None:
        page = page_tokens(caches[0], arguments, form)
        sequence, column = row, (place // page).clamp(max=table.shape[1] - 1)
        row, place = table[row, column].long(), place % page
        mine &= (row >= 0) & (row < caches[0].shape[0])
        if row.device.type == "cpu":
            _refuse_shared_pages(torch.stack((row, sequence, column))[:, mine])
    for cache, new in zip(caches, rows):
        _write(_by_token(cache, form), row, place, mine, new)


def _there(
    shard: Shard, form: Form, lengths: Lengths, tokens: torch.Tensor, k: torch.Tensor, arguments: dict[str, Any]
) -> torch.Tensor:
    """Which of the new tokens are tokens of their sequence, whose lengths are such that every rank has room for it."""
    room = room_of(k, arguments, form, shard.placement)
    starts = torch.zeros_like(lengths.ends) if lengths.given_starts is None else lengths.given_starts
    right = (starts >= 0) & (starts <= lengths.ends) & (shard.placement.capacity(lengths.ends) <= room)
    starts, right = (x.repeat_interleave(form.q_tokens) for x in (starts, right))
    return right & (tokens >= starts)


def _refuse_shared_pages(written: torch.Tensor) -> None:
    """`written`: int64 [(page, sequence, column of its table), new tokens of this rank], on the host."""
    places = written.unique(dim=1)
    for at, (page, sequence, column) in enumerate(places.t().tolist()):
        if at > 0 and page == places[0, at - 1]:
            raise ValueError(
                f"block_table[{sequence}, {column}] = {page}: this call appends to that page already: pages of new tokens must "
                "not be shared"
            )


def _write(cache: torch.Tensor, row: torch.Tensor, place: torch.Tensor, mine: torch.Tensor, new: torch.Tensor) -> None:
    """cache[row, place] = new where `mine`. The other rows repeat one of these (the same value to the same place), or where
    there is none what stands at one place; so nothing else is written, and nothing waits to learn how many there are."""
    chosen = mine.int().argmax()
    source = torch.where(mine, torch.arange(len(mine), device=mine.device), chosen)
    row = row[source].clamp(0, cache.shape[0] - 1)
    place = place[source].clamp(0, cache.shape[1] - 1)
    value = torch.where(mine.any(), new[source], cache[row[:1], place[:1]])
    row, place = (torch.where(mine.any(), at, at[:1]) for at in (row, place))
    cache.index_put_((row, place), value)


def _by_token(cache: torch.Tensor, form: Form) -> torch.Tensor:
    """[sequences or pages, tokens, Hkv, d] in the cache's memory; elements of a byte as plain bytes."""
    if cache.dim() == 3:  # pages of one token
        cache = cache.unsqueeze(1)
    elif not form.bshd:
        cache = cache.transpose(1, 2)
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def _rows(name: str, new: torch.Tensor, form: Form, cache: torch.Tensor) -> torch.Tensor:
    """[B x n_q, Hkv, d], in the type of the cache."""
    if not isinstance(new, torch.Tensor):
        raise TypeError(f"{name}: {type(new)}: a torch tensor is needed")
    if new.dtype != cache.dtype:
        raise TypeError(f"{name}: {new.dtype}: the cache's {cache.dtype} is needed")
    if new.dim() == 4 and not form.bshd:
        new = new.transpose(1, 2)
    rows = new.reshape(-1, *new.shape[-2:])
    heads = cache.shape[kv_head_axis(cache, {"layout": "bshd" if form.bshd else "bhsd"})]
    if rows.shape[0] != form.batch * form.q_tokens or rows.shape[1:] != (heads, cache.shape[-1]):
        raise ValueError(
            f"{name}: {list(new.shape)}: {form.q_tokens} tokens of {form.batch} sequences, {heads} heads are needed"
        )
    return rows.view(torch.uint8) if new.element_size() == 1 else rows
