// The row store: pushes, pulls and evictions at the same time; rows handed on; dedupe, pooling
// and histories in bounds.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "ops/cc/rows/dedupe.h"
#include "ops/cc/rows/history.h"
#include "ops/cc/rows/pool.h"
#include "ops/cc/rows/row_store.h"
#include "tests/cc/testing.h"

namespace ctr {
namespace {

constexpr int kWidth = 6;

RowLayout MakeLayout(const RowRule* kind, bool bfloat16 = false) {
  RowLayout layout;
  layout.tables = {{kWidth, 0.1f, kind, kind, bfloat16}, {3, 0.1f, kind, kind, false}};
  layout.slot_table = {-1, 0, 1};
  return layout;
}

RowHyper MakeHyper(float learning_rate) {
  RowHyper hyper = {};
  hyper.learning_rate = learning_rate;
  hyper.initial_accumulator = 0.1f;
  hyper.beta1 = 0.9f;
  hyper.beta2 = 0.999f;
  hyper.epsilon = 1e-7f;
  hyper.clip = std::numeric_limits<float>::infinity();
  return hyper;
}

Policy MakePolicy(const std::string& text) {
  Policy policy;
  CHECK(Policy::Parse(text, &policy).ok());
  return policy;
}

int64_t Key(int slot, int64_t id) { return static_cast<int64_t>(slot) << 52 | id; }

struct Pulled {
  std::vector<int64_t> ids;
  std::vector<int32_t> offsets;
  std::vector<float> linear, factors;
};

Pulled Pull(RowStore* store, const std::vector<int64_t>& keys, bool train,
            const ParallelFor& parallel_for) {
  Pulled p;
  p.ids.resize(keys.size());
  p.offsets.resize(keys.size() + 1);
  p.linear.resize(keys.size());
  const Status status = store->Pull(keys.data(), keys.size(), train, parallel_for, p.ids.data(),
                                    p.offsets.data(), p.linear.data(), [&](int64_t total) {
                                      p.factors.resize(total + 1);
                                      return p.factors.data();
                                    });
  CHECK(status.ok());
  p.factors.resize(p.offsets.back());
  return p;
}

Status Push(RowStore* store, const std::vector<int64_t>& keys, const Pulled& p, float gradient,
            float show, int64_t step, float learning_rate, const ParallelFor& parallel_for) {
  const std::vector<float> shows(keys.size(), show), clicks(keys.size(), 0.0f),
      linear(keys.size(), gradient), factors(p.offsets.back() + 1, gradient);
  const float one = 1.0f;
  const std::vector<RowHyper> hyper(4, MakeHyper(learning_rate));
  RowPush push;
  push.n = keys.size();
  push.keys = keys.data();
  push.ids = p.ids.data();
  push.offsets = p.offsets.data();
  push.shows = shows.data();
  push.clicks = clicks.data();
  push.linear_grad = linear.data();
  push.factors_grad = factors.data();
  push.scale = &one;
  push.scale_n = 1;
  push.hyper = hyper.data();
  push.step = step;
  return store->Push(push, parallel_for);
}

TEST(ConcurrentPushesLoseNothing) {
  constexpr int kThreads = 8, kRounds = 60, kKeys = 500;
  const RowLayout layout = MakeLayout(FindRowRule("sgd"));
  FeatureTable table(MakePolicy("admission=none eviction=none"), RowStore::PayloadBytes(layout));
  RowStore store(&table, layout);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&store, t] {
      std::mt19937 random(t);
      for (int round = 0; round < kRounds; ++round) {
        std::vector<int64_t> keys(kKeys);
        for (int i = 0; i < kKeys; ++i) keys[i] = Key(1 + i % 2, i);
        std::shuffle(keys.begin(), keys.end(), random);
        const Pulled p = Pull(&store, keys, true, testing::Threads(2));
        CHECK(Push(&store, keys, p, 1.0f, 1.0f, 1 + round, 0.5f, testing::Threads(2)).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(table.Size() == kKeys);
  std::vector<int64_t> keys(kKeys);
  for (int i = 0; i < kKeys; ++i) keys[i] = Key(1 + i % 2, i);
  const Pulled p = Pull(&store, keys, false, Serial);
  std::vector<double> shows(kKeys);
  LookupResult result;
  result.show = shows.data();
  CHECK(table.Lookup(keys.data(), kKeys, Serial, result).ok());
  for (int i = 0; i < kKeys; ++i) {
    CHECK(p.linear[i] == -0.5f * kThreads * kRounds);
    CHECK(shows[i] == kThreads * kRounds);
    CHECK(p.offsets[i + 1] - p.offsets[i] == (i % 2 == 0 ? kWidth : 3));
    for (int c = p.offsets[i]; c < p.offsets[i + 1]; ++c) {
      CHECK(std::abs(p.factors[c] + 0.5f * kThreads * kRounds) < 2.0f);  // less its initial value
    }
  }
}

TEST(PushesPullsAndEvictionsTogether) {
  const RowLayout layout = MakeLayout(FindRowRule("adagrad"), /*bfloat16=*/true);
  FeatureTable table(
      MakePolicy("admission=count admission_count=3 eviction=unseen delete_after_unseen_days=0"),
      RowStore::PayloadBytes(layout));
  RowStore store(&table, layout);
  std::atomic<bool> stop(false);
  std::thread lifecycle([&] {
    while (!stop) {
      table.Age(testing::Threads(2));
      table.Evict(testing::Threads(2));
      store.Bytes();
    }
  });
  std::vector<std::thread> workers;
  for (int t = 0; t < 4; ++t) {
    workers.emplace_back([&store, t] {
      std::mt19937 random(t);
      for (int round = 1; round <= 150; ++round) {
        std::vector<int64_t> keys(200);
        for (int64_t& key : keys) key = Key(1 + random() % 2, random() % 400);
        const Pulled p = Pull(&store, keys, true, Serial);
        for (const float x : p.factors) CHECK(std::isfinite(x) && std::abs(x) < 100.0f);
        CHECK(Push(&store, keys, p, 0.1f, 2.0f, round, 0.05f, Serial).ok());
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  stop = true;
  lifecycle.join();
  table.Clear(Serial);
  CHECK(table.Size() == 0);
}

TEST(RowsAreHandedOn) {
  const RowLayout layout = MakeLayout(FindRowRule("adam"));
  FeatureTable table(MakePolicy("admission=none eviction=unseen delete_after_unseen_days=0"),
                     RowStore::PayloadBytes(layout));
  RowStore store(&table, layout);
  int64_t bytes = 0;
  for (int day = 0; day < 5; ++day) {
    std::vector<int64_t> keys(20000);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = Key(1 + i % 2, day * 1000000 + i);
    CHECK(Push(&store, keys, Pull(&store, keys, true, Serial), 1.0f, 1.0f, day + 1, 0.1f,
               testing::Threads(3))
              .ok());
    if (day == 0) bytes = store.Bytes();
    CHECK(store.Bytes() <= bytes * 1.1);
    table.Age(Serial);
    CHECK(table.Evict(testing::Threads(3)).size() == keys.size());
  }
}

TEST(EvictionGivesMemoryBackAndKeepsRows) {
  const RowLayout layout = MakeLayout(FindRowRule("adagrad"));
  FeatureTable table(MakePolicy("admission=none eviction=unseen delete_after_unseen_days=0"),
                     RowStore::PayloadBytes(layout));
  RowStore store(&table, layout);
  std::vector<int64_t> keys(240000), kept;
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = Key(1 + i % 2, i);
  for (size_t i = 0; i < keys.size(); i += 10) kept.push_back(keys[i]), kept.push_back(keys[i + 1]);
  for (int step = 1; step <= 2; ++step) {
    const Pulled p = Pull(&store, keys, true, Serial);
    CHECK(Push(&store, keys, p, 0.3f * step, 1.0f, step, 0.1f, Serial).ok());
  }
  table.Age(Serial);
  CHECK(Push(&store, kept, Pull(&store, kept, true, Serial), 0.5f, 1.0f, 3, 0.1f, Serial).ok());
  const Pulled before = Pull(&store, kept, false, Serial);
  const int64_t table_bytes = table.Bytes(), store_bytes = store.Bytes();
  CHECK_EQ(table.Evict(testing::Threads(3)).size(), keys.size() - kept.size());
#if !defined(__SANITIZE_ADDRESS__)  // there each chunk lies apart, and few fill whole pages
  CHECK(table.Bytes() < table_bytes / 2);
  CHECK(store.Bytes() < store_bytes * 2 / 3);
#else
  CHECK(table.Bytes() + store.Bytes() <= table_bytes + store_bytes);
#endif
  Pulled after = Pull(&store, kept, false, Serial);
  CHECK(after.linear == before.linear && after.factors == before.factors);
  // Training goes on, also with what was pulled before the eviction, and with features that return.
  CHECK(Push(&store, kept, before, 0.5f, 1.0f, 4, 0.1f, Serial).ok());
  after = Pull(&store, kept, false, Serial);
  for (size_t i = 0; i < kept.size(); ++i) CHECK(after.linear[i] < before.linear[i]);
  for (size_t i = 0; i < after.factors.size(); ++i) CHECK(after.factors[i] < before.factors[i]);
  CHECK(Push(&store, keys, Pull(&store, keys, true, Serial), 0.3f, 1.0f, 5, 0.1f, Serial).ok());
  CHECK_EQ(table.Size(), static_cast<int64_t>(keys.size()));
}

void CheckExportAndImport(bool bfloat16) {
  const RowLayout layout = MakeLayout(FindRowRule("ftrl"), bfloat16);
  const Policy policy = MakePolicy("admission=count admission_count=2");
  FeatureTable one(policy, RowStore::PayloadBytes(layout)),
      two(policy, RowStore::PayloadBytes(layout));
  RowStore from(&one, layout), to(&two, layout);
  std::vector<int64_t> keys(3000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = Key(1 + i % 2, i);
  CHECK(Push(&from, keys, Pull(&from, keys, true, Serial), 1.0f, 1.0f, 1, 0.1f, Serial).ok());
  keys.resize(1500);
  for (int step = 2; step < 4; ++step) {
    CHECK(Push(&from, keys, Pull(&from, keys, true, Serial), 1.0f, 1.0f, step, 0.1f, Serial).ok());
  }
  for (int s = 0; s < kShards; ++s) {
    FeatureColumns columns;
    CHECK(one.Export(s, 0, 1 << 20, false, &columns) == -1);
    const int64_t n = columns.key.size();
    std::vector<float> linear(n * layout.linear_floats());
    std::vector<char> rows[2];
    std::vector<int32_t> last(n);
    std::vector<char> flags(columns.admitted.begin(), columns.admitted.end());
    const bool* admitted = reinterpret_cast<const bool*>(flags.data());
    rows[0].resize(n * layout.tables[0].row_bytes());
    rows[1].resize(n * layout.tables[1].row_bytes());
    CHECK(from.ExportRows(columns.key.data(), admitted, n, linear.data(), last.data(),
                          {rows[0].data(), rows[1].data()})
              .ok());
    CHECK(two.Import(columns).ok());
    CHECK(to.ImportRows(columns.key.data(), admitted, n, linear.data(), last.data(),
                        {rows[0].data(), rows[1].data()})
              .ok());
  }
  keys.resize(3000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = Key(1 + i % 2, i);
  for (int step = 5; step < 7; ++step) {
    const Pulled a = Pull(&from, keys, true, Serial), b = Pull(&to, keys, true, Serial);
    CHECK(a.offsets == b.offsets && a.linear == b.linear && a.factors == b.factors &&
          !a.factors.empty());
    CHECK(Push(&from, keys, a, -0.5f, 1.0f, step, 0.1f, Serial).ok());
    CHECK(Push(&to, keys, b, -0.5f, 1.0f, step, 0.1f, Serial).ok());
  }
}

TEST(AnImportThatFailsChangesNothing) {
  const RowLayout layout = MakeLayout(FindRowRule("ftrl"));
  const Policy policy = MakePolicy("admission=count admission_count=2");
  std::vector<int64_t> keys(3000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = Key(1 + i % 2, i);
  const int64_t n = keys.size();
  const std::vector<char> flags(n, 1);
  const bool* const admitted = reinterpret_cast<const bool*>(flags.data());
  const std::vector<float> linear(n * layout.linear_floats(), 2.0f);
  const std::vector<int32_t> last(n, 7);
  const std::vector<char> rows(n * layout.tables[0].row_bytes(), 1);
  for (const int64_t wrong : {int64_t{0}, n / 2, n - 1}) {
    for (const bool is_absent : {true, false}) {
      FeatureTable table(policy, RowStore::PayloadBytes(layout));
      RowStore store(&table, layout);
      const auto learn = [&](std::vector<int64_t> some, int times) {
        for (int step = 1; step <= times; ++step) {
          CHECK(Push(&store, some, Pull(&store, some, true, Serial), 1.0f, 1.0f, step, 0.1f, Serial)
                    .ok());
        }
      };
      std::vector<int64_t> others = keys;
      others.erase(others.begin() + wrong);
      learn(others, 1);  // they have no factors yet
      if (!is_absent) learn({keys[wrong]}, 2);
      const Pulled before = Pull(&store, keys, false, Serial);
      const Status status = store.ImportRows(keys.data(), admitted, n, linear.data(), last.data(),
                                             {rows.data(), rows.data()});
      CHECK(status.code() == Status::kInvalidArgument);
      CHECK(status.message().find("keys[" + std::to_string(wrong) + "]: found") == 0);
      const Pulled after = Pull(&store, keys, false, Serial);
      CHECK(after.offsets == before.offsets && after.linear == before.linear &&
            after.factors == before.factors);
      CHECK_EQ(static_cast<int>(after.factors.size()),
               is_absent ? 0 : layout.tables[wrong % 2].width);
    }
  }
}

// Of a key that repeats, the last occurrence stays.
TEST(AnImportTakesRepeatedKeysInTurn) {
  const RowLayout layout = MakeLayout(FindRowRule("sgd"));
  FeatureTable table(MakePolicy("admission=count admission_count=9"),
                     RowStore::PayloadBytes(layout));
  RowStore store(&table, layout);
  const std::vector<int64_t> keys(2, Key(2, 5));
  CHECK(Push(&store, {keys[0]}, Pull(&store, {keys[0]}, true, Serial), 1.0f, 1.0f, 1, 0.1f, Serial)
            .ok());
  const bool admitted[] = {true, true};
  const float linear[] = {3.0f, 4.0f}, factors[] = {1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f};
  const int32_t last[] = {1, 1};
  CHECK(store
            .ImportRows(keys.data(), admitted, 2, linear, last,
                        {nullptr, reinterpret_cast<const char*>(factors)})
            .ok());
  const Pulled p = Pull(&store, {keys[0]}, false, Serial);
  CHECK(p.linear == std::vector<float>({4.0f}));
  CHECK(p.factors == std::vector<float>({4.0f, 5.0f, 6.0f}));
}

TEST(ExportAndImport) { CheckExportAndImport(false); }
TEST(ExportAndImportInBfloat16) { CheckExportAndImport(true); }

// Rows of three owners are those of one, bit by bit; and after many small steps they are, in the
// mean, where float32 is, which rounding to nearest would never have left.
TEST(Bfloat16IsTheSameForAnyOwnersAndUnbiased) {
  constexpr int kKeys = 600, kSteps = 200;
  const Policy policy = MakePolicy("admission=none eviction=none");
  std::vector<std::unique_ptr<FeatureTable>> tables;
  std::vector<std::unique_ptr<RowStore>> stores;
  for (int i = 0; i < 5; ++i) {  // one; three owners; one in float32
    RowLayout layout = MakeLayout(FindRowRule("sgd"), /*bfloat16=*/i < 4);
    for (RowTable& table : layout.tables) table.init_scale = 0.0f;
    tables.push_back(std::make_unique<FeatureTable>(policy, RowStore::PayloadBytes(layout)));
    stores.push_back(std::make_unique<RowStore>(tables.back().get(), layout));
  }
  std::vector<int64_t> all(kKeys), parts[3];
  for (int i = 0; i < kKeys; ++i) parts[i % 3].push_back(all[i] = Key(1, i));
  const auto push = [](RowStore* store, const std::vector<int64_t>& keys, int step) {
    const Pulled p = Pull(store, keys, true, Serial);
    // To 1 at once, then by far less than half of what lies between 1 and its neighbour, 2^-8.
    CHECK(Push(store, keys, p, step == 1 ? -1.0f : 1e-4f, 1.0f, step, 1.0f, Serial).ok());
  };
  for (int step = 1; step <= kSteps; ++step) {
    push(stores[0].get(), all, step);
    push(stores[4].get(), all, step);
    for (int owner = 0; owner < 3; ++owner) push(stores[1 + owner].get(), parts[owner], step);
  }
  const Pulled one = Pull(stores[0].get(), all, false, Serial);
  const Pulled wide = Pull(stores[4].get(), all, false, Serial);
  const Pulled owners[] = {Pull(stores[1].get(), parts[0], false, Serial),
                           Pull(stores[2].get(), parts[1], false, Serial),
                           Pull(stores[3].get(), parts[2], false, Serial)};
  double mean = 0, wanted = 0;
  for (int i = 0; i < kKeys; ++i) {
    for (int c = 0; c < kWidth; ++c) {
      CHECK_EQ(one.factors[i * kWidth + c], owners[i % 3].factors[i / 3 * kWidth + c]);
      mean += one.factors[i * kWidth + c] / kKeys / kWidth;
      wanted += wide.factors[i * kWidth + c] / kKeys / kWidth;
    }
  }
  CHECK(std::abs(wanted - (1.0 - (kSteps - 1) * 1e-4)) < 1e-5);
  CHECK(std::abs(mean - wanted) < 1e-3);
}

TEST(Bfloat16CatchesUp) {
  const Policy policy = MakePolicy("admission=none eviction=none");
  const std::vector<int64_t> keys = {Key(1, 1), Key(1, 2), Key(1, 3)};
  std::vector<float> found[2];
  for (const bool bfloat16 : {false, true}) {
    const RowLayout layout = MakeLayout(FindRowRule("adam"), bfloat16);
    FeatureTable table(policy, RowStore::PayloadBytes(layout));
    RowStore store(&table, layout);
    CHECK(Push(&store, keys, Pull(&store, keys, true, Serial), 1.0f, 1.0f, 1, 0.1f, Serial).ok());
    std::vector<RowHyper> hyper(4, MakeHyper(0.1f));
    hyper[1].l2_catch_up = 1.0f;
    hyper[1].l2 = 0.01f;
    const Pulled before = Pull(&store, keys, false, Serial);
    CHECK(store.CatchUp(hyper.data(), 20, Serial).ok());
    CHECK(store.CatchUp(hyper.data(), 20, Serial).ok());  // nothing is missed any more
    found[bfloat16] = Pull(&store, keys, false, Serial).factors;
    CHECK(found[bfloat16] != before.factors);
  }
  for (size_t i = 0; i < found[0].size(); ++i)
    CHECK(std::abs(found[1][i] - found[0][i]) < 0.03f * std::abs(found[0][i]));
}

TEST(FtrlStaysWhereADifferenceTookIt) {
  RowHyper hyper = MakeHyper(0.1f);
  hyper.l1 = 0.4f;
  hyper.l2 = 0.2f;
  const RowStep step(FindRowRule("ftrl"), hyper, 2);
  float w[kWidth] = {0.3f, -0.2f, 0.0f, 0.1f, -0.1f, 0.0f}, state[2 * kWidth];
  const float gradient[kWidth] = {1.0f, 0.5f, 0.1f, -2.0f, 0.0f, 3.0f}, none[kWidth] = {};
  InitRowState(step, kWidth, w, state);
  UpdateRow(step, kWidth, 0, 1.0f, gradient, w, state);
  const float wanted[kWidth] = {0.7f, -0.01f, 0.2f, 0.0f, 0.0f, -1.5f};
  float difference[kWidth];
  for (int i = 0; i < kWidth; ++i) difference[i] = wanted[i] - w[i];
  AddToRow(step, kWidth, difference, w, state);
  for (int i = 0; i < kWidth; ++i) CHECK(std::abs(w[i] - wanted[i]) < 1e-6f);
  for (int i = 0; i < kWidth; ++i) CHECK(state[i] == 0.1f + gradient[i] * gradient[i]);
  UpdateRow(step, kWidth, 0, 1.0f, none, w, state);
  for (int i = 0; i < kWidth; ++i) CHECK(std::abs(w[i] - wanted[i]) < 1e-6f);
}

TEST(RefusedPushChangesNothing) {
  const RowLayout layout = MakeLayout(FindRowRule("sgd"));
  FeatureTable table(MakePolicy("admission=none"), RowStore::PayloadBytes(layout));
  RowStore store(&table, layout);
  std::vector<int64_t> keys = {Key(1, 1), Key(2, 2)};
  const Pulled p = Pull(&store, keys, true, Serial);
  CHECK(!Push(&store, keys, p, std::nanf(""), 1.0f, 1, 0.1f, Serial).ok());
  CHECK(!Push(&store, keys, p, 1.0f, -1.0f, 1, 0.1f, Serial).ok());
  CHECK(!Push(&store, keys, p, 1.0f, 1.0f, 0, 0.1f, Serial).ok());
  CHECK(!Push(&store, keys, p, 1.0f, 1.0f, 1, -0.1f, Serial).ok());
  keys[1] = Key(3, 2);
  CHECK(!Push(&store, keys, p, 1.0f, 1.0f, 1, 0.1f, Serial).ok());
  keys[1] = -1;
  CHECK(!Push(&store, keys, p, 1.0f, 1.0f, 1, 0.1f, Serial).ok());
  CHECK(table.Size() == 0);
}

TEST(Average) {
  PoolLayout layout;
  layout.table_of_field = {0, 0};
  layout.averaged = {false, true};
  CHECK(layout.Complete().empty());
  const std::vector<int32_t> segments = {0, 0, 1, 3, 3, 3};
  const std::vector<float> values = {5, 6, 7, 1, 2, 3};
  PoolBatch batch;
  batch.batch = 2;
  batch.n = segments.size();
  batch.segments = segments.data();
  std::vector<float> found(batch.n);
  Average(layout, batch, found.data());
  CHECK((found == std::vector<float>{1, 1, 1, 1 / 3.0f, 1 / 3.0f, 1 / 3.0f}));
  batch.values = values.data();
  Average(layout, batch, found.data());
  CHECK((found == std::vector<float>{5, 6, 7, 1 / 3.0f, 2 / 3.0f, 1}));
  layout.averaged = {true};
  CHECK(!layout.Complete().empty());
}

TEST(DedupeThenPool) {
  std::mt19937 random(7);
  PoolLayout layout;
  layout.table_of_field = {0, 0, 1};
  layout.parts.resize(3);
  layout.parts[0].table = 0;
  layout.parts[0].width = 5;
  layout.parts[0].totals = true;
  layout.parts[1].table = 0;
  layout.parts[1].width = 2;
  layout.parts[1].field = true;
  layout.parts[2].table = 1;
  layout.parts[2].width = 17;
  CHECK(layout.Complete().empty());
  CHECK(layout.row_width[0] == 11 && layout.row_width[1] == 17);
  for (const int64_t samples : {0, 1, 700}) {
    std::vector<int64_t> keys;
    std::vector<int32_t> segments;
    for (int32_t s = 0; s < samples * 3; ++s) {
      for (uint32_t k = random() % 4; k > 0; --k) {
        segments.push_back(s);
        keys.push_back(Key(1 + s % 3 / 2, random() % 300));
      }
    }
    const int64_t n = keys.size();
    Dedupe dedupe;
    const float one = 1.0f;
    const Dedupe::Batch occurrences{keys.data(), n, &one, 1, &one, 1, 0, nullptr};
    std::vector<int32_t> order(n);
    const int64_t u = dedupe.Find(occurrences, testing::Threads(3), 3, order.data());
    std::vector<int64_t> unique(u);
    std::vector<int32_t> inverse(n), starts(u + 1), offsets(u + 1);
    std::vector<float> shows(u), clicks(u), linear(u, 1.0f);
    dedupe.Write(unique.data(), inverse.data(), shows.data(), clicks.data(), starts.data(),
                 testing::Threads(3));
    std::map<int64_t, int> count;
    for (const int64_t key : keys) ++count[key];
    CHECK(static_cast<int64_t>(count.size()) == u && starts[u] == n);
    for (int64_t i = 0; i < n; ++i) CHECK(unique[inverse[i]] == keys[i]);
    for (int64_t j = 0; j < u; ++j) {
      CHECK(shows[j] == static_cast<float>(count[unique[j]]));
      offsets[j + 1] = offsets[j] + (j % 3 == 0 ? 0 : layout.row_width[SlotOf(unique[j]) - 1]);
    }
    std::vector<float> factors(offsets[u], 0.5f), linear_grad(u), factors_grad(offsets[u]);
    PoolBatch batch;
    batch.batch = samples;
    batch.n = n;
    batch.u = u;
    batch.segments = segments.data();
    batch.offsets = offsets.data();
    batch.factors = factors.data();
    const int32_t none = 0;
    if (n == 0) batch.segments = &none;
    CHECK(CheckPoolBatch(layout, batch, factors.size()).empty());
    std::vector<float> out_linear(samples * 3), out[3], squares[2], totals(samples * 5);
    PoolOutputs outputs;
    PoolGradients gradients;
    outputs.linear = out_linear.data();
    gradients.linear = out_linear.data();
    const int fields[] = {2, 2, 1};
    for (int p = 0; p < 3; ++p) {
      out[p].resize(samples * fields[p] * layout.parts[p].columns);
      outputs.slots.push_back(out[p].data());
      gradients.slots.push_back(out[p].data());
      outputs.totals.push_back(p == 0 ? totals.data() : nullptr);
      gradients.totals.push_back(p == 0 ? totals.data() : nullptr);
    }
    for (int p = 0; p < 2; ++p) {
      squares[p].resize(samples);
      outputs.squares.push_back(squares[p].data());
      gradients.squares.push_back(squares[p].data());
    }
    outputs.squares.push_back(nullptr);
    gradients.squares.push_back(nullptr);
    CHECK(Pool(layout, batch, linear.data(), inverse.data(), testing::Threads(3), outputs));
    double total = 0;
    for (const float x : out_linear) total += x;
    CHECK(total == n);
    CHECK(PoolGradient(layout, batch, gradients, inverse.data(), starts.data(), testing::Threads(3),
                       linear_grad.data(), factors_grad.data()));
    std::vector<float> wanted(u);
    for (int64_t i = 0; i < n; ++i) wanted[inverse[i]] += out_linear[segments[i]];
    CHECK(linear_grad == wanted);
    // A history of field 0: what was gathered, summed by feature, is its count times 0.5.
    HistoryBatch histories{samples, n, u, 5, offsets.data(), batch.segments};
    std::vector<int64_t> begins(samples), ends(samples);
    const int64_t longest = FindHistories(histories, 3, 0, begins.data(), ends.data());
    std::vector<float> vectors(samples * longest * 12), sums(offsets[u]);
    std::unique_ptr<bool[]> mask(new bool[samples * longest]);
    std::vector<int32_t> places(n);
    const auto gather = [&] {
      return GatherHistories(histories, longest, begins.data(), ends.data(), inverse.data(),
                             factors.data(), testing::Threads(3), vectors.data(), mask.get(),
                             places.data());
    };
    const auto sum = [&] {
      return HistoriesGradient(histories, places.data(), samples * longest, starts.data(),
                               order.data(), vectors.data(), testing::Threads(3), sums.data());
    };
    CHECK(gather() && sum());
    std::vector<int> in_history(u);
    for (int64_t i = 0; i < n; ++i) in_history[inverse[i]] += segments[i] % 3 == 0;
    for (int64_t j = 0; j < u; ++j) {
      for (int c = 0; c < offsets[j + 1] - offsets[j]; ++c)
        CHECK(sums[offsets[j] + c] == (c < 5 ? 0.5f * in_history[j] : 0.0f));
    }
    if (n > 0) {
      histories.width = 12;  // more than the 11 of table 0
      CHECK(!gather());
      histories.width = 5;
      places[order[n / 2]] = static_cast<int32_t>(samples * longest);
      CHECK(!sum());
      inverse[begins[samples / 2]] = inverse[n / 2] = static_cast<int32_t>(u);
      CHECK(begins[samples / 2] == ends[samples / 2] || !gather());
      CHECK(!Pool(layout, batch, linear.data(), inverse.data(), Serial, outputs));
      CHECK(!PoolGradient(layout, batch, gradients, inverse.data(), starts.data(), Serial,
                          linear_grad.data(), factors_grad.data()));
    }
  }
}

}  // namespace
}  // namespace ctr

int main() { return testing::RunAll(); }
