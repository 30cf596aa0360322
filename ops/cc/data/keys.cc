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
void FieldCoder::Grow(Slot* slot) {
  std::vector<Entry> old(2 * slot->table.size(), Entry{0, -1});
  old.swap(slot->table);
  const size_t mask = slot->table.size() - 1;
  for (const Entry& entry : old) {
    if (entry.field < 0) continue;
    size_t at = Mix64(static_cast<int64_t>(entry.hash)) & mask;
    while (slot->table[at].field >= 0) at = (at + 1) & mask;
    slot->table[at] = entry;
  }
}

void FieldCoder::Encode(const Block& block, uint16_t* codes) {
  constexpr size_t kSmallest = 64;
  constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15ULL;
  slots_.resize(block.slots);
  for (Slot& slot : slots_) {
    slot.table.assign(kSmallest, Entry{0, -1});
    slot.starts.clear();
    slot.counts.clear();
    slot.keys.clear();
    slot.values.clear();
  }
  const int64_t* keys_at = block.keys;
  const float* values_at = block.values;
  for (int64_t i = 0; i < block.n; ++i) {
    for (int64_t f = 0; f < block.slots; ++f) {
      Slot& slot = slots_[f];
      const int32_t count = block.counts ? block.counts[i * block.slots + f] : 1;
      const bool plain = count == 1 && (!values_at || *values_at == 1);
      uint64_t hash = plain ? static_cast<uint64_t>(*keys_at) : static_cast<uint64_t>(count);
      for (int32_t k = 0; !plain && k < count; ++k) {
        hash = hash * kMultiplier + static_cast<uint64_t>(keys_at[k]);
        if (values_at) {
          uint32_t bits;
          std::memcpy(&bits, values_at + k, sizeof(bits));
          hash = hash * kMultiplier + bits;
        }
      }
      // Two fields of equal hash are compared in full.
      const auto equals = [&](int32_t field) {
        const int64_t start = slot.starts[field];
        return slot.counts[field] == count &&
               std::equal(keys_at, keys_at + count, slot.keys.data() + start) &&
               (!values_at || std::equal(values_at, values_at + count, slot.values.data() + start));
      };
      const size_t mask = slot.table.size() - 1;
      size_t at = Mix64(static_cast<int64_t>(hash)) & mask;
      while (slot.table[at].field >= 0 &&
             !(slot.table[at].hash == hash && equals(slot.table[at].field)))
        at = (at + 1) & mask;
      int32_t field = slot.table[at].field;
      if (field < 0) {
        field = static_cast<int32_t>(slot.counts.size());
        slot.table[at] = {hash, field};
        slot.starts.push_back(slot.keys.size());
        slot.counts.push_back(count);
        slot.keys.insert(slot.keys.end(), keys_at, keys_at + count);
        if (values_at) slot.values.insert(slot.values.end(), values_at, values_at + count);
        if (2 * slot.counts.size() > slot.table.size()) Grow(&slot);
      }
      codes[i * block.slots + f] = static_cast<uint16_t>(field);
      keys_at += count;
      if (values_at) values_at += count;
    }
  }
  fields_of.clear();
  counts.clear();
  keys.clear();
  values.clear();
  for (const Slot& slot : slots_) {
    fields_of.push_back(slot.counts.size());
    counts.insert(counts.end(), slot.counts.begin(), slot.counts.end());
    keys.insert(keys.end(), slot.keys.begin(), slot.keys.end());
    values.insert(values.end(), slot.values.begin(), slot.values.end());
  }
}

}  // namespace ctr
