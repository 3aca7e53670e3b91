// The board's page. The address holds the view (#filter=…&sort=…&run=…&axis=…), so a view can be shared.
// Everything that comes from a run folder becomes text, never markup.
"use strict";

const EVERY_MS = 2000;
const COLORS = 6, DASHES = 3;
const SVG = "http://www.w3.org/2000/svg";
const NONE = "–";

const COLUMNS = [
  { key: "label", title: "Run", name: "run" },
  { key: "state", title: "State", name: "state" },
  { key: "seed", title: "Seed" },
  { key: "bits_per_byte", title: "Bits per byte" },
  { key: "loss", title: "Training loss" },
  { key: "progress", title: "Progress", name: "progress" },
  { key: "tokens_per_second", title: "Tokens/s" },
  { key: "artifact_bytes", title: "Bytes" },
  { key: "parameters", title: "Parameters" },
  { key: "seconds", title: "Training time" },
];
const FIGURES = [
  ["Bits per byte of the artifact", "bits_per_byte", 4],
  ["Artifact, plain windows", "scores.quantized_plain.bits_per_byte", 4],
  ["Weights as trained, plain windows", "scores.trained_plain.bits_per_byte", 4],
  ["Cost of quantization, bits per byte", "compression.measured_bits_per_byte", 4],
  ["Artifact, bytes", "artifact_bytes", 0],
  ["Parameters", "training.parameters", 0],
  ["Steps", "training.steps", 0],
  ["Tokens", "training.tokens", 0],
  ["Tokens per second", "training.tokens_per_second", 0],
  ["Last training loss, nats per token", "training.final_loss", 4],
  ["Training, s", "seconds.train", 1],
  ["Whole run, s", "seconds.total", 1],
  ["Verified", "verified", 0],
  ["Device", "device", 0],
  ["Number format", "precision", 0],
];
// Figures of an unfinished run, by their key in its row.
const LIVE = {
  "training.steps": "step",
  "training.tokens_per_second": "tokens_per_second",
  "training.final_loss": "loss",
  "seconds.train": "seconds",
};
const STATES = ["running", "waiting", "finished", "trained", "stale", "failed"];

const view = { filter: "", sort: "", runs: [], axis: "step" };
const lines = new Map(); // name of a run: its row in the table
const details = new Map(); // name of a run: the server's answer
let rows = [];
let folder = "";
let complete = true;

