// Brotli (RFC 7932). Its words and transforms, which are data of the standard, are filled in by the page.
#include "base.h"

enum { WORDS = 122784, AFFIXES = 217, TRANSFORMS = 121 };
static u8 words[WORDS + AFFIXES + 3 * TRANSFORMS];
EXPORT(brotli_words) u8 *brotli_words(void) { return words; }

typedef struct { const u8 *at, *end; u64 held; int count; int bad; } Bits;

static u32 bits(Bits *b, int n) {
  while (b->count < n) {
    if (b->at >= b->end) { b->bad = 1; return 0; }
    b->held |= (u64)*b->at++ << b->count;
    b->count += 8;
  }
  u32 value = (u32)(b->held & ((1ull << n) - 1));
  b->held >>= n, b->count -= n;
  return value;
}

// A prefix code: numbers of codes by length, and its symbols in canonical order; `only` if there is a single symbol.
typedef struct { u16 counts[16]; u16 *symbols; i32 only; } Code;

static u32 symbol(Bits *b, const Code *code) {
  if (code->only >= 0) return code->only;
  int value = 0, first = 0, index = 0;
  for (int length = 1; length < 16 && !b->bad; length++) {
    value |= bits(b, 1);
    int count = code->counts[length];
    if (value - count < first) return code->symbols[index + value - first];
    index += count, first = (first + count) << 1, value <<= 1;
  }
  b->bad = 1;
  return 0;
}

static void build(Code *code, const u8 *lengths, u32 size) {
  u32 used = 0, next[17] = {0};
  code->only = -1;
  __builtin_memset(code->counts, 0, sizeof code->counts);
  for (u32 i = 0; i < size; i++) code->counts[lengths[i]]++, used += lengths[i] != 0;
  code->counts[0] = 0;
  for (int i = 1; i < 16; i++) next[i + 1] = next[i] + code->counts[i];
  code->symbols = take(2 * (used + 1));
  for (u32 i = 0; i < size; i++)
    if (lengths[i]) {
      code->symbols[next[lengths[i]]++] = (u16)i;
      if (used == 1) code->only = i;
    }
}

