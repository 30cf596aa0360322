// Features on disk: a store with a limit of memory equals one without, and its faults have a name.
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ops/cc/rows/row_store.h"
#include "tests/cc/testing.h"

namespace ctr {
namespace {

constexpr int64_t kKeys = 40000;

RowHyper MakeHyper(bool catches_up) {
  RowHyper hyper = {};
  hyper.learning_rate = 0.1f;
  hyper.initial_accumulator = 0.1f;
  hyper.l2 = 0.01f;
  hyper.beta1 = 0.9f;
  hyper.beta2 = 0.999f;
  hyper.epsilon = 1e-7f;
  hyper.clip = std::numeric_limits<float>::infinity();
  hyper.l2_catch_up = catches_up ? 1.0f : 0.0f;
  return hyper;
}

// Sorts columns by key.
void Sort(const FeatureColumns& unsorted, FeatureColumns* columns) {
  std::vector<size_t> order(unsorted.key.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return unsorted.key[a] < unsorted.key[b]; });
  for (const size_t i : order) {
    columns->Append({unsorted.key[i], unsorted.show[i], unsorted.click[i], unsorted.delta_score[i],
                     unsorted.unseen_days[i], unsorted.age_days[i], unsorted.slot[i],
                     unsorted.admitted[i], 0});
  }
}

// A table and its rows, with a limit of memory unless that is 0.
struct Rows {
  explicit Rows(
      int64_t limit, const std::string& rule = "adagrad", bool catches_up = false,
      const std::string& text = "admission=none eviction=unseen delete_after_unseen_days=1")
      : hyper(4, MakeHyper(catches_up)) {
    RowLayout layout;
    layout.tables = {{24, 0.1f, FindRowRule(rule), FindRowRule(rule), false},
                     {48, 0.1f, FindRowRule("sgd"), FindRowRule("sgd"), true}};
    layout.slot_table = {-1, 0, 1};
    Policy policy;
    CHECK(Policy::Parse(text, &policy).ok());
    table = std::make_unique<FeatureTable>(policy, RowStore::PayloadBytes(layout));
    store = std::make_unique<RowStore>(table.get(), layout);
    if (limit > 0) CHECK(store->LimitMemory(limit, "/var/tmp").ok());
  }

  // Reads everything that a checkpoint has; returns it as bytes.
  Status Export(FeatureColumns* columns, std::string* bytes);
  std::string Export() {
    FeatureColumns columns;
    std::string bytes;
    CHECK(Export(&columns, &bytes).ok());
    return bytes;
  }

  // Imports what Export has read from another one.
  void Import(const FeatureColumns& columns, const Rows& of) {
    CHECK(table->Import(columns).ok());
    CHECK(store
              ->ImportRows(columns.key.data(), of.admitted.get(), columns.key.size(),
                           of.linear.data(), of.last_step.data(),
                           {of.factors[0].data(), of.factors[1].data()})
              .ok());
  }

  int64_t Memory() { return table->Bytes() + store->Bytes(); }

