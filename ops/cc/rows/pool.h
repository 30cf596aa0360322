// Pooling: adds up the rows of distinct features to slot sums of a batch; and the gradient of this.
//
// clang-format off
// A row's factors are the concatenation of its table's parts: a plain part has D columns (fm, dnn),
// a field part F*D, D for each field of the batch (ffm). For sample b, field f and its features i
// with values x_i, weights w_i and factors v_i:
//   linear [b, f]               = sum_i x_i w_i
//   norm [b, f]                 = sum_i x_i (mean) or sqrt(sum_i x_i^2) (sqrt-n); 1 if f is summed or
//                                 empty; infinite if it would be 0
//   slots of a part [b, f']     = sum_i x_i v_i; f' is f's place among its table's fields
//   totals of a part [b]        = sum_f sum_i x_i v_i
//   squares of a part [b]       = sum_f sum_i x_i^2 |v_i|^2; in a field part, over the columns of f
//                                 itself only
// clang-format on
// fm reads only totals and squares: if nothing else reads the part, its slots are not computed.
// Features without factors add 0. The fields of one table are neighbours.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/cc/lifecycle/parallel.h"

namespace ctr {

struct PoolPart {
  int table = 0;
  int width = 0;        // D
  bool field = false;   // whether it is a field part, of F*D columns
  bool slots = true;    // whether to compute slots
  bool totals = false;  // whether to compute totals and squares of a plain part
  int columns = 0;      // D or F*D
  int begin = 0;        // first column in the table's rows

  bool squares() const { return field || totals; }
};

enum class Pooling { kSum, kMean, kSqrtN };

// What stays the same from batch to batch.
struct PoolLayout {
  std::vector<int> table_of_field;  // [F], ascending
  std::vector<Pooling> poolings;    // [F]; empty: norm is not computed
  std::vector<bool> averaged;       // [F]: whether values are divided, see Average; empty: none are
  std::vector<PoolPart> parts;      // by table, in the order of a row's columns
  std::vector<int> first_field;     // [T], for each of T tables; so are the next two
  std::vector<int> fields;          // [T]
  std::vector<int> row_width;       // [T]
  std::vector<int> first_part;      // [T + 1]

  int64_t num_fields() const { return static_cast<int64_t>(table_of_field.size()); }
  // Computes the other members from table_of_field and each part's table, width, field, slots and
  // totals. Returns what is wrong with these; empty if nothing.
  std::string Complete();
};

// One batch. If `segments` is null, every sample has one feature of value 1 in each field, and n is
// batch * F.
struct PoolBatch {
  int64_t batch = 0;
  int64_t n = 0;                      // occurrences
  int64_t u = 0;                      // distinct features
  const int32_t* segments = nullptr;  // [n] sample * F + field, ascending
  const float* values = nullptr;      // [n]; null: all 1
  const int32_t* offsets = nullptr;   // [u + 1]
  const float* factors = nullptr;     // [offsets[u]]
};

// Returns what is wrong with segments or offsets; empty if nothing. Call it before the functions
// below. factors_n: the length of factors.
std::string CheckPoolBatch(const PoolLayout& layout, const PoolBatch& batch, int64_t factors_n);

// Writes the values of a batch with segments, [n]. In an averaged field, those of each sample are
// divided by their number. Call it after CheckPoolBatch, with a layout that has `averaged`.
void Average(const PoolLayout& layout, const PoolBatch& batch, float* values);

// Where Pool writes its results; null: this one is not computed.
struct PoolOutputs {
  float* linear = nullptr;      // [batch, F]
  float* norm = nullptr;        // [batch, F]
  std::vector<float*> slots;    // [parts]: [batch, fields of its table, columns]
  std::vector<float*> totals;   // [parts]: [batch, columns]
  std::vector<float*> squares;  // [parts]: [batch]
};
// Returns false if an index in `inverse` is out of range, or a row does not have its table's width;
// the results are then undefined.
bool Pool(const PoolLayout& layout, const PoolBatch& batch, const float* linear,
          const int32_t* inverse, const ParallelFor& parallel_for, const PoolOutputs& out);

// The gradients with respect to the results; null: 0.
struct PoolGradients {
  const float* linear = nullptr;
  std::vector<const float*> slots;
  std::vector<const float*> totals;
  std::vector<const float*> squares;
};
// Writes the gradients with respect to linear [u] and factors [offsets[u]]. For each distinct
// feature it sums over its occurrences in their order; threads share no row.
//
// starts: [u + 1], from 0 to n: feature j has starts[j + 1] - starts[j] occurrences. They share the
// work out evenly and have no effect on the result.
//
// Returns false as Pool does.
bool PoolGradient(const PoolLayout& layout, const PoolBatch& batch, const PoolGradients& gradients,
                  const int32_t* inverse, const int32_t* starts, const ParallelFor& parallel_for,
                  float* linear, float* factors);

}  // namespace ctr
