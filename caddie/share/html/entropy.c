// Decoder of caddie's entropy coding of weights: `caddie/pack/coding/entropy_model.py`, `priors.py` and `symbols.py`,
// step by step. All arithmetic is on integers, so a file gives the same weights everywhere.
#include "base.h"

enum {
  PER_OCTAVE = 64, FRACTION = 12, LARGEST = 255, CONTEXTS = 64, PRIOR_BITS = 20, PRECISION = 24, WIDTHS = 6,
  DEVIATIONS = 192, EXPONENTIALS = 1408, BITS = 30, LEAST_OCTAVE = -8, STEP = 16, PRIOR_COUNT = 200,
  MOST_COUNT = 1 << 16, LEAST_TILE = 64, LARGEST_TILE = 1 << 15, GROWTH = 4, LEAST_COLUMNS = 4, RECENT_ROWS = 16,
  SEAL_BITS = 24
};

static i32 logs[1024];
static i32 priors[WIDTHS][CONTEXTS][LARGEST + 1];
static i32 tables[EXPONENTIALS + DEVIATIONS + 1024];

// Exponentials, factors of the exponents, and logarithms of 1,024 to 2,047, which the page fills in before `prepare`.
EXPORT(entropy_tables) i32 *entropy_tables(void) { return tables; }
EXPORT(entropy_priors) i32 *entropy_priors(void) { return &priors[0][0][0]; }

static i64 lg(u64 number) {
  if (number < 1) number = 1;
  int octave = 63 - __builtin_clzll(number);
  u32 mantissa = (u32)(octave > 10 ? number >> (octave - 10) : number << (10 - octave));
  return logs[mantissa - 1024] + PER_OCTAVE * (octave - 10);
}

static void normalize(const i64 *weights, i64 *shares, int bits) {
  i64 sum = -weights[0];
  for (int i = 0; i <= LARGEST; i++) sum += 2 * weights[i];
  for (int i = 0; i <= LARGEST; i++) shares[i] = (weights[i] << bits) / sum;
}

EXPORT(entropy_prepare) void prepare(void) {
  static i64 mixture[DEVIATIONS][LARGEST + 1], mixed[DEVIATIONS][LARGEST + 1];
  static const int distances[WIDTHS] = {4, 4, 6, 8, 12, 16};
  const i32 *exponentials = tables, *factors = tables + EXPONENTIALS;
  for (int i = 0; i < 1024; i++) logs[i] = tables[EXPONENTIALS + DEVIATIONS + i];
  for (int d = 0; d < DEVIATIONS; d++) {
    i64 weights[LARGEST + 1];
    for (i64 m = 0; m <= LARGEST; m++) {
      i64 at = (i64)factors[d] * m * m >> 16;
      weights[m] = exponentials[at < EXPONENTIALS ? at : EXPONENTIALS - 1];
    }
    normalize(weights, mixture[d], BITS);
  }
  for (int w = 0; w < WIDTHS; w++) {
    i64 means[DEVIATIONS];
    for (int d = 0; d < DEVIATIONS; d++) {
      int below = d - distances[w] < 0 ? 0 : d - distances[w];
      int above = d + distances[w] >= DEVIATIONS ? DEVIATIONS - 1 : d + distances[w];
      i64 sum = 0;
      for (int m = 0; m <= LARGEST; m++) {
        mixed[d][m] = (mixture[below][m] + 2 * mixture[d][m] + mixture[above][m]) >> 2;
        sum += mixed[d][m] * m;
      }
      means[d] = lg(2 * sum);
    }
    for (int c = 0; c < CONTEXTS; c++) {
      i64 wanted = c * STEP + (BITS + LEAST_OCTAVE) * PER_OCTAVE, least = 1ll << 60, shares[LARGEST + 1];
      int nearest = 0;
      for (int d = 0; d < DEVIATIONS; d++) {
        i64 apart = means[d] > wanted ? means[d] - wanted : wanted - means[d];
        if (apart < least) least = apart, nearest = d;
      }
      normalize(mixed[nearest], shares, PRIOR_BITS);
      for (int m = 0; m <= LARGEST; m++) priors[w][c][m] = (i32)shares[m] + 1;
    }
    __builtin_memcpy(mixture, mixed, sizeof mixture);
  }
}

