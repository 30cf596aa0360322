// Reads samples of a prepared pass, given their places in it; docs/data.md describes the format.
#pragma once

#include <cstdint>
#include <vector>

namespace ctr {

// The arrays of a pass. A field is what a slot holds in one sample; its code is its number among
// the distinct fields of the slot in the sample's chunk.
struct SampleArrays {
  int64_t samples = 0;
  int64_t width = 0;  // the number of slots, and 1 more if there is a group
  int64_t chunk = 1;  // the number of samples in a chunk
  int64_t chunks = 0;
  const uint16_t* codes = nullptr;  // [samples, width]
  const int64_t* bases = nullptr;   // [chunks, width, 2]: the slot's first split, its first key
  int64_t num_keys = 0;
  const int64_t* keys = nullptr;     // [num_keys]
  int64_t num_splits = 0;            // 0: each field has one feature
  const uint32_t* splits = nullptr;  // [num_splits], where each field's keys begin and end
  const float* values = nullptr;     // [num_keys]; null: all 1
  int64_t dense_columns = 0;
  const float* dense = nullptr;  // [samples, dense_columns]
};

// For each field of some samples, where its keys begin and how many it has; `width` fields a
// sample.
struct FieldPlaces {
  std::vector<int64_t> starts;
  std::vector<int32_t> counts;
  int64_t features = 0;  // how many the first `slots` fields of all samples have
};

// Finds the fields of n samples, whose places are rows [n]. Returns false if a place, or a number
// in the arrays, is out of range.
bool FindFields(const SampleArrays& arrays, const int64_t* rows, int64_t n, int64_t slots,
                FieldPlaces* found);

// Where CopySamples writes what FindFields found; values, segments and group may be null: not
// wanted.
//
// keys: [found.features], sample by sample, and slot by slot within a sample.
// values: in the same order.
// segments: in the same order, sample * slots + slot.
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
