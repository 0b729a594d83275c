// Convolutions of any form: as products of matrices whose rows are positions, straight from the images and the
// weights. torch brings weights into another order first, which for the few images of a user's batch is most of
// a layer's time.
//
// Letters: n images, h x w positions, c channels in, k channels out. Images are [n][h][w][c], weights
// [k][high][wide][c]; c and k are multiples of 32.

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "vectors.h"

struct Form {
  long n, h, w, c, k, high, wide, stride, top, left, down, across;  // kernel high x wide; outputs down x across
  Form(long n, long h, long w, long c, long k, long high, long wide, long stride, long top, long left)
      : n(n), h(h), w(w), c(c), k(k), high(high), wide(wide), stride(stride), top(top), left(left),
        down((h + 2 * top - high) / stride + 1), across((w + 2 * left - wide) / stride + 1) {}
  long taps() const { return high * wide; }
};
// For each row of a product, at[tap * rows + row] is the row of the other images that the tap meets there, or -1,
// and own[row] its own. Rows of the same position of all images stand together: they meet the same taps.
struct Meetings {
  std::vector<int> own, at;
  long rows;
  Meetings(const Form& o, bool of_inputs) {
    const long high = of_inputs ? o.h : o.down, wide = of_inputs ? o.w : o.across, step = of_inputs ? o.stride : 1;
    rows = o.n * high * wide;
    own.resize(rows), at.assign(o.taps() * rows, -1);
    long row = 0;
    for (long y = 0; y < high; y++)
      for (long phase = 0; phase < step; phase++)
        for (long x = phase; x < wide; x += step)
          for (long image = 0; image < o.n; image++, row++) {
            own[row] = int((image * high + y) * wide + x);
            for (long i = 0; i < o.high; i++)
              for (long j = 0; j < o.wide; j++) {
                long yy = of_inputs ? y + o.top - i : y * o.stride - o.top + i;
                long xx = of_inputs ? x + o.left - j : x * o.stride - o.left + j;
                if (of_inputs) {
                  if (yy % o.stride || xx % o.stride) continue;
                  yy /= o.stride, xx /= o.stride;
                }
                const long most_y = of_inputs ? o.down : o.h, most_x = of_inputs ? o.across : o.w;
                if (yy >= 0 && xx >= 0 && yy < most_y && xx < most_x)
                  at[(i * o.wide + j) * rows + row] = int((image * most_y + yy) * most_x + xx);
              }
          }
  }
};
// to[own[row]][0..WIDE] = sum over taps and r of from[at[tap][row]][r] * panel[tap][r][0..WIDE], R rows from row on.
template <int R> static void meet(const Meetings& m, long row, long taps, const float* from, long depth,
                                  const float* panel, const float* zeros, float* to, long width) {
  vec sum[R][2] = {};
  for (long tap = 0; tap < taps; tap++) {
    const int* at = m.at.data() + tap * m.rows + row;
    const float* a[R];
    bool any = false;
    for (int i = 0; i < R; i++) a[i] = at[i] < 0 ? zeros : from + long(at[i]) * depth, any |= at[i] >= 0;
    const float* b = panel + tap * depth * WIDE;
    for (long r = 0; any && r < depth; r += 2, b += 2 * WIDE) {  // two: fewer addresses to load
      vec b0 = load(b), b1 = load(b + L), b2 = load(b + WIDE), b3 = load(b + WIDE + L);
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        const float* from = a[i] + r;
        vec one = from[0] - vec{}, two = from[1] - vec{};
        sum[i][0] += one * b0, sum[i][1] += one * b1;
        sum[i][0] += two * b2, sum[i][1] += two * b3;
      }
    }
  }
  for (int i = 0; i < R; i++) {
    float* p = to + long(m.own[row + i]) * width;
    store(p, sum[i][0]), store(p + L, sum[i][1]);
  }
}
static void meet_all(const Meetings& m, long taps, const float* from, long depth, const float* panel,
                     const float* zeros, float* to, long width) {
  long row = 0;
#if defined(__AVX512F__)
  for (; row + 12 <= m.rows; row += 12) meet<12>(m, row, taps, from, depth, panel, zeros, to, width);
  for (; row + 8 <= m.rows; row += 8) meet<8>(m, row, taps, from, depth, panel, zeros, to, width);
#endif
  for (; row + 4 <= m.rows; row += 4) meet<4>(m, row, taps, from, depth, panel, zeros, to, width);
  for (; row < m.rows; row++) meet<1>(m, row, taps, from, depth, panel, zeros, to, width);
}
// dw[0..R][.][c0..c0+WIDE] of one tap (+)= sum over count pairs of rows of e[.][0..R] * x[.][0..WIDE]
template <int R> static inline void pair_up(const int* es, const int* xs, long count, const float* e, long k,
                                            const float* x, long c, float* dw, long apart, bool add) {
  vec sum[R][2];
  for (int i = 0; i < R; i++)
    sum[i][0] = add ? load(dw + i * apart) : vec{}, sum[i][1] = add ? load(dw + i * apart + L) : vec{};
  for (long q = 0; q < count; q++) {
    const float *a = e + es[q] * k, *b = x + xs[q] * c;
    vec b0 = load(b), b1 = load(b + L);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      vec one = a[i] - vec{};
      sum[i][0] += one * b0, sum[i][1] += one * b1;
    }
  }
  for (int i = 0; i < R; i++) store(dw + i * apart, sum[i][0]), store(dw + i * apart + L, sum[i][1]);
}
static float* nothing(long size) {
  float* zeros = scratch(3, size);
  memset(zeros, 0, size * sizeof(float));
  return zeros;
}

