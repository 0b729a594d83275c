// Convolutions of few channels, with the ReLU and the max pooling that follow them: a vector holds the same place of L
// images. torch's fill their vectors with channels, of which most stay empty where there are six.
//
// Letters: n places for images, a multiple of L, of which `count` have one; c channels in, k out; h x w positions, down x
// across outputs. Images are [c][h][w][n], or in another order with n last; weights are [k][high][wide][c]. The stride is
// 1, and there is no padding but what `lay_out` leaves.

#pragma once

#include <algorithm>
#include <cstring>

#include "vectors.h"

struct Steps {  // values from one channel, row or column to the next
  long channel, row, column;
};
struct Few {
  long n, count, c, h, w, k, high, wide;
  bool relu, pool;
  Steps step;
  long down = h - high + 1, across = w - wide + 1;
  long rows() const { return pool ? down / 2 : down; }
  long columns() const { return pool ? across / 2 : across; }
};
#if defined(__AVX512F__)
#define OUTPUTS 6, 4, 2, 1
#define GRADIENTS 4, 2, 1
#define TAPS 5, 3, 1
#else
#define OUTPUTS 3, 2, 1
#define GRADIENTS 3, 1
#define TAPS 3, 1
#endif
constexpr int SPAN = 4, FEW = 6;  // columns of a block; most of its outputs
typedef unsigned char Places __attribute__((vector_size(L), aligned(1), may_alias));
typedef int ints __attribute__((vector_size(4 * L)));

