// clang-format off
#include "ops/cc/rows/multiversion.h"  // first
// clang-format on
#include "ops/cc/rows/initial_factors.h"

#include <algorithm>
#include <cstring>

#include "ops/cc/lifecycle/hash.h"
#include "ops/cc/rows/square_roots.h"

namespace ctr {
namespace {

constexpr int kPairs = 16;  // how many are computed at a time
constexpr float kUnit = 1.0f / (1 << 23);

// Returns log(x) for 0 < x <= 1: x is 2^e * m with m in [sqrt(1/2), sqrt(2)), and log(m) is
// 2 atanh((m - 1) / (m + 1)).
CTR_INLINE float Log(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const int32_t exponent = (bits - 0x3f3504f3) >> 23;
  bits -= exponent * (1 << 23);
  float m;
  std::memcpy(&m, &bits, sizeof(m));
  const float s = (m - 1.0f) / (m + 1.0f);
  const float s2 = s * s;
  const float series = 1.0f + s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9))));
  return static_cast<float>(exponent) * 0.69314718f + 2.0f * s * series;
}

}  // namespace

CTR_MULTIVERSION
void InitialFactors(uint64_t seed, int64_t key, int width, float scale, float* factors) {
  constexpr uint64_t kStep = 0x9e3779b97f4a7c15ULL;
  const uint64_t stream = Mix64(
      static_cast<int64_t>(static_cast<uint64_t>(key) ^ Mix64(static_cast<int64_t>(seed + kStep))));
  const int pairs = (width + 1) / 2;
  for (int begin = 0; begin < pairs; begin += kPairs) {
    const int n = std::min(kPairs, pairs - begin);
    uint32_t first[kPairs], second[kPairs];
    for (int p = 0; p < n; ++p) {
      const uint64_t bits =
          Mix64(static_cast<int64_t>(stream + kStep * static_cast<uint64_t>(begin + p + 1)));
      first[p] = static_cast<uint32_t>(bits >> 41);
      second[p] = static_cast<uint32_t>(bits) & 0x7fffff;
    }
    float x[kPairs], y[kPairs];
    float radius[kPairs];
    for (int p = 0; p < n; ++p)
      radius[p] = -2.0f * Log((static_cast<float>(first[p]) + 0.5f) * kUnit);
    SquareRoots(n, radius);
    for (int p = 0; p < n; ++p) {
      // second / 2^23 turns = `quarter` quarters and r in [-1/2, 1/2) of a quarter more.
      const int32_t quarter = static_cast<int32_t>((second[p] + (1 << 20)) >> 21);
      const float r = static_cast<float>(static_cast<int32_t>(second[p]) - (quarter << 21)) *
                      (1.0f / (1 << 21));
      const float a = r * 1.57079633f, a2 = a * a;
      const float sin = a * (1.0f + a2 * (-1.0f / 6 + a2 * (1.0f / 120 + a2 * (-1.0f / 5040))));
      const float cos =
          1.0f + a2 * (-0.5f + a2 * (1.0f / 24 + a2 * (-1.0f / 720 + a2 * (1.0f / 40320))));
      const float swapped_x = quarter & 1 ? sin : cos, swapped_y = quarter & 1 ? cos : sin;
      const float signed_radius = scale * radius[p];
      x[p] = (quarter + 1) & 2 ? -signed_radius * swapped_x : signed_radius * swapped_x;
      y[p] = quarter & 2 ? -signed_radius * swapped_y : signed_radius * swapped_y;
    }
    float* const to = factors + 2 * begin;
    const int whole = std::min(n, (width - 2 * begin) / 2);
    for (int p = 0; p < whole; ++p) {
      to[2 * p] = x[p];
      to[2 * p + 1] = y[p];
    }
    if (whole < n) to[2 * whole] = x[whole];
  }
}

}  // namespace ctr
