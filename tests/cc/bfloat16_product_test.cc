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
      : data(static_cast<uint16_t*>(std::aligned_alloc(64, (2 * n + 63) / 64 * 64))) {}
  ~Aligned() { std::free(data); }
  uint16_t* data;
};

std::vector<float> Product(const Matrix& a, const Matrix& b, const ParallelFor& parallel_for) {
  Aligned packed(PackedSize(b));
  std::vector<float> c((a.transposed ? a.columns : a.rows) * (b.transposed ? b.rows : b.columns),
                       NAN);
  Bfloat16Product(a, b, parallel_for, packed.data, c.data());
  return c;
}

TEST(EqualsDoubleLoops) {
  if (!HasBfloat16Products()) {
    std::puts("left out: this processor has no avx512_bf16");
    return;
  }
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  const int64_t sizes[] = {0, 1, 2, 5, 6, 7, 16, 33, 64, 65, 96, 97, 130, 257, 259, 520};
  for (int trial = 0; trial < 400; ++trial) {
    const int64_t m = sizes[random() % 12], n = sizes[random() % 12], k = sizes[random() % 16];
    const bool turned_a = random() % 2, turned_b = random() % 2;
    std::vector<float> of_a(m * k), of_b(k * n);
    for (float& x : of_a) x = normal(random);
    for (float& x : of_b) x = normal(random);
    const Matrix a{of_a.data(), turned_a ? k : m, turned_a ? m : k, turned_a};
    const Matrix b{of_b.data(), turned_b ? n : k, turned_b ? k : n, turned_b};
    const std::vector<float> c = Product(a, b, Serial);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0, size = 0;
        for (int64_t l = 0; l < k; ++l) {
          const double term = static_cast<double>(Rounded(of_a[turned_a ? l * m + i : i * k + l])) *
                              Rounded(of_b[turned_b ? j * k + l : l * n + j]);
          sum += term;
          size += std::fabs(term);
        }
        CHECK(std::fabs(c[i * n + j] - sum) <= 1e-6 * size + 1e-12);
      }
    }
    CHECK(Product(a, b, TwoThreads) == c);  // to the last bit
  }
}

TEST(ARowDependsOnItsOwnRowAlone) {
  if (!HasBfloat16Products()) return;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const int64_t m = 300, k = 515, n = 70;
  std::vector<float> of_a(m * k), of_b(k * n);
  for (float& x : of_a) x = normal(random);
  for (float& x : of_b) x = normal(random);
  const Matrix b{of_b.data(), k, n, false};
  const std::vector<float> all = Product({of_a.data(), m, k, false}, b, Serial);
  for (int64_t first : {1, 7, 95, 96, 299}) {
    const std::vector<float> some =
        Product({of_a.data() + first * k, m - first, k, false}, b, Serial);
    CHECK(std::memcmp(some.data(), all.data() + first * n, some.size() * 4) == 0);
  }
}

}  // namespace
}  // namespace ctr

int main() { return testing::RunAll(); }
