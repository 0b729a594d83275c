// 3 x 3 convolutions with stride 1 and padding 1 by Winograd's minimal filtering F(4x4, 3x3) (Winograd 1980;
// Lavin & Gray, CVPR 2016): windows of 6 x 6 inputs give tiles of 4 x 4 outputs with 36 products per pair of
// channels instead of 144. The gradient of the weights is the exact adjoint of the same sums, that of the images such
// a convolution itself. The interpolation points are
// 0, +-3/4, +-3/2 and infinity: half the rounding error of the usual 0, +-1, +-2 (measured; after Barabasz et
// al. 2018, arXiv 1803.10986), and their powers are exact.
//
// Letters: n images, h x w positions, c channels in, k channels out, t tiles, f the 36 places of a transformed
// tile. Images are [n][h][w][c], weights [k][3][3][c]; c and k are multiples of 32.

#pragma once

#include <cstring>

#include "vectors.h"

constexpr int F = 36;

// --- Winograd's transforms, of one side; each pair is a matrix and its transpose, at strides s and t. None makes
// largest values larger than so many times: window 5.1, outputs 8.7, its adjoint 8.2, taps 1.25.

template <class V> struct Side {
  static constexpr Number<V> A = Number<V>(0.75f), B = Number<V>(1.5f), AA = A * A, BB = B * B, P = AA * BB, S = AA + BB;
  static constexpr Number<V> NA = 1 / (2 * AA * (AA - BB)), NB = 1 / (2 * BB * (BB - AA)), N0 = 1 / P;

  static inline void window(const V* x, int s, V* y, int t) {  // 6 inputs -> 6
    V ua = x[4 * s] - BB * x[2 * s], va = A * (x[3 * s] - BB * x[s]);
    V ub = x[4 * s] - AA * x[2 * s], vb = B * (x[3 * s] - AA * x[s]);
    y[0] = P * x[0] - S * x[2 * s] + x[4 * s];
    y[t] = ua + va, y[2 * t] = ua - va, y[3 * t] = ub + vb, y[4 * t] = ub - vb;
    y[5 * t] = P * x[s] - S * x[3 * s] + x[5 * s];
  }
  static inline void outputs(const V* m, int s, V* y, int t) {  // 6 -> 4 outputs
    V sa = m[s] + m[2 * s], da = A * (m[s] - m[2 * s]), sb = m[3 * s] + m[4 * s], db = B * (m[3 * s] - m[4 * s]);
    y[0] = m[0] + sa + sb, y[t] = da + db, y[2 * t] = AA * sa + BB * sb, y[3 * t] = AA * da + BB * db + m[5 * s];
  }
  static inline void outputs_adjoint(const V* e, int s, V* y, int t) {
    V ua = e[0] + AA * e[2 * s], va = A * (e[s] + AA * e[3 * s]);
    V ub = e[0] + BB * e[2 * s], vb = B * (e[s] + BB * e[3 * s]);
    y[0] = e[0], y[t] = ua + va, y[2 * t] = ua - va, y[3 * t] = ub + vb, y[4 * t] = ub - vb, y[5 * t] = e[3 * s];
  }
  static inline void taps(const V* w, int s, V* u, int t) {  // 3 taps -> 6
    V ua = NA * (w[0] + AA * w[2 * s]), va = (NA * A) * w[s], ub = NB * (w[0] + BB * w[2 * s]), vb = (NB * B) * w[s];
    u[0] = N0 * w[0], u[t] = ua + va, u[2 * t] = ua - va, u[3 * t] = ub + vb, u[4 * t] = ub - vb, u[5 * t] = w[2 * s];
  }
  static inline void taps_adjoint(const V* u, int s, V* w, int t) {
    V sa = NA * (u[s] + u[2 * s]), da = (NA * A) * (u[s] - u[2 * s]);
    V sb = NB * (u[3 * s] + u[4 * s]), db = (NB * B) * (u[3 * s] - u[4 * s]);
    w[0] = N0 * u[0] + sa + sb, w[t] = da + db, w[2 * t] = AA * sa + BB * sb + u[5 * s];
  }
};
// From p x p to q x q: along both sides.
template <int p, int q, class V, class Along> static inline void both(const V* x, V* y, Along along) {
  V half[q * p];
  for (int j = 0; j < p; j++) along(x + j, p, half + j, p);
  for (int i = 0; i < q; i++) along(half + i * p, 1, y + i * q, 1);
}

// --- Matrix products

