// What rounds look like beside the text: when they happened, how far blocks survive, how right the confidence is.

const SVG = "http://www.w3.org/2000/svg";
const BINS = 10;

function draw(tag, attributes, parent) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (parent) parent.append(element);
  return element;
}

const percent = (share) => `${Math.round(100 * share)}%`;

// Running counts of a lane, with the definitions of sglang_dspark.decoding.rounds and ui.messages.reliability.
class Tally {
  constructor() {
    Object.assign(this, { tokens: 0, rounds: 0, seconds: 0, after: 0, lengths: 0, ttft: null, elapsed: 0 });
    Object.assign(this, { tried: [], kept: [], bins: Array.from({ length: BINS }, () => [0, 0, 0]), judged: 0 });
  }

  add(round) {
    const seconds = round.draft_s + round.verify_s;
    this.tokens += round.committed.length;
    this.elapsed += seconds;
    if (round.index === 0) {
      this.ttft = seconds;
      return;
    }
    this.rounds += 1;
    this.seconds += seconds;
    this.after += round.committed.length;
    this.lengths += round.accepted + 1;
    for (let k = 0; k < round.scheduled; k++) {
      this.tried[k] = (this.tried[k] || 0) + 1;
      this.kept[k] = (this.kept[k] || 0) + (round.accepted > k ? 1 : 0);
    }
    const judged = Math.min(round.scheduled, round.accepted + 1, round.confidence.length);
    for (let k = 0; k < judged; k++) {
      const bin = this.bins[Math.min(Math.floor(round.confidence[k] * BINS), BINS - 1)];
      bin[0] += 1;
      bin[1] += round.confidence[k];
      bin[2] += round.accepted > k ? 1 : 0;
      this.judged += 1;
    }
  }

  get speed() {
    return this.seconds > 0 ? this.after / this.seconds : null;
  }

  get tau() {
    return this.rounds ? this.lengths / this.rounds : null;
  }

  get survival() {
    return this.tried.map((n, k) => this.kept[k] / n);
  }

  get reliability() {
    return this.bins.filter((b) => b[0]).map(([n, sure, kept]) => ({ count: n, confidence: sure / n, accepted: kept / n }));
  }
}

// Bars of rounds on one time axis, a row a lane: drafting low and light, verifying tall and dark.
class Timeline {
  constructor(box, swatches) {
    this.swatches = swatches;
    this.plot = make("div", "plot");
    this.canvas = make("canvas");
    this.canvas.setAttribute("role", "img");
    this.head = make("div", "playhead");
    this.ticks = make("div", "ticks");
    this.ticks.setAttribute("aria-hidden", "true");
    this.plot.append(this.canvas, this.head);
    box.append(this.plot, this.ticks);
    this.span = 0;
    this.rows = 0;
  }

  // Fits the canvas to its box and the axis to `span` seconds; everything has to be drawn again afterwards.
  fit(span, rows) {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.plot.clientWidth;
    this.height = this.plot.clientHeight;
    this.span = span;
    this.rows = rows;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.pen = this.canvas.getContext("2d");
    this.pen.scale(ratio, ratio);
    this.colours = Object.fromEntries(
      Object.entries(this.swatches).map(([name, s]) => [name, getComputedStyle(s).backgroundColor]),
    );
    const most = Math.max(2, Math.min(8, this.width / 70));
    const step = [1, 2, 5, 10, 20, 50].map((n) => n * 10 ** Math.floor(Math.log10(span / 8))).find((s) => span / s <= most);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    this.ticks.replaceChildren();
    for (let at = 0; at <= span * 1.0001; at += step) {
      const tick = make("span", "", `${at.toFixed(digits)} s`);
      tick.style.insetInlineStart = `${(100 * at) / span}%`;
      if (at > 0.94 * span) tick.className = "last";
      this.ticks.append(tick);
    }
  }

  bar({ name, row }, start, round) {
    const scale = this.width / this.span;
    const high = this.height / this.rows - 10;
    const bottom = (row + 1) * (this.height / this.rows) - 5;
    const put = (colour, from, seconds, share) => {
      const width = seconds * scale;
      this.pen.fillStyle = this.colours[colour];
      this.pen.fillRect(from * scale, bottom - high * share, width > 4 ? width - 1 : width, high * share);
    };
    if (round.index === 0) put("prefill", start, round.draft_s + round.verify_s, 0.7);
    else {
      put("draft", start, round.draft_s, 0.45);
      put(name === "plain" ? "step" : "verify", start + round.draft_s, round.verify_s, 1);
    }
  }

  point(seconds) {
    this.head.style.transform = `translateX(${(this.width * Math.min(seconds, this.span)) / this.span}px)`;
  }
}

// A bar for each position of a block: how often a verified block survives that far.
class Survival {
  constructor(box) {
    this.box = box;
    this.bars = [];
  }

  show(shares, block) {
    while (this.bars.length < Math.max(shares.length, block)) {
      const column = make("div", "column");
      const parts = { value: make("span", "value"), bar: make("span", "bar"), fill: make("span", "fill") };
      parts.bar.append(parts.fill);
      column.append(parts.value, parts.bar, make("span", "k", String(this.bars.length + 1)));
      this.box.append(column);
      this.bars.push(parts);
    }
    this.bars.forEach(({ value, fill }, k) => {
      value.textContent = shares[k] === undefined ? "–" : percent(shares[k]);
      fill.style.height = shares[k] === undefined ? "0" : percent(shares[k]);
    });
  }

  clear() {
    this.box.replaceChildren();
    this.bars = [];
  }
}

// Accepted share against confidence, a dot a bin, its area the number of tokens in it.
class Reliability {
  constructor(box) {
    this.svg = draw("svg", { viewBox: "-9 -4 116 116", "aria-hidden": "true" }, box);
    draw("rect", { x: 0, y: 0, width: 100, height: 100, rx: 2, class: "frame" }, this.svg);
    draw("line", { x1: 0, y1: 100, x2: 100, y2: 0, class: "diagonal" }, this.svg);
    for (const [x, y, text, anchor] of [[0, 109, "0", "start"], [100, 109, "1", "end"], [-3, 100, "0", "end"], [-3, 6, "1", "end"]]) {
      draw("text", { x, y, "text-anchor": anchor }, this.svg).textContent = text;
    }
    this.labels = [draw("text", { x: 50, y: 109, "text-anchor": "middle" }, this.svg),
      draw("text", { x: -3, y: 50, "text-anchor": "middle", transform: "rotate(-90 -3 50)" }, this.svg)];
    this.dots = Array.from({ length: BINS }, () => draw("circle", { r: 0, class: "dot" }, this.svg));
  }

  label(x, y) {
    [this.labels[0].textContent, this.labels[1].textContent] = [x, y];
  }

  show(tally) {
    tally.bins.forEach(([n, sure, kept], i) => {
      const dot = this.dots[i];
      dot.setAttribute("r", n ? 1.6 + 7 * Math.sqrt(n / tally.judged) : 0);
      if (!n) return;
      dot.setAttribute("cx", (100 * sure) / n);
      dot.setAttribute("cy", 100 - (100 * kept) / n);
    });
  }
}