const find = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function draw(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Numbers for people

const formats = new Map(); // digits after the point: a formatter, because making one takes far longer than using it

function digits(value, count) {
  const range = { minimumFractionDigits: count, maximumFractionDigits: count };
  if (!formats.has(count)) formats.set(count, new Intl.NumberFormat("en-US", range));
  return formats.get(count).format(value);
}

function number(value, count) {
  return typeof value === "number" ? digits(value, count) : "";
}

function clock(seconds) {
  if (typeof seconds !== "number") return "";
  const whole = Math.round(seconds), two = (part) => String(part).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

function title(row) {
  return row.seed === null || row.seed === undefined ? row.label : `${row.label}, seed ${row.seed}`;
}

// Titles of runs side by side; equal titles get the folder added.
function titles(runs) {
  const all = runs.map((run) => title(run.row));
  return all.map((one, place) => (all.indexOf(one) === all.lastIndexOf(one) ? one : `${one} (${runs[place].row.name})`));
}

// The view in the address

function readView() {
  const asked = new URLSearchParams(location.hash.slice(1));
  view.filter = asked.get("filter") ?? "";
  view.sort = asked.get("sort") ?? "";
  view.runs = [...new Set(asked.getAll("run"))];
  view.axis = asked.get("axis") === "seconds" ? "seconds" : "step";
  find("filter").value = view.filter;
  for (const radio of document.getElementsByName("axis")) radio.checked = radio.value === view.axis;
}

function writeView() {
  const told = new URLSearchParams();
  if (view.filter) told.set("filter", view.filter);
  if (view.sort) told.set("sort", view.sort);
  if (view.axis !== "step") told.set("axis", view.axis);
  for (const name of view.runs) told.append("run", name);
  history.replaceState(null, "", `${location.pathname}#${told}`);
}

// The table

function shownRows() {
  const words = view.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (row) => {
    const seed = row.seed === null ? "" : `seed ${row.seed}`;
    const text = [row.name, row.label, row.recipe, row.study, row.state, seed, row.reason].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  };
  return rows.filter(matches).sort(order());
}

function order() {
  const key = view.sort.replace(/^-/, ""), sign = view.sort.startsWith("-") ? -1 : 1;
  const newest = (a, b) =>
    (b.state === "running") - (a.state === "running") || b.started - a.started || (a.name < b.name ? -1 : 1);
  if (!COLUMNS.some((column) => column.key === key)) return newest;
  const value = (row) => (key === "state" ? STATES.indexOf(row.state) : row[key]);
  return (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null) || newest(a, b);
    const compared = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return sign * compared || newest(a, b);
  };
}

function makeHead() {
  const head = find("runs").tHead.rows[0];
  head.append(make("th", { className: "pick", scope: "col", role: "columnheader", ariaLabel: "Compare" }));
  for (const column of COLUMNS) {
    const button = make("button", { type: "button", className: "sort", textContent: column.title });
    button.addEventListener("click", () => {
      view.sort = view.sort === column.key ? `-${column.key}` : column.key;
      writeView();
      render();
    });
    const cell = make("th", { scope: "col", role: "columnheader", className: column.name ?? "" }, button);
    cell.dataset.key = column.key;
    head.append(cell);
  }
}

function makeLine(name) {
  const box = make("input", { type: "checkbox", id: `run ${name}` });
  box.addEventListener("change", () => {
    view.runs = view.runs.filter((one) => one !== name);
    if (box.checked) view.runs.push(name);
    writeView();
    render();
    compare();
  });
  const line = make("tr", { role: "row" }, make("td", { className: "pick", role: "cell" }, box));
  for (const column of COLUMNS) {
    const first = column.name === "run";
    const cell = make(first ? "th" : "td", { role: first ? "rowheader" : "cell", className: column.name ?? "" });
    if (first) cell.scope = "row";
    else if (column.name !== "state") cell.dataset.label = column.title;
    line.append(cell);
  }
  line.cells[1].append(
    make("label", { htmlFor: box.id }),
    make("small", { className: "place" }),
    make("small", { className: "reason" }),
  );
  line.cells[2].append(make("span"));
  const bar = make("i");
  line.cells[6].append(make("span", { className: "track", ariaHidden: "true" }, bar), make("small"));
  for (const place of [3, 4, 5, 7, 8, 9, 10]) line.cells[place].append(make("span"), make("small"));
  return line;
}

function fillLine(line, row) {
  const [pick, run, state, seed, score, loss, progress, speed, bytes, parameters, time] = line.cells;
  pick.firstChild.checked = view.runs.includes(row.name);
  line.classList.toggle("ticked", pick.firstChild.checked);
  const [label, place, reason] = run.children;
  tell(label, row.label);
  if (place.dataset.text !== `${row.name}${row.report}`) {
    place.dataset.text = `${row.name}${row.report}`;
    place.replaceChildren(row.name);
    if (row.report) {
      const href = `report?name=${encodeURIComponent(row.name)}`;
      place.append(" · ", make("a", { href, target: "_blank", rel: "noopener", textContent: "report" }));
    }
  }
  tell(reason, row.reason);
  tell(state.firstChild, row.state);
  state.firstChild.className = `dot ${row.state}`;
  const pair = (cell, text, more = "") => {
    tell(cell.firstChild, text || NONE);
    tell(cell.lastChild, more);
    cell.classList.toggle("blank", !text);
  };
  pair(seed, row.seed === null ? "" : String(row.seed));
  pair(score, number(row.bits_per_byte, 4));
  const estimate = number(row.train_bits_per_byte, 4);
  pair(loss, number(row.loss, 4), estimate && `≈ ${estimate} bpb`);
  const width = row.progress === null ? "0" : `${(100 * row.progress).toFixed(1)}%`;
  const bar = progress.firstChild.firstChild;
  bar.style.width = width;
  bar.className = row.state;
  const step = row.step === null ? "" : ` · step ${digits(row.step, 0)}`;
  tell(progress.lastChild, row.progress === null ? NONE : `${Math.floor(100 * row.progress)} %${step}`);
  progress.classList.toggle("blank", row.progress === null);
  pair(speed, number(row.tokens_per_second, 0));
  const forecast = number(row.forecast_bytes, 0);
  pair(bytes, number(row.artifact_bytes, 0) || (forecast && `≈ ${forecast}`));
  pair(parameters, number(row.parameters, 0));
  pair(time, clock(row.seconds));
}

function render() {
  const body = find("runs").tBodies[0];
  const wanted = shownRows();
  for (const cell of find("runs").tHead.rows[0].cells) {
    const down = view.sort === `-${cell.dataset.key}`;
    if (down || view.sort === cell.dataset.key) cell.ariaSort = down ? "descending" : "ascending";
    else cell.removeAttribute("aria-sort");
  }
  const focused = document.activeElement;
  wanted.forEach((row, place) => {
    let line = lines.get(row.name);
    if (!line) lines.set(row.name, (line = makeLine(row.name)));
    fillLine(line, row);
    if (body.rows[place] !== line) body.insertBefore(line, body.rows[place] ?? null);
  });
  while (body.rows.length > wanted.length) body.lastChild.remove();
  if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
  const names = new Set(rows.map((row) => row.name));
  for (const name of lines.keys()) if (!names.has(name)) lines.delete(name);

  const counted = STATES.map((state) => [rows.filter((row) => row.state === state).length, state]);
  const parts = counted.filter(([count]) => count).map(([count, state]) => `${count} ${state}`);
  tell(find("counts"), `${folder}: ${parts.join(", ") || "none yet"}${complete ? "" : "; not every folder was looked into"}`);
  find("empty").hidden = wanted.length > 0;
  tell(find("empty"), rows.length ? "No run matches the filter." : "No run has begun. This page shows it once it does.");
  find("runs").hidden = wanted.length === 0;

  const known = chosen().length;
  find("bar").hidden = known === 0;
  tell(find("ticked"), known === 1 ? "1 run ticked; tick another to compare" : `${known} runs ticked`);
  tell(find("show"), known === 1 ? "Show" : "Compare");
}

// The comparison

function chosen() {
  return view.runs.map((name) => rows.find((row) => row.name === name)).filter(Boolean);
}

async function compare() {
  const runs = chosen();
  await Promise.all(
    runs.map(async (row) => {
      const known = details.get(row.name)?.row;
      if (known && known.changed === row.changed && known.state === row.state) return;
      const answer = await fetch(`api/run?name=${encodeURIComponent(row.name)}`);
      if (answer.ok) details.set(row.name, await answer.json());
    }),
  ).catch(() => {}); // the next look tries again, and says so if the server is gone
  show();
}

function show() {
  const all = chosen().filter((row) => details.has(row.name)).map((row) => details.get(row.name));
  find("comparison").hidden = all.length === 0;
  tell(find("comparison-title"), all.length > 1 ? `Comparison of ${all.length} runs` : all.length ? title(all[0].row) : "");
  if (!all.length) return;
  plot(all);
  const figure = (run, path) => run.result[path] ?? (path in LIVE ? run.row[LIVE[path]] : null);
  beside(
    "figures",
    "Figures",
    all,
    FIGURES.map(([name, path, count]) => [name, all.map((run) => figure(run, path)), count]),
  );
  const paths = [...new Set(all.flatMap((run) => Object.keys(run.settings)))];
  const values = paths.map((path) => [path, all.map((run) => run.settings[path])]);
  const differing = values.filter(([, found]) => found.some((value) => value !== found[0]));
  beside("settings", differing.length ? "Settings that differ" : "No setting differs", all, differing);
  find("settings").parentElement.hidden = all.length < 2;
}

function worded(value, count) {
  if (value === undefined || value === null) return NONE;
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? (count === undefined ? String(value) : digits(value, count)) : value;
}

function beside(id, caption, runs, entries) {
  const pair = runs.length === 2 && id === "figures";
  const kept = entries.filter(([, values]) => values.some((value) => value !== null && value !== undefined));
  const head = make("tr", {}, make("th", { scope: "col", ariaLabel: "Name" }));
  titles(runs).forEach((text, place) => head.append(make("th", { scope: "col" }, key(place), text)));
  if (pair) head.append(make("th", { scope: "col", textContent: "second less first" }));
  const body = make("tbody");
  for (const [name, values, count] of kept) {
    const line = make("tr", {}, make("th", { scope: "row", textContent: name }));
    line.append(...values.map((value) => make("td", { textContent: worded(value, count) })));
    if (pair) {
      const numbers = values.every((value) => typeof value === "number");
      const less = values[1] - values[0];
      const sign = less > 0 ? "+" : less < 0 ? "−" : "";
      line.append(make("td", { textContent: numbers ? sign + digits(Math.abs(less), count) : "" }));
    }
    body.append(line);
  }
  const table = [make("caption", { textContent: caption })];
  if (kept.length) table.push(make("thead", {}, head), body);
  find(id).replaceChildren(...table);
}

function look(place) {
  return `s${place % COLORS} d${Math.floor(place / COLORS) % DASHES}`;
}

function key(place) {
  const line = draw("line", { x1: 0, x2: 24, y1: 5, y2: 5, class: look(place) });
  return draw("svg", { class: "key", viewBox: "0 0 24 10", "aria-hidden": "true" }, line);
}

// Means over neighbours: as many before as after at the start, so that the steep part stays; at the end, all within reach.
function smooth(values) {
  const reach = Math.max(1, Math.floor(values.length / 60));
  return values.map((_, at) => {
    const side = Math.min(reach, at);
    const near = values.slice(at - side, at + side + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

function ticks(low, high, count) {
  const apart = high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high)); // else an index would be too large to count up by one
  const spread = apart ? high - low : Math.abs(low) * 0.01 || 1;
  const rough = spread / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((size) => size * power >= rough * (1 - 1e-9));
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= low + spread + 1e-9 * step; index += 1) {
    found.push(Number((index * step).toPrecision(12)));
  }
  return found;
}

function across(longest) {
  if (view.axis === "step") return [1, "steps"];
  return longest < 180 ? [1, "seconds"] : longest < 10800 ? [60, "minutes"] : [3600, "hours"];
}

function plot(runs) {
  const curves = runs.map((run) => ({ x: run.curve[view.axis], y: smooth(run.curve.loss) }));
  const longest = Math.max(...curves.map((curve) => curve.x.at(-1) ?? 0));
  legend(runs, curves, null);
  if (!(longest > 0)) {
    find("plot").replaceChildren(make("p", { className: "none", textContent: "No step has been logged." }));
    return;
  }
  // The first steep twentieth may leave the picture, so that the rest has room.
  const settled = curves.flatMap((curve) => curve.y.filter((_, at) => curve.x[at] >= longest / 20));
  const heights = settled.length ? settled : curves.flatMap((curve) => curve.y);
  const [unit, name] = across(longest);
  const width = find("plot").clientWidth, height = width < 600 ? 256 : 320;
  // Not `Math.min(...heights)`: a hundred thousand arguments are too many.
  const [least, most] = heights.reduce(([a, b], y) => [Math.min(a, y), Math.max(b, y)], [Infinity, -Infinity]);
  const up = ticks(least, most, 5);
  const low = Math.min(up[0], least), high = Math.max(up.at(-1), most);
  const widest = Math.max(...up.map((value) => String(value).length));
  const box = { left: Math.max(44, 16 + 7 * widest), right: width - 24, top: 8, bottom: height - 40 };
  const placeX = (x) => box.left + ((box.right - box.left) * x) / longest;
  const placeY = (y) => box.bottom - ((box.bottom - box.top) * (y - low)) / (high - low || 1);

  const words = `Training loss of ${titles(runs).join("; ")}, against ${name}`;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words });
  for (const value of up) {
    svg.append(draw("line", { x1: box.left, x2: box.right, y1: placeY(value), y2: placeY(value), class: "grid" }));
    svg.append(draw("text", { x: box.left - 8, y: placeY(value), class: "up" }, String(value)));
  }
  for (const value of ticks(0, longest / unit, width < 600 ? 4 : 8)) {
    svg.append(draw("text", { x: placeX(value * unit), y: box.bottom + 18, class: "across" }, value.toLocaleString("en-US")));
  }
  svg.append(draw("text", { x: box.right, y: box.bottom + 36, class: "end" }, name));
  const frame = { x: box.left, y: 0, width: box.right - box.left + 2, height: box.bottom + 2 };
  svg.append(draw("clipPath", { id: "frame" }, draw("rect", frame)));
  const inside = draw("g", { "clip-path": "url(#frame)" });
  curves.forEach((curve, place) => {
    const points = curve.y.map((y, at) => `${placeX(curve.x[at]).toFixed(1)},${placeY(y).toFixed(1)}`);
    inside.append(draw("polyline", { points: points.join(" "), class: `curve ${look(place)}` }));
  });
  const cursor = draw("line", { y1: box.top, y2: box.bottom, class: "cursor", visibility: "hidden" });
  svg.append(inside, cursor);
  svg.addEventListener("pointermove", (event) => {
    const at = Math.min(box.right, Math.max(box.left, event.clientX - svg.getBoundingClientRect().left));
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, at);
    cursor.setAttribute("visibility", "visible");
    legend(runs, curves, (longest * (at - box.left)) / (box.right - box.left));
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    legend(runs, curves, null);
  });
  find("plot").replaceChildren(svg);
}