// c[i][0..WIDE] (+)= sum over r < depth of a[i * ai + r * ar] * b[r * br + 0..WIDE], for R rows i; folded, and times a
// scale, where c is float.
static inline void settle(float* c, vec sum, float, bool add) { store(c, add ? load(c) + sum : sum); }
#ifdef HALVES
static inline void settle(Pair* c, halves sum, float, bool add) { put(c, add ? take<halves>(c) + sum : sum); }
static inline void settle(float* c, halves sum, float scale, bool add) { settle(c, folded(sum, scale), 1, add); }
#endif
template <class V, int R, class To> static inline __attribute__((always_inline)) void product(
    const One<V>* a, long ai, long ar, const One<V>* b, long br, To* c, long ci, long depth, float scale, bool add) {
  for (long left = depth; left > 0; left -= chain<V>, add = true) {
    V sum[R][2] = {};
    for (long r = std::min(left, chain<V>); r > 0; r--, a += ar, b += br) {
      V b0 = take<V>(b), b1 = take<V>(b + L);
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        V one = spread<V>(a[i * ai]);
        sum[i][0] += one * b0, sum[i][1] += one * b1;
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
      settle(c + i * ci, sum[i][0], scale, add), settle(c + i * ci + L, sum[i][1], scale, add);
  }
}
template <class V, class To> static void product(const One<V>* a, long ai, long ar, const One<V>* b, long br, To* c,
                                                 long ci, long depth, long rows, float scale = 1, bool add = false) {
  long i = 0;  // rows: a multiple of 4
#if defined(__AVX512F__)
  for (; i + 12 <= rows; i += 12) product<V, 12>(a + i * ai, ai, ar, b, br, c + i * ci, ci, depth, scale, add);
  for (; i + 8 <= rows; i += 8) product<V, 8>(a + i * ai, ai, ar, b, br, c + i * ci, ci, depth, scale, add);
#endif
  for (; i < rows; i += 4) product<V, 4>(a + i * ai, ai, ar, b, br, c + i * ci, ci, depth, scale, add);
}

// --- Convolution

template <class V> struct Shape {
  long n, h, w, c, k, down, across, tiles, block, rows;  // block: tiles at a time, in so many rows of a plane
  Shape(long n, long h, long w, long c, long k, long pad = 1)  // h x w: of the inputs
      : n(n), h(h), w(w), c(c), k(k), down((h + 2 * pad + 1) / 4), across((w + 2 * pad + 1) / 4),
        tiles(n * down * across) {
    // What is between the transforms should stay in the cache; with many channels the weights' transforms must pay.
    const long most = c + k <= 512 ? 64 : 128, parts = (tiles + most - 1) / most, step = 4 * each<V>;
    block = ((tiles + parts - 1) / parts + step - 1) / step * step, rows = block / each<V>;
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
  template <class V> Tile(const Shape<V>& s, long tile) {
    const long begin[2] = {tile / s.across % s.down * 4 - OFF, tile % s.across * 4 - OFF}, size[2] = {s.h, s.w};
    at = (tile / s.across / s.down * s.h + begin[0]) * s.w + begin[1];
    for (int side = 0; side < 2; side++) {
      from[side] = begin[side] < 0 ? -begin[side] : 0;
      upto[side] = begin[side] + SIDE > size[side] ? size[side] - begin[side] : SIDE;
      inside = inside && upto[side] - from[side] == SIDE;
    }
  }
  template <class Do> void each(Do one) const {
    for (long i = from[0]; i < upto[0]; i++)
      for (long j = from[1]; j < upto[1]; j++) one(i, j);
  }
};
// Half floats end at 2^16. So the largest value of a window is brought below 2^-2, of a tile of the outputs' gradient below
// 2^-3, and of the weights below 2^-3, less where a sum has more than 2^9 terms: by the transforms' factors no sum of any
// values passes 2^16.
constexpr int LIMIT_OF_WINDOWS = -2, LIMIT_OF_WEIGHTS = -3;
// The scale for the windows of a block of tiles.
template <class V> static float block_scale(const Image<V>* from, const Shape<V>& s, long first, long channels) {
  if (!narrow<V>) return 1;
  const long last = std::min(first + s.block, s.tiles) - 1;
  const long begin = std::max(0L, Tile<6, 1>(s, first / s.across * s.across).at);
  const long end = std::min(s.n * s.h * s.w, Tile<6, 1>(s, last / s.across * s.across).at + 6 * s.w + 1);
  return scale_below(LIMIT_OF_WINDOWS, largest(from + begin * channels, (end - begin) * channels));
}
template <class V, int SIDE, int OFF, class Along> static void into(
    const Image<V>* from, const Shape<V>& s, long first, long channels, One<V>* to, float scale, Along along) {
  constexpr int SIZE = SIDE * SIDE;
  const long plane = apart(s.rows * channels), row = s.w * channels;
  for (long t = first; t < first + s.block; t += each<V>, to += channels) {
    if (t >= s.tiles) {
      for (int f = 0; f < F; f++) memset(to + f * plane, 0, channels * sizeof(One<V>));
      continue;
    }
    const bool paired = each<V> > 1 && t + 1 < s.tiles;
    const Tile<SIDE, OFF> one(s, t), two(s, paired ? t + 1 : t);
    const Image<V> *corner = from + one.at * channels, *other = from + two.at * channels;
    vec edge[2][SIZE] = {};
    V x[SIZE], y[F];
    for (long q = 0; q < channels; q += L) {
      if (one.inside && two.inside && (paired || each<V> == 1)) {
        for (int i = 0; i < SIDE; i++)
          for (int j = 0; j < SIDE; j++) {
            const long at = i * row + j * channels + q;
            x[i * SIDE + j] = joined<V>(load(corner + at), load(other + at), scale);
          }
      } else {
        one.each([&](long i, long j) { edge[0][i * SIDE + j] = load(corner + i * row + j * channels + q); });
        if (paired)
          two.each([&](long i, long j) { edge[1][i * SIDE + j] = load(other + i * row + j * channels + q); });
        for (int i = 0; i < SIZE; i++) x[i] = joined<V>(edge[0][i], edge[1][i], scale);
      }
      both<SIDE, 6>(x, y, along);
      for (int f = 0; f < F; f++) put(to + f * plane + q, y[f]);
    }
  }
}
template <class V> static void out_of(const One<V>* from, const Shape<V>& s, long first, long channels, Image<V>* to,
                                      float scale) {
  const long plane = apart(s.rows * channels), row = s.w * channels;
  for (long t = first; t < std::min(first + s.block, s.tiles); t += each<V>, from += channels) {
    const bool paired = each<V> > 1 && t + 1 < s.tiles;
    const Tile<4, 0> one(s, t), two(s, paired ? t + 1 : t);
    Image<V> *corner = to + one.at * channels, *other = to + two.at * channels;
    for (long q = 0; q < channels; q += L) {
      V x[F], y[16];
      vec parts[16][each<V>];
      for (int f = 0; f < F; f++) x[f] = take<V>(from + f * plane + q);
      both<6, 4>(x, y, Side<V>::outputs);
      for (int i = 0; i < 16; i++) part(y[i], parts[i], scale);
      one.each([&](long i, long j) { store(corner + i * row + j * channels + q, parts[i * 4 + j][0]); });
      if (paired)
        two.each([&](long i, long j) { store(other + i * row + j * channels + q, parts[i * 4 + j][each<V> - 1]); });
    }
  }
}
// WIDE columns of the transformed weights: u[f][c][WIDE] of outputs from k0 on, or u[f][k][WIDE] of inputs from c0.
template <class V> static void for_outputs(const float* w, long c, long k0, One<V>* u, float scale) {
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
        both<3, 6>(column, y, Side<vec>::taps);
        for (int f = 0; f < F; f++) twice(u + f * apart(c * WIDE) + (q + j) * WIDE + half, y[f], scale);
      }
    }
}
// The same of the convolution from the gradient of outputs to that of inputs, whose kernel is turned round:
// u[f][k][WIDE] of inputs from c0 on.
template <class V> static void for_inputs(const float* w, long c, long k, long c0, One<V>* u, float scale) {
  for (long o = 0; o < k; o++)
    for (long half = 0; half < WIDE; half += L) {
      vec x[9], y[F];
      for (int i = 0; i < 9; i++) {
        x[8 - i] = load(w + (o * 9 + i) * c + c0 + half);
        __builtin_prefetch(w + ((o + 4) * 9 + i) * c + c0 + half);
      }
      both<3, 6>(x, y, Side<vec>::taps);
      for (int f = 0; f < F; f++) twice(u + f * apart(k * WIDE) + o * WIDE + half, y[f], scale);
    }
}

