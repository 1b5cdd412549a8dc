// Draw charts as SVG from the data that charts.py made.

const WIDTH = 460;
const HEIGHT = 250;
const MARGIN = { left: 48, right: 14, top: 10, bottom: 40 };
const SERIES = 8; // colours; further series repeat them with dashes

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function figure(chart) {
  const drawn = { line: drawLines, bars: drawBars, rows: drawRows }[chart.kind](chart);
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", chart.title);
  const made = element("figure", {}, element("figcaption", {}, isolated(chart.title)), drawn);
  if (chart.series.length > 1 && chart.series.length <= SERIES) made.append(legend(chart));
  if (chart.note) made.append(element("p", { class: "note" }, isolated(chart.note)));
  return made;
}

function legend(chart) {
  const items = chart.series.map((one, number) =>
    element("li", {}, svg("svg", { class: "key", width: 18, height: 10 }, svg("line", { x1: 0, x2: 18, y1: 5, y2: 5, class: lineClass(one.color ?? number, one.dashed) })), isolated(one.name)),
  );
  return element("ul", { class: "legend" }, ...items);
}

function lineClass(number, dashed) {
  return `line series${number % SERIES}${dashed ?? number >= SERIES ? " dashed" : ""}`;
}

function drawLines(chart) {
  const points = chart.series.flatMap((one) => one.points);
  const xs = points.map((point) => point[0]);
  const ys = points.flatMap((point) => point.slice(1));
  const x = axis(chart.x, xs, MARGIN.left, WIDTH - MARGIN.right);
  const y = axis(chart.y, ys, HEIGHT - MARGIN.bottom, MARGIN.top);
  const ticks = chart.x.log ? spread([...new Set(xs)].sort((a, b) => a - b), x) : x.ticks;
  const drawn = frame(chart, y, ticks.map((value) => [x.at(value), String(value)]));
  chart.series.forEach((one, number) => {
    const banded = one.points.filter((point) => point.length > 3);
    if (banded.length > 1) {
      const over = banded.map((point) => `${x.at(point[0])},${y.at(point[3])}`);
      const under = banded.map((point) => `${x.at(point[0])},${y.at(point[2])}`).reverse();
      drawn.append(svg("polygon", { points: [...over, ...under].join(" "), class: `band series${number % SERIES}` }));
    }
    let path = "";
    for (const [px, py] of one.points) {
      if (path && one.step) path += `H${x.at(px)}`;
      path += `${path ? "L" : "M"}${x.at(px)},${y.at(py)}`;
    }
    drawn.append(svg("path", { d: path, class: lineClass(one.color ?? number, one.dashed) }));
    for (const [px, py, low, high] of one.step ? [] : one.points) {
      const title = svg("title", {});
      title.textContent = `${one.name}: ${px}, ${py}${low === undefined ? "" : ` (${low} to ${high})`}`;
      drawn.append(svg("circle", { cx: x.at(px), cy: y.at(py), r: 3.5, class: `dot series${number % SERIES}` }, title));
    }
  });
  return drawn;
}

// Leave out ticks whose labels would touch.
function spread(values, x) {
  const kept = [];
  for (const value of values) if (!kept.length || x.at(value) - x.at(kept[kept.length - 1]) >= 26) kept.push(value);
  return kept;
}

function drawBars(chart) {
  const y = axis(chart.y, chart.series.flatMap((one) => one.values), HEIGHT - MARGIN.bottom, MARGIN.top);
  const band = (WIDTH - MARGIN.left - MARGIN.right) / chart.labels.length;
  const every = Math.ceil(Math.max(...chart.labels.map((label) => 6.5 * Math.min(label.length, 14) + 8)) / band);
  const ticks = chart.labels.map((label, place) => [MARGIN.left + (place + 0.5) * band, place % every ? "" : shortened(label)]);
  const drawn = frame(chart, y, ticks);
  const width = (0.8 * band) / chart.series.length;
  chart.series.forEach((one, number) => {
    one.values.forEach((value, place) => {
      const title = svg("title", {});
      title.textContent = `${one.name}, ${chart.labels[place]}: ${value} % (${one.counts[place]})`;
      const top = y.at(value);
      drawn.append(svg("rect", { x: MARGIN.left + (place + 0.1) * band + number * width, y: top, width: Math.max(width - 1, 1), height: Math.max(y.at(0) - top, 0), class: `bar series${number % SERIES}` }, title));
    });
  });
  return drawn;
}

