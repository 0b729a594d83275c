// Convolutions of images with few channels, such as a network's first: the values that a row of a kernel meets follow
// each other in memory, so that they are one row of a product. The gradient of the images is left to torch.
//
// Letters as in direct.h; c may be any.

#pragma once

#include "direct.h"
#include "winograd.h"

constexpr long SLACK = 8;  // a row's values are read in fours

// An image, or two, with padding, and the places where the kernel's rows meet them.
template <class V> struct Frame {
  const Form& o;
  long apart, depth;  // of rows; values that a kernel's row meets
  Meetings m;
  Rows<V> rows;

  explicit Frame(const Form& o) : o(o), apart((o.w + 2 * o.left) * o.c + SLACK), depth((o.wide * o.c + 1) / 2 * 2) {
    m.positions = m.rows = o.down * o.across;
    m.first.resize(m.rows), m.at.resize(o.high * m.rows);
    for (long row = 0; row < m.rows; row++) {
      m.first[row] = int(row);
      for (long i = 0; i < o.high; i++)
        m.at[i * m.rows + row] = int((row / o.across * o.stride + i) * apart + row % o.across * o.stride * o.c);
    }
  }
  // Has these images in the frame; second may be null.
  void take(const Image<V>* first, const Image<V>* second, int room) {
    const long size = o.h * o.w * o.c, whole = (o.h + 2 * o.top) * apart + SLACK;
    Largest most;
    if (narrow<V>) most.see(first, size);
    if (narrow<V> && second) most.see(second, size);
    rows.apart = 1, rows.scale = narrow<V> ? scale_below(LIMIT, most.value()) : 1;
    Image<V>*one = scratch<Image<V>>(4, 2 * (o.w * o.c + L)), *two = one + o.w * o.c + L;  // a line of each
    memset((void*)one, 0, 2 * (o.w * o.c + L) * sizeof(Image<V>));
    One<V>* values = scratch<One<V>>(room, whole + L);
    memset((void*)values, 0, whole * sizeof(One<V>));
    for (long y = 0; y < o.h; y++) {
      const long wide = o.w * o.c;
      memcpy((void*)one, first + y * wide, wide * sizeof(Image<V>));
      if (second) memcpy((void*)two, second + y * wide, wide * sizeof(Image<V>));
      One<V>* to = values + (y + o.top) * apart + o.left * o.c;
      long q = 0;
      for (; q + L <= wide; q += L) put(to + q, joined<V>(load(one + q), load(two + q), rows.scale));
      One<V> rest[L];
      put(rest, joined<V>(load(one + q), load(two + q), rows.scale));
      memcpy((void*)(to + q), rest, (wide - q) * sizeof(One<V>));
    }
    rows.values = values;
  }
};

template <class V> static void thin(const Image<V>* x, const float* w, Image<V>* y, const Form& o) {
  Frame<V> frame(o);
  const long size = o.h * o.w * o.c, k = o.k, row = o.wide * o.c, panel = o.high * frame.depth * WIDE;
  const float small = panel_scale<V>(w, k * o.high * row);
  One<V>* panels = scratch<One<V>>(0, panel * (k / WIDE));
  for (long q = 0; q < k / WIDE * o.high * frame.depth; q++) {
    const long k0 = q / (o.high * frame.depth) * WIDE, i = q / frame.depth % o.high, r = q % frame.depth;
    float column[WIDE] = {};
    for (long j = 0; j < WIDE && r < row; j++) column[j] = w[((k0 + j) * o.high + i) * row + r];
    twice(panels + q * WIDE, load(column), small), twice(panels + q * WIDE + L, load(column + L), small);
  }
  for (long image = 0; image < o.n; image += each<V>) {
    frame.take(x + image * size, each<V> > 1 && image + 1 < o.n ? x + (image + 1) * size : nullptr, 1);
    for (long k0 = 0; k0 < k; k0 += WIDE)
      meet_all<V>(frame.m, o.high, frame.rows, frame.depth, panels + k0 / WIDE * panel, nullptr,
                  y + image * frame.m.rows * k + k0, std::min(each<V>, o.n - image), k, 1 / small / frame.rows.scale);
  }
}

template <class V> static void thin_backward(const Image<V>* x, const Image<V>* e, float* dw, const Form& o) {
  Frame<V> frame(o);
  const long size = o.h * o.w * o.c, k = o.k, row = o.wide * o.c, fours = (row + 3) / 4 * 4, wide = o.across * k;
  float* sums = scratch<float>(0, o.high * fours * k);  // [high][row of the kernel, in fours][k]
  memset(sums, 0, o.high * fours * k * sizeof(float));
  for (long image = 0; image < o.n; image += each<V>) {
    const bool paired = each<V> > 1 && image + 1 < o.n;
    frame.take(x + image * size, paired ? x + (image + 1) * size : nullptr, 1);
    for (long y = 0; y < o.down; y++) {
      const Image<V>* first = e + (image * o.down + y) * wide;
      const Rows<V> signals = rows_of<V>(first, 1 + paired, o.across, o.down * wide, k, nullptr, 2);
      for (long i = 0; i < o.high; i++)
        for (long k0 = 0; k0 < k; k0 += WIDE)
          product<V>(frame.rows.values + (y * o.stride + i) * frame.apart, 1, o.stride * o.c, signals.values + k0,
                     signals.apart, sums + i * fours * k + k0, k, o.across, fours, 1 / frame.rows.scale / signals.scale,
                     true);
    }
  }
  for (long i = 0; i < o.high; i++)
    for (long r = 0; r < row; r++)
      for (long j = 0; j < k; j++) dw[(j * o.high + i) * row + r] = sums[(i * fours + r) * k + j];
}
