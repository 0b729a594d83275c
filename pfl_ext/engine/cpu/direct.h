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
// own[row] its own, and first[row] its own in the first of the images that a value is of.
struct Meetings {
  std::vector<int> own, first, at;
  long rows, positions;
  Meetings() {}
  Meetings(const Form& o, long each, bool of_inputs) {
    const long high = of_inputs ? o.h : o.down, wide = of_inputs ? o.w : o.across, step = of_inputs ? o.stride : 1;
    const long count = (o.n + each - 1) / each;
    positions = high * wide, rows = count * positions;
    own.resize(rows), first.resize(rows), at.assign(o.taps() * rows, -1);
    // Where the taps of a side meet the other images, or -1.
    auto met = [&](long own, long tap, long before, long most) {
      const long there = of_inputs ? own + before - tap : own * o.stride - before + tap, by = of_inputs ? o.stride : 1;
      return there < 0 || there % by || there / by >= most ? -1 : there / by;
    };
    const long most_y = of_inputs ? o.down : o.h, most_x = of_inputs ? o.across : o.w;
    std::vector<long> xs(wide * o.wide);
    for (long x = 0; x < wide; x++)
      for (long j = 0; j < o.wide; j++) xs[x * o.wide + j] = met(x, j, o.left, most_x);
    // Rows that follow each other meet the same taps: those of one phase, and of small maps those of the same position of all
    // images. Those of large maps are an image's, as the addresses of one position in all images share the cache's sets.
    const long together = positions < 64 ? count : 1;
    long row = 0;
    for (long phase = 0; phase < step * step; phase++)
      for (long image = 0; image < count; image += together)
        for (long y = phase / step; y < high; y += step)
          for (long x = phase % step; x < wide; x += step, row += together) {
            for (long q = 0; q < together; q++) {
              own[row + q] = int(((image + q) * high + y) * wide + x);
              first[row + q] = int(((image + q) * each * high + y) * wide + x);
            }
            for (long i = 0; i < o.high; i++) {
              const long yy = met(y, i, o.top, most_y);
              for (long j = 0; j < o.wide && yy >= 0; j++) {
                const long xx = xs[x * o.wide + j];
                for (long q = 0; q < together && xx >= 0; q++)
                  at[(i * o.wide + j) * rows + row + q] = int(((image + q) * most_y + yy) * most_x + xx);
              }
            }
          }
  }
};
// The rows of images as a product takes them: themselves; or those wanted, of two images each, times a scale. Below 2^3,
// as weights are, so that the sums of so many terms, and of both images', stay below 2^16.
constexpr int LIMIT = 3;
constexpr long EIGHT = 8;
template <class V> constexpr long most = 2 * chain<V>;  // what is rounded here no transform enlarges
template <class V> struct Rows {
  const One<V>* values;
  long apart;
  float scale;
};
// Those wanted, or all, of n images, `size` values apart.
template <class V> static Rows<V> rows_of(const Image<V>* from, long n, long positions, long size, long width,
                                          const std::vector<int>* wanted, int room) {
  if constexpr (!narrow<V>) {
    return {from, width, 1};
  } else {
    const long count = (n + 1) / 2 * positions, apart = width + 16;  // not a power of two, as in winograd.h
    std::vector<char> all(count, !wanted);
    if (wanted)
      for (int row : *wanted)
        if (row >= 0) all[row] = 1;
    auto rows = [&](auto work) {  // work(row, its values in the first image, and, if there is one, in the second)
      for (long image = 0, row = 0; image < n; image += 2)
        for (long i = 0; i < positions; i++, row++) {
          const Image<V>* first = from + image * size + i * width;
          if (all[row]) work(row, first, image + 1 < n ? first + size : nullptr);
        }
    };
    Largest most;
    rows([&](long, const Image<V>* first, const Image<V>* second) {
      most.see(first, width);
      if (second) most.see(second, width);
    });
    const float scale = scale_below(LIMIT, most.value());
    One<V>* to = scratch<One<V>>(room, count * apart);
    rows([&](long row, const Image<V>* first, const Image<V>* second) {
      for (long q = 0; q < width; q += L)
        put(to + row * apart + q, joined<V>(load(first + q), second ? load(second + q) : vec{}, scale));
    });
    return {to, apart, scale};
  }
}
// to[first[row]][0..WIDE] = scale * sum over taps and r of from[at[tap][row]][r] * panel[tap][r][0..WIDE], R rows from
// row on.
template <class V, int R> static void meet(const Meetings& m, long row, long taps, const Rows<V>& from, long depth,
                                           const One<V>* panel, const One<V>* zeros, Image<V>* to, long n, long width,
                                           float scale) {
  V sum[R][2] = {};
  vec all[R][2][each<V>] = {};  // of half floats: of as many terms as a sum may have before it goes there
  long held = 0;
  auto settle = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
      for (int half = 0; half < 2; half++) {
        vec parts[each<V>];
        part(sum[i][half], parts, scale);
        for (int j = 0; j < each<V>; j++) all[i][half][j] += parts[j];
        sum[i][half] = V{};
      }
    held = 0;
  };
  for (long tap = 0; tap < taps; tap++) {
    const int* at = m.at.data() + tap * m.rows + row;
    const One<V>* a[R];
    bool any = false;
    for (int i = 0; i < R; i++) a[i] = at[i] < 0 ? zeros : from.values + long(at[i]) * from.apart, any |= at[i] >= 0;
    const One<V>* b = panel + tap * depth * WIDE;
    for (long first = 0; any && first < depth; first += most<V>) {
      const long last = std::min(depth - first, most<V>) + first;
      if (narrow<V> && held + last - first > most<V>) settle();
      held += last - first;
      for (long r = first; r < last; r += 2, b += 2 * WIDE) {  // two: fewer addresses to load
        V b0 = take<V>(b), b1 = take<V>(b + L), b2 = take<V>(b + WIDE), b3 = take<V>(b + WIDE + L);
#pragma GCC unroll 16
        for (int i = 0; i < R; i++) {
          const One<V>* own = a[i] + r;
          V one = spread<V>(own[0]), two = spread<V>(own[1]);
          sum[i][0] += one * b0, sum[i][1] += one * b1;
          sum[i][0] += two * b2, sum[i][1] += two * b3;
        }
      }
    }
  }
  if (narrow<V>) settle();
