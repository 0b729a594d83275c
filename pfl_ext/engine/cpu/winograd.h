// 3 x 3 convolutions with stride 1 and padding 1 by Winograd's minimal filtering F(4x4, 3x3) (Winograd 1980;
// Lavin & Gray, CVPR 2016): windows of 6 x 6 inputs give tiles of 4 x 4 outputs with 36 products per pair of
// channels instead of 144. The gradients are the exact adjoints of the same sums. The interpolation points are
// 0, +-3/4, +-3/2 and infinity: half the rounding error of the usual 0, +-1, +-2 (measured; after Barabasz et
// al. 2018, arXiv 1803.10986), and their powers are exact.
//
// Letters: n images, h x w positions, c channels in, k channels out, t tiles, f the 36 places of a transformed
// tile. Images are [n][h][w][c], weights [k][3][3][c]; c and k are multiples of 32.

#pragma once

#include <cstring>

#include "vectors.h"

constexpr int F = 36;

// --- Winograd's transforms, of one side; each pair is a matrix and its transpose, at strides s and t

constexpr float A = 0.75f, B = 1.5f, AA = A * A, BB = B * B, P = AA * BB, S = AA + BB;
constexpr float NA = 1 / (2 * AA * (AA - BB)), NB = 1 / (2 * BB * (BB - AA)), N0 = 1 / P;

static inline void window(const vec* x, int s, vec* y, int t) {  // 6 inputs -> 6
  vec ua = x[4 * s] - BB * x[2 * s], va = A * (x[3 * s] - BB * x[s]);
  vec ub = x[4 * s] - AA * x[2 * s], vb = B * (x[3 * s] - AA * x[s]);
  y[0] = P * x[0] - S * x[2 * s] + x[4 * s];
  y[t] = ua + va, y[2 * t] = ua - va, y[3 * t] = ub + vb, y[4 * t] = ub - vb;
  y[5 * t] = P * x[s] - S * x[3 * s] + x[5 * s];
}
static inline void window_adjoint(const vec* y, int s, vec* x, int t) {
  vec sa = y[s] + y[2 * s], da = A * (y[s] - y[2 * s]), sb = y[3 * s] + y[4 * s], db = B * (y[3 * s] - y[4 * s]);
  x[0] = P * y[0], x[t] = P * y[5 * s] - BB * da - AA * db, x[2 * t] = -S * y[0] - BB * sa - AA * sb;
  x[3 * t] = da + db - S * y[5 * s], x[4 * t] = y[0] + sa + sb, x[5 * t] = y[5 * s];
}
static inline void outputs(const vec* m, int s, vec* y, int t) {  // 6 -> 4 outputs
  vec sa = m[s] + m[2 * s], da = A * (m[s] - m[2 * s]), sb = m[3 * s] + m[4 * s], db = B * (m[3 * s] - m[4 * s]);
  y[0] = m[0] + sa + sb, y[t] = da + db, y[2 * t] = AA * sa + BB * sb, y[3 * t] = AA * da + BB * db + m[5 * s];
}
static inline void outputs_adjoint(const vec* e, int s, vec* y, int t) {
  vec ua = e[0] + AA * e[2 * s], va = A * (e[s] + AA * e[3 * s]);
  vec ub = e[0] + BB * e[2 * s], vb = B * (e[s] + BB * e[3 * s]);
  y[0] = e[0], y[t] = ua + va, y[2 * t] = ua - va, y[3 * t] = ub + vb, y[4 * t] = ub - vb, y[5 * t] = e[3 * s];
}
static inline void taps(const vec* w, int s, vec* u, int t) {  // 3 taps -> 6
  vec ua = NA * (w[0] + AA * w[2 * s]), va = (NA * A) * w[s], ub = NB * (w[0] + BB * w[2 * s]), vb = (NB * B) * w[s];
  u[0] = N0 * w[0], u[t] = ua + va, u[2 * t] = ua - va, u[3 * t] = ub + vb, u[4 * t] = ub - vb, u[5 * t] = w[2 * s];
}
static inline void taps_adjoint(const vec* u, int s, vec* w, int t) {
  vec sa = NA * (u[s] + u[2 * s]), da = (NA * A) * (u[s] - u[2 * s]);
  vec sb = NB * (u[3 * s] + u[4 * s]), db = (NB * B) * (u[3 * s] - u[4 * s]);
  w[0] = N0 * u[0] + sa + sb, w[t] = da + db, w[2 * t] = AA * sa + BB * sb + u[5 * s];
}
// From p x p to q x q: along both sides.
template <int p, int q, class One> static inline void both(const vec* x, vec* y, One one) {
  vec half[q * p];
  for (int j = 0; j < p; j++) one(x + j, p, half + j, p);
  for (int i = 0; i < q; i++) one(half + i * p, 1, y + i * q, 1);
}

