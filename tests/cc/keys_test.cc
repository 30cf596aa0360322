// Keys and codes of fields: every length at the very end of its memory, and codes that give the
// fields back.
#include "ops/cc/data/keys.h"

#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>

#include "ops/cc/data/farmhash.h"
#include "tests/cc/testing.h"

namespace ctr {
namespace {

TEST(KnownHashes) {
  // Of tf.strings.to_hash_bucket_fast(text, 2^52); models in service depend on them.
  const char* texts = "hello5";
  const int32_t offsets[] = {0, 5, 6, 6};
  int64_t keys[3];
  KeysOfTexts(texts, offsets, 3, 1, keys);
  CHECK(keys[0] == 7852339209178344 && keys[1] == 6996394395781867 && keys[2] == kNoFeature);
  const int64_t five = 5;
  KeysOfIntegers(&five, 1, 1, keys);
  CHECK(keys[0] == 6996394395781867);
}

TEST(OneKeyHoweverItIsWritten) {
  for (const auto& alike : {std::vector<std::string>{"true", "True", " TRUE"},
                            {"false", "False", "FALSE\n"},
                            {"12", "12.0", "12.000"},
                            {"0", "-0.0", "0.0"}}) {
    std::set<int64_t> keys;
    for (const std::string& text : alike) {
      const int32_t offsets[] = {0, static_cast<int32_t>(text.size())};
      int64_t key;
      KeysOfTexts(text.data(), offsets, 1, 1, &key);
      keys.insert(key);
    }
    CHECK(keys.size() == 1);
  }
}

TEST(ReadsNothingBeyondATextsEnd) {
  for (int n = 0; n < 200; ++n) {
    char* text = static_cast<char*>(std::malloc(n));  // the sanitizer watches its end
    for (int i = 0; i < n; ++i) text[i] = static_cast<char>('a' + i % 26);
    const int32_t offsets[] = {0, n};
    int64_t key;
    KeysOfTexts(text, offsets, 1, 2, &key);
    CHECK((key == kNoFeature) == (n == 0));
    std::free(text);
  }
}

TEST(CodesGiveTheFieldsBack) {
  std::mt19937 random(0);
  FieldCoder coder;
  for (int round = 0; round < 50; ++round) {
    const int64_t n = random() % 300, slots = 1 + random() % 4;
    const bool ragged = round % 2, valued = ragged && round % 3 == 0;
    std::vector<int32_t> counts(n * slots, 1);
    if (ragged)
      for (int32_t& c : counts) c = random() % 4;
    std::vector<int64_t> keys;
    std::vector<float> values;
    for (int32_t c : counts) {
      for (; c > 0; --c) {
        keys.push_back(random() % 7);
        values.push_back(static_cast<float>(random() % 3));
      }
    }
    std::vector<uint16_t> codes(n * slots);
    coder.Encode(
        {keys.data(), valued ? values.data() : nullptr, ragged ? counts.data() : nullptr, n, slots},
        codes.data());
    std::vector<int64_t> begin(coder.counts.size() + 1), first(slots + 1);
    for (size_t i = 0; i < coder.counts.size(); ++i) begin[i + 1] = begin[i] + coder.counts[i];
    for (int64_t f = 0; f < slots; ++f) first[f + 1] = first[f] + coder.fields_of[f];
    int64_t at = 0;
    for (int64_t i = 0; i < n * slots; ++i) {
      const int64_t f = i / n, code = codes[i % n * slots + f];
      CHECK(code < coder.fields_of[f]);
      const int64_t entry = first[f] + code;
      CHECK(coder.counts[entry] == counts[i]);
      for (int32_t k = 0; k < counts[i]; ++k, ++at) {
        CHECK(coder.keys[begin[entry] + k] == keys[at]);
        if (valued) CHECK(coder.values[begin[entry] + k] == values[at]);
      }
    }
  }
}

}  // namespace
}  // namespace ctr

int main() { return testing::RunAll(); }
