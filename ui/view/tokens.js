// The text of a lane: a block element for every line, committed tokens in it, and at the end the block in flight.
// Only the last line is ever touched, and lines stand in sheets of a few dozen, so that a browser which lays out the last
// one does not look at all others: a token costs the same however long the answer is.

const FENCE = /^\s{0,3}```/;
const SHEET_LINES = 32;
const NEAR_END_PX = 32;

function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

class LaneText {
  constructor(box) {
    this.box = box;
    this.follows = true;
    box.addEventListener("scroll", () => {
      this.follows = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END_PX;
    }, { passive: true });
    this.clear();
  }

  clear() {
    this.box.replaceChildren();
    this.tail = make("span", "flight");
    this.tail.setAttribute("aria-hidden", "true");
    this.sheet = null;
    this.code = false;
    this.head = "";
    this.follows = true;
    this.empty = true;
    this.#startLine();
  }

  // Appends committed text. `mark` is "" (no mark), "accepted" or "bonus".
  append(text, mark) {
    if (!text) return;
    this.empty = false;
    this.fresh = true;
    const parts = text.split("\n");
    for (let i = 0; i < parts.length; i++) {
      if (i) this.#startLine();
      if (parts[i]) this.#put(parts[i], mark);
    }
  }

  // Shows drafted tokens after the committed ones: [{text, mark}] with "ghost", "rejected" or "unscheduled".
  flight(tokens) {
    if (!tokens.length && !this.tail.firstChild) return;
    this.fresh = true;
    this.tail.replaceChildren(
      ...tokens.map(({ text, mark }) => make("span", mark, text.replaceAll("\n", "↵"))),
    );
  }

  // Keeps the end in sight unless the reader has scrolled away from it.
  follow() {
    if (this.follows && this.fresh) this.box.scrollTop = this.box.scrollHeight;
    this.fresh = false;
  }

  get text() {
    return Array.from(this.box.querySelectorAll(".line"), (line) => {
      const flight = line === this.line ? this.tail.textContent.length : 0;
      return line.textContent.slice(0, line.textContent.length - flight);
    }).join("\n");
  }

  #startLine() {
    if (FENCE.test(this.head)) this.code = !this.code;
    this.line = make("div", this.code ? "line code" : "line");
    this.line.dir = "auto";
    this.head = "";
    this.last = null;
    this.line.append(this.tail);
    if (!this.sheet || this.sheet.childElementCount >= SHEET_LINES) {
      this.sheet = make("div", "lines");
      this.box.append(this.sheet);
    }
    this.sheet.append(this.line);
  }

  #put(text, mark) {
    if (this.head.length < 8) {
      this.head += text.slice(0, 8);
      if (FENCE.test(this.head)) this.line.classList.add("code", "fence");
    }
    if (this.last && this.last.mark === mark && mark !== "bonus" && !this.last.closed) {
      this.last.node.appendData(text);
      return;
    }
    const node = document.createTextNode(text);
    let placed = node;
    if (mark) {
      placed = make("span", mark);
      placed.append(node);
    }
    this.line.insertBefore(placed, this.tail);
    this.last = { node, mark, closed: false };
  }

  // The next accepted tokens are another block's.
  closeBlock() {
    if (this.last) this.last.closed = Boolean(this.last.mark);
  }
}
