// Texts of requests against a plain reader, and requests whose parts do not fit together.
#include "ops/cc/data/request.h"

#include <random>
#include <string>
#include <utility>

#include "ops/cc/data/keys.h"
#include "tests/cc/testing.h"

namespace ctr {
namespace {

// Three of four fields: an item, tags of which a sample keeps two, and texts that are bins.
const int32_t kFields[] = {0, 1, 3};
const int64_t kIds[] = {1, 5, 9};
const int32_t kSizes[] = {0, 2, 0};
const int32_t kMost[] = {0, 2, 0};
const bool kHasMarkers[] = {true, true, false};

int64_t KeyOf(const std::string& text, int64_t id) {
  const int32_t offsets[] = {0, static_cast<int32_t>(text.size())};
  int64_t key;
  KeysOfTexts(text.data(), offsets, 1, id, &key);
  return key;
}

TextSlots Slots(const int64_t* markers) {
  return {3, 4, kFields, kIds, "||", kSizes, kMost, kHasMarkers, markers, 1};
}

std::vector<std::string> Parted(std::string text, const std::string& separator) {
  std::vector<std::string> parts;
  for (size_t at; !separator.empty() && (at = text.find(separator)) != text.npos;) {
    parts.push_back(text.substr(0, at));
    text = text.substr(at + separator.size());
  }
  parts.push_back(text);
  return parts;
}

TEST(ReadsAsAPlainReaderDoes) {
  const int64_t marker = KeyOf("NA", 0);
  const TextSlots slots = Slots(&marker);
  const char* words[] = {"a", "b||c||d", "NA", "", " a ", "||", "c|||NA", "7.0"};
  std::mt19937 random(1);
  RequestFeatures found;
  for (int round = 0; round < 300; ++round) {
    const int64_t samples = random() % 6, some = 1 + random() % 3;
    std::vector<int32_t> shared(samples);
    for (int32_t& s : shared) s = random() % some;
    std::vector<int64_t> counts;
    bool is_shared[3];
    std::vector<std::vector<std::string>> texts(3);
    std::string all;
    for (int slot = 0; slot < 3; ++slot) {
      is_shared[slot] = random() % 2;
      counts.push_back(is_shared[slot] ? some : samples);
      for (int64_t i = 0; i < counts[slot]; ++i) {
        texts[slot].push_back(words[random() % 8]);
        all += texts[slot].back() + '\n';
      }
    }
    if (!all.empty()) all.pop_back();
    std::vector<std::pair<int64_t, int32_t>> wanted;
    for (int64_t b = 0; b < samples; ++b) {
      for (int slot = 0; slot < 3; ++slot) {
        const size_t first = wanted.size();
        const std::string& text = texts[slot][is_shared[slot] ? shared[b] : b];
        for (const std::string& part : Parted(text, slot == 1 ? "||" : "")) {
          const int64_t key = KeyOf(part, kIds[slot]);
          if (key == kNoFeature || (slot < 2 && KeyOf(part, 0) == marker)) continue;
          wanted.push_back({key, static_cast<int32_t>(4 * b + kFields[slot])});
        }
        while (kMost[slot] && wanted.size() > first + kMost[slot])
          wanted.erase(wanted.begin() + first);
      }
    }
    CHECK(found.Read(slots, all, counts.data(), is_shared, shared.data(), samples));
    CHECK(found.places.size() == wanted.size() && found.segments.size() == wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      CHECK(found.keys[found.places[i]] == wanted[i].first);
      CHECK(found.segments[i] == wanted[i].second);
    }
  }
}

TEST(LeavesOutTheSegmentsOfOneFeatureEach) {
  const int64_t marker = 0;
  TextSlots slots = Slots(&marker);
  slots.fields_of_model = slots.n;
  const int64_t counts[] = {2, 1, 2};
  const bool is_shared[] = {false, true, false};
  const int32_t shared[] = {0, 0};
  RequestFeatures found;
  CHECK(found.Read(slots, "a\nb\nc\nd\ne", counts, is_shared, shared, 2));
  CHECK(found.segments.empty() && found.keys.size() == 5 && found.places.size() == 6);
}

TEST(RefusesWhatDoesNotFit) {
  const int64_t marker = 0, counts[] = {2, 1, 2};
  const TextSlots slots = Slots(&marker);
  const bool is_shared[] = {false, true, false};
  const int32_t shared[] = {0, 0}, above[] = {0, 1}, below[] = {-1, 0};
  RequestFeatures found;
  CHECK(!found.Read(slots, "a\nb\nc\nd", counts, is_shared, shared, 2));
  CHECK(!found.Read(slots, "a\nb\nc\nd\ne\nf", counts, is_shared, shared, 2));
  CHECK(!found.Read(slots, "a\nb\nc\nd\ne", counts, is_shared, above, 2));
  CHECK(!found.Read(slots, "a\nb\nc\nd\ne", counts, is_shared, below, 2));
}

}  // namespace
}  // namespace ctr

int main() { return testing::RunAll(); }
