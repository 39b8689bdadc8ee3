// The clock of a view. Live, what came is shown; in a replay, what has happened by `now`, on each lane's own times.

const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 4];
const CHARTS_EVERY_MS = 160;
const LIVE_EVERY_MS = 40;

class Clock extends Around {
  play() {
    if (this.live || !this.end_s) return;
    if (this.now >= this.end_s) this.seek(0);
    this.playing = true;
    this.last = null;
    this.refresh();
    this.wake();
  }

  pause() {
    clearTimeout(this.timer);
    this.playing = false;
    this.refresh();
  }

  seek(seconds) {
    if (this.live) return;
    clearTimeout(this.timer);
    const now = Math.max(0, Math.min(seconds, this.end_s));
    if (now < this.now) for (const lane of LANES) this.rewind(this.lanes[lane]);
    this.now = now;
    this.root.classList.add("still");
    this.show();
    this.redraw();
    requestAnimationFrame(() => requestAnimationFrame(() => this.root.classList.remove("still")));
  }

  end() {
    this.pause();
    this.seek(this.end_s);
  }

  speed(factor) {
    this.rate = factor;
    this.pace.value = String(factor);
  }

  // Live, the engine may share the processor with this page: painting less often leaves it more.
  wake() {
    if (this.due) return;
    this.due = true;
    const paint = () => requestAnimationFrame(this.frame);
    const wait = this.live ? (this.painted || 0) + LIVE_EVERY_MS - performance.now() : 0;
    if (wait > 0) setTimeout(paint, wait);
    else paint();
  }

  frame(time) {
    this.due = false;
    this.painted = time;
    if (this.playing) {
      this.now += this.last ? ((time - this.last) / 1000) * this.rate : 0;
      this.last = time;
      if (this.now >= this.end_s) {
        this.now = this.end_s;
        this.playing = false;
      }
    }
    this.show();
    if (this.playing) this.wake();
  }

  rewind(lane) {
    Object.assign(lane, { cursor: 0, phase: "", tally: new Tally() });
    lane.text.clear();
  }

  // Brings the page to the present: everything that came, or in a replay what has happened by `now`.
  show() {
    const limit = this.live ? Infinity : this.now + 1e-9;
    this.scale();
    for (const name of LANES) {
      const lane = this.lanes[name];
      while (lane.cursor < lane.rounds.length && lane.rounds[lane.cursor].end <= limit) this.commit(lane);
      this.flight(lane, limit);
    }
    this.refresh();
    // Last, because this is what makes the browser lay the page out.
    for (const name of LANES) this.lanes[name].text.follow();
  }

  commit(lane) {
    const { round, pieces, start } = lane.rounds[lane.cursor];
    pieces.forEach((piece, i) => {
      const mark = !round.drafted.length ? "" : i < round.accepted ? "accepted" : "bonus";
      lane.text.append(piece, mark);
    });
    lane.text.closeBlock();
    lane.tally.add(round);
    lane.cursor += 1;
    this.timeline.bar(lane, start, round);
  }

  // The block in flight: ghosts while it is verified, then what became of those that were not accepted.
  flight(lane, limit) {
    const next = lane.rounds[lane.cursor];
    const verifying = next && next.round.drafted.length && next.start + next.round.draft_s <= limit;
    const phase = `${lane.cursor}${verifying ? "v" : "o"}`;
    if (phase === lane.phase) return;
    lane.phase = phase;
    const of = verifying ? next : lane.rounds[lane.cursor - 1];
    const over = !of || of.round.stop || (this.live && of.round.drafted.length === 0);
    if (over && !verifying) lane.text.flight([]);
    else {
      const { round, ghosts } = of;
      const tokens = ghosts.map((text, k) => ({
        text, mark: k >= round.scheduled ? "unscheduled" : verifying ? "ghost" : "rejected",
      }));
      lane.text.flight(verifying ? tokens : tokens.slice(round.accepted, round.scheduled));
    }
  }

  // The time axis: the whole run in a replay; live, it grows in doubling steps, so that redrawing stays cheap.
  scale() {
    let span = this.end_s || 1;
    if (this.live) span = Math.max(1, 2 ** Math.ceil(Math.log2(span)));
    const rows = this.names().length;
    if (span !== this.timeline.span || rows !== this.timeline.rows) this.redraw(span);
  }

  redraw(span = this.timeline.span || 1) {
    this.timeline.fit(this.live ? span : this.end_s || 1, this.names().length);
    this.names().forEach((name, row) => {
      const lane = this.lanes[name];
      lane.row = row;
      for (let i = 0; i < lane.cursor; i++) this.timeline.bar(lane, lane.rounds[i].start, lane.rounds[i].round);
    });
    this.timeline.point(this.live ? 0 : this.now);
  }

  names() {
    const lanes = this.run?.lanes;
    return lanes ? LANES.filter((l) => lanes.includes(l)) : LANES;
  }

  refresh() {
    const replay = !this.live && this.end_s > 0;
    const done = replay && this.now >= this.end_s;
    const names = this.names();
    for (const name of LANES) {
      const lane = this.lanes[name];
      lane.box.hidden = !names.includes(name);
      this.showFigures(lane, replay);
    }
    this.root.classList.toggle("one", names.length === 1);
    this.root.classList.toggle("live", this.live);
    this.set(this.mode, this.says(replay, names.length));
    this.controls.hidden = !replay;
    this.timeline.head.hidden = !replay || done;
    if (replay) {
      this.timeline.point(this.now);
      this.set(this.button, this.playing ? this.strings.pause : done ? this.strings.restart : this.strings.play);
      this.button.dataset.glyph = this.playing ? "❚❚" : done ? "↺" : "▶";
      this.slider.max = String(this.end_s);
      if (document.activeElement !== this.slider || this.playing) this.slider.value = String(this.now);
      this.slider.setAttribute("aria-valuetext", this.say("seconds", { n: this.now.toFixed(1) }));
      this.set(this.clock, this.say("seconds", { n: this.now.toFixed(2) }));
    }
    const running = this.playing || (this.live && this.state === "running");
    this.showVerdict(this.verdict && (this.live || done));
    const time = performance.now();
    if (running && time < (this.charted || 0) + CHARTS_EVERY_MS) return;
    this.charted = time;
    this.showCharts(running);
  }

  says(replay, count) {
    if (replay) return count > 1 && LANES.every((l) => this.lanes[l].rounds.length) ? this.strings.mode_replay : this.strings.mode_replay_one;
    if (this.state !== "running") return this.strings.mode_empty;
    return this.runner ? this.say("mode_live", { lane: this.strings[this.runner] }) : this.strings.mode_live_wait;
  }

  // Arrow keys move by a fiftieth of the run: with `step: any` browsers move by amounts of their own.
  step(event) {
    const way = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 5, PageDown: -5, Home: -Infinity, End: Infinity }[event.key];
    if (way === undefined) return;
    event.preventDefault();
    this.pause();
    this.seek(way === Infinity ? this.end_s : way === -Infinity ? 0 : this.now + (way * this.end_s) / 50);
    this.slider.value = String(this.now);
  }
}
