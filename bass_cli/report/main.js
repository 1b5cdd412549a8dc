// The page: views, keys, theme, and the updates of a running job.

const KEYS = [
  ["1, 2", "summary, samples"],
  ["j or ↓, k or ↑", "next, previous prompt"],
  ["l or →, h or ←", "next, previous sample"],
  ["Home, End", "first, last prompt"],
  ["/", "search; Enter opens the first prompt that was found"],
  ["Esc", "leave the search, close a prompt or this list"],
  ["b", "another run beside this one, or none"],
  ["s", "shade unlikely tokens"],
  ["d", "underline tokens that were drafted"],
  ["t", "dark or light"],
  ["?", "this list"],
];

class App {
  constructor(head) {
    this.head = head;
    this.data = new Data();
    this.a = 0;
    this.b = head.runs.length === 2 ? 1 : -1; // of two runs, both are shown
    this.opened = null; // the id of a prompt
    this.sample = 0; // which of its samples, in their order
    this.tab = "summary";
    this.table = new Table(this);
    this.view = new View(this);
  }

  async start() {
    const encoded = (place) => () => {
      const holder = document.getElementById(`c${place}`);
      const content = holder.textContent;
      holder.remove(); // its text is not needed twice
      return expand(content);
    };
    const added = this.head.chunks.map(([run, kind, start, count], place) => [run, kind, start, count, encoded(place)]);
    for (const one of added) await this.data.add(...one);
    this.refresh();
    if (this.head.runs.some((run) => run.task)) document.getElementById("order").value = "id";
    this.table.update();
    this.follow(location.hash);
    document.body.dataset.ready = "1";
    if (this.head.live) this.poll();
  }

  // Show the head again: the summary, and the choice of runs.
  refresh() {
    const { runs } = this.head;
    const name = runs.length > 3 ? `${runs.length} runs` : runs.map((run) => run.name).join(", ") || "waiting for samples";
    document.getElementById("title").replaceChildren(isolated(name));
    const options = () => runs.map((run, number) => element("option", { value: number }, run.name));
    const [one, other] = [document.getElementById("run"), document.getElementById("other")];
    one.replaceChildren(...options());
    other.replaceChildren(element("option", { value: -1 }, "none"), ...options());
    one.value = this.a;
    other.value = this.b;
    for (const id of ["run-label", "other-label"]) document.getElementById(id).hidden = runs.length < 2;
    document.getElementById("summary").replaceChildren(...summary(this.head));
  }

  follow(hash) {
    const [, tab, id, sample] = hash.split("/");
    let known = null;
    try {
      known = decodeURIComponent(id || "");
    } catch {
      known = null; // not an address of this page
    }
    if (known && this.data.known.has(known)) {
      this.opened = known;
      this.sample = Math.max(0, Math.trunc(Number(sample)) || 0);
      this.table.cursor = this.table.list.indexOf(known);
    }
    this.select(tab === "samples" ? "samples" : "summary");
    if (this.table.cursor >= 0) this.table.reveal(this.table.cursor);
    this.show();
  }

  remember() {
    let address = `#/${this.tab}`;
    try {
      if (this.tab === "samples" && this.opened !== null) address += `/${encodeURIComponent(this.opened)}/${this.sample}`;
      history.replaceState(null, "", address);
    } catch {
      // an id that no address can hold, or a page that may not change its address
    }
  }

  select(tab) {
    this.tab = tab;
    for (const name of ["summary", "samples"]) {
      document.getElementById(name).hidden = name !== tab;
      document.getElementById(`tab-${name}`).setAttribute("aria-selected", String(name === tab));
    }
    this.table.draw(true);
    this.remember();
  }

  open(place) {
    this.table.cursor = place;
    this.opened = this.table.list[place];
    this.sample = 0;
    this.table.box.setAttribute("aria-activedescendant", `prompt-${place}`);
    this.table.draw(true);
    this.show();
  }

