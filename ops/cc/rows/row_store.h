// Rows: what is trained of each feature of a feature table. TensorFlow-free.
//
// The linear weight and its optimizer state lie behind the feature's lifecycle fields, as the
// table's payload.
//
// Memory: factor rows (weights, then state) exist after admission, in chunks of each (shard,
// table). An evicted feature's row is used again, and chunks that an eviction empties are given
// back.
//
// bfloat16: all of a table's factor rows, state included, may be kept in it, which halves them.
// What leaves the store and what a step works on is float32; a step's result is rounded by chance,
// from (seed, key, step, element), so that small gains are kept in the mean, whatever the number of
// processes and restarts. Initial rows are rounded to nearest. The linear weight is float32 always.
//
// Locks: all of a feature, its factor row included, is guarded by its shard's lock in the feature
// table. Every verb takes each shard's lock at most twice and holds one at a time.
//
// Batches: keys come in any order and may repeat (they take their turns); a batch grouped by shard
// is fastest. A verb that fails has changed nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ops/cc/lifecycle/feature_table.h"
#include "ops/cc/lifecycle/parallel.h"
#include "ops/cc/lifecycle/status.h"
#include "ops/cc/rows/row_optimizers.h"

namespace ctr {

// Rows of one layout.
struct RowTable {
  int width = 0;  // factors; 0: linear weights only
  float init_scale = 0.0f;
  const RowRule* linear = FindRowRule("sgd");
  const RowRule* factors = FindRowRule("sgd");
  bool bfloat16 = false;  // factor rows are kept in it, else in float32

  // Numbers of a factor row.
  int row_size() const { return width == 0 ? 0 : width + RowStateFloats(factors, width); }
  int64_t row_bytes() const {
    return row_size() * static_cast<int64_t>(bfloat16 ? sizeof(uint16_t) : sizeof(float));
  }
};

struct RowLayout {
  std::vector<RowTable> tables;
  std::vector<int> slot_table;  // of each slot; -1 or beyond the end: the slot has no rows
  uint64_t seed = 0;            // of the initial factors and the rounding

  int TableOf(int64_t key) const {
    const size_t slot = static_cast<size_t>(SlotOf(key));
    return slot < slot_table.size() ? slot_table[slot] : -1;
  }
  // Floats of linear weight and state that every feature has room for.
  int linear_floats() const;
  // What is wrong, or empty.
  std::string Check() const;
};

// What a push carries for distinct keys j in [0, n).
struct RowPush {
  int64_t n = 0;
  const int64_t* keys = nullptr;
  const int64_t* ids = nullptr;  // of the pull: hints, checked
  const int32_t* offsets =
      nullptr;  // [n + 1] of the pull; j's factors are trained where its range is not empty
  const float* shows = nullptr;  // summed over the batch
  const float* clicks = nullptr;
  const float* linear_grad = nullptr;   // [n]
  const float* factors_grad = nullptr;  // [offsets[n]]
  const float* scale = nullptr;         // [scale_n], 1 or n: multiplies the gradients
  int64_t scale_n = 0;
  const RowHyper* hyper = nullptr;  // [tables, 2]: linear, factors
  int64_t step = 0;                 // the global step, from 1
  bool add = false;  // the gradients are differences to add to the weights instead (AddToRow)
};

class RowStore {
 public:
  static int64_t PayloadBytes(const RowLayout& layout) {
    return 2 * sizeof(int32_t) + sizeof(float) * layout.linear_floats();
  }

  // table: with payloads of PayloadBytes(layout), not used before, living as long as the store.
  // Sets its on_erase.
  RowStore(FeatureTable* table, RowLayout layout);

  const RowLayout& layout() const { return layout_; }

  // Reads and changes nothing. ids [n]: -1 where absent. offsets [n + 1].
  // allocate_factors(offsets[n]) gives the memory for the factors, or null to stop (then Pull
  // returns). Not admitted: no factors; absent: linear 0 too. With admission `none` and train:
  // initial factors for those that have none yet.
  Status Pull(const int64_t* keys, int64_t n, bool train, const ParallelFor& parallel_for,
              int64_t* ids, int32_t* offsets, float* linear,
              const std::function<float*(int64_t)>& allocate_factors);

