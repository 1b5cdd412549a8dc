// The data of the page: chunks are expanded when they are needed, and kept.

async function expand(encoded) {
  let bytes;
  if (Uint8Array.fromBase64) bytes = Uint8Array.fromBase64(encoded);
  else {
    const binary = atob(encoded);
    bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  }
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const AHEAD = 4; // chunks that are expanded at a time, so that the page stays responsive

// A list in chunks, of which each is expanded at its first use.
class ChunkedList {
  constructor() {
    this.chunks = []; // {start, count, load, items}
    this.length = 0;
  }

  add(start, count, load) {
    this.chunks.push({ start, count, load, items: null });
    this.length = start + count;
  }

  async at(place) {
    let [low, high] = [0, this.chunks.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.chunks[middle].start <= place) low = middle;
      else high = middle - 1;
    }
    const chunk = this.chunks[low];
    if (!chunk || place >= chunk.start + chunk.count) return undefined;
    return (await this.items(chunk))[place - chunk.start];
  }

  // Expand all chunks in order, the next ones while one is used.
  async *each() {
    for (let place = 0; place < this.chunks.length; place++) {
      for (const chunk of this.chunks.slice(place, place + AHEAD)) this.items(chunk);
      const chunk = this.chunks[place];
      yield [chunk.start, await this.items(chunk)];
    }
  }

  async items(chunk) {
    if (chunk.items === null) {
      if (!chunk.loading) chunk.loading = chunk.load();
      chunk.items = await chunk.loading;
      chunk.load = chunk.loading = null;
    }
    return chunk.items;
  }
}

const COLUMNS = ["prompt", "sample", "reason", "finished", "digest", "tokens", "seconds", "mean_logprob", "rounds", "drafted", "accepted"];

// Statuses of samples that no verdict was made on.
const UNSCORED = new Set(["not judged", "rated", "not finished", "late"]);

// The samples of one file.
class Run {
  constructor() {
    this.ids = []; // of prompts
    this.places = new Map(); // by id, the prompt's number
    this.columns = Object.fromEntries(COLUMNS.map((name) => [name, []]));
    this.of = []; // by prompt, the numbers of its samples
    this.texts = new ChunkedList();
    this.extras = new ChunkedList();
    this.prompts = new ChunkedList();
    this.statuses = this.kinds = this.details = { words: [], at: [] };
    this.summaries = [];
    this.scored = false; // whether any sample has a verdict
  }

  addColumns(added) {
    for (const id of added.prompts) {
      this.places.set(id, this.ids.length);
      this.ids.push(id);
      this.of.push([]);
    }
    const start = this.columns.prompt.length;
    added.reason = added.reason.map((place) => added.reasons[place]);
    for (const name of COLUMNS) {
      const column = this.columns[name];
      for (const value of added[name]) column.push(value);
    }
    added.prompt.forEach((prompt, place) => this.of[prompt].push(start + place));
    for (const prompt of new Set(added.prompt)) this.of[prompt].sort((a, b) => this.columns.sample[a] - this.columns.sample[b]);
    this.summarize(new Set(added.prompt));
  }

  addVerdicts(verdicts) {
    Object.assign(this, verdicts);
    this.scored = this.statuses.words.some((word) => !UNSCORED.has(word));
    this.summarize(this.ids.keys());
  }

  status(sample) {
    return this.statuses.words[this.statuses.at[sample]] || "not judged";
  }

  kind(sample) {
    return this.kinds.words[this.kinds.at[sample]] || "";
  }

  detail(sample) {
    return this.details.words[this.details.at[sample]] || "";
  }

  passed(sample) {
    return this.status(sample) === "passed";
  }

  judged(sample) {
    return this.scored && this.status(sample) !== "not judged" && this.status(sample) !== "rated";
  }

  isCut(sample) {
    const reason = this.columns.reason[sample];
    return reason === "length" || reason === "budget";
  }

  // What the table shows, sorts and filters by, for each prompt.
  summarize(prompts) {
    const { reason, tokens, mean_logprob: logprob, seconds, finished, digest } = this.columns;
    for (const prompt of prompts) {
      const found = { n: 0, passed: 0, judged: 0, cut: 0, errors: 0, tokens: 0, seconds: 0, first: -1, logprob: null, digest: "", kinds: new Set() };
      for (const sample of this.of[prompt]) {
        found.n++;
        found.passed += this.passed(sample);
        found.judged += this.judged(sample);
        found.cut += this.isCut(sample);
        found.errors += reason[sample] === "error";
        found.tokens = Math.max(found.tokens, tokens[sample] || 0);
        found.seconds = Math.max(found.seconds, seconds[sample] || 0);
        found.digest += `${digest[sample]} `;
        if (this.kind(sample)) found.kinds.add(this.kind(sample));
        const likelier = found.first < 0 || (logprob[sample] ?? -Infinity) > (logprob[found.first] ?? -Infinity);
        if (finished[sample] && likelier) found.first = sample;
      }
      if (found.first >= 0) found.logprob = logprob[found.first];
      found.wrong = found.judged > 0 && found.first >= 0 && this.judged(found.first) && !this.passed(found.first);
      this.summaries[prompt] = found;
    }
  }
}

// All runs, and the prompts of any of them by id.
class Data {
  constructor() {
    this.runs = [];
    this.ids = []; // of the prompts of all runs
    this.known = new Set();
  }

  async add(run, kind, start, count, load) {
    while (this.runs.length <= run) this.runs.push(new Run());
    const into = this.runs[run];
    if (kind === "columns") {
      const added = await load();
      into.addColumns(added);
      for (const id of added.prompts) {
        if (!this.known.has(id)) {
          this.known.add(id);
          this.ids.push(id);
        }
      }
    } else if (kind === "verdicts") into.addVerdicts(await load());
    else into[kind].add(start, count, load);
  }

  summary(run, id) {
    const known = this.runs[run];
    const place = known ? known.places.get(id) : undefined;
    return place === undefined ? null : known.summaries[place];
  }

  // Expand the texts of these runs, so that a search need not wait for them.
  async prepare(runs) {
    for (const run of runs) for await (const _ of this.runs[run].texts.each());
  }

  // Return the ids of the prompts whose id, own text or samples contain the words, in any case.
  // `stopped` is called between chunks, and ends the search if it returns true.
  async search(words, runs, stopped) {
    const pattern = searchPattern(words);
    const found = new Set(this.ids.filter((id) => pattern.test(id)));
    for (const run of runs) {
      const { ids, prompts, texts, columns } = this.runs[run];
      for await (const [start, items] of prompts.each()) {
        items.forEach((item, place) => {
          if (pattern.test(promptText(item))) found.add(ids[start + place]);
        });
        if (stopped()) return null;
      }
      for await (const [start, items] of texts.each()) {
        for (let place = 0; place < items.length; place++) {
          if (pattern.test(items[place])) found.add(ids[columns.prompt[start + place]]);
        }
        if (stopped()) return null;
      }
    }
    return found;
  }
}

function searchPattern(words, flags) {
  return new RegExp(words.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), flags || "iu");
}

// The text of a prompt: as it was given, or its messages one after the other.
function promptText(prompt) {
  if (typeof prompt.prompt === "string") return prompt.prompt;
  if (!Array.isArray(prompt.messages)) return "";
  const content = (one) => (typeof one.content === "string" ? one.content : JSON.stringify(one.content));
  return prompt.messages.map((one) => (one && one.role ? `${one.role}: ${content(one)}` : JSON.stringify(one))).join("\n\n");
}