// Bars from left to right, one below the other: for words, which need room.
function drawRows(chart) {
  const most = 14; // characters of a label
  const left = 16 + 7.2 * Math.max(...chart.labels.map((one) => Math.min(one.length, most)));
  const thick = { 1: 16, 2: 12 }[chart.series.length] || 6;
  const height = thick * chart.series.length + 8;
  const right = WIDTH - 58;
  const x = axis(chart.y, chart.series.flatMap((one) => one.values), left, right);
  const drawn = svg("svg", { viewBox: `0 0 ${WIDTH} ${height * chart.labels.length + 4}`, class: "chart" });
  chart.labels.forEach((text, place) => {
    const top = place * height + 4;
    drawn.append(label(left - 7, top + height / 2, shortened(text), "end", "axis"));
    chart.series.forEach((one, number) => {
      const title = svg("title", {});
      title.textContent = `${one.name}, ${text}: ${one.values[place]} % (${one.counts[place]})`;
      const end = x.at(one.values[place]);
      drawn.append(svg("rect", { x: left, y: top + number * thick, width: Math.max(end - left, 0.5), height: thick - 1, class: `bar series${number % SERIES}` }, title));
      if (thick >= 12) drawn.append(label(end + 5, top + number * thick + thick / 2 + 3.5, `${one.values[place].toFixed(1)} %`, "start"));
    });
  });
  return drawn;
}

function shortened(label) {
  return label.length > 14 ? `${label.slice(0, 13)}…` : label;
}

// A scale from values to places, with ticks at round numbers.
function axis(given, values, from, to) {
  let low = given.least ?? Math.min(...values);
  let high = Math.max(...values);
  if (given.log) {
    if (low === high) [low, high] = [low / 2, high * 2];
    const at = (value) => round(from + ((Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from));
    return { at, ticks: [] };
  }
  if (high <= low) high = low + 1;
  const step = Math.max(roundStep((high - low) / 5), given.whole ? 1 : 0);
  high = low + Math.ceil((high - low) / step - 1e-9) * step;
  const ticks = [];
  for (let value = low; value <= high + step / 1e6; value += step) ticks.push(Number(value.toPrecision(6)));
  return { at: (value) => round(from + ((value - low) / (high - low)) * (to - from)), ticks };
}

function roundStep(width) {
  const power = 10 ** Math.floor(Math.log10(width));
  return [1, 2, 5, 10].find((step) => step * power >= width * 0.999) * power;
}

function round(place) {
  return Math.round(10 * place) / 10;
}

function frame(chart, y, ticks) {
  const bottom = HEIGHT - MARGIN.bottom;
  const drawn = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart" });
  for (const value of y.ticks) {
    drawn.append(svg("line", { x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: y.at(value), y2: y.at(value), class: "grid" }));
    drawn.append(label(MARGIN.left - 6, y.at(value) + 4, String(value), "end"));
  }
  for (const [place, text] of ticks) drawn.append(label(place, bottom + 16, text, "middle"));
  drawn.append(label((MARGIN.left + WIDTH - MARGIN.right) / 2, HEIGHT - 6, chart.x.label, "middle", "axis"));
  const middle = (MARGIN.top + bottom) / 2;
  const side = label(12, middle, chart.y.label, "middle", "axis");
  side.setAttribute("transform", `rotate(-90 12 ${middle})`);
  drawn.append(side);
  return drawn;
}

function label(x, y, text, anchor, className) {
  const made = svg("text", { x, y, "text-anchor": anchor, class: className || "tick" });
  made.textContent = text;
  return made;
}
