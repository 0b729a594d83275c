// GroupNorm, whose backward in torch is slow in channels-last memory, with what follows it in a block: adding
// another tensor z and ReLU.
//
// Letters: n images, c channels, g groups. Images are [n][positions][c]; c is a multiple of 32.

#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

enum After { NOTHING, RELU, ADD_RELU };

// Sums over an image's positions, by channel, in double from pieces in float: of each(at, q, near) and of its product
// with near = x - p, where p, near the mean, spares digits.
template <class Image, class Each> static void channel_sums(const Image* x, const float* p, long positions, long c,
                                                            double* plain, double* product, Each each) {
  std::fill(plain, plain + c, 0.0), std::fill(product, product + c, 0.0);
  for (long first = 0; first < positions; first += 32)
    for (long q = 0; q < c; q += WIDE) {
      vec a[2] = {}, b[2] = {};
      for (long i = first; i < std::min(first + 32, positions); i++)
        for (int j = 0; j < 2; j++) {
          const long own = q + j * L;
          vec near = load(x + i * c + own) - load(p + own), one = each(i * c + own, own, near);
          a[j] += one, b[j] += one * near;
        }
      for (int j = 0; j < 2 * L; j++) plain[q + j] += a[j / L][j % L], product[q + j] += b[j / L][j % L];
    }
}

// y = (x - mean) / sqrt(var + eps) * scale + shift over each of g groups of channels, and what comes after; mean and
// rstd are [n][g].
template <After after, class Image> static void normalise(
    const Image* x, const Image* z, const float* scale, const float* shift, Image* y, float* mean, float* rstd, long n,
    long positions, long c, long g, double eps) {
  const long wide = c / g, size = positions * c;
  double* sums = scratch<double>(0, 4 * c);
  float *times = scratch<float>(1, 3 * c), *centre = times + c, *p = centre + c;
  for (long i = 0; i < n; i++, x += size, y += size, z += after == ADD_RELU ? size : 0) {
    for (long j = 0; j < c; j++) p[j] = number(x[j]);  // of the first position
    channel_sums(x, p, positions, c, sums, sums + c, [](long, long, vec near) { return near; });
    for (long q = 0; q < g; q++) {
      double m = 0, squares = 0, count = double(wide * positions);
      for (long j = q * wide; j < (q + 1) * wide; j++) m += (p[j] * double(positions) + sums[j]) / count;
      for (long j = q * wide; j < (q + 1) * wide; j++)
        squares += sums[c + j] + (m - p[j]) * ((m - p[j]) * positions - 2 * sums[j]);
      const double r = 1 / std::sqrt(std::max(squares / count, 0.0) + eps);
      mean[i * g + q] = float(m), rstd[i * g + q] = float(r);
      for (long j = q * wide; j < (q + 1) * wide; j++)
        times[j] = float(r * scale[j]), centre[j] = float(m);
    }
    for (long at = 0; at < size; at += c)
      for (long q = 0; q < c; q += L) {
        vec out = (load(x + at + q) - load(centre + q)) * load(times + q) + load(shift + q);
        if (after == ADD_RELU) out += load(z + at + q);
        store(y + at + q, after == NOTHING ? out : out < 0 ? vec{} : out);  // a NaN stays one
      }
  }
}

// From e, the gradient of y: dx; each image's gradients of shift and scale [n][c]; after ADD_RELU, which needs y, dz.
template <After after, class Image> static void normalise_backward(
    const Image* x, const Image* y, const Image* e, const float* scale, const float* shift, const float* mean,
    const float* rstd, Image* dx, Image* dz, float* dshift, float* dscale, long n, long positions, long c, long g) {
  const long wide = c / g, size = positions * c, more = after == ADD_RELU ? size : 0;
  double* sums = scratch<double>(0, 4 * c);
  float *of_e = scratch<float>(1, 4 * c), *of_x = of_e + c, *plus = of_x + c, *centre = plus + c;
  for (long i = 0; i < n; i++, x += size, y += more, e += size, dx += size, dz += more) {
    for (long j = 0; j < c; j++) centre[j] = mean[i * g + j / wide], of_e[j] = float(double(rstd[i * g + j / wide]) * scale[j]);
    auto signal = [&](long at, long q, vec near) {  // the gradient of what the norm gave
      vec one = load(e + at);
      return after == RELU ? near * load(of_e + q) + load(shift + q) <= 0 ? vec{} : one : one;
    };
    channel_sums(x, centre, positions, c, sums, sums + c, [&](long at, long q, vec near) {
      if (after != ADD_RELU) return signal(at, q, near);
      vec one = load(y + at) <= 0 ? vec{} : load(e + at);
      store(dz + at, one);
      return one;
    });
    for (long q = 0; q < g; q++) {
      double a = 0, b = 0, count = double(wide * positions), r = rstd[i * g + q];
      for (long j = q * wide; j < (q + 1) * wide; j++) {
        dshift[i * c + j] = float(sums[j]), dscale[i * c + j] = float(sums[c + j] * r);
        a += scale[j] * sums[j] / count, b += scale[j] * sums[c + j] / count;
      }
      for (long j = q * wide; j < (q + 1) * wide; j++) of_x[j] = float(-b * r * r * r), plus[j] = float(-a * r);
    }
    for (long p = 0; p < size; p += c)
      for (long q = 0; q < c; q += L) {
        vec near = load(x + p + q) - load(centre + q), one = after == ADD_RELU ? load(dz + p + q) : signal(p + q, q, near);
        store(dx + p + q, one * load(of_e + q) + near * load(of_x + q) + load(plus + q));
      }
  }
}
