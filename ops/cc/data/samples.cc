#include "ops/cc/data/samples.h"

#include <algorithm>
#include <limits>

namespace ctr {
namespace {

// How many rows or fields ahead of their use are prefetched: a shuffled batch reads everywhere in
// the files.
constexpr int64_t kRowsAhead = 16;
constexpr int64_t kFieldsAhead = 32;
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // the most features in a field

}  // namespace

bool FindFields(const SampleArrays& arrays, const int64_t* rows, int64_t n, int64_t slots,
                FieldPlaces* found) {
  const int64_t width = arrays.width, fields = n * width;
  const bool one_each = arrays.num_splits == 0;
  const int64_t end = one_each ? arrays.num_keys : arrays.num_splits;
  found->starts.resize(fields);
  found->counts.assign(fields, 1);
  found->features = n * slots;
  int64_t* const starts = found->starts.data();
  for (int64_t i = 0; i < n; ++i) {  // finds each field's split, or its only key
    if (i + kRowsAhead < n) {
      const int64_t next = rows[i + kRowsAhead];
      if (next >= 0 && next < arrays.samples) {
        const char* const code = reinterpret_cast<const char*>(arrays.codes + next * width);
        for (int64_t b = 0; b < 2 * width; b += 64) __builtin_prefetch(code + b);
        __builtin_prefetch(code + 2 * width - 1);
      }
    }
    const int64_t row = rows[i];
    if (row < 0 || row >= arrays.samples || row / arrays.chunk >= arrays.chunks) return false;
    const uint16_t* const codes = arrays.codes + row * width;
    const int64_t* const bases = arrays.bases + row / arrays.chunk * width * 2;
    for (int64_t f = 0; f < width; ++f) {
      const int64_t base = bases[2 * f + (one_each ? 1 : 0)];
      if (base < 0 || base > end) return false;
      starts[i * width + f] = base + codes[f];
    }
  }
  if (one_each)
    return std::all_of(starts, starts + fields, [end](int64_t start) { return start < end; });
  found->features = 0;
  for (int64_t i = 0, row = 0; row < n; ++row) {
    const int64_t* const bases = arrays.bases + rows[row] / arrays.chunk * width * 2;
    for (int64_t f = 0; f < width; ++f, ++i) {
      if (i + kFieldsAhead < fields && starts[i + kFieldsAhead] < end)
        __builtin_prefetch(arrays.splits + starts[i + kFieldsAhead]);
      if (starts[i] + 1 >= end) return false;
      const uint32_t* const split = arrays.splits + starts[i];
      const int64_t base = bases[2 * f + 1], count = int64_t{split[1]} - split[0];
      if (base < 0 || base > arrays.num_keys) return false;
      const int64_t start = base + split[0];
      if (count < (f < slots ? 0 : 1) || count > kMost || start + count > arrays.num_keys)
        return false;
      starts[i] = start;
      found->counts[i] = static_cast<int32_t>(count);
      if (f < slots) found->features += count;
    }
  }
  return true;
}

void CopySamples(const SampleArrays& arrays, const int64_t* rows, int64_t n, int64_t slots,
                 const FieldPlaces& found, const SampleResults& to) {
  const int64_t width = arrays.width, fields = n * width, columns = arrays.dense_columns;
  int64_t at = 0;
  for (int64_t i = 0, row = 0; row < n; ++row) {
    if (row + kRowsAhead < n) {
      const float* const next = arrays.dense + rows[row + kRowsAhead] * columns;
      for (int64_t c = 0; c < columns; c += 16) __builtin_prefetch(next + c);
      if (columns > 0) __builtin_prefetch(next + columns - 1);
    }
    for (int64_t f = 0; f < width; ++f, ++i) {
      if (i + kFieldsAhead < fields) {
        const int64_t next = found.starts[i + kFieldsAhead];
        if (next < arrays.num_keys) __builtin_prefetch(arrays.keys + next);
        if (next < arrays.num_keys && arrays.values != nullptr)
          __builtin_prefetch(arrays.values + next);
      }
      const int64_t start = found.starts[i];
      if (f >= slots) {
        if (to.group != nullptr) to.group[row] = arrays.keys[start];
        continue;
      }
      for (int64_t k = start; k < start + found.counts[i]; ++k, ++at) {
        to.keys[at] = arrays.keys[k];
        if (to.values != nullptr)
          to.values[at] = arrays.values == nullptr ? 1.0f : arrays.values[k];
        if (to.segments != nullptr) to.segments[at] = static_cast<int32_t>(row * slots + f);
      }
    }
    std::copy_n(arrays.dense + rows[row] * columns, columns, to.dense + row * columns);
  }
}

}  // namespace ctr
