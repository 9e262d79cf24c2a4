// The stream of what the server does. It is opened again whenever it ends, and closed while nobody looks.

import { ask, events, Refusal } from "./server.js";

const FIRST_WAIT_S = 0.5;
const LONGEST_WAIT_S = 8;
const SILENT_S = 6; // the server sends a sample each second
const HIDDEN_S = 60; // that the page may be hidden before the stream is closed

/** Calls `on.open()`, `on.message(message)`, `on.refused(error)` and `on.lost(error)`; the last one may repeat. */
export class Feed {
  constructor(on) {
    this.on = on;
    this.wake = () => {};
    this.attempt = null; // the AbortController of the present connection
    this.isHidden = false;
    this.isRetried = false; // the connection ends because another one is wanted
    let hiding = 0;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(hiding);
      if (document.hidden) {
        hiding = setTimeout(() => {
          this.isHidden = true;
          this.attempt?.abort();
        }, HIDDEN_S * 1000);
      } else {
        this.isHidden = false;
        this.wake();
      }
    });
    addEventListener("online", () => this.wake());
  }

  /** Connects at once, for instance because there is another key. */
  retry() {
    this.isRetried = true;
    this.attempt?.abort();
    this.wake();
  }

  async run() {
    let wait = FIRST_WAIT_S;
    for (;;) {
      let needsKey = false;
      this.isRetried = false;
      try {
        await this.follow(() => (wait = FIRST_WAIT_S));
        this.on.lost(null);
      } catch (error) {
        if (this.isRetried) continue;
        needsKey = error instanceof Refusal && (error.status === 401 || error.status === 403);
        if (needsKey) this.on.refused(error);
        else if (!this.isHidden) this.on.lost(error);
      }
      await this.pause(needsKey || this.isHidden ? null : wait);
      wait = Math.min(wait * 1.6, LONGEST_WAIT_S);
    }
  }

  async follow(gotSomething) {
    const attempt = (this.attempt = new AbortController());
    let silence = setTimeout(() => attempt.abort(), SILENT_S * 1000);
    try {
      const response = await ask("page_events", { signal: attempt.signal });
      let isOpen = false;
      for await (const data of events(response)) {
        clearTimeout(silence);
        silence = setTimeout(() => attempt.abort(), SILENT_S * 1000);
        if (!isOpen) this.on.open();
        isOpen = true;
        gotSomething();
        this.on.message(JSON.parse(data));
      }
    } finally {
      clearTimeout(silence);
    }
  }

  /** Waits so many seconds, null: for ever, or until somebody wakes it. */
  pause(seconds) {
    return new Promise((resolve) => {
      const timer = seconds === null ? 0 : setTimeout(resolve, seconds * 1000);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
