// FarmHash's Fingerprint64, the hash of tf.strings.to_hash_bucket_fast, written here so that
// hashing needs no TensorFlow. It follows farmhashna::Hash64 of https://github.com/google/farmhash
// (Copyright 2014 Google, Inc., MIT licence); tests compare it with TensorFlow's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace ctr {
namespace farmhash {

constexpr uint64_t k0 = 0xc3a5c85c97cb3127ULL;
constexpr uint64_t k1 = 0xb492b66fbe98f273ULL;
constexpr uint64_t k2 = 0x9ae16a3b2f90404fULL;

inline uint64_t Fetch(const char* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

inline uint64_t Fetch32(const char* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

// 0 < bits < 64.
inline uint64_t Rotate(uint64_t value, int bits) { return value >> bits | value << (64 - bits); }

inline uint64_t ShiftMix(uint64_t value) { return value ^ value >> 47; }

inline uint64_t Mix(uint64_t u, uint64_t v, uint64_t multiplier) {
  const uint64_t a = ShiftMix((u ^ v) * multiplier);
  return ShiftMix((v ^ a) * multiplier) * multiplier;
}

inline uint64_t UpTo16(const char* s, size_t n) {
  if (n >= 8) {
    const uint64_t multiplier = k2 + n * 2;
    const uint64_t a = Fetch(s) + k2, b = Fetch(s + n - 8);
    return Mix(Rotate(b, 37) * multiplier + a, (Rotate(a, 25) + b) * multiplier, multiplier);
  }
  if (n >= 4) return Mix(n + (Fetch32(s) << 3), Fetch32(s + n - 4), k2 + n * 2);
  if (n > 0) {
    const uint8_t first = s[0], middle = s[n >> 1], last = s[n - 1];
    const uint32_t y = first + (static_cast<uint32_t>(middle) << 8);
    const uint32_t z = static_cast<uint32_t>(n) + (static_cast<uint32_t>(last) << 2);
    return ShiftMix(y * k2 ^ z * k0) * k2;
  }
  return k2;
}

inline uint64_t UpTo32(const char* s, size_t n) {
  const uint64_t multiplier = k2 + n * 2;
  const uint64_t a = Fetch(s) * k1, b = Fetch(s + 8);
  const uint64_t c = Fetch(s + n - 8) * multiplier, d = Fetch(s + n - 16) * k2;
  return Mix(Rotate(a + b, 43) + Rotate(c, 30) + d, a + Rotate(b + k2, 18) + c, multiplier);
}

inline uint64_t UpTo64(const char* s, size_t n) {
  const uint64_t multiplier = k2 + n * 2;
  const uint64_t a = Fetch(s) * k2, b = Fetch(s + 8);
  const uint64_t c = Fetch(s + n - 8) * multiplier, d = Fetch(s + n - 16) * k2;
  const uint64_t y = Rotate(a + b, 43) + Rotate(c, 30) + d;
  const uint64_t z = Mix(y, a + Rotate(b + k2, 18) + c, multiplier);
  const uint64_t e = Fetch(s + 16) * multiplier, f = Fetch(s + 24);
  const uint64_t g = (y + Fetch(s + n - 32)) * multiplier;
  const uint64_t h = (z + Fetch(s + n - 24)) * multiplier;
  return Mix(Rotate(e + f, 43) + Rotate(g, 30) + h, e + Rotate(f + a, 18) + g, multiplier);
}

using Pair = std::pair<uint64_t, uint64_t>;

inline Pair Weak32(const char* s, uint64_t a, uint64_t b) {
  const uint64_t w = Fetch(s), x = Fetch(s + 8), y = Fetch(s + 16), z = Fetch(s + 24);
  a += w;
  b = Rotate(b + a + z, 21);
  const uint64_t c = a;
  a += x + y;
  b += Rotate(a, 44);
  return {a + z, b + c};
}

}  // namespace farmhash

// Returns the hash of n bytes at s.
inline uint64_t Fingerprint64(const char* s, size_t n) {
  using namespace farmhash;
  if (n <= 16) return UpTo16(s, n);
  if (n <= 32) return UpTo32(s, n);
  if (n <= 64) return UpTo64(s, n);
  constexpr uint64_t seed = 81;
  uint64_t y = seed * k1 + 113;
  uint64_t z = ShiftMix(y * k2 + 113) * k2;
  Pair v, w;
  uint64_t x = seed * k2 + Fetch(s);
  const char* const end = s + (n - 1) / 64 * 64;
  const char* const last = end + ((n - 1) & 63) - 63;
  do {
    x = Rotate(x + y + v.first + Fetch(s + 8), 37) * k1;
    y = Rotate(y + v.second + Fetch(s + 48), 42) * k1;
    x ^= w.second;
    y += v.first + Fetch(s + 40);
    z = Rotate(z + w.first, 33) * k1;
    v = Weak32(s, v.second * k1, x + w.first);
    w = Weak32(s + 32, z + w.second, y + Fetch(s + 16));
    std::swap(z, x);
    s += 64;
  } while (s != end);
  const uint64_t multiplier = k1 + ((z & 0xff) << 1);
  s = last;
  w.first += (n - 1) & 63;
  v.first += w.first;
  w.first += v.first;
  x = Rotate(x + y + v.first + Fetch(s + 8), 37) * multiplier;
  y = Rotate(y + v.second + Fetch(s + 48), 42) * multiplier;
  x ^= w.second * 9;
  y += v.first * 9 + Fetch(s + 40);
  z = Rotate(z + w.first, 33) * multiplier;
  v = Weak32(s, v.second * multiplier, x + w.first);
  w = Weak32(s + 32, z + w.second, y + Fetch(s + 16));
  std::swap(z, x);
  return Mix(Mix(v.first, w.first, multiplier) + ShiftMix(y) * k0 + z,
             Mix(v.second, w.second, multiplier) + x, multiplier);
}

}  // namespace ctr
