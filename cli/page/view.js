// What of the schedule is seen: controls, table, pictures. LeanSchedule computes it.
"use strict";

const start = JSON.parse(document.getElementById("batch").textContent);
const POLICIES = [
  { kind: "lean", words: "lean (stream-K)" },
  { kind: "fixed_split", words: "fixed split (FlashDecoding's rule)" },
  { kind: "data_parallel", words: "one worker per output (FlashAttention-2)" },
  { kind: "fixed_chunk", words: "fixed chunks of 1,024 tokens" },
];
const NUMBERS = ["workers", "kv_heads", "group", "tile_tokens", "requests", "percent", "look"];
const MOST_SEGMENTS = 200000; // that are computed while a slider moves
const LONGEST = 2147483647;
const element = (id) => document.getElementById(id);
const grouped = (value, digits = 0) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (ratio) => `${(Math.floor(ratio * 1000) / 10).toFixed(1)} %`;

class Refused extends Error {
  constructor(id, message) {
    super(message);
    this.id = id;
  }
}

function parseLengths(text) {
  const lengths = [];
  for (const item of text.trim().split(",")) {
    const found = /^\s*(?:(\d+)x)?(\d+)(k?)\s*$/.exec(item);
    const count = found ? Number(found[1] ?? 1) : 0;
    const tokens = found ? Number(found[2]) * (found[3] ? 1024 : 1) : -1;
    if (count < 1 || count > 1024 || tokens < 0 || tokens > LONGEST) {
      throw new Refused("lengths", `lengths = "${item.trim()}": token counts with commas between them, as in 1000,37,4k or 8x4096`);
    }
    for (let i = 0; i < count; ++i) lengths.push(tokens);
  }
  if (lengths.length > 1024) throw new Refused("lengths", `lengths = ${lengths.length} requests: up to 1,024`);
  return lengths;
}

function readNumber(id) {
  const { value, min, max } = element(id);
  const number = Number(value);
  if (value === "" || !Number.isInteger(number) || number < Number(min) || number > Number(max)) {
    throw new Refused(id, `${id} = "${value}": a whole number from ${min} to ${max}`);
  }
  return number;
}

function readBatch() {
  const numbers = Object.fromEntries(NUMBERS.map((id) => [id, readNumber(id)]));
  const list = parseLengths(element("lengths").value);
  const lengths = Array.from({ length: numbers.requests }, (_, i) =>
    Math.min(LONGEST, Math.round((list[i % list.length] * numbers.percent) / 100)));
  if (lengths.length * numbers.kv_heads * 4 > MOST_SEGMENTS) {
    throw new Refused("kv_heads", `requests x key/value heads = ${grouped(lengths.length * numbers.kv_heads)}: up to ${grouped(MOST_SEGMENTS / 4)} outputs`);
  }
  return { ...numbers, lengths, cost_model: start.cost_model };
}

function segmentWords(segment) {
  const shared = segment.contributors > 1 ? `, part ${segment.contributor + 1} of ${segment.contributors}` : "";
  return `request ${segment.sequence} head ${segment.kv_head} tiles ${segment.tile_begin} to ${segment.tile_end - 1}${shared}`;
}

function workerWords(result, worker) {
  const share = result.shares[worker];
  if (!share || share.tiles === 0) return worker < result.workers ? "idle" : "no such worker";
  const words = share.segments.slice(0, 3).map(segmentWords).join("; ");
  return `${grouped(share.tiles)} tiles: ${words}${share.segments.length > 3 ? `; and ${share.segments.length - 3} more` : ""}`;
}

function sentence(words, { summary, workers }) {
  return `${words}: balance ${percent(summary.worker_tiles.balance)}, longest ${grouped(summary.worker_tiles.max)} tiles, ` +
    `${grouped(summary.busy_workers)} of ${grouped(workers)} workers busy, ${grouped(summary.shared_outputs)} outputs shared`;
}

function colour(segment, requests) {
  const hue = (250 + 137.508 * (requests === 1 ? segment.kv_head : segment.sequence)) % 360;
  return `hsl(${hue} 62% ${requests > 1 && segment.kv_head % 2 ? 72 : 62}%)`;
}

