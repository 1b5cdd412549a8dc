// The table of prompts: filters, order, search, and the rows that are in sight.

const ROW = 50; // height of a row in pixels, as in the style
const MARKS = 20; // most samples of a row that have a mark each

const FILTERS = [
  ["all", "all", () => true],
  ["failed", "all fail", (one) => one.judged > 0 && one.passed === 0],
  ["some", "some pass", (one) => one.passed > 0 && one.passed < one.n],
  ["passed", "all pass", (one) => one.n > 0 && one.passed === one.n],
  ["wrong", "likeliest is wrong", (one) => one.wrong],
  ["cut", "cut", (one) => one.cut > 0],
  ["errors", "errors", (one) => one.errors > 0],
  ["differ", "texts differ", (one, other) => other !== undefined && (other === null || one.digest !== other.digest)],
  ["verdicts", "verdicts differ", (one, other) => Boolean(other) && one.passed !== other.passed],
];

const EMPTY = { n: 0, passed: 0, judged: 0, cut: 0, errors: 0, tokens: 0, seconds: 0, first: -1, logprob: null, digest: "", kinds: new Set(), wrong: false };

const NAMES = new Intl.Collator("en", { numeric: true });

const ORDERS = {
  file: ["of the file", null],
  id: ["by name", (a, b) => NAMES.compare(a.id, b.id)],
  longest: ["longest first", (a, b) => b.tokens - a.tokens],
  slowest: ["slowest first", (a, b) => b.seconds - a.seconds],
  likeliest: ["likeliest first", (a, b) => (b.logprob ?? -Infinity) - (a.logprob ?? -Infinity)],
  unlikeliest: ["least likely first", (a, b) => (a.logprob ?? Infinity) - (b.logprob ?? Infinity)],
  fewest: ["fewest passed first", (a, b) => a.passed / (a.n || 1) - b.passed / (b.n || 1)],
  most: ["most passed first", (a, b) => b.passed / (b.n || 1) - a.passed / (a.n || 1)],
};

