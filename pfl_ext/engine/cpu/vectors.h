// Vectors as wide as the processor's, and memory that a thread keeps.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <utility>
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

typedef float vec __attribute__((vector_size(4 * L), aligned(4), may_alias));

static inline vec load(const float* p) { return *(const vec*)p; }
static inline void store(float* p, vec v) { *(vec*)p = v; }

template <int W, size_t... I> static inline void exchange(vec& x, vec& y, std::index_sequence<I...>) {
  vec low = __builtin_shufflevector(x, y, (I & W ? L + I - W : I)...);
  y = __builtin_shufflevector(x, y, (I & W ? L + I : I + W)...), x = low;
}
template <int W = 1> static inline void transpose(vec* rows) {  // L x L
  for (int i = 0; i < L; i++)
    if (!(i & W)) exchange<W>(rows[i], rows[i + W], std::make_index_sequence<L>());
  if constexpr (2 * W < L) transpose<2 * W>(rows);
}

static float* scratch(int which, size_t floats) {  // this thread's, kept for the next call
  struct Space {
    float* at = nullptr;
    size_t size = 0;
    ~Space() { free(at); }
  };
  static thread_local Space spaces[4];
  Space& mine = spaces[which];
  if (mine.size < floats) {
    free(mine.at);
    const size_t page = size_t(1) << 21, bytes = (floats * sizeof(float) + page - 1) / page * page;
    mine.at = (float*)aligned_alloc(page, bytes);
#if defined(__linux__)
    if (mine.at) madvise(mine.at, bytes, MADV_HUGEPAGE);  // a tile is written to 36 places far apart
#endif
    mine.size = mine.at ? floats : 0;
    if (!mine.at) {
      fprintf(stderr, "error: no memory for %zu MB of a convolution: use fewer --runtime.lanes\n", bytes >> 20);
      abort();
    }
  }
  return mine.at;
}