// Each run with its loss where the pointer is, else at its end.
function legend(runs, curves, at) {
  const named = titles(runs);
  const items = runs.map((run, place) => {
    const { x, y } = curves[place];
    let nearest = x.length - 1;
    if (at !== null) nearest = x.reduce((best, value, index) => (Math.abs(value - at) < Math.abs(x[best] - at) ? index : best), 0);
    const loss = nearest < 0 ? NONE : y[nearest].toFixed(4);
    return make("li", {}, key(place), `${named[place]} `, make("b", { textContent: loss }));
  });
  find("legend").replaceChildren(...items);
}

// Studies, each with its runs done and the hours left

function showStudies(studies) {
  const list = find("studies");
  const said = studies.map((one) => {
    const left = typeof one.seconds_left === "number" && one.done < one.total ? `, ${digits(one.seconds_left / 3600, 1)} h left` : "";
    const failed = one.failed > 0 ? `, ${number(one.failed, 0)} failed` : "";
    return [one.study, one.state, `${number(one.done, 0)} of ${number(one.total, 0)} runs${failed}${left}`];
  });
  const text = JSON.stringify(said);
  if (list.dataset.said === text) return;
  list.dataset.said = text;
  list.hidden = !said.length;
  list.replaceChildren(
    ...said.map(([name, state, rest]) =>
      make("li", {}, make("b", { textContent: name }), " ", make("span", { textContent: state, className: `dot ${state}` }), ` ${rest}`),
    ),
  );
}

