// The chat: a conversation kept in this tab alone, answered by the server's own chat completions.

import { byId, count, duration, make, rate, setText } from "./dom.js";
import { Growing } from "./markdown.js";
import { call, events } from "./server.js";

const DRAW_MS = 80; // between two drawings of an answer that grows
const SPEAK_MS = 2500; // between two announcements to screen readers

const prompt = byId("prompt"), send = byId("send"), stop = byId("stop");
const conversation = byId("conversation"), list = byId("messages"), announcer = byId("announcer");
const picker = byId("model");

let messages = []; // as they are sent
let running = null; // the answer that is being given

export async function loadModels() {
  const { data } = await (await call("v1/models")).json();
  const chosen = picker.value;
  picker.replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
  if (data.some(({ id }) => id === chosen)) picker.value = chosen;
  picker.disabled = false;
}

// Whole sentences of an answer, now and then: never every token, and nothing twice.
class Speaker {
  constructor() {
    this.position = 0;
    this.spoke = performance.now();
  }

  follow(text) {
    const now = performance.now();
    if (now - this.spoke < SPEAK_MS) return;
    const rest = text.slice(this.position);
    const end = Math.max(...[". ", "! ", "? ", ".\n", "!\n", "?\n", ":\n", "\n\n"].map((mark) => rest.lastIndexOf(mark)));
    if (end < 0) return;
    this.spoke = now;
    this.position += end + 1;
    announcer.textContent = rest.slice(0, end + 1).trim();
  }

  end(text, outcome) {
    announcer.textContent = `${text.slice(this.position).trim()} ${outcome}`.trim();
  }
}

// One answer: its element, its text, its times.
class Answer {
  constructor() {
    this.text = this.reasoning = "";
    this.started = performance.now();
    this.first = this.last = null;
    this.pieces = 0;
    this.usage = null;
    this.reason = null;
    this.stopper = new AbortController();
    this.speaker = new Speaker();
    this.thoughts = make("pre", { class: "thoughts" });
    this.thinking = make("details", { class: "thinking" }, make("summary", {}, "Reasoning"), this.thoughts);
    this.body = make("div", { class: "body" });
    this.figures = make("p", { class: "figures quiet" }, "Waiting for the first token…");
    this.element = make("li", { class: "message answer", "aria-busy": "true" },
      make("h3", {}, "Answer"), this.body, this.figures);
    this.growing = new Growing(this.body);
    this.drawing = 0;
  }

  take(event) {
    const choice = event.choices?.[0];
    if (event.usage) this.usage = event.usage;
    if (!choice) return;
    if (choice.finish_reason) this.reason = choice.finish_reason;
    const content = choice.delta?.content || "";
    const reasoning = choice.delta?.reasoning_content || choice.delta?.reasoning || "";
    if (!content && !reasoning) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.pieces += 1;
    this.text += content;
    this.reasoning += reasoning;
    this.drawing ||= setTimeout(() => { this.drawing = 0; this.draw(); }, DRAW_MS);
  }

  draw() {
    const follows = isAtEnd();
    this.growing.show(this.text);
    if (this.reasoning) {
      if (!this.thinking.isConnected) this.body.before(this.thinking);
      setText(this.thoughts, this.reasoning);
    }
    setText(this.figures, this.describe());
    this.speaker.follow(this.text);
    if (follows) toEnd();
  }

