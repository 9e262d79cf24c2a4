// What is shown of a router: its workers, the groups of prefill workers, and how requests went.

import { meanOf } from "./chart.js";
import { count, el, number, percent, seconds } from "./dom.js";
import { facts } from "./engine.js";

const of = (name) => (sample) => sample[name];

export const routerCharts = [
  {
    title: "Requests",
    least: 4,
    axis: number,
    series: [
      { name: "in flight", of: of("in_flight"), show: number },
      { name: "decoding", of: of("decoding"), show: number },
    ],
  },
  {
    title: "Tokens per second",
    least: 10,
    axis: number,
    series: [{ name: "output, by the workers' steps", of: meanOf("output_per_s", 4.5), show: number }],
  },
  {
    title: "KV cache",
    least: 0.1,
    most: 1,
    axis: percent,
    series: [
      { name: "of requests, mean", of: of("kv_taken"), show: percent },
      { name: "fullest worker", of: of("kv_taken_most"), show: percent },
    ],
  },
  {
    title: "Time to first token",
    least: 0.1,
    axis: seconds,
    series: [
      { name: "first token, of streams", of: of("first_token_s"), show: seconds, isDots: true },
      { name: "waiting work of the busiest worker", of: of("queued_s"), show: seconds },
    ],
  },
];

const COLUMNS = ["worker", "state", "role", "weights", "in flight", "decoding", "waiting work", "KV"];

function row(worker) {
  const meter = el("span", { class: "bar-of" });
  meter.style.setProperty("--share", String(worker.kv ?? 0));
  const state = worker.serves ? "serves" : worker.state || "not reached";
  const about = [worker.cohort && `cohort ${worker.cohort}, epoch ${worker.epoch}`, worker.breaker !== "closed" && `breaker ${worker.breaker}`].filter(Boolean);
  const cells = [
    el("span", {}, el("b", { text: worker.id }), ...about.map((text) => el("small", { text }))),
    el("span", {}, el("span", { class: "pill", "data-tone": worker.serves ? "good" : "bad", text: state }), worker.reason ? el("small", { text: worker.reason }) : ""),
    el("span", { text: [worker.foreign ? "other server" : worker.role, worker.group && `${worker.group} prompts`].filter(Boolean).join(", ") || "–" }),
    el("span", { text: worker.weight_version || "–" }),
    el("span", { class: "num", text: number(worker.in_flight) }),
    el("span", { class: "num", text: worker.decoding === null ? "–" : number(worker.decoding) }),
    el("span", { class: "num", text: worker.queued_s === null ? "–" : seconds(worker.queued_s) }),
    worker.kv === null ? el("span", { text: "–" }) : el("span", { class: "with-bar" }, meter, el("span", { class: "num", text: percent(worker.kv) })),
  ];
  return el("tr", {}, ...cells.map((cell, index) => el(index ? "td" : "th", { scope: index ? null : "row", "data-name": COLUMNS[index] }, cell)));
}

export function workerTable(workers) {
  if (!workers.length) return [el("p", { class: "faint", text: "There are no workers. POST /workers adds one, and so does segue serve --register." })];
  const head = el("tr", {}, ...COLUMNS.map((name) => el("th", { scope: "col", text: name })));
  return [el("table", {}, el("thead", {}, head), el("tbody", {}, ...workers.map(row)))];
}

/** The sums of what the router did, and its groups. */
export function fleetFacts(status, totals) {
  const laps = status.laps;
  return facts([
    ["policy", status.policy],
    ["answered", number(totals.answered)],
    ["failed", number(totals.failed)],
    ["tried again before any output", number(totals.retries)],
    ["resumed after some output", number(totals.resumes)],
    ["waited for a successor", number(totals.waits)],
    ["hand-overs", totals.pairs || totals.local ? `${number(totals.pairs)} pairs, ${number(totals.local)} local` : null],
    ["KV claimed again", totals.second_claims || null],
    ["refused", number(totals.refused)],
    ["short prompts", laps?.enabled ? `${count(laps.short_group.length, "worker")}, up to ${number(laps.threshold)} tokens` : null],
    ["long prompts", laps?.enabled ? count(laps.long_group.length, "worker") : null],
    ["moves between the groups", laps?.enabled ? number(laps.moves) : null],
    ["Segue", status.version],
  ]);
}

export function routerState(status, workers) {
  if (status.draining) return ["draining", "busy"];
  const serving = workers.filter((worker) => worker.serves).length;
  if (!serving) return ["no worker serves", "bad"];
  return [`${serving} of ${workers.length} serve`, serving === workers.length ? "good" : "busy"];
}