static int width(i64 rows, i64 columns) {
  static const int variances[WIDTHS - 1] = {15, 30, 64, 124, 259};
  i64 of = 60 + 800 / rows + 800 / columns;
  int at = 0;
  while (at < WIDTHS - 1 && 3 * variances[at] < 2 * of) at++;  // borders are 1.5 times the variances
  return at;
}

// ANS with a state of 64 bits and words of 32: constriction's stack coder.
typedef struct { u64 state; const u8 *words; u32 left; int damaged; } Reader;

static u32 word(Reader *r) {
  const u8 *at = r->words + 4 * --r->left;
  return at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24;
}

// An undamaged stream is never shorter than its seal.
static int too_short(Reader *r) {
  if (!r->left && r->state >> (SEAL_BITS - 1) == 0) r->damaged = 1;
  return r->damaged;
}

static void advance(Reader *r, u32 begin, u32 share) {
  u32 quantile = (u32)r->state & ((1u << PRECISION) - 1);
  r->state = (r->state >> PRECISION) * share + (quantile - begin);
  if (!(r->state >> 32) && r->left) r->state = r->state << 32 | word(r);
}

static u8 byte(Reader *r) {
  if (too_short(r)) return 0;
  u32 value = (u32)r->state >> 16 & 255;
  advance(r, value << 16, 1 << 16);
  return (u8)value;
}

static const int trusts[4] = {1, 4, 16, 64};
typedef struct { int layout, columns, rows, skewed, centered; } Settings;

typedef struct {
  i32 *values;
  i64 rows, columns, most, symbols;
  Settings settings;
  i64 (*counts)[2 * LARGEST + 1];
  i64 totals[CONTEXTS];
  Reader *reader;
} Coder;

static void read_tile(Coder *c, i64 top, i64 bottom, i64 left, i64 right, const u8 *places, i32 *order, i64 *row_sums) {
  i64 wide = right - left, count = (bottom - top) * wide;
  i32 present[CONTEXTS] = {0}, next[CONTEXTS], seen = 0;
  for (i64 i = 0; i < count; i++) present[places[i]]++;
  for (int x = 0; x < CONTEXTS; x++) next[x] = seen, seen += present[x];
  for (i64 i = 0; i < count; i++) order[next[places[i]]++] = (i32)i;
  int mixture = width(top + trusts[c->settings.columns], left + trusts[c->settings.rows]);
  i64 at = 0;
  for (int x = 0; x < CONTEXTS; x++) {
    if (!present[x]) continue;
    i64 shares[2 * LARGEST + 1], sum = 0, free = (1 << PRECISION) - c->symbols, given = 0;
    u32 begins[2 * LARGEST + 2];
    i64 *counts = c->counts[x];
    for (i64 s = 0; s < c->symbols; s++) {
      i64 magnitude = s < c->most ? c->most - s : s - c->most;
      i64 seen_here = c->settings.skewed ? 2 * counts[s] : counts[s] + counts[c->symbols - 1 - s];
      shares[s] = (i64)priors[mixture][x][magnitude] * PRIOR_COUNT + (seen_here << (PRIOR_BITS - 1));
      sum += shares[s];
    }
    for (i64 s = 0; s < c->symbols; s++) given += shares[s] = shares[s] * free / sum;
    shares[c->symbols / 2] += free - given;
    begins[0] = 0;
    for (i64 s = 0; s < c->symbols; s++) begins[s + 1] = begins[s] + (u32)shares[s] + 1;
    if (too_short(c->reader)) return;
    for (i32 n = 0; n < present[x]; n++) {
      u32 quantile = (u32)c->reader->state & ((1u << PRECISION) - 1);
      i64 low = 0, high = c->symbols - 1;
      while (low < high) {
        i64 half = (low + high + 1) / 2;
        if (begins[half] <= quantile) low = half; else high = half - 1;
      }
      advance(c->reader, begins[low], begins[low + 1] - begins[low]);
      i32 where = order[at++], value = (i32)(low - c->most);
      c->values[(top + where / wide) * c->columns + left + where % wide] = value;
      row_sums[where / wide] += value < 0 ? -value : value;
      counts[low]++;
    }
    c->totals[x] += present[x];
    if (c->totals[x] > MOST_COUNT) {
      c->totals[x] = 0;
      for (i64 s = 0; s < c->symbols; s++) c->totals[x] += counts[s] >>= 1;
    }
  }
}