  // Time to first token, speed, size. A stopped answer has no count from the server: its events are counted.
  describe() {
    if (this.first === null) return "";
    const tokens = this.usage ? this.usage.completion_tokens : this.pieces;
    const parts = [`TTFT ${duration(this.first - this.started)}`];
    const seconds = (this.last - this.first) / 1000;
    if (tokens > 1 && seconds > 0) parts.push(`${rate((tokens - 1) / seconds)} tokens/s`);
    parts.push(`${this.usage ? "" : "about "}${count(tokens)} token${tokens === 1 ? "" : "s"}`);
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens || 0;
      parts.push(`prompt ${count(this.usage.prompt_tokens)}${cached ? ` (${count(cached)} cached)` : ""}`);
    }
    return parts.join(" · ");
  }

  end(outcome, { failed = false } = {}) {
    clearTimeout(this.drawing);
    const follows = isAtEnd();
    this.draw();
    const figures = this.describe();
    setText(this.figures, [figures, failed ? "" : outcome].filter(Boolean).join(" · "));
    this.figures.hidden = !this.figures.textContent;
    if (failed) {
      this.element.append(make("p", { class: "bad" }, outcome),
        make("button", { type: "button", class: "plain again", onclick: () => { this.element.remove(); answer(); } }, "Try again"));
    }
    this.element.removeAttribute("aria-busy");
    this.speaker.end(this.text, outcome || "The answer is complete.");
    if (follows) toEnd();
  }
}

const isAtEnd = () => conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 48;
const toEnd = () => { conversation.scrollTop = conversation.scrollHeight; };

function request() {
  const system = byId("system").value.trim();
  const body = {
    // Before the models are known: the server's own choice.
    model: picker.disabled ? undefined : picker.value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const [field, input] of [["temperature", byId("temperature")], ["max_tokens", byId("max-tokens")]])
    if (input.value !== "") body[field] = Number(input.value);
  return body;
}

// Asks for an answer to the conversation as it stands.
async function answer() {
  const given = running = new Answer();
  list.append(given.element);
  toEnd();
  showRunning();
  let outcome = "", failed = false;
  try {
    const response = await call("v1/chat/completions", { body: request(), signal: given.stopper.signal });
    let complete = false;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") {
        complete = true;
        break;
      }
      const event = JSON.parse(data);
      if (event.error) throw new Error(`The answer broke off: ${event.error.message}`);
      given.take(event);
    }
    if (!complete) throw new Error("The connection broke: the answer is not complete.");
    if (given.reason === "length") outcome = "cut: the limit of tokens is reached";
    if (!given.text && !given.reasoning) outcome = "The answer is empty.";
  } catch (error) {
    failed = error.name !== "AbortError";
    if (!failed) outcome = "stopped";
    else outcome = error.name === "TypeError" ? "The connection broke: the answer is not complete." : error.message;
  }
  const isCurrent = running === given;
  if (isCurrent) running = null;
  given.end(outcome, { failed });
  // What failed is not part of the conversation: it can be asked for again.
  if (!failed && isCurrent) messages.push({ role: "assistant", content: given.text });
  showRunning();
}

function showRunning() {
  const hadFocus = document.activeElement === stop;
  send.hidden = running !== null;
  stop.hidden = running === null;
  if (hadFocus && stop.hidden) prompt.focus();
}

function submit() {
  const text = prompt.value.trim();
  if (!text || running) return;
  // A question whose answer failed is asked once, together with what follows.
  const last = messages.at(-1);
  if (last?.role === "user") last.content += `\n\n${text}`;
  else messages.push({ role: "user", content: text });
  for (const button of list.querySelectorAll(".again")) button.remove();
  byId("hint").hidden = true;
  list.append(make("li", { class: "message question" }, make("h3", {}, "You"), make("div", { class: "body" }, make("p", {}, text))));
  prompt.value = "";
  prompt.focus();
  answer();
}

export function startChat() {
  byId("composer").addEventListener("submit", (submitted) => {
    submitted.preventDefault();
    submit();
  });
  prompt.addEventListener("keydown", (pressed) => {
    // While a character is being composed, Enter takes it.
    if (pressed.key !== "Enter" || pressed.shiftKey || pressed.isComposing) return;
    pressed.preventDefault();
    byId("composer").requestSubmit();
  });
  document.addEventListener("keydown", (pressed) => {
    if (pressed.key === "Escape" && running) running.stopper.abort();
  });
  stop.addEventListener("click", () => running?.stopper.abort());
  byId("new-chat").addEventListener("click", () => {
    running?.stopper.abort();
    running = null;
    messages = [];
    list.replaceChildren();
    byId("hint").hidden = false;
    announcer.textContent = "";
    showRunning();
    prompt.focus();
  });
}
