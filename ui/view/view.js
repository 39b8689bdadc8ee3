// The view that a page mounts: it takes messages, live as they arrive or all at once, and its clock shows them.

const REPLAY_AFTER_MS = 1200;
const OVER = ["finished", "cancelled", "error"];
let mounted = 0;

class View extends Clock {
  constructor(element, options) {
    super();
    this.options = { autoplay: true, replay: false, ...options };
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.id = `dspark-${(mounted += 1)}`;
    this.words = [];
    this.build(element);
    this.language(options.language || navigator.language);
    this.reset();
    this.frame = this.frame.bind(this);
    const repaint = () => this.redraw();
    this.watch = new ResizeObserver(repaint);
    this.watch.observe(this.timeline.plot);
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark.onchange = repaint;
    this.themes = new MutationObserver(repaint);
    for (const node of [document.documentElement, document.body]) {
      this.themes.observe(node, { attributes: true, attributeFilter: ["data-theme", "class"] });
    }
    this.themes.observe(this.root, { attributes: true, attributeFilter: ["data-theme"] });
  }

    feed(messages) {
    for (const message of messages) this.#take(message);
    if (this.options.replay && !this.started && this.end_s) {
      this.started = true;
      this.redraw();
      if (this.options.autoplay && !this.still.matches) this.play();
      else this.seek(this.end_s);
    }
    this.wake();
  }

  reset() {
    clearTimeout(this.timer);
    this.run = null;
    this.verdict = null;
    this.runner = null;
    this.live = !this.options.replay;
    this.playing = false;
    this.started = false;
    this.announced = false;
    this.state = "empty";
    this.now = 0;
    this.end_s = 0;
    this.rate ??= 1;
    for (const lane of LANES) {
      Object.assign(this.lanes[lane], { rounds: [], end: 0, total: 0, state: "" });
      this.rewind(this.lanes[lane]);
    }
    this.survival.clear();
    this.showRun();
    this.showState({ state: "empty" });
    this.refresh();
  }

  language(code) {
    const name = String(code || "en").slice(0, 2).toLowerCase();
    this.strings = STRINGS[name] || STRINGS.en;
    this.root.lang = STRINGS[name] ? name : "en";
    for (const [element, word, attribute] of this.words) {
      if (attribute) element.setAttribute(attribute, this.strings[word]);
      else element.textContent = this.strings[word];
    }
    this.reliability.label(this.strings.confidence_x, this.strings.confidence_y);
    if (this.lanes.plain.tally) {
      this.verdictShown = null;
      this.showState(this.shown);
      this.showRun();
      this.refresh();
    }
  }

  text(lane) {
    return this.lanes[lane].text.text;
  }

  destroy() {
    this.watch.disconnect();
    this.themes.disconnect();
    this.dark.onchange = null;
    clearTimeout(this.timer);
    this.root.remove();
  }

  #take(message) {
    if (message.type === "run") {
      if (this.run || this.end_s) this.reset();
      this.run = message;
      this.showRun();
    } else if (message.type === "state") this.#progress(message);
    else if (message.type === "round" && LANES.includes(message.lane)) {
      const lane = this.lanes[message.lane];
      const round = message.round;
      const start = lane.end;
      lane.end = start + round.draft_s + round.verify_s;
      lane.total += round.committed.length;
      lane.rounds.push({ round, pieces: message.pieces, ghosts: message.ghosts, start, end: lane.end });
      lane.state = "running";
      this.end_s = Math.max(this.end_s, lane.end);
      this.runner = message.lane;
      if (this.live && this.state !== "running") this.showState({ state: "running" });
    } else if (message.type === "verdict") this.verdict = message;
  }

  #progress(message) {
    if (LANES.includes(message.lane)) {
      const lane = this.lanes[message.lane];
      lane.state = message.state;
      if (message.state === "running") this.runner = message.lane;
      return;
    }
    if (!this.live && BUSY.includes(message.state)) {
      if (this.options.replay) return;
      this.reset();
    }
    this.showState(message);
    if (this.live && OVER.includes(message.state)) {
      for (const lane of LANES) if (this.lanes[lane].state === "running") this.lanes[lane].state = message.state;
      this.#settle();
    }
  }

  // A live run is over: everything is on the page, and may be played back on one clock.
  #settle() {
    this.show();
    this.live = false;
    this.now = this.end_s;
    if (this.options.autoplay && this.state === "finished" && this.verdict && !this.still.matches) {
      this.timer = setTimeout(() => { this.seek(0); this.play(); }, REPLAY_AFTER_MS);
    }
    this.redraw();
  }
}

window.DSparkView = { mount: (element, options = {}) => new View(element, options) };
