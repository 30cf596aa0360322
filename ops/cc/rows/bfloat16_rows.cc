// clang-format off
#include "ops/cc/rows/multiversion.h"  // first
// clang-format on
#include "ops/cc/rows/bfloat16_rows.h"

#include <algorithm>
#include <cstring>

#include "ops/cc/lifecycle/hash.h"

namespace ctr {
namespace {

constexpr uint64_t kStep = 0x9e3779b97f4a7c15ULL;
constexpr int kBlock = 32;  // elements that are worked on at a time
constexpr uint32_t kExponent = 0x7f800000;

// Adds `more` to the lower 16 bits, and keeps the upper 16. Infinity and NaN stay as they are.
CTR_INLINE uint16_t Cut(uint32_t x, uint32_t more) {
  const uint32_t kept = x >> 16 | static_cast<uint32_t>((x & 0xffff) != 0);
  return static_cast<uint16_t>((x & kExponent) == kExponent ? kept : (x + more) >> 16);
}

}  // namespace

uint64_t RoundingSeed(uint64_t seed, int64_t step) {
  return Mix64(static_cast<int64_t>(seed + kStep * (static_cast<uint64_t>(step) + 1)));
}

CTR_MULTIVERSION
void Widen(const uint16_t* __restrict bits, int n, float* __restrict x) {
  for (int i = 0; i < n; ++i) {
    const uint32_t wide = static_cast<uint32_t>(bits[i]) << 16;
    std::memcpy(x + i, &wide, sizeof(wide));
  }
}

CTR_MULTIVERSION
void RoundToNearest(const float* __restrict x, int n, uint16_t* __restrict bits) {
  for (int i = 0; i < n; ++i) {
    uint32_t wide;
    std::memcpy(&wide, x + i, sizeof(wide));
    bits[i] = Cut(wide, 0x7fff + (wide >> 16 & 1));
  }
}

CTR_MULTIVERSION
void RoundByChance(const float* __restrict x, int n, uint64_t rounding_seed, int64_t key,
                   uint16_t* __restrict bits) {
  const uint64_t stream = Mix64(static_cast<int64_t>(static_cast<uint64_t>(key) ^ rounding_seed));
  for (int begin = 0; begin < n; begin += kBlock) {
    const int count = std::min(kBlock, n - begin);
    uint64_t hashes[kBlock / 4];
    for (int j = 0; 4 * j < count; ++j) {
      hashes[j] =
          Mix64(static_cast<int64_t>(stream + kStep * static_cast<uint64_t>(begin / 4 + j + 1)));
    }
    uint16_t chances[kBlock];  // of the processor's little end first
    std::memcpy(chances, hashes, sizeof(uint64_t) * ((count + 3) / 4));
    for (int i = 0; i < count; ++i) {
      uint32_t wide;
      std::memcpy(&wide, x + begin + i, sizeof(wide));
      bits[begin + i] = Cut(wide, chances[i]);
    }
  }
}

}  // namespace ctr
