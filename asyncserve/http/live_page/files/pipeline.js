// The pipeline as it runs: reads the server's feed and draws it. One state, drawn at most once a frame.

import { Parts, Spark, Strip } from "./charts.js";
import { byId, count, duration, make, percent, rate, setAttribute, setText } from "./dom.js";
import { call, events } from "./server.js";

const NUM_STEPS = 120, NUM_SECONDS = 180;
const RETRY_S = [1, 2, 5, 10];
const TABLE_MS = 5000; // between two writings of the tables: they are for reading
const CALM_MS = 1000; // between two drawings where less motion is asked for
const TAKEN_BY = {
  requests: "tokenize", encoded: "tokenize", arrivals: "schedule", plans: "launch", launched: "collect",
  completions: "schedule", applied: "detokenize",
};
const COUNTS = {
  num_preemptions: "Preempted", num_pauses: "Paused for a reader", num_deadlines_missed: "Deadlines missed",
  num_failed_steps: "Steps failed", num_retried_steps: "Steps retried", num_replayed_sequences: "Replayed",
  num_device_restarts: "Device restarts",
};
const PHASES = {
  loading: "The model is being loaded.", draining: "The server is stopping: it takes no new requests.",
  failed: "The engine has failed.",
};

const link = byId("link"), pause = byId("pause");
const calm = matchMedia("(prefers-reduced-motion: reduce)");

let facts = null; // of the last snapshot
let steps = [], seconds = [], state = null; // steps and seconds as objects, oldest first
let feed = null; // stops the reading
let paused = false, drawn = 0, tabled = 0, waiting = false;

const named = (fields, row) => Object.fromEntries(fields.map((field, index) => [field, row[index]]));

// ---- reading ----------------------------------------------------------------------------------------------

function take({ name, data }) {
  const event = JSON.parse(data);
  if (name === "snapshot") {
    facts = event;
    steps = [];
    seconds = [];
    drawn = 0;
    document.dispatchEvent(new CustomEvent("facts", { detail: facts }));
  } else if (!facts) return;
  const more = (before, fields, rows, bound) => {
    const last = before.at(-1)?.number ?? -1;
    const fresh = rows.map((row) => named(fields, row)).filter((row) => row.number > last);
    return [...before, ...fresh].slice(-bound);
  };
  steps = more(steps, facts.step_fields, event.steps, NUM_STEPS);
  seconds = more(seconds, facts.second_fields, event.seconds, NUM_SECONDS);
  state = { ...event.state, totals: named(facts.total_fields, event.state.totals) };
  if (waiting) return;
  waiting = true;
  requestAnimationFrame((now) => {
    waiting = false;
    if (calm.matches && now - drawn < CALM_MS) return;
    drawn = now;
    draw();
  });
}

async function read() {
  const own = feed = new AbortController();
  for (let failures = 0; !own.signal.aborted;) {
    try {
      const response = await call("pipeline/events", { signal: own.signal });
      for await (const event of events(response)) {
        failures = 0;
        take(event);
      }
      throw new Error("The server has ended the connection.");
    } catch (error) {
      if (own.signal.aborted) return;
      if (error.status === 401) {
        setText(link, error.message);
        return; // goes on with a key
      }
      const wait = error.retryAfter || RETRY_S[Math.min(failures++, RETRY_S.length - 1)];
      setText(link, `${error.message === "network error" ? "The connection broke." : error.message} Trying again in ${wait} s.`);
      await new Promise((resolve) => {
        setTimeout(resolve, wait * 1000);
        own.signal.addEventListener("abort", resolve);
      });
    }
  }
}

export function restart() {
  feed?.abort();
  feed = null;
  // A page that nobody sees costs the server nothing; what happened meanwhile comes with the next snapshot.
  if (!paused && !document.hidden) read();
  else setText(link, "Paused");
}

// ---- drawing ----------------------------------------------------------------------------------------------

const sequences = new Parts("Sequences", ["running", "free rows"]);
const blocks = new Parts("KV blocks", ["used", "cached", "free"]);
const strips = {
  prefill: new Strip("Prompt tokens", ["bar"], NUM_STEPS),
  decode: new Strip("Decode tokens", ["bar"], NUM_STEPS),
  device: new Strip("Device time", ["bar", "bar idle"], NUM_STEPS),
};
const sparks = {
  output: new Spark("Output tokens/s", { filled: true, length: NUM_SECONDS }),
  prompt: new Spark("Prompt tokens/s", { filled: true, length: NUM_SECONDS }),
  first: new Spark("First token", { names: ["p50", "p99"], length: NUM_SECONDS }),
  gap: new Spark("Between tokens", { names: ["p50", "p99"], length: NUM_SECONDS }),
  idle: new Spark("Device idle", { filled: true, length: NUM_SECONDS }),
  lag: new Spark("Event loop late", { length: NUM_SECONDS }),
};
const queues = make("ol", { class: "queues" });
const meters = new Map();
const totals = make("dl", { class: "totals" });
const totalNumbers = new Map();
const strip = make("div", { class: "panel", role: "group", "aria-labelledby": "steps-title" });
const minutes = make("div", { class: "panel", role: "group", "aria-labelledby": "minutes-title" });
const tables = make("details", { class: "panel" });

