// Zstandard (RFC 8878): frames without the magic number.
#include "base.h"

// Bits are read from the end of a stream to its beginning, and zeros before it; `left` is then negative.
typedef struct { const u8 *from; i64 left; } Back;

static int open_back(Back *b, const u8 *from, u32 length) {
  if (!length || !from[length - 1]) return 0;
  b->from = from, b->left = 8 * (i64)length - (__builtin_clz(from[length - 1]) - 24) - 1;
  return 1;
}

static u32 peek(const Back *b, int n) {
  u64 value = 0;
  i64 low = b->left - n;
  for (i64 at = low >> 3; at <= (b->left - 1) >> 3 && n; at++)
    if (at >= 0) {
      i64 shift = 8 * at - low;
      value |= shift >= 0 ? (u64)b->from[at] << shift : (u64)b->from[at] >> -shift;
    }
  return (u32)(value & ((1ull << n) - 1));
}

static u32 back(Back *b, int n) {
  u32 value = peek(b, n);
  b->left -= n;
  return value;
}

typedef struct { u8 symbol, bits; u16 base; } State;
typedef struct { int log; State states[512]; } Fse;

static int build_fse(Fse *f, const i16 *shares, int symbols, int log) {
  u32 size = 1u << log, high = size, at = 0;
  u16 next[256];
  f->log = log;
  for (int s = 0; s < symbols; s++) {
    next[s] = shares[s] < 0 ? 1 : (u16)shares[s];
    if (shares[s] < 0) f->states[--high].symbol = (u8)s;
  }
  for (int s = 0; s < symbols; s++)
    for (int i = 0; i < shares[s]; i++) {
      f->states[at].symbol = (u8)s;
      do at = (at + (size >> 1) + (size >> 3) + 3) & (size - 1); while (at >= high);
    }
  if (at) return 0;
  for (u32 i = 0; i < size; i++) {
    u32 state = next[f->states[i].symbol]++;
    f->states[i].bits = (u8)(log - (31 - __builtin_clz(state)));
    f->states[i].base = (u16)((state << f->states[i].bits) - size);
  }
  return 1;
}

static u32 forward(const u8 *from, u32 length, u32 at, int n) {
  u32 value = 0;
  for (int i = 0; i < n; i++, at++)
    if (at >> 3 < length) value |= (u32)(from[at >> 3] >> (at & 7) & 1) << i;
  return value;
}

// Read the description of a table; return its bytes, or 0.
static u32 read_fse(Fse *f, const u8 *from, u32 length, int most_log, int most_symbols) {
  i16 shares[256];
  u32 at = 4;
  int log = forward(from, length, 0, 4) + 5, left = (1 << log) + 1, limit = 1 << log, wide = log + 1, s = 0;
  if (!length || log > most_log) return 0;
  while (left > 1 && s < most_symbols) {
    int most = 2 * limit - 1 - left, low = forward(from, length, at, wide - 1), value = low;
    if (low < most) at += wide - 1;
    else {
      value = forward(from, length, at, wide);
      if (value >= limit) value -= most;
      at += wide;
    }
    value--;
    left -= value < 0 ? 1 : value;
    shares[s++] = (i16)value;
    if (!value)
      for (u32 more = 3; more == 3;) {
        more = forward(from, length, at, 2), at += 2;
        for (u32 i = 0; i < more; i++) {
          if (s >= most_symbols) return 0;
          shares[s++] = 0;
        }
      }
    while (left < limit) wide--, limit >>= 1;
  }
  u32 bytes = (at + 7) >> 3;
  return left == 1 && bytes <= length && build_fse(f, shares, s, log) ? bytes : 0;
}

typedef struct { int log; u8 symbols[2048], bits[2048]; } Huffman;

typedef struct {
  Huffman huffman;
  Fse tables[3];  // lengths of literals, offsets, lengths of matches
  int ready[3];
  u32 offsets[3];
  u8 *literals;
  u32 literal_count;
} Frame;

