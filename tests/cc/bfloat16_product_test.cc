// Products in bfloat16 against double loops: all sizes around the blocks', every matrix exactly as
// long in memory as it has to be, so that the sanitizer sees what is read or written beyond.
#include "ops/cc/dense/bfloat16_product.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/cc/testing.h"

namespace ctr {
namespace {

float Rounded(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

void TwoThreads(int64_t total, int64_t, const std::function<void(int64_t, int64_t)>& work) {
  std::thread other([&] { work(total / 2, total); });
  work(0, total / 2);
  other.join();
}

struct Aligned {
  explicit Aligned(int64_t n)
      : data(static_cast<int32_t*>(std::aligned_alloc(64, (4 * n + 63) / 64 * 64))) {}
  ~Aligned() { std::free(data); }
  int32_t* data;
};

std::mt19937 Random(0);

std::vector<float> Normal(int64_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& x : values) x = normal(Random);
  return values;
}

// A matrix of [rows, columns] as it is meant, in memory that ends where it ends.
struct Owned {
  Owned(int64_t rows, int64_t columns, bool transposed, bool gated, int64_t gap)
      : matrix{nullptr, transposed ? columns : rows, transposed ? rows : columns, 0, transposed} {
    matrix.stride = matrix.columns + gap;
    const int64_t n = matrix.rows == 0 ? 0 : (matrix.rows - 1) * matrix.stride + matrix.columns;
    values = Normal(n);
    matrix.data = values.data();
    if (!gated) return;
    gates = Normal(n);
    if (n > 0) gates[n / 2] = NAN;
    matrix.gate = gates.data();
  }
  float At(int64_t i, int64_t j) const {
    const int64_t at = matrix.transposed ? j * matrix.stride + i : i * matrix.stride + j;
    return matrix.gate == nullptr || gates[at] > 0 ? values[at] : 0.0f;
  }
  std::vector<float> values, gates;
  Matrix matrix;
};

TEST(EqualsDoubleLoops) {
  if (!HasBfloat16Products()) {
    std::puts("left out: this processor has no avx512_bf16");
    return;
  }
  const int64_t sizes[] = {0, 1, 2, 5, 6, 7, 16, 33, 64, 65, 96, 97, 130, 257, 259, 520, 1601};
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t m = sizes[Random() % 14 + (trial % 50 == 0 ? 3 : 0)];
    std::vector<int64_t> inner, columns;
    for (int t = Random() % 3; t >= 0; --t) inner.push_back(sizes[Random() % (t > 0 ? 8 : 16)]);
    for (int r = Random() % 3; r >= 0; --r) columns.push_back(sizes[Random() % (r > 0 ? 8 : 12)]);
    const bool biased = Random() % 2, rectified = Random() % 2;
    std::vector<Owned> a;
    std::vector<std::vector<Owned>> b(inner.size());
    std::vector<std::vector<float>> c(columns.size()), biases, again;
    for (size_t t = 0; t < inner.size(); ++t) {
      a.emplace_back(m, inner[t], Random() % 2, Random() % 2, Random() % 3);
      for (int64_t n : columns)
        b[t].emplace_back(inner[t], n, Random() % 2, Random() % 2, Random() % 3);
    }
    for (int64_t n : columns) biases.push_back(Normal(n));
    const int64_t gap = Random() % 2;
    const auto run = [&](const ParallelFor& parallel_for) {
      std::vector<std::unique_ptr<Aligned>> packed;
      std::vector<Term> terms;
      for (size_t t = 0; t < inner.size(); ++t) {
        terms.push_back({a[t].matrix, {}});
        for (const Owned& part : b[t]) {
          packed.push_back(std::make_unique<Aligned>(PackedSize(part.matrix)));
          Pack(part.matrix, parallel_for, packed.back()->data);
          terms.back().b.push_back(packed.back()->data);
        }
      }
      std::vector<Result> results;
      for (size_t r = 0; r < columns.size(); ++r) {
        c[r].assign(m == 0 ? 0 : (m - 1) * (columns[r] + gap) + columns[r], -7.0f);
        results.push_back({c[r].data(), columns[r], columns[r] + gap,
                           biased ? biases[r].data() : nullptr, rectified});
      }
      Multiply(terms, m, results, parallel_for);
    };
    run(TwoThreads);
    again = c;
    run(Serial);
    CHECK(again == c);  // to the last bit
    for (size_t r = 0; r < columns.size(); ++r) {
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < columns[r]; ++j) {
          double sum = biased ? biases[r][j] : 0, size = std::fabs(sum);
          for (size_t t = 0; t < inner.size(); ++t) {
            for (int64_t l = 0; l < inner[t]; ++l) {
              const double term =
                  static_cast<double>(Rounded(a[t].At(i, l))) * Rounded(b[t][r].At(l, j));
              sum += term;
              size += std::fabs(term);
            }
          }
          if (rectified) sum = std::fmax(sum, 0);
          const float found = c[r][i * (columns[r] + gap) + j];
          CHECK(std::fabs(found - sum) <= 1e-6 * size + 1e-12);
        }
        if (gap == 1 && i + 1 < m)  // nothing is written between rows
          CHECK(c[r][i * (columns[r] + 1) + columns[r]] == -7.0f);
      }
    }
  }
}

