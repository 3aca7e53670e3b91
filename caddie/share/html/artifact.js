// Reading an artifact: `caddie/pack/container.py`, `coding/packed.py` and the dequantizers of `quantize/`.
"use strict";

const TYPES = { "|i1": Int8Array, "|u1": Uint8Array, "<i2": Int16Array, "<f2": Uint16Array, "<f4": Float32Array };
// Parity checks of a trellis's code, by its number of states.
const CHECKS = { 4: [0o5, 0o2], 8: [0o13, 0o4], 16: [0o23, 0o4], 32: [0o45, 0o10], 64: [0o103, 0o24] };
const CODECS = ["Stored", "Zlib", "Lzma", "Zstd", "Brotli"];

const product = (shape) => shape.reduce((a, b) => a * b, 1);

// Rows lie along the first axis; a vector is one column.
const codedShape = (shape) => [shape.length ? shape[0] : 1, product(shape.slice(1))];

// Rows lie along the last axis; a vector is one row.
const rowsShape = (shape) => (shape.length > 1 ? [product(shape.slice(0, -1)), shape.at(-1)] : [1, product(shape)]);

const sameBytes = (a, b) => a.length === b.length && a.every((byte, i) => byte === b[i]);

// Return the sections of an artifact by name; every byte is covered by a checksum.
async function readContainer(engine, blob) {
  const view = new DataView(blob.buffer, blob.byteOffset, blob.byteLength);
  const word = new TextDecoder().decode(blob.subarray(0, 6));
  if (blob.length < 52 || word !== "caddie" || view.getUint16(6, true) !== 1) throw new Damaged();
  const [packed, raw, sum] = [8, 12, 16].map((at) => view.getUint32(at, true));
  if (20 + packed + 32 > blob.length) throw new Damaged();
  if (!sameBytes(engine.sha256(blob.subarray(0, -32)), blob.subarray(-32))) throw new Damaged();
  const table = await engine.decode("Brotli", blob.subarray(20, 20 + packed), raw);
  if (engine.crc32(table) !== sum) throw new Damaged();
  const numbers = new DataView(table.buffer, table.byteOffset, table.byteLength);
  const count = numbers.getUint32(0, true);
  const column = (place, i) => numbers.getUint32(4 + 4 * (place * count + i), true);
  const words = new TextDecoder().decode(table.subarray(4 + 12 * count)).split("\n");
  const sections = new Map();
  let at = 20 + packed;
  for (let i = 0; i < count; i++) {
    const [stored, size, checksum] = [0, 1, 2].map((place) => column(place, i));
    const data = await engine.decode(words[count + i], blob.subarray(at, at + stored), size);
    if (engine.crc32(data) !== checksum) throw new Damaged();
    sections.set(words[i], data);
    at += stored;
  }
  return sections;
}

// Return the array of a coded stream, as typed numbers (half-precision ones as their bits).
async function readArray(engine, stream, dtype, shape) {
  const [rows, columns] = codedShape(shape);
  const Type = TYPES[dtype], count = rows * columns, item = Type.BYTES_PER_ELEMENT;
  if (stream[0] === 0) {
    const found = engine.scratch(() => {
      const to = engine.take(4 * count), from = engine.put(stream);
      const seal = engine.run.decode_entropy(from, stream.length, item, rows, columns, to) >>> 0;
      return { seal, array: Type.from(engine.i32(to, count)) };
    });
    if (found.seal !== (0x1000000 | engine.crc32(bytesOf(found.array)) >>> 8)) throw new Damaged();
    return found.array;
  }
  const number = (stream[0] - 1) >> 3, layout = (stream[0] - 1) & 7;
  const orderBytes = layout & 4 ? rows * (rows <= 65536 ? 2 : 4) : 0;
  const data = await engine.decode(CODECS[number], stream.subarray(4), orderBytes + count * item);
  let bytes = data.slice(orderBytes);
  if (layout & 2) {
    const flat = new Uint8Array(count * item);
    for (let i = 0; i < count; i++) for (let k = 0; k < item; k++) flat[i * item + k] = bytes[k * count + i];
    bytes = flat;
  }
  const flat = new Type(bytes.buffer), order = orderBytes ? orderOf(data, rows) : null, result = new Type(count);
  for (let i = 0; i < rows; i++) {
    const to = (order ? order[i] : i) * columns;
    for (let j = 0; j < columns; j++) result[to + j] = flat[layout & 1 ? j * rows + i : i * columns + j];
  }
  const sum = stream[1] | (stream[2] << 8) | (stream[3] << 16);
  if (engine.crc32(bytesOf(result)) >>> 8 !== sum) throw new Damaged();
  return result;
}

