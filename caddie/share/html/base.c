// Heap, checksums, and the entry point of the general decompressors.
#include "base.h"

extern u8 __heap_base;
static u32 top;

EXPORT(take) void *take(u32 bytes) {
  if (!top) top = (u32)&__heap_base;
  u32 at = (top + 15) & ~15u;
  u64 end = (u64)at + bytes;
  u64 held = (u64)__builtin_wasm_memory_size(0) << 16;
  u32 pages = (u32)((end - held + 0xffff) >> 16);
  if (end > held && (end >> 32 || __builtin_wasm_memory_grow(0, pages) == (u32)-1)) __builtin_trap();
  top = (u32)end;
  return (void *)at;
}

EXPORT(heap_mark) u32 heap_mark(void) { return top; }

EXPORT(heap_reset) void heap_reset(u32 mark) { top = mark; }

EXPORT(crc32) u32 crc32(const u8 *data, u32 length) {
  static u32 table[256];
  if (!table[1])
    for (u32 i = 0; i < 256; i++) {
      u32 value = i;
      for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? 0xedb88320u : 0);
      table[i] = value;
    }
  u32 sum = ~0u;
  for (u32 i = 0; i < length; i++) sum = table[(sum ^ data[i]) & 255] ^ sum >> 8;
  return ~sum;
}

// SHA-256 (FIPS 180-4). Its constants are the first bits of the fractional parts of roots of primes.
static u32 fraction(double root) { return (u32)(u64)((root - (double)(u64)root) * 4294967296.0); }

static double cube_root(double n) {
  double x = n / 2;
  for (int i = 0; i < 60; i++) x -= (x * x * x - n) / (3 * x * x);
  return x;
}

static u32 turn(u32 x, int by) { return x >> by | x << (32 - by); }

static u32 big_endian(const u8 *at) { return (u32)at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3]; }

EXPORT(sha256) void sha256(const u8 *data, u32 length, u8 *digest) {
  static u32 k[64], start[8];
  if (!k[0]) {
    int found = 0;
    for (int n = 2; found < 64; n++) {
      int prime = 1;
      for (int d = 2; d * d <= n; d++) prime &= n % d != 0;
      if (!prime) continue;
      if (found < 8) start[found] = fraction(__builtin_sqrt(n));
      k[found++] = fraction(cube_root(n));
    }
  }
  u32 h[8];
  for (int i = 0; i < 8; i++) h[i] = start[i];
  u8 last[128] = {0};
  u32 rest = length & 63, blocks = length >> 6, tail = rest < 56 ? 1 : 2;
  for (u32 i = 0; i < rest; i++) last[i] = data[length - rest + i];
  last[rest] = 128;
  for (int i = 0; i < 8; i++) last[64 * tail - 1 - i] = (u8)((u64)length * 8 >> 8 * i);
  for (u32 block = 0; block < blocks + tail; block++) {
    const u8 *at = block < blocks ? data + 64 * block : last + 64 * (block - blocks);
    u32 w[64];
    for (int i = 0; i < 16; i++) w[i] = big_endian(at + 4 * i);
    for (int i = 16; i < 64; i++) {
      u32 a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + w[i - 7] + (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
    }
    u32 s[8];
    for (int i = 0; i < 8; i++) s[i] = h[i];
    for (int i = 0; i < 64; i++) {
      u32 e = s[4], a = s[0];
      u32 one = s[7] + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + k[i] + w[i];
      u32 two = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
      for (int j = 7; j; j--) s[j] = s[j - 1];
      s[4] += one;
      s[0] = one + two;
    }
    for (int i = 0; i < 8; i++) h[i] += s[i];
  }
  for (int i = 0; i < 32; i++) digest[i] = (u8)(h[i / 4] >> (24 - 8 * (i % 4)));
}

// Codecs by the numbers of `caddie.pack.coding.packed`; deflate is the browser's own.
EXPORT(decode) int decode(u32 codec, const u8 *from, u32 length, u8 *to, u32 size) {
  u32 mark = heap_mark();
  int whole = codec == 2 ? decode_lzma2(from, length, to, size)
            : codec == 3 ? decode_zstd(from, length, to, size)
            : codec == 4 ? decode_brotli(from, length, to, size) : 0;
  heap_reset(mark);
  return whole;
}