  std::vector<RowHyper> hyper;
  std::unique_ptr<FeatureTable> table;
  std::unique_ptr<RowStore> store;
  // What Export has read.
  std::vector<float> linear;
  std::vector<int32_t> last_step;
  std::unique_ptr<bool[]> admitted;
  std::string factors[2];
};

Status Rows::Export(FeatureColumns* columns, std::string* bytes) {
  FeatureColumns unsorted;
  for (int s = 0; s < kShards; ++s) {
    for (int64_t place = 0; place >= 0;) place = table->Export(s, place, 1000, false, &unsorted);
  }
  if (!table->error().ok()) return table->error();
  Sort(unsorted, columns);
  const RowLayout& layout = store->layout();
  const int64_t n = columns->key.size();
  admitted = std::make_unique<bool[]>(n + 1);
  int64_t counts[2] = {0, 0};
  for (int64_t i = 0; i < n; ++i) {
    admitted[i] = columns->admitted[i] != 0;
    counts[layout.TableOf(columns->key[i])] += admitted[i];
  }
  linear.resize(n * layout.linear_floats());
  last_step.resize(n);
  for (int t = 0; t < 2; ++t) factors[t].resize(counts[t] * layout.tables[t].row_bytes());
  const Status status = store->ExportRows(columns->key.data(), admitted.get(), n, linear.data(),
                                          last_step.data(), {factors[0].data(), factors[1].data()});
  const auto add = [&](const auto& column) {
    bytes->append(reinterpret_cast<const char*>(column.data()), column.size() * sizeof(column[0]));
  };
  add(columns->key);
  add(columns->show);
  add(columns->click);
  add(columns->delta_score);
  add(columns->unseen_days);
  add(columns->age_days);
  add(columns->slot);
  add(columns->admitted);
  add(linear);
  add(last_step);
  bytes->append(factors[0]).append(factors[1]);
  return status;
}

// The rows of some keys, and a push of them.
struct Step {
  Status Pull(Rows* rows, const std::vector<int64_t>& keys, bool train,
              const ParallelFor& parallel_for = Serial) {
    ids.resize(keys.size());
    offsets.resize(keys.size() + 1);
    linear.resize(keys.size());
    return rows->store->Pull(keys.data(), keys.size(), train, parallel_for, ids.data(),
                             offsets.data(), linear.data(), [&](int64_t total) {
                               factors.assign(total + 1, 0.0f);
                               return factors.data();
                             });
  }

  Status Train(Rows* rows, const std::vector<int64_t>& keys, int64_t step,
               const ParallelFor& parallel_for = Serial) {
    const Status status = Pull(rows, keys, true, parallel_for);
    if (!status.ok()) return status;
    const std::vector<float> shows(keys.size(), 1.0f), clicks(keys.size(), 0.0f);
    const std::vector<float> linear_grad(keys.size(), 0.25f), factors_grad(factors.size(), 0.5f);
    const float one = 1.0f;
    RowPush push;
    push.n = keys.size();
    push.keys = keys.data();
    push.ids = ids.data();
    push.offsets = offsets.data();
    push.shows = shows.data();
    push.clicks = clicks.data();
    push.linear_grad = linear_grad.data();
    push.factors_grad = factors_grad.data();
    push.scale = &one;
    push.scale_n = 1;
    push.hyper = rows->hyper.data();
    push.step = step;
    return rows->store->Push(push, parallel_for);
  }

  bool operator==(const Step& other) const {
    const auto exist_alike = [](int64_t a, int64_t b) { return (a < 0) == (b < 0); };
    return linear == other.linear && factors == other.factors &&
           std::equal(ids.begin(), ids.end(), other.ids.begin(), other.ids.end(), exist_alike);
  }

  std::vector<int64_t> ids;
  std::vector<int32_t> offsets;
  std::vector<float> linear, factors;
};

// The keys of a batch: more of the low ones, and some twice.
std::vector<int64_t> Batch(std::mt19937* random, int64_t n, int64_t most) {
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = (*random)() % most * ((*random)() % 1024) / 1024;
    keys.push_back(static_cast<int64_t>(1 + id % 2) << 52 | id);
  }
  return keys;
}

constexpr int64_t kLimit = 4 << 20;

// Trains rows until some are on disk; returns the number of steps.
int TrainBeyondTheLimit(Rows* rows) {
  std::mt19937 random(2);
  for (int step = 1;; ++step) {
    CHECK(Step().Train(rows, Batch(&random, 3000, kKeys), step).ok());
    if (rows->store->ColdSize() > 5000) return step;
    CHECK(step < 1000);
  }
}

