// Text to ids and back, as `caddie/data/tokenizers` does it.
"use strict";

const MARK = "\u2581"; // SentencePiece's mark for a space
const utf8 = new TextEncoder();
const NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6;

function joined(parts) {
  const result = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    result.set(part, at);
    at += part.length;
  }
  return result;
}

// Base of the tokenizers: `pieces` holds the bytes of each id, none for control ids.
class Pieces {
  constructor(pieces) {
    Object.assign(this, { pieces, note: "" });
  }

  decode(ids) {
    return joined(ids.map((id) => this.pieces[id]));
  }
}

class RawBytes extends Pieces {
  constructor(first, vocabulary) {
    const byte = (id) => (id >= first && id < first + 256 ? Uint8Array.of(id - first) : new Uint8Array());
    super(Array.from({ length: vocabulary }, (_, id) => byte(id)));
    this.first = first;
  }

  encode(text) {
    return Array.from(utf8.encode(text), (byte) => byte + this.first);
  }
}

// The longest pieces that match, from left to right: not the ids that the tokenizer itself would give.
class LongestPieces extends Pieces {
  constructor(pieces) {
    super(pieces);
    this.note = "This page cuts text into the longest pieces that match, not as the model's own tokenizer does, "
      + "so its bits are an upper bound.";
    this.ids = new Map(pieces.map((piece, id) => [this.key(piece), id]));
    this.longest = pieces.reduce((most, piece) => Math.max(most, piece.length), 0);
  }

  key(bytes) {
    return String.fromCharCode(...bytes);
  }

  encode(text) {
    const bytes = utf8.encode(text), ids = [];
    for (let at = 0; at < bytes.length; ) {
      let end = Math.min(bytes.length, at + this.longest);
      while (end > at && !this.ids.has(this.key(bytes.subarray(at, end)))) end--;
      if (end === at) throw new Error(`The model's tokenizer has no id for the byte ${bytes[at]} of this text.`);
      ids.push(this.ids.get(this.key(bytes.subarray(at, end))));
      at = end;
    }
    return ids;
  }
}

