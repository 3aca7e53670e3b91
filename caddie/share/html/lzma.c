// LZMA2, raw: the coder inside xz (Igor Pavlov's LZMA specification).
#include "base.h"

typedef struct {
  const u8 *from, *end;
  u32 range, code;
  u8 *to;
  u32 at, start, size;
  int bad, lc, lp, pb, state;
  u32 last[4];
  u16 match[12][16], rep[12], rep0[12], rep1[12], rep2[12], rep0_long[12][16];
  u16 slots[4][64], distances[128], align[16];
  u16 lengths[2][2 + 16 * 8 + 16 * 8 + 256], literals[0x300 << 4];
} Decoder;

static int bit(Decoder *d, u16 *odds) {
  u32 bound = (d->range >> 11) * *odds;
  int one = d->code >= bound;
  if (one) d->code -= bound, d->range -= bound, *odds -= *odds >> 5;
  else d->range = bound, *odds += (2048 - *odds) >> 5;
  if (d->range < 1u << 24) {
    if (d->from >= d->end) { d->bad = 1; return 0; }
    d->range <<= 8, d->code = d->code << 8 | *d->from++;
  }
  return one;
}

static u32 tree(Decoder *d, u16 *odds, int wide) {
  u32 node = 1;
  for (int i = 0; i < wide; i++) node = node << 1 | bit(d, odds + node);
  return node - (1u << wide);
}

static u32 reverse(Decoder *d, u16 *odds, int wide) {
  u32 node = 1, value = 0;
  for (int i = 0; i < wide; i++) {
    int one = bit(d, odds + node);
    node = node << 1 | one, value |= one << i;
  }
  return value;
}

static u32 length_of(Decoder *d, u16 *odds, u32 place) {
  if (!bit(d, odds)) return 2 + tree(d, odds + 2 + 8 * place, 3);
  if (!bit(d, odds + 1)) return 10 + tree(d, odds + 2 + 128 + 8 * place, 3);
  return 18 + tree(d, odds + 2 + 256, 8);
}

static u32 distance_of(Decoder *d, u32 length) {
  u32 slot = tree(d, d->slots[length < 6 ? length - 2 : 3], 6);
  if (slot < 4) return slot;
  int extra = (slot >> 1) - 1;
  u32 base = (2 | (slot & 1)) << extra;
  if (slot < 14) return base + reverse(d, d->distances + base - slot, extra);
  u32 direct = 0;
  for (int i = 0; i < extra - 4; i++) {
    d->range >>= 1;
    u32 one = d->code >= d->range;
    if (one) d->code -= d->range;
    direct = direct << 1 | one;
    if (d->range < 1u << 24) {
      if (d->from >= d->end) { d->bad = 1; return 0; }
      d->range <<= 8, d->code = d->code << 8 | *d->from++;
    }
  }
  return base + (direct << 4) + reverse(d, d->align, 4);
}

static void literal(Decoder *d) {
  u32 place = d->at - d->start, before = place ? d->to[d->at - 1] : 0, node = 1;
  u16 *odds = d->literals + 0x300 * (((place & ((1u << d->lp) - 1)) << d->lc) + (before >> (8 - d->lc)));
  if (d->state >= 7) {
    if (d->last[0] >= place) { d->bad = 1; return; }
    u32 matched = d->to[d->at - d->last[0] - 1];
    while (node < 256) {
      u32 side = matched >> 7 & 1, one = bit(d, odds + ((1 + side) << 8) + node);
      matched <<= 1, node = node << 1 | one;
      if (one != side) break;
    }
  }
  while (node < 256) node = node << 1 | bit(d, odds + node);
  d->to[d->at++] = (u8)node;
  d->state = d->state < 4 ? 0 : d->state < 10 ? d->state - 3 : d->state - 6;
}

static void chunk(Decoder *d, u32 end) {
  while (d->at < end && !d->bad) {
    u32 place = (d->at - d->start) & ((1u << d->pb) - 1), length = 1;
    int s = d->state;
    if (!bit(d, &d->match[s][place])) { literal(d); continue; }
    if (!bit(d, &d->rep[s])) {
      length = length_of(d, d->lengths[0], place);
      d->last[3] = d->last[2], d->last[2] = d->last[1], d->last[1] = d->last[0];
      d->last[0] = distance_of(d, length);
      d->state = s < 7 ? 7 : 10;
    } else if (!bit(d, &d->rep0[s])) {
      int several = bit(d, &d->rep0_long[s][place]);
      if (several) length = length_of(d, d->lengths[1], place);
      d->state = several ? (s < 7 ? 8 : 11) : s < 7 ? 9 : 11;
    } else {
      int which = !bit(d, &d->rep1[s]) ? 1 : 2 + bit(d, &d->rep2[s]);
      u32 distance = d->last[which];
      for (; which; which--) d->last[which] = d->last[which - 1];
      d->last[0] = distance;
      length = length_of(d, d->lengths[1], place);
      d->state = s < 7 ? 8 : 11;
    }
    if (d->last[0] >= d->at - d->start || length > end - d->at) { d->bad = 1; return; }
    for (; length; length--, d->at++) d->to[d->at] = d->to[d->at - d->last[0] - 1];
  }
}

static void reset(Decoder *d) {
  for (u16 *odds = &d->match[0][0]; odds < d->literals + (0x300 << 4); odds++) *odds = 1024;
  d->state = 0;
  for (int i = 0; i < 4; i++) d->last[i] = 0;
}

int decode_lzma2(const u8 *from, u32 length, u8 *to, u32 size) {
  static Decoder d;
  const u8 *end = from + length;
  d.to = to, d.at = d.start = 0, d.bad = 0;
  while (from < end) {
    u8 control = *from++;
    if (!control) return from == end && d.at == size;
    if (end - from < (control < 128 ? 2 : 5)) return 0;
    u32 count = (from[0] << 8 | from[1]) + 1;
    if (control < 128) {
      if (control > 2) return 0;
      from += 2;
      if (control == 1) d.start = d.at;
      if (count > (u32)(end - from) || count > size - d.at) return 0;
      for (; count; count--) to[d.at++] = *from++;
      continue;
    }
    u32 packed = (from[2] << 8 | from[3]) + 1;
    int fresh = control >> 5 & 3;
    count += (control & 31) << 16, from += 4;
    if (fresh == 3) d.start = d.at;
    if (fresh > 1) {
      u8 settings = *from++;
      if (settings >= 225) return 0;
      d.lc = settings % 9, d.lp = settings / 9 % 5, d.pb = settings / 45;
      if (d.lc + d.lp > 4) return 0;
    }
    if (fresh) reset(&d);
    if (packed < 5 || packed > (u32)(end - from) || count > size - d.at) return 0;
    d.range = ~0u, d.code = (u32)from[1] << 24 | from[2] << 16 | from[3] << 8 | from[4];
    d.from = from + 5, d.end = from += packed;
    chunk(&d, d.at + count);
    if (d.bad || d.from != d.end) return 0;
  }
  return 0;
}
