// Dropout by keys: what `pfl_ext.models.dropout` says, in one pass, for a layer and for its gradient.

#pragma once

#include <cstdint>

#include "vectors.h"

// The finaliser of SplitMix64, on 64 bits each.
static inline uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
// y = x where a unit stays, times `factor`, else 0, for images of outer x inner values. The unit of a value is
// i * of_outer + j * of_inner; it stays where the upper 24 bits of its hash are at least `least`.
static void drop(const float* x, const int64_t* keys, float* y, long outer, long inner, uint64_t number, uint64_t least,
                 float factor, long of_outer, long of_inner, long first, long end) {
  for (long image = first; image < end; image++) {
    const uint64_t stream = mixed(mixed(uint64_t(keys[image])) + number);
    for (long i = 0; i < outer; i++) {
      const float* from = x + (image * outer + i) * inner;
      float* to = y + (image * outer + i) * inner;
      const uint64_t base = stream + uint64_t(i * of_outer) * 0x9e3779b97f4a7c15ull;
      for (long j = 0; j < inner; j++) {
        const uint64_t drawn = mixed(base + uint64_t(j * of_inner) * 0x9e3779b97f4a7c15ull) >> 40;
        to[j] = from[j] * (drawn >= least ? 1.0f : 0.0f) * factor;
      }
    }
  }
}
