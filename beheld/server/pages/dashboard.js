"use strict";
// A live view of one server: a reading of /metrics every two seconds, five minutes of them kept in this page.
const EVERY_MS = 2000, KEPT = 150, RECENT = 5, MINUTE = 30;
const readings = [];

const back = (num) => readings[Math.max(0, readings.length - 1 - num)];
const short = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(2)} G` : value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : value >= 1e4 ? `${(value / 1e3).toFixed(1)} k` : value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1));
const time = (seconds) => (seconds === null ? "\u2013" : seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`);

// What grew per second between two readings.
function rate(older, newer, name, labels) {
  return newer.at > older.at ? grown(older.samples, newer.samples, name, labels) / (newer.at - older.at) : 0;
}

function usedShare(samples, labels = {}) {
  const of = (state) => sum(samples, "beheld_kv_blocks", { ...labels, state });
  return of("all") ? 1 - of("free") / of("all") : 0;
}

function errors(older, newer) {
  const bad = new Set(newer.samples.filter(({ name, labels }) => name === "beheld_requests_total" && /^[45]/.test(labels.status)).map(({ labels }) => labels.status));
  return [...bad].reduce((total, status) => total + rate(older, newer, "beheld_requests_total", { status }), 0);
}

// Each tile: its name, the value of a step (from the reading before it to its own), the figure of now, and more words.
const TILES = [
  {
    name: "Sequences running",
    step: (_, { samples }) => sum(samples, "beheld_sequences", { state: "running" }),
    more: ({ samples }) => `${short(sum(samples, "beheld_answers_in_work"))} answers in work`,
  },
  {
    name: "Sequences waiting",
    step: (_, { samples }) => sum(samples, "beheld_sequences", { state: "waiting" }),
    more: ({ samples }) => `${short(sum(samples, "beheld_engine", { count: "num_preemptions" }))} preempted since the start`,
  },
  {
    name: "KV cache in use", most: 1,
    step: (_, { samples }) => usedShare(samples),
    now: (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`,
    more: ({ samples }) => `${short(sum(samples, "beheld_kv_blocks", { state: "cached" }))} of ${short(sum(samples, "beheld_kv_blocks", { state: "all" }))} blocks hold reusable prefixes`,
  },
  {
    name: "Answer tokens a second", rate: "beheld_answer_tokens_total",
    more: () => "counted when an answer ends",
  },
  {
    name: "Prompt tokens a second", rate: "beheld_prompt_tokens_total",
    more: (newer) => {
      const all = grown(back(MINUTE).samples, newer.samples, "beheld_prompt_tokens_total");
      return all ? `${Math.round((100 * grown(back(MINUTE).samples, newer.samples, "beheld_cached_tokens_total")) / all)} % from the prefix cache` : "none in the last minute";
    },
  },
  {
    name: "Media items a second", rate: "beheld_media_items_total",
    more: ({ samples }) => `${short(sum(samples, "beheld_media_items_total"))} since the start, ${short(sum(samples, "beheld_media_items_total", { cached: "true" }))} from the cache`,
  },
  {
    name: "Requests a second", rate: "beheld_requests_total",
    more: (newer) => `${errors(back(MINUTE), newer).toFixed(2)} a second refused or failed`,
  },
  { name: "Time to first token", quantile: "beheld_first_token_seconds" },
  { name: "Time of a chat request", quantile: "beheld_request_seconds", route: "chat" },
  { name: "Event loop's delay", quantile: "beheld_event_loop_lag_seconds" },
  {
    name: "Memory held",
    // An engine in a thread reports the server's own.
    step: (_, { samples }) => Math.max(sum(samples, "beheld_held_bytes", { process: "server" }), sum(samples, "beheld_held_bytes", { process: "engine" })),
    now: (value) => `${(value / 2 ** 30).toFixed(2)} GiB`,
    more: () => "of the larger of server and engine",
  },
];

// Fill in what tiles of rates and of quantiles have in common.
for (const tile of TILES) {
  if (tile.rate) {
    tile.step = (older, newer) => rate(older, newer, tile.rate);
    tile.figure = (newer) => rate(back(RECENT), newer, tile.rate);
  }
  if (tile.quantile) {
    const of = (reading) => (tile.route ? reading.samples.filter(({ labels }) => labels.route === tile.route) : reading.samples);
    tile.step = (older, newer) => mean(of(older), of(newer), tile.quantile);
    tile.figure = (newer) => quantile(0.5, of(back(MINUTE)), of(newer), tile.quantile);
    tile.now = time;
    tile.more = (newer) => `median; 99th percentile ${time(quantile(0.99, of(back(MINUTE)), of(newer), tile.quantile))}; last minute`;
  }
  const node = find("tile").content.firstElementChild.cloneNode(true);
  node.querySelector("h2").textContent = tile.name;
  find("tiles").append(node);
  tile.node = node;
}

function draw(tile) {
  const values = readings.slice(1).map((reading, k) => tile.step(readings[k], reading));
  const newest = readings[readings.length - 1], last = tile.step(back(1), newest);
  const figure = tile.figure ? tile.figure(newest) : last;
  tile.node.querySelector(".now").textContent = (tile.now || short)(figure);
  tile.node.querySelector(".more").textContent = tile.more(newest);
  const most = tile.most || Math.max(...values, 1e-9), left = KEPT - values.length;
  const points = values.map((value, k) => `${left + k + 0.5} ${(38 - (36 * value) / most).toFixed(2)}`);
  tile.node.querySelector(".line").setAttribute("d", points.length ? `M${points.join("L")}` : "");
  tile.node.querySelector(".area").setAttribute("d", points.length ? `M${left + 0.5} 40L${points.join("L")}L${KEPT - 0.5} 40Z` : "");
}

function drawStages({ samples }) {
  const older = back(MINUTE).samples, stages = ["prepare", "queue", "prefill", "decode"];
  const means = stages.map((stage) => mean(older, samples, "beheld_stage_seconds", { stage })), all = means.reduce((a, b) => a + b, 0);
  const num = grown(older, samples, "beheld_first_token_seconds_count");
  find("requests").textContent = num ? `mean of ${short(num)} in the last minute` : "none ended in the last minute";
  find("stages").replaceChildren(...stages.map((stage, k) => make("div", { class: "stage" },
    make("span", { text: stage }),
    make("span", { class: "bar" }, make("span", { place: { width: `${all ? (100 * means[k]) / all : 0}%` } })),
    make("span", { class: "value", text: all ? time(means[k]) : "\u2013" }))));
}

function drawEngines({ samples }) {
  const engines = [...new Set(samples.filter(({ name }) => name === "beheld_engine_serving").map(({ labels }) => labels.engine))];
  find("several").hidden = engines.length < 2;
  find("engines").replaceChildren(...engines.map((engine) => make("tr", {}, ...[
    engine,
    sum(samples, "beheld_engine_serving", { engine }) ? "serves" : "starts",
    short(sum(samples, "beheld_engine_restarts", { engine })),
    short(sum(samples, "beheld_sequences", { engine, state: "running" })),
    short(sum(samples, "beheld_sequences", { engine, state: "waiting" })),
    `${Math.round(100 * usedShare(samples, { engine }))} %`,
  ].map((text) => make("td", { text })))));
}

function tell(text, wrong) {
  find("state").textContent = text;
  find("state").classList.toggle("error", wrong);
}

async function look() {
  try {
    const response = await fetch("metrics", { cache: "no-store" });
    if (!response.ok) { tell(`the server answered ${response.status}`, true); return; }
    readings.push({ at: performance.now() / 1000, samples: parsed(await response.text()) });
  } catch { tell("the server does not answer", true); return; }
  if (readings.length > KEPT + 1) readings.shift();
  const newest = readings[readings.length - 1];
  TILES.forEach(draw);
  drawStages(newest);
  drawEngines(newest);
  tell("live; the curves show five minutes at most", false);
}

// One look after the other, so that a slow server is not asked twice at once; none while the page is not seen.
async function live() {
  if (!document.hidden) await look();
  setTimeout(live, EVERY_MS);
}

live();
