// Row optimizers: each takes one step on a part of a row, packed as [w[dim], state]. The table in
// row_optimizers.cc has an entry for each, with its formulas. Uses no TensorFlow.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ctr {

struct RowRule;  // one row optimizer

// Hyperparameters of one row part, in the order in which they travel in the `hyper` tensor.
struct RowHyper {
  float learning_rate;
  float initial_accumulator;
  float beta1;
  float beta2;
  float epsilon;
  float l1;
  float l2;
  float clip;         // the bound of each element of the scaled gradient; infinity: none
  float l2_catch_up;  // 0 or 1
};
// Of the steps that a row missed, at most this many are taken one by one.
constexpr int64_t kMostReplayed = 1024;
constexpr int kRowHyperFields = sizeof(RowHyper) / sizeof(float);

// What one step of one optimizer needs, computed once for a batch.
struct RowStep {
  const RowRule* rule;
  RowHyper hyper;
  bool catches_up;     // whether a row also takes the steps that it missed
  double log_l2_keep;  // log(1 - learning_rate * l2)
  std::vector<float>
      adam_rates;  // learning_rate with Adam's bias corrections, for this step, the one before, ...

  // `step` counts from 1.
  RowStep(const RowRule* rule, const RowHyper& hyper, int64_t step);
};

// Returns the optimizer of this name, such as "sgd"; null if there is none.
const RowRule* FindRowRule(const std::string& name);

// Returns the names of all optimizers, with commas between them.
std::string RowRuleNames();

// Describes the first hyperparameter that `rule` cannot work with; empty if there is none.
std::string CheckRowHyper(const RowRule* rule, const RowHyper& hyper);

// Returns how many floats of state follow `dim` weights.
int RowStateFloats(const RowRule* rule, int dim);

// Writes the initial state of a row whose weights are w[0:dim].
void InitRowState(const RowStep& step, int dim, const float* w, float* state);

// Takes the `missed` steps before this one, with only the penalty's gradient. Does nothing without
// l2_catch_up.
void TakeMissedSteps(const RowStep& step, int dim, int64_t missed, float* w, float* state);

// Adds difference[0:dim] to w[0:dim]. The state stays, except FTRL's z, which follows the weights.
void AddToRow(const RowStep& step, int dim, const float* difference, float* w, float* state);

// Takes the `missed` steps, then one step on w[0:dim] and its state.
void UpdateRow(const RowStep& step, int dim, int64_t missed, float scale, const float* gradient,
               float* w, float* state);

}  // namespace ctr
