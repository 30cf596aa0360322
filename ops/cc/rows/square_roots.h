// Replaces n elements by their square roots. The compiler does not vectorise std::sqrt, because
// that may set errno.
#pragma once

#include <cmath>

#include "ops/cc/rows/multiversion.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ctr {

CTR_INLINE void SquareRoots(int n, float* x) {
  int i = 0;
#if defined(__SSE2__)
  for (; i + 4 <= n; i += 4) _mm_storeu_ps(x + i, _mm_sqrt_ps(_mm_loadu_ps(x + i)));
#endif
  for (; i < n; ++i) x[i] = std::sqrt(x[i]);
}

}  // namespace ctr
