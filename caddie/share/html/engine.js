// The WebAssembly module: its memory, and the tables that its decoders need.
"use strict";

class Damaged extends Error {}

class Engine {
  static async open(module, words) {
    const { instance } = await WebAssembly.instantiate(module, {});
    const engine = new Engine();
    engine.run = instance.exports;
    engine.u8(engine.run.brotli_words(), words.length).set(words);
    // Entropy coding takes the whole part of these numbers; each is whole, or at least 0.0001 below the next whole number.
    const whole = (x) => Math.floor(x + 1e-5);
    const tables = engine.i32(engine.run.entropy_tables(), 1408 + 192 + 1024);
    for (let i = 0; i < 1408; i++) tables[i] = whole(2 ** 30 * Math.exp(-i / 64));
    for (let i = 0; i < 192; i++) tables[1408 + i] = whole(2 ** (27 - i / 8));
    for (let i = 0; i < 1024; i++) tables[1600 + i] = whole(64 * Math.log2(1024 + i));
    engine.run.entropy_prepare();
    return engine;
  }

  // A view lasts until the next `take`, which may move the memory.
  u8(at, count) {
    return new Uint8Array(this.run.memory.buffer, at, count);
  }

  i32(at, count) {
    return new Int32Array(this.run.memory.buffer, at, count);
  }

  f32(at, count) {
    return new Float32Array(this.run.memory.buffer, at, count);
  }

  take(bytes) {
    try {
      return this.run.take(bytes) >>> 0;
    } catch {
      throw new Error(`This device has too little memory for the model (${(bytes / 2 ** 20).toFixed(0)} MiB more).`);
    }
  }

  put(array) {
    const at = this.take(array.byteLength);
    this.u8(at, array.byteLength).set(new Uint8Array(array.buffer, array.byteOffset, array.byteLength));
    return at;
  }

  // Memory that `work` takes is freed when it ends.
  scratch(work) {
    const mark = this.run.heap_mark();
    try {
      return work();
    } finally {
      this.run.heap_reset(mark);
    }
  }

  crc32(bytes) {
    return this.scratch(() => this.run.crc32(this.put(bytes), bytes.length)) >>> 0;
  }

  sha256(bytes) {
    return this.scratch(() => {
      const digest = this.take(32);
      this.run.sha256(this.put(bytes), bytes.length, digest);
      return this.u8(digest, 32).slice();
    });
  }

  // Decode bytes by a codec of `caddie.pack.codecs` to exactly `size` bytes.
  async decode(codec, bytes, size) {
    if (codec === "Stored") {
      if (bytes.length !== size) throw new Damaged();
      return bytes;
    }
    if (codec === "Zlib") return inflate(bytes, size);
    const number = { Lzma: 2, Zstd: 3, Brotli: 4 }[codec];
    if (!number) throw new Damaged();
    return this.scratch(() => {
      const to = this.take(size);
      if (!this.run.decode(number, this.put(bytes), bytes.length, to, size)) throw new Damaged();
      return this.u8(to, size).slice();
    });
  }
}

async function inflate(bytes, size) {
  try {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    const found = new Uint8Array(await new Response(stream).arrayBuffer());
    if (found.length === size) return found;
  } catch {
    // thrown below
  }
  throw new Damaged();
}