// Fields of a message of protocol buffers: [number, value], values being numbers or bytes.
function* fields(message) {
  const view = new DataView(message.buffer, message.byteOffset, message.byteLength);
  let at = 0;
  const number = () => {
    for (let value = 0, scale = 1; ; scale *= 128) {
      const byte = message[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < message.length) {
    const key = number(), field = Math.floor(key / 8), wire = key % 8;
    if (wire === 0) yield [field, number()];
    else if (wire === 5) yield [field, view.getFloat32((at += 4) - 4, true)];
    else if (wire === 1) yield [field, view.getFloat64((at += 8) - 8, true)];
    else {
      const length = number();
      yield [field, message.subarray(at, (at += length))];
    }
  }
}

// SentencePiece's byte pair encoding (its `bpe_model.cc`), behind its normalizer.
class SentencePiece extends Pieces {
  constructor(model) {
    const text = new TextDecoder("utf-8", { ignoreBOM: true }), all = [...fields(model)], list = [];
    for (const [, piece] of all.filter(([field]) => field === 1)) {
      const held = Object.fromEntries(fields(piece));
      list.push({ piece: text.decode(held[1] ?? new Uint8Array()), score: held[2] ?? 0, type: held[3] ?? NORMAL });
    }
    const bytes = ({ piece, type }) => {
      if (type === BYTE) return Uint8Array.of(parseInt(piece.slice(1, -1), 16));
      return utf8.encode([UNKNOWN, CONTROL, UNUSED].includes(type) ? "" : piece.replaceAll(MARK, " "));
    };
    super(list.map(bytes));
    this.list = list;
    this.merges = new Map();
    this.bytes = new Array(256).fill(0);
    this.unknown = list.findIndex(({ type }) => type === UNKNOWN);
    list.forEach(({ piece, type }, id) => {
      if ([NORMAL, USER_DEFINED, UNUSED].includes(type)) this.merges.set(piece, id);
      if (type === BYTE) this.bytes[this.pieces[id][0]] = id;
    });
    this.fallback = list.some(({ type }) => type === BYTE);
    const defined = list.filter(({ type }) => type === USER_DEFINED).map(({ piece }) => piece);
    this.symbols = defined.sort((a, b) => b.length - a.length);
    const settings = Object.fromEntries(fields(Object.fromEntries(all)[3] ?? new Uint8Array()));
    this.normalizer = new Normalizer(settings);
    const trainer = Object.fromEntries(fields(Object.fromEntries(all)[2] ?? new Uint8Array()));
    this.lossless = this.normalizer.identity && list.filter(({ type }) => type === BYTE).length === 256;
    // A space without a piece of its own would fall back to the three bytes of the mark.
    this.raw = list.some(({ piece }) => piece === MARK) ? /([\0\u2581]+)/ : /([ \0\u2581]+)/;
    // Not encoded here: unigram models, spaces behind words (24), and symbols with spaces that would be collapsed.
    const apart = this.normalizer.collapses && defined.some((symbol) => symbol.includes(" "));
    if (trainer[3] !== 2 || trainer[24] || apart) {
      const longest = new LongestPieces(this.pieces);
      this.note = longest.note;
      this.encode = (given) => longest.encode(given);
    }
  }

  encode(text) {
    text = text.toWellFormed ? text.toWellFormed() : text;
    if (!this.lossless) return this.encodeText(text);
    const spelled = (raw) => Array.from(utf8.encode(raw), (byte) => this.bytes[byte]);
    return text.split(this.raw).flatMap((run, i) => (i % 2 ? spelled(run) : this.encodeText(run)));
  }

  encodeText(text) {
    const ids = this.split(this.normalizer.apply(text, this.symbols)).flatMap((piece) => {
      const id = this.merges.get(piece);
      if (id !== undefined) return [id];
      return this.fallback ? Array.from(utf8.encode(piece), (byte) => this.bytes[byte]) : [this.unknown];
    });
    return ids.filter((id, i) => id !== this.unknown || ids[i - 1] !== id); // adjacent unknown ids are one
  }

  // Merge neighbours: the best score first, and the leftmost of equal ones.
  split(text) {
    const symbols = [], heap = new Heap((a, b) => b.score - a.score || a.left - b.left);
    for (let at = 0; at < text.length; ) {
      const defined = this.symbols.find((symbol) => text.startsWith(symbol, at));
      const piece = defined ?? String.fromCodePoint(text.codePointAt(at));
      symbols.push({ piece, fixed: defined !== undefined, before: symbols.length - 1, after: symbols.length + 1 });
      at += piece.length;
    }
    if (symbols.length) symbols.at(-1).after = -1;
    const offer = (left, right) => {
      if (left < 0 || right < 0 || symbols[left].fixed || symbols[right].fixed) return;
      const piece = symbols[left].piece + symbols[right].piece, id = this.merges.get(piece);
      if (id !== undefined) heap.push({ left, right, piece, score: this.list[id].score });
    };
    for (let i = 1; i < symbols.length; i++) offer(i - 1, i);
    for (let best; (best = heap.pop()); ) {
      const left = symbols[best.left], right = symbols[best.right];
      if (!left.piece || !right.piece || left.piece + right.piece !== best.piece) continue;
      left.piece = best.piece;
      right.piece = "";
      left.after = right.after;
      if (right.after >= 0) symbols[right.after].before = best.left;
      offer(left.before, best.left);
      offer(best.left, left.after);
    }
    return symbols.filter(({ piece }) => piece).flatMap(({ piece }) => this.unmerged(piece));
  }

  // An unused piece stands for the two pieces that it was merged from.
  unmerged(piece) {
    const id = this.merges.get(piece);
    if (id === undefined || this.list[id].type !== UNUSED) return [piece];
    for (let cut = 1; cut < piece.length; cut++) {
      const [left, right] = [piece.slice(0, cut), piece.slice(cut)];
      if (this.merges.has(left) && this.merges.has(right)) return [...this.unmerged(left), ...this.unmerged(right)];
    }
    return [...piece];
  }
}

class Heap {
  constructor(compare) {
    this.items = [];
    this.compare = compare;
  }

  push(item) {
    const { items, compare } = this;
    let at = items.push(item) - 1;
    for (let up; at && compare(item, items[(up = (at - 1) >> 1)]) < 0; at = up) items[at] = items[up];
    items[at] = item;
  }

  pop() {
    const { items, compare } = this, top = items[0], last = items.pop();
    if (!items.length) return top;
    let at = 0;
    for (let down; (down = 2 * at + 1) < items.length; at = down) {
      if (down + 1 < items.length && compare(items[down + 1], items[down]) < 0) down++;
      if (compare(items[down], last) >= 0) break;
      items[at] = items[down];
    }
    items[at] = last;
    return top;
  }
}

// SentencePiece's normalizer: replacements by a double-array trie, white space, and marks for spaces.
class Normalizer {
  constructor(settings) {
    this.prefix = settings[3] ?? 1;
    this.collapses = settings[4] ?? 1;
    const map = settings[2];
    this.identity = !map?.length && !this.prefix && !this.collapses;
    if (!map?.length) return;
    const view = new DataView(map.buffer, map.byteOffset, map.byteLength), size = view.getUint32(0, true);
    this.units = Array.from({ length: size / 4 }, (_, i) => view.getUint32(4 + 4 * i, true));
    this.texts = map.subarray(4 + size);
  }

  // The longest match at `at`: [bytes, replacement], or null.
  match(bytes, at) {
    let node = 0, found = null;
    const offset = (unit) => (unit >>> 10) << ((unit & 512) >>> 6);
    node ^= offset(this.units[0]);
    for (let i = at; i < bytes.length; i++) {
      node ^= bytes[i];
      const unit = this.units[node];
      if (unit === undefined || (unit & 0x800000ff) >>> 0 !== bytes[i]) break;
      node ^= offset(unit);
      if ((unit >>> 8) & 1) found = [i + 1 - at, this.units[node] & 0x7fffffff];
    }
    if (!found) return null;
    let end = found[1];
    while (this.texts[end]) end++;
    return [found[0], this.texts.subarray(found[1], end)];
  }

  replaced(text, symbols) {
    if (!this.units) return text;
    const bytes = utf8.encode(text), parts = [], defined = symbols.map((symbol) => utf8.encode(symbol));
    for (let at = 0; at < bytes.length; ) {
      const symbol = defined.find((one) => one.every((byte, i) => bytes[at + i] === byte));
      const lead = bytes[at], wide = symbol ? symbol.length : lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
      const [length, to] = (symbol ? null : this.match(bytes, at)) ?? [wide, bytes.subarray(at, at + wide)];
      parts.push(to);
      at += length;
    }
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(joined(parts));
  }

  apply(given, symbols) {
    let text = this.replaced(given, symbols);
    if (this.collapses) text = text.replace(/^ +| +$/g, "").replace(/ +/g, " ");
    if (!given || (this.collapses && !text)) return "";
    return (this.prefix ? " " + text : text).replaceAll(" ", MARK);
  }
}

// CaseOps: capitals as marks before small letters (`caseops.py`).
class CaseOps {
  constructor(of) {
    Object.assign(this, { of, pieces: of.pieces, note: of.note });
  }

  encode(text) {
    const [TITLE, ALLCAPS, NEXT, ESC] = "\ue001\ue002\ue003\ue004";
    const marked = text.replace(/[A-Za-z]+|[\ue001-\ue004]/g, (word) => {
      if (word >= TITLE) return ESC + word;
      if (!/[A-Z]/.test(word)) return word;
      if (word.length > 1 && word === word.toUpperCase()) return ALLCAPS + word.toLowerCase();
      const rest = word.slice(1).replace(/[A-Z]/g, (capital) => NEXT + capital.toLowerCase());
      return (/[A-Z]/.test(word[0]) ? TITLE + word[0].toLowerCase() : word[0]) + rest;
    });
    return this.of.encode(marked);
  }

  decode(ids) {
    const [title, allcaps, next, esc] = ["\x81", "\x82", "\x83", "\x84"].map((last) => "\xee\x80" + last);
    const any = "\xee\x80[\x81-\x84]", word = `${allcaps}((?:(?:${next})?[A-Za-z])+)`;
    const coded = new RegExp(`${esc}(${any})|${word}|(?:${title}|${next})([A-Za-z])|${any}`, "g");
    // Bytes are written as characters of the same number, since pieces may end within a mark.
    const latin = Array.from(this.of.decode(ids), (byte) => String.fromCharCode(byte)).join("");
    const decoded = latin.replace(coded, (_, literal = "", word = "", letter = "") =>
      literal || (word || letter).replaceAll(next, "").toUpperCase());
    return Uint8Array.from(decoded, (character) => character.charCodeAt(0));
  }
}

// Open the tokenizer of an artifact; for kinds that the page cannot read itself, it holds the `pieces` in base64.
function openTokenizer(kind, data, { vocabulary, pieces }, decodeBase64) {
  if (kind === "bytes") return new RawBytes(0, vocabulary);
  if (kind === "bytes260") return new RawBytes(4, vocabulary);
  if (kind === "sentencepiece") return new SentencePiece(data);
  if (kind === "caseops") return new CaseOps(new SentencePiece(data));
  return new LongestPieces(pieces.map(decodeBase64));
}
