// The page around the views: starts and stops runs, feeds their messages to a view, and speaks the page's language.
// Everything that others wrote goes through textContent.

const STORED = "dspark-language";
const ROOT = new URL("dspark/", document.baseURI);
const running = new Set();
let language = pick(remembered() || navigator.language);

function pick(code) {
  const name = String(code).slice(0, 2).toLowerCase();
  return WORDS[name] ? name : "en";
}

function remembered() {
  try {
    return localStorage.getItem(STORED);
  } catch {
    return null; // a browser may forbid it
  }
}

function say(key, values = {}) {
  return WORDS[language][key].replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

function make(tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text) element.textContent = text;
  return element;
}

function post(path, body) {
  return fetch(new URL(path, ROOT), {
    method: "POST",
    keepalive: !body, // a cancellation outlives its page; browsers limit the body of what may
    ...(body && { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }),
  });
}

// One run on the server: asks for it, passes its messages on, and cancels it when the page is left.
class Run {
  constructor(take, over = () => {}) {
    this.take = take;
    this.over = over;
  }

  async start(body) {
    running.add(this);
    buttons();
    let answer;
    try {
      answer = await (await post("runs", { ...body, language })).json();
    } catch {
      answer = { error: say("lost") };
    }
    if (answer.error) this.fail(answer.error);
    else if (this.gone) post(`runs/${answer.id}/cancel`);
    else this.follow(answer.id);
  }

  follow(id) {
    this.id = id;
    this.events = new EventSource(new URL(`runs/${id}/events`, ROOT));
    this.events.onmessage = (event) => this.take(JSON.parse(event.data));
    this.events.addEventListener("end", () => this.end());
    this.events.onerror = () => {
      if (this.events.readyState === EventSource.CLOSED) this.fail(say("lost"));
    };
  }

  fail(text) {
    if (!this.gone) this.take([{ type: "state", state: "error", lane: null, text }]);
    this.end();
  }

  end() {
    this.events?.close();
    running.delete(this);
    this.over();
    buttons();
  }

  cancel() {
    if (this.id && running.has(this)) post(`runs/${this.id}/cancel`);
    else if (!this.id) this.drop();
  }

  // Cancels, and does not care for what still comes.
  drop() {
    this.gone = true;
    this.take = () => {};
    if (running.has(this)) {
      if (this.id) post(`runs/${this.id}/cancel`);
      this.end();
    }
  }
}

function buttons() {
  for (const [name, element] of [["race", races()[0]], ["chat", document.querySelector("dspark-chat")]]) {
    const stop = document.getElementById(`${name}-stop`);
    if (stop) stop.disabled = !element || !running.has(element.run);
  }
}

const races = () => document.querySelectorAll("dspark-race");

function views() {
  return [...document.querySelectorAll("dspark-race, dspark-answer")].map((e) => e.view).filter(Boolean);
}

// ---- the elements in which Gradio's page holds ours

class Part extends HTMLElement {
  connectedCallback() {
    // Gradio styles headings and lists in its HTML blocks as prose, which these are not.
    this.closest(".prose")?.classList.remove("prose");
    if (!this.built) this.build();
    this.built = true;
  }
}

class Race extends Part {
  build() {
    const stage = make("div");
    this.exports = make("p", "dspark-exports");
    this.exports.hidden = true;
    this.append(stage, this.exports);
    const id = this.dataset.run;
    this.view = window.DSparkView.mount(stage, { language, replay: Boolean(id) });
    this.run = this.#new();
    if (id) this.run.follow(id);
    buttons();
  }

  start(values) {
    this.reset();
    const { prompt, ...rest } = values;
    this.run.start({ kind: "race", conversation: [{ role: "user", content: prompt }], ...rest });
  }

  reset() {
    this.run.drop();
    this.run = this.#new();
    this.view.reset();
    this.exports.hidden = true;
  }

  #new() {
    let decoded = false;
    return new Run((messages) => {
      decoded ||= messages.some((m) => m.type === "round");
      this.view.feed(messages);
    }, () => {
      if (decoded) this.links();
    });
  }

  links() {
    this.exports.hidden = false;
    const link = (kind) => {
      const made = make("a", "", say(`download_${kind}`));
      made.href = new URL(`runs/${this.run.id}/run.${kind}`, ROOT);
      made.download = `dspark-run.${kind}`;
      return made;
    };
    this.exports.replaceChildren(make("span", "", say("download")), ...["html", "jsonl", "txt"].map(link));
  }

  translate() {
    if (!this.exports.hidden) this.links();
  }
}

