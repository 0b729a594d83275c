// Linear layers of the few images of a batch, with the ReLU that follows. Large weights are read once in each pass.
//
// Letters: n images, c values in, k out. Images are [n][c], weights [k][c].

#pragma once

#include <algorithm>
#include <vector>

#include "across.h"

#if defined(__AVX512F__)
#define IMAGES 4, 2, 1
#define UNITS 6, 4, 2, 1
#define INPUTS 2, 1
#else
#define IMAGES 2, 1
#define UNITS 4, 2, 1
#define INPUTS 2, 1
#endif

// work(i, true) for each whole vector of a row of c values, and work(i, false) for what is left: fewer values
template <class Work> static inline void along(long c, Work work) {
  for (long i = 0; i + L <= c; i += L) work(i, std::true_type());
  if (c % L) work(c / L * L, std::false_type());
}
template <class Whole> static inline vec load_some(const float* p, long left, Whole) {
  if (Whole()) return load(p);
  vec v = {};
  std::memcpy((void*)&v, p, left * sizeof(float));
  return v;
}
template <class Whole> static inline void store_some(float* p, vec v, long left, Whole) {
  if (Whole())
    store(p, v);
  else
    std::memcpy(p, (const void*)&v, left * sizeof(float));
}
static inline float total(vec v) {
  float halves[L];
  store(halves, v);
  for (int wide = L / 2; wide; wide /= 2)
    for (int i = 0; i < wide; i++) halves[i] += halves[i + wide];
  return halves[0];
}

template <int N, int K>
__attribute__((noinline)) static void dots(const float* x, const float* w, float* y, long c, long k) {
  vec sum[N][K] = {};
  along(c, [&](long i, auto whole) {
    vec one[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) one[j] = load_some(x + j * c + i, c - i, whole);
#pragma GCC unroll 8
    for (int q = 0; q < K; q++) {
      const vec own = load_some(w + q * c + i, c - i, whole);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) sum[j][q] += one[j] * own;
    }
  });
  for (int j = 0; j < N; j++)
    for (int q = 0; q < K; q++) y[j * k + q] = total(sum[j][q]);
}
// y [n][k] of images [n][c]
static void linear(const float* x, const float* w, const float* bias, float* y, long n, long c, long k, bool relu) {
  in_blocks<UNITS>(k, [&](long q, auto units) {
    in_blocks<IMAGES>(n, [&](long i, auto images) { dots<images, units>(x + i * c, w + q * c, y + i * k + q, c, k); });
  });
  for (long i = 0; i < n; i++)
    for (long q = 0; q < k; q++) {
      float v = y[i * k + q] + (bias ? bias[q] : 0);
      y[i * k + q] = relu && v < 0 ? 0 : v;
    }
}
// dx (+)= e * w for K outputs
template <int K>
__attribute__((noinline)) static void spread_back(const float* e, const float* w, float* dx, long n, long c, long k,
                                                  bool add) {
  along(c, [&](long at, auto whole) {
    vec own[K];
#pragma GCC unroll 8
    for (int q = 0; q < K; q++) own[q] = load_some(w + q * c + at, c - at, whole);
    for (long i = 0; i < n; i++) {
      vec sum = add ? load_some(dx + i * c + at, c - at, whole) : vec{};
#pragma GCC unroll 8
      for (int q = 0; q < K; q++) sum += own[q] * e[i * k + q];
      store_some(dx + i * c + at, sum, c - at, whole);
    }
  });
}
// dw[q][at..] of K outputs and I vectors of inputs, of which the last has `left` values; or, where w is given, w - rate * dw
template <int K, int I>
__attribute__((noinline)) static void products_of(const float* e, const float* x, const float* w, float rate, float* dw,
                                                  long n, long c, long k, long left) {
  vec sum[K][I] = {};
  auto go = [&](auto whole) {
    for (long i = 0; i < n; i++) {
      vec one[I];
#pragma GCC unroll 8
      for (int j = 0; j < I; j++) one[j] = load_some(x + i * c + j * L, left, whole);
#pragma GCC unroll 8
      for (int q = 0; q < K; q++)
#pragma GCC unroll 8
        for (int j = 0; j < I; j++) sum[q][j] += one[j] * e[i * k + q];
    }
    for (int q = 0; q < K; q++)
      for (int j = 0; j < I; j++) {
        const long at = q * c + j * L;
        store_some(dw + at, w ? load_some(w + at, left, whole) - sum[q][j] * rate : sum[q][j], left, whole);
      }
  };
  if (left < L)
    go(std::false_type());
  else
    go(std::true_type());
}
// From e, the gradient of y before ReLU: dx, and of the outputs [first, end) dw, unless they are null. Where `step` says so,
// dw are the weights after a step of gradient descent, and may be w itself.
static void linear_backward(const float* x, const float* e, const float* w, float* dx, float* dw, long n, long c, long k,
                            bool step, float rate, long first, long end) {
  const long vectors = (c + L - 1) / L, whole = c / L;
  in_blocks<UNITS>(
      end,
      [&](long q, auto units) {
        if (dx) spread_back<units>(e + q, w + q * c, dx, n, c, k, q > first);
        if (!dw) return;
        const float* before = step ? w + q * c : nullptr;
        float* to = dw + q * c;
        in_blocks<INPUTS>(whole, [&](long i, auto inputs) {
          const long at = i * L;
          products_of<units, inputs>(e + q, x + at, step ? before + at : nullptr, rate, to + at, n, c, k, L);
        });
        const long at = whole * L;
        if (whole < vectors)
          products_of<units, 1>(e + q, x + at, step ? before + at : nullptr, rate, to + at, n, c, k, c - at);
      },
      first);
}
