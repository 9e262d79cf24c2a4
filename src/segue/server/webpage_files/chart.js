// A line chart of the last minutes in SVG, with a text for those who do not see it.

import { el, setText } from "./dom.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const SPAN_S = 300;
const HEIGHT = 132;
const TOP = 8;
const BOTTOM = 18;
const GAP_S = 3.5; // between two samples that a line does not bridge
const RECENT_S = 60; // that a value is shown after the sample it comes from, if later ones have none
const SPOKEN_S = 10; // between two changes of the text

function svg(name, attributes, ...children) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** The least of 1, 2, 4, 6, 8, 10, 20, … (times a power of ten) that is not below the value. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

/** Makes the mean of a figure over the last seconds, where single samples say little. */
export const meanOf = (name, span) => (sample, index, samples) => {
  let [sum, count] = [0, 0];
  for (let i = index; i >= 0 && sample.at - samples[i].at < span; i -= 1, count += 1) sum += samples[i][name];
  return sum / count;
};

export class Chart {
  /**
   * `series`: [{name, of(sample, index, samples) -> number or null, show(value) -> text, isLine, isDots}], of which those
   * whose `isLine` is false are told in the caption alone. `least` and `most`: bounds of the top of the scale.
   */
  constructor({ title, series, least, most = Infinity, axis }) {
    this.title = title;
    this.series = series;
    this.lines = series.filter((each) => each.isLine !== false);
    this.least = least;
    this.most = most;
    this.axis = axis;
    this.samples = [];
    this.marks = [];
    this.chosen = null; // the time that is looked at
    this.spokenAt = 0;
    this.values = series.map(() => el("b", { text: "–" }));
    const legend = series.map((each, index) => {
      const line = this.lines.indexOf(each);
      return el("span", { class: line < 0 ? "item" : `item s${line}` }, this.values[index], ` ${each.name}`);
    });
    this.drawing = svg("svg", { role: "img", tabindex: "0", height: HEIGHT });
    this.when = el("span", { class: "when faint" });
    const caption = el("figcaption", {}, el("h2", { text: title }), el("p", { class: "legend" }, ...legend), this.when);
    this.figure = el("figure", { class: "card chart" }, caption, this.drawing);
    new ResizeObserver(() => this.draw()).observe(this.figure);
    this.drawing.addEventListener("pointermove", (event) => this.look(event.offsetX));
    this.drawing.addEventListener("pointerleave", () => this.choose(null));
    this.drawing.addEventListener("blur", () => this.choose(null));
    this.drawing.addEventListener("keydown", (event) => this.step(event));
  }

  /** Shows these samples, oldest first, and marks: times with a text. */
  show(samples, marks) {
    this.samples = samples.map((sample, index) => ({
      at: sample.at,
      paused: sample.paused,
      values: new Map(this.series.map((each) => [each, each.of(sample, index, samples) ?? null])),
    }));
    this.marks = marks;
    this.draw();
  }

  get end() {
    return this.samples.length ? this.samples[this.samples.length - 1].at : 0;
  }

  x(at) {
    return ((at - this.end + SPAN_S) / SPAN_S) * this.width;
  }

  look(x) {
    this.choose(this.end - SPAN_S + (x / this.width) * SPAN_S);
  }

  step(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (!steps || !this.samples.length) return;
    event.preventDefault();
    const now = this.chosen === null ? this.samples.length - 1 : this.nearest() + steps;
    this.choose(this.samples[Math.max(0, Math.min(this.samples.length - 1, now))].at);
    this.speak(true);
  }

  choose(at) {
    this.chosen = at;
    this.draw();
  }

  /** The index of the sample that is looked at. */
  nearest() {
    if (this.chosen === null) return this.samples.length - 1;
    let best = 0;
    this.samples.forEach((sample, index) => {
      if (Math.abs(sample.at - this.chosen) < Math.abs(this.samples[best].at - this.chosen)) best = index;
    });
    return best;
  }

  /** The value of a series there, or its last one: a second without a first token has no time to it. */
  valueAt(series, index) {
    for (let i = index; i >= 0 && this.samples[index].at - this.samples[i].at < RECENT_S; i -= 1) {
      const value = this.samples[i].values.get(series);
      if (value !== null) return value;
    }
    return null;
  }