function paint(canvas, result, axis, batch) {
  const style = getComputedStyle(document.documentElement);
  const [ink, idle, mean] = ["--ink", "--idle", "--mean"].map((name) => style.getPropertyValue(name).trim());
  const pitch = Math.max(1, Math.min(24, 560 / result.workers));
  const gutter = 40;
  const width = Math.max(200, canvas.clientWidth || 640);
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = Math.ceil(pitch * result.workers + 8) * scale;
  canvas.style.height = `${canvas.height / scale}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const x = (tiles) => gutter + ((width - gutter - 4) * tiles) / axis;
  const bar = pitch > 3 ? pitch - 1 : pitch;
  context.font = "11px system-ui, sans-serif";
  for (let worker = 0; worker < result.workers; ++worker) {
    const y = 4 + worker * pitch;
    context.fillStyle = idle;
    context.fillRect(x(0), y, x(result.summary.worker_tiles.max) - x(0), bar);
    let tiles = 0;
    for (const segment of result.shares[worker]?.segments ?? []) {
      const [left, end] = [x(tiles), tiles + segment.tile_end - segment.tile_begin];
      context.fillStyle = colour(segment, batch.lengths.length);
      context.fillRect(left, y, Math.max(0.5, x(end) - left - 0.5), bar);
      context.fillStyle = ink;
      if (segment.tile_begin > 0) context.fillRect(left, y, 1.5, bar);
      if (segment.tile_end < segment.output_tiles) context.fillRect(x(end) - 2, y, 1.5, bar);
      tiles = end;
    }
    context.fillStyle = ink;
    if (worker % Math.ceil(14 / pitch) === 0) context.fillText(String(worker), 2, y + Math.min(bar, 11));
    if (worker === batch.look) context.strokeRect(1, y - 0.5, width - 2, bar + 1);
  }
  context.strokeStyle = mean;
  context.setLineDash([4, 3]);
  context.beginPath();
  context.moveTo(x(result.summary.worker_tiles.mean), 0);
  context.lineTo(x(result.summary.worker_tiles.mean), canvas.height / scale);
  context.stroke();
}

function showNumbers(results, batch) {
  element("numbers").tBodies[0].replaceChildren(...results.map(({ policy, result }) => {
    const row = document.createElement("tr");
    const { summary } = result;
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = policy.words;
    const cells = [grouped(summary.worker_tiles.max), grouped(summary.worker_tiles.mean, 1), percent(summary.worker_tiles.balance),
      `${grouped(summary.busy_workers)} of ${grouped(result.workers)}`, grouped(summary.shared_outputs), grouped(summary.max_contributors),
      workerWords(result, batch.look)];
    row.append(head, ...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    return row;
  }));
}

function show() {
  for (const id of [...NUMBERS, "lengths"]) element(id).removeAttribute("aria-invalid");
  element("error").textContent = "";
  let batch;
  try {
    batch = readBatch();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    element(error.id).setAttribute("aria-invalid", "true");
    element("error").textContent = error.message;
    return;
  }
  const results = POLICIES.map((policy) => ({ policy, result: LeanSchedule.schedule(batch, policy, batch.workers) }));
  const axis = Math.max(1, ...results.map(({ result }) => result.summary.worker_tiles.max));
  showNumbers(results, batch);
  for (const { policy, result } of results) {
    const words = sentence(policy.words, result);
    element(`${policy.kind}-words`).textContent = words.slice(policy.words.length);
    element(`${policy.kind}-picture`).setAttribute("aria-label", words);
    paint(element(`${policy.kind}-picture`), result, axis, batch);
  }
  element("said").textContent = `${grouped(batch.lengths.length)} requests, ${grouped(results[0].result.summary.outputs)} outputs, ` +
    `${grouped(results[0].result.summary.tiles)} tiles. ${sentence(POLICIES[0].words, results[0].result)}.`;
}

function build() {
  element("panels").append(...POLICIES.map((policy) => {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.append(Object.assign(document.createElement("strong"), { textContent: policy.words }),
      Object.assign(document.createElement("span"), { id: `${policy.kind}-words` }));
    const canvas = Object.assign(document.createElement("canvas"), { id: `${policy.kind}-picture` });
    canvas.setAttribute("role", "img");
    figure.append(caption, canvas);
    return figure;
  }));
  const values = { ...start, requests: start.lengths.length, percent: 100, look: 0 };
  for (const id of NUMBERS) {
    const [number, range] = [element(id), element(`${id}-range`)];
    number.value = range.value = values[id];
    number.addEventListener("input", () => { range.value = number.value; show(); });
    range.addEventListener("input", () => { number.value = range.value; show(); });
  }
  element("lengths").value = start.lengths.join(",");
  element("lengths").addEventListener("input", () => {
    try {
      element("requests").value = element("requests-range").value = parseLengths(element("lengths").value).length;
    } catch { /* show() says what is wrong */ }
    show();
  });
  element("controls").addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("resize", show);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}

build();
