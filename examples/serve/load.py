#!/usr/bin/env python3
"""Requests against a server that speaks OpenAI's protocol, at one offered load after the other; a table comes out.

    vllm serve MODEL --port 8000 &
    python load.py --loads 1,2,4 --requests 40

Requests arrive at random (exponential gaps, seeded), each a prompt of random words and a fixed number of new tokens,
streamed. Times are a client's: to the first token, and from token to token after it. A server in a hurry sends several tokens
as one piece (vLLM does when its client is slow, and after speculation): they share the time since the piece before them. The
server must say how many there are, by OpenAI's `include_usage` and, for pieces of several, vLLM's `continuous_usage_stats`.
--json FILE keeps every request.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import time

import openai


@dataclasses.dataclass
class Request:
    load: float  # requests a second that were offered
    prompt_words: int
    begin: float = 0.0  # seconds since the load began
    tokens: list[float] = dataclasses.field(default_factory=list)  # when each arrived
    error: str = ""

    def arrived(self, count: int, now: float) -> None:
        """A piece of so many tokens; those of the first piece all come at once."""
        before = self.tokens[-1] if self.tokens else now
        self.tokens += [before + (now - before) * i / count for i in range(1, count + 1)]

    def gaps_ms(self) -> list[float]:
        """From token to token."""
        return [1e3 * (b - a) for a, b in zip(self.tokens, self.tokens[1:])]


async def stream(client: openai.AsyncOpenAI, model: str, prompt: str, new_tokens: int, request: Request, zero: float) -> None:
    request.begin = time.perf_counter() - zero
    said = None  # tokens so far, by the server
    try:
        pieces = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=new_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            extra_body={"ignore_eos": True},
        )
        async for piece in pieces:
            said = piece.usage.completion_tokens if piece.usage else said
            if piece.choices:
                count = said - len(request.tokens) if piece.usage else 1
                request.arrived(count, time.perf_counter() - zero)
        if said != len(request.tokens):
            request.error = f"{len(request.tokens)} pieces and {said or 'no word of how many'} tokens: a piece's are unknown"
    except openai.OpenAIError as error:
        request.error = str(error)


async def offer(client: openai.AsyncOpenAI, model: str, load: float, options: argparse.Namespace) -> tuple[list[Request], float]:
    """All requests of one load, and the seconds until the last was answered."""
    order = random.Random(options.seed)
    words = options.words.split()
    requests, running, zero = [], [], time.perf_counter()
    for _ in range(options.requests):
        length = order.randint(options.prompt_words // 2, options.prompt_words)
        prompt = " ".join(order.choice(words) for _ in range(length))
        requests.append(Request(load, length))
        running.append(asyncio.create_task(stream(client, model, prompt, options.new_tokens, requests[-1], zero)))
        running[-1].add_done_callback(lambda _: show(load, sum(task.done() for task in running), options.requests))
        await asyncio.sleep(order.expovariate(load))
    await asyncio.gather(*running)
    print(file=sys.stderr)
    return requests, time.perf_counter() - zero


def show(load: float, done: int, all_of_them: int) -> None:
    bar = "#" * (30 * done // all_of_them)
    print(f"\r{load:g} requests/s [{bar:30}] {done}/{all_of_them}", end="", file=sys.stderr, flush=True)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def row(load: float, requests: list[Request], seconds: float) -> str:
    answered = [request for request in requests if request.tokens and not request.error]
    first = [1e3 * (request.tokens[0] - request.begin) for request in answered]
    gaps = [gap for request in answered for gap in request.gaps_ms()]
    rate = sum(len(request.tokens) for request in answered) / seconds
    cells = [f"{percentile(values, share):9.1f}" for values in (first, gaps) for share in (0.5, 0.99)]
    return f"{load:10g} {rate:10.1f} {' '.join(cells)} {len(requests) - len(answered):7}"


def loads_in(text: str) -> list[float]:
    loads = [float(item) for item in text.split(",")]
    if min(loads) <= 0:
        raise ValueError
    return loads


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--loads", default="1,2,4", type=loads_in, help="requests a second, one after the other")
    parser.add_argument("--requests", type=int, default=40, help="of each load")
    parser.add_argument("--prompt-words", type=int, default=200, help="at most; half of it at least")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--words", default="the of and to in is that it was for on are with as his they at be this from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="every request with its times, in seconds")
    options = parser.parse_args()
    client = openai.AsyncOpenAI(base_url=options.url, api_key="none", timeout=600, max_retries=0)
    model = (await client.models.list()).data[0].id
    await stream(client, model, "warm up", 4, Request(0, 2), 0.0)
    kept, rows = [], []
    for load in options.loads:
        requests, seconds = await offer(client, model, load, options)
        kept += requests
        rows.append(row(load, requests, seconds))
    print(f"{'requests/s':>10} {'tokens/s':>10} {'first p50':>9} {'p99, ms':>9} {'token p50':>9} {'p99, ms':>9} {'failed':>7}")
    print("\n".join(rows))
    if options.json:
        with open(options.json, "w") as file:
            json.dump([dataclasses.asdict(request) for request in kept], file)
    if any(request.error for request in kept):
        sys.exit(next(request.error for request in kept if request.error))


if __name__ == "__main__":
    asyncio.run(main())