static void read_code(Bits *b, Code *code, u32 size) {
  static const u8 order[18] = {1, 2, 3, 4, 0, 5, 17, 6, 16, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  static u8 lengths[1200];
  __builtin_memset(lengths, 0, sizeof lengths);
  int skip = bits(b, 2);
  if (skip == 1) {
    int count = bits(b, 2) + 1, wide = 0;
    u32 found[4];
    while ((size - 1) >> wide) wide++;
    for (int i = 0; i < count; i++) {
      if ((found[i] = bits(b, wide)) >= size) b->bad = 1;
      for (int j = 0; j < i; j++) if (found[i] == found[j]) b->bad = 1;
    }
    if (b->bad) return;
    static const u8 shapes[5][4] = {{1}, {1, 1}, {1, 2, 2}, {2, 2, 2, 2}, {1, 2, 3, 3}};
    int shape = count == 4 && bits(b, 1) ? 4 : count - 1;
    for (int i = 0; i < count; i++) lengths[found[i]] = shapes[shape][i];
  } else {
    u8 inner[18] = {0};
    int space = 32, used = 0;
    for (int i = skip; i < 18 && space > 0; i++) {
      int low = bits(b, 2), length = low == 0 ? 0 : low == 1 ? 4 : low == 2 ? 3 : !bits(b, 1) ? 2 : bits(b, 1) ? 5 : 1;
      inner[order[i]] = length;
      if (length) space -= 32 >> length, used++;
    }
    if (space != 0 && used != 1) { b->bad = 1; return; }
    Code code_of_lengths;
    build(&code_of_lengths, inner, 18);
    int left = 32768, last = 8, repeat = 0, repeated = 0;
    for (u32 i = 0; i < size && left > 0 && !b->bad;) {
      int value = symbol(b, &code_of_lengths);
      if (value < 16) {
        lengths[i++] = value, repeat = 0;
        if (value) last = value, left -= 32768 >> value;
        continue;
      }
      int extra = value - 14, again = value == 16 ? last : 0, before;
      if (repeated != again) repeat = 0, repeated = again;
      before = repeat;
      if (repeat) repeat = (repeat - 2) << extra;
      repeat += bits(b, extra) + 3;
      if (i + repeat - before > size) { b->bad = 1; return; }
      for (int k = before; k < repeat; k++) {
        lengths[i++] = again;
        if (again) left -= 32768 >> again;
      }
    }
    if (left != 0) b->bad = 1;
  }
  if (!b->bad) build(code, lengths, size);
}

static u32 small_count(Bits *b) {
  if (!bits(b, 1)) return 1;
  int n = bits(b, 3);
  return 1 + (1u << n) + bits(b, n);
}

static u32 read_map(Bits *b, u8 *map, u32 size) {
  u32 trees = small_count(b);
  __builtin_memset(map, 0, size);
  if (trees < 2) return trees;
  u32 longest = bits(b, 1) ? bits(b, 4) + 1 : 0;
  Code code;
  read_code(b, &code, trees + longest);
  for (u32 i = 0; i < size && !b->bad;) {
    u32 value = symbol(b, &code);
    if (value > longest) { map[i++] = (u8)(value - longest); continue; }
    u32 run = (1u << value) + bits(b, value);
    if (i + run > size) { b->bad = 1; return trees; }
    i += run;
  }
  if (bits(b, 1)) {
    u8 front[256];
    for (int i = 0; i < 256; i++) front[i] = (u8)i;
    for (u32 i = 0; i < size; i++) {
      u8 at = map[i], value = front[at];
      for (; at; at--) front[at] = front[at - 1];
      map[i] = front[0] = value;
    }
  }
  return trees;
}

// Types of blocks of literals, commands or distances, and how much is left of the current one.
typedef struct { u32 types, type, before, left; Code kinds, counts; } Blocks;

static u32 block_count(Bits *b, Blocks *of) {
  static const u16 base[26] = {1, 5, 9, 13, 17, 25, 33, 41, 49, 65, 81, 97, 113, 145, 177, 209, 241, 305, 369, 497, 753,
                               1265, 2289, 4337, 8433, 16625};
  static const u8 extra[26] = {2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 7, 8, 9, 10, 11, 12, 13, 24};
  u32 code = symbol(b, &of->counts);
  return b->bad ? 1 : base[code] + bits(b, extra[code]);
}

static void read_blocks(Bits *b, Blocks *of) {
  of->types = small_count(b), of->type = 0, of->before = 1, of->left = 1 << 28;
  if (of->types < 2 || b->bad) return;
  read_code(b, &of->kinds, of->types + 2);
  if (!b->bad) read_code(b, &of->counts, 26);
  if (!b->bad) of->left = block_count(b, of);
}

static void next_of(Bits *b, Blocks *of) {
  if (!of->left) {
    u32 code = symbol(b, &of->kinds), type = code == 0 ? of->before : code == 1 ? of->type + 1 : code - 2;
    if (type >= of->types) type -= of->types;
    if (type >= of->types) { b->bad = 1; return; }
    of->before = of->type, of->type = type, of->left = block_count(b, of);
  }
  of->left--;
}

static u8 text_class(u8 x) {
  static const u8 classes[96] = {
    8, 12, 16, 12, 12, 20, 12, 16, 24, 28, 12, 12, 32, 12, 36, 12, 44, 44, 44, 44, 44, 44, 44, 44, 44, 44, 32, 32, 24, 40,
    28, 12, 12, 48, 52, 52, 52, 48, 52, 52, 52, 48, 52, 52, 52, 52, 52, 48, 52, 52, 52, 52, 52, 48, 52, 52, 52, 52, 52, 24,
    12, 28, 12, 12, 12, 56, 60, 60, 60, 56, 60, 60, 60, 56, 60, 60, 60, 60, 60, 56, 60, 60, 60, 60, 60, 56, 60, 60, 60, 60,
    60, 24, 12, 28, 12, 0};
  if (x < 32) return x == 9 || x == 10 || x == 13 ? 4 : 0;
  return x < 128 ? classes[x - 32] : x < 192 ? x & 1 : 2 + (x & 1);
}

static u8 text_class_before(u8 x) {
  if (x < 33 || x == 127) return 0;
  if (x >= 128) return x < 224 ? 0 : 2;
  if (x >= 'a' && x <= 'z') return 3;
  return (x >= '0' && x <= '9') || (x >= 'A' && x <= 'Z') ? 2 : 1;
}

static u8 size_class(u8 x) {
  return x == 0 ? 0 : x < 16 ? 1 : x < 64 ? 2 : x < 128 ? 3 : x < 192 ? 4 : x < 240 ? 5 : x < 255 ? 6 : 7;
}

static u32 context(int mode, u8 last, u8 before) {
  return mode == 0 ? last & 63 : mode == 1 ? last >> 2 : mode == 2 ? text_class(last) | text_class_before(before)
       : size_class(last) << 3 | size_class(before);
}

static int upper(u8 *at) {
  if (at[0] < 0xc0) {
    if (at[0] >= 'a' && at[0] <= 'z') at[0] ^= 32;
    return 1;
  }
  if (at[0] < 0xe0) { at[1] ^= 32; return 2; }
  at[2] ^= 5;
  return 3;
}

// Return affix `number`: a byte for its length, then its bytes.
static const u8 *affix(u32 number) {
  const u8 *at = words + WORDS;
  for (; number; number--) at += 1 + *at;
  return at;
}

// Write word number `index` of the dictionary, transformed; return its length.
static u32 write_word(u8 *to, u32 length, u32 index) {
  static const u8 sizes[25] = {0, 0, 0, 0, 10, 10, 11, 11, 10, 10, 10, 10, 10, 9, 9, 8, 7, 7, 8, 7, 7, 6, 6, 5, 5};
  const u8 *from = words;
  if (length < 4 || length > 24 || index >> sizes[length] >= TRANSFORMS) return 0;
  for (u32 n = 4; n < length; n++) from += n << sizes[n];
  const u8 *rule = words + WORDS + AFFIXES + 3 * (index >> sizes[length]);
  const u8 *prefix = affix(rule[0]), *suffix = affix(rule[2]);
  u32 kind = rule[1], count = 0, skip = kind >= 12 ? kind - 11 : 0, drop = kind < 10 ? kind : 0;
  from += (index & ((1u << sizes[length]) - 1)) * length;
  for (int i = 1; i <= prefix[0]; i++) to[count++] = prefix[i];
  u32 start = count;
  for (u32 i = skip; i + drop < length; i++) to[count++] = from[i];
  if (kind == 10 && count > start) upper(to + start);
  if (kind == 11) for (u32 i = start; i < count;) i += upper(to + i);
  for (int i = 1; i <= suffix[0]; i++) to[count++] = suffix[i];
  return count;
}

static const u16 insert_base[24] = {0, 1, 2, 3, 4, 5, 6, 8, 10, 14, 18, 26, 34, 50, 66, 98, 130, 194, 322, 578, 1090, 2114,
                                    6210, 22594};
static const u8 insert_extra[24] = {0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 10, 12, 14, 24};
static const u16 copy_base[24] = {2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 18, 22, 30, 38, 54, 70, 102, 134, 198, 326, 582, 1094,
                                  2118};
static const u8 copy_extra[24] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 10, 24};

