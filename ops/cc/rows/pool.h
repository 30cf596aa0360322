// Pooling: rows of distinct features -> slot sums of a batch, and the gradient back.
//
// clang-format off
// A row's factors are the concatenation of its table's parts: a plain part has D columns (fm, dnn),
// a field part F*D, D for each field of the batch (ffm). For sample b, field f and its features i
// with values x_i, weights w_i and factors v_i:
//   linear [b, f]               = sum_i x_i w_i
//   norm [b, f]                 = sum_i x_i (mean) or sqrt(sum_i x_i^2) (sqrt-n); 1 where f is summed
//                                 or empty; infinite where it would be 0
//   slots of a part [b, f']     = sum_i x_i v_i; f' is f's place among its table's fields
//   totals of a part [b]        = sum_f sum_i x_i v_i
//   squares of a part [b]       = sum_f sum_i x_i^2 |v_i|^2; of a field part, over the columns of f
//                                 itself only
// clang-format on
// Totals and squares are all that fm reads: where nothing else reads the part, its slots are never
// written. Features without factors add 0. Fields are in canonical order: those of one table are
// neighbours.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/cc/lifecycle/parallel.h"

namespace ctr {

struct PoolPart {
  int table = 0;
  int width = 0;        // D
  bool field = false;   // F*D columns
  bool slots = true;    // wanted
  bool totals = false;  // wanted, of a plain part; its squares come along
  int columns = 0;      // D or F*D
  int begin = 0;        // first column in the table's rows

  bool squares() const { return field || totals; }
};

enum class Pooling { kSum, kMean, kSqrtN };

// What stays the same from batch to batch.
struct PoolLayout {
  std::vector<int> table_of_field;  // [F], ascending
  std::vector<Pooling> poolings;    // [F], or empty: norm is not wanted
  std::vector<PoolPart> parts;      // by table, in the order of a row's columns
  std::vector<int> first_field;     // [T], of each table
  std::vector<int> fields;          // [T]
  std::vector<int> row_width;       // [T]
  std::vector<int> first_part;      // [T + 1]

  int64_t num_fields() const { return static_cast<int64_t>(table_of_field.size()); }
  // Fills the rest from table_of_field and each part's table, width, field, slots and totals. What
  // is wrong, or empty.
  std::string Complete();
};

// One batch. Where `segments` is null every sample has one feature of value 1 in each field, and n
// = batch * F.
struct PoolBatch {
  int64_t batch = 0;
  int64_t n = 0;                      // occurrences
  int64_t u = 0;                      // distinct features
  const int32_t* segments = nullptr;  // [n] sample * F + field, ascending
  const float* values = nullptr;      // [n]; null: all 1
  const int32_t* offsets = nullptr;   // [u + 1]
  const float* factors = nullptr;     // [offsets[u]]
};

// What is wrong with segments or offsets, or empty. `factors_n`: length of factors. Before the
// functions below.
std::string CheckPoolBatch(const PoolLayout& layout, const PoolBatch& batch, int64_t factors_n);

// Where null, a result is not wanted. False where an inverse is out of range or a row has not its
// table's width; then the results mean nothing.
struct PoolOutputs {
  float* linear = nullptr;      // [batch, F]
  float* norm = nullptr;        // [batch, F]
  std::vector<float*> slots;    // [parts]: [batch, fields of its table, columns]
  std::vector<float*> totals;   // [parts]: [batch, columns]
  std::vector<float*> squares;  // [parts]: [batch]
};
bool Pool(const PoolLayout& layout, const PoolBatch& batch, const float* linear,
          const int32_t* inverse, const ParallelFor& parallel_for, const PoolOutputs& out);

// Gradients of the results; null: none.
struct PoolGradients {
  const float* linear = nullptr;
  std::vector<const float*> slots;
  std::vector<const float*> totals;
  std::vector<const float*> squares;
};
// Sums, for each distinct feature, over its occurrences order[starts[j]:starts[j + 1]], in that
// order: threads share no row. Writes linear [u] and factors [offsets[u]]. False as above, or where
// starts or order is out of range.
bool PoolGradient(const PoolLayout& layout, const PoolBatch& batch, const PoolGradients& gradients,
                  const int32_t* starts, const int32_t* order, const ParallelFor& parallel_for,
                  float* linear, float* factors);

}  // namespace ctr
