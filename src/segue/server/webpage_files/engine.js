// What is shown of an engine: its charts, and cards about its life, its weights and its start.

import { meanOf } from "./chart.js";
import { bytes, el, moment, number, percent, seconds } from "./dom.js";

export const engineCharts = [
  {
    title: "Requests",
    least: 4,
    axis: number,
    series: [
      { name: "running", of: (sample) => sample.running, show: number },
      { name: "waiting", of: (sample) => sample.waiting, show: number },
    ],
  },
  {
    title: "Tokens per second",
    least: 10,
    axis: number,
    series: [
      { name: "output", of: meanOf("output_per_s", 4.5), show: number },
      { name: "prompt", of: meanOf("prompt_per_s", 4.5), show: number, isLine: false },
    ],
  },
  {
    title: "KV cache",
    least: 0.1,
    most: 1,
    axis: percent,
    series: [
      { name: "of requests", of: (sample) => sample.kv_taken, show: percent },
      { name: "with cached prompts", of: (sample) => sample.kv_used, show: percent },
    ],
  },
  {
    title: "Time to first token",
    least: 0.01,
    axis: seconds,
    series: [
      { name: "first token", of: (sample) => sample.first_token_s, show: seconds, isDots: true },
      { name: "between tokens", of: (sample) => sample.between_tokens_s, show: seconds, isLine: false },
    ],
  },
];

const LIFE = ["init", "standby", "waking", "active", "drained", "draining", "dead"];
const USUAL = new Set(["init", "standby", "waking", "active"]);

const card = (title, ...children) => el("section", { class: "card" }, el("h2", { text: title }), ...children);

export function facts(pairs) {
  const rows = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "facts" }, ...rows.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: String(value) }))));
}

/** The states, with the seconds that each has lasted, as far as the log tells. */
function life(status, log) {
  const lasted = {};
  for (const entry of log.filter((each) => each.kind === "life" && each.incarnation === status.incarnation)) {
    const before = entry.text.split(" → ")[0];
    if (LIFE.includes(before) && entry.seconds !== null) lasted[before] = (lasted[before] ?? 0) + entry.seconds;
  }
  const shown = LIFE.filter((state) => USUAL.has(state) || state === status.state || state in lasted);
  const steps = shown.map((state) => {
    const isNow = state === status.state;
    const time = isNow ? "now" : state in lasted ? seconds(lasted[state]) : "";
    return el("li", { "aria-current": isNow ? "step" : null, class: state in lasted ? "past" : state }, el("span", { text: state.toUpperCase() }), el("small", { text: time }));
  });
  return card("Life", el("ol", { class: "life" }, ...steps), facts([
    ["started", status.started_at ? moment(status.started_at) : null],
    ["role", status.role === "both" ? null : status.role],
    ["epoch", status.epoch || null],
    ["memory given back", status.released?.join(", ")],
  ]));
}

function weights(status, log) {
  const last = status.last_update ?? {};
  const changes = log.filter((entry) => entry.kind === "weights").slice(-5).reverse();
  return card("Weights",
    el("p", { class: "big" }, el("small", { text: "version" }), ` ${status.weight_version}`),
    facts([
      ["updates", status.num_updates + (status.num_failed_updates ? `, ${status.num_failed_updates} failed` : "")],
      ["last update", last.num_bytes ? `${bytes(last.num_bytes)} in ${seconds(last.timings?.total_s ?? 0)}` : null],
      ["generation stopped", last.timings ? seconds(last.timings.write_s) : null],
      ["size", bytes(status.weight_bytes)],
    ]),
    changes.length ? el("ol", { class: "changes" }, ...changes.map((entry) => el("li", {}, el("time", { text: moment(entry.at) }), ` ${entry.text}`))) : null);
}

function start(status) {
  const all = [...status.start, ...Object.entries(status.graphs).map(([kind, cost]) => ({ name: `graphs: ${kind}`, seconds: cost.seconds }))];
  const most = Math.max(0.001, ...all.map((step) => step.seconds));
  const total = status.start.reduce((sum, step) => sum + step.seconds, 0);
  const rows = all.filter((step) => step.seconds >= total / 200).map((step) => {
    const bar = el("span", { class: "bar-of" });
    bar.style.setProperty("--share", String(step.seconds / most));
    return el("li", {}, el("span", { text: step.name.replaceAll("_", " ") }), bar, el("span", { class: "num", text: seconds(step.seconds) }));
  });
  return card("Start", el("p", { class: "faint", text: `${seconds(total)} in the workers` }), el("ol", { class: "bars" }, ...rows));
}

function machine(status) {
  return card("Engine", facts([
    ["device", status.tp > 1 ? `${status.tp} × ${status.device}` : status.device],
    ["computes in", status.dtype],
    ["attention", status.attention_backend],
    ["KV cache", `${number(status.num_pages * status.page_size)} tokens, ${bytes(status.kv_bytes)}`],
    ["longest request", `${number(status.max_seq_len)} tokens`],
    ["most running", number(status.max_running_requests)],
    ["Segue", status.version],
  ]));
}

export function engineCards(status, log) {
  if (!status.start) return [];
  return [life(status, log), weights(status, log), start(status), machine(status)];
}

/** The words and the tone for the state of an engine: good, busy, bad or off. */
export function engineState(status) {
  if (status.hung) return ["hangs", "bad"];
  if (status.state === "dead") return ["dead", "bad"];
  if (status.paused) return [`paused (${status.paused.replace("_", " ")})`, "busy"];
  if (status.update && status.update !== "idle") return ["updating weights", "busy"];
  if (status.trouble && status.state === "active") return ["refuses requests", "bad"];
  if (status.state === "active") return ["active", "good"];
  return [status.state === "init" ? "starting" : status.state, "busy"];
}