static i32 distance_of(Bits *b, u32 code, const i32 *last, u32 direct, u32 postfix) {
  static const u8 which[16] = {0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1};
  static const i8 by[16] = {0, 0, 0, 0, -1, 1, -2, 2, -3, 3, -1, 1, -2, 2, -3, 3};
  if (code < 16) return last[which[code]] + by[code];
  if (code < 16 + direct) return code - 15;
  u32 rest = code - direct - 16, high = rest >> postfix, extra = 1 + (high >> 1);
  u32 offset = ((2 + (high & 1)) << extra) - 4 + bits(b, extra);
  return (offset << postfix) + (rest & ((1u << postfix) - 1)) + direct + 1;
}

// Decode one compressed meta-block, from `at` up to `end`; return 1 if it is sound.
static int commands(Bits *b, u8 *to, u32 at, u32 end, u32 window, i32 *last) {
  Blocks literals, lengths, distances;
  read_blocks(b, &literals), read_blocks(b, &lengths), read_blocks(b, &distances);
  u32 postfix = bits(b, 2), direct = bits(b, 4) << postfix;
  static u8 modes[256], literal_map[256 * 64], distance_map[256 * 4];
  for (u32 i = 0; i < literals.types; i++) modes[i] = bits(b, 2);
  u32 literal_trees = read_map(b, literal_map, literals.types * 64);
  u32 distance_trees = b->bad ? 0 : read_map(b, distance_map, distances.types * 4);
  if (b->bad) return 0;
  Code *literal_codes = take(literal_trees * sizeof(Code)), *length_codes = take(lengths.types * sizeof(Code));
  Code *distance_codes = take(distance_trees * sizeof(Code));
  for (u32 i = 0; i < literal_trees && !b->bad; i++) read_code(b, literal_codes + i, 256);
  for (u32 i = 0; i < lengths.types && !b->bad; i++) read_code(b, length_codes + i, 704);
  for (u32 i = 0; i < distance_trees && !b->bad; i++) read_code(b, distance_codes + i, 16 + direct + (48 << postfix));
  while (at < end && !b->bad) {
    static const u8 insert_cell[9] = {0, 0, 8, 8, 0, 16, 8, 16, 16}, copy_cell[9] = {0, 8, 0, 8, 16, 0, 16, 8, 16};
    next_of(b, &lengths);
    u32 command = symbol(b, length_codes + lengths.type), cell = command >> 6, same = cell < 2;
    if (!same) cell -= 2;
    u32 insert = insert_cell[cell] + (command >> 3 & 7), copy = copy_cell[cell] + (command & 7);
    insert = insert_base[insert] + bits(b, insert_extra[insert]);
    copy = copy_base[copy] + bits(b, copy_extra[copy]);
    if (b->bad || insert > end - at) return 0;
    for (; insert; insert--) {
      next_of(b, &literals);
      u32 place = context(modes[literals.type], at ? to[at - 1] : 0, at > 1 ? to[at - 2] : 0);
      u8 tree = literal_map[literals.type * 64 + place];
      if (b->bad || tree >= literal_trees) return 0;
      to[at++] = (u8)symbol(b, literal_codes + tree);
    }
    if (at == end) break;
    u32 code = 0;
    if (!same) {
      next_of(b, &distances);
      u8 tree = distance_map[distances.type * 4 + (copy > 4 ? 3 : copy - 2)];
      if (b->bad || tree >= distance_trees) return 0;
      code = symbol(b, distance_codes + tree);
    }
    i32 distance = distance_of(b, code, last, direct, postfix), most = at < window ? at : window;
    if (b->bad || distance <= 0) return 0;
    if (distance > most) {
      u8 word[64];
      u32 count = write_word(word, copy, distance - most - 1);
      if (!count || count > end - at) return 0;
      for (u32 i = 0; i < count; i++) to[at++] = word[i];
      continue;
    }
    if (copy > end - at) return 0;
    if (code) last[3] = last[2], last[2] = last[1], last[1] = last[0], last[0] = distance;
    for (; copy; copy--, at++) to[at] = to[at - distance];
  }
  return !b->bad;
}

