// The view of a prompt: its samples, alone or beside those of another run.

class View {
  constructor(app) {
    this.app = app;
    this.box = document.getElementById("detail");
    this.ticket = 0;
    // Whether unlikely tokens are shaded, and drafted ones underlined: of one run alone, and of two
    // beside each other.
    this.marks = { shade: [true, false], underline: [true, false] };
    this.prompt = matchMedia("(min-width: 761px)").matches; // whether the prompt is shown
  }

  marked(kind) {
    return this.marks[kind][this.app.b < 0 ? 0 : 1];
  }

  toggle(kind) {
    this.marks[kind][this.app.b < 0 ? 0 : 1] = !this.marked(kind);
    this.show();
  }

  async show() {
    const ticket = ++this.ticket;
    const { data, a, b, opened } = this.app;
    if (opened === null) {
      const hint = "Choose a prompt: click it, or press j and k. Press ? for all keys.";
      this.box.replaceChildren(element("p", { class: "hint" }, hint));
      return;
    }
    const runs = (b < 0 ? [a] : [a, b]).filter((run) => data.runs[run]);
    const number = this.number(runs, opened);
    const sides = await Promise.all(runs.map((run) => this.load(run, opened, number)));
    if (ticket !== this.ticket) return;
    const spans = sides.length === 2 && sides[0].row && sides[1].row ? differing(sides[0].text, sides[1].text) : [[], []];
    const known = sides.find((one) => one.prompt) || { prompt: {} };
    this.box.replaceChildren(
      this.heading(),
      this.promptBlock(known.prompt),
      element("div", { class: `sides${sides.length > 1 ? " two" : ""}` }, ...sides.map((side, number) => this.side(side, spans[number], sides.length > 1))),
      ...this.after(known.prompt),
    );
    this.box.scrollTop = 0;
    const prompt = this.box.querySelector(".prompt-text");
    if (prompt) prompt.scrollTop = prompt.scrollHeight; // the question is at the end
  }

  // The number of the chosen sample, by which two runs show the same one.
  number(runs, id) {
    for (const run of runs) {
      const known = this.app.data.runs[run];
      const samples = known.of[known.places.get(id)] || [];
      if (samples.length) return known.columns.sample[samples[Math.min(this.app.sample, samples.length - 1)]];
    }
    return 0;
  }

  // Read what is shown of one run's sample.
  async load(run, id, number) {
    const known = this.app.data.runs[run];
    const prompt = known.places.get(id);
    if (prompt === undefined) return { run, samples: [] };
    const samples = known.of[prompt];
    const same = samples.findIndex((sample) => known.columns.sample[sample] === number);
    const place = same >= 0 ? same : Math.min(this.app.sample, samples.length - 1);
    const row = samples[place];
    const [text, extra, fields] = await Promise.all([known.texts.at(row), known.extras.at(row), known.prompts.at(prompt)]);
    return { run, samples, place, row: row + 1, text: text || "", extra: extra || {}, prompt: fields || {} };
  }

  heading() {
    const { table, opened } = this.app;
    const place = table.cursor < 0 ? "" : `${(table.cursor + 1).toLocaleString("en")} of ${table.list.length.toLocaleString("en")}`;
    return element(
      "div",
      { class: "heading" },
      element("button", { class: "back", onclick: () => this.app.close() }, "‹ prompts"),
      element("h2", {}, isolated(shortId(opened))),
      element("span", { class: "place" }, place),
      element("button", { title: "Previous prompt (k)", onclick: () => table.move(table.cursor - 1) }, "↑"),
      element("button", { title: "Next prompt (j)", onclick: () => table.move(table.cursor + 1) }, "↓"),
    );
  }

  promptBlock(fields) {
    const text = promptText(fields);
    if (text === "") return element("p", { class: "note" }, "The prompt's text is not in the file (bass generate --echo writes it).");
    return element("details", { open: this.prompt, ontoggle: (event) => { this.prompt = event.target.open; } }, element("summary", {}, "Prompt"), textBlock(text, this.hits(text), "prompt-text"));
  }

  after(fields) {
    const blocks = [];
    if (fields.tests) blocks.push(element("details", {}, element("summary", {}, "Tests"), textBlock(fields.tests)));
    if (fields.problem) blocks.push(element("details", {}, element("summary", {}, "The problem's fields"), textBlock(JSON.stringify(fields.problem, null, 2))));
    if (fields.meta) blocks.push(element("details", {}, element("summary", {}, "Other fields of the prompt"), textBlock(JSON.stringify(fields.meta, null, 2))));
    return blocks;
  }

  // Spans of the words of the search.
  hits(text) {
    const { words } = this.app.table;
    if (!words) return [];
    const spans = [];
    for (const found of text.matchAll(searchPattern(words, "giu"))) {
      spans.push([found.index, found.index + found[0].length, "hit", ""]);
      if (spans.length >= 1000) break; // more would slow the page down
    }
    return spans;
  }

