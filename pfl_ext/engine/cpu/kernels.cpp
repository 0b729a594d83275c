// Layers of convolutional networks on a CPU, in channels-last memory: what torch's are slow at. Images are float32, or,
// where `half` says so, bfloat16. Each function works over the n images on so many threads; torch has loaded the OpenMP
// library, whose threads are shared with its own. All return 0, or 1 where there was no memory, but `has_halves`.

#include "across.h"
#include "depthwise.h"
#include "direct.h"
#include "dropping.h"
#include "first.h"
#include "group_norm.h"
#include "images.h"
#include "linear.h"
#include "pooled.h"
#include "winograd.h"

// work(a), or work(b) where `half` says so; 1 where there was no memory for it, else 0
template <class A, class B, class Work> static long choose(long half, A a, B b, Work work) {
  try {
    if (half)
      work(b);
    else
      work(a);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
// work(a vector of the type to compute with)
template <class Work> static long with(long half, Work work) { return choose(half, vec{}, halves{}, work); }
// work(a number of the type of the images), where all is computed in float32
template <class Work> static long with_images(long half, Work work) { return choose(half, 0.0f, bfloat{}, work); }
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
template <class I> static const I* at(const void* images, long place, long size) {
  return images ? (const I*)images + place * size : nullptr;
}
template <class I> static I* at(void* images, long place, long size) {
  return images ? (I*)images + place * size : nullptr;
}

extern "C" {

long has_halves() { return each<halves> > 1; }

long conv3x3(const void* x, const float* w, void* y, long threads, long half, long n, long h, long width, long c,
             long k) {
  return with(half, [&](auto kind) {
    typedef decltype(kind) V;
    typedef Image<V> I;
    split(n, threads, [&](long first, long last, long) {
      winograd<V>(at<I>(x, first, h * width * c), w, at<I>(y, first, h * width * k), last - first, h, width, c, k);
    });
  });
}
long conv3x3_inner(const float* x, const float* w, float* y, long threads, long, long n, long h, long width, long c,
                   long k) {
  return choose(0, 0, 0, [&](int) {
    split(n, threads, [&](long first, long end, long) {
      winograd<vec, 0>(x + first * h * width * c, w, y + first * (h - 2) * (width - 2) * k, end - first, h, width, c, k);
    });
  });
}
long conv3x3_backward(const void* x, const void* e, const float* w, void* dx, float* dw, long threads, long half, long n,
                      long h, long width, long c, long k) {
  return with(half, [&](auto kind) {
    typedef decltype(kind) V;
    typedef Image<V> I;
    split_sum(n, threads, dw, 9 * c * k, [&](long first, long last, float* own) {
      winograd_backward<V>(at<I>(x, first, h * width * c), at<I>(e, first, h * width * k), w,
                           at<I>(dx, first, h * width * c), own, last - first, h, width, c, k);
    });
  });
}
long convolve(const void* x, const float* w, void* y, long threads, long half, long n, long h, long width, long c,
              long k, long high, long wide, long stride, long top, long left) {
  return with(half, [&](auto kind) {
    typedef decltype(kind) V;
    typedef Image<V> I;
    split(n, threads, [&](long first, long last, long) {
      const Form o(last - first, h, width, c, k, high, wide, stride, top, left);
      direct<V>(at<I>(x, first, h * width * c), w, at<I>(y, first, o.down * o.across * k), o);
    });
  });
}
long convolve_backward(const void* x, const void* e, const float* w, void* dx, float* dw, long threads, long half, long n,
                       long h, long width, long c, long k, long high, long wide, long stride, long top, long left) {
  return with(half, [&](auto kind) {
    typedef decltype(kind) V;
    typedef Image<V> I;
    split_sum(n, threads, dw, high * wide * c * k, [&](long first, long last, float* own) {
      const Form o(last - first, h, width, c, k, high, wide, stride, top, left);
      direct_backward<V>(at<I>(x, first, h * width * c), at<I>(e, first, o.down * o.across * k), w,
                         at<I>(dx, first, h * width * c), own, o);
    });
  });
}
long depthwise_weights(const float* x, const float* e, float* dw, long threads, long, long n, long h, long width, long c,
                       long high, long wide, long stride, long top, long left) {
  return choose(0, 0, 0, [&](int) {
    split_sum(n, threads, dw, high * wide * c, [&](long first, long last, float* own) {
      const Depth o(last - first, h, width, c, high, wide, stride, top, left);
      depthwise_weights<5>(x + first * h * width * c, e + first * o.down * o.across * c, own, o);
    });
  });
}
long group_norm(const void* x, const void* z, const float* scale, const float* shift, void* y, float* mean, float* rstd,
                long threads, long half, long n, long positions, long c, long g, long after, double eps) {
  return with_images(half, [&](auto kind) {
    typedef decltype(kind) I;
    const auto one = after == NOTHING ? normalise<NOTHING, I> : after == RELU ? normalise<RELU, I> : normalise<ADD_RELU, I>;
    const long size = positions * c;
    split(n, threads, [&](long first, long last, long) {
      one(at<I>(x, first, size), at<I>(z, first, size), scale, shift, at<I>(y, first, size), mean + first * g,
          rstd + first * g, last - first, positions, c, g, eps);
    });
  });
}
long group_norm_backward(const void* x, const void* y, const void* e, const float* scale, const float* shift,
                         const float* mean, const float* rstd, void* dx, void* dz, float* dshift, float* dscale,
                         long threads, long half, long n, long positions, long c, long g, long after) {
  return with_images(half, [&](auto kind) {
    typedef decltype(kind) I;
    const auto one = after == NOTHING ? normalise_backward<NOTHING, I>
                     : after == RELU  ? normalise_backward<RELU, I>
                                      : normalise_backward<ADD_RELU, I>;
    const long size = positions * c;
    split(n, threads, [&](long first, long last, long) {
      one(at<I>(x, first, size), at<I>(y, first, size), at<I>(e, first, size), scale, shift, mean + first * g,
          rstd + first * g, at<I>(dx, first, size), at<I>(dz, first, size), dshift + first * c, dscale + first * c,
          last - first, positions, c, g);
    });
  });
}
long lanes() { return L; }
long lay_images(const float* x, float* y, long, long, long count, long n, long rows, long size, long apart) {
  lay_out(x, y, count, n, rows, size, apart);
  return 0;
}
long few_channels(const float* x, const float* w, const float* bias, float* y, unsigned char* places, long threads,
                  long, long n, long count, long c, long h, long width, long k, long high, long wide, long relu,
                  long pool, long channel, long row, long column) {
  const Few o = {n, count, c, h, width, k, high, wide, relu != 0, pool != 0, {channel, row, column}};
  return choose(0, 0, 0, [&](int) {
    split(n / L, threads, [&](long first, long end, long) {
      few_forward(x, w, bias, y, places, o, first * L, end * L);
    });
  });
}
long few_channels_backward(const float* x, const float* e, const float* y, const float* w, float* dx, float* dw,
                           long threads, long, long n, long count, long c, long h, long width, long k, long high,
                           long wide, long relu, long channel, long row, long column, long e_channel, long e_row,
                           long e_column) {
  const Few o = {n, count, c, h, width, k, high, wide, relu != 0, false, {channel, row, column}};
  const Steps of_e = {e_channel, e_row, e_column};
  const long size = k * high * wide * c;  // after dw stands db
  return choose(0, 0, 0, [&](int) {
    split_sum(n / L, threads, dw, size + k, [&](long first, long end, float* own) {
      few_backward(x, e, of_e, y, w, dx, own, own ? own + size : nullptr, o, first * L, end * L);
    });
  });
}
long pool_outputs(const float* y, const float* bias, float* out, unsigned char* places, long threads, long, long n,
                  long rows, long columns, long k, long relu, long image, long row, long column) {
  return choose(0, 0, 0, [&](int) {
    split(n, threads, [&](long first, long end, long) {
      pool(y, {image, 1, row, column}, bias, out, places, rows, columns, k, relu != 0, first, end);
    });
  });
}
long pooled_gradients(const float* x, const float* e, const unsigned char* places, const float* w, float* dx, float* dw,
                      long threads, long, long n, long h, long width, long c, long k, long high, long wide,
                      long e_image, long e_channel, long e_row, long e_column, long place_image, long place_channel,
                      long place_row, long place_column) {
  const Pooled o = {n,    h,    width, c, k, high, wide, {e_image, e_channel, e_row, e_column},
                    {place_image, place_channel, place_row, place_column}};
  const long size = k * high * wide * c;  // after dw stands db
  return choose(0, 0, 0, [&](int) {
    split_sum(n, threads, dw, size + k, [&](long first, long end, float* own) {
      pooled_backward(x, e, places, w, dx, own, own ? own + size : nullptr, o, first, end);
    });
  });
}
long crop_images(const unsigned char* images, const float* crops, const float* table, float* input, long threads, long,
                 long n, long h, long width, long size, long apart, long reflect) {
  return choose(0, 0, 0, [&](int) {
    split(n, threads, [&](long first, long end, long) {
      crop(images, crops, table, input, h, width, size, apart, reflect != 0, first, end);
    });
  });
}
long linear_layer(const float* x, const float* w, const float* bias, float* y, long threads, long, long n, long c, long k,
                  long relu) {
  return choose(0, 0, 0, [&](int) {
    split(n, threads, [&](long first, long end, long) {
      linear(x + first * c, w, bias, y + first * k, end - first, c, k, relu != 0);
    });
  });
}
long linear_gradients(const float* x, const float* e, const float* w, float* dx, float* dw, long threads, long, long n,
                      long c, long k, long step, double rate) {
  return choose(0, 0, 0, [&](int) {
    if (threads == 1) return linear_backward(x, e, w, dx, dw, n, c, k, step != 0, float(rate), 0, k);
    split(dx ? n : 0, threads, [&](long first, long end, long) {  // before any weight is changed
      linear_backward(x, e + first * k, w, dx + first * c, nullptr, end - first, c, k, false, 0, 0, k);
    });
    split(k, threads, [&](long first, long end, long) {
      linear_backward(x, e, w, nullptr, dw, n, c, k, step != 0, float(rate), first, end);
    });
  });
}
long drop_units(const float* x, const int64_t* keys, float* y, long threads, long, long n, long outer, long inner,
                long across, long along, long number, long least, long of_outer, long of_inner, double factor) {
  return choose(0, 0, 0, [&](int) {
    split(n, threads, [&](long first, long end, long) {
      drop(x, keys, y, outer, inner, across, along, number, least, float(factor), of_outer, of_inner, first, end);
    });
  });
}
long first_layer(const float* x, const float* w, const float* bias, float* y, long threads, long, long n, long h,
                 long width, long c, long k, long high, long wide, long relu) {
  const First o = {n, h, width, c, k, high, wide, relu != 0};
  return choose(0, 0, 0, [&](int) {
    split(n, threads, [&](long first, long end, long) { first_forward(x, w, bias, y, o, first, end); });
  });
}
long first_gradients(const float* x, const float* e, const float* y, float* dw, long threads, long, long n, long h,
                     long width, long c, long k, long high, long wide, long relu) {
  const First o = {n, h, width, c, k, high, wide, relu != 0};
  return choose(0, 0, 0, [&](int) {
    split_sum(n, threads, dw, (o.taps() + 1) * k, [&](long first, long end, float* own) {
      first_backward(x, e, y, own, o, first, end);
    });
  });
}
}