int decode_brotli(const u8 *from, u32 length, u8 *to, u32 size) {
  Bits b = {from, from + length, 0, 0, 0};
  int wide = 16, n, m;
  if (bits(&b, 1)) wide = (n = bits(&b, 3)) ? 17 + n : (m = bits(&b, 3)) ? 8 + m : 17;
  if (wide == 9) return 0;
  u32 at = 0, window = (1u << wide) - 16;
  i32 last[4] = {4, 11, 15, 16};
  for (int ends = 0; !ends && !b.bad;) {
    ends = bits(&b, 1);
    if (ends && bits(&b, 1)) break;
    u32 nibbles = bits(&b, 2) + 4, mark = heap_mark();
    if (nibbles == 7) {
      if (bits(&b, 1)) return 0;
      u32 bytes = bits(&b, 2), skip = bytes ? bits(&b, 8 * bytes) + 1 : 0;
      bits(&b, b.count & 7);
      for (; skip && !b.bad; skip--) bits(&b, 8);
      continue;
    }
    u32 count = bits(&b, 4 * nibbles) + 1;
    if (b.bad || count > size - at) return 0;
    if (!ends && bits(&b, 1)) {
      bits(&b, b.count & 7);
      for (u32 i = 0; i < count && !b.bad; i++) to[at + i] = (u8)bits(&b, 8);
    } else if (!commands(&b, to, at, at + count, window, last)) {
      return 0;
    }
    heap_reset(mark);
    at += count;
  }
  return !b.bad && at == size && b.at == b.end && b.count < 8;
}