// --- Matrix products

// c[i][0..WIDE] (+)= sum over r < depth of a[i * ai + r * ar] * b[r * br + 0..WIDE], for R rows i.
template <int R, bool ADD> static inline __attribute__((always_inline)) void product(
    const float* a, long ai, long ar, const float* b, long br, float* c, long ci, long depth) {
  vec sum[R][2];
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
    sum[i][0] = ADD ? load(c + i * ci) : vec{}, sum[i][1] = ADD ? load(c + i * ci + L) : vec{};
  for (long r = 0; r < depth; r++, a += ar, b += br) {
    vec b0 = load(b), b1 = load(b + L);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      vec one = a[i * ai] - vec{};
      sum[i][0] += one * b0, sum[i][1] += one * b1;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++) store(c + i * ci, sum[i][0]), store(c + i * ci + L, sum[i][1]);
}
template <bool ADD> static void product(const float* a, long ai, long ar, const float* b, long br, float* c,
                                        long ci, long depth, long rows) {  // rows: a multiple of 4
  long i = 0;
#if defined(__AVX512F__)
  for (; i + 12 <= rows; i += 12) product<12, ADD>(a + i * ai, ai, ar, b, br, c + i * ci, ci, depth);
  for (; i + 8 <= rows; i += 8) product<8, ADD>(a + i * ai, ai, ar, b, br, c + i * ci, ci, depth);
#endif
  for (; i < rows; i += 4) product<4, ADD>(a + i * ai, ai, ar, b, br, c + i * ci, ci, depth);
}

// --- Convolution

struct Shape {
  long n, h, w, c, k, down, across, tiles, block;  // block: tiles at a time
  Shape(long n, long h, long w, long c, long k)
      : n(n), h(h), w(w), c(c), k(k), down((h + 3) / 4), across((w + 3) / 4), tiles(n * down * across) {
    // What is between the transforms should stay in the cache; with many channels the weights' transforms must pay.
    long most = c + k <= 512 ? 64 : 128, parts = (tiles + most - 1) / most;
    block = ((tiles + parts - 1) / parts + 3) / 4 * 4;
  }
  bool whole() const { return block >= tiles; }
};
// Between the f planes of size floats: not at a power of two, where they would share a cache's sets.
static long apart(long size) { return size + 16; }

