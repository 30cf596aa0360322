#include "ops/cc/data/keys.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "ops/cc/data/farmhash.h"
#include "ops/cc/lifecycle/hash.h"

namespace ctr {
namespace {

constexpr uint64_t kHashMask = (uint64_t{1} << kHashBits) - 1;

bool IsSpace(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

int64_t KeyOf(const char* text, size_t n, int64_t slot_id) {
  return slot_id << kHashBits | static_cast<int64_t>(Fingerprint64(text, n) & kHashMask);
}

}  // namespace

void KeysOfTexts(const char* bytes, const int32_t* offsets, int64_t n, int64_t slot_id,
                 int64_t* keys) {
  for (int64_t i = 0; i < n; ++i) {
    const char *begin = bytes + offsets[i], *end = bytes + offsets[i + 1];
    while (begin < end && IsSpace(*begin)) ++begin;
    while (begin < end && IsSpace(end[-1])) --end;
    keys[i] = begin < end ? KeyOf(begin, end - begin, slot_id) : kNoFeature;
  }
}

void KeysOfIntegers(const int64_t* values, int64_t n, int64_t slot_id, int64_t* keys) {
  char text[24];
  for (int64_t i = 0; i < n; ++i) {
    const char* end = std::to_chars(text, text + sizeof(text), values[i]).ptr;
    keys[i] = KeyOf(text, end - text, slot_id);
  }
}

// A table of twice the size, with the same fields.
void FieldCoder::Grow() {
  std::vector<Entry> old(2 * table_.size(), Entry{0, -1});
  old.swap(table_);
  const size_t mask = table_.size() - 1;
  for (const Entry& entry : old) {
    if (entry.field < 0) continue;
    size_t at = Mix64(static_cast<int64_t>(entry.hash)) & mask;
    while (table_[at].field >= 0) at = (at + 1) & mask;
    table_[at] = entry;
  }
}

void FieldCoder::Encode(const Block& block, uint16_t* codes) {
  constexpr size_t kSmallest = 64;
  constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15ULL;
  fields_of.clear();
  counts.clear();
  keys.clear();
  values.clear();
  // Where each sample's features of the slot at hand begin.
  std::vector<int64_t> next(block.counts ? block.n : 0);
  int64_t total = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(next.size()); ++i) {
    next[i] = total;
    for (int64_t f = 0; f < block.slots; ++f) total += block.counts[i * block.slots + f];
  }
  // Slot by slot, so that the table at hand stays in the cache.
  for (int64_t f = 0; f < block.slots; ++f) {
    table_.assign(kSmallest, Entry{0, -1});
    starts_.clear();
    const size_t before = counts.size();
    for (int64_t i = 0; i < block.n; ++i) {
      int64_t from = i * block.slots + f;
      int32_t count = 1;
      if (block.counts) {
        count = block.counts[from];
        from = next[i];
        next[i] += count;
      }
      const int64_t* const own_keys = block.keys + from;
      const float* const own_values = block.values ? block.values + from : nullptr;
      const bool plain = count == 1 && (!own_values || *own_values == 1);
      uint64_t hash = plain ? static_cast<uint64_t>(*own_keys) : static_cast<uint64_t>(count);
      for (int32_t k = 0; !plain && k < count; ++k) {
        hash = hash * kMultiplier + static_cast<uint64_t>(own_keys[k]);
        if (own_values) {
          uint32_t bits;
          std::memcpy(&bits, own_values + k, sizeof(bits));
          hash = hash * kMultiplier + bits;
        }
      }
      // Two fields of equal hash are compared in full.
      const auto equals = [&](int32_t field) {
        const int64_t start = starts_[field];
        return counts[before + field] == count &&
               std::equal(own_keys, own_keys + count, keys.data() + start) &&
               (!own_values || std::equal(own_values, own_values + count, values.data() + start));
      };
      const size_t mask = table_.size() - 1;
      size_t at = Mix64(static_cast<int64_t>(hash)) & mask;
      while (table_[at].field >= 0 && !(table_[at].hash == hash && equals(table_[at].field)))
        at = (at + 1) & mask;
      int32_t field = table_[at].field;
      if (field < 0) {
        field = static_cast<int32_t>(starts_.size());
        table_[at] = {hash, field};
        starts_.push_back(keys.size());
        counts.push_back(count);
        keys.insert(keys.end(), own_keys, own_keys + count);
        if (own_values) values.insert(values.end(), own_values, own_values + count);
        if (2 * starts_.size() > table_.size()) Grow();
      }
      codes[i * block.slots + f] = static_cast<uint16_t>(field);
    }
    fields_of.push_back(starts_.size());
  }
}

}  // namespace ctr
