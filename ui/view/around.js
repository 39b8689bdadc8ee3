// What stands around the text of the lanes: figures, charts, verdict, state, memory. Constant work a frame.

const BUSY = ["queued", "downloading", "loading", "compiling"];
const GLYPHS = { queued: "⋯", downloading: "↓", loading: "◔", compiling: "⚙", cancelled: "■", error: "!", empty: "▷" };

class Around extends Skeleton {
  showFigures(lane, replay) {
    const { tally, cells } = lane;
    const over = lane.cursor > 0 && lane.cursor === lane.rounds.length && !["running", ""].includes(lane.state);
    const ended = replay ? this.now >= lane.end && lane.end > 0 : over;
    const running = !ended && (replay ? this.playing : lane.state === "running" && this.state === "running");
    const n = (value, digits) => (value === null ? "–" : value.toFixed(digits));
    this.set(cells.tokens_per_s, n(tally.speed, 1));
    this.set(cells.ttft, tally.ttft === null ? "–" : this.say("seconds", { n: n(tally.ttft, 2) }));
    this.set(cells.elapsed, this.say("seconds", { n: (replay ? Math.min(this.now, lane.end) : tally.elapsed).toFixed(2) }));
    this.set(cells.tau, n(tally.tau, 2));
    this.set(cells.rounds, String(tally.rounds));
    this.set(cells.tokens, String(tally.tokens));
    const stopped = ended && (lane.state === "cancelled" || lane.rounds.at(-1)?.round.stop === "cancelled");
    const word = stopped ? "lane_stopped" : ended ? "lane_finished" : running ? "lane_running" : lane.cursor || replay ? "" : "ready";
    const waits = this.live && this.state === "running" && !lane.rounds.length && this.runner !== lane.name;
    this.set(lane.chip, word ? this.say(waits ? "waiting" : word, { n: lane.end.toFixed(2) }) : "");
    const other = this.lanes[LANES[1 - LANES.indexOf(lane.name)]];
    lane.flag.hidden = !(replay && ended && !stopped && other.end > lane.end && this.names().length > 1);
    lane.box.classList.toggle("running", Boolean(running));
    lane.box.classList.toggle("ended", Boolean(ended));
    lane.box.classList.toggle("stopped", Boolean(stopped));
    lane.box.classList.toggle("blank", lane.text.empty);
    const whole = replay ? lane.total : this.run?.max_new_tokens || 0;
    lane.fill.style.transform = `scaleX(${whole ? Math.min(1, tally.tokens / whole) : 0})`;
  }

  showCharts(running) {
    const tally = this.lanes.dspark.tally;
    const block = this.run?.block || 0;
    this.survival.show(tally.survival, block);
    this.reliability.show(tally);
    this.panels.survival.classList.toggle("bare", !tally.tried.length && !block);
    this.panels.confidence.classList.toggle("bare", !tally.judged);
    if (running) return;
    const none = this.strings.none;
    const label = (element, word, text) => element.setAttribute("aria-label", this.say(word, { text: text || none }));
    label(this.charts.survival, "survival_label", tally.survival.map((s, k) => `${k + 1}: ${percent(s)}`).join(", "));
    label(this.charts.confidence, "confidence_label",
      tally.reliability.map((b) => `${percent(b.confidence)} → ${percent(b.accepted)} (${b.count})`).join(", "));
    label(this.timeline.canvas, "timeline_label", this.names().filter((l) => this.lanes[l].cursor).map((l) =>
      this.say("timeline_lane", { lane: this.strings[l], rounds: this.lanes[l].tally.rounds, n: this.lanes[l].tally.elapsed.toFixed(2) })).join(" "));
  }