  draw() {
    this.width = this.drawing.clientWidth || this.figure.clientWidth;
    if (!this.width || document.hidden) return;
    const index = this.nearest();
    this.series.forEach((each, i) => {
      const value = index < 0 ? null : this.valueAt(each, index);
      setText(this.values[i], value === null ? "–" : each.show(value));
    });
    const ago = index < 0 ? 0 : Math.round(this.end - this.samples[index].at);
    setText(this.when, this.chosen === null ? "" : `${ago} s ago`);
    const from = this.end - SPAN_S;
    const seen = this.samples.filter((sample) => sample.at >= from);
    const found = this.lines.flatMap((each) => seen.map((sample) => sample.values.get(each)));
    const top = Math.min(this.most, ceiling(Math.max(this.least, ...found)));
    const y = (value) => TOP + (1 - Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
    this.drawing.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.drawing.replaceChildren(...this.scale(top, y), ...this.pauses(seen), ...this.lines.flatMap((each, i) => this.line(each, i, seen, y)), ...this.events(from), ...this.cross(index, y));
    this.speak(false);
  }

  scale(top, y) {
    const lines = [top, top / 2, 0].flatMap((value) => [
      svg("line", { class: "grid", x1: 0, x2: this.width, y1: y(value), y2: y(value) }),
      value ? svg("text", { class: "tick", x: 2, y: y(value) + 11 }, this.axis(value)) : "",
    ]);
    const label = (text, x, anchor) => svg("text", { class: "tick", x, y: HEIGHT - 4, "text-anchor": anchor }, text);
    return [...lines.filter(Boolean), label("5 min ago", 2, "start"), label("now", this.width - 2, "end")];
  }

  /** Where generation was paused, the background is another one. */
  pauses(seen) {
    const found = [];
    for (const sample of seen.filter((each) => each.paused)) {
      const last = found[found.length - 1];
      if (last && sample.at - last.to < GAP_S) last.to = sample.at;
      else found.push({ from: sample.at - 1, to: sample.at });
    }
    return found.map(({ from, to }) => svg("rect", { class: "paused", x: this.x(from), width: this.x(to) - this.x(from), y: TOP, height: HEIGHT - TOP - BOTTOM }));
  }

  line(series, number, seen, y) {
    const runs = [[]];
    let last = null;
    for (const sample of seen) {
      const value = sample.values.get(series);
      if (value === null) continue;
      if (last !== null && sample.at - last > GAP_S) runs.push([]);
      last = sample.at;
      runs[runs.length - 1].push([this.x(sample.at).toFixed(1), y(value).toFixed(1)]);
    }
    const dot = ([x, y]) => svg("circle", { class: `dot s${number}`, cx: x, cy: y, r: 2 });
    if (series.isDots) return runs.flat().map(dot);
    return runs.filter((run) => run.length).flatMap((run) => {
      const line = run.map((point) => point.join(",")).join("L");
      if (run.length === 1) return [dot(run[0])];
      const area = `M${run[0][0]},${y(0)}L${line}L${run[run.length - 1][0]},${y(0)}Z`;
      const made = [svg("path", { class: `line s${number}`, d: `M${line}` })];
      return number === 0 ? [svg("path", { class: "area s0", d: area }), ...made] : made;
    });
  }

  events(from) {
    return this.marks.filter((mark) => mark.at >= from && mark.at <= this.end).map((mark) =>
      svg("line", { class: "mark", x1: this.x(mark.at), x2: this.x(mark.at), y1: TOP, y2: HEIGHT - BOTTOM }, svg("title", {}, mark.text)));
  }

  cross(index, y) {
    if (this.chosen === null || index < 0) return [];
    const x = this.x(this.samples[index].at);
    const dots = this.lines.map((each, i) => [this.samples[index].values.get(each), i]).filter(([value]) => value !== null);
    return [
      svg("line", { class: "cross", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }),
      ...dots.map(([value, i]) => svg("circle", { class: `dot s${i}`, cx: x, cy: y(value), r: 3.5 })),
    ];
  }

  /** Changes the text now and then: one that changes each second cannot be listened to. */
  speak(now) {
    if (!now && Date.now() - this.spokenAt < SPOKEN_S * 1000) return;
    this.spokenAt = Date.now();
    const index = this.nearest();
    const said = this.series.map((each) => {
      const found = this.samples.map((sample) => sample.values.get(each)).filter((value) => value !== null);
      const value = index < 0 ? null : this.valueAt(each, index);
      if (!found.length || value === null) return `${each.name}: nothing yet`;
      return `${each.name} ${each.show(value)}, at most ${each.show(Math.max(...found))}`;
    });
    const when = this.chosen === null ? "now" : `${Math.round(this.end - this.samples[index].at)} seconds ago`;
    this.drawing.setAttribute("aria-label", `${this.title}, ${when}: ${said.join("; ")}. Arrow keys go through the last five minutes.`);
  }
}
