// Hashes columns of a log to keys, and encodes the fields of a block of samples as small numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ctr {

constexpr int kHashBits = 52;
constexpr int64_t kNoFeature = -1;  // a key is never negative

// Writes the keys of n texts: slot_id << 52 | farmhash64(text) mod 2^52, for the text without the
// ASCII white space around it; kNoFeature if that is blank. A whole number is hashed without a
// fraction of zeros, 12.0 as 12, and True and TRUE as true, so that a number or boolean is one
// feature however it is written.
//
// bytes: the texts, one after another. offsets [n + 1], ascending: text i is the bytes [offsets[i],
// offsets[i + 1]). 0 <= slot_id < 2048.
void KeysOfTexts(const char* bytes, const int32_t* offsets, int64_t n, int64_t slot_id,
                 int64_t* keys);

// Writes the keys of n integers, which are hashed as their decimal text.
void KeysOfIntegers(const int64_t* values, int64_t n, int64_t slot_id, int64_t* keys);

// The same for ops/keys.py, which calls them without TensorFlow: for the short columns of a
// request, an op would take ten times as long. The first returns false if offsets do not ascend
// within [0, size].
extern "C" bool ctr_text_keys(const char* bytes, int64_t size, const int32_t* offsets, int64_t n,
                              int64_t slot_id, int64_t* keys);
extern "C" void ctr_integer_keys(const int64_t* values, int64_t n, int64_t slot_id, int64_t* keys);

// Numbers the distinct fields of a block of samples, slot by slot. A field is what a sample has in
// a slot: none, one or several features, each with a value.
class FieldCoder {
 public:
  static constexpr int64_t kMaxSamples = 65536;  // codes take 16 bits

  // A block of n samples of F slots.
  struct Block {
    // [nnz], slot by slot, and sample by sample within a slot. Without counts each field has one,
    // or none if it is kNoFeature.
    const int64_t* keys = nullptr;
    const float* values = nullptr;    // [nnz]; null if all are 1, and always without counts
    const int32_t* counts = nullptr;  // [F * n], how many features each field has; or null
    int64_t n = 0;                    // at most kMaxSamples
    int64_t slots = 0;                // F
  };

  // Writes codes [n, F]: equal fields of a slot get the same code, from 0 in the order of first
  // occurrence.
  void Encode(const Block& block, uint16_t* codes);

  // The distinct fields, ordered by slot, then by code. fields_of [F]: how many each slot has.
  // counts: how many features each distinct field has. keys, values: these features (values is
  // empty if the block had none).
  std::vector<int64_t> fields_of;
  std::vector<int32_t> counts;
  std::vector<int64_t> keys;
  std::vector<float> values;

 private:
  struct Entry {
    uint64_t hash;  // the key, if the field holds one feature of value 1
    int32_t field;  // -1: the entry is free
  };
  struct Features {
    int64_t from;  // where they begin in the block's keys
    int32_t count;
  };

  void Clear(int bits);
  void Grow();
  size_t Place(uint64_t hash) const;
  int64_t TakeSlot(const Block& block, int64_t f, int64_t from);

  std::vector<Entry> table_;     // of the current slot: open addressing, at most half full
  int shift_ = 0;                // 64 minus the logarithm of the table's size
  std::vector<int64_t> starts_;  // where the features of each of its distinct fields begin in keys
  std::vector<Features> features_;  // [n], of the current slot's fields
  std::vector<uint64_t> hashes_;    // [n], of the current slot's fields
  std::vector<uint16_t> columns_;   // [F, n], the codes
  std::vector<int>
      bits_;  // [F], the logarithm of the size that each slot's table had in the last block
};

}  // namespace ctr