class Chat extends Part {
  build() {
    this.log = make("ol", "dspark-log");
    this.empty = make("p", "dspark-empty");
    this.append(this.empty, this.log);
    this.reset();
  }

  reset() {
    this.run?.drop();
    this.run = new Run(() => {});
    this.said = [];
    for (const answer of this.log.querySelectorAll("dspark-answer")) answer.view.destroy();
    this.log.replaceChildren();
    this.empty.hidden = false;
    this.translate();
    buttons();
  }

  send({ prompt, system, ...rest }) {
    if (running.has(this.run) || !prompt.trim()) return false;
    this.empty.hidden = true;
    const question = make("li", "dspark-question");
    const text = make("p", "", prompt);
    text.dir = "auto";
    question.append(make("span", "dspark-who", say("you")), text);
    const reply = make("li");
    const answer = make("dspark-answer");
    reply.append(answer);
    this.log.append(question, reply);
    answer.view = window.DSparkView.mount(answer, { language, autoplay: false });
    reply.scrollIntoView({ block: "nearest" });
    const asked = { role: "user", content: prompt };
    let words = "";
    this.run = new Run((messages) => {
      for (const message of messages) if (message.type === "round") words += message.pieces.join("");
      answer.view.feed(messages);
    }, () => {
      if (words) this.said.push(asked, { role: "assistant", content: words });
    });
    const start = system.trim() ? [{ role: "system", content: system }] : [];
    this.run.start({ kind: "chat", conversation: [...start, ...this.said, asked], ...rest });
    return true;
  }

  translate() {
    this.empty.textContent = say("chat_empty");
    for (const who of this.log.querySelectorAll(".dspark-who")) who.textContent = say("you");
  }
}

class Machine extends Part {
  build() {
    this.status = make("p", "dspark-status");
    this.status.setAttribute("role", "status");
    this.body = make("div", "dspark-machine");
    this.append(this.status, this.body);
    this.look();
  }

  async look() {
    try {
      this.known = await (await fetch(new URL("machine", ROOT))).json();
      this.translate();
    } catch {
      this.status.textContent = say("lost");
    }
  }

  measure(values) {
    this.run?.drop();
    this.run = new Run((messages) => {
      for (const message of messages) {
        if (message.type === "machine") this.known = message.values;
        if (message.type === "state") this.status.textContent = message.state === "finished" ? "" : message.text;
      }
      this.translate();
    });
    this.run.start({ kind: "machine", ...values });
  }

  translate() {
    if (!this.known) return;
    const { machine, engine, parts, plan, curve, servers } = this.known;
    const blocks = [block("here", [
      ["processor", machine.processor], ["cores", machine.cores],
      ["memory", `${size(machine.memory_bytes)}, ${size(machine.memory_available_bytes)} ${say("free")}`],
      ["gpu", machine.gpus.map((g) => `${g.name}, ${size(g.memory_bytes)}`).join("; ") || say("no_gpu")],
      ["system_name", machine.system], ["python", machine.python],
      ...(plan?.pools || []).map((p) => [`${say("memory")}: ${p.name}`, `${(p.bandwidth / 1e9).toFixed(1)} GB/s, ${p.source}`]),
      ...(servers ? [["servers", servers.join(", ")]] : []),
    ])];
    if (parts?.length) blocks.push(block("placed", parts.map((p) => [`part_${p.part}`, `${size(p.bytes)} · ${p.pool}`])));
    if (engine) {
      blocks.push(block("running_on", FACTS.filter((key) => engine[key] !== undefined).map((key) => [key, engine[key] ?? "–"])));
    } else if (!servers) blocks.push(make("p", "dspark-empty", say("not_loaded")));
    if (curve) blocks.push(costs(curve));
    if (plan) blocks.push(places(plan));
    this.body.replaceChildren(...blocks);
  }
}

const FACTS = ["engine", "forward", "device", "dtype", "threads", "context_length", "target", "draft"];

function size(bytes) {
  if (bytes === null) return "–";
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : bytes >= 1e6 ? `${Math.round(bytes / 1e6)} MB` : `${Math.ceil(bytes / 1e3)} kB`;
}

function block(title, rows) {
  const section = make("section", "dspark-block");
  const list = make("dl");
  for (const [key, value] of rows) list.append(make("dt", "", WORDS[language][key] || key), make("dd", "", String(value)));
  section.append(make("h3", "", say(title)), list);
  return section;
}