template <class V> static float weight_scale(const float* w, long count, long terms) {
  int limit = LIMIT_OF_WEIGHTS;
  for (long all = 512; all < terms; all *= 2) limit--;
  return narrow<V> ? scale_below(limit, largest(w, count)) : 1;
}
// The transformed weights, WIDE columns at a time, which make(p, u) makes: all before, or each when it is asked for.
template <class V, class Make> struct Panels {
  const bool before;
  const long size;
  const float scale;
  Make make;
  One<V>* u;
  Panels(bool before, long depth, long count, float scale, Make make)
      : before(before), size(F * apart(depth * WIDE)), scale(scale), make(make),
        u(scratch<One<V>>(2, size * (before ? count : 1))) {
    for (long p = 0; p < count && before; p++) make(p, u + p * size);
  }
  const One<V>* at(long p) const {
    if (!before) make(p, u);
    return before ? u + p * size : u;
  }
};
// A block of tiles of y, of k channels and shape `outputs`, from x, of c channels, with this padding.
template <class V, int PAD = 1, class Weights> static void tiles(
    const Shape<V>& s, const Shape<V>& outputs, long first, const Image<V>* x, long c, float scale,
    const Weights& weights, Image<V>* y, long k) {
  const long tc = apart(s.rows * c), tk = apart(s.rows * k);
  One<V>*v = scratch<One<V>>(0, F * tc), *m = scratch<One<V>>(1, F * tk);
  into<V, 6, PAD>(x, s, first, c, v, scale, Side<V>::window);
  for (long p = 0; p < k / WIDE; p++) {
    const One<V>* u = weights.at(p);
    for (int f = 0; f < F; f++)
      product<V>(v + f * tc, c, 1, u + f * apart(c * WIDE), WIDE, m + f * tk + p * WIDE, k, c, s.rows);
  }
  out_of<V>(m, outputs, first, k, y, 1 / weights.scale / scale);
}

