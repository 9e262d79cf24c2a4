// The page: what the feed tells is kept here, and shown.

import { Chart } from "./chart.js";
import { Chat } from "./chat.js";
import { byId, el, moment, seconds, setContent, setText } from "./dom.js";
import { engineCards, engineCharts, engineState } from "./engine.js";
import { Feed } from "./feed.js";
import { fleetFacts, routerCharts, routerState, workerTable } from "./router.js";
import { key } from "./server.js";

const MOST_SAMPLES = 320;
const MOST_ENTRIES = 300;

const known = { status: null, samples: [], log: [], workers: [], totals: null, lostAt: null, needsKey: "", modelsOf: "" };
let charts = [];
let chartsOf = "";

// --- what the feed tells ---

function take(message) {
  if (message.status) {
    const before = known.status?.incarnation;
    known.status = message.status;
    if (before && message.status.incarnation && before !== message.status.incarnation) {
      note("another process answers");
    }
  }
  if (message.workers) [known.workers, known.totals] = [message.workers, message.totals];
  for (const sample of message.samples ?? []) {
    const last = known.samples[known.samples.length - 1];
    if (!last || sample.at > last.at) known.samples.push(sample);
  }
  known.samples.splice(0, known.samples.length - MOST_SAMPLES);
  for (const entry of message.log ?? []) {
    const name = `${known.status?.incarnation} ${entry.number}`;
    if (!known.log.some((each) => each.name === name)) known.log.push({ ...entry, name, incarnation: known.status?.incarnation });
  }
  known.log.sort((a, b) => a.at - b.at);
  known.log.splice(0, known.log.length - MOST_ENTRIES);
  draw();
}

/** Adds what the page itself has noticed to the log. */
function note(text, isBad = false) {
  const at = Date.now() / 1000;
  known.log.push({ name: `page ${at}`, at, kind: "page", text, seconds: null, failed: isBad });
}

const feed = new Feed({
  open() {
    if (known.lostAt !== null) note(`the server answers again, after ${seconds((Date.now() - known.lostAt) / 1000)}`);
    known.lostAt = null;
    known.needsKey = "";
  },
  message: take,
  refused(error) {
    known.needsKey = error.message;
    draw();
    if (error.status === 401 && !isDismissed) askForKey(key.get() ? "This key does not open the charts. Another one may; the chat may take this one." : "");
  },
  lost() {
    if (known.lostAt === null) {
      known.lostAt = Date.now();
      if (known.status) note("the server does not answer", true);
    }
    draw();
  },
});

// --- what is shown ---

function draw() {
  const { status } = known;
  const isLost = known.lostAt !== null;
  document.body.classList.toggle("stale", isLost);
  drawState(status, isLost);
  if (!status) return;
  const isRouter = status.kind === "router";
  drawCharts(isRouter);
  const serves = isRouter ? known.workers.some((worker) => worker.serves) : status.state === "active";
  if (serves && known.modelsOf !== status.incarnation) {
    known.modelsOf = status.incarnation;
    chat.learnModels();
  }
  const log = [...known.log].reverse();
  byId("log-empty").hidden = log.length > 0;
  setContent(byId("log-entries"), log.map((entry) => entry.name).join(), () => log.map(logItem));
  byId("workers").hidden = !isRouter;
  byId("cards").hidden = isRouter;
  if (isRouter) {
    setContent(byId("worker-rows"), JSON.stringify(known.workers), () => workerTable(known.workers));
    if (known.totals) setContent(byId("fleet"), JSON.stringify([status, known.totals]), () => [fleetFacts(status, known.totals)]);
  } else {
    setContent(byId("cards"), JSON.stringify([status, known.log.length, log[0]?.name]), () => engineCards(status, known.log));
  }
}

function drawState(status, isLost) {
  const isRouter = status?.kind === "router";
  let [text, tone] = ["connecting", "off"];
  if (known.needsKey) [text, tone] = ["needs a key", "off"];
  else if (isLost) [text, tone] = [status?.state === "dead" ? "dead" : "unreachable", "bad"];
  else if (status) [text, tone] = isRouter ? routerState(status, known.workers) : engineState(status);
  setText(byId("state"), text);
  byId("state").dataset.tone = tone;
  setText(byId("model"), isRouter ? "Router" : (status?.model ?? ""));
  document.title = status ? `${isRouter ? "Router" : (status.model ?? "Segue")} – ${text}` : "Segue";
  const chips = !status || known.needsKey ? [] : isRouter ? versions() : [status.weight_version && `weights ${status.weight_version}`];
  setContent(byId("chips"), chips.join(), () => chips.filter(Boolean).map((chip) => el("span", { class: "chip", text: chip })));
  const banner = byId("banner");
  const said = bannerText(status, isLost);
  banner.hidden = !said;
  banner.dataset.tone = tone;
  setText(banner, said);
}

function versions() {
  const found = new Set(known.workers.map((worker) => worker.weight_version).filter(Boolean));
  return [...found].map((version) => `weights ${version}`);
}

function bannerText(status, isLost) {
  if (known.needsKey) return `The charts are not shown: ${known.needsKey}`;
  if (status?.state === "dead") return `The engine is dead: ${status.trouble ?? "it was shut down"}. This page goes on once an engine answers here again.`;
  if (isLost) return `The server does not answer since ${moment(known.lostAt / 1000)}. This page tries again by itself.`;
  if (status?.hung || (status?.trouble && status.state === "active")) return `No requests are taken: ${status.trouble}`;
  if (status?.paused) return "Generation is paused. Requests wait until POST /continue_generation.";
  return "";
}

function drawCharts(isRouter) {
  const kind = isRouter ? "router" : "engine";
  if (kind !== chartsOf) {
    chartsOf = kind;
    charts = (isRouter ? routerCharts : engineCharts).map((each) => new Chart(each));
    byId("charts").replaceChildren(...charts.map((chart) => chart.figure));
  }
  const marks = known.log.filter((entry) => entry.kind === "weights").map(({ at, text }) => ({ at, text }));
  const samples = known.samples.filter((sample) => (isRouter ? "in_flight" : "running") in sample);
  for (const chart of charts) chart.show(samples, marks);
}

function logItem(entry) {
  const lasted = entry.seconds === null ? "" : seconds(entry.seconds);
  return el("li", { class: entry.failed ? "failed" : null, "data-kind": entry.kind },
    el("time", { text: moment(entry.at), datetime: new Date(entry.at * 1000).toISOString() }),
    el("span", { class: "kind", text: entry.kind }),
    el("span", { class: "what", text: entry.text }),
    el("span", { class: "num", text: lasted }));
}

// --- the key ---

const dialog = byId("key-dialog");
let [isDismissed, isSaved] = [false, false]; // whether the dialog was left without a key
const usualReason = byId("key-reason").textContent;

function askForKey(why) {
  setText(byId("key-reason"), why || usualReason);
  byId("key").value = key.get();
  if (!dialog.open) dialog.showModal();
}

byId("key-button").addEventListener("click", () => askForKey(""));
byId("key-cancel").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => ([isDismissed, isSaved] = [!isSaved, false]));
byId("key-form").addEventListener("submit", () => {
  isSaved = true;
  key.set(byId("key").value.trim());
  feed.retry();
  chat.learnModels();
});

const chat = new Chat({
  say: (text) => setText(byId("spoken"), text),
  needsKey: (message) => askForKey(message),
});

draw();
feed.run();
