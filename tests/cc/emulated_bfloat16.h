// The instructions of ops/cc/dense/bfloat16_product.cc in plain C++, so that every processor can
// run that file's code. Each function does what Intel's manual says of the instruction of its name.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define CTR_BF16

typedef float __m512 __attribute__((vector_size(64)));
typedef int64_t __m512i __attribute__((vector_size(64)));
typedef int16_t __m512bh __attribute__((vector_size(64)));
using __mmask16 = uint16_t;
constexpr int _CMP_GT_OQ = 30;

namespace ctr {
namespace {

bool emulate_tiles = false;  // set by tests, while nothing is multiplied
bool HasVectors() { return true; }
bool HasTiles() { return emulate_tiles; }

typedef int16_t Shorts __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float Widened(int16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(static_cast<uint16_t>(bits)) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}
inline int16_t ToBfloat16(float x) {  // to nearest, ties to even
  const uint32_t bits = BitsOf(x);
  if (std::isnan(x)) return static_cast<int16_t>(bits >> 16 | 0x40);
  return static_cast<int16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_load_ps(const float* from) {
  __m512 x;
  std::memcpy(&x, __builtin_assume_aligned(from, 64), 64);
  return x;
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* from) {
  __m512 x{};
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) x[i] = from[i];
  return x;
}
inline void _mm512_mask_storeu_ps(float* to, __mmask16 mask, __m512 x) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) to[i] = x[i];
}
inline __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 mask, __m512 a, __m512 b, int /*greater*/) {
  int greater = 0;
  for (int i = 0; i < 16; ++i) greater |= (a[i] > b[i]) << i;
  return static_cast<__mmask16>(mask & greater);
}
inline __m512 _mm512_maskz_max_ps(__mmask16 mask, __m512 a, __m512 b) {  // if either is NaN: b
  __m512 x{};
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) x[i] = a[i] > b[i] ? a[i] : b[i];
  return x;
}
inline __m512i _mm512_load_si512(const void* from) {
  __m512i x;
  std::memcpy(&x, __builtin_assume_aligned(from, 64), 64);
  return x;
}
inline void _mm512_store_si512(void* to, __m512i x) {
  std::memcpy(__builtin_assume_aligned(to, 64), &x, 64);
}
inline __m512i _mm512_set1_epi32(int32_t x) { return (__m512i)(Ints{} + x); }
template <class... Numbers>
__m512i _mm512_set_epi16(Numbers... from_the_last) {
  static_assert(sizeof...(from_the_last) == 32);
  const int numbers[] = {from_the_last...};
  Shorts x;
  for (int i = 0; i < 32; ++i) x[i] = static_cast<int16_t>(numbers[31 - i]);
  return (__m512i)x;
}
inline __m512i _mm512_permutexvar_epi16(__m512i places, __m512i from) {
  Shorts x;
  for (int i = 0; i < 32; ++i) x[i] = ((Shorts)from)[((Shorts)places)[i] & 31];
  return (__m512i)x;
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  __m512bh x;
  for (int i = 0; i < 16; ++i) {
    x[i] = ToBfloat16(low[i]);
    x[16 + i] = ToBfloat16(high[i]);
  }
  return x;
}
inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  for (int i = 0; i < 16; ++i) {
    sums[i] += Widened(a[2 * i + 1]) * Widened(b[2 * i + 1]);
    sums[i] += Widened(a[2 * i]) * Widened(b[2 * i]);
  }
  return sums;
}

// What ops/cc/dense/bfloat16_instructions.h has under this name.
class Tiles {
 public:
  static void Begin() {
    if (in_use_) __builtin_trap();
    in_use_ = true;
    std::memset(tiles_, 0, sizeof(tiles_));
  }
  static void End() { in_use_ = false; }
  template <int kTile>
  static void Clear() {
    std::memset(Tile(kTile), 0, sizeof(tiles_[0]));
  }
  template <int kTile>
  static void Load(const void* from, int64_t row_bytes) {
    for (int i = 0; i < 16; ++i)
      std::memcpy(Tile(kTile)[i], static_cast<const char*>(from) + i * row_bytes, 64);
  }
  template <int kTile>
  static void Store(void* to, int64_t row_bytes) {
    for (int i = 0; i < 16; ++i)
      std::memcpy(static_cast<char*>(to) + i * row_bytes, Tile(kTile)[i], 64);
  }
  template <int kSums, int kA, int kB>
  static void MultiplyAndAdd() {
    for (int i = 0; i < 16; ++i) {
      float sums[16];
      std::memcpy(sums, Tile(kSums)[i], 64);
      for (int k = 0; k < 16; ++k) {
        int16_t a[2], b[32];
        std::memcpy(a, &Tile(kA)[i][k], 4);
        std::memcpy(b, Tile(kB)[k], 64);
        for (int j = 0; j < 16; ++j) {
          sums[j] += Widened(a[0]) * Widened(b[2 * j]);
          sums[j] += Widened(a[1]) * Widened(b[2 * j + 1]);
        }
      }
      std::memcpy(Tile(kSums)[i], sums, 64);
    }
  }

 private:
  using Rows = int32_t[16][16];
  static Rows& Tile(int tile) {
    if (!in_use_) __builtin_trap();
    return tiles_[tile];
  }
  static thread_local bool in_use_;
  static thread_local Rows tiles_[8];
};
thread_local bool Tiles::in_use_ = false;
thread_local Tiles::Rows Tiles::tiles_[8];

}  // namespace
}  // namespace ctr
