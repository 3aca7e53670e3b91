// The operations of a model's forward, on `n` rows of a block of positions, in float32 with SIMD.
#include <wasm_simd128.h>
#include "base.h"

#define LOAD(p) wasm_v128_load(p)
#define FMA(sum, a, b) sum = wasm_f32x4_add(sum, wasm_f32x4_mul(a, b))

static float total(v128_t x) {
  return wasm_f32x4_extract_lane(x, 0) + wasm_f32x4_extract_lane(x, 1) + wasm_f32x4_extract_lane(x, 2) +
         wasm_f32x4_extract_lane(x, 3);
}

// Four dot products at once: four rows of the weight, one position.
static void four(const float *x, const float *a, const float *b, const float *c, const float *d, int count,
                 float *sums) {
  v128_t p = wasm_f32x4_splat(0), q = p, r = p, s = p;
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    v128_t of = LOAD(x + i);
    FMA(p, of, LOAD(a + i));
    FMA(q, of, LOAD(b + i));
    FMA(r, of, LOAD(c + i));
    FMA(s, of, LOAD(d + i));
  }
  sums[0] = total(p), sums[1] = total(q), sums[2] = total(r), sums[3] = total(s);
  for (; i < count; i++) sums[0] += x[i] * a[i], sums[1] += x[i] * b[i], sums[2] += x[i] * c[i], sums[3] += x[i] * d[i];
}

// Two rows of the weight for four positions, `wide` apart: sums[4 * row + position].
static void eight(const float *x, int wide, const float *a, const float *b, int count, float *sums) {
  v128_t found[8];
  for (int k = 0; k < 8; k++) found[k] = wasm_f32x4_splat(0);
  int i = 0;
#pragma clang loop unroll(disable)
  for (; i + 4 <= count; i += 4) {
    v128_t p = LOAD(a + i), q = LOAD(b + i);
#pragma clang loop unroll(full)
    for (int k = 0; k < 4; k++) {
      v128_t of = LOAD(x + k * wide + i);
      FMA(found[k], p, of);
      FMA(found[4 + k], q, of);
    }
  }
  for (int k = 0; k < 8; k++) {
    sums[k] = total(found[k]);
    for (int j = i; j < count; j++) sums[k] += x[(k & 3) * wide + j] * (k < 4 ? a : b)[j];
  }
}

static float dot(const float *x, const float *y, int count) {
  v128_t sum = wasm_f32x4_splat(0);
  int i = 0;
  for (; i + 4 <= count; i += 4) FMA(sum, LOAD(x + i), LOAD(y + i));
  float rest = total(sum);
  for (; i < count; i++) rest += x[i] * y[i];
  return rest;
}

// y (n, outputs) = x (n, inputs of `wide`) Wᵀ, W (outputs, inputs).
EXPORT(linear) void linear(float *y, const float *x, int wide, const float *w, int inputs, int outputs, int n) {
  float sums[8];
  int t = 0;
  for (; t + 4 <= n; t += 4)
    for (int o = 0; o < outputs; o += 2) {
      int second = o + 1 < outputs;
      const float *row = w + o * inputs;
      eight(x + t * wide, wide, row, row + second * inputs, inputs, sums);
      for (int k = 0; k < 4; k++) {
        y[(t + k) * outputs + o] = sums[k];
        if (second) y[(t + k) * outputs + o + 1] = sums[4 + k];
      }
    }
  for (; t < n; t++) {
    int o = 0;
    for (; o + 4 <= outputs; o += 4) {
      const float *at = w + o * inputs;
      four(x + t * wide, at, at + inputs, at + 2 * inputs, at + 3 * inputs, inputs, y + t * outputs + o);
    }
    for (; o < outputs; o++) y[t * outputs + o] = dot(x + t * wide, w + o * inputs, inputs);
  }
}

static float root_mean_square(const float *x, int width, float epsilon) {
  return 1 / __builtin_sqrtf(dot(x, x, width) / width + epsilon);
}

EXPORT(norm) void norm(float *y, const float *x, int width, int rows, float epsilon, float scale) {
  for (int t = 0; t < rows; t++, x += width, y += width) {
    float by = root_mean_square(x, width, epsilon) * scale;
    for (int i = 0; i < width; i++) y[i] = x[i] * by;
  }
}

// y = c·x by channel, added to y where `more`.
EXPORT(scaled) void scaled(float *y, const float *x, const float *c, int width, int n, int more) {
  for (int t = 0; t < n; t++, x += width, y += width) {
    int i = 0;
    for (; i + 4 <= width; i += 4) {
      v128_t sum = more ? LOAD(y + i) : wasm_f32x4_splat(0);
      FMA(sum, LOAD(c + i), LOAD(x + i));
      wasm_v128_store(y + i, sum);
    }
    for (; i < width; i++) y[i] = (more ? y[i] : 0) + c[i] * x[i];
  }
}

