#include "ops/cc/dense/bfloat16_product.h"

#include <algorithm>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ctr {

#if defined(__x86_64__)

#define CTR_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define CTR_BF16_INLINE CTR_BF16 inline __attribute__((always_inline))

namespace {

// The instruction multiplies 16 pairs of neighbours along the inner dimension and adds them to 16
// sums. So both factors are packed as pairs, 32 bits each: b in panels of 64 columns, whose pairs
// of one inner place are neighbours, and a in blocks that fit a core's own cache.
constexpr int64_t kLanes = 16;     // sums of a register
constexpr int64_t kRegisters = 4;  // of a panel of b
constexpr int64_t kPanel = kRegisters * kLanes;
constexpr int64_t kRows = 6;          // kRows * kRegisters sums stay in registers
constexpr int64_t kBlockRows = 96;    // of a, a multiple of kRows
constexpr int64_t kBlockPairs = 128;  // a panel's, 32 KB: the first cache holds it

int64_t Pairs(int64_t inner) { return (inner + 1) / 2; }
int64_t Panels(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

__mmask16 MaskOf(int64_t lanes) {
  return lanes >= kLanes ? 0xffff : static_cast<__mmask16>((1u << lanes) - 1);
}

// Pairs (first[i], second[i]) as bfloat16; `second` may be null, for zeros.
CTR_BF16_INLINE __m512i Interleaved(const float* first, const float* second, __mmask16 mask) {
  const __m512 low = _mm512_maskz_loadu_ps(mask, first);
  const __m512 high = second ? _mm512_maskz_loadu_ps(mask, second) : _mm512_setzero_ps();
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, halves);
}

// `n` neighbours in memory as bfloat16, which are n / 2 pairs; what is beyond n is 0.
CTR_BF16_INLINE __m512i Consecutive(const float* from, int64_t n) {
  const __m512 low = _mm512_maskz_loadu_ps(MaskOf(n), from);
  const __m512 high =
      n > kLanes ? _mm512_maskz_loadu_ps(MaskOf(n - kLanes), from + kLanes) : _mm512_setzero_ps();
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Packs panel `panel` of b: pairs [Pairs(inner), kPanel]; columns beyond b's are 0.
CTR_BF16 void PackPanel(const Matrix& b, int64_t panel, int32_t* to) {
  const int64_t inner = b.transposed ? b.columns : b.rows;
  const int64_t columns = b.transposed ? b.rows : b.columns;
  const int64_t first = panel * kPanel, width = std::min(kPanel, columns - first);
  if (b.transposed) {  // weights, which are small: one pair at a time
    std::fill(to, to + Pairs(inner) * kPanel, 0);
    alignas(64) int32_t pairs[kLanes];
    for (int64_t j = 0; j < width; ++j) {
      const float* row = b.data + (first + j) * b.columns;
      for (int64_t k = 0; k < inner; k += 2 * kLanes) {
        _mm512_store_si512(pairs, Consecutive(row + k, inner - k));
        const int64_t count = std::min(kLanes, Pairs(inner - k));
        for (int64_t p = 0; p < count; ++p) to[(k / 2 + p) * kPanel + j] = pairs[p];
      }
    }
    return;
  }
  for (int64_t k = 0; k < inner; k += 2, to += kPanel) {
    const float* row = b.data + k * columns + first;
    for (int64_t j = 0; j < kPanel; j += kLanes) {
      const __mmask16 mask = j < width ? MaskOf(width - j) : 0;
      const bool two = k + 1 < inner;
      _mm512_store_si512(to + j, mask
                                     ? Interleaved(row + j, two ? row + columns + j : nullptr, mask)
                                     : _mm512_setzero_si512());
    }
  }
}

// A block of a: pair p of row i lies at pairs[i * row + p * pair].
struct Block {
  const int32_t* pairs;
  int64_t row;
  int64_t pair;
};

// Packs `rows` rows of a from `first`, and `pairs` pairs from `first_pair`.
CTR_BF16 Block PackBlock(const Matrix& a, int64_t first, int64_t rows, int64_t first_pair,
                         int64_t pairs, int32_t* to) {
  const int64_t inner = a.transposed ? a.rows : a.columns;
  if (!a.transposed) {
    for (int64_t i = 0; i < rows; ++i) {
      const float* row = a.data + (first + i) * a.columns + 2 * first_pair;
      const int64_t n = std::min(2 * pairs, inner - 2 * first_pair);
      for (int64_t k = 0; k < n; k += 2 * kLanes)
        _mm512_store_si512(to + i * kBlockPairs + k / 2, Consecutive(row + k, n - k));
    }
    return {to, kBlockPairs, 1};
  }
  for (int64_t p = 0; p < pairs; ++p) {
    const int64_t k = 2 * (first_pair + p);
    const float* row = a.data + k * a.columns + first;
    const float* next = k + 1 < inner ? row + a.columns : nullptr;
    for (int64_t i = 0; i < rows; i += kLanes) {
      _mm512_store_si512(to + p * kBlockRows + i,
                         Interleaved(row + i, next ? next + i : nullptr, MaskOf(rows - i)));
    }
  }
  return {to, 1, kBlockRows};
}

// c[0:R, 0:16 V] (+)= rows of the block times a panel; the last register's columns are masked.
template <int R, int V>
CTR_BF16 void Tile(const Block& a, int64_t first_row, const int32_t* panel, int64_t pairs, bool add,
                   __mmask16 last, int64_t stride, float* c) {
  __m512 sums[R][V];
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < V; ++v) sums[i][v] = _mm512_setzero_ps();
  const int32_t* from = a.pairs + first_row * a.row;
  for (int64_t p = 0; p < pairs; ++p, panel += kPanel, from += a.pair) {
    __m512i b[V];
    for (int v = 0; v < V; ++v) b[v] = _mm512_load_si512(panel + v * kLanes);
    for (int i = 0; i < R; ++i) {
      const __m512i one = _mm512_set1_epi32(from[i * a.row]);
      for (int v = 0; v < V; ++v)
        sums[i][v] = _mm512_dpbf16_ps(sums[i][v], (__m512bh)one, (__m512bh)b[v]);
    }
  }
  for (int i = 0; i < R; ++i) {
    for (int v = 0; v < V; ++v) {
      float* to = c + i * stride + v * kLanes;
      const __mmask16 mask = v == V - 1 ? last : 0xffff;
      __m512 sum = sums[i][v];
      if (add) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sum);
      _mm512_mask_storeu_ps(to, mask, sum);
    }
  }
}