  choose(sample) {
    const most = Math.max(...[this.a, this.b].filter((run) => run >= 0).map((run) => (this.data.summary(run, this.opened) || EMPTY).n));
    this.sample = Math.min(Math.max(sample, 0), most - 1);
    this.show();
  }

  close() {
    this.opened = null;
    this.table.cursor = -1;
    this.table.draw(true);
    this.show();
  }

  show() {
    document.body.classList.toggle("opened", this.opened !== null);
    this.remember();
    return this.view.show();
  }

  beside(other) {
    this.b = other === this.a ? -1 : other;
    document.getElementById("other").value = this.b;
    if (this.table.words) this.table.search(this.table.words);
    if (this.b < 0 && ["differ", "verdicts"].includes(this.table.filter)) this.table.filter = "all";
    this.table.update();
    this.show();
  }

  // Fetch what has been added to the files since the last time.
  async poll() {
    const status = document.getElementById("status");
    try {
      const answer = await fetch(`data?seen=${encodeURIComponent(this.seen || "")}`, { cache: "no-store" });
      if (answer.status === 200) await this.take(await answer.json());
      else if (answer.status !== 204) throw new Error(await answer.text());
      const count = this.head.runs.reduce((sum, run) => sum + run.samples, 0);
      status.textContent = this.problem || `live · ${count.toLocaleString("en")} samples`;
      status.className = this.problem ? "bad" : "";
    } catch (error) {
      status.textContent = error instanceof TypeError ? "the server has ended" : String(error.message);
      status.className = "bad";
    }
    setTimeout(() => this.poll(), 1000 * this.head.live);
  }

  async take(update) {
    if (update.reset) this.data = new Data();
    for (const [run, kind, start, count, content] of update.chunks) await this.data.add(run, kind, start, count, () => expand(content));
    this.seen = update.seen;
    this.problem = update.problem || "";
    this.head = { ...this.head, ...update.head };
    this.refresh();
    const scrolled = this.table.box.scrollTop;
    this.table.update();
    this.table.box.scrollTop = scrolled;
    if (this.table.words) this.table.search(this.table.words);
    else if (this.opened !== null) this.keepPlace(() => this.view.show());
  }

  async keepPlace(show) {
    const box = document.getElementById("detail");
    const place = box.scrollTop;
    await show();
    box.scrollTop = place;
  }
}

function summary(head) {
  const tiles = head.runs.length > 1 ? [ranking(head.runs)] : head.runs.map((run) => element("div", { class: "tiles" }, ...run.headline.map(([name, value]) => element("div", { class: "tile" }, element("b", {}, value), element("span", {}, name)))));
  const remarks = remarksOf(head.runs);
  const charts = element("section", { class: "charts" }, ...head.charts.map(figure));
  const rows = (pick) => {
    const names = [...new Set(head.runs.flatMap((run) => pick(run).map(([name]) => name)))];
    return names.map((name) => [name, ...head.runs.map((run) => (pick(run).find(([key]) => key === name) || [name, "–"])[1])]);
  };
  const tables = [
    ["Figures", rows((run) => run.figures), true],
    ["Settings", rows((run) => Object.entries(run.settings)), head.runs.length > 1],
    ["The run", rows((run) => Object.entries(run.run)), false],
  ];
  const made = `bass ${head.version}${head.made ? ` · ${head.made}` : ""}`;
  return [...tiles, ...remarks, charts, ...tables.filter(([, cells]) => cells.length).map(([name, cells, open]) => grid(name, cells, head.runs, open)), element("footer", {}, made)];
}

