// The first convolution of a network, of few channels in and many out, with the ReLU that follows: a vector holds L channels
// of one output. Where there are fewer images than a vector has places this is faster than `across.h`.
//
// Letters: n images, h x w positions with the padding, c channels in, k out, a multiple of L, down x across outputs.
// Images are [n][h][w][c], weights [k][high][wide][c]; the stride is 1.

#pragma once

#include <algorithm>
#include <cstring>

#include "across.h"

#if defined(__AVX512F__)
#define PLACES 8, 4, 2, 1
#define MET 9, 5, 3, 1
#else
#define PLACES 4, 2, 1
#define MET 5, 3, 1
#endif

struct First {
  long n, h, w, c, k, high, wide;
  bool relu;
  long down = h - high + 1, across = w - wide + 1;
  long met() const { return wide * c; }  // inputs that a row of the kernel meets, one after another
  long taps() const { return high * met(); }
  long outputs() const { return down * across * k; }
};

// y = start + sum over the kernel of x * w for P outputs of V vectors; weights are [taps][k]
template <int P, int V>
__attribute__((noinline)) static void first_sums(const float* x, const float* w, const float* start, float* y,
                                                 const First& o) {
  vec sum[P][V];
#pragma GCC unroll 8
  for (int p = 0; p < P; p++)
    for (int v = 0; v < V; v++) sum[p][v] = load(start + v * L);
  for (long i = 0; i < o.high; i++) {
    const float* from = x + i * o.w * o.c;
    for (long q = 0; q < o.met(); q++, w += o.k) {
      vec own[V];
      for (int v = 0; v < V; v++) own[v] = load(w + v * L);
#pragma GCC unroll 8
      for (int p = 0; p < P; p++)
        for (int v = 0; v < V; v++) sum[p][v] += own[v] * from[p * o.c + q];
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < P; p++)
    for (int v = 0; v < V; v++) store(y + p * o.k + v * L, o.relu ? (sum[p][v] < 0 ? vec{} : sum[p][v]) : sum[p][v]);
}
static void first_forward(const float* x, const float* weights, const float* bias, float* y, const First& o, long first,
                          long end) {
  float* packed = scratch<float>(0, (o.taps() + 1) * o.k);
  float* start = packed + o.taps() * o.k;
  for (long q = 0; q < o.k; q++) {
    for (long i = 0; i < o.taps(); i++) packed[i * o.k + q] = weights[q * o.taps() + i];
    start[q] = bias ? bias[q] : 0;
  }
  for (long image = first; image < end; image++)
    for (long row = 0; row < o.down; row++)
      in_blocks<2, 1>(o.k / L, [&](long q, auto vectors) {
        in_blocks<PLACES>(o.across, [&](long j, auto places) {
          first_sums<places, vectors>(x + ((image * o.h + row) * o.w + j) * o.c, packed + q * L, start + q * L,
                                      y + ((image * o.down + row) * o.across + j) * o.k + q * L, o);
        });
      });
}
// sums[t][v] += x * e over an image for T inputs that a row of the kernel meets
template <int T, int V>
__attribute__((noinline)) static void first_products(const float* x, const float* e, float* sums, const First& o) {
  vec sum[T][V];
#pragma GCC unroll 16
  for (int t = 0; t < T; t++)
    for (int v = 0; v < V; v++) sum[t][v] = load(sums + t * o.k + v * L);
  for (long row = 0; row < o.down; row++) {
    const float* from = x + row * o.w * o.c;
    for (long j = 0; j < o.across; j++, from += o.c, e += o.k) {
      vec one[V];
      for (int v = 0; v < V; v++) one[v] = load(e + v * L);
#pragma GCC unroll 16
      for (int t = 0; t < T; t++)
        for (int v = 0; v < V; v++) sum[t][v] += one[v] * from[t];
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; t++)
    for (int v = 0; v < V; v++) store(sums + t * o.k + v * L, sum[t][v]);
}
// From e, the gradient of y: dw, and db after it, to which is added.
static void first_backward(const float* x, const float* e, const float* y, float* dw, const First& o, long first,
                           long end) {
  float* sums = scratch<float>(0, (o.taps() + 1) * o.k);
  float *shift = sums + o.taps() * o.k, *passed = scratch<float>(1, o.outputs());
  std::fill(sums, sums + (o.taps() + 1) * o.k, 0.0f);
  for (long image = first; image < end; image++) {
    const float *signal = e + image * o.outputs(), *out = y + image * o.outputs();
    for (long at = 0; at < o.outputs(); at += o.k)
      for (long q = 0; q < o.k; q += L) {
        vec v = load(signal + at + q);
        if (o.relu) v = load(out + at + q) <= 0 ? vec{} : v;
        store(passed + at + q, v);
        store(shift + q, load(shift + q) + v);
      }
    for (long i = 0; i < o.high; i++)
      in_blocks<2, 1>(o.k / L, [&](long q, auto vectors) {
        in_blocks<MET>(o.met(), [&](long t, auto met) {
          first_products<met, vectors>(x + (image * o.h + i) * o.w * o.c + t, passed + q * L,
                                       sums + (i * o.met() + t) * o.k + q * L, o);
        });
      });
  }
  for (long q = 0; q < o.k; q++) {
    for (long i = 0; i < o.taps(); i++) dw[q * o.taps() + i] += sums[i * o.k + q];
    dw[o.k * o.taps() + q] += shift[q];
  }
}
