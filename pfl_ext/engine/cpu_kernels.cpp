// Layers of convolutional networks on a CPU, in float32 and channels-last memory: what torch's are slow at.
//
// Convolutions of any form: as products of matrices whose rows are positions, straight from the images and the
// weights. torch brings weights into another order first, which for the few images of a user's batch is most of
// a layer's time.
//
// 3 x 3 convolutions with stride 1 and padding 1 by Winograd's minimal filtering F(4x4, 3x3) (Winograd 1980;
// Lavin & Gray, CVPR 2016): windows of 6 x 6 inputs give tiles of 4 x 4 outputs with 36 products per pair of
// channels instead of 144. The gradients are the exact adjoints of the same sums. The interpolation points are
// 0, +-3/4, +-3/2 and infinity: half the rounding error of the usual 0, +-1, +-2 (measured; after Barabasz et
// al. 2018, arXiv 1803.10986), and their powers are exact.
//
// GroupNorm, whose backward in torch is slow in this memory format.
//
// Letters: n images, h x w positions, c channels in, k channels out, t tiles, f the 36 places of a transformed
// tile. Images are [n][h][w][c], weights [k][3][3][c]; c and k are multiples of 32.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__AVX512F__)
constexpr int L = 16;
#elif defined(__AVX__)
constexpr int L = 8;
#else
constexpr int L = 4;
#endif
constexpr long WIDE = 2 * L;  // columns of a product that are held in registers
constexpr int F = 36;

typedef float vec __attribute__((vector_size(4 * L), aligned(4), may_alias));

static inline vec load(const float* p) { return *(const vec*)p; }
static inline void store(float* p, vec v) { *(vec*)p = v; }

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