const bytesOf = (array) => new Uint8Array(array.buffer, array.byteOffset, array.byteLength);

function orderOf(data, rows) {
  const view = new DataView(data.buffer, data.byteOffset);
  const place = (i) => (rows <= 65536 ? view.getUint16(2 * i, true) : view.getUint32(4 * i, true));
  const order = Array.from({ length: rows }, (_, i) => place(i));
  if (order.some((row) => row >= rows)) throw new Damaged();
  return order;
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

// E4M3 without infinities.
function float8(bits) {
  const sign = bits & 128 ? -1 : 1, exponent = (bits >> 3) & 15, fraction = bits & 7;
  if (exponent === 15 && fraction === 7) return NaN;
  return sign * (exponent ? (1 + fraction / 8) * 2 ** (exponent - 7) : fraction * 2 ** -9);
}

const numbers = (array) => (array instanceof Uint16Array ? Float32Array.from(array, half) : array);

const DEQUANTIZERS = {
  Float32: (_, { values }) => values,
  Float16: (_, { values }) => numbers(values),
  Float8: (_, { values }) => Float32Array.from(values, float8),

  Rows({ bits }, { integers, packed, steps }, shape) {
    const count = product(shape), columns = rowsShape(shape)[1], by = numbers(steps), result = new Float32Array(count);
    const at = packed ? (i) => bitsAt(packed, i * bits, bits) - 2 ** (bits - 1) : (i) => integers[i];
    for (let i = 0; i < count; i++) result[i] = at(i) * by[Math.floor(i / columns)];
    return result;
  },

  Waterfilling(_, { row_steps, column_steps, integers, step }) {
    const powers = Float32Array.from([0, 1, 2, 3], (i) => 2 ** (i / 4));
    const columns = column_steps.length, result = new Float32Array(integers.length);
    for (let i = 0; i < result.length; i++) {
      const octaves = row_steps[Math.floor(i / columns)] + column_steps[i % columns];
      const size = Math.fround(powers[octaves & 3] * 2 ** (octaves >> 2) * step[0]);
      result[i] = integers[i] * size;
    }
    return result;
  },

  // An integer k stands for k + 1/4, or for -(k + 1/4) in an odd state; a chain is every n-th of the chained rows.
  Trellis({ states }, { integers, chained, ...rest }, shape) {
    const [rows, columns] = rowsShape(shape), [first, second] = CHECKS[states], points = Float32Array.from(integers);
    const along = [...chained.keys()].filter((i) => i < rows && chained[i]), apart = Math.ceil(along.length / 128);
    for (let j = 0; j < columns; j++)
      for (let begin = 0; begin < apart && chained[rows + j]; begin++)
        for (let i = begin, state = 0; i < along.length; i += apart) {
          const at = along[i] * columns + j, k = integers[at], odd = state & 1;
          points[at] = odd ? -(k + 0.25) : k + 0.25;
          state = (state >> 1) ^ (odd * (first >> 1)) ^ ((k & 1) * (second >> 1));
        }
    return DEQUANTIZERS.Waterfilling({}, { ...rest, integers: points });
  },

  Ternary({ group, keep_mean }, { integers, packed, steps }, shape) {
    const [rows, columns] = rowsShape(shape), by = numbers(steps), wide = Math.ceil(columns / group);
    const result = new Float32Array(rows * columns);
    for (let g = 0; g < rows * wide; g++) {
      const row = Math.floor(g / wide), first = (g % wide) * group, trits = new Int8Array(group);
      for (let i = 0; i < group; i++) {
        const at = g * group + i;
        if (packed) trits[i] = (Math.floor(packed[Math.floor(at / 5)] / 3 ** (at % 5)) % 3) - 1;
        else if (first + i < columns) trits[i] = integers[row * columns + first + i];
      }
      const share = trits.reduce((sum, trit) => sum + Math.abs(trit), 0) / group;
      const size = keep_mean ? by[g] / Math.max(share, 1e-8) : by[g];
      for (let i = 0; i < group && first + i < columns; i++) result[row * columns + first + i] = trits[i] * size;
    }
    return result;
  },

  Binary({ group }, { packed, steps }, shape) {
    const [rows, columns] = rowsShape(shape), by = numbers(steps), wide = Math.ceil(columns / group);
    const result = new Float32Array(rows * columns);
    for (let i = 0; i < result.length; i++) {
      const size = by[Math.floor(i / columns) * wide + Math.floor((i % columns) / group)];
      result[i] = bitsAt(packed, i, 1) ? size : -size;
    }
    return result;
  },

  LowRank({ of }, arrays, shape) {
    const result = Float32Array.from(dequantize(of, arrays, shape)), [rows, columns] = rowsShape(shape);
    const [left, right] = ["left", "right"].map((name) => {
      const steps = numbers(arrays[`${name}_steps`]), each = arrays[name].length / Math.max(steps.length, 1);
      return Float32Array.from(arrays[name], (integer, i) => integer * steps[Math.floor(i / each)]);
    });
    const rank = left.length / rows;
    for (let i = 0; i < rows; i++)
      for (let j = 0; j < columns; j++) {
        let sum = 0;
        for (let r = 0; r < rank; r++) sum += left[i * rank + r] * right[r * columns + j];
        result[i * columns + j] += sum;
      }
    return result;
  },

  // The fast Walsh-Hadamard transform of each block of columns, which is its own inverse.
  Rotated({ of }, arrays, shape) {
    const result = Float32Array.from(dequantize(of, arrays, shape));
    const columns = shape.length ? shape.at(-1) : 1, block = columns & -columns;
    for (let begin = 0; begin < result.length && block > 1; begin += block) {
      for (let apart = 1; apart < block; apart *= 2)
        for (let i = begin; i < begin + block; i++)
          if (!((i - begin) & apart)) {
            const [a, b] = [result[i], result[i + apart]];
            result[i] = a + b;
            result[i + apart] = a - b;
          }
      for (let i = begin; i < begin + block; i++) result[i] *= block ** -0.5;
    }
    return result;
  },
};

const dequantize = (quantizer, arrays, shape) => DEQUANTIZERS[quantizer.kind](quantizer, arrays, shape);

// Return the number in `count` bits of packed bytes from bit `at` on, lowest bit first.
function bitsAt(bytes, at, count) {
  let value = 0;
  for (let k = 0; k < count; k++) value |= ((bytes[(at + k) >> 3] >> ((at + k) & 7)) & 1) << k;
  return value;
}

// Read all weights of the page's list into the engine's memory; return name to address and shape.
async function readWeights(engine, sections, list, progress) {
  const weights = new Map(), total = list.reduce((sum, each) => sum + product(each.shape), 0);
  let done = 0;
  for (const { name, shape, quantizer, arrays } of list) {
    let section = sections.get(`weights/${name}`);
    if (!section) throw new Damaged();
    const found = {};
    for (const [key, dtype, arrayShape] of arrays) {
      const view = new DataView(section.buffer, section.byteOffset, section.byteLength);
      const length = section.length < 4 ? Infinity : view.getUint32(0, true);
      if (length > section.length - 4) throw new Damaged();
      found[key] = await readArray(engine, section.subarray(4, 4 + length), dtype, arrayShape);
      section = section.subarray(4 + length);
    }
    weights.set(name, { at: engine.put(Float32Array.from(dequantize(quantizer, found, shape))), shape });
    progress((done += product(shape)) / total);
  }
  return weights;
}