#pragma GCC unroll 16
  for (int i = 0; i < R; i++) {
    long at = m.first[row + i];
    for (long j = 0; j < each<V> && at < n * m.positions; j++, at += m.positions)
      for (int half = 0; half < 2; half++) {
        vec out = all[i][half][j];
        if constexpr (!narrow<V>) out = sum[i][half];
        store(to + at * width + half * L, out);
      }
  }
}
template <class V> static void meet_all(const Meetings& m, long taps, const Rows<V>& from, long depth,
                                        const One<V>* panel, const One<V>* zeros, Image<V>* to, long n, long width,
                                        float scale) {
  long row = 0;
#if defined(__AVX512F__)
  for (; row + 12 <= m.rows; row += 12) meet<V, 12>(m, row, taps, from, depth, panel, zeros, to, n, width, scale);
  for (; row + 8 <= m.rows; row += 8) meet<V, 8>(m, row, taps, from, depth, panel, zeros, to, n, width, scale);
#endif
  for (; row + 4 <= m.rows; row += 4) meet<V, 4>(m, row, taps, from, depth, panel, zeros, to, n, width, scale);
  for (; row < m.rows; row++) meet<V, 1>(m, row, taps, from, depth, panel, zeros, to, n, width, scale);
}
// dw[0..R][.][0..WIDE] of one tap (+)= scale * sum over count pairs of rows of e[.][0..R] * x[.][0..WIDE]
template <class V, int R> static inline void pair_up(const One<V>* e, const One<V>* x, long count, float* dw, long apart,
                                                     float scale, bool add) {
  V sum[R][2] = {};
  for (long q = 0; q < count; q++, e += EIGHT, x += WIDE) {
    V b0 = take<V>(x), b1 = take<V>(x + L);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      V one = spread<V>(e[i]);
      sum[i][0] += one * b0, sum[i][1] += one * b1;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
    for (int half = 0; half < 2; half++) {
      float* p = dw + i * apart + half * L;
      const vec more = folded(sum[i][half], scale);
      store(p, add ? load(p) + more : more);
    }
}
// Columns of rows, so many of a panel next to each other: [width / size][count][size].
template <class One> static void packed(const One* from, long apart, const int* rows, long count, long width, long size,
                                        One* to) {
  for (long i = 0; i < count; i++)
    for (long q = 0; q < width; q += size)
      memcpy((void*)(to + (q * count + i * size)), from + rows[i] * apart + q, size * sizeof(One));
}
template <class V> static One<V>* nothing(long size) {
  One<V>* zeros = scratch<One<V>>(3, size);
  memset(zeros, 0, size * sizeof(One<V>));
  return zeros;
}
template <class V> static float panel_scale(const float* w, long count) {
  return narrow<V> ? scale_below(LIMIT, largest(w, count)) : 1;
}

// y = w * x, w [k][high][wide][c], y [n][down][across][k]
template <class V> static void direct(const Image<V>* x, const float* w, Image<V>* y, const Form& o) {
  const Meetings m(o, each<V>, false);
  const long c = o.c, k = o.k, size = o.taps() * c;
  const Rows<V> rows = rows_of<V>(x, o.n, o.h * o.w, o.h * o.w * c, c, &m.at, 1);
  const float small = panel_scale<V>(w, k * size);
  One<V>*panel = scratch<One<V>>(0, size * WIDE), *zeros = nothing<V>(c);
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
        for (int j = 0; j < L; j++) twice(panel + (q + j) * WIDE + half, square[j], small);
      }
    meet_all<V>(m, o.taps(), rows, c, panel, zeros, y + k0, o.n, k, 1 / small / rows.scale);
  }
}