function buildPanels() {
  strip.append(
    make("h3", { id: "steps-title", class: "chart-head" }, make("span", {}, `Last ${NUM_STEPS} steps`), make("span", { class: "quiet", id: "step-note" })),
    strips.prefill.element, strips.decode.element, strips.device.element);
  minutes.append(
    make("h3", { id: "minutes-title", class: "chart-head" }, make("span", {}, "Last three minutes"), make("span", { class: "quiet" }, "p50 thick, p99 thin")),
    make("div", { class: "cards" }, ...Object.values(sparks).map((spark) => spark.element)));
  tables.append(make("summary", {}, "The graphs as tables"), make("div", { id: "tables" }));
  tables.addEventListener("toggle", () => { tabled = 0; drawTables(); });
  byId("panels").append(
    make("div", { class: "panel", role: "group", "aria-labelledby": "queues-title" },
      make("h3", { id: "queues-title", class: "chart-head" }, make("span", {}, "Queues between stages"), make("span", { class: "quiet" }, "held / room")),
      queues),
    make("div", { class: "pair" }, sequences.element, blocks.element),
    strip, minutes,
    make("div", { class: "panel" }, make("h3", {}, "Since the start"), totals),
    tables);
}

function drawQueues() {
  for (const [name, depth, capacity, peak] of state.channels) {
    let meter = meters.get(name);
    if (!meter) {
      const fill = make("span", { class: "fill" }), mark = make("span", { class: "mark" });
      const held = make("span"), most = make("span", { class: "quiet" });
      const by = TAKEN_BY[name] ? make("span", { class: "quiet" }, `to ${TAKEN_BY[name]}`) : "";
      meter = { fill, mark, held, most };
      meters.set(name, meter);
      queues.append(make("li", {},
        make("span", { class: "ends" }, make("span", { class: "name" }, name), " ", held),
        make("span", { class: "meter", "aria-hidden": "true" }, fill, mark),
        make("span", { class: "ends" }, by, " ", most)));
    }
    meter.fill.style.width = `${(100 * depth) / capacity}%`;
    meter.mark.style.left = `${(100 * peak) / capacity}%`;
    setText(meter.held, `${count(depth)} / ${count(capacity)}`);
    setText(meter.most, `peak ${count(peak)}`);
  }
}

const column = (rows, field) => rows.map((row) => row[field]);
const latest = (values) => values.findLast((value) => value !== null) ?? null;
const most = (values) => Math.max(0, ...values.filter((value) => value !== null));
const shownTime = (value) => (value === null ? "–" : duration(value));

function drawSteps() {
  const prefill = column(steps, "prefill_tokens"), decode = column(steps, "decode_tokens");
  const device = column(steps, "device_us"), idle = column(steps, "idle_us");
  strips.prefill.draw([prefill], `most ${count(most(prefill))}`);
  strips.decode.draw([decode], `most ${count(most(decode))}`);
  const lastStep = steps.at(-1);
  strips.device.draw([device, idle],
    lastStep ? `last ${duration(lastStep.device_us / 1000)}, most ${duration(most(device) / 1000)}; idle before it, pale` : "");
  setText(byId("step-note"), lastStep ? `step ${count(lastStep.number)}` : "none yet");
}

function drawMinutes() {
  const output = column(seconds, "output_tokens"), prompt = column(seconds, "prefill_tokens");
  sparks.output.draw([output], { value: rate(output.at(-1) ?? 0), note: `most ${rate(most(output))}` });
  sparks.prompt.draw([prompt], { value: rate(prompt.at(-1) ?? 0), note: `most ${rate(most(prompt))}` });
  for (const [spark, field] of [[sparks.first, "first_token"], [sparks.gap, "gap"]]) {
    const middle = column(seconds, `${field}_p50_ms`), high = column(seconds, `${field}_p99_ms`);
    const last = latest(high);
    spark.draw([middle, high], { value: shownTime(latest(middle)), note: last === null ? "" : `p99 ${duration(last)}` });
  }
  const share = seconds.map((row) => (row.device_ms + row.idle_ms > 0 ? row.idle_ms / (row.device_ms + row.idle_ms) : null));
  const idle = seconds.reduce((sum, row) => sum + row.idle_ms, 0), busy = seconds.reduce((sum, row) => sum + row.device_ms, 0);
  const last = latest(share);
  sparks.idle.draw([share], {
    value: last === null ? "–" : percent(last), note: idle + busy > 0 ? `mean ${percent(idle / (idle + busy))}` : "",
  });
  const lag = column(seconds, "lag_ms");
  sparks.lag.draw([lag], { value: shownTime(latest(lag)), note: `most ${duration(most(lag))}` });
}

