// The worker: opens the artifact and answers the page, in a thread beside the one that draws it.
"use strict";

const channel = new MessageChannel();
const turns = [];
channel.port1.onmessage = () => turns.shift()();

// Let messages in, without the delay of timers.
const turn = () => new Promise((go) => {
  turns.push(go);
  channel.port2.postMessage(0);
});

function decodeBase64(text) {
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

// Return a generator of uniform numbers from 0 to 1 (mulberry32).
function uniform(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

let model, tokenizer;
let stopped = false;
let seen = true; // the page has drawn the last message

async function open({ artifact, engine: module, words, header }, tell) {
  const engine = await Engine.open(decodeBase64(module), await inflate(decodeBase64(words), header.word_bytes));
  const sections = await readContainer(engine, decodeBase64(artifact));
  const weights = await readWeights(engine, sections, header.weights, (share) => tell({ share }));
  tokenizer = openTokenizer(header.tokenizer.kind, sections.get("tokenizer"), header.tokenizer, decodeBase64);
  model = new Model(engine, weights, header.program);
  return { note: tokenizer.note };
}

// Logits of every position of one row of ids, as arrays of numbers.
function logits({ ids }) {
  model.reset();
  const rows = [];
  for (let at = 0; at < ids.length; at += BLOCK) {
    const part = ids.slice(at, at + BLOCK), found = model.forward(part), wide = found.length / part.length;
    for (let t = 0; t < part.length; t++) rows.push(Array.from(found.subarray(t * wide, (t + 1) * wide)));
  }
  return rows;
}

// Run ids through the row; return the logits of the last.
function read(ids) {
  let found, part;
  for (let at = 0; at < ids.length; at += BLOCK) found = model.forward((part = ids.slice(at, at + BLOCK)));
  return found.slice(found.length - found.length / part.length);
}

function chosen(found, { temperature, topK }, draw) {
  let ids = Array.from(found.keys());
  if (!(temperature > 1e-4)) return ids.reduce((best, id) => (found[id] > found[best] ? id : best), 0);
  if (topK > 0 && topK < ids.length) ids = ids.sort((a, b) => found[b] - found[a] || a - b).slice(0, topK);
  const most = ids.reduce((best, id) => Math.max(best, found[id]), -Infinity);
  const shares = ids.map((id) => Math.exp((found[id] - most) / temperature));
  let left = draw() * shares.reduce((sum, share) => sum + share, 0);
  return ids[Math.max(0, shares.findIndex((share) => (left -= share) < 0))];
}

// Continue a prompt, as `caddie sample` does: when the window is full, it restarts with its second half.
async function write({ prompt, tokens, seed, ...settings }, tell) {
  stopped = false;
  seen = true;
  const ids = [model.program.bos, ...tokenizer.encode(prompt)], given = ids.length, draw = uniform(seed);
  let unread = ids.slice(-model.length), began = performance.now(), drawn = 0;
  model.reset();
  while (ids.length - given < tokens && !stopped) {
    if (model.first + unread.length > model.length) {
      unread = ids.slice(-Math.max(1, model.length >> 1));
      model.reset();
    }
    const id = chosen(read(unread), settings, draw);
    if (id === model.program.bos) break;
    if (ids.length === given) began = performance.now(); // the prompt has been read
    ids.push(id);
    unread = [id];
    if (performance.now() - drawn > 15) {
      drawn = performance.now();
      if (seen) {
        seen = false;
        tell(written(ids, given, began));
      }
      await turn();
    }
  }
  return written(ids, given, began);
}

function written(ids, given, began) {
  const count = ids.length - given, seconds = (performance.now() - began) / 1000;
  return { ids, text: tokenizer.decode(ids.slice(1)), prompt: tokenizer.decode(ids.slice(1, given)).length, count,
    rate: count > 1 && seconds ? (count - 1) / seconds : 0 };
}

// Bits of every token of a text by windows side by side, and the most likely tokens in its place.
async function score({ text }, tell) {
  const stream = [model.program.bos, ...tokenizer.encode(text)], found = [];
  let told = performance.now();
  for (let at = 0, room; at < stream.length - 1; at += room) {
    if (at % model.length === 0) model.reset();
    room = Math.min(BLOCK, model.length - (at % model.length), stream.length - 1 - at);
    const rows = model.forward(stream.slice(at, at + room)), wide = rows.length / room;
    for (let t = 0; t < room; t++) found.push(surprise(rows.subarray(t * wide, (t + 1) * wide), stream[at + t + 1]));
    if (performance.now() - told > 50) {
      told = performance.now();
      tell({ share: found.length / (stream.length - 1) });
      await turn();
    }
  }
  const { pieces } = tokenizer, named = ([id, share]) => [pieces[id], share, id];
  const tokens = found.map(({ bits, likely }, i) => (
    { id: stream[i + 1], piece: pieces[stream[i + 1]], bits, likely: likely.map(named) }));
  const bits = found.reduce((sum, token) => sum + token.bits, 0);
  return { tokens, bits, bytes: utf8.encode(text).length };
}

// Bits of a target under logits, and the five most likely ids with their probabilities.
function surprise(row, target) {
  let most = -Infinity, sum = 0;
  for (const logit of row) if (logit > most) most = logit;
  for (const logit of row) sum += Math.exp(logit - most);
  const total = most + Math.log(sum), best = [];
  for (let id = 0; id < row.length; id++) {
    if (best.length === 5 && row[id] <= row[best[4]]) continue;
    let at = best.length;
    while (at && row[best[at - 1]] < row[id]) at--;
    best.splice(at, 0, id);
    best.length = Math.min(best.length, 5);
  }
  return { bits: (total - row[target]) / Math.LN2, likely: best.map((id) => [id, Math.exp(row[id] - total)]) };
}

const VERBS = { open, logits, write, score, encode: ({ text }) => tokenizer.encode(text) };

self.onmessage = async ({ data: { number, verb, settings } }) => {
  if (verb === "stop" || verb === "seen") {
    stopped ||= verb === "stop";
    seen ||= verb === "seen";
    return;
  }
  try {
    const value = await VERBS[verb](settings, (told) => self.postMessage({ number, told }));
    self.postMessage({ number, value });
  } catch (error) {
    self.postMessage({ number, error: error.message, damaged: error instanceof Damaged });
  }
};
