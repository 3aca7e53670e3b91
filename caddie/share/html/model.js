// The forward: a list of operations that Python wrote for this model (`caddie/share/program.py`), on blocks of
// positions.
"use strict";

const BLOCK = 16; // positions at a time
const EPSILON = 2 ** -23; // of float32; norms add it unless an operation names another
const HASH_FACTORS = [36313, 27191, 51497];

class Model {
  constructor(engine, weights, program) {
    Object.assign(this, { engine, weights, program, run: engine.run });
    this.length = program.length; // most positions of a row
    this.registers = new Map();
    for (const [name, width] of Object.entries(program.registers))
      this.registers.set(name, { at: engine.take(4 * width * BLOCK), width });
    this.states = []; // kept from block to block: [address, bytes]
    this.tables = new Map();
    this.low = engine.take(4 * BLOCK);
    this.odds = engine.take(4 * this.length);
    this.operations = program.operations.map(([kind, ...rest]) => this[kind](...rest));
    this.reset();
  }

  // Begin a row.
  reset() {
    this.first = 0;
    this.ids = [];
    this.documents = []; // position at which the document of each position begins
    for (const [at, bytes] of this.states) this.engine.u8(at, bytes).fill(0);
  }

  // Continue the row by at most BLOCK ids; return their logits, a view (n, vocabulary) that lasts until the next call.
  forward(ids) {
    const n = ids.length;
    for (const id of ids) {
      const here = this.ids.length;
      this.documents.push(id === this.program.bos || !here ? here : this.documents[here - 1]);
      this.ids.push(id);
    }
    for (const operation of this.operations) operation(n);
    this.first += n;
    const { at, width } = this.registers.get("logits");
    return this.engine.f32(at, n * width);
  }

  state(bytes) {
    const at = this.engine.take(bytes);
    this.states.push([at, bytes]);
    return at;
  }

  // A vector of `width` factors by channel: the product of numbers and of parts of parameters.
  factors(parts, width) {
    const result = new Float32Array(width).fill(1);
    for (const part of parts) {
      if (typeof part === "number") {
        for (let i = 0; i < width; i++) result[i] *= part;
        continue;
      }
      const [name, begin, count, form] = part, values = this.engine.f32(this.weights.get(name).at + 4 * begin, count);
      for (let i = 0; i < width; i++) {
        const value = values[count === 1 ? 0 : i], open = 1 / (1 + Math.exp(-value));
        result[i] *= form === "sigmoid" ? open : form === "closed" ? 1 - open : form === "rest" ? 1 - value : value;
      }
    }
    return this.engine.put(result);
  }

  at(name) {
    return this.registers.get(name).at;
  }

  gather(to, name, rowOf) {
    const { at, width } = this.registers.get(to), table = this.weights.get(name).at;
    return (n) => {
      for (let t = 0; t < n; t++) {
        const from = table + 4 * width * rowOf(this.first + t);
        this.engine.u8(0, this.run.memory.buffer.byteLength).copyWithin(at + 4 * width * t, from, from + 4 * width);
      }
    };
  }

  // Rows of a table by id.
  rows(to, name) {
    return this.gather(to, name, (position) => this.ids[position]);
  }

  // Rows of a table by the hash of the last `order` ids of the document; the last row where there are fewer.
  grams(to, name, order) {
    const count = this.weights.get(name).shape[0] - 1;
    return this.gather(to, name, (position) => {
      if (position - this.documents[position] < order - 1) return count;
      let hash = 0;
      for (let k = 0; k < order; k++) hash ^= Math.imul(HASH_FACTORS[k], this.ids[position - k]);
      return ((hash % count) + count) % count;
    });
  }

  // The previous position, zero where a row or a document begins.
  previous(to, from) {
    const { width } = this.registers.get(from), bytes = 4 * width, kept = this.state(bytes);
    return (n) => {
      const memory = this.engine.u8(0, this.run.memory.buffer.byteLength), [y, x] = [this.at(to), this.at(from)];
      memory.copyWithin(y, kept, kept + bytes);
      memory.copyWithin(y + bytes, x, x + bytes * (n - 1));
      memory.copyWithin(kept, x + bytes * (n - 1), x + bytes * n);
      for (let t = 0; t < n; t++)
        if (this.documents[this.first + t] === this.first + t) memory.fill(0, y + bytes * t, y + bytes * (t + 1));
    };
  }

  linear(to, from, name, begin, outputs) {
    const { at, shape } = this.weights.get(name), inputs = shape[1], wide = this.registers.get(from).width;
    const weight = at + 4 * begin * inputs, [y, x] = [this.at(to), this.at(from)];
    return (n) => this.run.linear(y, x, wide, weight, inputs, outputs, n);
  }