static void read_matrix(Coder *c, i64 mean) {
  i64 rows = c->rows, columns = c->columns, above = 0, recent = 4 * mean, recent_rows = 4;
  i64 *column_sums = take(8 * columns), *row_sums = take(8 * rows), *ratios = take(8 * columns);
  i64 *log_ratios = take(8 * columns), *passed = take(8 * (columns + 1));
  // A tile has at most twice the elements that it aims at.
  u8 *places = take(16 * LARGEST_TILE);
  i32 *order = take(64 * LARGEST_TILE);
  c->counts = take(CONTEXTS * sizeof *c->counts);
  __builtin_memset(c->counts, 0, CONTEXTS * sizeof *c->counts);
  __builtin_memset(c->totals, 0, sizeof c->totals);
  __builtin_memset(column_sums, 0, 8 * columns);
  i64 column_trust = trusts[c->settings.columns], row_trust = trusts[c->settings.rows];
  for (i64 top = 0; top < rows && !c->reader->damaged;) {
    i64 height = top / GROWTH, most = 4 * LARGEST_TILE / columns;
    if (height > most) height = most;
    if (height < 1) height = 1;
    i64 bottom = rows - top - height < height / 2 ? rows : top + height;
    height = bottom - top;
    i64 usual = recent / recent_rows, expected = column_trust * usual;
    passed[0] = 0;
    for (i64 j = 0; j < columns; j++) {
      i64 by = above + expected;
      ratios[j] = (((column_sums[j] << FRACTION) + expected) << FRACTION) / (by > 1 ? by : 1);
      log_ratios[j] = lg(ratios[j]) - FRACTION * PER_OCTAVE;
      passed[j + 1] = passed[j] + ratios[j];
    }
    __builtin_memset(row_sums, 0, 8 * height);
    for (i64 left = 0; left < columns && !c->reader->damaged;) {
      i64 wide = (LEAST_TILE + height - 1) / height, room = LARGEST_TILE / height;
      if (wide < LEAST_COLUMNS) wide = LEAST_COLUMNS;
      if (wide < left / GROWTH) wide = left / GROWTH;
      i64 right = left + (wide < (room > 1 ? room : 1) ? wide : (room > 1 ? room : 1));
      if (columns - right < wide / 2) right = columns;
      i64 beside = passed[left] + (row_trust << FRACTION), at = 0;
      if ((right - left) * height > 16 * LARGEST_TILE) { c->reader->damaged = 1; return; }
      for (i64 i = 0; i < height; i++) {
        i64 scale = lg((((row_sums[i] << FRACTION) + row_trust * usual) << FRACTION) / beside);
        for (i64 j = left; j < right; j++) {
          i64 steps = scale + log_ratios[j] - (FRACTION + LEAST_OCTAVE) * PER_OCTAVE + STEP / 2;
          i64 context = steps < 0 ? 0 : steps / STEP;
          places[at++] = (u8)(context < CONTEXTS ? context : CONTEXTS - 1);
        }
      }
      read_tile(c, top, bottom, left, right, places, order, row_sums);
      left = right;
    }
    i64 block = 0;
    for (i64 i = top; i < bottom; i++)
      for (i64 j = 0; j < columns; j++) {
        i32 value = c->values[i * columns + j];
        column_sums[j] += value < 0 ? -value : value;
      }
    for (i64 i = 0; i < height; i++) block += row_sums[i];
    block = (block << FRACTION) / columns;
    above += block;
    recent += block, recent_rows += height;
    if (recent_rows > RECENT_ROWS) recent = recent * RECENT_ROWS / recent_rows, recent_rows = RECENT_ROWS;
    top = bottom;
  }
}

