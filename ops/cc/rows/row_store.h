// The row store: holds the trained weights of the features in a feature table. Uses no TensorFlow.
//
// The linear weight and its optimizer state are behind the feature's lifecycle fields, as the
// payload of the feature table.
//
// Memory: a feature has a factor row (weights, then state) once it is admitted. Factor rows are in
// chunks, which each (shard, table) has of its own. The row of an evicted feature is used again,
// and chunks that an eviction empties are given back.
//
// bfloat16: a table's factor rows, state included, may be kept in bfloat16, which halves them. Rows
// leave the store as float32 (exports excepted), and steps compute in float32. A step's result is
// rounded at random, by a hash of (seed, key, step, element), so that small changes are kept in the
// mean, and the result depends on neither the number of processes nor restarts. Initial rows are
// rounded to nearest. The linear weight is always float32.
//
// Disk: above a limit of memory, the features not seen for longest lie with their rows in scratch
// files (cold_file.h): one for each table, and one for features without factors. A pull to train
// brings a feature back; other reads leave it where it is. A push and an import end by moving
// features out, a few shards at a time. What is in memory makes no difference to any result.
//
// Locks: the lock of a feature's shard in the feature table guards all of the feature, its factor
// row included. Every verb takes each shard's lock at most twice, and holds one lock at a time.
//
// Batches: keys come in any order. If a key repeats, its occurrences are processed one after the
// other. A batch grouped by shard is fastest. A verb that fails has changed nothing, unless the
// disk failed: then use the store no more.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/cc/lifecycle/feature_table.h"
#include "ops/cc/lifecycle/parallel.h"
#include "ops/cc/lifecycle/status.h"
#include "ops/cc/rows/cold_file.h"
#include "ops/cc/rows/row_optimizers.h"

namespace ctr {

// The layout of one table's rows.
struct RowTable {
  int width = 0;  // the number of factors; 0: linear weights only
  float init_scale = 0.0f;
  const RowRule* linear = FindRowRule("sgd");
  const RowRule* factors = FindRowRule("sgd");
  bool bfloat16 = false;  // whether factor rows are kept in bfloat16, else in float32

  // How many numbers a factor row has.
  int row_size() const { return width == 0 ? 0 : width + RowStateFloats(factors, width); }
  int64_t row_bytes() const {
    return row_size() * static_cast<int64_t>(bfloat16 ? sizeof(uint16_t) : sizeof(float));
  }
};

struct RowLayout {
  std::vector<RowTable> tables;
  std::vector<int> slot_table;  // the table of each slot; -1 or beyond the end: it has no rows
  uint64_t seed = 0;            // for initial factors and for the rounding to bfloat16

  int TableOf(int64_t key) const {
    const size_t slot = static_cast<size_t>(SlotOf(key));
    return slot < slot_table.size() ? slot_table[slot] : -1;
  }
  // For how many floats, linear weight and state, every feature has room.
  int linear_floats() const;
  // Returns what is wrong with the layout; empty if nothing.
  std::string Check() const;
};

// What a push carries, for n keys.
struct RowPush {
  int64_t n = 0;
  const int64_t* keys = nullptr;
  const int64_t* ids = nullptr;  // from the pull: where to look first; wrong ones do no harm
  const int32_t* offsets =
      nullptr;  // [n + 1] from the pull; factors of key j are trained if its range is not empty
  const float* shows = nullptr;  // summed over the batch
  const float* clicks = nullptr;
  const float* linear_grad = nullptr;   // [n]
  const float* factors_grad = nullptr;  // [offsets[n]]
  const float* scale = nullptr;         // [scale_n], 1 or n: multiplies the gradients
  int64_t scale_n = 0;
  const RowHyper* hyper = nullptr;  // [tables, 2]: for linear weights, for factors
  int64_t step = 0;                 // the number of this global step, from 1
  bool add = false;  // whether the gradients are differences to add to the weights (AddToRow)
};

class RowStore {
 public:
  static int64_t PayloadBytes(const RowLayout& layout) {
    return 2 * sizeof(int32_t) + sizeof(float) * layout.linear_floats();
  }

  // table: a feature table with payloads of PayloadBytes(layout), which has not been used and lives
  // as long as the store. The store sets its functions.
  RowStore(FeatureTable* table, RowLayout layout);

  // Call it only before the store is used: keeps the features and their rows within `limit` bytes
  // of memory, with further ones in scratch files in `dir`. InvalidArgument as of ColdFile::Open.
  Status LimitMemory(int64_t limit, const std::string& dir);

  const RowLayout& layout() const { return layout_; }

  // Reads the rows of keys, and changes nothing. Writes ids [n], -1 for an absent feature; offsets
  // [n + 1]; linear [n], -0 for an absent feature alone; and the factors. A feature that is not
  // admitted has no factors; but with admission `none` and `train`, it reads its initial factors.
  // allocate_factors(offsets[n]) returns the memory for the factors, or null, at which Pull
  // returns.
  Status Pull(const int64_t* keys, int64_t n, bool train, const ParallelFor& parallel_for,
              int64_t* ids, int32_t* offsets, float* linear,
              const std::function<float*(int64_t)>& allocate_factors);

  // For each key, under the lock of its shard: creates the feature if it is absent; takes one step
  // on the linear weight and, if the pull had factors and the feature still has them, on the
  // factors; then observes shows and clicks. If that admits the feature, it gets its initial
  // factors, which this push does not train. But with admission `none`, a new feature has factors
  // at once, and this push trains them. OutOfRange if a gradient or scale is not finite; it names
  // argument, key and value. InvalidArgument for what FeatureTable::Observe refuses.
  Status Push(const RowPush& push, const ParallelFor& parallel_for);