// Going on

async function refresh() {
  try {
    const answer = await fetch("api/runs");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    let studies;
    ({ runs: rows, studies, folder, complete } = await answer.json());
    showStudies(studies);
    tell(find("link"), "");
  } catch {
    tell(find("link"), "The board does not answer; figures are those of the last look.");
    return;
  }
  document.title = `Runs in ${folder}`;
  render();
  let gone = false;
  for (const name of details.keys()) if (!rows.some((row) => row.name === name)) gone = details.delete(name);
  const before = chosen().map((row) => details.get(row.name)?.row.changed);
  const now = chosen().map((row) => row.changed);
  if (gone || now.some((changed, place) => changed !== before[place])) await compare();
}

async function keepLooking() {
  try {
    if (!document.hidden) await refresh();
  } finally {
    setTimeout(keepLooking, EVERY_MS);
  }
}

function begin() {
  makeHead();
  readView();
  find("filter").addEventListener("input", () => {
    view.filter = find("filter").value;
    writeView();
    render();
  });
  find("axis").addEventListener("change", (event) => {
    view.axis = event.target.value;
    writeView();
    show();
  });
  find("show").addEventListener("click", () => find("comparison").scrollIntoView());
  find("clear").addEventListener("click", () => {
    view.runs = [];
    writeView();
    render();
    show();
  });
  addEventListener("hashchange", () => {
    readView();
    render();
    compare();
  });
  addEventListener("resize", show);
  keepLooking();
}

begin();
