// Small helpers: elements, numbers and times as people read them. Text is always set as text, never as HTML.

export const byId = (id) => document.getElementById(id);

/** Makes an element with attributes (null and false: left out) and children (elements or texts). */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") made.textContent = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Sets an element's text, if it is another one: screen readers and selections are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Replaces what an element has, if the content that `key` stands for has changed. */
export function setContent(element, key, make) {
  if (element.dataset.key === key) return;
  element.dataset.key = key;
  element.replaceChildren(...make());
}

/** A count with its noun. */
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const number = (value) => (Math.abs(value) >= 100 ? whole : plain).format(value);

export function seconds(value) {
  if (!value) return "0 s";
  if (value < 0.001) return `${number(value * 1e6)} µs`;
  if (value < 1) return `${number(value * 1e3)} ms`;
  if (value < 120) return `${number(value)} s`;
  if (value < 7200) return `${whole.format(value / 60)} min`;
  return `${number(value / 3600)} h`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${number(value)} ${units[unit]}`;
}

export const percent = (value) => `${number(value * 100)} %`;

const clockTime = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const dayTime = new Intl.DateTimeFormat([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });

/** A moment in seconds since 1970: the time, and the day unless it is today. */
export function moment(at) {
  const date = new Date(at * 1000);
  return (date.toDateString() === new Date().toDateString() ? clockTime : dayTime).format(date);
}
