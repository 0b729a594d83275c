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
// y = x where a unit stays, times `factor`, else 0, for images of outer x inner values, which in x lie `across` values apart
// from row to row and `along` within one. The unit of a value is i * of_outer + j * of_inner; it stays where the upper 24
// bits of its hash are at least `least`.
static void drop(const float* x, const int64_t* keys, float* y, long outer, long inner, long across, long along,
                 uint64_t number, uint64_t least, float factor, long of_outer, long of_inner, long first, long end) {
  constexpr uint64_t step = 0x9e3779b97f4a7c15ull;
  for (long image = first; image < end; image++) {
    const uint64_t stream = mixed(mixed(uint64_t(keys[image])) + number);
    const float* own = x + image * outer * inner;
    float* to = y + image * outer * inner;
    for (long i = 0; i < outer; i++, to += inner)
      for (long j = 0; j < inner; j++) {
        const uint64_t drawn = mixed(stream + uint64_t(i * of_outer + j * of_inner) * step) >> 40;
        to[j] = own[i * across + j * along] * (drawn >= least ? 1.0f : 0.0f) * factor;
      }
  }
}
