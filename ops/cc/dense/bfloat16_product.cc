#include "ops/cc/dense/bfloat16_product.h"

#include <algorithm>
#include <cstring>
#include <vector>

// tests/cc/emulated_bfloat16.h defines the instructions, so that tests need no such processor.
#if defined(CTR_EMULATED_BFLOAT16)
#include "tests/cc/emulated_bfloat16.h"
#elif defined(__x86_64__)
#include <immintrin.h>

#include "ops/cc/dense/bfloat16_instructions.h"
#endif

namespace ctr {

#if defined(CTR_BF16)

#define CTR_BF16_INLINE CTR_BF16 inline __attribute__((always_inline))

namespace {

// AVX-512's instruction takes 16 pairs of neighbours along the inner dimension and adds their
// products to 16 sums. So both factors are packed as pairs of 32 bits: b in panels of 64 columns,
// where the pairs of one inner place lie side by side, and a in blocks that fit into a core's own
// cache. AMX's instruction multiplies 16 rows of 16 pairs of a by 16 x 16 pairs of a panel. So a
// panel has zeros up to a multiple of 16 pairs, and such a block has its pairs in rows.
constexpr int64_t kLanes = 16;     // the sums in a register
constexpr int64_t kRegisters = 4;  // the registers that cover a row of a panel
constexpr int64_t kPanel = kRegisters * kLanes;
constexpr int64_t kRows = 6;          // kRows * kRegisters sums stay in registers
constexpr int64_t kBlockRows = 48;    // rows of a: whole tiles, and whole lines of the cache
constexpr int64_t kBlockPairs = 256;  // pairs of a panel, 64 KB: a core's own cache holds them
constexpr int64_t kAhead = 8;         // rows between a prefetch and its use: packing reads strides

int64_t Pairs(int64_t inner) { return (inner + 1) / 2; }
int64_t WholeTiles(int64_t pairs) { return (pairs + kLanes - 1) / kLanes * kLanes; }
int64_t PanelPairs(int64_t inner) { return WholeTiles(Pairs(inner)); }
int64_t Panels(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

__mmask16 MaskOf(int64_t lanes) {
  return lanes >= kLanes ? 0xffff : static_cast<__mmask16>((1u << lanes) - 1);
}

// Prefetches the 16 neighbours that lie `kAhead` rows below element `at` of row `row`.
CTR_BF16_INLINE void Prefetch(const Matrix& from, int64_t row, int64_t at) {
  if (row + kAhead >= from.rows) return;
  __builtin_prefetch(from.data + at + kAhead * from.stride);
  if (from.gate != nullptr) __builtin_prefetch(from.gate + at + kAhead * from.stride);
}

// Loads up to 16 neighbours from element `at` on; those that the mask or the gate hides become 0.
CTR_BF16_INLINE __m512 Load(const Matrix& from, int64_t at, __mmask16 mask) {
  if (from.gate != nullptr) {
    const __m512 gate = _mm512_maskz_loadu_ps(mask, from.gate + at);
    mask = _mm512_mask_cmp_ps_mask(mask, gate, _mm512_setzero_ps(), _CMP_GT_OQ);
  }
  return _mm512_maskz_loadu_ps(mask, from.data + at);
}

// Returns the pairs (first[i], second[i]) as bfloat16.
CTR_BF16_INLINE __m512i Interleaved(__m512 first, __m512 second) {
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, halves);
}

// `n` neighbours in memory as bfloat16, which are n / 2 pairs; what is beyond n is 0.
CTR_BF16_INLINE __m512i Consecutive(const Matrix& from, int64_t at, int64_t n) {
  const __m512 low = Load(from, at, MaskOf(n));
  const __m512 high =
      n > kLanes ? Load(from, at + kLanes, MaskOf(n - kLanes)) : _mm512_setzero_ps();
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Packs panel `panel` of b: pairs [PanelPairs(inner), kPanel]; what is beyond b is 0.
CTR_BF16 void PackPanel(const Matrix& b, int64_t panel, int32_t* to, float* column_sums) {
  const int64_t inner = b.Rows(), first = panel * kPanel;
  const int64_t width = std::min(kPanel, b.Columns() - first);
  int32_t* const end = to + PanelPairs(inner) * kPanel;
  if (b.transposed) {  // weights, which are small: one pair at a time
    std::fill(to, end, 0);
    alignas(64) int32_t pairs[kLanes];
    for (int64_t j = 0; j < width; ++j) {
      for (int64_t k = 0; k < inner; k += 2 * kLanes) {
        _mm512_store_si512(pairs, Consecutive(b, (first + j) * b.stride + k, inner - k));
        const int64_t count = std::min(kLanes, Pairs(inner - k));
        for (int64_t p = 0; p < count; ++p) to[(k / 2 + p) * kPanel + j] = pairs[p];
      }
    }
    return;
  }
  __mmask16 masks[kRegisters];
  __m512 sums[kRegisters];
  for (int v = 0; v < kRegisters; ++v) {
    masks[v] = width > v * kLanes ? MaskOf(width - v * kLanes) : 0;
    sums[v] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < inner; k += 2, to += kPanel) {
    const int64_t at = k * b.stride + first;
    for (int v = 0; v < kRegisters; ++v) {
      Prefetch(b, k, at + v * kLanes);
      Prefetch(b, k + 1, at + b.stride + v * kLanes);
      const __m512 one = Load(b, at + v * kLanes, masks[v]);
      const __m512 two =
          k + 1 < inner ? Load(b, at + b.stride + v * kLanes, masks[v]) : _mm512_setzero_ps();
      sums[v] = _mm512_add_ps(sums[v], _mm512_add_ps(one, two));
      _mm512_store_si512(to + v * kLanes, Interleaved(one, two));
    }
  }
  std::fill(to, end, 0);
  if (column_sums == nullptr) return;
  for (int v = 0; v < kRegisters; ++v)
    _mm512_mask_storeu_ps(column_sums + first + v * kLanes, masks[v], sums[v]);
}

// A block of a: pair p of row i lies at pairs[i * row + p * pair].
struct Block {
  const int32_t* pairs;
  int64_t row;
  int64_t pair;
};

// Packs `pairs` pairs from `first_pair` on, of `rows` rows of a from `first` on. What is missing to
// whole tiles of pairs is 0.
CTR_BF16 Block PackBlock(const Matrix& a, int64_t first, int64_t rows, int64_t first_pair,
                         int64_t pairs, int32_t* to) {
  const int64_t inner = a.Columns();
  if (!a.transposed) {
    const int64_t n = std::min(2 * pairs, inner - 2 * first_pair);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = (first + i) * a.stride + 2 * first_pair;
      for (int64_t k = 0; k < n; k += 2 * kLanes) {
        Prefetch(a, first + i, at + k);
        Prefetch(a, first + i, at + k + kLanes);
        _mm512_store_si512(to + i * kBlockPairs + k / 2, Consecutive(a, at + k, n - k));
      }
    }
    return {to, kBlockPairs, 1};
  }
  for (int64_t p = 0; p < pairs; ++p) {
    const int64_t k = 2 * (first_pair + p), at = k * a.stride + first;
    for (int64_t i = 0; i < rows; i += kLanes) {
      const __mmask16 mask = MaskOf(rows - i);
      Prefetch(a, k, at + i);
      Prefetch(a, k + 1, at + a.stride + i);
      const __m512 two = k + 1 < inner ? Load(a, at + a.stride + i, mask) : _mm512_setzero_ps();
      _mm512_store_si512(to + p * kBlockRows + i, Interleaved(Load(a, at + i, mask), two));
    }
  }
  std::fill(to + pairs * kBlockRows, to + WholeTiles(pairs) * kBlockRows, 0);
  return {to, 1, kBlockRows};
}

// Transposes 16 x 16 numbers, by swapping blocks beside the diagonal: of 1 x 1 numbers in each 2 x
// 2, of 2 x 2 in each 4 x 4, and so on. The strides are numbers from a row to the next.
CTR_BF16_INLINE void Transpose16(const int32_t* from, int64_t from_stride, int32_t* to,
                                 int64_t to_stride) {
  typedef int32_t Register __attribute__((vector_size(64)));
  Register rows[kLanes], upper{}, lower{};
  for (int i = 0; i < kLanes; ++i) std::memcpy(&rows[i], from + i * from_stride, sizeof(Register));
  for (int size = 1; size < kLanes; size *= 2) {
    for (int j = 0; j < kLanes; ++j) {  // a place from 16 on is in the lower row
      upper[j] = j & size ? kLanes + j - size : j;
      lower[j] = j & size ? kLanes + j : j + size;
    }
    for (int i = 0; i < kLanes; ++i) {
      if (i & size) continue;
      const Register above = rows[i], below = rows[i + size];
      rows[i] = __builtin_shuffle(above, below, upper);
      rows[i + size] = __builtin_shuffle(above, below, lower);
    }
  }
  for (int i = 0; i < kLanes; ++i) std::memcpy(to + i * to_stride, &rows[i], sizeof(Register));
}

// Returns a block whose pairs lie in rows. One that lies in columns is copied to `to`.
CTR_BF16 Block InRows(const Block& a, int64_t pairs, int32_t* to) {
  if (a.pair == 1) return a;
  for (int64_t p = 0; p < pairs; p += kLanes) {
    for (int64_t i = 0; i < kBlockRows; i += kLanes)
      Transpose16(a.pairs + p * a.pair + i, a.pair, to + i * kBlockPairs + p, kBlockPairs);
  }
  return {to, kBlockPairs, 1};
}

// What to do with the sums of a panel's columns.
struct Finish {
  bool add;           // whether to add them to the sums of earlier terms in the result
  const float* bias;  // for the panel's columns, or null
  bool rectify;
};

// Finishes 16 sums, of columns 16 v and on of a panel, and stores those in the mask.
CTR_BF16_INLINE void Store(__m512 sum, const Finish& finish, int64_t v, __mmask16 mask, float* to) {
  if (finish.add) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sum);
  if (finish.bias != nullptr)
    sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, finish.bias + v * kLanes));
  if (finish.rectify)  // NaN stays NaN; masked, for gcc 12 warns of the plain one
    sum = _mm512_maskz_max_ps(0xffff, _mm512_setzero_ps(), sum);
  _mm512_mask_storeu_ps(to, mask, sum);
}