// y = w * x, w [k][high][wide][c], y [n][down][across][k]
static void direct(const float* x, const float* w, float* y, const Form& o) {
  const Meetings m(o, false);
  const long c = o.c, k = o.k, size = o.taps() * c;
  float *panel = scratch(0, size * WIDE), *zeros = nothing(c);
  for (long k0 = 0; k0 < k; k0 += WIDE) {
    for (long half = 0; half < WIDE; half += L)
      for (long q = 0; q < size; q += L) {
        vec square[L];
        for (int j = 0; j < L; j++) {
          const float* from = w + (k0 + half + j) * size + q;
          square[j] = load(from);
          __builtin_prefetch(from + 4 * L);
        }
        transpose(square);
        for (int j = 0; j < L; j++) store(panel + (q + j) * WIDE + half, square[j]);
      }
    meet_all(m, o.taps(), x, c, panel, zeros, y + k0, k);
  }
}

// From e, the gradient of y: dx and dw, each unless it is null.
static void direct_backward(const float* x, const float* e, const float* w, float* dx, float* dw, const Form& o) {
  const long c = o.c, k = o.k, taps = o.taps();
  if (dx) {
    const Meetings m(o, true);
    float *panel = scratch(0, taps * k * WIDE), *zeros = nothing(k);
    for (long c0 = 0; c0 < c; c0 += WIDE) {
      for (long i = 0; i < k; i++)
        for (long tap = 0; tap < taps; tap++) {
          const float* from = w + (i * taps + tap) * c + c0;
          float* to = panel + (tap * k + i) * WIDE;
          store(to, load(from)), store(to + L, load(from + L));
          __builtin_prefetch(from + 4 * taps * c), __builtin_prefetch(from + 4 * taps * c + L);
        }
      meet_all(m, taps, e, k, panel, zeros, dx + c0, c);
    }
  }
  if (dw) {
    const Meetings m(o, false);
    std::vector<int> es, xs;
    const long some = std::max(256L, (1L << 18) / (c + k));  // rows that stay in the cache for all taps
    for (long begin = 0; begin < m.rows; begin += some)
      for (long tap = 0; tap < taps; tap++) {
        es.clear(), xs.clear();
        for (long row = begin; row < std::min(begin + some, m.rows); row++) {
          const int at = m.at[tap * m.rows + row];
          if (at >= 0) es.push_back(m.own[row]), xs.push_back(at);
        }
        const long pairs = long(es.size());
        for (long first = 0; first == 0 || first < pairs; first += 256) {
          const long count = std::min(256L, pairs - first);
          const bool add = begin > 0 || first > 0;
          const int *a = es.data() + first, *b = xs.data() + first;
          for (long i = 0; i < k; i += 8)
            for (long c0 = 0; c0 < c; c0 += WIDE) {
              float* to = dw + (i * taps + tap) * c + c0;
#if defined(__AVX512F__)
              pair_up<8>(a, b, count, e + i, k, x + c0, c, to, taps * c, add);
#else
              pair_up<4>(a, b, count, e + i, k, x + c0, c, to, taps * c, add);
              pair_up<4>(a, b, count, e + i + 4, k, x + c0, c, to + 4 * taps * c, taps * c, add);
#endif
            }
        }
      }
  }
}