// y = w * x, with a padding of PAD, which is 1 or, of floats, 0
template <class V, int PAD = 1> static void winograd(const Image<V>* x, const float* w, Image<V>* y, long n, long h, long width,
                                        long c, long k) {
  const Shape<V> s(n, h, width, c, k, PAD), outputs(n, h + 2 * PAD - 2, width + 2 * PAD - 2, c, k);
  const float scale = weight_scale<V>(w, 9 * c * k, c);
  auto make = [&](long p, One<V>* u) { for_outputs<V>(w, c, p * WIDE, u, scale); };
  const Panels<V, decltype(make)> weights(!s.whole(), c, k / WIDE, scale, make);
  for (long first = 0; first < s.tiles; first += s.block)
    tiles<V, PAD>(s, outputs, first, x, c, block_scale<V>(x, s, first, c), weights, y, k);
}

// From e, the gradient of y: dx and dw, each unless it is null.
template <class V> static void winograd_backward(const Image<V>* x, const Image<V>* e, const float* w, Image<V>* dx,
                                                 float* dw, long n, long h, long width, long c, long k) {
  const Shape<V> s(n, h, width, c, k);
  const long tc = apart(s.rows * c), tk = apart(s.rows * k), rows = s.whole() ? 32 : k, own = apart(rows * c);
  const float scale = dx ? weight_scale<V>(w, 9 * c * k, k) : 1;
  auto make = [&](long p, One<V>* u) { for_inputs<V>(w, c, k, p * WIDE, u, scale); };
  const Panels<V, decltype(make)> weights(dx && !s.whole(), k, c / WIDE, scale, make);
  float* g = dw ? scratch<float>(3, F * own) : nullptr;
  if (dw && !s.whole()) memset(g, 0, F * own * sizeof(float));
  auto settle = [&](long begin) {  // the gradients of the weights of these rows
    for (long o = 0; o < rows; o++)
      for (long q = 0; q < c; q += L) {
        vec t[F], y[9];
        for (int f = 0; f < F; f++) t[f] = load(g + f * own + o * c + q);
        both<6, 3>(t, y, Side<vec>::taps_adjoint);
        for (int i = 0; i < 9; i++) store(dw + ((begin + o) * 9 + i) * c + q, y[i]);
      }
  };
  for (long first = 0; first < s.tiles; first += s.block) {
    const float signal = block_scale<V>(e, s, first, k);
    if (dw) {
      One<V>*v = scratch<One<V>>(0, F * tc), *d = scratch<One<V>>(1, F * tk);
      const float windows = block_scale<V>(x, s, first, c), tiles = narrow<V> ? signal / 2 : 1;
      into<V, 4, 0>(e, s, first, k, d, tiles, Side<V>::outputs_adjoint);
      into<V, 6, 1>(x, s, first, c, v, windows, Side<V>::window);
      for (long begin = 0; begin < k; begin += rows) {
        for (int f = 0; f < F; f++)
          for (long p = 0; p < c; p += WIDE)
            product<V>(d + f * tk + begin, 1, k, v + f * tc + p, c, g + f * own + p, c, s.rows, rows,
                       1 / tiles / windows, !s.whole());
        if (s.whole()) settle(begin);
      }
    }
    if (dx) tiles<V>(s, s, first, e, k, signal, weights, dx, c);
  }
  if (dw && !s.whole()) settle(0);
}
