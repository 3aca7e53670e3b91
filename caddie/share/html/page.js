// The page: its display and its requests to the worker. Text of the model is shown as text, never as markup.
"use strict";

const at = (id) => document.getElementById(id);
const count = (number, digits = 0) =>
  number.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const MOST_BITS = 12; // of the scale of colours
const DAMAGED = "This page is damaged: the model's bytes do not match their checksum; copy the page again.";
const MARKS = { "\ue001": "\u21e7", "\ue002": "\u21ea", "\ue003": "\u21e7", "\ue004": "" }; // of CaseOps, shown as keys

// The smallest module with an instruction of SIMD.
const SIMD = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98,
  11];

function fail(sentence) {
  at("load").hidden = true;
  at("fault").hidden = false;
  at("fault").textContent = sentence;
}

// Send the worker a request; `told` gets its messages before the answer.
const waiting = new Map();
let worker = null;
let asked = 0;

function ask(verb, settings, told = () => {}) {
  const number = asked++;
  worker.postMessage({ number, verb, settings });
  return new Promise((resolve, reject) => waiting.set(number, { resolve, reject, told }));
}

function answered({ data: { number, told, value, error, damaged } }) {
  const one = waiting.get(number);
  if (told !== undefined) {
    one.told(told);
    worker.postMessage({ verb: "seen" }); // the worker may send the next text: drawing a long one takes a while
    return;
  }
  waiting.delete(number);
  if (error === undefined) one.resolve(value);
  else one.reject(Object.assign(new Error(error), { damaged }));
}

async function start() {
  const able = "WebAssembly" in window && "DecompressionStream" in window && WebAssembly.validate(new Uint8Array(SIMD));
  if (!able) {
    fail("This browser has no WebAssembly SIMD, which the model needs to run; open this page in a newer one.");
    return;
  }
  worker = new Worker(URL.createObjectURL(new Blob([at("worker").textContent], { type: "text/javascript" })));
  worker.onmessage = answered;
  worker.onerror = () => fail("The model could not be started in this browser; open this page in a newer one.");
  const parts = Object.fromEntries(["artifact", "engine", "words"].map((id) => [id, at(id).textContent]));
  try {
    const header = JSON.parse(at("header").textContent);
    const opened = await ask("open", { ...parts, header }, ({ share }) => {
      at("loaded").value = share;
      at("loading").textContent = `Decoding the weights: ${Math.floor(100 * share)} %`;
    });
    at("caution").textContent = opened.note;
    at("caution").hidden = !opened.note;
  } catch (error) {
    const damaged = error.damaged || error instanceof SyntaxError;
    fail(damaged ? DAMAGED : error.message);
    return;
  }
  at("load").hidden = true;
  for (const id of ["go", "bits"]) at(id).disabled = false;
  document.body.dataset.ready = "yes";
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  await measure();
  await write();
}

const bounded = (id, least, most, usual) => {
  const value = Math.round(Number(at(id).value));
  return at(id).value.trim() && Number.isFinite(value) ? Math.min(most, Math.max(least, value)) : usual;
};