// Sets c[0:R, 0:16 V] to R rows of the block times a panel, or adds them to it. `last` masks the
// columns of the last register.
template <int R, int V>
CTR_BF16 void Tile(const Block& a, int64_t first_row, const int32_t* panel, int64_t pairs,
                   const Finish& finish, __mmask16 last, int64_t stride, float* c) {
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
      Store(sums[i][v], finish, v, v == V - 1 ? last : 0xffff, c + i * stride + v * kLanes);
    }
  }
}

using TileFunction = void (*)(const Block&, int64_t, const int32_t*, int64_t, const Finish&,
                              __mmask16, int64_t, float*);
// clang-format off
constexpr TileFunction kTiles[kRows][kRegisters] = {
    {Tile<1, 1>, Tile<1, 2>, Tile<1, 3>, Tile<1, 4>}, {Tile<2, 1>, Tile<2, 2>, Tile<2, 3>, Tile<2, 4>},
    {Tile<3, 1>, Tile<3, 2>, Tile<3, 3>, Tile<3, 4>}, {Tile<4, 1>, Tile<4, 2>, Tile<4, 3>, Tile<4, 4>},
    {Tile<5, 1>, Tile<5, 2>, Tile<5, 3>, Tile<5, 4>}, {Tile<6, 1>, Tile<6, 2>, Tile<6, 3>, Tile<6, 4>}};
