// GroupNorm, whose backward in torch is slow in channels-last memory.
//
// Letters: n images, c channels, g groups. Images are [n][positions][c]; c is a multiple of 32.

#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

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
