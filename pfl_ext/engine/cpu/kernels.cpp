// Layers of convolutional networks on a CPU, in float32 and channels-last memory: what torch's are slow at. Each
// works over the n images on so many threads; torch has loaded the OpenMP library, whose threads are shared with
// its own.

#include "direct.h"
#include "group_norm.h"
#include "pool.h"
#include "thin.h"
#include "winograd.h"

template <class Work> static void split(long n, long threads, Work work) {
  const long parts = std::max(1L, std::min(n, threads));
#pragma omp parallel for num_threads(parts) schedule(static, 1) if (parts > 1)
  for (long part = 0; part < parts; part++) work(n * part / parts, n * (part + 1) / parts, part);
}
// Each part but the first has a dw of its own, to be added.
template <class Work> static void split_sum(long n, long threads, float* dw, long size, Work work) {
  const long parts = std::max(1L, std::min(n, threads));
  std::vector<float> others(dw ? (parts - 1) * size : 0);
  split(n, threads, [&](long first, long last, long part) {
    work(first, last, !dw || part == 0 ? dw : others.data() + (part - 1) * size);
  });
  for (long part = 1; dw && part < parts; part++)
    for (long i = 0; i < size; i++) dw[i] += others[(part - 1) * size + i];
}

extern "C" {

long has_halves() { return each<halves> > 1; }

void conv3x3(const float* x, const float* w, float* y, long threads, long n, long h, long width, long c, long k,
             long half) {
  const auto work = half ? winograd<halves> : winograd<vec>;
  split(n, threads, [&](long first, long last, long) {
    work(x + first * h * width * c, w, y + first * h * width * k, last - first, h, width, c, k);
  });
}
void conv3x3_backward(const float* x, const float* e, const float* w, float* dx, float* dw, long threads, long n,
                      long h, long width, long c, long k, long half) {
  const auto work = half ? winograd_backward<halves> : winograd_backward<vec>;
  split_sum(n, threads, dw, 9 * c * k, [&](long first, long last, float* own) {
    const long from = first * h * width;
    work(x + from * c, e + from * k, w, dx ? dx + from * c : dx, own, last - first, h, width, c, k);
  });
}
void convolve(const float* x, const float* w, float* y, long threads, long n, long h, long width, long c, long k,
              long high, long wide, long stride, long top, long left, long half) {
  const auto work = half ? direct<halves> : direct<vec>;
  split(n, threads, [&](long first, long last, long) {
    const Form o(last - first, h, width, c, k, high, wide, stride, top, left);
    work(x + first * h * width * c, w, y + first * o.down * o.across * k, o);
  });
}
void convolve_backward(const float* x, const float* e, const float* w, float* dx, float* dw, long threads, long n,
                       long h, long width, long c, long k, long high, long wide, long stride, long top, long left,
                       long half) {
  const auto work = half ? direct_backward<halves> : direct_backward<vec>;
  split_sum(n, threads, dw, high * wide * c * k, [&](long first, long last, float* own) {
    const Form o(last - first, h, width, c, k, high, wide, stride, top, left);
    const long from = first * h * width * c;
    work(x + from, e + first * o.down * o.across * k, w, dx ? dx + from : dx, own, o);
  });
}
void thin_convolve(const float* x, const float* w, float* y, long threads, long n, long h, long width, long c, long k,
                   long high, long wide, long stride, long top, long left, long half) {
  const auto work = half ? thin<halves> : thin<vec>;
  split(n, threads, [&](long first, long last, long) {
    const Form o(last - first, h, width, c, k, high, wide, stride, top, left);
    work(x + first * h * width * c, w, y + first * o.down * o.across * k, o);
  });
}
void thin_convolve_backward(const float* x, const float* e, float* dw, long threads, long n, long h, long width, long c,
                            long k, long high, long wide, long stride, long top, long left, long half) {
  const auto work = half ? thin_backward<halves> : thin_backward<vec>;
  split_sum(n, threads, dw, high * wide * c * k, [&](long first, long last, float* own) {
    const Form o(last - first, h, width, c, k, high, wide, stride, top, left);
    work(x + first * h * width * c, e + first * o.down * o.across * k, own, o);
  });
}
void pool(const float* x, float* y, unsigned char* places, long threads, long n, long h, long width, long c, long high,
          long wide, long stride, long top, long left) {
  split(n, threads, [&](long first, long last, long) {
    const Form o(last - first, h, width, c, c, high, wide, stride, top, left);
    const long to = first * o.down * o.across * c;
    max_pool(x + first * h * width * c, y + to, places + to, o);
  });
}
void pool_backward(const float* e, const unsigned char* places, float* dx, long threads, long n, long h, long width,
                   long c, long high, long wide, long stride, long top, long left) {
  split(n, threads, [&](long first, long last, long) {
    const Form o(last - first, h, width, c, c, high, wide, stride, top, left);
    const long from = first * o.down * o.across * c;
    max_pool_backward(e + from, places + from, dx + first * h * width * c, o);
  });
}
void group_norm(const float* x, const float* z, const float* scale, const float* shift, float* y, float* mean,
                float* rstd, long threads, long n, long positions, long c, long g, long after, double eps) {
  const auto one = after == NOTHING ? normalise<NOTHING> : after == RELU ? normalise<RELU> : normalise<ADD_RELU>;
  split(n, threads, [&](long first, long last, long) {
    const long from = first * positions * c;
    one(x + from, z ? z + from : z, scale, shift, y + from, mean + first * g, rstd + first * g, last - first,
        positions, c, g, eps);
  });
}
void group_norm_backward(const float* x, const float* y, const float* e, const float* scale, const float* shift,
                         const float* mean, const float* rstd, float* dx, float* dz, float* dshift, float* dscale,
                         long threads, long n, long positions, long c, long g, long after) {
  const auto one = after == NOTHING ? normalise_backward<NOTHING>
                   : after == RELU  ? normalise_backward<RELU>
                                    : normalise_backward<ADD_RELU>;
  split(n, threads, [&](long first, long last, long) {
    const long from = first * positions * c;
    one(x + from, y ? y + from : y, e + from, scale, shift, mean + first * g, rstd + first * g, dx + from,
        dz ? dz + from : dz, dshift + first * c, dscale + first * c, last - first, positions, c, g);
  });
}
}
