// The chat: a conversation by /v1/chat/completions, streamed, with the speed of each answer.

import { byId, el, number, seconds, setText } from "./dom.js";
import { ask, events, Refusal } from "./server.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];

/** A field whose text is not what it must be. */
class FieldError extends Error {}

function json(id, name) {
  const text = byId(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(`${name} must be JSON: ${error.message}`);
  }
}

/** The fields of the request that were filled in; throws a FieldError. */
function options() {
  const found = {};
  for (const name of NUMBERS) {
    const field = document.querySelector(`#chat [name=${name}]`);
    if (!field.validity.valid) throw new FieldError(`${field.labels[0].textContent.trim()}: ${field.validationMessage}`);
    if (field.value !== "") found[name] = Number(field.value);
  }
  const stop = byId("stop-text").value;
  if (stop) found.stop = stop;
  const tools = json("tools", "Tools");
  if (tools !== null) found.tools = tools;
  const schema = json("schema", "JSON schema");
  if (schema !== null) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return found;
}

/** Names the fields that were filled in behind the options' heading, which hides them. */
function nameOptions() {
  const fields = [...byId("chat").querySelectorAll(".options :is(input, textarea)")].filter((field) => field.value !== "");
  const names = fields.map((field) => {
    const name = field.labels[0].textContent.trim().toLowerCase();
    return field.type === "number" ? `${name} ${field.value}` : name;
  });
  setText(byId("options-set"), names.length ? ` · ${names.join(", ")}` : "");
}

