// clang-format off
#include "ops/cc/rows/multiversion.h"  // first
// clang-format on
#include "ops/cc/rows/pool.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

namespace ctr {
namespace {

constexpr int64_t kAhead = 12;  // occurrences between a prefetch and its use

CTR_INLINE void Prefetch(const float* begin, int n) {
  for (int i = 0; i < n; i += 16) __builtin_prefetch(begin + i);
}

// N floats, which may lie anywhere in memory.
template <int N>
struct Floats {
  typedef float Type __attribute__((vector_size(4 * N), aligned(4), may_alias));
};

template <int N>
CTR_INLINE typename Floats<N>::Type& At(float* p) {
  return *reinterpret_cast<typename Floats<N>::Type*>(p);
}

template <int N>
CTR_INLINE const typename Floats<N>::Type& At(const float* p) {
  return *reinterpret_cast<const typename Floats<N>::Type*>(p);
}

// Calls work.template Do<N>(c) for columns [c, c + N) until all are done.
template <typename Work>
CTR_INLINE void ByColumns(int columns, const Work& work) {
  // Not by 16 columns: for AVX2, GCC 12 makes vectors of 16 floats in memory, number by number.
  int c = 0;
  for (; c + 8 <= columns; c += 8) work.template Do<8>(c);
  if (c + 4 <= columns) {
    work.template Do<4>(c);
    c += 4;
  }
  for (; c < columns; ++c) work.template Do<1>(c);
}

// Adds x v, for one feature, to all results that need it.
struct AddFeature {
  const float* v;
  float x;
  bool first;    // whether it is the first feature of its slot, with which the slot's sum begins
  float* slots;  // these pointers may be null: the result is not computed
  float* totals;
  float* squares;  // (x v)² is added

  template <int N>
  CTR_INLINE void Do(int c) const {
    const auto product = x * At<N>(v + c);
    if (slots != nullptr) At<N>(slots + c) = first ? product : At<N>(slots + c) + product;
    if (totals != nullptr) At<N>(totals + c) += product;
    if (squares != nullptr) At<N>(squares + c) += product * product;
  }
};

// Adds x (g + h) to the gradient with respect to a feature's factors.
struct AddGradient {
  float x;
  bool first;
  const float* g;  // null: 0; g or h may be null, not both
  const float* h;
  float* to;

