// Columns of a log to keys, and the fields of a block of samples to small codes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ctr {

constexpr int kHashBits = 52;
constexpr int64_t kNoFeature = -1;  // a key is never negative

// Keys of n texts: slot_id << 52 | farmhash64 of the text without the ASCII white space around it,
// mod 2^52; kNoFeature for a blank one. A whole number is hashed without a fraction of zeros, 12.0
// as 12, so that it is one feature however it is written.
//
// bytes: the texts, one after another; offsets [n + 1]: text i is [offsets[i], offsets[i + 1]),
// ascending and within `bytes`. 0 <= slot_id < 2048.
void KeysOfTexts(const char* bytes, const int32_t* offsets, int64_t n, int64_t slot_id,
                 int64_t* keys);

// Keys of n integers, which hash as their decimal text.
void KeysOfIntegers(const int64_t* values, int64_t n, int64_t slot_id, int64_t* keys);

// The same for ops/keys.py, which calls them without TensorFlow: for the short columns of a
// request, an op would take ten times as long. False: the offsets do not ascend within [0, size].
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
    // [nnz], a sample's slots one after another; without counts [F, n], one in each field, or
    // none where it is kNoFeature.
    const int64_t* keys = nullptr;
    const float* values = nullptr;    // [nnz], or null: all are 1, as they are without counts
    const int32_t* counts = nullptr;  // [n * F] features in each field, their sum nnz; or null
    int64_t n = 0;                    // at most kMaxSamples
    int64_t slots = 0;                // F
  };

  // Writes codes [n, F]: fields of a slot that are equal get the same code, numbered from 0 in the
  // order of first occurrence.
  void Encode(const Block& block, uint16_t* codes);

  // The distinct fields, those of slot 0 first, by code; `fields_of` [F] says how many a slot has,
  // `counts` how many features each of them, whose keys and values stand in `keys` and `values`
  // (empty where the block had none).
  std::vector<int64_t> fields_of;
  std::vector<int32_t> counts;
  std::vector<int64_t> keys;
  std::vector<float> values;

 private:
  struct Entry {
    uint64_t hash;  // of a field that holds one feature of value 1: its key
    int32_t field;  // -1: the entry is free
  };
  struct Features {
    int64_t from;  // where they begin in the block's keys
    int32_t count;
  };

  void Clear(int bits);
  void Grow();
  size_t Place(uint64_t hash) const;
  void TakeSlot(const Block& block, int64_t f);

  std::vector<Entry> table_;        // of the slot at hand: open addressing, at most half full
  int shift_ = 0;                   // 64 less the logarithm of its size
  std::vector<int64_t> starts_;     // of the features of its distinct fields, in keys
  std::vector<Features> features_;  // [n], of its fields
  std::vector<uint64_t> hashes_;    // [n], of its fields
  std::vector<int64_t> next_;       // [n], where each sample's features of the next slot begin
  std::vector<uint16_t> columns_;   // [F, n], the codes
  std::vector<int> bits_;           // [F], the logarithm of each slot's table in the block before
};

}  // namespace ctr