// Where each part belongs, and why.
function places({ parts, note }) {
  const section = make("section", "dspark-block dspark-plan");
  section.append(make("h3", "", say("plan")));
  if (note) section.append(make("p", "", note));
  else {
    const table = make("table");
    const row = (tag, texts) => {
      const made = make("tr");
      for (const text of texts) made.append(make(tag, "", text));
      return made;
    };
    const head = make("thead");
    head.append(row("th", ["plan_part", "plan_size", "plan_pool", "plan_why"].map((word) => say(word))));
    const body = make("tbody");
    for (const p of parts) body.append(row("td", [p.part, size(p.bytes), p.pool, p.reason]));
    table.append(head, body);
    const box = make("div", "dspark-scroll");
    box.tabIndex = 0;
    box.append(table);
    section.append(box);
  }
  return section;
}

// The cost curve: a bar for each number of rows, against one row.
function costs({ rows, seconds, draft_s }) {
  const section = make("section", "dspark-block dspark-costs");
  const chart = make("div", "dspark-bars");
  const ratios = seconds.map((s) => s / seconds[0]);
  const highest = Math.max(...ratios);
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", say("curve_label", { text: rows.map((r, i) => `${r}: ${ratios[i].toFixed(2)}×`).join(", ") }));
  rows.forEach((count, i) => {
    const bar = make("div", "dspark-bar");
    const fill = make("span", "dspark-fill");
    fill.style.height = `${(90 * ratios[i]) / highest}px`;
    bar.append(make("span", "dspark-times", `${ratios[i].toFixed(2)}×`), fill, make("span", "", String(count)));
    chart.append(bar);
  });
  const draft = `${Math.round((100 * draft_s) / seconds[0])}%`;
  section.append(make("h3", "", say("curve")), chart, make("p", "", say("curve_note", { draft })));
  return section;
}

// ---- what Gradio's events call

window.dspark = {
  start: (...values) => races()[0].start(named(values)),
  stop: () => races()[0].run.cancel(),
  reset: () => races()[0].reset(),
  send: (...values) => (document.querySelector("dspark-chat").send(named(values)) ? "" : values[0]),
  stopChat: () => document.querySelector("dspark-chat").run.cancel(),
  anew: () => document.querySelector("dspark-chat").reset(),
  measure: (...values) => document.querySelector("dspark-machine").measure(named(["", ...values])),

  // Updates of Gradio's components, from [{property: word}, …], in `code` or the language that was chosen before.
  labels(specification, code) {
    if (code) {
      language = pick(code);
      try {
        localStorage.setItem(STORED, language);
      } catch { /* then it is chosen anew next time */ }
    }
    document.documentElement.lang = language;
    for (const view of views()) view.language(language);
    for (const element of document.querySelectorAll("dspark-race, dspark-chat, dspark-machine, dspark-words")) element.translate?.();
    return specification.map((properties) => ({
      __type__: "update",
      ...Object.fromEntries(Object.entries(properties).map(([name, word]) => [name, word === "" ? language : say(word)])),
    }));
  },
};

const FIELDS = ["prompt", "temperature", "top_p", "max_new_tokens", "seed", "pair", "engine", "dtype", "block", "schedule", "system", "plain"];

function named(values) {
  const named = Object.fromEntries(FIELDS.slice(0, values.length).map((name, i) => [name, values[i]]));
  const seed = Number(named.seed);
  // What is no number goes as it is, to be refused in a sentence.
  if (String(named.seed ?? "").trim() && !Number.isNaN(seed)) named.seed = seed;
  if (named.block === 0) named.block = null;
  for (const name of ["engine", "schedule"]) if (named[name] === "auto") named[name] = null;
  return named;
}

// A heading in the page's language.
class Words extends Part {
  build() {
    this.translate();
  }

  translate() {
    this.textContent = say(this.dataset.word);
  }
}

document.addEventListener("keydown", (event) => {
  const shown = (id) => [document.getElementById(id)].filter((e) => e?.offsetParent && !e.disabled);
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    // A control hands its value on when it is left or typed in; by the next task it has.
    setTimeout(() => [...shown("race-start"), ...shown("chat-send")].forEach((e) => e.click()));
    event.preventDefault();
  } else if (event.key === "Escape") [...shown("race-stop"), ...shown("chat-stop")].forEach((e) => e.click());
}, true);
window.addEventListener("pagehide", () => [...running].forEach((run) => run.drop()));

customElements.define("dspark-words", Words);
customElements.define("dspark-race", Race);
customElements.define("dspark-chat", Chat);
customElements.define("dspark-answer", class extends HTMLElement {});
customElements.define("dspark-machine", Machine);
