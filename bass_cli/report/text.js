// Show texts of models and files. They are data: only text nodes are made of them, never markup.
// Characters that act on a text without being seen are replaced by their names.

// Control, format and separator characters, and halves of surrogate pairs. Line ends and tabs are
// shown as such; joiners (U+200C, U+200D) belong to words and emoji.
// A run of one character is one match, so that a text of nothing else is shown at once.
const HIDDEN = /((?![\n\t\u200C\u200D])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}])\1*/gu;

function element(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(properties || {})) {
    if (key === "class") made.className = value;
    else if (key in made && key !== "role") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Append a text to a parent, with its unseen characters shown by name.
function appendVisible(parent, text) {
  let end = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > end) parent.append(text.slice(end, found.index));
    const code = found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    const count = found[0].length / found[1].length;
    const name = count > 1 ? `U+${code} × ${count}` : `U+${code}`;
    parent.append(element("span", { class: "hidden-character", title: "an unseen character" }, name));
    end = found.index + found[0].length;
  }
  if (end < text.length) parent.append(text.slice(end));
  return parent;
}

// An inline element with a text whose direction does not reach its surroundings.
function isolated(text, className) {
  return appendVisible(element("bdi", { class: className || "" }), text);
}

// Spans of a text, [start, end, class, title], which may overlap: each piece gets all its classes.
function appendMarked(parent, text, spans) {
  const known = spans.filter(([start, end]) => end > start);
  const edges = new Set([0, text.length]);
  for (const [start, end] of known) edges.add(start).add(end);
  const places = [...edges].filter((place) => place <= text.length).sort((a, b) => a - b);
  const starts = [...known].sort((a, b) => a[0] - b[0]);
  let open = [];
  let next = 0;
  for (let i = 0; i + 1 < places.length; i++) {
    const [from, to] = [places[i], places[i + 1]];
    open = open.filter(([, end]) => end > from);
    while (next < starts.length && starts[next][0] <= from) open.push(starts[next++]);
    const piece = text.slice(from, to);
    if (!open.length) {
      appendVisible(parent, piece);
      continue;
    }
    const title = open.map((one) => one[3]).filter(Boolean).join("; ");
    parent.append(appendVisible(element("span", { class: open.map((one) => one[2]).join(" "), title }), piece));
  }
  return parent;
}

// A block with a text, isolated from the page, in the direction of its own first letters.
function textBlock(text, spans, className) {
  const block = element("pre", { class: `text ${className || ""}`, dir: "auto" });
  return text === "" ? (block.append(element("i", {}, "empty")), block) : appendMarked(block, text, spans || []);
}

// What is shown of each token, in order: {logprob, drafted, className, title}. `shade`: by how unlikely
// it is. `underline`: whether it was an accepted draft.
function tokensOf(extra, shade, underline) {
  const { token_logprobs: logprobs = [], token_drafted: drafts = [] } = extra;
  return Array.from({ length: Math.max(logprobs.length, drafts.length) }, (_, number) => {
    const [logprob, drafted] = [logprobs[number], drafts[number]];
    const className = `token ${shade ? shadeOf(logprob) : ""} ${underline && drafted ? "drafted" : ""}`;
    return { logprob, drafted, className, title: tokenTitle(number, logprob, drafted) };
  });
}

// The spans of tokens in a text, and the tokens after the text.
function tokenSpans(text, pieces, tokens) {
  const spans = [];
  const after = [];
  let start = 0;
  tokens.forEach((token, number) => {
    const length = pieces[number] || 0;
    if (start < text.length && length) spans.push([start, Math.min(start + length, text.length), token.className, token.title]);
    else if (start >= text.length) after.push(token);
    start += length;
  });
  return { spans, after };
}

function tokenTitle(number, logprob, drafted) {
  const parts = [];
  if (typeof logprob === "number") parts.push(`log-probability ${logprob}, probability ${percentOf(Math.exp(logprob))}`);
  if (drafted !== undefined) parts.push(drafted ? "an accepted draft" : "the target's own");
  return `token ${number}: ${parts.join(", ") || "log-probability unknown"}`;
}

// Ten shades: none for a token that is nearly certain, the darkest below a probability of 0.1 %.
function shadeOf(logprob) {
  if (typeof logprob !== "number") return "";
  return `shade${Math.min(9, Math.round((-logprob / Math.log(1000)) * 9))}`;
}

function percentOf(share) {
  return share >= 0.0995 ? `${(100 * share).toFixed(0)} %` : `${(100 * share).toPrecision(2)} %`;
}

// The lines of two texts that the other one has not at their place, as spans of each. Very long
// texts are compared from both ends only.
function differing(a, b) {
  const [one, other] = [linesOf(a), linesOf(b)];
  const most = 4e6; // cells of the table: 2000 lines by 2000
  let start = 0;
  const least = Math.min(one.length, other.length);
  while (start < least && one[start].text === other[start].text) start++;
  let same = 0;
  while (same < least - start && one[one.length - 1 - same].text === other[other.length - 1 - same].text) same++;
  const [left, right] = [one.slice(start, one.length - same), other.slice(start, other.length - same)];
  const kept = left.length * right.length <= most ? commonLines(left, right) : [new Set(), new Set()];
  const shared = one.slice(0, start).concat(one.slice(one.length - same), left.filter((_, place) => kept[0].has(place)));
  if (!shared.some((line) => line.text.trim() !== "")) return [[], []]; // marks would say nothing
  return [left, right].map((lines, side) => lines.filter((_, place) => !kept[side].has(place)).map((line) => [line.start, line.start + line.text.length, "differs", ""]));
}

function linesOf(text) {
  let start = 0;
  return text.split(/(?<=\n)/).map((line) => {
    const found = { text: line, start };
    start += line.length;
    return found;
  });
}

// The places of a longest common subsequence of lines, in each list.
function commonLines(left, right) {
  const width = right.length + 1;
  const lengths = new Uint32Array((left.length + 1) * width);
  for (let i = left.length - 1; i >= 0; i--) {
    for (let j = right.length - 1; j >= 0; j--) {
      const below = (i + 1) * width + j;
      lengths[i * width + j] = left[i].text === right[j].text ? lengths[below + 1] + 1 : Math.max(lengths[below], lengths[i * width + j + 1]);
    }
  }
  const kept = [new Set(), new Set()];
  for (let i = 0, j = 0; i < left.length && j < right.length; ) {
    if (left[i].text === right[j].text) {
      kept[0].add(i++);
      kept[1].add(j++);
    } else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i++;
    else j++;
  }
  return kept;
}
