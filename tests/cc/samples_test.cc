// Samples of a pass against plain loops, every array exactly as long as it has to be.
#include "ops/cc/data/samples.h"

#include <random>

#include "tests/cc/testing.h"

namespace ctr {
namespace {

// A pass of random fields, as a list for each sample and slot and as the arrays that hold them.
struct Pass {
  Pass(std::mt19937* random, int64_t samples, int64_t width, bool ragged, bool valued) {
    const int64_t chunk = 7, chunks = (samples + chunk - 1) / chunk, distinct = 5;
    codes.resize(samples * width);
    for (int64_t c = 0; c < chunks; ++c) {
      for (int64_t f = 0; f < width; ++f) {
        bases.push_back(static_cast<int64_t>(splits.size()));
        bases.push_back(static_cast<int64_t>(keys.size()));
        const int64_t first = bases.back();
        if (ragged) splits.push_back(0);
        for (int64_t d = 0; d < distinct; ++d) {
          const bool group = f + 1 == width;
          for (int64_t k = ragged && !group ? (*random)() % 4 : 1; k > 0; --k) {
            keys.push_back((*random)());
            if (valued) values.push_back(static_cast<float>((*random)() % 9));
          }
          if (ragged) splits.push_back(static_cast<uint32_t>(keys.size() - first));
        }
      }
    }
    for (uint16_t& code : codes) code = static_cast<uint16_t>((*random)() % distinct);
    for (int64_t i = 0; i < 3 * samples; ++i) dense.push_back(static_cast<float>((*random)() % 99));
    arrays.samples = samples;
    arrays.width = width;
    arrays.chunk = chunk;
    arrays.chunks = chunks;
    arrays.codes = codes.data();
    arrays.bases = bases.data();
    arrays.num_keys = static_cast<int64_t>(keys.size());
    arrays.keys = keys.data();
    arrays.num_splits = static_cast<int64_t>(splits.size());
    arrays.splits = splits.data();
    if (valued) arrays.values = values.data();
    arrays.dense_columns = 3;
    arrays.dense = dense.data();
  }
  std::vector<uint16_t> codes;
  std::vector<int64_t> bases, keys;
  std::vector<uint32_t> splits;
  std::vector<float> values, dense;
  SampleArrays arrays;
};

TEST(EqualsPlainLoops) {
  std::mt19937 random(0);
  for (int trial = 0; trial < 200; ++trial) {
    const bool ragged = trial % 2, valued = trial % 3 == 0;
    const int64_t samples = 1 + random() % 60, slots = 1 + random() % 4;
    const Pass pass(&random, samples, slots + 1, ragged, valued);
    const SampleArrays& arrays = pass.arrays;
    std::vector<int64_t> rows(random() % 80);
    for (int64_t& row : rows) row = random() % samples;
    const int64_t n = static_cast<int64_t>(rows.size());
    FieldPlaces found;
    CHECK(FindFields(arrays, rows.data(), n, slots, &found));
    std::vector<int64_t> keys(found.features), group(n);
    std::vector<float> values(found.features), dense(3 * n);
    std::vector<int32_t> segments(found.features);
    CopySamples(arrays, rows.data(), n, slots, found,
                {keys.data(), values.data(), segments.data(), dense.data(), group.data()});
    int64_t at = 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t f = 0; f <= slots; ++f) {
        const int64_t* base = &pass.bases[(rows[i] / arrays.chunk * (slots + 1) + f) * 2];
        const int64_t code = pass.codes[rows[i] * (slots + 1) + f];
        const int64_t begin = base[1] + (ragged ? pass.splits[base[0] + code] : code);
        const int64_t end = base[1] + (ragged ? pass.splits[base[0] + code + 1] : code + 1);
        if (f == slots) CHECK(group[i] == pass.keys[begin]);
        for (int64_t k = begin; f < slots && k < end; ++k, ++at) {
          CHECK(keys[at] == pass.keys[k] && segments[at] == i * slots + f);
          CHECK(values[at] == (valued ? pass.values[k] : 1.0f));
        }
      }
      for (int64_t c = 0; c < 3; ++c) CHECK(dense[3 * i + c] == pass.dense[3 * rows[i] + c]);
    }
    CHECK(at == found.features);
  }
}

TEST(DamageIsFoundBeforeMemoryIsTouched) {
  std::mt19937 random(1);
  int refused = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    Pass pass(&random, 30, 3, trial % 2, false);
    std::vector<int64_t> rows(20);
    for (int64_t& row : rows) row = random() % 30;
    const int64_t wrong[] = {-1, 1LL << 31, 1LL << 62, INT64_MAX, INT64_MIN, 7, 29, 30};
    const int64_t value = wrong[random() % 8];
    switch (random() % 4) {
      case 0:
        rows[random() % 20] = value;
        break;
      case 1:
        pass.bases[random() % pass.bases.size()] = value;
        break;
      case 2:
        pass.codes[random() % pass.codes.size()] = static_cast<uint16_t>(value);
        break;
      default:
        if (!pass.splits.empty())
          pass.splits[random() % pass.splits.size()] = static_cast<uint32_t>(value);
    }
    FieldPlaces found;
    if (!FindFields(pass.arrays, rows.data(), 20, 2, &found)) {
      ++refused;
      continue;
    }
    std::vector<int64_t> keys(found.features), group(20);
    std::vector<float> dense(60);
    CopySamples(pass.arrays, rows.data(), 20, 2, found,
                {keys.data(), nullptr, nullptr, dense.data(), group.data()});
  }
  CHECK(refused > 200 && refused < 1900);
}

}  // namespace
}  // namespace ctr

int main() { return testing::RunAll(); }