  // Takes, on every row whose optimizer has l2_catch_up, the steps up to `step` that the row
  // missed, `step` included. hyper: [tables, 2]. Rows in bfloat16 are then rounded, as in a push.
  Status CatchUp(const RowHyper* hyper, int64_t step, const ParallelFor& parallel_for);

  // Both are for checkpoints. linear [n, linear_floats]: weight, then state; last_step [n];
  // factors[t] [admitted keys of table t, row_size], float32 or bfloat16 like the table's rows, in
  // the order of the keys: weights, then state. admitted [n]: from FeatureTable::Export.
  //
  // ExportRows reads 0 for an absent key; for an admitted feature that was never pushed, it reads
  // the initial factors and state 0.
  Status ExportRows(const int64_t* keys, const bool* admitted, int64_t n, float* linear,
                    int32_t* last_step, const std::vector<char*>& factors) const;
  // ImportRows: InvalidArgument if a key is absent, or had factors before.
  Status ImportRows(const int64_t* keys, const bool* admitted, int64_t n, const float* linear,
                    const int32_t* last_step, const std::vector<const char*>& factors);

  // How many bytes the store has allocated beside the feature table.
  int64_t Bytes() const;
  // How many features lie on disk.
  int64_t ColdSize() const;

 private:
  // The payload behind a Feature; the state of the linear weight follows.
  struct Head {
    int32_t factor_row;  // row + 1 within (shard, table); 0: none
    int32_t last_step;   // the step of the last push; 0: none yet, so no state is initialised
    float linear;

    float* state() { return &linear + 1; }
  };
  static Head* HeadOf(Feature* feature) { return reinterpret_cast<Head*>(feature + 1); }
  // The factor rows of one (shard, table), which the shard's lock guards.
  struct FactorRows {
    std::vector<char*> chunks;
    int32_t end = 0;    // rows [0, end) are in use or free
    int32_t free = -1;  // the first free row; a free row begins with the number of the next
  };
  struct ShardRows {
    std::vector<FactorRows> tables;
    int64_t changes = 0;  // how many times factor rows were freed or moved
  };

  // Returns the address of a factor row.
  char* Row(int shard, int table, int32_t row) const {
    const int bits = chunk_bits_[table];
    return shards_[shard].tables[table].chunks[row >> bits] +
           static_cast<int64_t>(row & ((1 << bits) - 1)) * stride_[table];
  }
  // Makes the steps of this push or catch-up, [2 * tables]: for linear weights, for factors.
  // InvalidArgument if an optimizer cannot work with its hyperparameters.
  Status MakeSteps(const RowHyper* hyper, int64_t step, std::vector<RowStep>* steps) const;
  // Writes the initial factors [width], rounded to what the table's rows can hold.
  void InitialWeights(int64_t key, int table, float* w) const;
  int32_t AllocateRow(int shard, int table);
  void FreeRow(int shard, const Feature* feature, Head* head);
  // For each table: if that frees over a third of its chunks in the shard, or any with `all`, moves
  // rows together.
  void CompactRows(int shard, bool all);
  // The next five concern features on disk, and want the lock of the shard.
  size_t FileOf(const ColdFeature& cold) const;  // its index in cold_
  // Returns what to read of each file; the index of a row is that of its ref.
  std::vector<std::vector<ColdFile::Row>> ByFile(int shard, const std::vector<ColdRef>& refs) const;
  // Calls visit(ref, feature, factor row) for each, in the files' order. The feature, with its
  // payload, is as it would be had it been in memory since; the row is null if it has none.
  Status ReadCold(int shard, const std::vector<ColdRef>& refs,
                  const std::function<void(const ColdRef&, Feature*, const char*)>& visit) const;
  Status MakeHot(int shard, std::vector<ColdRef> refs);
  // Moves features to disk, those not seen for longest, until the others and their rows take at
  // most so many bytes.
  Status MakeCold(int shard, int64_t bytes);
  // Moves features to disk until the store and its table are within the limit. ResourceExhausted if
  // they cannot be.
  Status KeepLimit(const ParallelFor& parallel_for);
  Status CheckKeysAndTables(const int64_t* keys, int64_t n) const;
  // Returns whether a push is valid; if it is not, CheckPush says what is wrong.
  bool LooksRight(const RowPush& push, const ParallelFor& parallel_for) const;
  Status CheckPush(const RowPush& push) const;

  FeatureTable* const table_;
  const RowLayout layout_;
  std::vector<int> chunk_bits_;              // [tables]
  std::vector<int64_t> row_bytes_, stride_;  // [tables]; stride_: bytes from a row to the next
  int widest_bfloat16_ = 0;                  // how many numbers the longest row in bfloat16 has
  std::vector<std::unique_ptr<ChunkArena>> arenas_;  // [tables]
  std::vector<ShardRows> shards_;                    // [kShards]
  std::atomic<int64_t> row_bytes_in_memory_{0};      // of all chunks
  int64_t limit_ = 0;                                // bytes of memory; 0: none
  std::vector<std::unique_ptr<ColdFile>> cold_;      // [tables + 1], if there is a limit
  std::mutex limiting_;                              // is taken before a shard's lock
  int next_limited_ = 0;                             // the shard that MakeCold is called for next
  std::atomic<int64_t> share_{std::numeric_limits<int64_t>::max()};  // what a shard may have hot
};

}  // namespace ctr
