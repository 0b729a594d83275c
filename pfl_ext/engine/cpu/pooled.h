// Bias, ReLU and 2 x 2 max-pooling after a convolution, and the gradients of all together. Of each four outputs of a channel pooling lets
// the gradient of one through, or of none: so the products are formed for those alone, each with the inputs that its
// kernel meets, which lie in rows of wide * c values. That is a quarter of the products, or less.
//
// Letters: n images, h x w positions with the padding, c channels in, k channels out, rows x columns pooled outputs.
// Images are [n][h][w][c], weights [k][high][wide][c]; the stride is 1.

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "across.h"

struct Strides {  // values from one image, channel, row or column to the next
  long image, channel, row, column;
  long at(long i, long q, long y, long x) const { return i * image + q * channel + y * row + x * column; }
};
struct Pooled {
  long n, h, w, c, k, high, wide;
  Strides of_e, of_places;
  long rows = (h - high + 1) / 2, columns = (w - wide + 1) / 2;
  long row() const { return w * c; }
  long across() const { return (wide * c + L - 1) / L; }  // vectors of a kernel's row
};
struct Passed {  // a gradient that pooling lets through, and where the inputs begin that its kernel meets
  int at;
  float value;
};
constexpr long NEAR = 24 << 10;  // bytes of the rows that are in use at a time: they stay in the nearest cache

// work(row, vector, R, V) for blocks of R rows and V vectors that fill a kernel and the registers
template <class Work> static inline void in_tiles(long high, long across, Work work) {
#if defined(__AVX512F__)
  in_blocks<10, 6, 4, 2, 1>(across, [&](long q, auto v) {
    auto rows = [&](long i, auto r) { work(i, q, r, v); };
    if constexpr (v == 10)
      in_blocks<2, 1>(high, rows);
    else if constexpr (v == 6)
      in_blocks<3, 1>(high, rows);
    else
      in_blocks<5, 3, 1>(high, rows);
  });
#else
  in_blocks<4, 2, 1>(across, [&](long q, auto v) {
    auto rows = [&](long i, auto r) { work(i, q, r, v); };
    if constexpr (v == 4)
      in_blocks<3, 1>(high, rows);
    else
      in_blocks<5, 3, 1>(high, rows);
  });
#endif
}
// From y [n][h][w][k], the convolution without its bias, in any order with k last: out and places [n][rows][columns][k].
// Places say which of the four it is, or 4 where ReLU lets nothing through.
static void pool(const float* y, const Strides& of_y, const float* bias, float* out, unsigned char* places, long rows,
                 long columns, long k, bool relu, long first, long end) {
  for (long image = first; image < end; image++)
    for (long row = 0; row < rows; row++) {
      const long at = (image * rows + row) * columns * k;
      for (long j = 0; j < columns; j++)
        for (long q = 0; q < k; q += L) {  // the last vector goes back to end at k
          const long c = std::min(q, k - L);
          const float* from = y + of_y.at(image, c, 2 * row, 2 * j);
          const vec shift = bias ? load(bias + c) : vec{};
          vec top = load(from) + shift;
          ints place = {};
#pragma GCC unroll 4
          for (int i = 1; i < 4; i++) {
            const vec one = load(from + i / 2 * of_y.row + i % 2 * of_y.column) + shift;
            const ints better = (one > top) | (one != one);
            top = better ? one : top;
            place = better ? ints{} + i : place;
          }
          if (relu) place = top <= 0 ? ints{} + 4 : place, top = top < 0 ? vec{} : top;
          store(out + at + j * k + c, top);
          *(Places*)(places + at + j * k + c) = __builtin_convertvector(place, Places);
        }
    }
}

// sum[r][v] += value * x[r][v] over the gradients of a list
template <int R, int V>
__attribute__((noinline)) static void gathered(const Passed* list, const Passed* end, const float* x, long row,
                                               vec* sums, long next) {
  vec sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sum[r][v] = sums[r * next + v];
  for (; list < end; list++) {
    const float* from = x + list->at;
    const float value = list->value;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) sum[r][v] += load(from + r * row + v * L) * value;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sums[r * next + v] = sum[r][v];
}
// dx[r][v] += value * weights[r][v], likewise
template <int R, int V>
__attribute__((noinline)) static void scattered(const Passed* list, const Passed* end, const vec* weights, long next,
                                                float* dx, long row) {
  vec own[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) own[r][v] = weights[r * next + v];
  for (; list < end; list++) {
    float* to = dx + list->at;
    const float value = list->value;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) store(to + r * row + v * L, load(to + r * row + v * L) + own[r][v] * value);
  }
}

// dx, in the order of x, and dw and db, to which is added, unless they are null.
static void pooled_backward(const float* x, const float* e, const unsigned char* places, const float* weights,
                            float* dx, float* dw, float* db, const Pooled& o, long first, long end) {
  const long size = o.h * o.row(), across = o.across(), kernel = o.high * across, width = o.wide * o.c;
  const long fit = (NEAR / long(o.row() * sizeof(float)) - o.high + 1) / 2;
  const long band = std::max(1L, std::min(fit, o.rows));
  // A vector may reach beyond a row's values, which ends up where nothing is read, but not beyond an image's.
  float* room = scratch<float>(0, 2 * (size + L) + o.k * band * o.columns * 2 + 2);
  float *last = room, *sum = room + size + L;
  Passed* lists = (Passed*)(sum + size + L);
  vec* sums = scratch<vec>(1, 2 * o.k * kernel);
  vec* packed = sums + o.k * kernel;
  std::memset((void*)sums, 0, 2 * o.k * kernel * sizeof(vec));
  if (dx)
    for (long row = 0; row < o.k * o.high; row++)
      std::memcpy((void*)(packed + row * across), weights + row * width, width * sizeof(float));
  std::vector<const Passed*> ends(o.k + 1);
  for (long image = first; image < end; image++) {
    const float* own = x + image * size;
    if (dw && image + 1 == o.n) own = (const float*)std::memcpy(last, own, size * sizeof(float));
    if (dx) std::memset(sum, 0, (size + L) * sizeof(float));
    for (long top = 0; top < o.rows; top += band) {
      Passed* to = lists;
      ends[0] = to;
      for (long k = 0; k < o.k; k++) {
        float total = 0;
        for (long y = top; y < std::min(top + band, o.rows); y++) {
          const float* signal = e + o.of_e.at(image, k, y, 0);
          const unsigned char* place = places + o.of_places.at(image, k, y, 0);
          for (long j = 0; j < o.columns; j++, signal += o.of_e.column, place += o.of_places.column) {
            const int q = *place;
            const float value = *signal;
            *to = {int(((2 * y + q / 2) * o.w + 2 * j + q % 2) * o.c), value};
            const bool passes = (q < 4) & (value != 0);
            to += passes;
            total += passes ? value : 0;
          }
        }
        ends[k + 1] = to;
        if (db) db[k] += total;
      }
      for (long k = 0; k < o.k; k++)
        in_tiles(o.high, across, [&](long i, long q, auto r, auto v) {
          const long at = i * o.row() + q * L, tile = k * kernel + i * across + q;
          if (dw) gathered<r, v>(ends[k], ends[k + 1], own + at, o.row(), sums + tile, across);
          if (dx) scattered<r, v>(ends[k], ends[k + 1], packed + tile, across, sum + at, o.row());
        });
    }
    if (dx) std::memcpy(dx + image * size, sum, size * sizeof(float));
  }
  for (long row = 0; dw && row < o.k * o.high; row++)
    for (long i = 0; i < width; i++) dw[row * width + i] += ((const float*)(sums + row * across))[i];
}