  side(side, spans, named) {
    const { head } = this.app;
    const name = head.runs[side.run].name;
    const box = element("article", { class: "side" });
    if (named) box.append(element("h3", {}, isolated(name)));
    if (!side.samples.length) {
      box.append(element("p", { class: "hint" }, "This run has no sample of the prompt."));
      return box;
    }
    const known = this.app.data.runs[side.run];
    box.append(this.chips(known, side), this.verdict(known, side.row - 1), this.facts(known, side.row - 1, side.extra));
    const { extra, text } = side;
    if (extra.error) box.append(element("p", { class: "message fail" }, isolated(String(extra.error))));
    if (extra.reasoning) box.append(element("details", {}, element("summary", {}, "Thinking"), textBlock(String(extra.reasoning), this.hits(String(extra.reasoning)))));
    if (typeof extra.raw === "string") {
      box.append(element("h4", {}, "The model's text"), this.shaded(extra.raw, extra, this.hits(extra.raw)), element("h4", {}, "What was judged"), textBlock(text, [...this.hits(text), ...spans]));
    } else box.append(this.shaded(text, extra, [...this.hits(text), ...spans]));
    return box;
  }

  chips(known, side) {
    const { first, n } = known.summaries[known.columns.prompt[side.row - 1]];
    const chips = side.samples.map((sample, place) => {
      const mark = markOf(known, sample);
      const likeliest = n > 1 && sample === first && known.columns.mean_logprob[sample] !== null;
      const words = { pass: "passed", fail: "failed", cut: "cut", error: "error", open: "" }[mark];
      return element("button", { class: `sample ${mark}`, "aria-pressed": String(place === side.place), title: `sample ${known.columns.sample[sample]} ${words}${likeliest ? ", the likeliest" : ""}`, onclick: () => this.app.choose(place) }, String(known.columns.sample[sample]), likeliest ? element("sup", {}, "★") : null);
    });
    return element("div", { class: "chips", role: "group", "aria-label": "Samples" }, ...chips);
  }

  verdict(known, sample) {
    const status = known.status(sample);
    const kind = known.kind(sample);
    const mark = known.passed(sample) ? "pass" : known.judged(sample) ? "fail" : "open";
    const box = element("p", { class: `message ${mark}` }, element("b", {}, isolated(status)));
    if (kind && kind !== "other") box.append(" · ", isolated(kind));
    const detail = known.detail(sample);
    if (detail) box.append(element("code", {}, isolated(detail)));
    return box;
  }

  facts(known, sample, extra) {
    const { columns } = known;
    const number = (value, digits) => (value === null || value === undefined ? null : value.toLocaleString("en", { maximumFractionDigits: digits }));
    const drafted = columns.drafted[sample];
    const rows = [
      ["end", columns.reason[sample] || null],
      ["tokens", number(columns.tokens[sample], 0)],
      ["mean log-prob.", number(columns.mean_logprob[sample], 4)],
      ["seconds", number(columns.seconds[sample], 2)],
      ["rounds", number(columns.rounds[sample], 0)],
      ["drafted", drafted === null ? null : `${number(drafted, 0)}, accepted ${number(columns.accepted[sample], 0)}`],
      ["copy of", extra.copy_of ?? null],
      ["rank", extra.rank ?? null],
      ["score", extra.score ?? null],
      ["scores", extra.scores ? JSON.stringify(extra.scores) : null],
    ];
    const shown = rows.filter(([, value]) => value !== null && value !== undefined);
    return element("dl", { class: "facts" }, ...shown.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, isolated(String(value))))));
  }

  // A text with its tokens shaded by their log-probabilities and underlined if they were drafted, as
  // far as the file says.
  shaded(text, extra, spans) {
    const { token_logprobs: logprobs, token_drafted: drafts, pieces } = extra;
    if (!logprobs && !drafts) return textBlock(text, spans);
    const shade = Boolean(logprobs) && this.marked("shade");
    const underline = Boolean(drafts) && this.marked("underline");
    const tokens = tokensOf(extra, shade, underline);
    const box = element("div", {}, element("div", { class: "row" }, logprobs ? this.markSwitch("shade", "shade unlikely tokens (s)") : null, drafts ? this.markSwitch("underline", "underline drafted tokens (d)") : null));
    if (underline) box.append(draftLegend(drafts));
    const marked = shade || underline;
    if (!pieces) {
      box.append(textBlock(text, spans));
      if (marked) box.append(element("p", { class: "note" }, "Tokens in order; where each begins in the text is unknown here:"), strip(tokens));
      return box;
    }
    const { spans: placed, after } = tokenSpans(text, pieces, tokens);
    const others = shade ? spans.filter((one) => one[2] !== "differs") : spans;
    box.append(textBlock(text, marked ? [...placed, ...others] : spans));
    if (after.length && marked) box.append(element("p", { class: "note" }, "Tokens after the text (the end of the sample, or a stop text):"), strip(after));
    return box;
  }

  markSwitch(kind, text) {
    return element("button", { class: "small", "aria-pressed": String(this.marked(kind)), onclick: () => this.toggle(kind) }, text);
  }
}

function draftLegend(drafts) {
  const count = drafts.reduce((sum, one) => sum + one, 0);
  const key = element("span", { class: "drafted" }, "underlined");
  return element("p", { class: "note" }, key, `: drafted and accepted, ${count.toLocaleString("en")} of ${drafts.length.toLocaleString("en")} tokens. The others are the target's own.`);
}

// Tokens one after the other: the log-probability of each, or a point if it is unknown.
function strip(tokens) {
  const most = 2000; // more elements would slow the page down
  const shown = tokens.slice(0, most).map(({ logprob, className, title }) => element("span", { class: className, title }, typeof logprob === "number" ? logprob.toFixed(2) : "·"));
  return element("div", { class: "strip" }, ...shown);
}