  template <int N>
  CTR_INLINE void Do(int c) const {
    const auto sum = x * (h == nullptr   ? At<N>(g + c)
                          : g == nullptr ? At<N>(h + c)
                                         : At<N>(g + c) + At<N>(h + c));
    At<N>(to + c) = first ? sum : At<N>(to + c) + sum;
  }
};

// Pools samples [begin, end) of a batch.
CTR_MULTIVERSION bool PoolSamples(const PoolLayout& layout, const PoolBatch& batch,
                                  const float* linear, const int32_t* inverse,
                                  const PoolOutputs& out, int64_t begin, int64_t end,
                                  float* square_sums) {
  // Copies: without them the compiler must assume that a write changes them, and read them again.
  const PoolBatch in = batch;
  float* const weights = out.linear;
  float* const norms = out.norm;
  const int* const table_of_field = layout.table_of_field.data();
  const int* const first_part = layout.first_part.data();
  const int64_t fields = layout.num_fields();
  const PoolPart* parts = layout.parts.data();
  const int num_parts = static_cast<int>(layout.parts.size());
  float* const* slots = out.slots.data();
  float* const* totals = out.totals.data();
  float* const* squares = out.squares.data();
  int64_t i = in.segments == nullptr
                  ? begin * fields
                  : std::lower_bound(in.segments, in.segments + in.n, begin * fields) - in.segments;
  for (int64_t b = begin; b < end; ++b) {
    float* sums = square_sums;
    for (int p = 0; p < num_parts; ++p) {
      if (totals[p] != nullptr)
        std::fill_n(totals[p] + b * parts[p].columns, parts[p].columns, 0.0f);
      if (squares[p] == nullptr) continue;
      std::fill_n(sums, parts[p].width, 0.0f);
      sums += parts[p].width;
    }
    float* part_sums = square_sums;  // the sums of the current table's parts begin here
    int table = -1;
    for (int64_t f = 0; f < fields; ++f) {
      if (table_of_field[f] != table) {
        if (table >= 0) {
          for (int p = first_part[table]; p < first_part[table + 1]; ++p) {
            if (squares[p] != nullptr) part_sums += parts[p].width;
          }
        }
        table = table_of_field[f];
      }
      const int row_width = layout.row_width[table];
      const int64_t place = b * layout.fields[table] + (f - layout.first_field[table]);
      const int64_t segment = b * fields + f;
      const Pooling pooling = norms == nullptr ? Pooling::kSum : layout.poolings[f];
      const int64_t slot_begin = i;
      float weight = 0.0f, divisor = 0.0f;
      bool any = false;
      while (i < in.n && (in.segments == nullptr ? i == segment : in.segments[i] == segment)) {
        if (i + 2 * kAhead < in.n) {
          const uint32_t far = static_cast<uint32_t>(inverse[i + 2 * kAhead]);
          if (far < in.u) {
            __builtin_prefetch(in.offsets + far);
            __builtin_prefetch(linear + far);
          }
          const uint32_t next = static_cast<uint32_t>(inverse[i + kAhead]);
          if (next < in.u)
            Prefetch(in.factors + in.offsets[next], in.offsets[next + 1] - in.offsets[next]);
        }
        const uint32_t j = static_cast<uint32_t>(inverse[i]);
        if (j >= in.u) return false;
        const float x = in.values == nullptr ? 1.0f : in.values[i];
        ++i;
        weight += x * linear[j];
        divisor += pooling == Pooling::kSqrtN ? x * x : x;
        const int32_t offset = in.offsets[j];
        const int width = in.offsets[j + 1] - offset;
        if (width == 0) continue;
        if (width != row_width) return false;
        float* sum = part_sums;
        for (int p = first_part[table]; p < first_part[table + 1]; ++p) {
          const PoolPart& part = parts[p];
          const float* v = in.factors + offset + part.begin;
          float* const of_slots = slots[p] == nullptr ? nullptr : slots[p] + place * part.columns;
          float* const of_totals = totals[p] == nullptr ? nullptr : totals[p] + b * part.columns;
          float* const of_squares = squares[p] == nullptr ? nullptr : sum;
          if (of_squares != nullptr) sum += part.width;
          if (part.field && of_squares != nullptr) {  // over its own field's columns only
            ByColumns(part.width,
                      AddFeature{v + f * part.width, x, false, nullptr, nullptr, of_squares});
          }
          ByColumns(part.columns,
                    AddFeature{v, x, !any, of_slots, of_totals, part.field ? nullptr : of_squares});
        }
        any = true;
      }
      weights[segment] = weight;
      if (norms != nullptr) {
        if (pooling == Pooling::kSqrtN) divisor = std::sqrt(divisor);
        norms[segment] = pooling == Pooling::kSum || i == slot_begin ? 1.0f
                         : divisor == 0.0f ? std::numeric_limits<float>::infinity()
                                           : divisor;
      }
      if (!any) {
        for (int p = first_part[table]; p < first_part[table + 1]; ++p) {
          if (slots[p] == nullptr) continue;
          std::memset(slots[p] + place * parts[p].columns, 0, sizeof(float) * parts[p].columns);
        }
      }
    }
    sums = square_sums;
    for (int p = 0; p < num_parts; ++p) {
      if (squares[p] == nullptr) continue;
      float total = 0.0f;
      for (int c = 0; c < parts[p].width; ++c) total += sums[c];
      squares[p][b] = total;
      sums += parts[p].width;
    }
  }
  return true;
}

// Working memory of PoolGradientOf, for the features of its range.
struct GradientScratch {
  std::vector<int32_t> tables;  // [features]: the table of a feature; -1: no occurrence had factors
  std::vector<float> slopes;    // [features, parts]: the sum of 2 x^2 times the gradient of squares
};

// Computes the gradients for distinct features [begin, end).
//
// It goes through the batch in its order, so that it reads the gradients of slots from front to
// back. The rows that it adds to are either few or, within their shard, in order of their first
// occurrence (see Dedupe::Write). By feature, almost every read would be of another page.
CTR_MULTIVERSION bool PoolGradientOf(const PoolLayout& layout, const PoolBatch& batch,
                                     const PoolGradients& gradients, const int32_t* inverse,
                                     int64_t begin, int64_t end, float* linear, float* factors,
                                     GradientScratch* scratch) {
  constexpr int64_t kChunk = 4096;  // occurrences
  const PoolBatch in = batch;       // a copy, as above
  const int* const table_of_field = layout.table_of_field.data();
  const int* const first_part = layout.first_part.data();
  const float* const weights = gradients.linear;
  const float* const* const of_slots = gradients.slots.data();
  const float* const* const of_totals = gradients.totals.data();
  const float* const* const of_squares = gradients.squares.data();
  const uint32_t fields = static_cast<uint32_t>(layout.num_fields());
  const PoolPart* parts = layout.parts.data();
  const int64_t num_parts = static_cast<int64_t>(layout.parts.size());
  const uint32_t first_feature = static_cast<uint32_t>(begin);
  const uint32_t features = static_cast<uint32_t>(end - begin), u = static_cast<uint32_t>(in.u);
  scratch->tables.assign(features, -1);
  scratch->slopes.assign(features * num_parts, 0.0f);
  int32_t* const tables = scratch->tables.data();
  float* const slopes = scratch->slopes.data();
  std::fill_n(linear + begin, features, 0.0f);
  const auto segment_of = [&in](uint32_t i) {
    return in.segments == nullptr ? i : static_cast<uint32_t>(in.segments[i]);
  };
  // Where the slots of sample b and field f lie, among those of all samples.
  const auto place_of = [&](uint32_t b, uint32_t f) {
    const int t = table_of_field[f];
    return static_cast<int64_t>(b) * layout.fields[t] + (f - layout.first_field[t]);
  };
  uint32_t own[kChunk + 1];  // the occurrences of a chunk whose feature is in the range
  for (int64_t chunk = 0; chunk < in.n; chunk += kChunk) {
    const uint32_t chunk_end = static_cast<uint32_t>(std::min(chunk + kChunk, in.n));
    int64_t count = 0;
    bool good = true;
    for (uint32_t i = static_cast<uint32_t>(chunk); i < chunk_end; ++i) {
      const uint32_t j = static_cast<uint32_t>(inverse[i]);
      good &= j < u;
      own[count] = i;
      count += j - first_feature < features;
    }
    if (!good) return false;
    for (int64_t k = 0; k < count; ++k) {
      if (k + 2 * kAhead < count) {
        const int32_t far = inverse[own[k + 2 * kAhead]], next = inverse[own[k + kAhead]];
        __builtin_prefetch(in.offsets + far);
        __builtin_prefetch(linear + far, 1);
        Prefetch(factors + in.offsets[next], in.offsets[next + 1] - in.offsets[next]);
        const uint32_t segment = segment_of(own[k + kAhead]), b = segment / fields;
        const int t = table_of_field[segment - b * fields];
        const int64_t place = place_of(b, segment - b * fields);
        for (int p = first_part[t]; p < first_part[t + 1]; ++p) {
          if (of_slots[p] != nullptr)
            Prefetch(of_slots[p] + place * parts[p].columns, parts[p].columns);
        }
      }
      const uint32_t i = own[k], segment = segment_of(i);
      const uint32_t j = static_cast<uint32_t>(inverse[i]), place_in_range = j - first_feature;
      const float x = in.values == nullptr ? 1.0f : in.values[i];
      if (weights != nullptr) linear[j] += x * weights[segment];
      const int32_t offset = in.offsets[j];
      const int width = in.offsets[j + 1] - offset;
      if (width == 0) continue;
      const uint32_t b = segment / fields, f = segment - b * fields;
      const int table = table_of_field[f];
      const bool first = tables[place_in_range] < 0;
      if (tables[place_in_range] != table) {
        if (!first || layout.row_width[table] != width) return false;
        tables[place_in_range] = table;
      }
      const int64_t place = place_of(b, f);
      for (int p = first_part[table]; p < first_part[table + 1]; ++p) {
        const PoolPart& part = parts[p];
        float* const to = factors + offset + part.begin;
        const float* const slots = of_slots[p];
        const float* const totals = of_totals[p];
        if (slots != nullptr || totals != nullptr) {
          const float* const g = slots == nullptr ? nullptr : slots + place * part.columns;
          const float* const h = totals == nullptr ? nullptr : totals + int64_t{b} * part.columns;
          ByColumns(part.columns, AddGradient{x, first, g, h, to});
        } else if (first) {
          std::memset(to, 0, sizeof(float) * part.columns);
        }
        if (of_squares[p] == nullptr) continue;
        const float slope = 2.0f * x * x * of_squares[p][b];
        if (part.field) {
          const int of_field = static_cast<int>(f) * part.width;
          const float* __restrict v = in.factors + offset + part.begin + of_field;
          for (int c = 0; c < part.width; ++c) to[of_field + c] += slope * v[c];
        } else {  // every occurrence has the same columns, so they are added once, below
          slopes[place_in_range * num_parts + p] += slope;
        }
      }
    }
  }
  for (uint32_t k = 0; k < features; ++k) {
    const int32_t offset = in.offsets[begin + k];
    const int table = tables[k];
    if (table < 0) {
      std::memset(factors + offset, 0, sizeof(float) * (in.offsets[begin + k + 1] - offset));
      continue;
    }
    for (int p = first_part[table]; p < first_part[table + 1]; ++p) {
      if (of_squares[p] == nullptr || parts[p].field) continue;
      float* __restrict to = factors + offset + parts[p].begin;
      const float* __restrict v = in.factors + offset + parts[p].begin;
      const float slope = slopes[k * num_parts + p];
      for (int c = 0; c < parts[p].width; ++c) to[c] += slope * v[c];
    }
  }
  return true;
}

}  // namespace

std::string PoolLayout::Complete() {
  constexpr int64_t kMost = 1 << 20;  // the most tables, and the most factors in a row
  int tables = 0;
  for (size_t f = 0; f < table_of_field.size(); ++f) {
    const int t = table_of_field[f];
    if (t < 0 || t >= kMost)
      return "table_of_field: found " + std::to_string(t) + "; wanted tables in [0, 2^20)";
    if (!first_field.empty() && t < tables - 1)
      return "table_of_field: wanted fields in ascending order of tables";
    if (t >= tables) {
      first_field.resize(t + 1, 0);
      fields.resize(t + 1, 0);
      tables = t + 1;
    }
    if (fields[t]++ == 0) first_field[t] = static_cast<int>(f);
  }
  if (!poolings.empty() && poolings.size() != table_of_field.size())
    return "poolings: wanted one a field, or none";
  if (!averaged.empty() && averaged.size() != table_of_field.size())
    return "averaged: wanted one a field, or none";
  row_width.assign(tables, 0);
  first_part.assign(tables + 1, 0);
  int last = 0;
  for (PoolPart& part : parts) {
    if (part.table < last || part.table >= tables)
      return "part_tables: wanted tables of fields, in ascending order";
    const int64_t columns = part.field ? part.width * num_fields() : part.width;
    if (part.width < 1 || columns + row_width[part.table] > kMost)
      return "part_widths: found " + std::to_string(part.width) +
             "; wanted widths > 0, and at most 2^20 factors a row";
    last = part.table;
    part.columns = static_cast<int>(columns);
    part.begin = row_width[part.table];
    row_width[part.table] += part.columns;
    ++first_part[part.table + 1];
  }
  for (int t = 0; t < tables; ++t) first_part[t + 1] += first_part[t];
  return "";
}

std::string CheckPoolBatch(const PoolLayout& layout, const PoolBatch& batch, int64_t factors_n) {
  const int64_t positions = batch.batch * layout.num_fields();
  if (batch.segments == nullptr) {
    if (batch.n != positions) {
      return "inverse: found " + std::to_string(batch.n) + " occurrences; wanted " +
             std::to_string(positions) + ", one for each sample and field where segments is empty";
    }
  } else {
    int32_t last = 0;
    bool ordered = true;
    for (int64_t i = 0; i < batch.n; ++i) {
      ordered &= batch.segments[i] >= last;
      last = batch.segments[i];
    }
    if (!ordered || (batch.n > 0 && last >= positions)) {
      return "segments: wanted them ascending in [0, " + std::to_string(positions) + ")";
    }
  }
  int32_t last = 0;
  bool ordered = batch.offsets[0] == 0;
  for (int64_t j = 0; j <= batch.u; ++j) {
    ordered &= batch.offsets[j] >= last;
    last = batch.offsets[j];
  }
  if (!ordered || last != factors_n) {
    return "offsets: wanted them ascending from 0 to " + std::to_string(factors_n) +
           ", the length of factors";
  }
  return "";
}

void Average(const PoolLayout& layout, const PoolBatch& batch, float* values) {
  const int32_t fields = static_cast<int32_t>(layout.num_fields());
  for (int64_t begin = 0, end; begin < batch.n; begin = end) {
    const int32_t segment = batch.segments[begin];
    end = begin + 1;
    while (end < batch.n && batch.segments[end] == segment) ++end;
    const float divisor =
        layout.averaged[segment % fields] ? static_cast<float>(end - begin) : 1.0f;
    for (int64_t i = begin; i < end; ++i)
      values[i] = (batch.values == nullptr ? 1.0f : batch.values[i]) / divisor;
  }
}

bool Pool(const PoolLayout& layout, const PoolBatch& batch, const float* linear,
          const int32_t* inverse, const ParallelFor& parallel_for, const PoolOutputs& out) {
  if (batch.batch == 0) return true;
  int64_t columns = 0, squares = 0;
  for (size_t p = 0; p < layout.parts.size(); ++p) {
    columns += layout.parts[p].columns;
    if (out.squares[p] != nullptr) squares += layout.parts[p].width;
  }
  std::atomic<bool> good(true);
  const int64_t cost = (batch.n / batch.batch + 1) * (10 + columns / 2);
  parallel_for(batch.batch, cost, [&](int64_t begin, int64_t end) {
    std::vector<float> sums(squares);
    if (!PoolSamples(layout, batch, linear, inverse, out, begin, end, sums.data())) good = false;
  });
  return good;
}

bool PoolGradient(const PoolLayout& layout, const PoolBatch& batch, const PoolGradients& gradients,
                  const int32_t* inverse, const int32_t* starts, const ParallelFor& parallel_for,
                  float* linear, float* factors) {
  int64_t columns = 0;
  for (const PoolPart& part : layout.parts) columns += part.columns;
  // Blocks of about equal work: most of it is for occurrences, a little for each feature. They are
  // large, because whoever works on blocks goes through the whole of `inverse`.
  constexpr int64_t kWork = 16384;
  const int64_t work = batch.n + batch.u;
  const int64_t blocks = (work + kWork - 1) / kWork;
  const auto first_of =
      [&](int64_t block) {  // the first feature j with starts[j] + j >= block * kWork
        int64_t low = 0, high = batch.u;
        while (low < high) {
          const int64_t middle = (low + high) / 2;
          if (starts[middle] + middle >= block * kWork) {
            high = middle;
          } else {
            low = middle + 1;
          }
        }
        return low;
      };
  std::atomic<bool> good(true);
  parallel_for(blocks, kWork * (10 + columns / 2), [&](int64_t begin, int64_t end) {
    const int64_t first = first_of(begin), last = end == blocks ? batch.u : first_of(end);
    static thread_local GradientScratch scratch;
    if (!PoolGradientOf(layout, batch, gradients, inverse, first, last, linear, factors, &scratch))
      good = false;
  });
  return good;
}

}  // namespace ctr