// The main figures of several runs, one below the other.
function ranking(runs) {
  const names = [...new Set(runs.flatMap((run) => run.headline.map(([name]) => name)))];
  const top = element("tr", {}, element("th", {}, "run"), ...names.map((name) => element("th", { scope: "col" }, name)));
  const rows = runs.map((run, number) => {
    const values = new Map(run.headline);
    const key = svg("svg", { class: "key", width: 18, height: 10 }, svg("line", { x1: 0, x2: 18, y1: 5, y2: 5, class: lineClass(number) }));
    return element("tr", {}, element("th", { scope: "row" }, key, isolated(run.name)), ...names.map((name) => element("td", {}, values.get(name) || "–")));
  });
  return element("div", { class: "wide ranking" }, element("table", {}, element("thead", {}, top), element("tbody", {}, ...rows)));
}

// The notes of all runs; one that all of them have is shown once.
function remarksOf(runs) {
  const texts = [...new Set(runs.flatMap((run) => run.notes))].map((note) => {
    const having = runs.filter((run) => run.notes.includes(note));
    return having.length === runs.length ? note : `${having.map((run) => run.name).join(", ")}: ${note}`;
  });
  return texts.length ? [element("ul", { class: "notes" }, ...texts.map((text) => element("li", {}, isolated(text))))] : [];
}

function grid(name, cells, runs, open) {
  const body = cells.map(([key, ...values]) => {
    const differs = values.some((value) => value !== values[0]) && name === "Settings";
    return element("tr", { class: differs ? "differing" : "" }, element("th", { scope: "row" }, isolated(key)), ...values.map((value) => element("td", {}, isolated(value))));
  });
  const top = element("tr", {}, element("th", {}, ""), ...runs.map((run) => element("th", { scope: "col" }, isolated(run.name))));
  const table = element("table", {}, ...(runs.length > 1 ? [element("thead", {}, top)] : []), element("tbody", {}, ...body));
  return element("details", { class: "grid", open }, element("summary", {}, name), element("div", { class: "wide" }, table));
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

function help() {
  const box = document.getElementById("help");
  if (box.open) box.close();
  else box.showModal();
}

function pressed(app, event) {
  const field = event.target.closest("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    if (field) field.blur();
    else if (app.tab === "samples" && app.opened !== null) app.close();
    return;
  }
  if (field || document.getElementById("help").open) return;
  const { table } = app;
  const samples = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 };
  const actions = {
    1: () => app.select("summary"),
    2: () => app.select("samples"),
    "/": () => {
      app.select("samples");
      document.getElementById("search").focus();
    },
    "?": help,
    t: toggleTheme,
  };
  if (app.tab === "samples") {
    Object.assign(actions, {
      Home: () => table.move(0),
      End: () => table.move(table.list.length - 1),
      s: () => app.view.toggle("shade"),
      d: () => app.view.toggle("underline"),
      b: () => app.beside(app.b >= 0 || app.head.runs.length < 2 ? -1 : app.a === 0 ? 1 : 0),
    });
    if (app.opened !== null) for (const [key, step] of [["l", 1], ["ArrowRight", 1], ["h", -1], ["ArrowLeft", -1]]) actions[key] = () => app.choose(app.sample + step);
    if (event.key in samples) actions[event.key] = () => table.move(table.cursor + samples[event.key]);
  }
  const action = actions[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
}

function begin() {
  const app = new App(JSON.parse(document.getElementById("head").textContent));
  const box = document.getElementById("help");
  box.append(element("h2", {}, "Keys"), element("dl", {}, ...KEYS.map(([keys, text]) => element("div", {}, element("dt", {}, keys), element("dd", {}, text)))), element("button", { onclick: help }, "close"));
  document.getElementById("keys").onclick = help;
  document.getElementById("theme").onclick = toggleTheme;
  for (const name of ["summary", "samples"]) document.getElementById(`tab-${name}`).onclick = () => app.select(name);
  document.getElementById("run").onchange = (event) => {
    app.a = Number(event.target.value);
    app.beside(app.b);
  };
  document.getElementById("other").onchange = (event) => app.beside(Number(event.target.value));
  document.addEventListener("keydown", (event) => pressed(app, event));
  addEventListener("hashchange", () => app.follow(location.hash));
  app.start();
}

begin();