TEST(SumsColumnsOnTheWay) {
  if (!HasBfloat16Products()) return;
  for (int64_t rows : {0, 1, 2, 77}) {
    for (int64_t columns : {1, 16, 63, 130}) {
      for (bool gated : {false, true}) {
        const Owned b(rows, columns, false, gated, 1);
        Aligned packed(PackedSize(b.matrix));
        std::vector<float> sums(columns, NAN), again(columns, NAN);
        Pack(b.matrix, Serial, packed.data, sums.data());
        Pack(b.matrix, TwoThreads, packed.data, again.data());
        CHECK(sums == again);
        for (int64_t j = 0; j < columns; ++j) {
          double sum = 0, size = 0;
          for (int64_t i = 0; i < rows; ++i) {
            sum += b.At(i, j);
            size += std::fabs(b.At(i, j));
          }
          CHECK(std::fabs(sums[j] - sum) <= 1e-6 * size);
        }
      }
    }
  }
}

TEST(WhatIsNotANumberStaysSo) {
  if (!HasBfloat16Products()) return;
  const float a[] = {NAN, 1}, b[] = {1};
  const Matrix right{b, 1, 1, 1};
  Aligned packed(PackedSize(right));
  Pack(right, Serial, packed.data);
  float c[2];
  Multiply({{{a, 2, 1, 1}, {packed.data}}}, 2, {{c, 1, 1, nullptr, true}}, Serial);
  CHECK(std::isnan(c[0]));
  CHECK(c[1] == 1.0f);
}

TEST(ARowDependsOnItsOwnRowAlone) {
  if (!HasBfloat16Products()) return;
  const int64_t m = 300, k = 515, n = 70;
  const std::vector<float> a = Normal(m * k), of_b = Normal(k * n);
  const Matrix b{of_b.data(), k, n, n};
  Aligned packed(PackedSize(b));
  Pack(b, Serial, packed.data);
  const auto product = [&](int64_t first) {
    std::vector<float> c((m - first) * n);
    const Matrix rows{a.data() + first * k, m - first, k, k};
    Multiply({{rows, {packed.data}}}, m - first, {{c.data(), n, n}}, Serial);
    return c;
  };
  const std::vector<float> all = product(0);
  for (int64_t first : {1, 7, 95, 96, 299}) {
    const std::vector<float> some = product(first);
    CHECK(std::memcmp(some.data(), all.data() + first * n, some.size() * 4) == 0);
  }
}

}  // namespace
}  // namespace ctr

int main() {
#if defined(CTR_EMULATED_BFLOAT16)
  ctr::emulate_tiles = true;
  testing::RunAll();
  ctr::emulate_tiles = false;
#endif
  return testing::RunAll();
}
