// Row optimizers: one step of gradient descent on a packed row part, [w[dim], state].
// TensorFlow-free.
//
// clang-format off
// Around every kind, per element and in this order:
//   1. g = clip(scale * gradient)   clip bounds the data's gradient, not the penalty's
//   2. g += l2 * w                  the penalty l2/2 * |w|^2, paid when the row is touched (not FTRL,
//                                   which has it in its own step)
//   3. the kind's own step, of the table below
//   4. w = sign(w) * max(|w| - learning_rate * l1, 0)   soft threshold where l1 > 0 (not FTRL)
//
// With l2_catch_up, the steps that the row missed since its last touch are taken first, one by one,
// with the penalty's gradient alone: just what a dense optimizer with a penalty on the whole table
// does (Adam's momentum included). Of more than kMostReplayed steps the oldest are taken as
// gradient descent, w *= 1 - lr * l2 each, which for sgd is exact anyhow.
//
// kind         state          step (lr = learning_rate, eps = epsilon)
// sgd          -              w -= lr * g
// adagrad      n[dim]         n += g^2; w -= lr * g / (sqrt(n) + eps)
//                             n starts at initial_accumulator (Duchi et al. 2011, as Keras' legacy
//                             Adagrad)
// adagrad_row  n[1]           w -= lr * g * sqrt(a / (a + n)), a = initial_accumulator
//                             n += mean(g^2), from 0 (PaddlePaddle's SparseAdaGradSGDRule)
// adam         m[dim] v[dim]  m += (1 - beta1) * (g - m); v += (1 - beta2) * (g^2 - v)
//                             w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)
//                             Lazy without l2_catch_up: m, v and w move only when the row is
//                             touched; t is the global step. (Kingma and Ba 2015; on a row touched
//                             at every step, Keras' legacy Adam)
// ftrl         n[dim] z[dim]  n' = n + g^2; z += g - (n'^-p - n^-p) / lr * w, p = learning_rate_power
//                             w = |z| <= l1 ? 0 : (sign(z) * l1 - z) / ((beta + n'^-p) / lr + l2)
//                             FTRL-proximal (McMahan et al. 2013; Keras' Ftrl with
//                             l2_regularization_strength l2 / 2). z starts such that the initial
//                             weights solve the last line: factors keep their value. So do weights
//                             that a difference was added to. Where w is not 0, z is taken from it,
//                             by the last line at n', which is the same while lr is; when lr falls,
//                             weights stay where they are, as under the other rules.
// rmsprop      v[dim]         v += (1 - beta2) * (g^2 - v); w -= lr * g / (sqrt(v) + eps)
//                             (Keras' legacy RMSprop)
// clang-format on
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ctr {

enum class RowOptimizerKind { kSgd, kAdagrad, kAdagradRow, kAdam, kFtrl, kRmsprop };

// Hyperparameters of one row part, in the order in which they travel in the `hyper` tensor.
struct RowHyper {
  float learning_rate;
  float initial_accumulator;
  float beta1;
  float beta2;
  float epsilon;
  float learning_rate_power;
  float beta;
  float l1;
  float l2;
  float l2_catch_up;  // 0 or 1
  float clip;         // of each element of the scaled gradient; infinity: none
};
constexpr int64_t kMostReplayed = 1024;
constexpr int kRowHyperFields = sizeof(RowHyper) / sizeof(float);

// What one step of one optimizer needs, computed once a batch.
struct RowStep {
  RowOptimizerKind kind;
  RowHyper hyper;
  bool catches_up;     // a row takes the steps that it missed
  double log_l2_keep;  // log(1 - learning_rate * l2)
  std::vector<float>
      adam_rates;  // learning_rate with Adam's bias corrections, of this step, the step before, ...

  // `step` counts from 1.
  RowStep(RowOptimizerKind kind, const RowHyper& hyper, int64_t step);
};

// "sgd", "adagrad", "adagrad_row", "adam", "ftrl" or "rmsprop"; false for another name.
bool ParseRowOptimizer(const std::string& name, RowOptimizerKind* kind);

// The first hyperparameter that `kind` cannot work with, described in a phrase; empty where all is
// well.
std::string CheckRowHyper(RowOptimizerKind kind, const RowHyper& hyper);

// Floats of state that follow `dim` weights.
int RowStateFloats(RowOptimizerKind kind, int dim);

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