template <int W, size_t... I> static inline void exchange(vec& x, vec& y, std::index_sequence<I...>) {
  vec low = __builtin_shufflevector(x, y, (I & W ? L + I - W : I)...);
  y = __builtin_shufflevector(x, y, (I & W ? L + I : I + W)...), x = low;
}
template <int W = 1> static inline void transpose(vec* rows) {  // L x L
  for (int i = 0; i < L; i++)
    if (!(i & W)) exchange<W>(rows[i], rows[i + W], std::make_index_sequence<L>());
  if constexpr (2 * W < L) transpose<2 * W>(rows);
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

static float* scratch(int which, size_t floats) {  // this thread's, kept for the next call
  struct Space {
    float* at = nullptr;
    size_t size = 0;
    ~Space() { free(at); }
  };
  static thread_local Space spaces[4];
  Space& mine = spaces[which];
  if (mine.size < floats) {
    free(mine.at);
    const size_t page = size_t(1) << 21, bytes = (floats * sizeof(float) + page - 1) / page * page;
    mine.at = (float*)aligned_alloc(page, bytes);
#if defined(__linux__)
    if (mine.at) madvise(mine.at, bytes, MADV_HUGEPAGE);  // a tile is written to 36 places far apart
#endif
    mine.size = mine.at ? floats : 0;
    if (!mine.at) {
      fprintf(stderr, "error: no memory for %zu MB of a convolution: use fewer --runtime.lanes\n", bytes >> 20);
      abort();
    }
  }
  return mine.at;
}

// The values at a tile of SIDE x SIDE that begins OFF before a multiple of 4; zeros outside the image.
template <int SIDE, int OFF, class Each> static inline void at_tile(const Shape& s, long tile, Each each) {
  long x = tile % s.across * 4 - OFF, y = tile / s.across % s.down * 4 - OFF, image = tile / s.across / s.down;
  for (int i = 0; i < SIDE; i++)
    for (int j = 0; j < SIDE; j++)
      each(i * SIDE + j, y + i >= 0 && y + i < s.h && x + j >= 0 && x + j < s.w, (image * s.h + y + i) * s.w + x + j);
}
template <int SIDE, int OFF, class One> static void into(
    const float* from, const Shape& s, long first, long channels, float* to, One one) {
  for (long t = 0; t < s.block; t++)
    for (long q = 0; q < channels; q += L) {
      vec x[SIDE * SIDE], y[F] = {};
      if (first + t < s.tiles) {
        at_tile<SIDE, OFF>(s, first + t, [&](int i, bool in, long at) { x[i] = in ? load(from + at * channels + q) : vec{}; });
        both<SIDE, 6>(x, y, one);
      }
      for (int f = 0; f < F; f++) store(to + f * apart(s.block * channels) + t * channels + q, y[f]);
    }
}
template <int SIDE, int OFF, bool ADD, class One> static void out_of(
    const float* from, const Shape& s, long first, long channels, float* to, One one, long begin, long end) {
  for (long t = 0; t < s.block && first + t < s.tiles; t++)
    for (long q = begin; q < end; q += L) {
      vec x[F], y[SIDE * SIDE];
      for (int f = 0; f < F; f++) x[f] = load(from + f * apart(s.block * channels) + t * channels + q);
      both<6, SIDE>(x, y, one);
      at_tile<SIDE, OFF>(s, first + t, [&](int i, bool in, long at) {
        float* p = to + at * channels + q;
        if (in) store(p, ADD ? load(p) + y[i] : y[i]);
      });
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
    out_of<4, 0, false>(m, s, first, k, y, outputs, 0, k);
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
    if (dx) out_of<6, 1, true>(v, s, first, c, dx, window_adjoint, 0, c);
  }
  if (dw && !s.whole()) take(0);
}

// --- Convolutions of any form

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

// --- GroupNorm

// Sums over an image's positions, by channel, in double from pieces in float; p, near the mean, spares digits.
// Of x - p and (x - p)^2, or with e of e and e * (x - p).
template <bool WITH_E> static void channel_sums(const float* x, const float* e, const float* p, long positions, long c,
                                                double* plain, double* product) {
  std::fill(plain, plain + c, 0.0), std::fill(product, product + c, 0.0);
  for (long first = 0; first < positions; first += 32)
    for (long q = 0; q < c; q += WIDE) {
      vec a[2] = {}, b[2] = {};
      for (long i = first; i < std::min(first + 32, positions); i++)
        for (int j = 0; j < 2; j++) {
          const long at = q + j * L;
          vec near = load(x + i * c + at) - load(p + at), one = WITH_E ? load(e + i * c + at) : near;
          a[j] += one, b[j] += one * near;
        }
      for (int j = 0; j < 2 * L; j++) plain[q + j] += a[j / L][j % L], product[q + j] += b[j / L][j % L];
    }
}

// y = (x - mean) / sqrt(var + eps) * scale + shift over each of g groups of channels; mean and rstd are [n][g].
static void normalise(const float* x, const float* scale, const float* shift, float* y, float* mean, float* rstd,
                      long n, long positions, long c, long g, double eps) {
  const long wide = c / g;
  double* sums = (double*)scratch(0, 8 * c);
  float *times = scratch(1, 2 * c), *centre = times + c;
  for (long i = 0; i < n; i++, x += positions * c, y += positions * c) {
    channel_sums<false>(x, nullptr, x, positions, c, sums, sums + c);  // p: the first position
    for (long q = 0; q < g; q++) {
      double m = 0, squares = 0, count = double(wide * positions);
      for (long j = q * wide; j < (q + 1) * wide; j++) m += (x[j] * double(positions) + sums[j]) / count;
      for (long j = q * wide; j < (q + 1) * wide; j++)
        squares += sums[c + j] + (m - x[j]) * ((m - x[j]) * positions - 2 * sums[j]);
      const double r = 1 / std::sqrt(std::max(squares / count, 0.0) + eps);
      mean[i * g + q] = float(m), rstd[i * g + q] = float(r);
      for (long j = q * wide; j < (q + 1) * wide; j++)
        times[j] = float(r * scale[j]), centre[j] = float(m);
    }
    for (long p = 0; p < positions * c; p += c)
      for (long q = 0; q < c; q += L) store(y + p + q, (load(x + p + q) - load(centre + q)) * load(times + q) + load(shift + q));
  }
}

// From e, the gradient of y: dx; and each image's gradients of shift and scale [n][c].
static void normalise_backward(const float* x, const float* e, const float* scale, const float* mean,
                               const float* rstd, float* dx, float* dshift, float* dscale, long n, long positions, long c, long g) {
  const long wide = c / g;
  double* sums = (double*)scratch(0, 8 * c);
  float *of_e = scratch(1, 4 * c), *of_x = of_e + c, *plus = of_x + c, *centre = plus + c;
  for (long i = 0; i < n; i++, x += positions * c, e += positions * c, dx += positions * c) {
    for (long j = 0; j < c; j++) centre[j] = mean[i * g + j / wide];
    channel_sums<true>(x, e, centre, positions, c, sums, sums + c);
    for (long q = 0; q < g; q++) {
      double a = 0, b = 0, count = double(wide * positions), r = rstd[i * g + q];
      for (long j = q * wide; j < (q + 1) * wide; j++) {
        dshift[i * c + j] = float(sums[j]), dscale[i * c + j] = float(sums[c + j] * r);
        a += scale[j] * sums[j] / count, b += scale[j] * sums[c + j] / count;
      }
      for (long j = q * wide; j < (q + 1) * wide; j++)
        of_e[j] = float(r * scale[j]), of_x[j] = float(-b * r * r * r), plus[j] = float(-a * r);
    }
    for (long p = 0; p < positions * c; p += c)
      for (long q = 0; q < c; q += L)
        store(dx + p + q, load(e + p + q) * load(of_e + q) + (load(x + p + q) - load(centre + q)) * load(of_x + q) +
                              load(plus + q));
  }
}

// --- What is called from outside: each over the n images, on so many threads. torch has loaded the OpenMP
// library, whose threads are shared with its own.

template <class Work> static void split(long n, long threads, Work work) {
  const long parts = std::max(1L, std::min(n, threads));
#pragma omp parallel for num_threads(parts) schedule(static, 1) if (parts > 1)
  for (long part = 0; part < parts; part++) work(n * part / parts, n * (part + 1) / parts, part);
}
// Each part but the first has a dw of its own, to be added.
template <class Work> static void split_sum(long n, long threads, float* dw, long size, Work work) {
  const long parts = std::max(1L, std::min(n, threads));
  std::vector<float> others(dw ? (parts - 1) * size : 0);
  split(n, threads, [&](long first, long last, long part) {
    work(first, last, !dw || part == 0 ? dw : others.data() + (part - 1) * size);
  });
  for (long part = 1; dw && part < parts; part++)
    for (long i = 0; i < size; i++) dw[i] += others[(part - 1) * size + i];
}

extern "C" {

void conv3x3(const float* x, const float* w, float* y, long threads, long n, long h, long width, long c, long k) {
  split(n, threads, [&](long first, long last, long) {
    winograd(x + first * h * width * c, w, y + first * h * width * k, last - first, h, width, c, k);
  });
}
void conv3x3_backward(const float* x, const float* e, const float* w, float* dx, float* dw, long threads, long n,
                      long h, long width, long c, long k) {
  split_sum(n, threads, dw, 9 * c * k, [&](long first, long last, float* own) {
    const long from = first * h * width;
    winograd_backward(x + from * c, e + from * k, w, dx ? dx + from * c : dx, own, last - first, h, width, c, k);
  });
}
void convolve(const float* x, const float* w, float* y, long threads, long n, long h, long width, long c, long k,
              long high, long wide, long stride, long top, long left) {
  split(n, threads, [&](long first, long last, long) {
    const Form o(last - first, h, width, c, k, high, wide, stride, top, left);
    direct(x + first * h * width * c, w, y + first * o.down * o.across * k, o);
  });
}
void convolve_backward(const float* x, const float* e, const float* w, float* dx, float* dw, long threads, long n,
                       long h, long width, long c, long k, long high, long wide, long stride, long top, long left) {
  split_sum(n, threads, dw, high * wide * c * k, [&](long first, long last, float* own) {
    const Form o(last - first, h, width, c, k, high, wide, stride, top, left);
    const long from = first * h * width * c;
    direct_backward(x + from, e + first * o.down * o.across * k, w, dx ? dx + from : dx, own, o);
  });
}
void group_norm(const float* x, const float* scale, const float* shift, float* y, float* mean, float* rstd,
                long threads, long n, long positions, long c, long g, double eps) {
  split(n, threads, [&](long first, long last, long) {
    const long from = first * positions * c;
    normalise(x + from, scale, shift, y + from, mean + first * g, rstd + first * g, last - first, positions, c, g, eps);
  });
}
void group_norm_backward(const float* x, const float* e, const float* scale, const float* mean, const float* rstd,
                         float* dx, float* dshift, float* dscale, long threads, long n, long positions, long c, long g) {
  split(n, threads, [&](long first, long last, long) {
    const long from = first * positions * c;
    normalise_backward(x + from, e + from, scale, mean + first * g, rstd + first * g, dx + from, dshift + first * c,
                       dscale + first * c, last - first, positions, c, g);
  });
}
}