async function write() {
  if (at("go").disabled) return;
  const settings = { temperature: Number(at("temperature").value), topK: bounded("top", 0, 65536, 40),
    tokens: bounded("tokens", 1, 100000, 200), seed: bounded("seed", 0, 4294967295, 1337) };
  busy(true, "stop");
  at("writing").classList.add("busy");
  at("rate").textContent = "";
  const show = ({ text, prompt, count: tokens, rate }) => {
    const decode = (bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
    at("given").textContent = decode(text.subarray(0, prompt));
    at("continued").textContent = decode(text.subarray(prompt));
    at("written").scrollTop = at("written").scrollHeight;
    at("rate").textContent = `${count(tokens)} tokens${rate ? `, ${count(rate)} per second` : ""}`;
  };
  try {
    show(await ask("write", { prompt: at("prompt").value, ...settings }, show));
  } catch (error) {
    at("rate").textContent = error.message;
  }
  at("writing").classList.remove("busy");
  busy(false, "stop");
}

function busy(yes, stop) {
  for (const id of ["go", "bits"]) at(id).disabled = yes;
  if (stop) at(stop).disabled = !yes;
}

// Return a token's bytes as text; bytes that are no text by themselves are written in hexadecimal.
function shown(piece) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(piece);
    return text.replace(/[\ue001-\ue004]/g, (mark) => MARKS[mark]);
  } catch {
    return Array.from(piece, (byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  }
}

// Return a token for a line of its own, with signs for line breaks and tabs, and spaces that do not collapse.
function named(piece) {
  if (!piece.length) return "control token";
  return shown(piece).replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replaceAll(" ", "\u00a0");
}

let tokens = [];
let here = -1;

async function measure() {
  if (at("bits").disabled || !at("text").value) return;
  busy(true);
  try {
    const { tokens: found, bits, bytes } = await ask("score", { text: at("text").value }, ({ share }) => {
      at("measuring").textContent = `${Math.floor(100 * share)} %`;
    });
    tokens = found;
    here = -1;
    at("rated").textContent = count(bits / bytes, 4);
    at("source").textContent = count(bytes);
    at("packed").textContent = `${count(bits / 8)} bytes`;
    at("measuring").textContent = `${count(found.length)} tokens`;
    const spans = document.createDocumentFragment();
    found.forEach((token, i) => spans.append(span(token, i))); // one at a time: a call takes no 130,000 arguments
    at("map").replaceChildren(spans);
    at("result").hidden = false;
    select(found.reduce((most, token, i) => (token.bits > found[most].bits ? i : most), 0), false);
  } catch (error) {
    at("measuring").textContent = error.message;
  }
  busy(false);
}

function span({ piece, bits }, index) {
  const one = element("span"), text = shown(piece);
  one.dataset.index = index;
  one.style.setProperty("--share", (0.85 * Math.min(1, bits / MOST_BITS)).toFixed(3));
  if (text.includes("\n")) {
    const [first, ...rest] = text.split("\n");
    one.append(first, element("small", "", "\u21b5"), "\n" + rest.join("\n"));
  } else {
    one.append(text);
  }
  return one;
}

function element(kind, name, text) {
  const one = document.createElement(kind);
  if (name) one.className = name;
  if (text !== undefined) one.textContent = text;
  return one;
}

function select(index, scroll) {
  if (!tokens.length) return;
  at("map").children[here]?.classList.remove("here");
  here = Math.max(0, Math.min(tokens.length - 1, index));
  const mark = at("map").children[here], { piece, bits, likely, id } = tokens[here];
  mark.classList.add("here");
  if (scroll) mark.scrollIntoView({ block: "nearest" });
  const title = element("h3");
  const odds = `${count(bits, 2)} bits, a chance of ${chance(2 ** -bits)}; most likely here:`;
  title.append(element("code", "", named(piece)), ` ${odds}`);
  const list = element("ol", "bars");
  for (const [other, share, otherId] of likely) {
    const line = element("li"), name = element("span", "name"), track = element("span", "track");
    const bar = element("i", otherId === id ? "ours" : "");
    name.append(element("code", "", named(other)));
    bar.style.width = `${(100 * share).toFixed(2)}%`;
    track.append(bar);
    line.append(name, track, element("span", "num", chance(share)));
    list.append(line);
  }
  at("detail").replaceChildren(title, list);
}

const chance = (share) => (share >= 0.001 ? `${count(100 * share, share < 0.1 ? 1 : 0)} %` : `1 in ${count(1 / share)}`);

// Hand out the artifact that this page was made of.
function save() {
  const bytes = Uint8Array.from(atob(at("artifact").textContent), (character) => character.charCodeAt(0));
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([bytes], { type: "application/octet-stream" }));
  link.download = at("save").dataset.name;
  link.click();
  URL.revokeObjectURL(link.href);
}

for (const [id, act] of [["write", write], ["measure", measure]])
  at(id).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
at("save").addEventListener("click", save);
at("stop").addEventListener("click", () => worker.postMessage({ verb: "stop" }));
at("temperature").addEventListener("input", () => {
  at("heat").textContent = at("temperature").value;
});
for (const id of ["prompt", "text"])
  at(id).addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at(id).form.requestSubmit();
  });
for (const kind of ["pointerover", "click"])
  at("map").addEventListener(kind, ({ target }) => {
    const one = target.closest("[data-index]");
    if (one) select(Number(one.dataset.index), false);
  });
at("map").addEventListener("keydown", (event) => {
  const step = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  select(step, true);
});

globalThis.caddie = { ask }; // for the console, and for tests
start();