// A tile of SIDE x SIDE values that begins OFF before a multiple of 4: rows from[0] to before upto[0] and columns
// from[1] to before upto[1] of it lie in the image.
template <int SIDE, int OFF> struct Tile {
  long at, from[2], upto[2];  // at: of its first value, in positions from the first image's
  bool inside = true;
  Tile(const Shape& s, long tile) {
    const long begin[2] = {tile / s.across % s.down * 4 - OFF, tile % s.across * 4 - OFF}, size[2] = {s.h, s.w};
    at = (tile / s.across / s.down * s.h + begin[0]) * s.w + begin[1];
    for (int side = 0; side < 2; side++) {
      from[side] = begin[side] < 0 ? -begin[side] : 0;
      upto[side] = begin[side] + SIDE > size[side] ? size[side] - begin[side] : SIDE;
      inside = inside && upto[side] - from[side] == SIDE;
    }
  }
};
template <int SIDE, int OFF, class One> static void into(
    const float* from, const Shape& s, long first, long channels, float* to, One one) {
  const long plane = apart(s.block * channels), row = s.w * channels;
  for (long t = 0; t < s.block; t++, to += channels) {
    if (first + t >= s.tiles) {
      for (int f = 0; f < F; f++) memset(to + f * plane, 0, channels * sizeof(float));
      continue;
    }
    const Tile<SIDE, OFF> tile(s, first + t);
    const float* corner = from + tile.at * channels;
    vec edge[SIDE * SIDE] = {}, y[F];
    for (long q = 0; q < channels; q += L) {
      if (tile.inside) {
        vec x[SIDE * SIDE];
        for (int i = 0; i < SIDE; i++)
          for (int j = 0; j < SIDE; j++) x[i * SIDE + j] = load(corner + i * row + j * channels + q);
        both<SIDE, 6>(x, y, one);
      } else {
        for (long i = tile.from[0]; i < tile.upto[0]; i++)
          for (long j = tile.from[1]; j < tile.upto[1]; j++) edge[i * SIDE + j] = load(corner + i * row + j * channels + q);
        both<SIDE, 6>(edge, y, one);
      }
      for (int f = 0; f < F; f++) store(to + f * plane + q, y[f]);
    }
  }
}
template <int SIDE, int OFF, bool ADD, class One> static void out_of(
    const float* from, const Shape& s, long first, long channels, float* to, One one) {
  const long plane = apart(s.block * channels), row = s.w * channels;
  auto put = [](float* p, vec y) { store(p, ADD ? load(p) + y : y); };
  for (long t = 0; t < s.block && first + t < s.tiles; t++, from += channels) {
    const Tile<SIDE, OFF> tile(s, first + t);
    float* corner = to + tile.at * channels;
    for (long q = 0; q < channels; q += L) {
      vec x[F], y[SIDE * SIDE];
      for (int f = 0; f < F; f++) x[f] = load(from + f * plane + q);
      both<6, SIDE>(x, y, one);
      if (tile.inside)
        for (int i = 0; i < SIDE; i++)
          for (int j = 0; j < SIDE; j++) put(corner + i * row + j * channels + q, y[i * SIDE + j]);
      else
        for (long i = tile.from[0]; i < tile.upto[0]; i++)
          for (long j = tile.from[1]; j < tile.upto[1]; j++) put(corner + i * row + j * channels + q, y[i * SIDE + j]);
    }
  }
}
// WIDE columns of the transformed weights: u[f][c][WIDE] of outputs from k0 on, or u[f][k][WIDE] of inputs from c0.
static void for_outputs(const float* w, long c, long k0, float* u) {
  for (long half = 0; half < WIDE; half += L)
    for (long q = 0; q < c; q += L) {
      vec x[9][L], column[9], y[F];
      for (int i = 0; i < 9; i++) {
        for (int j = 0; j < L; j++) {
          const float* from = w + ((k0 + half + j) * 9 + i) * c + q;
          x[i][j] = load(from);
          __builtin_prefetch(from + 2 * L);
        }
        transpose(x[i]);
      }
      for (int j = 0; j < L; j++) {
        for (int i = 0; i < 9; i++) column[i] = x[i][j];
        both<3, 6>(column, y, taps);
        for (int f = 0; f < F; f++) store(u + f * apart(c * WIDE) + (q + j) * WIDE + half, y[f]);
      }
    }
}
static void for_inputs(const float* w, long c, long k, long c0, float* u) {
  for (long o = 0; o < k; o++)
    for (long half = 0; half < WIDE; half += L) {
      vec x[9], y[F];
      for (int i = 0; i < 9; i++) {
        x[i] = load(w + (o * 9 + i) * c + c0 + half);
        __builtin_prefetch(w + ((o + 4) * 9 + i) * c + c0 + half);
      }
      both<3, 6>(x, y, taps);
      for (int f = 0; f < F; f++) store(u + f * apart(k * WIDE) + o * WIDE + half, y[f]);
    }
}