// to[i][x] = start[i] + sum over channels, `high` rows and `wide` columns of weights[..][i] * from, for K outputs at X
// columns; weights are [channel][row][column][K].
template <int K, int X>
__attribute__((noinline)) static void few_sums(const float* from, const Steps& step, long channels, long high, long wide,
                                               const float* weights, long next_channel, const float* start,
                                               vec (*to)[K]) {
  vec sum[K][X];
#pragma GCC unroll 8
  for (int i = 0; i < K; i++)
    for (int x = 0; x < X; x++) sum[i][x] = start[i] - vec{};
  for (long c = 0; c < channels; c++) {
    const float* w = weights + c * next_channel;
    for (long y = 0; y < high; y++) {
      const float* row = from + c * step.channel + y * step.row;
      for (long j = 0; j < wide; j++, row += step.column, w += K) {
        vec one[X];
#pragma GCC unroll 8
        for (int x = 0; x < X; x++) one[x] = load(row + x * step.column);
#pragma GCC unroll 8
        for (int i = 0; i < K; i++)
#pragma GCC unroll 8
          for (int x = 0; x < X; x++) sum[i][x] += one[x] * w[i];
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < K; i++)
#pragma GCC unroll 8
    for (int x = 0; x < X; x++) to[x][i] = sum[i][x];
}
// work(first, size) for blocks of these sizes, as constants, that fill `count`
template <int SIZE, int... SMALLER, class Work> static inline void in_blocks(long count, Work work, long first = 0) {
  for (; count - first >= SIZE; first += SIZE) work(first, std::integral_constant<int, SIZE>());
  if constexpr (sizeof...(SMALLER) > 0) in_blocks<SMALLER...>(count, work, first);
}
// A row of K outputs: put(i, x, the values), each at `count` columns.
template <int K, class Put>
static inline void few_row(const float* from, const Steps& step, long channels, long high, long wide,
                           const float* weights, long next_channel, const float* start, long count, Put put) {
  for (long x = 0; x < count;) {
    vec sums[SPAN][K];
    const int span = count - x < SPAN ? 1 : SPAN;
    (span == 1 ? few_sums<K, 1> : few_sums<K, SPAN>)(from + x * step.column, step, channels, high, wide, weights,
                                                     next_channel, start, sums);
    for (int j = 0; j < span; j++, x++)
      for (int i = 0; i < K; i++) put(i, x, sums[j][i]);
  }
}
// Weights in the order of `few_sums`, for blocks of the k outputs: at(k, c, y, x).
template <class At> static void few_packed(float* to, long k, long c, long high, long wide, At at) {
  in_blocks<OUTPUTS>(k, [&](long first, int size) {
    for (long q = 0; q < c; q++)
      for (long y = 0; y < high; y++)
        for (long x = 0; x < wide; x++)
          for (long i = 0; i < size; i++) *to++ = at(first + i, q, y, x);
  });
}

// `rows` of `size` values of images [count][rows][size], as to [rows][size][n], where rows lie `apart` values of an image.
static void lay_out(const float* from, float* to, long count, long n, long rows, long size, long apart) {
  vec square[L];
  for (long row = 0; row < rows; row++)
    for (long i = 0; i < size; i += L)
      for (long image = 0; image < n; image += L) {
        const long wide = std::min<long>(L, size - i);
        for (int q = 0; q < L; q++) {
          square[q] = vec{};
          const float* own = from + ((image + q) * rows + row) * size + i;
          if (image + q < count && wide == L)
            square[q] = load(own);
          else if (image + q < count)
            std::memcpy((void*)&square[q], own, wide * sizeof(float));
        }
        transpose(square);
        for (int q = 0; q < wide; q++) store(to + (row * apart + i + q) * n + image, square[q]);
      }
}

// y [k][rows][columns][n] of the images [first, end); where pooled, places [k][rows][columns][n] says which of the four
// it is, or 4 where ReLU lets nothing through.
static void few_forward(const float* x, const float* weights, const float* bias, float* y, unsigned char* places,
                        const Few& o, long first, long end) {
  const Steps step = o.step;
  const long taps = o.c * o.high * o.wide;
  float* packed = scratch<float>(0, taps * o.k + o.k);
  few_packed(packed, o.k, o.c, o.high, o.wide,
             [&](long k, long c, long i, long j) { return weights[((k * o.high + i) * o.wide + j) * o.c + c]; });
  float* start = packed + taps * o.k;
  for (long k = 0; k < o.k; k++) start[k] = bias ? bias[k] : 0;
  vec* two = scratch<vec>(1, 2 * FEW * o.across);  // rows to be pooled
  for (long image = first; image < end; image += L)
    in_blocks<OUTPUTS>(o.k, [&](long k0, auto few) {
      const float* w = packed + k0 * taps;
      for (long row = 0; row < o.rows(); row++) {
        float* to = y + (k0 * o.rows() + row) * o.columns() * o.n + image;
        const long plane = o.rows() * o.columns() * o.n;
        const float* from = x + image + row * (o.pool ? 2 : 1) * step.row;
        if (!o.pool) {
          few_row<few>(from, step, o.c, o.high, o.wide, w, o.high * o.wide * few, start + k0, o.across,
                       [&](int i, long at, vec v) {
                         if (o.relu) v = v < 0 ? vec{} : v;
                         store(to + i * plane + at * o.n, v);
                       });
          continue;
        }
        for (long half = 0; half < 2; half++)
          few_row<few>(from + half * step.row, step, o.c, o.high, o.wide, w, o.high * o.wide * few, start + k0,
                       o.columns() * 2, [&](int i, long at, vec v) { two[(half * FEW + i) * o.across + at] = v; });
        unsigned char* where = places + (to - y);
        for (int i = 0; i < few; i++)
          for (long at = 0; at < o.columns(); at++) {
            vec top = two[i * o.across + 2 * at];
            ints place = {};
#pragma GCC unroll 4
            for (int q = 1; q < 4; q++) {
              const vec one = two[(q / 2 * FEW + i) * o.across + 2 * at + q % 2];
              const ints better = (one > top) | (one != one);
              top = better ? one : top;
              place = better ? ints{} + q : place;
            }
            if (o.relu) place = top <= 0 ? ints{} + 4 : place, top = top < 0 ? vec{} : top;
            store(to + i * plane + at * o.n, top);
            *(Places*)(where + i * plane + at * o.n) = __builtin_convertvector(place, Places);
          }
      }
    });
}

// The products of the gradients e of K outputs with the inputs that X taps of a row meet, added to dw [K][X].
template <int K, int X>
__attribute__((noinline)) static void few_products(const vec* e, long plane, long wide, const float* from,
                                                   const Steps& step, long down, long across, float* dw,
                                                   long next_output, long next_tap) {
  vec sum[K][X] = {};
  for (long y = 0; y < down; y++) {
    const vec* left = e + y * wide;
    const float* right = from + y * step.row;
    for (long x = 0; x < across; x++, left++, right += step.column) {
      vec one[K];
#pragma GCC unroll 8
      for (int i = 0; i < K; i++) one[i] = left[i * plane];
#pragma GCC unroll 8
      for (int j = 0; j < X; j++) {
        const vec met = load(right + j * step.column);
#pragma GCC unroll 8
        for (int i = 0; i < K; i++) sum[i][j] += one[i] * met;
      }
    }
  }
  for (int i = 0; i < K; i++)
    for (int j = 0; j < X; j++) {
      float total = 0;
      for (int q = 0; q < L; q++) total += sum[i][j][q];
      dw[i * next_output + j * next_tap] += total;
    }
}

// From the gradient e of the output y, in any order with n last (`of_e`), of which nothing is pooled (`pooled.h`): dx, in
// the order of x, and dw and db, to which is added, unless they are null.
static void few_backward(const float* x, const float* e, const Steps& of_e, const float* y, const float* weights,
                         float* dx, float* dw, float* db, const Few& o, long first, long end) {
  const long margin = o.wide - 1, wide = o.across + 2 * margin, plane = o.down * wide, taps = o.k * o.high * o.wide;
  vec* full = scratch<vec>(1, o.k * plane + o.c * o.h * o.w);  // the gradient between margins of zeros
  vec* kept = full + o.k * plane;
  float* packed = scratch<float>(0, taps * o.c + FEW);
  float* start = packed + taps * o.c;
  std::fill(start, start + FEW, 0.0f);
  if (dx)
    few_packed(packed, o.c, o.k, o.high, o.wide, [&](long c, long k, long i, long j) {
      return weights[((k * o.high + i) * o.wide + (o.wide - 1 - j)) * o.c + c];
    });
  const Steps inner = {plane * L, -wide * L, L};  // a tap further down meets a row further up
  for (long image = first; image < end; image += L) {
    ints real;  // -1 where an image is
    for (int q = 0; q < L; q++) real[q] = image + q < o.count ? -1 : 0;
    std::memset((void*)full, 0, o.k * plane * sizeof(vec));
    for (long k = 0; k < o.k; k++) {
      vec total = {};
      for (long row = 0; row < o.rows(); row++)
        for (long at = 0; at < o.columns(); at++) {
          const long own = ((k * o.rows() + row) * o.columns() + at) * o.n + image;
          vec v = load(e + k * of_e.channel + row * of_e.row + at * of_e.column + image);
          v = real ? v : vec{};
          if (o.relu) v = load(y + own) <= 0 ? vec{} : v;
          full[k * plane + row * wide + margin + at] = v;
          total += v;
        }
      for (int q = 0; db && q < L; q++) db[k] += total[q];
    }
    const float* own = x + image;
    Steps step = o.step;
    if (image + L > o.count) {  // what stands where no image is may be no number, whose product with 0 is none
      step = {o.h * o.w * L, o.w * L, L};
      for (long c = 0; c < o.c; c++)
        for (long i = 0; i < o.h; i++)
          for (long j = 0; j < o.w; j++) {
            const vec v = load(own + c * o.step.channel + i * o.step.row + j * o.step.column);
            kept[(c * o.h + i) * o.w + j] = real ? v : vec{};
          }
      own = (const float*)kept;
    }
    in_blocks<GRADIENTS>(dw ? o.k : 0, [&](long k, auto few) {
      for (long c = 0; c < o.c; c++)
        for (long i = 0; i < o.high; i++)
          in_blocks<TAPS>(o.wide, [&](long j, auto span) {
            const float* met = own + c * step.channel + i * step.row + j * step.column;
            few_products<few, span>(full + k * plane + margin, plane, wide, met, step, o.down, o.across,
                                    dw + ((k * o.high + i) * o.wide + j) * o.c + c, o.high * o.wide * o.c, o.c);
          });
    });
    in_blocks<OUTPUTS>(dx ? o.c : 0, [&](long c, auto few) {
      for (long row = 0; row < o.h; row++) {
        const long skipped = std::max(0L, row - o.down + 1), met = std::min(row + 1, o.high) - skipped;
        float* to = dx + image + c * o.step.channel + row * o.step.row;
        few_row<few>((const float*)(full + (row - skipped) * wide), inner, o.k, met, o.wide,
                     packed + c * taps + skipped * o.wide * few, o.high * o.wide * few, start, o.w,
                     [&](int i, long at, vec v) { store(to + i * o.step.channel + at * o.step.column, v); });
      }
    });
  }
}