class Table {
  constructor(app) {
    this.app = app;
    this.box = document.getElementById("table");
    this.rows = document.getElementById("rows");
    this.list = []; // ids of the prompts that are shown
    this.cursor = -1;
    this.filter = "all";
    this.kind = "";
    this.words = "";
    this.found = null; // ids that the search found; null without a search
    this.ticket = 0;
    this.box.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()));
    new ResizeObserver(() => this.draw()).observe(this.box);
    this.box.addEventListener("click", (event) => {
      const row = event.target.closest(".prompt");
      if (row) this.app.open(Number(row.dataset.place));
    });
    const order = document.getElementById("order");
    for (const [value, [text]] of Object.entries(ORDERS)) order.append(element("option", { value }, text));
    order.addEventListener("change", () => this.update());
    const search = document.getElementById("search");
    search.addEventListener("focus", () => this.app.data.prepare(this.searched));
    let waiting = 0;
    search.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => this.search(search.value), 150);
    });
    document.getElementById("tools").addEventListener("submit", (event) => {
      event.preventDefault();
      search.blur(); // so that keys move between the prompts that were found
      this.move(0);
    });
    document.getElementById("tools").addEventListener("change", (event) => event.target.blur());
  }

  pair(id) {
    const { data, a, b } = this.app;
    return [data.summary(a, id) || EMPTY, b < 0 ? undefined : data.summary(b, id)];
  }

  get searched() {
    return [this.app.a, this.app.b].filter((run) => this.app.data.runs[run]);
  }

  async search(words) {
    const ticket = ++this.ticket;
    this.words = words;
    const count = document.getElementById("count");
    if (words === "") {
      this.found = null;
      this.update();
      return;
    }
    count.textContent = "searching…";
    const found = await this.app.data.search(words, this.searched, () => ticket !== this.ticket);
    if (found === null || ticket !== this.ticket) return;
    this.found = found;
    this.update();
    this.app.show();
  }

  // Choose and order the prompts again, and draw.
  update() {
    const opened = this.app.opened;
    const inSearch = this.app.data.ids.filter((id) => (this.found === null || this.found.has(id)) && this.app.data.summary(this.app.a, id));
    const counts = Object.fromEntries(FILTERS.map(([name]) => [name, 0]));
    const kinds = new Map();
    const test = FILTERS.find(([name]) => name === this.filter)[2];
    this.list = inSearch.filter((id) => {
      const [one, other] = this.pair(id);
      for (const [name, , fits] of FILTERS) counts[name] += fits(one, other) ? 1 : 0;
      for (const kind of one.kinds) kinds.set(kind, (kinds.get(kind) || 0) + 1);
      return test(one, other) && (this.kind === "" || one.kinds.has(this.kind));
    });
    const compare = ORDERS[document.getElementById("order").value || "file"][1];
    if (compare) {
      const rows = this.list.map((id) => ({ id, ...this.pair(id)[0] }));
      this.list = rows.sort(compare).map((row) => row.id);
    }
    this.cursor = this.list.indexOf(opened);
    this.drawFilters(counts, kinds);
    const [shown, all] = [this.list.length, this.app.data.ids.length];
    document.getElementById("count").textContent = `${shown.toLocaleString("en")} of ${all.toLocaleString("en")} prompts`;
    this.rows.style.height = `${shown * ROW}px`;
    this.draw(true);
  }

  drawFilters(counts, kinds) {
    const box = document.getElementById("filters");
    const shown = FILTERS.filter(([name]) => name === "all" || name === this.filter || counts[name] > 0);
    const buttons = shown.map(([name, text]) =>
      element("button", { type: "button", class: "chip", "aria-pressed": String(name === this.filter), onclick: () => this.choose(name) }, `${text} ${counts[name].toLocaleString("en")}`),
    );
    const options = [...kinds].sort((a, b) => b[1] - a[1]).map(([kind, count]) => element("option", { value: kind, selected: kind === this.kind }, `${kind} ${count}`));
    const select = element("select", { onchange: (event) => { this.kind = event.target.value; this.update(); } }, element("option", { value: "" }, "any"), ...options);
    const reason = options.length || this.kind ? element("label", {}, "what failed ", select) : null;
    box.replaceChildren(...buttons, ...(reason ? [reason] : []));
  }

  choose(filter) {
    this.filter = filter;
    if (filter === "wrong") document.getElementById("order").value = "likeliest";
    this.box.scrollTop = 0;
    this.update();
  }

  draw(anew) {
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 5);
    const last = Math.min(this.list.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW) + 5);
    const drawn = `${first} ${last}`;
    if (!anew && drawn === this.drawn) return;
    this.drawn = drawn;
    const rows = [];
    for (let place = first; place < last; place++) rows.push(this.row(place));
    this.rows.replaceChildren(...rows);
  }

  row(place) {
    const id = this.list[place];
    const [one, other] = this.pair(id);
    const chosen = place === this.cursor;
    const row = element("div", { class: `prompt${chosen ? " chosen" : ""}`, role: "option", id: `prompt-${place}`, "aria-selected": String(chosen) });
    row.dataset.place = place;
    row.style.top = `${place * ROW}px`;
    const marks = element("span", { class: "marks" }, this.marks(this.app.a, id, one));
    if (other) marks.append(element("span", { class: "and" }), this.marks(this.app.b, id, other));
    row.append(isolated(shortId(id), "id"), marks, element("span", { class: "facts" }, facts(one, other)));
    return row;
  }

  marks(run, id, summary) {
    if (!summary.n) return element("span", { class: "mark none" });
    const known = this.app.data.runs[run];
    const samples = known.of[known.places.get(id)];
    if (samples.length * (this.app.b < 0 ? 1 : 2) > MARKS) {
      const bar = element("span", { class: "share" });
      const part = element("span", {});
      part.style.width = `${(100 * summary.passed) / summary.n}%`;
      bar.append(part);
      return bar;
    }
    return element("span", {}, ...samples.map((sample) => element("span", { class: `mark ${markOf(known, sample)}` })));
  }

  move(to) {
    if (!this.list.length) return;
    const place = Math.min(Math.max(to, 0), this.list.length - 1);
    this.app.open(place);
    this.reveal(place);
  }

  reveal(place) {
    const [top, height] = [place * ROW, this.box.clientHeight];
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + ROW > this.box.scrollTop + height) this.box.scrollTop = top + ROW - height;
    this.draw(true);
  }
}

function shortId(id) {
  return id.length > 200 ? `${id.slice(0, 200)}…` : id;
}

function markOf(run, sample) {
  if (run.passed(sample)) return "pass";
  if (run.columns.reason[sample] === "error") return "error";
  if (run.judged(sample) && run.status(sample) !== "not finished") return "fail";
  return run.isCut(sample) ? "cut" : "open";
}

function facts(one, other) {
  const passed = other && other.judged ? `${one.passed} and ${other.passed}` : one.passed;
  const parts = [one.judged ? `${passed} of ${one.n} pass` : `${one.n} sample${one.n === 1 ? "" : "s"}`];
  if (one.tokens) parts.push(`up to ${one.tokens} tokens`);
  if (one.logprob !== null) parts.push(`log-prob. ${one.logprob.toFixed(2)}`);
  if (one.cut) parts.push(`${one.cut} cut`);
  if (one.errors) parts.push("error");
  return parts.join(" · ");
}