void CompareWithAllInMemory(const std::string& rule, bool catches_up) {
  Rows all(0, rule, catches_up), limited(kLimit, rule, catches_up);
  const ParallelFor threads = testing::Threads(3);
  std::mt19937 random(1);
  Step one, other;
  int64_t most_cold = 0;
  for (int step = 1; step <= 150; ++step) {
    const std::vector<int64_t> keys = Batch(&random, 2000, kKeys);
    CHECK(one.Train(&all, keys, step).ok());
    CHECK(other.Train(&limited, keys, step, threads).ok());
    CHECK(one == other);
    const int64_t cold = limited.store->ColdSize();
    most_cold = std::max(most_cold, cold);
    if (step % 10 == 0) {  // an evaluation, which leaves rows where they are
      const std::vector<int64_t> others = Batch(&random, 3000, kKeys);
      CHECK(one.Pull(&all, others, false).ok());
      CHECK(other.Pull(&limited, others, false, threads).ok());
      CHECK(one == other);
      CHECK_EQ(limited.store->ColdSize(), cold);
    }
    if (step % 40 != 0) continue;
    for (Rows* rows : {&all, &limited}) {
      CHECK(rows->store->CatchUp(rows->hyper.data(), step, Serial).ok());
      rows->table->Decay(Serial);
      rows->table->Evict(Serial);
      rows->table->Age(Serial);
    }
    CHECK(all.Export() == limited.Export());
  }
  CHECK(most_cold > 1000);
  CHECK(all.Export() == limited.Export());
  limited.table->Clear(Serial);
  CHECK_EQ(limited.store->ColdSize(), 0);
}

TEST(ALimitedStoreEqualsOneInMemory) { CompareWithAllInMemory("adagrad", false); }

TEST(CatchUpReachesRowsOnDisk) { CompareWithAllInMemory("adam", true); }

// Every verb of the lifecycle, at random, on both. `irregular`: days end in odd ways too.
void CompareVerbs(const std::string& policy, int seed, bool irregular) {
  Rows all(0, "adagrad", false, policy), limited(3 << 20, "adagrad", false, policy);
  Rows* const both[] = {&all, &limited};
  const ParallelFor threads = testing::Threads(2);
  std::mt19937 random(seed);
  int64_t most_cold = 0;
  int evicted = 0;
  bool is_selected[2] = {false, false};
  std::vector<int64_t> selected[2];
  for (int step = 1; step <= 250; ++step) {
    // What is popular changes, so that features come back after days.
    const int64_t shift = (random() % 4) * kKeys / 4;
    std::vector<int64_t> keys;
    for (const int64_t key : Batch(&random, 700, kKeys / 4)) keys.push_back(key + shift);
    const int64_t n = keys.size();
    const Kind kind = static_cast<Kind>(random() % 2);
    const int k = static_cast<int>(kind), verb = random() % 16;
    const bool again = irregular && random() % 4 == 0;
    std::vector<std::string> results;
    for (Rows* rows : both) {
      FeatureTable* const table = rows->table.get();
      std::vector<int64_t> found;
      std::vector<double> numbers;
      const auto flags = std::make_unique<bool[]>(2 * n);
      const auto end_day = [&] {
        const bool parts[] = {!again || step % 3 != 0, !again || step % 3 != 1, step % 5 != 2};
        if (parts[0]) table->Decay(threads);
        if (!irregular || parts[2]) found = table->Evict(threads);
        const std::vector<int64_t> worst = table->EvictBelow(table->CapacityCut(threads), threads);
        found.insert(found.end(), worst.begin(), worst.end());
        if (parts[1]) table->Age(threads);
        evicted += found.size();
      };
      if (verb < 7) CHECK(Step().Train(rows, keys, step, threads).ok());
      if (verb == 7) {
        const std::vector<double> shows(n, 1.5), clicks(n, 0.5);
        CHECK(table
                  ->Observe(keys.data(), shows.data(), clicks.data(), nullptr, n, threads,
                            flags.get())
                  .ok());
      }
      if (verb == 8) {
        std::vector<int32_t> days(3 * n);
        numbers.resize(3 * n);
        const LookupResult result = {numbers.data(), &numbers[n],  &numbers[2 * n], days.data(),
                                     &days[n],       &days[2 * n], flags.get(),     &flags[n]};
        CHECK(table->Lookup(keys.data(), n, threads, result).ok());
        numbers.insert(numbers.end(), days.begin(), days.end());
      }
      if (verb == 9) end_day();
      if (verb == 10) found = table->Select(kind, threads);
      if (verb == 11) CHECK(table->SelectAmong(kind, keys.data(), n, threads, &found).ok());
      if ((verb == 10 || verb == 11) && rows == &limited) selected[k] = found;
      if (verb == 12 && is_selected[k])
        CHECK(table->Commit(kind, selected[k].data(), selected[k].size(), threads).ok());
      if (verb == 13) table->KeepChanges();
      if (verb == 14) found.push_back(table->TakeChanges(&found));
      if (verb == 15) {
        FeatureColumns columns, sorted;
        for (int s = 0; s < kShards; ++s) {
          for (int64_t at = 0; at >= 0;) at = table->Export(s, at, 7, true, &columns);
        }
        Sort(columns, &sorted);
        found = sorted.key;
        numbers = sorted.delta_score;
      }
      found.push_back(table->CountChanges());
      found.push_back(table->Size());
      found.push_back(table->AdmittedSize(threads));
      CHECK(table->error().ok());
      std::sort(found.begin(), found.end());
      std::string bytes(reinterpret_cast<const char*>(found.data()),
                        found.size() * sizeof(int64_t));
      bytes.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(double));
      bytes.append(reinterpret_cast<const char*>(flags.get()), 2 * n);
      results.push_back(bytes);
    }
    if (verb == 10 || verb == 11) is_selected[k] = true;
    if (verb == 12) is_selected[k] = false;
    CHECK(results[0] == results[1]);
    most_cold = std::max(most_cold, limited.store->ColdSize());
    if (step % 25 == 0) CHECK(all.Export() == limited.Export());
  }
  CHECK(most_cold > 3000);
  CHECK(policy.find("eviction=none") != std::string::npos || evicted > 100);
}

