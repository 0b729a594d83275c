// Vectors as wide as the processor's, of float and, where it multiplies them (AVX512-FP16), of half floats; and memory
// that a thread keeps.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#if defined(__AVX512FP16__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define HALVES 1
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__AVX512F__)
constexpr int L = 16;
#elif defined(__AVX__)
constexpr int L = 8;
#else
constexpr int L = 4;
#endif
constexpr long WIDE = 2 * L;  // columns of a product that are held in registers
constexpr long CHANNELS = 32;  // theirs are multiples of it

typedef float vec __attribute__((vector_size(4 * L)));
struct Floats {  // a vector at any address
  typedef float At __attribute__((vector_size(4 * L), aligned(4), may_alias));
};
static inline vec load(const float* p) { return *(const Floats::At*)p; }
static inline void store(float* p, vec v) { *(Floats::At*)p = v; }
static inline float number(float v) { return v; }

// Arithmetic on vectors V of L values, each a One: a float; or a pair of half floats, of two tiles or two images, which
// memory holds together so that a product takes both with one address. Images are floats in memory, or, for half floats,
// bfloat16; weights are floats. They are brought to halves times a scale, and back.
template <class V> struct Kind {
  typedef float One;
  typedef float Number;
  typedef float Image;
};
template <class V> using One = typename Kind<V>::One;
template <class V> using Number = typename Kind<V>::Number;
template <class V> using Image = typename Kind<V>::Image;
template <class V> constexpr long each = sizeof(One<V>) / sizeof(Number<V>);  // tiles or images that a value is of
template <class V> constexpr long chain = 1L << 40;  // terms that are added up before the sum goes elsewhere

template <class V> static inline V take(const One<V>* p) { return load(p); }
static inline void put(float* p, vec v) { store(p, v); }
template <class V> static inline V spread(One<V> one) { return one - vec{}; }
template <class V> static inline V joined(vec v, vec, float) { return v; }  // of both, times a scale
static inline void part(vec v, vec* parts, float) { parts[0] = v; }         // back to both
static inline vec folded(vec v, float) { return v; }                        // the sum of both
static inline void twice(float* p, vec v, float) { store(p, v); }           // for both the same

