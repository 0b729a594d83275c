// Gradients of the weights of 5 x 5 convolutions that filter each channel by itself: torch's take many times as long as
// their arithmetic.
//
// Letters: n images [h][width][c], outputs [down][across][c], weights [high][wide][c]; c is a multiple of L. L channels
// of a padded image at a time lie in a thread's memory, without the others between them.

#pragma once

#include "vectors.h"

struct Depth {
  long n, h, width, c, high, stride, top, left, down, across, broad;
  Depth(long n, long h, long width, long c, long high, long wide, long stride, long top, long left)
      : n(n), h(h), width(width), c(c), high(high), stride(stride), top(top), left(left),
        down((h + 2 * top - high) / stride + 1), across((width + 2 * left - wide) / stride + 1), broad(width + 2 * left) {}
};

// dw += what L channels of one image x, which is padded, give. A row of outputs is added up by itself, then the rows,
// then the images, which spares roundings.
template <int WIDE> static void depthwise_image(const float* x, const float* e, float* dw, const Depth& o) {
  for (long i = 0; i < o.high; i++) {
    vec sums[WIDE] = {};
    for (long y = 0; y < o.down; y++) {
      const float *row = x + (y * o.stride + i) * o.broad * L, *errors = e + y * o.across * o.c;
      vec own[WIDE] = {};
      for (long p = 0; p < o.across; p++) {
        const vec error = load(errors + p * o.c);
        for (int j = 0; j < WIDE; j++) own[j] += error * load(row + (p * o.stride + j) * L);
      }
      for (int j = 0; j < WIDE; j++) sums[j] += own[j];
    }
    for (int j = 0; j < WIDE; j++) {
      float* to = dw + (i * WIDE + j) * o.c;
      store(to, load(to) + sums[j]);
    }
  }
}

// dw += what the images x and e, the outputs' gradient, give.
template <int WIDE> static void depthwise_weights(const float* x, const float* e, float* dw, const Depth& o) {
  const long padded = (o.h + 2 * o.top) * o.broad * L, size = o.h * o.width * o.c, outputs = o.down * o.across * o.c;
  float* in = scratch<float>(0, padded);
  std::fill(in, in + padded, 0.0f);
  for (long i = 0; i < o.n; i++)
    for (long q = 0; q < o.c; q += L) {
      for (long y = 0; y < o.h; y++)
        for (long p = 0; p < o.width; p++)
          store(in + ((y + o.top) * o.broad + p + o.left) * L, load(x + i * size + (y * o.width + p) * o.c + q));
      depthwise_image<WIDE>(in, e + i * outputs + q, dw + q, o);
    }
}