TEST(EveryVerbIsTheSameWithFeaturesOnDisk) {
#if defined(__SANITIZE_THREAD__)
  const std::vector<bool> days = {true};  // this variant is slow
#else
  const std::vector<bool> days = {false, true};
#endif
  for (const bool irregular : days) {
    CompareVerbs(
        "admission=none eviction=unseen delete_after_unseen_days=2 decay=0.9 "
        "base_threshold=0.01 delta_threshold=0.05",
        1, irregular);
    CompareVerbs(
        "admission=score admission_threshold=0.3 eviction=score delete_threshold=0.25 decay=0.8 "
        "delete_after_unseen_days=null base_threshold=0.2 delta_threshold=0.2\n"
        "1 decay=0.7 min_age_days=3 delta_keep_days=1",
        2, irregular);
    CompareVerbs("admission=count admission_count=2 eviction=none capacity=15000 decay=0.95", 3,
                 irregular);
  }
}

TEST(MemoryStaysWithinTheLimit) {
  Rows limited(kLimit);
  std::mt19937 random(3);
  for (int step = TrainBeyondTheLimit(&limited), end = step + 30; step < end; ++step) {
    CHECK(Step().Train(&limited, Batch(&random, 3000, kKeys), step).ok());
    // Beside what counts there are the allocators' last pieces, and lists of chunks.
    CHECK(limited.Memory() < kLimit + (5 << 20));
  }
}

TEST(ASelectionTakesNoMemoryOnceItIsCommitted) {
  Rows limited(kLimit, "adagrad", false, "admission=none base_threshold=0");
  TrainBeyondTheLimit(&limited);
  const int64_t before = limited.table->Bytes();
  const std::vector<int64_t> keys = limited.table->Select(Kind::kBase, Serial);
  const int64_t half = keys.size() / 2;
  CHECK(half > 2500);
  CHECK(limited.table->Bytes() >= before + half * 32);
  CHECK(limited.table->Commit(Kind::kBase, keys.data(), half, Serial).ok());
  CHECK(limited.table->Commit(Kind::kBase, &keys[half], keys.size() - half, Serial).ok());
  CHECK(limited.table->Bytes() <= before);
  CHECK(!limited.table->Commit(Kind::kBase, keys.data(), 1, Serial).ok());
}

