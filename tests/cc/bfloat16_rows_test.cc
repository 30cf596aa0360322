// Rounding to bfloat16 against the numbers around a value, and its mean against the value itself.
#include "ops/cc/rows/bfloat16_rows.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "tests/cc/testing.h"

namespace ctr {
namespace {

float Float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

float One(uint16_t bits) {
  float x;
  Widen(&bits, 1, &x);
  return x;
}

TEST(WhatBfloat16CanSayStays) {
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const float x = Float(bits << 16);
    CHECK_EQ(Bits(One(static_cast<uint16_t>(bits))), bits << 16);
    uint16_t rounded;
    RoundToNearest(&x, 1, &rounded);
    CHECK_EQ(rounded, bits);
    RoundByChance(&x, 1, RoundingSeed(3, bits + 1), 17, &rounded);
    CHECK_EQ(rounded, bits);
  }
}

TEST(WhatIsNotFiniteStaysSo) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float xs[] = {Float(0x7f800001), Float(0xffffffff), -infinity, infinity};
  uint16_t nearest[4], by_chance[4];
  RoundToNearest(xs, 4, nearest);
  RoundByChance(xs, 4, RoundingSeed(1, 1), 5, by_chance);
  for (int i = 0; i < 4; ++i) {
    for (const float y : {One(nearest[i]), One(by_chance[i])})
      CHECK(i < 2 ? std::isnan(y) : y == xs[i]);
  }
}

TEST(NearestIsTheNearer) {
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) {
    const float x = Float(random());
    if (!std::isfinite(x) || (Bits(x) & 0x7f800000) == 0x7f000000) continue;
    uint16_t rounded;
    RoundToNearest(&x, 1, &rounded);
    const double down = Float(Bits(x) & 0xffff0000u), up = Float((Bits(x) & 0xffff0000u) + 0x10000);
    const double to_down = std::abs(x - down), to_up = std::abs(up - x);
    const bool is_even = (Bits(x) >> 16 & 1) == 0;
    const bool goes_down = to_down < to_up || (to_down == to_up && is_even);
    CHECK_EQ(static_cast<double>(One(rounded)), goes_down ? down : up);
  }
}

// Also of numbers whose neighbour has another exponent, of denormal and of negative ones.
TEST(TheMeanOfManyRoundingsIsTheValue) {
  constexpr int kSteps = 40000;
  const std::vector<float> xs = {0.1f, -3.14159f, 1.9999f, 255.999f, 1e-39f, -1e30f, 1.0f + 1e-4f};
  for (size_t i = 0; i < xs.size(); ++i) {
    const double down = Float(Bits(xs[i]) & 0xffff0000u);
    const double up = Float((Bits(xs[i]) & 0xffff0000u) + 0x10000);
    double sum = 0;
    for (int step = 1; step <= kSteps; ++step) {
      // Each element has chances of its own.
      std::vector<float> row(37, xs[i]);
      std::vector<uint16_t> bits(row.size());
      RoundByChance(row.data(), static_cast<int>(row.size()), RoundingSeed(9, step), 5,
                    bits.data());
      const float y = One(bits[(step + i) % row.size()]);
      CHECK(y == down || y == up);
      sum += y;
    }
    // Five standard deviations of the mean of so many coins.
    CHECK(std::abs(sum / kSteps - xs[i]) <= 5 * 0.5 * std::abs(up - down) / std::sqrt(kSteps));
  }
}

TEST(ElementsKeysStepsAndSeedsHaveChancesOfTheirOwn) {
  constexpr int kWidth = 1000;
  const std::vector<float> row(kWidth, 1.0f + 1.0f / 256);  // halfway
  const auto rounded = [&](uint64_t seed, int64_t key, int64_t step) {
    std::vector<uint16_t> bits(kWidth);
    RoundByChance(row.data(), kWidth, RoundingSeed(seed, step), key, bits.data());
    return bits;
  };
  const std::vector<uint16_t> one = rounded(1, 2, 3);
  CHECK(one == rounded(1, 2, 3));
  for (const auto& other : {rounded(2, 2, 3), rounded(1, 3, 3), rounded(1, 2, 4)}) {
    int differ = 0;
    for (int i = 0; i < kWidth; ++i) differ += one[i] != other[i];
    CHECK(differ > kWidth / 2 - 100 && differ < kWidth / 2 + 100);
  }
  for (int apart = 1; apart <= 40; ++apart) {
    int differ = 0;
    for (int i = 0; i + apart < kWidth; ++i) differ += one[i] != one[i + apart];
    CHECK(differ > kWidth / 2 - 100 && differ < kWidth / 2 + 100);
  }
}

TEST(StaysInBounds) {
  for (int n = 0; n <= 70; ++n) {
    std::unique_ptr<float[]> x(new float[n]);
    std::unique_ptr<uint16_t[]> bits(new uint16_t[n]), part(new uint16_t[n]);
    std::fill_n(x.get(), n, 0.3f);
    RoundByChance(x.get(), n, 7, 8, bits.get());
    RoundByChance(x.get(), n / 2, 7, 8, part.get());  // an element's chance is its own
    for (int i = 0; i < n / 2; ++i) CHECK_EQ(part[i], bits[i]);
    Widen(bits.get(), n, x.get());
    RoundToNearest(x.get(), n, bits.get());
  }
}

}  // namespace
}  // namespace ctr

int main() { return testing::RunAll(); }