static void add(float *y, const float *x, float by, int count) {
  v128_t factor = wasm_f32x4_splat(by);
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    v128_t sum = LOAD(y + i);
    FMA(sum, factor, LOAD(x + i));
    wasm_v128_store(y + i, sum);
  }
  for (; i < count; i++) y[i] += by * x[i];
}

// e^x, by the powers of two and a polynomial on [-ln 2 / 2, ln 2 / 2].
static float exponential(float x) {
  if (x < -87) return 0;
  if (x > 88) x = 88;
  float whole = __builtin_rintf(x * 1.44269504f);
  float r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  float p = 1 + r * (1 + r * (0.5f + r * (0.16666667f + r * (0.041666668f + r * (0.008333334f + r * 0.0013888889f)))));
  union { i32 bits; float value; } power = {((i32)whole + 127) << 23};
  return p * power.value;
}

static float sigmoid_of(float x) { return 1 / (1 + exponential(-x)); }

// u², or (slope·u)² below zero.
EXPORT(squared) void squared(float *y, const float *x, int count, float slope) {
  for (int i = 0; i < count; i++) {
    float u = x[i] > 0 ? x[i] : slope * x[i];
    y[i] = u * u;
  }
}

EXPORT(swiglu) void swiglu(float *y, const float *gate, const float *up, int count) {
  for (int i = 0; i < count; i++) y[i] = gate[i] * sigmoid_of(gate[i]) * up[i];
}

// height · σ(slope · x + bias).
EXPORT(sigmoid) void sigmoid(float *y, const float *x, const float *bias, int width, int n, float slope, float height) {
  for (int t = 0; t < n; t++)
    for (int i = 0; i < width; i++) {
      float logit = slope * x[t * width + i] + (bias ? bias[i] : 0);
      y[t * width + i] = height * sigmoid_of(logit);
    }
}

// Each group of `size` channels times its gate.
EXPORT(gated) void gated(float *y, const float *x, const float *gates, int groups, int size, int n) {
  for (int g = 0; g < groups * n; g++)
    for (int i = 0; i < size; i++) y[g * size + i] = gates[g] * x[g * size + i];
}

// Norm, rotate the leading channels by the tables of n positions (n, half), and multiply each head by its gain.
EXPORT(rotate) void rotate(float *y, const float *x, const float *cosine, const float *sine, const float *gain,
                           int heads, int size, int half, int n, float epsilon) {
  for (int t = 0; t < n; t++, cosine += half, sine += half)
    for (int h = 0; h < heads; h++, x += size, y += size) {
      float by = root_mean_square(x, size, epsilon) * (gain ? gain[h] : 1);
      for (int i = 0; i < half; i++) {
        float u = x[i] * by, w = x[half + i] * by;
        y[i] = u * cosine[i] + w * sine[i];
        y[half + i] = w * cosine[i] - u * sine[i];
      }
      for (int i = 2 * half; i < size; i++) y[i] = x[i] * by;
    }
}

// Attention of n queries at positions from `first` on; `low` is the first position that each may see.
EXPORT(attention) void attention(float *y, const float *q, const float *k, const float *v, const i32 *low, float *logits,
                                 int first, int n, int heads, int shared, int size) {
  float scale = 1 / __builtin_sqrtf((float)size);
  int wide = shared * size;
  for (int t = 0; t < n; t++)
    for (int h = 0; h < heads; h++, q += size, y += size) {
      const float *keys = k + h / (heads / shared) * size, *values = v + h / (heads / shared) * size;
      float most = -3e38f, sum = 0;
      for (int s = low[t]; s <= first + t; s++) {
        logits[s] = dot(q, keys + s * wide, size) * scale;
        if (logits[s] > most) most = logits[s];
      }
      for (int i = 0; i < size; i++) y[i] = 0;
      for (int s = low[t]; s <= first + t; s++) {
        float share = exponential(logits[s] - most);
        sum += share;
        add(y, values + s * wide, share, size);
      }
      for (int i = 0; i < size; i++) y[i] /= sum;
    }
}

// Remove from each head its projection on the position's own value.
EXPORT(exclude) void exclude(float *y, const float *v, int heads, int shared, int size, int n) {
  for (int t = 0; t < n; t++, v += shared * size)
    for (int h = 0; h < heads; h++, y += size) {
      const float *value = v + h / (heads / shared) * size;
      float length = __builtin_sqrtf(dot(value, value, size));
      if (length < 1e-12f) length = 1e-12f;
      float along = dot(y, value, size) / length;
      for (int i = 0; i < size; i++) y[i] -= along * (value[i] / length);
    }
}

EXPORT(softcap) void softcap(float *x, int count, float cap, int polynomial) {
  for (int i = 0; i < count; i++) {
    float u = x[i] / cap;
    if (polynomial) {
      u = u < -2 ? -2 : u > 2 ? 2 : u;
      float square = u * u;
      u *= 1 - square / 3 + square * square / 15;
      x[i] = cap * (u < -1 ? -1 : u > 1 ? 1 : u);
    } else {
      x[i] = cap * (1 - 2 / (exponential(2 * u) + 1));
    }
  }
}