TEST(ImportsBeyondTheLimitLieOnDisk) {
  Rows all(0), limited(kLimit);
  std::mt19937 random(3);
  for (int step = 1; step <= 60; ++step)
    CHECK(Step().Train(&all, Batch(&random, 3000, kKeys), step).ok());
  FeatureColumns columns;
  std::string bytes;
  CHECK(all.Export(&columns, &bytes).ok());
  limited.Import(columns, all);
  CHECK(limited.store->ColdSize() > 1000);
  CHECK(limited.Export() == bytes);
}

TEST(ThreadsThatTrainAtOnceLoseNothing) {
  constexpr int kThreads = 4, kRounds = 25;
  Rows all(0, "sgd"), limited(kLimit, "sgd");
  for (Rows* rows : {&all, &limited}) {
    for (RowHyper& hyper : rows->hyper) hyper.l2 = 0.0f;  // steps then commute
  }
  const auto train = [](Rows* rows, int seed) {
    std::mt19937 random(seed);
    Step step;
    for (int round = 0; round < kRounds; ++round)
      CHECK(step.Train(rows, Batch(&random, 2000, kKeys), 1, testing::Threads(2)).ok());
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back(train, &limited, t);
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < kThreads; ++t) train(&all, t);
  CHECK(limited.store->ColdSize() > 1000);
  for (Rows* rows : {&all, &limited}) rows->Export();
  std::vector<int64_t> keys;
  for (int64_t id = 0; id < kKeys; ++id) keys.push_back((1 + id % 2) << 52 | id);
  Step one, other;
  CHECK(one.Pull(&all, keys, false).ok() && other.Pull(&limited, keys, false).ok());
  CHECK(one.linear == other.linear);
  for (int64_t i = 0; i < kKeys; i += 2) {  // the other table is in bfloat16: its rounding differs
    for (int32_t at = one.offsets[i]; at < one.offsets[i + 1]; ++at)
      CHECK(one.factors[at] == other.factors[at]);
  }
}

TEST(EveryVerbMayRunWhileFeaturesMove) {
  constexpr int kRounds = 30;
  const std::string policy =
      "admission=count admission_count=2 eviction=unseen delete_after_unseen_days=3 decay=0.9";
  Rows all(0, "adagrad", false, policy), limited(3 << 20, "adagrad", false, policy);
  FeatureTable* const table = limited.table.get();
  const auto rounds = [&](const std::function<void(int, const std::vector<int64_t>&)>& verb) {
    return std::thread([verb] {
      std::mt19937 random(7);
      for (int round = 1; round <= kRounds; ++round) verb(round, Batch(&random, 2000, kKeys));
    });
  };
  std::thread threads[] = {
      rounds([&](int round, const std::vector<int64_t>& keys) {
        CHECK(Step().Train(&limited, keys, round, testing::Threads(2)).ok());
      }),
      rounds([&](int round, const std::vector<int64_t>& keys) {
        CHECK(Step().Train(&limited, keys, round).ok());
      }),
      rounds([&](int, const std::vector<int64_t>& keys) {
        CHECK(Step().Pull(&limited, keys, false).ok());
      }),
      rounds([&](int round, const std::vector<int64_t>& keys) {
        if (round % 5 == 0) {
          table->Decay(Serial);
          table->Evict(Serial);
          table->Age(Serial);
        }
        std::vector<int64_t> selected;
        CHECK(table->SelectAmong(Kind::kDelta, keys.data(), keys.size(), Serial, &selected).ok());
        CHECK(table->Commit(Kind::kDelta, selected.data(), selected.size(), Serial).ok());
        table->KeepChanges();
      }),
      rounds([&](int round, const std::vector<int64_t>&) {
        if (round % 5 == 0) limited.Export();
      }),
  };
  for (std::thread& thread : threads) thread.join();
  CHECK(limited.store->ColdSize() > 1000);
  FeatureColumns columns;
  std::string bytes;
  CHECK(limited.Export(&columns, &bytes).ok());
  CHECK_EQ(static_cast<int64_t>(columns.key.size()), table->Size());
  all.Import(columns, limited);
  CHECK(all.Export() == bytes);
}

