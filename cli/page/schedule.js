// The schedule of a decode step (one query token a request), as src/schedule/ computes it: line_shape.hpp, plan.hpp, shares.hpp and
// segments.hpp, by the same names. tests/cli/schedule_page_test.py holds every share against `lean schedule --json`.
"use strict";

const LeanSchedule = (() => {
  const MAX_SPLITS = 128;
  const DEFAULT_CHUNK_TOKENS = 1024;
  const quotient = (a, b) => Math.floor(a / b);
  const ceilDiv = (a, b) => Math.ceil(a / b);

  // splits of FlashDecoding's own rule
  function flashDecodingSplits(outputs, maxTiles, workers) {
    if (outputs === 0 || outputs * 10 >= workers * 8) return 1;
    const limit = Math.min(MAX_SPLITS, workers, maxTiles);
    const eligible = (s) => s === 1 || ceilDiv(maxTiles, s) !== ceilDiv(maxTiles, s - 1);
    const filling = (s) => ({ items: outputs * s, waves: ceilDiv(outputs * s, workers) });
    let best = filling(1);
    for (let s = 2; s <= limit; ++s) {
      const f = filling(s);
      if (eligible(s) && f.items * best.waves > best.items * f.waves) best = f;
    }
    for (let s = 1; s <= limit; ++s) {
      const f = filling(s);
      if (eligible(s) && f.items * best.waves * 100 >= best.items * f.waves * 85) return s;
    }
    return 1;
  }

  // equal shares of a line: share g begins at floor(g x total / parts)
  class Shares {
    constructor(total, parts) {
      this.total = total;
      this.parts = parts;
      this.least = quotient(total, parts);
      this.remainder = total - this.least * parts;
    }
    begin(g) {
      return g * this.least + quotient(g * this.remainder, this.parts);
    }
    firstFrom(place) {
      let g = this.total > 0 ? Math.min(this.parts, Math.floor((place / this.total) * this.parts)) : 0;
      while (this.begin(g) < place) ++g;
      while (g > 0 && this.begin(g - 1) >= place) --g;
      return g;
    }
  }

  function makeLine({ lengths, kv_heads, group, tile_tokens, cost_model: model }) {
    const tileCost = model.tile_units + Math.max(0, group - model.free_rows) * model.row_units;
    const charge = model.segment_units;
    const line = { outputs: [], cost: 0, tiles: 0, maxOutputTiles: 0, maxTileCost: 0, minCost: Infinity, maxCost: 0 };
    lengths.forEach((tokens, sequence) => {
      const tiles = Math.max(1, ceilDiv(tokens, tile_tokens));
      const cost = charge + tiles * tileCost;
      let spread = 0; // the cost of one of its tiles where it can be cut
      if (tiles > 1) spread = tiles >= charge ? tileCost + (charge > 0 ? 1 : 0) : tileCost + quotient(charge + tiles - 1, tiles);
      for (let kv_head = 0; kv_head < kv_heads; ++kv_head) {
        line.outputs.push({ sequence, kv_head, tiles, tileCost, cost, begin: line.cost });
        line.cost += cost;
        line.tiles += tiles;
      }
      line.maxOutputTiles = Math.max(line.maxOutputTiles, tiles);
      line.maxTileCost = Math.max(line.maxTileCost, spread);
      line.minCost = Math.min(line.minCost, cost);
      line.maxCost = Math.max(line.maxCost, cost);
    });
    return line;
  }

  function alignToOutputs(plan, line, model) {
    const n = line.outputs.length;
    const w = plan.workers;
    const alikePercent = n <= w ? model.alike_percent : 0;
    if ((line.maxCost - line.minCost) * 100 > line.maxCost * alikePercent) return;
    if (n <= w) {
      const parts = line.maxOutputTiles <= model.unshared_tiles ? 1 : quotient(w, n);
      const aligned = n * parts;
      const fewIdle = aligned * 100 >= w * (100 - model.align_percent);
      const cheap = fewIdle && quotient(line.cost, aligned) * (w - aligned) <= model.align_units * w;
      if (cheap || line.maxOutputTiles <= Math.max(model.short_tiles, model.unshared_tiles) * parts) plan.workers = aligned;
      return;
    }
    const rounds = ceilDiv(n, w);
    const idle = rounds * w - n;
    const cheap = idle * 100 <= n * model.whole_percent && idle * line.maxCost <= model.align_units * w;
    const longest = rounds * line.maxOutputTiles;
    const spares = longest <= model.spare_tiles && 4 * n >= 3 * rounds * w;
    if (cheap || spares || longest <= model.short_tiles) {
      plan.workers = ceilDiv(n, rounds);
      plan.whole_outputs = true;
    }
  }

  const cutsTheLine = (policy) => policy.kind === "lean" || policy.kind === "fixed_chunk";

  function makePlan(line, policy, model, tileTokens, grid) {
    const plan = { workers: grid, splits: 1, granularity_tiles: 1, snap_units: 0, whole_outputs: false };
    const outputs = line.outputs.length;
    if (!cutsTheLine(policy)) {
      if (policy.kind === "fixed_split") plan.splits = policy.splits || flashDecodingSplits(outputs, line.maxOutputTiles, grid);
      plan.workers = Math.min(grid, outputs * plan.splits);
      return plan;
    }
    if (policy.kind === "fixed_chunk") plan.granularity_tiles = ceilDiv(policy.chunk_tokens || DEFAULT_CHUNK_TOKENS, tileTokens);
    const floorTiles = Math.max(1, model.min_worker_tiles);
    if (line.tiles < plan.workers * floorTiles) plan.workers = Math.max(1, quotient(line.tiles, floorTiles));
    const alike = line.minCost === line.maxCost && line.tiles === outputs * line.maxOutputTiles;
    const aTileEach = alike && line.tiles === plan.workers && plan.granularity_tiles === 1;
    const granule = Math.min(plan.granularity_tiles, line.maxOutputTiles) * line.maxTileCost;
    if (!aTileEach && line.cost < plan.workers * granule) plan.workers = Math.max(1, quotient(line.cost, granule));
    alignToOutputs(plan, line, model);
    const share = quotient(line.cost, plan.workers);
    const sliver = Math.min(model.sliver_tiles * model.tile_units, quotient(share, 8));
    plan.snap_units = model.align_percent === 0 ? sliver : Math.max(quotient(share, 200) * model.align_percent, sliver);
    return plan;
  }

  // where a boundary that lies `units` into the output is moved to, in its tiles
  function cutTile(output, units, model, plan) {
    const charge = model.segment_units === 0 ? 0 : quotient(units * model.segment_units, output.cost);
    let cut = quotient(units - charge, output.tileCost);
    cut = quotient(cut, plan.granularity_tiles) * plan.granularity_tiles;
    const rest = output.tiles - cut;
    const nearBegin = plan.whole_outputs || cut * output.tileCost <= plan.snap_units;
    const nearEnd = plan.whole_outputs || rest * output.tileCost <= plan.snap_units;
    if (nearBegin && (!nearEnd || cut <= rest)) return 0;
    return nearEnd ? output.tiles : cut;
  }

  function segmentOf(output, run, contributor, contributors, slot) {
    const segment = {
      sequence: output.sequence, kv_head: output.kv_head, row_block: 0, tile_begin: run.begin, tile_end: run.end,
      output_tiles: output.tiles, first_tile: 0, contributor, contributors,
    };
    if (contributors > 1) segment.slot = slot;
    return segment;
  }

  // lean, fixed_chunk: a contiguous range of the line
  function cutShares(line, plan, model) {
    const shares = new Shares(line.cost, plan.workers);
    const cutAt = (output, boundary) => cutTile(output, boundary - output.begin, model, plan);
    const hostOf = (output) => {
      let host = Math.max(1, shares.firstFrom(output.begin));
      while (cutAt(output, shares.begin(host)) === 0) ++host;
      return host - 1;
    };
    const lastOf = (output) => {
      let last = Math.min(shares.firstFrom(output.begin + output.cost), plan.workers) - 1;
      while (cutAt(output, shares.begin(last)) === output.tiles) --last;
      return last;
    };
    let first = 0; // the output that covers the worker's boundary
    return Array.from({ length: plan.workers }, (_, worker) => {
      const [begin, end] = [shares.begin(worker), shares.begin(worker + 1)];
      while (line.outputs[first].begin + line.outputs[first].cost <= begin) ++first;
      const segments = [];
      for (let i = first; begin < end && i < line.outputs.length && line.outputs[i].begin < end; ++i) {
        const output = line.outputs[i];
        const run = {
          begin: output.begin >= begin ? 0 : cutAt(output, begin),
          end: output.begin + output.cost <= end ? output.tiles : cutAt(output, end),
        };
        if (run.begin >= run.end) continue;
        const host = run.begin > 0 ? hostOf(output) : worker;
        const last = run.end < output.tiles ? lastOf(output) : worker;
        const contributor = worker - host;
        const slot = contributor === 0 ? 2 * host + 1 : 2 * (host + 1) + (contributor - 1) * 2;
        segments.push(segmentOf(output, run, contributor, last - host + 1, slot));
      }
      return segments;
    });
  }

  // fixed_split, data_parallel: items worker, worker + workers, ...
  function dealtShares(line, plan) {
    return Array.from({ length: plan.workers }, (_, worker) => {
      const segments = [];
      for (let item = worker; item < line.outputs.length * plan.splits; item += plan.workers) {
        const index = quotient(item, plan.splits);
        const split = item - index * plan.splits;
        const output = line.outputs[index];
        const each = ceilDiv(output.tiles, plan.splits);
        const begin = split * each;
        if (begin >= output.tiles) continue;
        const run = { begin, end: Math.min(output.tiles, begin + each) };
        segments.push(segmentOf(output, run, split, ceilDiv(output.tiles, each), item));
      }
      return segments;
    });
  }

  function balanceOf(values, total, workers) {
    const mean = total / workers;
    const max = Math.max(0, ...values);
    return { mean, max, balance: max === 0 ? 1 : mean / max };
  }

  // batch: lengths, kv_heads, group (rows of one row block), tile_tokens, cost_model; policy: kind, splits or chunk_tokens
  function schedule(batch, policy, workers) {
    const line = makeLine(batch);
    const plan = makePlan(line, policy, batch.cost_model, batch.tile_tokens, workers);
    const segments = cutsTheLine(policy) ? cutShares(line, plan, batch.cost_model) : dealtShares(line, plan);
    const tileCost = line.outputs[0].tileCost;
    const shares = segments.map((own) => {
      const tiles = own.reduce((sum, segment) => sum + segment.tile_end - segment.tile_begin, 0);
      return { tiles, cost_units: own.length * batch.cost_model.segment_units + tiles * tileCost, segments: own };
    });
    const all = segments.flat();
    const costs = shares.map((share) => share.cost_units);
    const summary = {
      busy_workers: shares.filter((share) => share.tiles > 0).length,
      outputs: line.outputs.length,
      tiles: line.tiles,
      segments: all.length,
      shared_outputs: all.filter((segment) => segment.contributor === 0 && segment.contributors > 1).length,
      max_contributors: all.reduce((most, segment) => Math.max(most, segment.contributors), 0),
      slots: cutsTheLine(policy) ? 2 * plan.workers : line.outputs.length * plan.splits,
      worker_tiles: balanceOf(shares.map((share) => share.tiles), line.tiles, workers),
      worker_cost_units: balanceOf(costs, costs.reduce((sum, cost) => sum + cost, 0), workers),
    };
    return { policy: policy.kind, workers, plan, summary, shares };
  }

  return { schedule };
})();

if (typeof module !== "undefined") module.exports = LeanSchedule;