// clang-format on

// Sets c[0:count, 0:16 registers] to a block times a panel, by AMX, or adds them to it. The block
// has its pairs in rows; it and the panel have whole tiles of them.
CTR_BF16 void MultiplyByTiles(const Block& a, int64_t count, const int32_t* panel, int64_t pairs,
                              const Finish& finish, int64_t registers, __mmask16 last,
                              int64_t stride, float* c) {
  static_assert(kBlockRows == 3 * kLanes, "a block has three tiles of rows");
  alignas(64) float sums[kBlockRows * kLanes];
  const int64_t below = kLanes * a.row, row_bytes = a.row * 4, panel_bytes = kPanel * 4;
  for (int64_t v = 0; v < registers; ++v) {
    Tiles::Clear<0>();
    Tiles::Clear<1>();
    Tiles::Clear<2>();
    for (int64_t p = 0; p < pairs; p += kLanes) {
      Tiles::Load<6>(panel + p * kPanel + v * kLanes, panel_bytes);
      Tiles::Load<3>(a.pairs + p, row_bytes);
      Tiles::MultiplyAndAdd<0, 3, 6>();
      Tiles::Load<4>(a.pairs + p + below, row_bytes);
      Tiles::MultiplyAndAdd<1, 4, 6>();
      Tiles::Load<5>(a.pairs + p + 2 * below, row_bytes);
      Tiles::MultiplyAndAdd<2, 5, 6>();
    }
    Tiles::Store<0>(sums, kLanes * 4);
    Tiles::Store<1>(sums + kLanes * kLanes, kLanes * 4);
    Tiles::Store<2>(sums + 2 * kLanes * kLanes, kLanes * 4);
    for (int64_t i = 0; i < count; ++i) {
      Store(_mm512_load_ps(sums + i * kLanes), finish, v, v == registers - 1 ? last : 0xffff,
            c + i * stride + v * kLanes);
    }
  }
}

}  // namespace