  norm(to, from, epsilon, scale) {
    const { width } = this.registers.get(from), [y, x] = [this.at(to), this.at(from)];
    return (n) => this.run.norm(y, x, width, n, epsilon ?? EPSILON, scale);
  }

  // The sum of registers, each times its factors.
  sum(to, terms) {
    const { at, width } = this.registers.get(to);
    const each = terms.map(([from, parts]) => [this.at(from), this.factors(parts, width)]);
    return (n) => each.forEach(([x, factors], i) => this.run.scaled(at, x, factors, width, n, i ? 1 : 0));
  }

  // Add a part of a parameter to every row.
  add(to, part) {
    const { at, width } = this.registers.get(to), added = this.factors([part], width);
    return (n) => {
      const [rows, by] = [this.engine.f32(at, n * width), this.engine.f32(added, width)];
      for (let i = 0; i < rows.length; i++) rows[i] += by[i % width];
    };
  }

  squared(to, from, slope) {
    const { width } = this.registers.get(from), [y, x] = [this.at(to), this.at(from)];
    return (n) => this.run.squared(y, x, width * n, slope);
  }

  swiglu(to, gate, up) {
    const { width } = this.registers.get(to), [y, g, u] = [to, gate, up].map((name) => this.at(name));
    return (n) => this.run.swiglu(y, g, u, width * n);
  }

  sigmoid(to, from, bias, slope, height) {
    const { width } = this.registers.get(to), [y, x] = [this.at(to), this.at(from)];
    const added = bias ? this.weights.get(bias).at : 0;
    return (n) => this.run.sigmoid(y, x, added, width, n, slope, height);
  }

  // Groups of channels, each times its gate.
  gated(to, from, gates, parts = []) {
    const groups = this.registers.get(gates).width, size = this.registers.get(to).width / groups;
    const [y, x, g] = [to, from, gates].map((name) => this.at(name)), factors = this.factors(parts, groups);
    return (n) => {
      this.run.scaled(g, g, factors, groups, n, 0);
      this.run.gated(y, x, g, groups, size, n);
    };
  }

  rotate(to, from, heads, frequencies, gain) {
    const { width } = this.registers.get(from), [y, x] = [this.at(to), this.at(from)], half = frequencies.length;
    const [cosine, sine] = this.angles(frequencies), by = gain ? this.weights.get(gain).at : 0;
    return (n) => {
      const skip = 4 * half * this.first;
      this.run.rotate(y, x, cosine + skip, sine + skip, by, heads, width / heads, half, n, EPSILON);
    };
  }

  // Cosines and sines of all positions, made once for all layers with these frequencies.
  angles(frequencies) {
    const key = frequencies.join();
    if (!this.tables.has(key)) {
      const angle = (i) => Math.fround(Math.floor(i / frequencies.length) * frequencies[i % frequencies.length]);
      const table = (form) => Float32Array.from({ length: this.length * frequencies.length }, (_, i) => form(angle(i)));
      this.tables.set(key, [this.engine.put(table(Math.cos)), this.engine.put(table(Math.sin))]);
    }
    return this.tables.get(key);
  }

  attention(to, query, key, value, heads, shared, window, inDocument, longest) {
    const { width } = this.registers.get(query), wide = this.registers.get(key).width, size = width / heads;
    const [keys, values] = [this.engine.take(4 * wide * this.length), this.engine.take(4 * wide * this.length)];
    const [y, q, k, v] = [to, query, key, value].map((name) => this.at(name));
    return (n) => {
      const memory = this.engine.u8(0, this.run.memory.buffer.byteLength), skip = 4 * wide * this.first;
      memory.copyWithin(keys + skip, k, k + 4 * wide * n);
      memory.copyWithin(values + skip, v, v + 4 * wide * n);
      const low = this.engine.i32(this.low, n);
      for (let t = 0; t < n; t++) {
        const position = this.first + t, document = inDocument ? this.documents[position] : 0;
        const cut = inDocument && longest ? position - ((position - document) % longest) : document;
        low[t] = Math.max(cut, window ? position - window + 1 : 0);
      }
      this.run.attention(y, q, keys, values, this.low, this.odds, this.first, n, heads, shared, size);
    };
  }

  exclude(to, value, heads, shared) {
    const { at, width } = this.registers.get(to), v = this.at(value);
    return (n) => this.run.exclude(at, v, heads, shared, width / heads, n);
  }

  softcap(to, cap, polynomial) {
    const { at, width } = this.registers.get(to);
    return (n) => this.run.softcap(at, n * width, cap, polynomial ? 1 : 0);
  }
}