// The descriptors of scratch files.
std::vector<int> ScratchFiles() {
  std::vector<int> found;
  for (int fd = 0; fd < 100; ++fd) {
    char name[4096] = "";
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    if (readlink(link.c_str(), name, sizeof(name) - 1) <= 0) continue;
    if (std::string(name).find("/var/tmp/rows-") == 0) found.push_back(fd);
  }
  return found;
}

Status PullAll(Rows* rows, bool train) {
  std::vector<int64_t> keys;
  for (int64_t id = 0; id < kKeys; ++id) keys.push_back((1 + id % 2) << 52 | id);
  return Step().Pull(rows, keys, train);
}

TEST(ADamagedFileIsRefused) {
  for (const bool cut : {false, true}) {
    Rows limited(kLimit);
    TrainBeyondTheLimit(&limited);
    CHECK(PullAll(&limited, false).ok());
    const std::vector<int> files = ScratchFiles();
    CHECK_EQ(files.size(), size_t{3});
    for (const int fd : files) {
      if (cut) {
        CHECK(ftruncate(fd, 1000) == 0);
      } else {
        const std::vector<char> zeros(1 << 20);
        CHECK(pwrite(fd, zeros.data(), zeros.size(), 0) == static_cast<ssize_t>(zeros.size()));
      }
    }
    for (const bool train : {false, true}) {
      const Status status = PullAll(&limited, train);
      CHECK(status.code() == Status::kDataLoss);
      CHECK(status.message().find("cold_dir: /var/tmp: ") == 0);
      CHECK(status.message().find(cut ? "cut" : "damaged") != std::string::npos);
    }
    FeatureColumns columns;
    std::string bytes;
    CHECK(limited.Export(&columns, &bytes).code() == Status::kDataLoss);
    limited.table->Clear(Serial);  // as before the features of a checkpoint are read
    CHECK(limited.table->error().ok());
    TrainBeyondTheLimit(&limited);
    CHECK(PullAll(&limited, true).ok());
  }
  CHECK(ScratchFiles().empty());
}

// A limit of a file's size stands for a full disk.
TEST(AFullDiskLosesNothing) {
  Rows all(0), limited(kLimit);
  std::mt19937 random(4);
  std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit before, small;
  CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
  small = before;
  small.rlim_cur = 300 << 10;
  CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
  Status status;
  for (int step = 1; status.ok(); ++step) {
    CHECK(step < 1000);
    const std::vector<int64_t> keys = Batch(&random, 3000, kKeys);
    CHECK(Step().Train(&all, keys, step).ok());
    status = Step().Train(&limited, keys, step);
  }
  CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK(status.code() == Status::kResourceExhausted);
  CHECK(status.message().find("cold_dir: /var/tmp: cannot write rows there: ") == 0);
  CHECK(limited.store->ColdSize() > 0);
  CHECK(all.Export() == limited.Export());
}

TEST(MistakesAreNamed) {
  Rows rows(0);
  const Status absent = rows.store->LimitMemory(kLimit, "/no/such/directory");
  CHECK(absent.code() == Status::kInvalidArgument);
  CHECK(absent.message().find("cold_dir: found /no/such/directory, ") == 0);
  struct statfs system;
  if (statfs("/dev/shm", &system) == 0 && system.f_type == TMPFS_MAGIC) {
    CHECK(rows.store->LimitMemory(kLimit, "/dev/shm").message() ==
          "cold_dir: found /dev/shm, which is on tmpfs, in memory; wanted a directory on a local "
          "disk");
  }
  Rows small(300 << 10);
  std::mt19937 random(5);
  Status status;
  for (int step = 1; step <= 40 && status.ok(); ++step)
    status = Step().Train(&small, Batch(&random, 3000, kKeys), step);
  CHECK(status.code() == Status::kResourceExhausted);
  CHECK(status.message().find("memory_limit: found 307200 bytes, ") == 0);
}

}  // namespace
}  // namespace ctr

int main() { return testing::RunAll(); }
