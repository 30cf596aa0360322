// Samples of a prepared pass, by their places; docs/data.md has the format.
#pragma once

#include <cstdint>
#include <vector>

namespace ctr {

// The arrays of a pass. A field is what a sample has in a slot; `codes` says which of the distinct
// fields of its slot, in the sample's chunk, it is.
struct SampleArrays {
  int64_t samples = 0;
  int64_t width = 0;  // slots, and the group where there is one
  int64_t chunk = 1;  // samples whose distinct fields are numbered together
  int64_t chunks = 0;
  const uint16_t* codes = nullptr;  // [samples, width]
  const int64_t* bases = nullptr;   // [chunks, width, 2]: the slot's first split, its first key
  int64_t num_keys = 0;
  const int64_t* keys = nullptr;     // [num_keys]
  int64_t num_splits = 0;            // 0: each field has one feature
  const uint32_t* splits = nullptr;  // [num_splits], where a field's keys begin, and the next one's
  const float* values = nullptr;     // [num_keys]; null: all 1
  int64_t dense_columns = 0;
  const float* dense = nullptr;  // [samples, dense_columns]
};

// Of fields of some samples, `width` a sample, where their keys begin and how many they are.
struct FieldPlaces {
  std::vector<int64_t> starts;
  std::vector<int32_t> counts;
  int64_t features = 0;  // of the first `slots` fields of each sample
};

// False where a place, or what the arrays say, is out of range.
bool FindFields(const SampleArrays& arrays, const int64_t* rows, int64_t n, int64_t slots,
                FieldPlaces* found);

// Copies what FindFields found. Null results are not wanted.
//
// keys: [found.features], a sample's slots one after another.
// values: likewise.
// segments: likewise, sample * slots + slot.
// dense: [n, dense_columns].
// group: [n], the key of the last field.
struct SampleResults {
  int64_t* keys = nullptr;
  float* values = nullptr;
  int32_t* segments = nullptr;
  float* dense = nullptr;
  int64_t* group = nullptr;
};
void CopySamples(const SampleArrays& arrays, const int64_t* rows, int64_t n, int64_t slots,
                 const FieldPlaces& found, const SampleResults& to);

}  // namespace ctr
