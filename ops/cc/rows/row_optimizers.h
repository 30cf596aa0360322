// Row optimizers: one step of gradient descent on a packed row part, [w[dim], state]. Each is an
// entry of the table in row_optimizers.cc, which has the formulas. TensorFlow-free.
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
  float clip;         // of each element of the scaled gradient; infinity: none
  float l2_catch_up;  // 0 or 1
};
constexpr int64_t kMostReplayed = 1024;
constexpr int kRowHyperFields = sizeof(RowHyper) / sizeof(float);

// What one step of one optimizer needs, computed once a batch.
struct RowStep {
  const RowRule* rule;
  RowHyper hyper;
  bool catches_up;     // a row takes the steps that it missed
  double log_l2_keep;  // log(1 - learning_rate * l2)
  std::vector<float>
      adam_rates;  // learning_rate with Adam's bias corrections, of this step, the step before, ...

  // `step` counts from 1.
  RowStep(const RowRule* rule, const RowHyper& hyper, int64_t step);
};

// The optimizer of this name, as in "sgd"; null where there is none.
const RowRule* FindRowRule(const std::string& name);

// The names of all optimizers, with commas between them.
std::string RowRuleNames();

// Describes the first hyperparameter that `rule` cannot work with; empty where it can with all.
std::string CheckRowHyper(const RowRule* rule, const RowHyper& hyper);

// Floats of state that follow `dim` weights.
int RowStateFloats(const RowRule* rule, int dim);

// Writes the state of a fresh row whose weights are w[0:dim].
void InitRowState(const RowStep& step, int dim, const float* w, float* state);

// Takes the `missed` steps before this one, with the penalty's gradient alone. Does nothing
// without l2_catch_up.
void TakeMissedSteps(const RowStep& step, int dim, int64_t missed, float* w, float* state);

// Adds difference[0:dim] to w[0:dim]. No state moves but FTRL's z.
void AddToRow(const RowStep& step, int dim, const float* difference, float* w, float* state);

// One step on w[0:dim] and its state, after those that the row missed since its last touch.
void UpdateRow(const RowStep& step, int dim, int64_t missed, float scale, const float* gradient,
               float* w, float* state);

}  // namespace ctr
