// From stored images to a network's input: crops of exactly its size, flipped, by a table of the 256 values of each
// colour. `pfl_ext.data.transforms.cropped` says what a crop is; both give the same bits.
//
// Letters: n images of h x w pixels, size: of a side of the input.

#pragma once

#include <algorithm>
#include <vector>

// -1: black. The place `at` of a side of `size` pixels; reflected: the image is mirrored at its outermost pixels.
static inline long pixel(long at, long size, bool reflect) {
  if (reflect) at = size - 1 - std::labs(size - 1 - std::labs(at));
  return at < 0 || at >= size ? -1 : at;
}
// Images are [n][h][w][3]; crops [n][apart], of which the first six are top, left, height, width and two flips; table
// is [3][256]; input is [n][size][size][3].
static void crop(const unsigned char* images, const float* crops, const float* table, float* input, long h, long w,
                 long size, long apart, bool reflect, long first, long end) {
  std::vector<long> columns(size);
  for (long image = first; image < end; image++) {
    const float* own = crops + image * apart;
    const long top = long(own[0]), left = long(own[1]);
    const bool mirrored = own[4] > 0, upside_down = own[5] > 0;
    for (long j = 0; j < size; j++) columns[j] = pixel(left + (mirrored ? size - 1 - j : j), w, reflect);
    float* to = input + image * size * size * 3;
    for (long i = 0; i < size; i++) {
      const long y = pixel(top + (upside_down ? size - 1 - i : i), h, reflect);
      const unsigned char* row = images + (image * h + std::max(y, 0L)) * w * 3;
      for (long j = 0; j < size; j++, to += 3) {
        const unsigned char* from = row + 3 * std::max(columns[j], 0L);
        const bool inside = y >= 0 && columns[j] >= 0;
        for (int q = 0; q < 3; q++) to[q] = table[256 * q + (inside ? from[q] : 0)];
      }
    }
  }
}