// From e, the gradient of y: dx and dw, each unless it is null.
template <class V> static void direct_backward(const Image<V>* x, const Image<V>* e, const float* w, Image<V>* dx,
                                               float* dw, const Form& o) {
  const long c = o.c, k = o.k, taps = o.taps();
  const Rows<V> signals = rows_of<V>(e, o.n, o.down * o.across, o.down * o.across * k, k, nullptr, 2);
  if (dx) {
    const Meetings m(o, each<V>, true);
    const float small = panel_scale<V>(w, k * taps * c);
    One<V>*panel = scratch<One<V>>(0, taps * k * WIDE), *zeros = nothing<V>(k);
    for (long c0 = 0; c0 < c; c0 += WIDE) {
      for (long i = 0; i < k; i++)
        for (long tap = 0; tap < taps; tap++) {
          const float* from = w + (i * taps + tap) * c + c0;
          for (long q = 0; q < WIDE; q += L) {
            twice(panel + (tap * k + i) * WIDE + q, load(from + q), small);
            __builtin_prefetch(from + 4 * taps * c + q);
          }
        }
      meet_all<V>(m, taps, signals, k, panel, zeros, dx + c0, o.n, c, 1 / small / signals.scale);
    }
  }
  if (dw) {
    const Meetings m(o, each<V>, false);
    const Rows<V> images = rows_of<V>(x, o.n, o.h * o.w, o.h * o.w * c, c, &m.at, 1);
    const float scale = 1 / signals.scale / images.scale;
    std::vector<int> es, xs;
    const long some = std::max(256L, (1L << 18) / (c + k));  // rows that stay in the cache for all taps
    const long most_pairs = std::min(256L, most<V>);
    One<V>*left = scratch<One<V>>(0, most_pairs * (c + k)), *right = left + most_pairs * k;
    for (long begin = 0; begin < m.rows; begin += some)
      for (long tap = 0; tap < taps; tap++) {
        es.clear(), xs.clear();
        for (long row = begin; row < std::min(begin + some, m.rows); row++) {
          const int at = m.at[tap * m.rows + row];
          if (at >= 0) es.push_back(m.own[row]), xs.push_back(at);
        }
        const long pairs = long(es.size());
        for (long first = 0; first == 0 || first < pairs; first += most_pairs) {
          const long count = std::min(most_pairs, pairs - first);
          const bool add = begin > 0 || first > 0;
          packed(signals.values, signals.apart, es.data() + first, count, k, EIGHT, left);
          packed(images.values, images.apart, xs.data() + first, count, c, WIDE, right);
          for (long i = 0; i < k; i += EIGHT)
            for (long c0 = 0; c0 < c; c0 += WIDE) {
              float* to = dw + (i * taps + tap) * c + c0;
              const One<V>*e = left + i * count, *x = right + c0 * count;
#if defined(__AVX512F__)
              pair_up<V, 8>(e, x, count, to, taps * c, scale, add);
#else
              pair_up<V, 4>(e, x, count, to, taps * c, scale, add);
              pair_up<V, 4>(e + 4, x, count, to + 4 * taps * c, taps * c, scale, add);
#endif
            }
        }
      }
  }
}
