// Max pooling that remembers a window's largest value as the byte of its place, and whose backward writes each
// gradient once: torch keeps 64-bit indices, and adds to an array that it clears first.
//
// Letters: n images, h x w positions, c channels, windows of high x wide. Images are [n][h][w][c].

#pragma once

#include <cmath>

#include "direct.h"

typedef int ints __attribute__((vector_size(4 * L)));
struct Bytes {
  typedef unsigned char At __attribute__((vector_size(L), aligned(1), may_alias));
};

// y[n][down][across][c] and the place in the window of each, of windows with fewer than 256.
template <class Image> static void max_pool(const Image* x, Image* y, unsigned char* places, const Form& o) {
  for (long image = 0; image < o.n; image++, x += o.h * o.w * o.c)
    for (long row = 0; row < o.down; row++)
      for (long column = 0; column < o.across; column++, y += o.c, places += o.c) {
        const long top = row * o.stride - o.top, left = column * o.stride - o.left;
        const long from_i = std::max(0L, -top), upto_i = std::min(o.high, o.h - top);
        const long from_j = std::max(0L, -left), upto_j = std::min(o.wide, o.w - left);
        for (long q = 0; q < o.c; q += L) {
          vec best = vec{} - INFINITY;
          ints place = ints{} + int(from_i * o.wide + from_j);
          for (long i = from_i; i < upto_i; i++)
            for (long j = from_j; j < upto_j; j++) {
              const vec v = load(x + ((top + i) * o.w + left + j) * o.c + q);
              const ints larger = (v > best) | (v != v);  // as torch has it: what is no number stays
              best = larger ? v : best, place = larger ? ints{} + int(i * o.wide + j) : place;
            }
          store(y + q, best);
          *(Bytes::At*)(places + q) = __builtin_convertvector(place, Bytes::At);
        }
      }
}

// From e, the gradient of y: dx.
template <class Image> static void max_pool_backward(const Image* e, const unsigned char* places, Image* dx,
                                                    const Form& o) {
  struct Meeting {
    int place;
    long window;
  };
  auto side = [&](long size, long taps, long before, long windows, long place, long apart) {
    std::vector<std::vector<Meeting>> met(size);  // by position: the windows that hold it, and its place in them
    for (long i = 0; i < size * taps; i++) {
      const long tap = i % taps, there = i / taps + before - tap;
      if (there >= 0 && there % o.stride == 0 && there / o.stride < windows)
        met[i / taps].push_back({int(tap * place), there / o.stride * apart});
    }
    return met;
  };
  const auto down = side(o.h, o.high, o.top, o.down, o.wide, o.across * o.c);
  const auto across = side(o.w, o.wide, o.left, o.across, 1, o.c);
  const long size = o.down * o.across * o.c;
  for (long image = 0; image < o.n; image++, e += size, places += size)
    for (const auto& rows : down)
      for (const auto& columns : across) {
        for (long q = 0; q < o.c; q += L) {
          vec sum = {};
          for (const Meeting& row : rows)
            for (const Meeting& column : columns) {
              const long at = row.window + column.window + q;
              const ints place = __builtin_convertvector(*(const Bytes::At*)(places + at), ints);
              sum += place == row.place + column.place ? load(e + at) : vec{};
            }
          store(dx + q, sum);
        }
        dx += o.c;
      }
}