// y = w * x
static void winograd(const float* x, const float* w, float* y, long n, long h, long width, long c, long k) {
  const Shape s(n, h, width, c, k);
  const long plane = apart(c * WIDE), panels = k / WIDE, tc = apart(s.block * c), tk = apart(s.block * k);
  float *v = scratch(0, F * tc), *m = scratch(1, F * tk), *u = scratch(2, F * plane * (s.whole() ? 1 : panels));
  for (long p = 0; p < panels && !s.whole(); p++) for_outputs(w, c, p * WIDE, u + p * F * plane);
  for (long first = 0; first < s.tiles; first += s.block) {
    into<6, 1>(x, s, first, c, v, window);
    for (long p = 0; p < panels; p++) {
      float* own = s.whole() ? u : u + p * F * plane;
      if (s.whole()) for_outputs(w, c, p * WIDE, own);
      for (int f = 0; f < F; f++)
        product<false>(v + f * tc, c, 1, own + f * plane, WIDE, m + f * tk + p * WIDE, k, c, s.block);
    }
    out_of<4, 0, false>(m, s, first, k, y, outputs);
  }
}

// From e, the gradient of y: dx and dw, each unless it is null.
static void winograd_backward(const float* x, const float* e, const float* w, float* dx, float* dw, long n, long h,
                              long width, long c, long k) {
  const Shape s(n, h, width, c, k);
  const long tc = apart(s.block * c), tk = apart(s.block * k), rows = s.whole() ? 32 : k;
  const long plane = apart(k * WIDE), panels = c / WIDE, own = apart(rows * c);
  float *v = scratch(0, F * tc), *d = scratch(1, F * tk), *u = nullptr, *g = nullptr;
  auto take = [&](long begin) {  // the gradients of the weights of these rows
    for (long o = 0; o < rows; o++)
      for (long q = 0; q < c; q += L) {
        vec t[F], y[9];
        for (int f = 0; f < F; f++) t[f] = load(g + f * own + o * c + q);
        both<6, 3>(t, y, taps_adjoint);
        for (int i = 0; i < 9; i++) store(dw + ((begin + o) * 9 + i) * c + q, y[i]);
      }
  };
  if (dx) {
    memset(dx, 0, n * h * width * c * sizeof(float));
    u = scratch(2, F * plane * (s.whole() ? 1 : panels));
    for (long p = 0; p < panels && !s.whole(); p++) for_inputs(w, c, k, p * WIDE, u + p * F * plane);
  }
  if (dw) {
    g = scratch(3, F * own);
    if (!s.whole()) memset(g, 0, F * own * sizeof(float));
  }
  for (long first = 0; first < s.tiles; first += s.block) {
    into<4, 0>(e, s, first, k, d, outputs_adjoint);
    if (dw) into<6, 1>(x, s, first, c, v, window);
    for (long begin = 0; dw && begin < k; begin += rows) {
      for (int f = 0; f < F; f++)
        for (long p = 0; p < c; p += WIDE) {
          const float *a = d + f * tk + begin, *b = v + f * tc + p;
          if (s.whole())
            product<false>(a, 1, k, b, c, g + f * own + p, c, s.block, rows);
          else
            product<true>(a, 1, k, b, c, g + f * own + p, c, s.block, rows);
        }
      if (s.whole()) take(begin);
    }
    for (long p = 0; dx && p < panels; p++) {
      float* mine = s.whole() ? u : u + p * F * plane;
      if (s.whole()) for_inputs(w, c, k, p * WIDE, mine);
      for (int f = 0; f < F; f++)
        product<false>(d + f * tk, k, 1, mine + f * plane, WIDE, v + f * tc + p * WIDE, c, k, s.block);
    }
    if (dx) out_of<6, 1, true>(v, s, first, c, dx, window_adjoint);
  }
  if (dw && !s.whole()) take(0);
}