  // Its place is kept while the lanes run, so that nothing jumps when it comes.
  showVerdict(show) {
    const { banner, parts } = this;
    const kind = show ? "known" : this.state === "running" || (this.verdict && this.end_s) ? "pending" : "none";
    if (this.verdictShown === kind) return;
    this.verdictShown = kind;
    banner.hidden = kind === "none" || (kind === "pending" && this.names().length < LANES.length);
    if (kind !== "known") {
      banner.dataset.kind = "pending";
      this.set(parts.glyph, "…");
      this.set(parts.headline, this.strings.pending);
      for (const part of [parts.speedup, parts.reason, parts.factor]) this.set(part, "");
      return;
    }
    const { identical, first_difference: difference, speedup, reason } = this.verdict;
    const where = { n: difference?.position ?? "?" };
    const word = identical ? "identical" : difference?.numerics ? "numerics" : identical === null ? "not_comparable" : "different";
    if (identical) where.n = this.lanes.dspark.total || this.lanes.plain.total;
    banner.dataset.kind = word;
    this.set(this.parts.glyph, { identical: "✓", numerics: "≈", different: "≠", not_comparable: "–" }[word]);
    this.set(this.parts.headline, this.say(word, where));
    const wins = speedup >= 1;
    banner.dataset.wins = wins ? "dspark" : "plain";
    this.set(this.parts.factor, speedup ? `${speedup.toFixed(2)}×` : "");
    this.set(this.parts.speedup, speedup ? this.say(wins ? "faster" : "slower", { n: speedup.toFixed(2) }) : "");
    const margin = difference && difference.margin !== null && difference.noise !== null
      ? this.say("difference_text", { margin: difference.margin.toPrecision(3), noise: difference.noise.toPrecision(3) }) : "";
    this.set(this.parts.reason, [margin, reason].filter(Boolean).join(" "));
    if (!this.announced) this.announce(`${this.parts.headline.textContent}. ${this.parts.speedup.textContent}`);
    this.announced = true;
  }

  showState(message) {
    const fresh = this.state !== message.state;
    this.state = message.state;
    this.shown = message;
    const { card, glyph, title, detail, bar } = this.notice;
    const plain = ["running", "finished"].includes(message.state);
    card.hidden = plain;
    card.dataset.state = message.state;
    this.root.classList.toggle("busy", BUSY.includes(message.state));
    if (!plain) {
      this.set(glyph, GLYPHS[message.state] || "");
      this.set(title, this.strings[message.state === "empty" ? "empty_title" : message.state] || message.state);
      const own = message.state === "queued" && message.position ? this.say("queued_text", { n: message.position })
        : this.strings[`${message.state}_text`]?.includes("{") ? "" : this.strings[`${message.state}_text`] || "";
      this.set(detail, message.text || own);
      bar.hidden = !BUSY.includes(message.state) || message.state === "queued";
      if (typeof message.fraction === "number") bar.value = message.fraction;
      else bar.removeAttribute("value");
    }
    if (fresh && message.state !== "empty") {
      this.announce([this.strings[message.state], plain ? "" : detail.textContent].filter(Boolean).join(". "));
    }
  }

  showRun() {
    const parts = (this.run?.memory || []).filter((p) => p.bytes > 0);
    const { bar, list, none } = this.store;
    this.root.classList.toggle("unstarted", !this.run);
    bar.replaceChildren();
    list.replaceChildren();
    none.hidden = parts.length > 0;
    parts.forEach(({ part, bytes, pool }, i) => {
      const segment = make("span", `segment s${i % 4}`);
      segment.style.flexGrow = String(bytes);
      bar.append(segment);
      const row = make("li");
      const size = bytes >= 1e9 ? `${(bytes / 1e9).toFixed(2)} GB` : `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;
      row.append(make("span", `swatch s${i % 4}`), make("bdi", "", this.strings[`part_${part}`] || part), make("span", "size", size));
      if (pool) row.append(make("bdi", "pool", pool));
      list.append(row);
    });
    this.set(this.prompt, this.run?.prompt || "");
    this.prompt.parentElement.hidden = !this.run?.prompt;
    const facts = ["title", "pair", "engine", "dtype", "device", "machine", "schedule"].map((k) => this.run?.[k]).filter(Boolean);
    this.set(this.facts, facts.join(" · "));
  }

  announce(text) {
    this.polite.textContent = text;
  }

  say(word, values) {
    return this.strings[word].replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
  }

  set(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }
}