bool HasBfloat16Products() { return HasVectors(); }

int64_t PackedSize(const Matrix& b) { return PanelPairs(b.Rows()) * Panels(b.Columns()) * kPanel; }

void Pack(const Matrix& b, const ParallelFor& parallel_for, int32_t* packed, float* column_sums) {
  const int64_t pairs = PanelPairs(b.Rows());
  parallel_for(Panels(b.Columns()), pairs * kRegisters * 2, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) PackPanel(b, p, packed + p * pairs * kPanel, column_sums);
  });
}

void Multiply(const std::vector<Term>& terms, int64_t rows, const std::vector<Result>& results,
              const ParallelFor& parallel_for) {
  std::vector<const Term*> some;  // the terms that are not empty sums
  int64_t pairs_in_all = 0, panels_in_all = 0;
  for (const Term& term : terms) {
    if (term.a.Columns() > 0) some.push_back(&term);
    pairs_in_all += Pairs(term.a.Columns());
  }
  for (const Result& c : results) panels_in_all += Panels(c.columns);
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  const int64_t cost = kBlockRows * pairs_in_all * panels_in_all * kRegisters / 4 + 1;
  const bool by_tiles = HasTiles();
  parallel_for(blocks, cost, [&](int64_t begin, int64_t end) {
    alignas(64) static thread_local int32_t of_a[kBlockRows * kBlockPairs];
    alignas(64) static thread_local int32_t of_a_in_rows[kBlockRows * kBlockPairs];
    if (by_tiles) Tiles::Begin();
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlockRows, count = std::min(kBlockRows, rows - first);
      for (const Result& c : results) {
        for (int64_t i = first; some.empty() && i < first + count; ++i) {
          for (int64_t j = 0; j < c.columns; ++j) {
            const float value = c.bias == nullptr ? 0.0f : c.bias[j];
            c.data[i * c.stride + j] = c.rectified ? std::max(0.0f, value) : value;
          }
        }
      }
      for (size_t t = 0; t < some.size(); ++t) {
        const Term& term = *some[t];
        const int64_t pairs = Pairs(term.a.Columns());
        for (int64_t start = 0; start < pairs; start += kBlockPairs) {
          const int64_t length = std::min(kBlockPairs, pairs - start);
          const bool last_sum = t + 1 == some.size() && start + length == pairs;
          Block of = PackBlock(term.a, first, count, start, length, of_a);
          if (by_tiles) of = InRows(of, length, of_a_in_rows);
          for (size_t r = 0; r < results.size(); ++r) {
            const Result& c = results[r];
            for (int64_t p = 0; p < Panels(c.columns); ++p) {
              const int64_t width = std::min(kPanel, c.columns - p * kPanel);
              const int64_t registers = (width + kLanes - 1) / kLanes;
              const __mmask16 last = MaskOf(width - (registers - 1) * kLanes);
              const int32_t* panel = term.b[r] + (p * WholeTiles(pairs) + start) * kPanel;
              float* const to = c.data + first * c.stride + p * kPanel;
              const Finish finish{t > 0 || start > 0,
                                  last_sum && c.bias != nullptr ? c.bias + p * kPanel : nullptr,
                                  last_sum && c.rectified};
              if (by_tiles) {
                MultiplyByTiles(of, count, panel, length, finish, registers, last, c.stride, to);
                continue;
              }
              for (int64_t i = 0; i < count; i += kRows) {
                kTiles[std::min(kRows, count - i) - 1][registers - 1](
                    of, i, panel, length, finish, last, c.stride, to + i * c.stride);
              }
            }
          }
        }
      }
    }
    if (by_tiles) Tiles::End();
  });
}

#else

bool HasBfloat16Products() { return false; }
int64_t PackedSize(const Matrix&) { return 0; }
void Pack(const Matrix&, const ParallelFor&, int32_t*, float*) {}
void Multiply(const std::vector<Term>&, int64_t, const std::vector<Result>&, const ParallelFor&) {}

#endif

}  // namespace ctr
