// The elements of a view, built once; later only their texts, attributes and children change.

const LANES = ["plain", "dspark"];

function labelled(tag, name, id, label) {
  const element = make(tag, name);
  element.setAttribute("aria-labelledby", id);
  label.id = id;
  return element;
}

class Skeleton {
  build(element) {
    const word = (tag, name, key) => {
      const made = make(tag, name);
      this.words.push([made, key]);
      return made;
    };
    this.root = make("section", "dspark");
    this.mode = make("p", "mode");
    this.facts = make("bdi", "facts");
    const top = make("div", "top");
    top.append(this.mode, this.facts);
    const asked = make("p", "prompt");
    asked.append(word("span", "what", "prompt"), (this.prompt = make("bdi", "said")));
    this.polite = make("p", "unseen");
    this.polite.setAttribute("role", "status");

    const card = make("div", "notice");
    const [glyph, title, detail] = [make("span", "glyph"), make("strong"), make("bdi", "detail")];
    glyph.setAttribute("aria-hidden", "true");
    const bar = make("progress");
    this.words.push([bar, "loading", "aria-label"]);
    const says = make("div");
    says.append(title, detail, bar);
    card.append(glyph, says);
    this.notice = { card, glyph, title, detail, bar };

    const grid = make("div", "lanes");
    this.lanes = Object.fromEntries(LANES.map((name) => [name, this.#lane(name, grid, word)]));

    this.banner = make("div", "verdict");
    this.banner.hidden = true;
    this.parts = Object.fromEntries(["glyph", "headline", "speedup", "reason", "factor"].map((n) => [n, make(n === "reason" ? "bdi" : "span", n)]));
    this.parts.glyph.setAttribute("aria-hidden", "true");
    const lines = make("div");
    lines.append(this.parts.headline, this.parts.speedup, this.parts.reason);
    this.parts.factor.setAttribute("aria-hidden", "true");
    this.banner.append(this.parts.glyph, lines, this.parts.factor);

    const legend = make("ul", "legend");
    this.words.push([legend, "legend", "aria-label"]);
    for (const mark of ["accepted", "bonus", "ghost", "rejected", "unscheduled"]) {
      const item = make("li");
      item.append(word("span", mark, `legend_${mark}`));
      legend.append(item);
    }

    this.panels = {};
    this.charts = {};
    const panels = make("div", "panels");
    const timeline = this.#panel("timeline", panels, word);
    const keys = make("ul", "keys");
    const swatches = Object.fromEntries(["prefill", "step", "draft", "verify"].map((name) => {
      const item = make("li");
      const swatch = make("span", `swatch ${name}`);
      item.append(swatch, word("span", "", name));
      keys.append(item);
      return [name, swatch];
    }));
    timeline.previousSibling.append(keys);
    const names = make("div", "rows");
    names.append(word("span", "", "plain"), word("span", "", "dspark"));
    const plots = make("div", "axis");
    timeline.append(names, plots);
    this.timeline = new Timeline(plots, swatches);
    this.survival = new Survival(this.#chart("survival", panels, word));
    this.reliability = new Reliability(this.#chart("confidence", panels, word));
    const memory = this.#panel("memory", panels, word);
    this.store = { bar: make("div", "bar"), list: make("ul"), none: word("p", "note", "memory_unknown") };
    this.store.bar.setAttribute("aria-hidden", "true");
    memory.append(this.store.bar, this.store.list, this.store.none);

    this.root.append(this.polite, top, asked, card, this.#replay(word), grid, legend, this.banner, panels);
    element.append(this.root);
  }

  #lane(name, grid, word) {
    const title = word("h3", "", name);
    const box = labelled("article", `lane lane-${name}`, `${this.id}-${name}`, title);
    const head = make("header");
    const titles = make("div", "titles");
    const chip = make("span", "chip");
    const flag = word("span", "flag", "first");
    titles.append(title, word("span", "how", `${name}_how`), chip, flag);
    const figures = make("dl");
    const cells = {};
    for (const key of ["tokens_per_s", "ttft", "elapsed", "tau", "rounds", "tokens"]) {
      const cell = make("div", key);
      cells[key] = make("dd");
      cell.append(word("dt", "", key), cells[key]);
      figures.append(cell);
    }
    head.append(titles, figures);
    const track = make("div", "track");
    const fill = make("span");
    track.append(fill);
    const page = make("div", "text");
    page.tabIndex = 0;
    page.setAttribute("role", "group");
    this.words.push([page, name, "aria-label"]);
    const sample = make("div", "sample");
    sample.setAttribute("aria-hidden", "true");
    for (let i = 0; i < 12; i++) sample.append(make("span"));
    const sheet = make("div", "sheet");
    sheet.append(page, sample);
    box.append(head, track, sheet);
    grid.append(box);
    return { name, box, cells, chip, flag, fill, row: LANES.indexOf(name), text: new LaneText(page) };
  }

  #panel(name, panels, word) {
    const title = word("h4", "", name);
    const panel = labelled("section", `panel ${name}`, `${this.id}-${name}`, title);
    const head = make("header");
    head.append(title);
    const body = make("div", "body");
    panel.append(head, body);
    panels.append(panel);
    this.panels[name] = panel;
    return body;
  }

  #chart(name, panels, word) {
    const body = this.#panel(name, panels, word);
    const chart = make("div", "chart");
    chart.setAttribute("role", "img");
    body.append(chart, word("p", "note", `${name}_note`));
    this.charts[name] = chart;
    return chart;
  }

  #replay(word) {
    this.controls = make("div", "controls");
    this.button = make("button", "play");
    this.button.type = "button";
    this.button.addEventListener("click", () => (this.playing ? this.pause() : this.play()));
    this.slider = make("input");
    Object.assign(this.slider, { type: "range", min: "0", max: "1", step: "any" });
    this.words.push([this.slider, "position", "aria-label"]);
    this.slider.addEventListener("input", () => { this.pause(); this.seek(Number(this.slider.value)); });
    this.slider.addEventListener("keydown", (event) => this.step(event));
    this.clock = make("span", "clock");
    const pace = make("label", "pace");
    this.pace = make("select");
    for (const factor of SPEEDS) {
      const option = make("option", "", `${factor}×`);
      option.value = String(factor);
      this.pace.append(option);
    }
    this.pace.value = "1";
    this.pace.addEventListener("change", () => this.speed(Number(this.pace.value)));
    pace.append(word("span", "", "speed"), this.pace);
    const skip = word("button", "skip", "end");
    skip.type = "button";
    skip.addEventListener("click", () => this.end());
    this.controls.append(this.button, this.slider, this.clock, pace, skip);
    return this.controls;
  }
}