/** One answer as it comes: what is shown of it, and what the next request says of it. */
class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.calls = []; // of tools
    this.began = performance.now();
    this.firstAt = null;
    this.lastAt = null;
    this.chunks = 0;
    this.usage = null;
    this.end = "";
    this.thoughts = el("p", { class: "thoughts", hidden: true });
    this.text = el("p", { class: "text" });
    this.tools = el("div", {});
    this.note = el("p", { class: "faint note", text: "waiting for the first token …" });
    this.element = el("article", { class: "turn model" }, el("h3", { text: "Model" }), this.thoughts, this.text, this.tools, this.note);
  }

  take(chunk) {
    if (chunk.error) throw new Refusal(chunk.error.code, chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.end = choice.finish_reason ?? this.end;
    const { content, reasoning_content: thought, tool_calls: calls = [] } = choice.delta ?? {};
    if (!content && !thought && !calls?.length) return;
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.chunks += 1;
    this.content += content ?? "";
    this.reasoning += thought ?? "";
    for (const call of calls ?? []) {
      const known = (this.calls[call.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      known.id ||= call.id ?? "";
      known.function.name += call.function?.name ?? "";
      known.function.arguments += call.function?.arguments ?? "";
    }
  }

  /** The speed so far, or of the whole answer: from its first token to its last one. */
  get speed() {
    if (this.firstAt === null) return this.usage ? `${number(this.usage.completion_tokens)} tokens` : "";
    const tokens = this.usage?.completion_tokens ?? this.chunks;
    const lasted = (this.lastAt - this.firstAt) / 1000;
    const parts = [`${this.usage ? "" : "≈ "}${number(tokens)} tokens`];
    if (lasted > 0 && tokens > 1) parts.push(`${number((tokens - 1) / lasted)} tokens/s`);
    parts.push(`first token ${seconds((this.firstAt - this.began) / 1000)}`);
    return parts.join(" · ");
  }

  draw() {
    setText(this.text, this.content);
    this.thoughts.hidden = !this.reasoning;
    setText(this.thoughts, this.reasoning);
    this.tools.replaceChildren(...this.calls.filter(Boolean).map((call) => el("pre", { class: "code", text: `${call.function.name}(${call.function.arguments})` })));
    const end = { length: "ended at the limit of tokens", abort: "was aborted", tool_calls: "asks for a tool" }[this.end];
    setText(this.note, [this.speed || "waiting for the first token …", end].filter(Boolean).join(" · "));
  }

  fail(text) {
    this.element.append(el("p", { class: "error", role: "alert", text }));
    if (this.firstAt === null) this.note.remove();
  }

  get message() {
    const calls = this.calls.filter(Boolean);
    return { role: "assistant", content: this.content, ...(calls.length ? { tool_calls: calls } : {}) };
  }
}

export class Chat {
  /** `say(text)` tells those who do not see the page; `needsKey()` asks for a key. */
  constructor({ say, needsKey }) {
    this.say = say;
    this.needsKey = needsKey;
    this.messages = [];
    this.running = null; // the AbortController of the present answer
    this.turns = byId("turns");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    byId("chat").addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    byId("stop").addEventListener("click", () => this.stop());
    byId("chat").querySelector(".options").addEventListener("input", nameOptions);
    nameOptions();
    byId("clear").addEventListener("click", () => this.clear());
  }

  /** Learns the names of the models; without an answer, requests name none. */
  async learnModels() {
    try {
      const found = (await (await ask("v1/models")).json()).data.map((model) => model.id);
      const choice = byId("chat-model");
      const chosen = choice.value;
      choice.replaceChildren(...found.map((name) => el("option", { text: name, value: name })));
      if (found.includes(chosen)) choice.value = chosen;
      byId("model-choice").hidden = found.length < 2;
    } catch {
      // The feed tells why the server does not answer.
    }
  }

  /** The calls of tools that the last answer made, and that have no result yet. */
  get openCalls() {
    const answered = new Set(this.messages.filter((each) => each.role === "tool").map((each) => each.tool_call_id));
    const last = this.messages.findLast((each) => each.role === "assistant");
    return (last?.tool_calls ?? []).filter((call) => !answered.has(call.id));
  }

  async send() {
    const text = byId("message").value;
    if (this.running || !text.trim()) return;
    const [call] = this.openCalls;
    let fields;
    try {
      fields = options();
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      byId("chat").querySelector(".options").open = true;
      this.show(el("p", { class: "error", role: "alert", text: error.message }));
      return;
    }
    this.messages.push(call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text });
    this.show(el("article", { class: "turn user" }, el("h3", { text: call ? `Result of ${call.function.name}` : "You" }), el("p", { class: "text", text })));
    byId("message").value = "";
    byId("chat").querySelector(".options").open = false;
    if (!this.openCalls.length) await this.answer(fields);
    this.nameMessage();
  }

  async answer(fields) {
    const answer = new Answer();
    const { messages } = this; // another list once the conversation is cleared
    this.running = new AbortController();
    this.setBusy(true);
    this.show(answer.element);
    let drawing = 0;
    const draw = () => {
      drawing = 0;
      const follows = this.turns.scrollTop + this.turns.clientHeight > this.turns.scrollHeight - 40;
      answer.draw();
      setText(byId("speed"), answer.speed);
      if (follows) this.turns.scrollTop = this.turns.scrollHeight;
    };
    try {
      const system = byId("system").value.trim();
      const model = byId("chat-model").value;
      const body = {
        ...(model ? { model } : {}),
        messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
        stream: true,
        stream_options: { include_usage: true },
        ...fields,
      };
      const response = await ask("v1/chat/completions", { body, signal: this.running.signal });
      for await (const data of events(response)) {
        if (data === "[DONE]") continue;
        answer.take(JSON.parse(data));
        drawing ||= requestAnimationFrame(draw);
      }
      draw();
      this.say(`The answer is complete. ${answer.speed}`);
    } catch (error) {
      draw();
      if (error.name === "AbortError") setText(answer.note, [answer.speed, "stopped"].filter(Boolean).join(" · "));
      else answer.fail(error instanceof Refusal ? error.message : "The server does not answer. Try again once it is there.");
      if (error instanceof Refusal && error.status === 401) this.needsKey(error.message);
    } finally {
      cancelAnimationFrame(drawing);
      this.running = null;
      this.setBusy(false);
      if (answer.content || answer.calls.length) messages.push(answer.message);
      else if (messages === this.messages) this.takeBack();
    }
  }

  /** Gives a question that got no answer back, to be changed or sent again. */
  takeBack() {
    const { content } = this.messages.pop() ?? { content: "" };
    const field = byId("message");
    if (!field.value) field.value = content;
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.turns.replaceChildren(byId("chat-empty") ?? el("p", { class: "faint", id: "chat-empty", text: "Ask the model something." }));
    this.nameMessage();
    byId("message").focus();
  }

  show(element) {
    byId("chat-empty")?.remove();
    this.turns.append(element);
    this.turns.scrollTop = this.turns.scrollHeight;
  }

  setBusy(isBusy) {
    const hadFocus = byId("chat").contains(document.activeElement);
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    this.turns.setAttribute("aria-busy", String(isBusy));
    if (hadFocus && document.activeElement === document.body) byId("message").focus();
  }

  nameMessage() {
    const [call] = this.openCalls;
    const name = call ? `Result of ${call.function.name}` : "Message";
    setText(byId("message-label"), name);
    byId("message").placeholder = name;
  }
}