  // Under its shard's lock, for each key: creates it where absent, one step on the linear weight
  // and, where the pull had factors and the feature still has, on those; then observes, and gives
  // what is newly admitted its initial factors, which this push does not train. With admission
  // `none` a new feature's factors exist, and are trained, at once. OutOfRange naming
  // argument, key and value for a gradient or scale that is not finite; InvalidArgument for what
  // FeatureTable::Observe refuses.
  Status Push(const RowPush& push, const ParallelFor& parallel_for);

  // Takes, on every row, the steps up to and with `step` that the row missed, where its optimizer
  // has l2_catch_up. hyper: [tables, 2]. Rows in bfloat16 are rounded then, as by a push.
  Status CatchUp(const RowHyper* hyper, int64_t step, const ParallelFor& parallel_for);

  // For checkpoints. linear [n, linear_floats]: weight, then state; last_step [n]; factors[t]
  // [admitted keys of table t, row_size], float32 or bfloat16 as the table is, in the keys' order:
  // weights, then state. admitted [n]: as FeatureTable::Export gave it. Export: absent keys read 0;
  // an admitted feature that never was pushed reads its initial factors and zero state.
  Status ExportRows(const int64_t* keys, const bool* admitted, int64_t n, float* linear,
                    int32_t* last_step, const std::vector<char*>& factors) const;
  // InvalidArgument where a key is absent or has factors already.
  Status ImportRows(const int64_t* keys, const bool* admitted, int64_t n, const float* linear,
                    const int32_t* last_step, const std::vector<const char*>& factors);

  // What the store allocated beside the feature table.
  int64_t Bytes() const;

 private:
  // Behind a Feature. State of the linear weight follows.
  struct Head {
    int32_t factor_row;  // row + 1 within (shard, table); 0: none
    int32_t last_step;   // of the last push; 0: none yet, the state is not initialised
    float linear;

    float* state() { return &linear + 1; }
  };
  // Factor rows of one (shard, table). The shard's lock guards it.
  struct FactorRows {
    std::vector<char*> chunks;
    int32_t end = 0;    // rows [0, end) were handed out
    int32_t free = -1;  // first free one; a free row starts with the next one's number
  };
  struct ShardRows {
    std::vector<FactorRows> tables;
    int64_t changes = 0;  // counts where factor rows were freed or moved
  };

  // A factor row as it is kept.
  char* Row(int shard, int table, int32_t row) const {
    const int bits = chunk_bits_[table];
    return shards_[shard].tables[table].chunks[row >> bits] +
           static_cast<int64_t>(row & ((1 << bits) - 1)) * stride_[table];
  }
  // The steps of this push or catch-up, [2 * tables]: linear, factors. InvalidArgument where an
  // optimizer cannot work with its hyperparameters.
  Status MakeSteps(const RowHyper* hyper, int64_t step, std::vector<RowStep>* steps) const;
  // Initial factors, as the table's rows hold them. [width]
  void InitialWeights(int64_t key, int table, float* w) const;
  int32_t AllocateRow(int shard, int table);
  void FreeRow(int shard, const Feature* feature, Head* head);
  // Moves the factor rows of each table together where that frees over a third of its chunks.
  void CompactRows(int shard);
  Status CheckKeysAndTables(const int64_t* keys, int64_t n) const;
  // Whether a push can be; where not, CheckPush says what is wrong.
  bool LooksRight(const RowPush& push, const ParallelFor& parallel_for) const;
  Status CheckPush(const RowPush& push) const;

  FeatureTable* const table_;
  const RowLayout layout_;
  std::vector<int> chunk_bits_;                      // [tables]
  std::vector<int64_t> row_bytes_, stride_;          // [tables]; stride_: from a row to the next
  int widest_bfloat16_ = 0;                          // the most numbers of a row in bfloat16
  std::vector<std::unique_ptr<ChunkArena>> arenas_;  // [tables]
  std::vector<ShardRows> shards_;                    // [kShards]
};

}  // namespace ctr