static i64 root(u64 number) {
  i64 found = 0;
  for (i64 bit = 1ll << 31; bit; bit >>= 1)
    if ((u64)((found + bit) * (found + bit)) <= number) found += bit;
  return found;
}

// Read the excess of magnitudes beyond LARGEST, the last one with a probability of its own.
static void read_beyond(Reader *r, i32 *values, i64 count) {
  int size = byte(r);
  if (size > 8) { r->damaged = 1; return; }
  too_short(r);
  for (i64 i = 0; i < count; i++) {
    if (values[i] != LARGEST && values[i] != -LARGEST) continue;
    u64 beyond = 0;
    for (int k = 0; k < size && !r->damaged; k++) {
      u32 value = (u32)r->state >> 16 & 255;
      advance(r, value << 16, 1 << 16);
      beyond |= (u64)value << 8 * k;
    }
    values[i] += values[i] < 0 ? -(i32)beyond : (i32)beyond;
  }
}

// Decode a stream of `EntropyModel` for elements of `item` bytes into `to`, (rows, columns). The return value is the
// seal that ends the stream, whose low 24 bits are of the array's CRC-32; 0 for a damaged stream.
EXPORT(decode_entropy) u32 decode_entropy(const u8 *from, u32 length, i32 item, i32 rows, i32 columns, i32 *to) {
  if (length < 2 || !from[length - 1]) return 0;
  u32 mark = heap_mark(), bytes = length - 1, words = (bytes + 3) / 4;
  u8 *padded = take(4 * words);
  __builtin_memset(padded, 0, 4 * words);
  __builtin_memcpy(padded, from + 1, bytes);
  Reader r = {0, padded, words, 0};
  r.state = word(&r);
  if (r.left) r.state = r.state << 32 | word(&r);
  i64 count = (i64)rows * columns, center = 0;
  if (count) {
    int number = byte(&r);
    if (number >= 192) { heap_reset(mark); return 0; }
    Settings s = {number / 64, number / 16 % 4, number / 4 % 4, number / 2 % 2, number % 2};
    if (s.centered) {
      for (int k = 0; k <= item; k++) center |= (i64)byte(&r) << 8 * k;
      center = center << (56 - 8 * item) >> (56 - 8 * item);
    }
    i64 high = s.layout == 1 ? columns : rows, wide = s.layout == 1 ? rows : columns;
    i32 *values = take(4 * count);
    __builtin_memset(values, 0, 4 * count);
    i64 most = byte(&r);
    if (most) {
      Coder c = {values, high, wide, most, 2 * most + 1, s, 0, {0}, &r};
      int code = byte(&r);
      read_matrix(&c, root(1ull << (2 * (FRACTION - 8) + (code < 40 ? code : 40))));
    }
    if (most == LARGEST) read_beyond(&r, values, count);
    if (s.layout == 2)
      for (i64 i = wide; i < count; i++) values[i] += values[i - wide];
    for (i64 i = 0; i < rows; i++)
      for (i64 j = 0; j < columns; j++)
        to[i * columns + j] = values[s.layout == 1 ? j * rows + i : i * columns + j] + (i32)center;
  }
  heap_reset(mark);
  return r.damaged || r.left || r.state >> 32 ? 0 : (u32)r.state;
}
