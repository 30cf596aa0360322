// The contracts of ops/cc/lifecycle/feature_table.h, against a shadow map and under sanitizers.
#include "ops/cc/lifecycle/feature_table.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <unordered_map>

#include "tests/cc/testing.h"

namespace ctr {
namespace {

constexpr uint64_t kSeed = 20240517;

Policy MakePolicy(const std::string& text) {
  Policy policy;
  const Status status = Policy::Parse(text, &policy);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  CHECK(status.ok());
  return policy;
}

std::vector<bool> Observe(FeatureTable* table, const std::vector<int64_t>& keys, double show,
                          double click) {
  const std::vector<double> shows(keys.size(), show), clicks(keys.size(), click);
  const std::unique_ptr<bool[]> admitted(new bool[keys.size()]);
  CHECK(table
            ->Observe(keys.data(), shows.data(), clicks.data(), nullptr, keys.size(), Serial,
                      admitted.get())
            .ok());
  return std::vector<bool>(admitted.get(), admitted.get() + keys.size());
}

// The id of a key, -1 where absent.
int64_t IdOf(FeatureTable* table, int64_t key) {
  const uint64_t mixed = Mix64(key);
  FeatureTable::Shard& shard = table->shard(ShardOf(mixed));
  std::lock_guard<std::mutex> lock(shard.mutex);
  const int64_t local = shard.Find(key, mixed);
  return local < 0 ? -1 : static_cast<int64_t>(ShardOf(mixed)) << 32 | local;
}

struct Shadow {
  double show = 0, click = 0, delta_score = 0;
  int unseen_days = 0, age_days = 0;
  bool admitted = false;
};

void CheckEqual(FeatureTable* table, const std::unordered_map<int64_t, Shadow>& shadow,
                const ParallelFor& parallel_for) {
  CHECK_EQ(table->Size(), static_cast<int64_t>(shadow.size()));
  std::vector<int64_t> keys;
  for (const auto& [key, unused] : shadow) keys.push_back(key);
  const int64_t n = keys.size();
  std::vector<double> show(n), click(n), delta(n);
  std::vector<int32_t> unseen(n), age(n), slot(n);
  const std::unique_ptr<bool[]> admitted(new bool[n]), exists(new bool[n]);
  LookupResult result;
  result.show = show.data();
  result.click = click.data();
  result.delta_score = delta.data();
  result.unseen_days = unseen.data();
  result.age_days = age.data();
  result.slot = slot.data();
  result.admitted = admitted.get();
  result.exists = exists.get();
  CHECK(table->Lookup(keys.data(), n, parallel_for, result).ok());
  for (int64_t i = 0; i < n; ++i) {
    const Shadow& want = shadow.at(keys[i]);
    CHECK(exists[i]);
    CHECK(std::abs(show[i] - want.show) <= 1e-9 * (1 + want.show));
    CHECK(std::abs(click[i] - want.click) <= 1e-9 * (1 + want.click));
    CHECK(std::abs(delta[i] - want.delta_score) <= 1e-9 * (1 + want.delta_score));
    CHECK_EQ(unseen[i], want.unseen_days);
    CHECK_EQ(age[i], want.age_days);
    CHECK_EQ(slot[i], SlotOf(keys[i]));
    CHECK_EQ(static_cast<int>(admitted[i]), static_cast<int>(want.admitted));
  }
}

// Random verbs on the table and on a map.
TEST(AgreesWithShadowMap) {
  const Rules rules;
  for (const int threads : {1, 4}) {
    const ParallelFor parallel_for = testing::Threads(threads);
    FeatureTable table(MakePolicy("min_age_days=1 delete_after_unseen_days=4 delta_threshold=0.5"));
    std::unordered_map<int64_t, Shadow> shadow;
    std::map<int64_t, double> selected;
    std::mt19937_64 random(kSeed + threads);
    for (int round = 0; round < 120; ++round) {
      const int64_t n = random() % 3000;
      std::vector<int64_t> keys(n);
      std::vector<double> shows(n), clicks(n);
      for (int64_t i = 0; i < n; ++i) {
        keys[i] =
            static_cast<int64_t>((random() % 8) << 52 | (random() % (random() % 2 ? 50 : 20000)));
        shows[i] = static_cast<double>(random() % 4);
        clicks[i] = shows[i] > 0
                        ? static_cast<double>(random() % static_cast<uint64_t>(shows[i] + 1))
                        : random() % 2;
      }
      std::map<int64_t, std::pair<double, double>> sums;
      for (int64_t i = 0; i < n; ++i) {
        sums[keys[i]].first += shows[i];
        sums[keys[i]].second += clicks[i];
      }
      for (const auto& [key, sum] : sums) {
        Shadow& feature = shadow[key];
        feature.show += sum.first;
        feature.click += sum.second;
        feature.delta_score += rules.Score(sum.first, sum.second);
        feature.unseen_days = 0;
        feature.admitted |= rules.Score(feature.show, feature.click) >= rules.admission_threshold;
      }
      const std::unique_ptr<bool[]> admitted(new bool[n]);
      CHECK(table
                .Observe(keys.data(), shows.data(), clicks.data(), nullptr, n, parallel_for,
                         admitted.get())
                .ok());
      for (int64_t i = 0; i < n; ++i) CHECK(admitted[i] == shadow[keys[i]].admitted);
      if (random() % 4 == 0) {
        table.Decay(parallel_for);
        table.Age(parallel_for);
        const std::vector<int64_t> evicted = table.Evict(parallel_for);
        std::set<int64_t> want;
        for (auto it = shadow.begin(); it != shadow.end();) {
          Shadow& feature = it->second;
          feature.show *= rules.decay;
          feature.click *= rules.decay;
          ++feature.unseen_days;
          ++feature.age_days;
          if (feature.unseen_days > 4 ||
              (feature.age_days >= 1 &&
               rules.Score(feature.show, feature.click) < rules.delete_threshold)) {
            want.insert(it->first);
            selected.erase(it->first);
            it = shadow.erase(it);
          } else {
            ++it;
          }
        }
        CHECK(std::set<int64_t>(evicted.begin(), evicted.end()) == want);
        CHECK_EQ(evicted.size(), want.size());
      }
      if (random() % 4 == 0) {
        const std::vector<int64_t> chosen = table.Select(Kind::kDelta, parallel_for);
        selected.clear();
        for (const auto& [key, feature] : shadow) {
          if (rules.Score(feature.show, feature.click) >= rules.base_threshold &&
              feature.delta_score >= 0.5 && feature.unseen_days <= rules.delta_keep_days) {
            selected[key] = feature.delta_score;
          }
        }
        CHECK_EQ(chosen.size(), selected.size());
        for (const int64_t key : chosen) CHECK(selected.count(key) == 1);
      } else if (!selected.empty()) {
        std::vector<int64_t> done;
        for (const auto& [key, delta] : selected) {
          done.push_back(key);
          shadow[key].delta_score -= delta;
        }
        std::shuffle(done.begin(), done.end(), random);
        CHECK(table.Commit(Kind::kDelta, done.data(), done.size(), parallel_for).ok());
        selected.clear();
      }
      if (round % 20 == 19) CheckEqual(&table, shadow, parallel_for);
    }
  }
}

TEST(FeaturesOutliveGrowthAndEvictionWhichGivesMemoryBack) {
  FeatureTable table(MakePolicy(""), /*payload_bytes=*/20);
  const std::vector<int64_t> first = {
      1, 2, 3, int64_t{7} << 52, std::numeric_limits<int64_t>::max(), 0};
  Observe(&table, first, 100, 0);
  std::vector<int64_t> ids;
  std::vector<Feature*> places;
  for (const int64_t key : first) {
    ids.push_back(IdOf(&table, key));
    FeatureTable::Shard& shard = table.shard(ids.back() >> 32);
    places.push_back(shard.At(ids.back() & 0xffffffff));
    std::memset(shard.Payload(ids.back() & 0xffffffff), static_cast<int>(places.size()), 20);
  }
  int64_t erased = 0;
  table.on_erase = [&](int, char* payload) {
    for (int i = 0; i < 20; ++i)
      CHECK_EQ(payload[i], 0);  // of features created since, which nobody wrote to
    ++erased;
  };
  std::vector<int64_t> many(200000);
  for (size_t i = 0; i < many.size(); ++i) many[i] = 1000 + i;
  int64_t most = 0;
  for (int round = 0; round < 3; ++round) {
    Observe(&table, many, 1, 0);
    CHECK_EQ(table.Size(), static_cast<int64_t>(many.size() + first.size()));
    for (size_t i = 0; i < first.size() && round == 0; ++i) {
      CHECK_EQ(IdOf(&table, first[i]), ids[i]);
      CHECK(table.shard(ids[i] >> 32).At(ids[i] & 0xffffffff) == places[i]);
    }
    const int64_t bytes = table.Bytes();
    if (round == 0) most = bytes;
    CHECK_EQ(bytes, most);  // what was given back is used again
    CHECK_EQ(table.Evict(Serial).size(), many.size());
#if !defined(__SANITIZE_ADDRESS__)  // there each chunk lies apart, and few fill whole pages
    CHECK(table.Bytes() < bytes / 3);
#endif
    for (size_t i = 0; i < first.size(); ++i) {
      const int64_t id = IdOf(&table, first[i]);
      FeatureTable::Shard& shard = table.shard(id >> 32);
      CHECK_EQ(shard.At(id & 0xffffffff)->key, first[i]);
      CHECK_EQ(shard.At(id & 0xffffffff)->show, 100.0);
      for (int b = 0; b < 20; ++b)
        CHECK_EQ(shard.Payload(id & 0xffffffff)[b], static_cast<char>(i + 1));
    }
  }
  CHECK_EQ(erased, static_cast<int64_t>(3 * many.size()));
}

TEST(CountsItsBytes) {
  // 54 bytes a feature in whatever state of growth, beyond what is allotted at once (a slab of 2
  // MiB): 40 of its own, 10 to 11.25 of the index, half a chunk a shard.
  FeatureTable table(MakePolicy(""));
  int64_t next = 0, worst = 0;
  for (int round = 0; round < 60; ++round) {
    std::vector<int64_t> keys(20000);
    for (int64_t& key : keys) key = next++;
    Observe(&table, keys, 1, 0);
    if (table.Size() >= 400000)
      worst = std::max(worst, (table.Bytes() - (2 << 20)) * 100 / table.Size());
  }
  CHECK(worst <= 5400);
}

TEST(RepeatsAreSummedFirst) {
  // Key 5 would be admitted by its first occurrence alone if clicks were not worth less than
  // nothing here.
  FeatureTable table(MakePolicy("nonclk_coeff=1 clk_coeff=0 admission_threshold=2"));
  const std::vector<int64_t> keys = {5, 9, 5, 5};
  const std::vector<double> shows = {2, 2, 0, 1}, clicks = {0, 0, 1, 1};
  bool admitted[4];
  CHECK(table.Observe(keys.data(), shows.data(), clicks.data(), nullptr, 4, Serial, admitted).ok());
  CHECK(!admitted[0] && admitted[1] && !admitted[2] && !admitted[3]);
  CHECK_EQ(table.Size(), 2);
}

TEST(ChanceDependsOnTheCountAlone) {
  FeatureTable one(MakePolicy("admission=probability admission_probability=0.25 seed=3"));
  FeatureTable other(MakePolicy("admission=probability admission_probability=0.25 seed=3"));
  FeatureTable reseeded(MakePolicy("admission=probability admission_probability=0.25 seed=4"));
  std::vector<int64_t> keys(40000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  double wanted = 1;
  for (int count = 1; count <= 8; ++count) {
    const std::vector<bool> admitted = Observe(&one, keys, 1, 0);
    wanted *= 0.75;
    const double share =
        static_cast<double>(std::count(admitted.begin(), admitted.end(), true)) / keys.size();
    CHECK(std::abs(share - (1 - wanted)) < 5 * std::sqrt(0.25 / keys.size()));
    if (count == 3) {
      CHECK(Observe(&other, keys, 3, 0) == admitted);
      CHECK(Observe(&reseeded, keys, 3, 0) != admitted);
    }
  }
  CHECK(Observe(&other, keys, 0x1p53, 0) ==
        std::vector<bool>(keys.size(), true));  // and ends at once
}

TEST(CapacityKeepsTheBest) {
  for (const char* by : {"score", "recency", "frequency"}) {
    std::mt19937_64 random(kSeed);
    const std::string text = std::string("eviction=none capacity=1000 capacity_by=") + by;
    FeatureTable whole(MakePolicy(text));
    FeatureTable parts[] = {FeatureTable(MakePolicy(text)), FeatureTable(MakePolicy(text)),
                            FeatureTable(MakePolicy(text))};
    struct Ranked {
      int unseen_days;
      double score, show;
      int64_t key;
    };
    std::vector<Ranked> all;
    for (int day = 0; day < 4; ++day) {
      for (int i = 0; i < 1000; ++i) {
        const double show = static_cast<double>(random() % 8),
                     click = show > 0 && random() % 2 ? 1 : 0;
        const int64_t key = day * 100000 + i;
        Observe(&whole, {key}, show, click);
        Observe(&parts[key % 3], {key}, show, click);
        all.push_back({3 - day, Rules().Score(show, click), show, key});
      }
      if (day == 3) break;
      whole.Age(Serial);
      for (FeatureTable& part : parts) part.Age(Serial);
    }
    std::sort(all.begin(), all.end(), [&](const Ranked& a, const Ranked& b) {
      if (*by == 'r' && a.unseen_days != b.unseen_days) return a.unseen_days < b.unseen_days;
      if (*by == 'f' && a.show != b.show) return a.show > b.show;
      if (*by != 'f' && a.score != b.score) return a.score > b.score;
      return a.key < b.key;
    });
    std::set<int64_t> want;
    for (size_t i = 1000; i < all.size(); ++i) want.insert(all[i].key);
    const std::vector<uint16_t> cut = whole.CapacityCut(testing::Threads(3));
    const std::vector<int64_t> evicted = whole.EvictBelow(cut, testing::Threads(3));
    CHECK(std::set<int64_t>(evicted.begin(), evicted.end()) == want);
    CHECK_EQ(whole.Size(), 1000);
    CHECK(whole.CapacityCut(Serial).empty());
    std::set<int64_t> of_parts;  // one cut for all
    for (FeatureTable& part : parts) {
      for (const int64_t key : part.EvictBelow(cut, Serial)) of_parts.insert(key);
    }
    CHECK(of_parts == want);
  }
}

TEST(RulesOfASlot) {
  FeatureTable table(MakePolicy(
      "admission=count admission_count=2\n7 admission_count=5 delete_after_unseen_days=null"));
  const int64_t in_seven = int64_t{7} << 52 | 3;
  CHECK(Observe(&table, {1, in_seven}, 2, 0) == std::vector<bool>({true, false}));
  CHECK(Observe(&table, {1, in_seven}, 3, 0) == std::vector<bool>({true, true}));
}

TEST(RefusesBadPolicies) {
  for (const char* text :
       {"admission=maybe", "decay=x", "decay=nan", "nonsense=1", "capacity=0", "delta_keep_days=-1",
        "word", "\n2048 decay=1", "\nx decay=1", "\n7 capacity=3", "seed=-1", "decay=1e999"}) {
    Policy policy;
    CHECK(Policy::Parse(text, &policy).code() == Status::kInvalidArgument);
  }
}

TEST(RefusesBadInputAndChangesNothing) {
  FeatureTable table(MakePolicy(""));
  Observe(&table, {1}, 1, 0);
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  struct Case {
    int64_t key;
    double show, click;
    int64_t slot;
    const char* message;
  };
  for (const Case& bad : std::vector<Case>{
           {-1, 1, 0, 0, "keys[1]: found -1"},
           {std::numeric_limits<int64_t>::min(), 1, 0, 0, "keys[1]: found -9223372036854775808"},
           {2, nan, 0, 0, "shows[1]: found nan"},
           {2, infinity, 0, 0, "shows[1]: found inf"},
           {2, -1, 0, 0, "shows[1]: found -1"},
           {2, 1e16, 0, 0, "shows[1]: found 1e+16"},
           {2, 1, nan, 0, "clicks[1]: found nan"},
           {2, 1, -1, 0, "clicks[1]: found -1"},
           {2, 0, infinity, 0, "clicks[1]: found inf"},
           {2, 1, 2, 0, "clicks[1]: found 2; wanted at most shows[1] = 1"},
           {2, 1, 0, -1, "slots[1]: found -1"},
           {2, 1, 0, 2048, "slots[1]: found 2048"}}) {
    const int64_t keys[] = {1, bad.key}, slots[] = {0, bad.slot};
    const double shows[] = {1, bad.show}, clicks[] = {0, bad.click};
    bool admitted[2];
    const Status status = table.Observe(keys, shows, clicks, slots, 2, Serial, admitted);
    CHECK(status.code() == Status::kInvalidArgument);
    if (status.message().rfind(bad.message, 0) != 0)
      std::fprintf(stderr, "%s\n", status.message().c_str());
    CHECK(status.message().rfind(bad.message, 0) == 0);
  }
  CheckEqual(&table, {{1, {1, 0, 0.1, 0, 0, false}}}, Serial);
}

TEST(CommitsWhatWasWritten) {
  FeatureTable table(MakePolicy(""));
  const auto delta = [&](int64_t key) {
    double value;
    LookupResult result;
    result.delta_score = &value;
    CHECK(table.Lookup(&key, 1, Serial, result).ok());
    return value;
  };
  const auto commit = [&](Kind kind, std::vector<int64_t> keys) {
    return table.Commit(kind, keys.data(), keys.size(), Serial);
  };
  Observe(&table, {1, 2, 3, 4}, 100, 0);
  CHECK_EQ(table.Select(Kind::kDelta, Serial).size(), size_t{4});
  Observe(&table, {1}, 50, 0);
  CHECK(!commit(Kind::kDelta, {1, 99}).ok());  // 99 was not selected: nothing changes
  CHECK(std::abs(delta(1) - 15) < 1e-9);
  CHECK(commit(Kind::kDelta, {1, 1}).ok());  // a gain since survives, a repeat counts once
  CHECK(std::abs(delta(1) - 5) < 1e-9);
  CHECK(!commit(Kind::kDelta, {1}).ok());
  CHECK(!commit(Kind::kBase, {2}).ok());
  CHECK(commit(Kind::kAll, {1, 77}).ok());
  CHECK(std::abs(delta(1) - 5) < 1e-9);

  CHECK_EQ(table.Select(Kind::kBase, Serial).size(), size_t{4});
  Observe(&table, {2}, 10, 0);
  CHECK(commit(Kind::kBase, {2}).ok());  // its delta of 10 is in both open selections
  CHECK(commit(Kind::kDelta, {2}).ok());
  CHECK(std::abs(delta(2) - 1) < 1e-9);

  // Erased, and created anew, since the selection.
  for (int day = 0; day < 31; ++day) table.Age(Serial);
  CHECK_EQ(table.Evict(Serial).size(), size_t{4});
  Observe(&table, {3}, 30, 0);
  CHECK(commit(Kind::kDelta, {3, 4}).ok());
  CHECK(std::abs(delta(3) - 3) < 1e-9);
}

TEST(ExportsAndImportsEverything) {
  FeatureTable table(MakePolicy(""));
  std::vector<int64_t> keys(5000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 7919;
  Observe(&table, keys, 3, 1);
  table.Age(Serial);
  Observe(&table, {7919, 2 * 7919}, 500.5, 0.25);
  FeatureColumns columns;
  for (int s = 0; s < kShards; ++s) {
    for (int64_t next = 0; next >= 0;) next = table.Export(s, next, 7, false, &columns);
  }
  CHECK_EQ(columns.key.size(), keys.size());
  FeatureTable copy(MakePolicy(""));
  CHECK(copy.Import(columns).ok());
  CHECK(copy.Import(columns).code() == Status::kDataLoss);
  CHECK_EQ(copy.Size(), table.Size());
  for (size_t i = 0; i < columns.key.size(); ++i) {
    const int64_t id = IdOf(&copy, columns.key[i]);
    CHECK(id >= 0);
    const Feature& feature = *copy.shard(id >> 32).At(id & 0xffffffff);
    CHECK(feature.show == columns.show[i] && feature.click == columns.click[i]);
    CHECK(feature.delta_score == columns.delta_score[i] &&
          feature.unseen_days == columns.unseen_days[i]);
    CHECK(feature.age_days == columns.age_days[i] && feature.admitted == columns.admitted[i]);
  }
  // A key twice at the end: what was added before it goes again.
  FeatureTable empty(MakePolicy(""));
  columns.key.back() = columns.key.front();
  CHECK(empty.Import(columns).code() == Status::kDataLoss);
  CHECK_EQ(empty.Size(), 0);
}

// Eight threads at once on the same few shards and keys; shows are whole numbers, so their sums are
// exact.
TEST(ThreadsDoNotLoseOneAnother) {
  constexpr int kThreads = 8, kRounds = 30, kKeys = 600;
  FeatureTable table(MakePolicy("eviction=unseen"));
  std::atomic<int64_t> pushed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(kSeed + t);
      for (int round = 0; round < kRounds; ++round) {
        std::vector<int64_t> keys(kKeys);
        for (int64_t& key : keys) key = static_cast<int64_t>(random() % (random() % 2 ? 20 : 5000));
        Observe(&table, keys, 1, 0);
        pushed += kKeys;
        switch (random() % 8) {
          case 0:
            table.Age(Serial);
            break;
          case 1:
            table.Commit(Kind::kDelta, nullptr, 0, Serial);
            table.Select(Kind::kDelta, Serial);
            break;
          case 2:
            table.CapacityCut(Serial);
            table.RankHistogram({0}, Serial);
            break;
          case 3:
            CHECK(table.Bytes() > 0);
            CHECK(table.Size() > 0);
            break;
          default: {
            const std::unique_ptr<bool[]> admitted(new bool[kKeys]);
            CHECK(table.Admitted(keys.data(), kKeys, Serial, admitted.get()).ok());
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  FeatureColumns columns;
  for (int s = 0; s < kShards; ++s) CHECK_EQ(table.Export(s, 0, 1 << 20, false, &columns), -1);
  double total = 0;
  for (const double show : columns.show) total += show;
  CHECK_EQ(total, static_cast<double>(pushed));
}

// What the table notes is what a comparison of two full exports finds.
TEST(NotesWhichFeaturesChange) {
  FeatureTable table(MakePolicy("delete_threshold=0.2"));
  std::mt19937_64 random(kSeed);
  const auto export_of = [&](bool changed) {
    std::map<int64_t, std::tuple<double, double, double, int>> found;
    for (int s = 0; s < kShards; ++s) {
      FeatureColumns columns;
      for (int64_t next = 0; next >= 0;) next = table.Export(s, next, 3, changed, &columns);
      for (size_t i = 0; i < columns.key.size(); ++i) {
        const bool is_new =
            found
                .emplace(columns.key[i],
                         std::make_tuple(columns.show[i], columns.click[i], columns.delta_score[i],
                                         columns.unseen_days[i]))
                .second;
        CHECK(is_new);
      }
    }
    return found;
  };
  CHECK_EQ(table.CountChanges(), -1);
  std::vector<int64_t> keys(40000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 31;
  Observe(&table, keys, 3, 2);
  CHECK_EQ(table.CountChanges(), -1);
  table.KeepChanges();
  CHECK_EQ(table.CountChanges(), 0);
  for (int round = 0; round < 4; ++round) {
    const auto before = export_of(false);
    std::vector<int64_t> some(600);
    for (int64_t& key : some) key = static_cast<int64_t>(random() % 50000) * 31;
    Observe(&table, some, 1, 0);
    if (round == 1) {
      const std::vector<int64_t> selected = table.Select(Kind::kDelta, Serial);
      std::vector<int64_t> written;  // some of each shard
      for (size_t i = 0; i < selected.size(); i += 100) written.push_back(selected[i]);
      CHECK(written.size() >= 100);
      CHECK(table.Commit(Kind::kDelta, written.data(), written.size(), Serial).ok());
    }
    auto expected = export_of(false);
    for (const auto& [key, values] : before) {
      if (expected.at(key) == values) expected.erase(key);
    }
    const auto changed = export_of(true);
    CHECK_EQ(table.CountChanges(), static_cast<int64_t>(changed.size()));
    CHECK(changed == expected);
    table.KeepChanges();
  }
  Observe(&table, {31}, 1, 0);
  CHECK_EQ(table.CountChanges(), 1);
  table.Age(Serial);
  CHECK_EQ(table.CountChanges(), -1);
  table.KeepChanges();
  Observe(&table, {31}, 1, 0);
  CHECK_EQ(table.CountChanges(), 1);
  const int64_t id = IdOf(&table, 62);
  table.shard(id >> 32).Erase(id & 0xffffffff);
  CHECK_EQ(table.CountChanges(), -1);
  CHECK_EQ(export_of(true).size() > 0, true);  // all of the shards that do not know
  table.KeepChanges();
  Observe(&table, keys, 1, 0);  // most of the features
  CHECK_EQ(table.CountChanges(), -1);
}

// A selection among what changed is that of all features, and what a checkpoint keeps is apart.
TEST(SelectsAmongChanges) {
  FeatureTable table(MakePolicy("base_threshold=null delta_threshold=null delta_keep_days=null"));
  std::vector<int64_t> keys(40000), taken;
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 31;
  Observe(&table, keys, 3, 2);
  CHECK(!table.TakeChanges(&taken));
  CHECK(table.TakeChanges(&taken) && taken.empty());
  const std::vector<int64_t> all = table.Select(Kind::kDelta, Serial);
  CHECK_EQ(all.size(), keys.size());
  CHECK(table.Commit(Kind::kDelta, all.data(), all.size(), Serial).ok());
  CHECK(table.TakeChanges(&taken) && taken.empty());  // a commit is no change for deltas
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 4; ++round) {
    std::vector<int64_t> some(600);
    for (int64_t& key : some) key = static_cast<int64_t>(random() % 50000) * 31;
    Observe(&table, some, 1, 0);
    table.KeepChanges();
    CHECK(table.TakeChanges(&taken));
    const std::vector<int64_t> expected = table.Select(Kind::kDelta, Serial);
    taken.insert(taken.end(), {taken[0], 7});  // one twice, one that is absent
    std::vector<int64_t> selected;
    CHECK(table.SelectAmong(Kind::kDelta, taken.data(), taken.size(), Serial, &selected).ok());
    CHECK(selected == expected);
    CHECK(table.Commit(Kind::kDelta, selected.data(), selected.size(), Serial).ok());
    CHECK(table.Select(Kind::kDelta, Serial).empty());
  }
  std::vector<int64_t> selected;
  const int64_t negative = -1;
  CHECK(!table.SelectAmong(Kind::kBase, &negative, 1, Serial, &selected).ok());
  table.Age(Serial);
  CHECK(!table.TakeChanges(&taken));
}

// Observing in several threads, with evictions between, whose features nobody may touch afterwards.
TEST(ThreadsObserveAndEvict) {
  FeatureTable table(MakePolicy("delete_threshold=0.2"), 16);
  std::atomic<int64_t> erased{0};
  table.on_erase = [&](int, char* payload) {
    payload[0] = 1;
    ++erased;
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(kSeed + t);
      for (int round = 0; round < 25; ++round) {
        std::vector<int64_t> keys(400);
        for (int64_t& key : keys) key = static_cast<int64_t>(random() % 3000);
        Observe(&table, keys, 1, 0);
        if (t != 0) continue;
        Observe(&table, {10000 + round}, 1, 0);  // one at least to erase
        table.Evict(testing::Threads(2));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(erased > 0);
  table.Evict(Serial);
  for (const int64_t key : table.Select(Kind::kAll, Serial)) {
    const int64_t id = IdOf(&table, key);
    CHECK_EQ(table.shard(id >> 32).Payload(id & 0xffffffff)[0], 0);
  }
}

}  // namespace
}  // namespace ctr

int main() { return testing::RunAll(); }