// bfloat16 in memory, for which every processor has vectors of float.
struct bfloat {
  unsigned short bits;
};
typedef unsigned words __attribute__((vector_size(4 * L)));
struct Shorts {
  typedef unsigned short At __attribute__((vector_size(2 * L), aligned(2), may_alias));
};
static inline vec load(const bfloat* p) { return (vec)(__builtin_convertvector(*(const Shorts::At*)p, words) << 16); }
static inline void store(bfloat* p, vec v) {
#ifdef HALVES
  _mm256_storeu_si256((__m256i_u*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  const words bits = (words)v, rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
  *(Shorts::At*)p = __builtin_convertvector((v == v ? rounded : bits | 0x400000) >> 16, Shorts::At);  // a NaN stays one
#endif
}
static inline float number(bfloat v) {
  const unsigned bits = unsigned(v.bits) << 16;
  float made;
  memcpy(&made, &bits, sizeof made);
  return made;
}

#ifdef HALVES
typedef _Float16 halves __attribute__((vector_size(64)));
struct Pair {
  _Float16 first, second;
};
template <> struct Kind<halves> {
  typedef Pair One;
  typedef _Float16 Number;
  typedef bfloat Image;
};
template <> constexpr long chain<halves> = 64;

static inline __m256i narrowed(vec v, float scale) { return (__m256i)_mm512_cvtxps_ph((__m512)(v * scale)); }
template <class Place> static inline __m512i reordered(__m512i v, Place place) {  // the 16-bit values at place(0), ...
  short order[32];
  for (int i = 0; i < 32; i++) order[i] = short(place(i));
  return _mm512_permutexvar_epi16(_mm512_loadu_si512(order), v);
}
template <> inline halves take<halves>(const Pair* p) { return (halves)_mm512_loadu_si512(p); }
template <> inline halves spread<halves>(Pair one) {
  int both;
  memcpy(&both, &one, sizeof both);
  return (halves)_mm512_set1_epi32(both);
}
template <> inline halves joined<halves>(vec first, vec second, float scale) {
  const __m512i low = _mm512_castsi256_si512(narrowed(first, scale));
  const __m512i both = _mm512_inserti64x4(low, narrowed(second, scale), 1);
  return (halves)reordered(both, [](int i) { return i % 2 * 16 + i / 2; });
}
static inline void put(Pair* p, halves v) { _mm512_storeu_si512(p, (__m512i)v); }
static inline void part(halves v, vec* parts, float scale) {
  const __m512i sorted = reordered((__m512i)v, [](int i) { return i % 16 * 2 + i / 16; });
  parts[0] = (vec)_mm512_cvtxph_ps((__m256h)_mm512_castsi512_si256(sorted)) * scale;
  parts[1] = (vec)_mm512_cvtxph_ps((__m256h)_mm512_extracti64x4_epi64(sorted, 1)) * scale;
}
static inline vec folded(halves v, float scale) {
  v += (halves)_mm512_rol_epi32((__m512i)v, 16);
  return (vec)_mm512_cvtxph_ps((__m256h)_mm512_cvtepi32_epi16((__m512i)v)) * scale;
}
static inline void twice(Pair* p, vec v, float scale) {
  const __m512i one = _mm512_cvtepu16_epi32(narrowed(v, scale));
  _mm512_storeu_si512(p, _mm512_or_si512(one, _mm512_slli_epi32(one, 16)));
}
#else
typedef vec halves;
#endif

template <int W, size_t... I> static inline void exchange(vec& x, vec& y, std::index_sequence<I...>) {
  vec low = __builtin_shufflevector(x, y, (I & W ? L + I - W : I)...);
  y = __builtin_shufflevector(x, y, (I & W ? L + I : I + W)...), x = low;
}
template <int W = 1> static inline void transpose(vec* rows) {  // L x L
  for (int i = 0; i < L; i++)
    if (!(i & W)) exchange<W>(rows[i], rows[i + W], std::make_index_sequence<L>());
  if constexpr (2 * W < L) transpose<2 * W>(rows);
}

struct Largest {  // of the sizes of numbers seen; what is no number is passed over
  vec most[4] = {};
  float rest = 0;
  template <class Image> void see(const Image* from, long count) {
    long i = 0;
    for (; i + L <= count; i += 4 * L)
      for (long j = 0; j < std::min(4L, (count - i) / L); j++) {
        const vec v = load(from + i + j * L), size = v < 0 ? -v : v;
        most[j] = size > most[j] ? size : most[j];
      }
    for (i = count / L * L; i < count; i++) rest = std::max(rest, std::fabs(number(from[i])));
  }
  float value() const {
    float top = rest;
    for (int j = 0; j < 4 * L; j++) top = std::max(top, most[j / L][j % L]);
    return top;
  }
};
template <class Image> static float largest(const Image* from, long count) {
  Largest all;
  all.see(from, count);
  return all.value();
}
// The power of two that brings `top` to below 2^limit.
static float scale_below(int limit, float top) {
  if (!(top > 0 && std::isfinite(top))) return 1;
  int exponent = 0;
  std::frexp(top, &exponent);
  return std::ldexp(1.0f, std::max(-100, std::min(100, limit - exponent)));
}
template <class V> constexpr bool narrow = each<V> > 1;

static void* room(int which, size_t bytes) {  // this thread's, kept for the next call
  struct Space {
    void* at = nullptr;
    size_t size = 0;
    ~Space() { free(at); }
  };
  static thread_local Space spaces[5];
  Space& mine = spaces[which];
  if (mine.size < bytes) {
    free(mine.at);
    const size_t page = size_t(1) << 21, whole = (bytes + page - 1) / page * page;
    mine.at = aligned_alloc(page, whole);
#if defined(__linux__)
    if (mine.at) madvise(mine.at, whole, MADV_HUGEPAGE);  // a tile is written to 36 places far apart
#endif
    mine.size = mine.at ? whole : 0;
    if (!mine.at) throw std::bad_alloc();  // `split` and `with` bring it to the caller
  }
  return mine.at;
}
template <class T> static T* scratch(int which, size_t count) { return (T*)room(which, count * sizeof(T)); }