using TileFunction = void (*)(const Block&, int64_t, const int32_t*, int64_t, bool, __mmask16,
                              int64_t, float*);
// clang-format off
constexpr TileFunction kTiles[kRows][kRegisters] = {
    {Tile<1, 1>, Tile<1, 2>, Tile<1, 3>, Tile<1, 4>}, {Tile<2, 1>, Tile<2, 2>, Tile<2, 3>, Tile<2, 4>},
    {Tile<3, 1>, Tile<3, 2>, Tile<3, 3>, Tile<3, 4>}, {Tile<4, 1>, Tile<4, 2>, Tile<4, 3>, Tile<4, 4>},
    {Tile<5, 1>, Tile<5, 2>, Tile<5, 3>, Tile<5, 4>}, {Tile<6, 1>, Tile<6, 2>, Tile<6, 3>, Tile<6, 4>}};
// clang-format on

}  // namespace

bool HasBfloat16Products() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

int64_t PackedSize(const Matrix& b) {
  const int64_t inner = b.transposed ? b.columns : b.rows;
  const int64_t columns = b.transposed ? b.rows : b.columns;
  return 2 * Pairs(inner) * Panels(columns) * kPanel;
}

void Bfloat16Product(const Matrix& a, const Matrix& b, const ParallelFor& parallel_for,
                     uint16_t* packed, float* c) {
  const int64_t rows = a.transposed ? a.columns : a.rows;
  const int64_t inner = a.transposed ? a.rows : a.columns;
  const int64_t columns = b.transposed ? b.rows : b.columns;
  if (inner == 0) {
    std::fill(c, c + rows * columns, 0.0f);
    return;
  }
  const int64_t pairs = Pairs(inner), panels = Panels(columns);
  int32_t* of_b = reinterpret_cast<int32_t*>(packed);
  parallel_for(panels, pairs * kRegisters * 2, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) PackPanel(b, p, of_b + p * pairs * kPanel);
  });
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  const int64_t cost = kBlockRows * pairs * panels * kRegisters / 4 + 1;
  parallel_for(blocks, cost, [&](int64_t begin, int64_t end) {
    alignas(64) static thread_local int32_t of_a[kBlockRows * kBlockPairs];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlockRows, count = std::min(kBlockRows, rows - first);
      for (int64_t start = 0; start < pairs; start += kBlockPairs) {
        const int64_t length = std::min(kBlockPairs, pairs - start);
        const Block of = PackBlock(a, first, count, start, length, of_a);
        for (int64_t p = 0; p < panels; ++p) {
          const int64_t width = std::min(kPanel, columns - p * kPanel);
          const int64_t registers = (width + kLanes - 1) / kLanes;
          const __mmask16 last = MaskOf(width - (registers - 1) * kLanes);
          const int32_t* panel = of_b + (p * pairs + start) * kPanel;
          for (int64_t i = 0; i < count; i += kRows) {
            kTiles[std::min(kRows, count - i) - 1][registers - 1](
                of, i, panel, length, start > 0, last, columns,
                c + (first + i) * columns + p * kPanel);
          }
        }
      }
    }
  });
}

#else

bool HasBfloat16Products() { return false; }
int64_t PackedSize(const Matrix&) { return 0; }
void Bfloat16Product(const Matrix&, const Matrix&, const ParallelFor&, uint16_t*, float*) {}

#endif

}  // namespace ctr