function drawTotals() {
  const { totals: all, prefix, counts } = state;
  const [asked, hit] = prefix;
  const shown = [
    ["Steps", count(all.steps)],
    ["Prompt tokens", count(all.prefill_tokens)],
    ["Output tokens", count(all.output_tokens)],
    ["Prefix cache hits", asked ? percent(hit / asked) : "–"],
    ["Ended", count(all.stopped + all.cut_by_length)],
    ["Left by clients", count(all.aborted)],
    ["Failed", count(all.failed)],
    ["Refused", count(all.refused)],
    ...Object.entries(COUNTS).map(([field, name]) => [name, count(counts[field])]),
  ];
  for (const [name, text] of shown) {
    let number = totalNumbers.get(name);
    if (!number) {
      number = make("dd");
      totalNumbers.set(name, number);
      totals.append(make("div", {}, make("dt", {}, name), number));
    }
    setText(number, text);
  }
}

function table(caption, heads, rows) {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    make("table", {}, make("caption", {}, caption),
      make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
      make("tbody", {}, ...rows.map((cells) => make("tr", {},
        ...cells.map((cell, index) => make(index ? "td" : "th", index ? {} : { scope: "row" }, cell)))))));
}

function drawTables() {
  if (!tables.open || !facts || performance.now() - tabled < TABLE_MS) return;
  tabled = performance.now();
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);
  const spans = [];
  for (let end = seconds.length; end > 0; end -= 15) spans.push(seconds.slice(Math.max(0, end - 15), end));
  const byTime = spans.map((rows, index) => [
    `${index * 15} to ${index * 15 + rows.length} s ago`,
    rate(mean(column(rows, "output_tokens"))),
    rate(mean(column(rows, "prefill_tokens"))),
    ...["first_token_p50_ms", "first_token_p99_ms", "gap_p50_ms", "gap_p99_ms", "lag_ms"].map((field) => {
      const values = column(rows, field).filter((value) => value !== null);
      return values.length ? duration(field.includes("p50") ? mean(values) : most(values)) : "–";
    }),
  ]);
  const byStep = steps.slice(-15).reverse().map((step) => [
    count(step.number), count(step.prefill_tokens), count(step.decode_tokens),
    duration(step.device_us / 1000), duration(step.idle_us / 1000),
  ]);
  byId("tables").replaceChildren(
    table("Last three minutes", ["When", "Output tokens/s", "Prompt tokens/s", "First token p50", "First token p99", "Between tokens p50", "Between tokens p99", "Event loop late"], byTime),
    table("Last steps", ["Step", "Prompt tokens", "Decode tokens", "Device time", "Idle before"], byStep));
}

function draw() {
  const room = facts.max_num_seqs;
  if (room !== undefined) {
    sequences.draw([state.running, room - state.running], [`${count(state.running)} of ${count(room)}`, count(room - state.running)],
      [`${count(state.waiting)} waiting`, state.waiting_tokens ? `${count(state.waiting_tokens)} tokens` : "", state.paused ? `${count(state.paused)} paused` : ""].filter(Boolean).join(", "));
    const [used, cached, free] = state.blocks;
    const all = Math.max(used + cached + free, 1);
    blocks.draw([used, cached, free], [used, cached, free].map((each) => `${count(each)}, ${percent(each / all)}`), `${count(all)} in all`);
  }
  drawQueues();
  drawSteps();
  drawMinutes();
  drawTotals();
  drawTables();
  const phase = state.device_is_lost ? "The device was lost and is being opened again." : PHASES[state.phase] ?? (state.graphs_pending ? `Live; ${count(state.graphs_pending)} CUDA graphs are still to be captured.` : "Live");
  setText(link, phase);
  setAttribute(byId("pipeline"), "data-phase", state.phase);
}

export function startPipeline() {
  buildPanels();
  pause.addEventListener("click", () => {
    paused = !paused;
    setAttribute(pause, "aria-pressed", String(paused));
    restart();
  });
  document.addEventListener("visibilitychange", restart);
}