// Read a Huffman code; return its bytes, or 0.
static u32 read_huffman(Huffman *h, const u8 *from, u32 length) {
  u8 weights[256] = {0};
  u32 count = 0, bytes;
  if (!length) return 0;
  if (from[0] >= 128) {
    count = from[0] - 127, bytes = 1 + (count + 1) / 2;
    if (bytes > length) return 0;
    for (u32 i = 0; i < count; i++) weights[i] = i & 1 ? from[1 + i / 2] & 15 : from[1 + i / 2] >> 4;
  } else {
    static Fse f;
    Back b;
    bytes = 1 + from[0];
    if (bytes > length) return 0;
    u32 used = read_fse(&f, from + 1, from[0], 6, 256);
    if (!used || !open_back(&b, from + 1 + used, from[0] - used)) return 0;
    u32 states[2] = {back(&b, f.log), back(&b, f.log)};
    if (b.left < 0) return 0;
    for (int turn = 0;; turn ^= 1) {
      State *s = f.states + states[turn];
      if (count > 253) return 0;
      weights[count++] = s->symbol;
      if (b.left < s->bits) { weights[count++] = f.states[states[turn ^ 1]].symbol; break; }
      states[turn] = s->base + back(&b, s->bits);
    }
  }
  u32 sum = 0, at = 0;
  for (u32 i = 0; i < count; i++) {
    if (weights[i] > 11) return 0;
    sum += weights[i] ? 1u << (weights[i] - 1) : 0;
  }
  if (!sum) return 0;
  int log = 32 - __builtin_clz(sum);
  u32 left = (1u << log) - sum;
  if (log > 11 || left & (left - 1)) return 0;
  weights[count++] = (u8)(32 - __builtin_clz(left));
  h->log = log;
  for (int weight = 1; weight <= log; weight++)
    for (u32 s = 0; s < count; s++)
      if (weights[s] == weight)
        for (u32 i = 0; i < 1u << (weight - 1); i++, at++) h->symbols[at] = (u8)s, h->bits[at] = (u8)(log + 1 - weight);
  return bytes;
}

static int read_stream(const Huffman *h, const u8 *from, u32 length, u8 *to, u32 count) {
  Back b;
  if (!open_back(&b, from, length)) return 0;
  for (u32 i = 0; i < count; i++) {
    u32 at = peek(&b, h->log);
    to[i] = h->symbols[at], b.left -= h->bits[at];
    if (b.left < 0) return 0;
  }
  return b.left == 0;
}

// Read the literals of a block; return the bytes of their section, or 0.
static u32 read_literals(Frame *f, const u8 *from, u32 length, u32 room) {
  if (length < 1) return 0;
  int kind = from[0] & 3, form = from[0] >> 2 & 3;
  u64 head = 0;
  for (u32 i = 0; i < 5 && i < length; i++) head |= (u64)from[i] << 8 * i;
  if (kind < 2) {
    u32 bytes = form == 1 ? 2 : form == 3 ? 3 : 1;
    u32 count = form & 1 ? head >> 4 & (form == 1 ? 0xfff : 0xfffff) : head >> 3 & 31;
    u32 held = kind ? 1 : count;
    if (count > room || bytes + held > length) return 0;
    for (u32 i = 0; i < count; i++) f->literals[i] = from[bytes + (kind ? 0 : i)];
    f->literal_count = count;
    return bytes + held;
  }
  int wide = form < 2 ? 10 : form == 2 ? 14 : 18;
  u32 bytes = form < 2 ? 3 : form == 2 ? 4 : 5, ones = (1u << wide) - 1;
  u32 count = head >> 4 & ones, held = head >> (4 + wide) & ones;
  if (count > room || bytes + held > length) return 0;
  u32 code = 0;
  if (kind == 2 && !(code = read_huffman(&f->huffman, from + bytes, held))) return 0;
  if (!f->huffman.log) return 0;
  const u8 *at = from + bytes + code;
  u32 rest = held - code;
  f->literal_count = count;
  if (!form) return read_stream(&f->huffman, at, rest, f->literals, count) ? bytes + held : 0;
  if (rest < 6) return 0;
  u32 sizes[4], quarter = (count + 3) / 4, sum = 6;
  for (int i = 0; i < 3; i++) sum += sizes[i] = at[2 * i] | at[2 * i + 1] << 8;
  if (sum > rest || 3 * quarter > count) return 0;
  sizes[3] = rest - sum, at += 6;
  for (int i = 0; i < 4; at += sizes[i++]) {
    u32 each = i < 3 ? quarter : count - 3 * quarter;
    if (!read_stream(&f->huffman, at, sizes[i], f->literals + i * quarter, each)) return 0;
  }
  return bytes + held;
}

static const i16 usual_literals[36] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2,
                                       2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
