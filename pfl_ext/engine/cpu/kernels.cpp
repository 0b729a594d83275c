// Layers of convolutional networks on a CPU, in channels-last memory: what torch's are slow at. Images are float32, or,
// where `half` says so, bfloat16. Each function works over the n images on so many threads; torch has loaded the OpenMP
// library, whose threads are shared with its own. All return 0, or 1 where there was no memory, but `has_halves`.

#include "direct.h"
#include "group_norm.h"
#include "pool.h"
#include "thin.h"
#include "winograd.h"

// work(a vector of the type to compute with); 1 where there was no memory for it, else 0
template <class Work> static long with(long half, Work work) {
  try {
    if (half)
      work(halves{});
    else
      work(vec{});
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
template <class Work> static void split(long n, long threads, Work work) {
  const long parts = std::max(1L, std::min(n, threads));
  bool failed = false;  // an exception must not leave a thread of OpenMP's
#pragma omp parallel for num_threads(parts) schedule(static, 1) reduction(|| : failed) if (parts > 1)
  for (long part = 0; part < parts; part++) {
    try {
      work(n * part / parts, n * (part + 1) / parts, part);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  }
  if (failed) throw std::bad_alloc();
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

// The image at this place among others of `size` values; null stays null.
template <class V> static const Image<V>* at(const void* images, long place, long size) {
  return images ? (const Image<V>*)images + place * size : nullptr;
}
template <class V> static Image<V>* at(void* images, long place, long size) {
  return images ? (Image<V>*)images + place * size : nullptr;
}

extern "C" {

long has_halves() { return each<halves> > 1; }

long conv3x3(const void* x, const float* w, void* y, long threads, long half, long n, long h, long width, long c,
             long k) {
  return with(half, [&](auto kind) {
    typedef decltype(kind) V;
    split(n, threads, [&](long first, long last, long) {
      winograd<V>(at<V>(x, first, h * width * c), w, at<V>(y, first, h * width * k), last - first, h, width, c, k);
    });
  });
}
long conv3x3_backward(const void* x, const void* e, const float* w, void* dx, float* dw, long threads, long half, long n,
                      long h, long width, long c, long k) {
  return with(half, [&](auto kind) {
    typedef decltype(kind) V;
    split_sum(n, threads, dw, 9 * c * k, [&](long first, long last, float* own) {
      winograd_backward<V>(at<V>(x, first, h * width * c), at<V>(e, first, h * width * k), w,
                           at<V>(dx, first, h * width * c), own, last - first, h, width, c, k);
    });
  });
}
long convolve(const void* x, const float* w, void* y, long threads, long half, long n, long h, long width, long c,
              long k, long high, long wide, long stride, long top, long left) {
  return with(half, [&](auto kind) {
    typedef decltype(kind) V;
    split(n, threads, [&](long first, long last, long) {
      const Form o(last - first, h, width, c, k, high, wide, stride, top, left);
      const auto work = c < CHANNELS ? thin<V> : direct<V>;
      work(at<V>(x, first, h * width * c), w, at<V>(y, first, o.down * o.across * k), o);
    });
  });
}
// With fewer than CHANNELS channels dx must be null.
long convolve_backward(const void* x, const void* e, const float* w, void* dx, float* dw, long threads, long half, long n,
                       long h, long width, long c, long k, long high, long wide, long stride, long top, long left) {
  return with(half, [&](auto kind) {
    typedef decltype(kind) V;
    split_sum(n, threads, dw, high * wide * c * k, [&](long first, long last, float* own) {
      const Form o(last - first, h, width, c, k, high, wide, stride, top, left);
      const Image<V>*xs = at<V>(x, first, h * width * c), *es = at<V>(e, first, o.down * o.across * k);
      if (c < CHANNELS)
        thin_backward<V>(xs, es, own, o);
      else
        direct_backward<V>(xs, es, w, at<V>(dx, first, h * width * c), own, o);
    });
  });
}
long pool(const void* x, void* y, unsigned char* places, long threads, long half, long n, long h, long width, long c,
          long high, long wide, long stride, long top, long left) {
  return with(half, [&](auto kind) {
    typedef decltype(kind) V;
    split(n, threads, [&](long first, long last, long) {
      const Form o(last - first, h, width, c, c, high, wide, stride, top, left);
      const long size = o.down * o.across * c;
      max_pool(at<V>(x, first, h * width * c), at<V>(y, first, size), places + first * size, o);
    });
  });
}
long pool_backward(const void* e, const unsigned char* places, void* dx, long threads, long half, long n, long h,
                   long width, long c, long high, long wide, long stride, long top, long left) {
  return with(half, [&](auto kind) {
    typedef decltype(kind) V;
    split(n, threads, [&](long first, long last, long) {
      const Form o(last - first, h, width, c, c, high, wide, stride, top, left);
      const long size = o.down * o.across * c;
      max_pool_backward(at<V>(e, first, size), places + first * size, at<V>(dx, first, h * width * c), o);
    });
  });
}
long group_norm(const void* x, const void* z, const float* scale, const float* shift, void* y, float* mean, float* rstd,
                long threads, long half, long n, long positions, long c, long g, long after, double eps) {
  return with(half, [&](auto kind) {
    typedef decltype(kind) V;
    typedef Image<V> I;
    const auto one = after == NOTHING ? normalise<NOTHING, I> : after == RELU ? normalise<RELU, I> : normalise<ADD_RELU, I>;
    const long size = positions * c;
    split(n, threads, [&](long first, long last, long) {
      one(at<V>(x, first, size), at<V>(z, first, size), scale, shift, at<V>(y, first, size), mean + first * g,
          rstd + first * g, last - first, positions, c, g, eps);
    });
  });
}
long group_norm_backward(const void* x, const void* y, const void* e, const float* scale, const float* shift,
                         const float* mean, const float* rstd, void* dx, void* dz, float* dshift, float* dscale,
                         long threads, long half, long n, long positions, long c, long g, long after) {
  return with(half, [&](auto kind) {
    typedef decltype(kind) V;
    typedef Image<V> I;
    const auto one = after == NOTHING ? normalise_backward<NOTHING, I>
                     : after == RELU  ? normalise_backward<RELU, I>
                                      : normalise_backward<ADD_RELU, I>;
    const long size = positions * c;
    split(n, threads, [&](long first, long last, long) {
      one(at<V>(x, first, size), at<V>(y, first, size), at<V>(e, first, size), scale, shift, mean + first * g,
          rstd + first * g, at<V>(dx, first, size), at<V>(dz, first, size), dshift + first * c, dscale + first * c,
          last - first, positions, c, g);
    });
  });
}
}