static const i16 usual_offsets[29] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                      -1, -1, -1, -1, -1};
static const i16 usual_matches[53] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                      1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};
static const i16 *const usual[3] = {usual_literals, usual_offsets, usual_matches};
static const u8 usual_counts[3] = {36, 29, 53}, usual_logs[3] = {6, 5, 6};
static const u8 most_logs[3] = {9, 8, 9}, most_symbols[3] = {36, 32, 53};
static const u8 literal_extra[20] = {1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static const u8 match_extra[21] = {1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

static u32 code_base(u32 code, u32 first, const u8 *extra) {
  u32 value = first;
  for (u32 i = first; i < code; i++) value += 1u << extra[i - first];
  return value;
}

static u32 offset_of(Frame *f, u32 value, u32 literals) {
  u32 *last = f->offsets;
  if (value > 3) {
    last[2] = last[1], last[1] = last[0], last[0] = value - 3;
    return last[0];
  }
  u32 which = value - 1 + !literals, offset = which == 3 ? last[0] - 1 : last[which];
  if (which > 1) last[2] = last[1];
  if (which) last[1] = last[0], last[0] = offset;
  return offset;
}

// Decode a block to `to` from `at` on; return where it ends, or 0 for a damaged one.
static u32 block(Frame *f, const u8 *from, u32 length, u8 *to, u32 at, u32 size) {
  u32 used = read_literals(f, from, length, size - at), begin = at, next = 0;
  if (!used || used >= length) return 0;
  from += used, length -= used;
  u32 count = from[0], bytes = 1;
  if (count == 255 && length > 2) count = from[1] + (from[2] << 8) + 0x7f00, bytes = 3;
  else if (count >= 128 && length > 1) count = ((count - 128) << 8) + from[1], bytes = 2;
  if (count) {
    if (bytes >= length) return 0;
    u8 modes = from[bytes++];
    for (int i = 0; i < 3; i++) {
      int mode = modes >> (6 - 2 * i) & 3;
      Fse *table = f->tables + i;
      if (mode == 0) build_fse(table, usual[i], usual_counts[i], usual_logs[i]);
      if (mode == 1) {
        if (bytes >= length || from[bytes] >= most_symbols[i]) return 0;
        table->log = 0, table->states[0] = (State){from[bytes++], 0, 0};
      }
      if (mode == 2) {
        u32 described = read_fse(table, from + bytes, length - bytes, most_logs[i], most_symbols[i]);
        if (!described) return 0;
        bytes += described;
      }
      if (mode == 3 && !f->ready[i]) return 0;
      f->ready[i] = 1;
    }
    Back b;
    if (!open_back(&b, from + bytes, length - bytes)) return 0;
    u32 states[3];
    for (int i = 0; i < 3; i++) states[i] = back(&b, f->tables[i].log);
    for (u32 n = 0; n < count; n++) {
      u32 literals = f->tables[0].states[states[0]].symbol, power = f->tables[1].states[states[1]].symbol;
      u32 match = f->tables[2].states[states[2]].symbol;
      if (power > 30) return 0;
      u32 value = (1u << power) + back(&b, power);
      match = match < 32 ? match + 3 : code_base(match, 32, match_extra) + 3 + back(&b, match_extra[match - 32]);
      if (literals > 15) literals = code_base(literals, 16, literal_extra) + back(&b, literal_extra[literals - 16]);
      u32 offset = offset_of(f, value, literals);
      if (n + 1 < count) {
        static const int order[3] = {0, 2, 1};
        for (int i = 0; i < 3; i++) {
          State *s = f->tables[order[i]].states + states[order[i]];
          states[order[i]] = s->base + back(&b, s->bits);
        }
      }
      if (b.left < 0 || literals > f->literal_count - next || literals > size - at) return 0;
      for (; literals; literals--) to[at++] = f->literals[next++];
      if (!offset || offset > at || match > size - at) return 0;
      for (; match; match--, at++) to[at] = to[at - offset];
    }
    if (b.left) return 0;
  } else if (length != 1) {
    return 0;
  }
  if (f->literal_count - next > size - at) return 0;
  while (next < f->literal_count) to[at++] = f->literals[next++];
  return at > begin ? at : 0;
}

int decode_zstd(const u8 *from, u32 length, u8 *to, u32 size) {
  if (!length) return !size;
  const u8 *end = from + length;
  u8 head = *from++;
  u32 sized = head >> 6, single = head >> 5 & 1;
  from += !single + (1 << (head & 3) >> 1) + (sized ? 1 << sized : single);
  Frame *f = take(sizeof *f);
  __builtin_memset(f, 0, sizeof *f);
  f->offsets[0] = 1, f->offsets[1] = 4, f->offsets[2] = 8;
  f->literals = take(1 << 17);
  for (u32 at = 0;;) {
    if (end - from < 3) return 0;
    u32 header = from[0] | from[1] << 8 | from[2] << 16, count = header >> 3, kind = header >> 1 & 3;
    from += 3;
    if (kind == 1 ? end - from < 1 : (u32)(end - from) < count) return 0;
    if (kind < 2) {
      if (count > size - at) return 0;
      for (u32 i = 0; i < count; i++) to[at++] = from[kind ? 0 : i];
      from += kind ? 1 : count;
    } else {
      if (kind == 3) return 0;
      u32 room = size - at < 1 << 17 ? size : at + (1 << 17);
      if (!(at = block(f, from, count, to, at, room))) return 0;
      from += count;
    }
    if (header & 1) return at == size && from + (head & 4) == end;
  }
}
