// clang-format off
#include "ops/cc/rows/multiversion.h"  // first
// clang-format on
#include "ops/cc/rows/row_optimizers.h"

#include <algorithm>
#include <cmath>

#include "ops/cc/rows/square_roots.h"

// clang-format off
// A new optimizer needs a function beside those below, a Kind, a line in kRules, a case in StepBlock, and an
// entry in ops/row_kinds.py.
//
// What happens with every kind, for each element, in this order:
//   1. g = clip(scale * gradient)   clip bounds the gradient from the data, not from the penalty
//   2. g += l2 * w                  the gradient of the penalty l2/2 * |w|^2, when the row is in a batch
//                                   (FTRL has the penalty in its own step)
//   3. the kind's own step, see the table below
//   4. w = sign(w) * max(|w| - learning_rate * l1, 0)   soft threshold where l1 > 0 (not FTRL)
//
// With l2_catch_up, the steps that the row missed since its last batch are taken first, one by one,
// with only the penalty's gradient: a dense optimizer with a penalty on the whole table takes the same
// steps (Adam's momentum included). If there are more than kMostReplayed of them, the oldest are taken
// as gradient descent, w *= 1 - lr * l2 in each, which is exact for sgd.
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
//                             Lazy without l2_catch_up: m, v and w change only when the row is in
//                             a batch; t is the global step. (Kingma and Ba 2015; for a row that
//                             is in every batch, Keras' legacy Adam)
// ftrl         n[dim] z[dim]  n' = n + g^2; z += g - (sqrt(n') - sqrt(n)) / lr * w
//                             w = |z| <= l1 ? 0 : (sign(z) * l1 - z) / (sqrt(n') / lr + l2)
//                             FTRL-proximal (McMahan et al. 2013; Keras' Ftrl with
//                             l2_regularization_strength l2 / 2). z starts such that the last line
//                             gives the initial weights, so that factors keep their values; adding
//                             a difference to a weight sets z in the same way. If w is not 0, a
//                             step computes z as g plus the z from which the last line, with n',
//                             gives w. While lr is constant, this is the same; when lr falls,
//                             weights stay where they are, as with the other rules.
// rmsprop      v[dim]         v += (1 - beta2) * (g^2 - v); w -= lr * g / (sqrt(v) + eps)
//                             (Keras' legacy RMSprop)
// clang-format on
namespace ctr {
namespace {

enum class Kind { kSgd, kAdagrad, kAdagradRow, kAdam, kFtrl, kRmsprop };

constexpr int kBlock = 32;  // how many elements are computed at a time, on the stack

// Functors that take one step on a block of n <= kBlock elements with gradients g.
CTR_INLINE void Sgd(const RowHyper& h, int n, const float* __restrict g, float* __restrict w) {
  for (int i = 0; i < n; ++i) w[i] -= h.learning_rate * g[i];
}

CTR_INLINE void Adagrad(const RowHyper& h, int n, const float* __restrict g, float* __restrict w,
                        float* __restrict acc) {
  float root[kBlock];
  for (int i = 0; i < n; ++i) root[i] = acc[i] = acc[i] + g[i] * g[i];
  SquareRoots(n, root);
  for (int i = 0; i < n; ++i) w[i] -= h.learning_rate * g[i] / (root[i] + h.epsilon);
}

CTR_INLINE void Adam(const RowHyper& h, float rate, int n, const float* __restrict g,
                     float* __restrict w, float* __restrict m, float* __restrict v) {
  const float move1 = 1.0f - h.beta1, move2 = 1.0f - h.beta2;
  float root[kBlock];
  for (int i = 0; i < n; ++i) m[i] += move1 * (g[i] - m[i]);
  for (int i = 0; i < n; ++i) root[i] = v[i] = v[i] + move2 * (g[i] * g[i] - v[i]);
  SquareRoots(n, root);
  for (int i = 0; i < n; ++i) w[i] -= rate * m[i] / (root[i] + h.epsilon);
}

CTR_INLINE void Rmsprop(const RowHyper& h, int n, const float* __restrict g, float* __restrict w,
                        float* __restrict v) {
  const float move = 1.0f - h.beta2;
  float root[kBlock];
  for (int i = 0; i < n; ++i) root[i] = v[i] = v[i] + move * (g[i] * g[i] - v[i]);
  SquareRoots(n, root);
  for (int i = 0; i < n; ++i) w[i] -= h.learning_rate * g[i] / (root[i] + h.epsilon);
}

CTR_INLINE void Ftrl(const RowHyper& h, int n, const float* __restrict g, float* __restrict w,
                     float* __restrict acc, float* __restrict z) {
  float root[kBlock];
  for (int i = 0; i < n; ++i) root[i] = acc[i] = acc[i] + g[i] * g[i];
  SquareRoots(n, root);
  for (int i = 0; i < n; ++i) {
    const float denominator = root[i] / h.learning_rate + h.l2;
    const float of_weight = -w[i] * denominator - std::copysign(h.l1, w[i]);
    z[i] = g[i] + (w[i] == 0.0f ? z[i] : of_weight);
    const float solved = (std::copysign(h.l1, z[i]) - z[i]) / denominator;
    w[i] = std::abs(z[i]) <= h.l1 ? 0.0f : solved;
  }
}

// Sets z so that w follows from it. A weight of 0 follows from every z in [-l1, l1].
void SolveFtrl(const RowHyper& h, int n, const float* w, const float* acc, float* z) {
  if (h.learning_rate == 0.0f) return;  // then no step reads z
  for (int i = 0; i < n; ++i) {
    const float denominator = std::sqrt(acc[i]) / h.learning_rate + h.l2;
    z[i] = w[i] == 0.0f ? std::clamp(z[i], -h.l1, h.l1)
                        : -w[i] * denominator - std::copysign(h.l1, w[i]);
  }
}

}  // namespace

struct RowRule {
  const char* name;
  Kind kind;
  int state_per_weight;  // floats of state for each weight
  int state_per_row;     // floats of state for a row, whatever its width
};

namespace {

constexpr RowRule kRules[] = {
    {"sgd", Kind::kSgd, 0, 0},
    {"adagrad", Kind::kAdagrad, 1, 0},
    {"adagrad_row", Kind::kAdagradRow, 0, 1},
    {"adam", Kind::kAdam, 2, 0},
    {"ftrl", Kind::kFtrl, 2, 0},
    {"rmsprop", Kind::kRmsprop, 1, 0},
};

}  // namespace

const RowRule* FindRowRule(const std::string& name) {
  for (const RowRule& rule : kRules) {
    if (name == rule.name) return &rule;
  }
  return nullptr;
}

std::string RowRuleNames() {
  std::string names;
  for (const RowRule& rule : kRules) names += (names.empty() ? "" : ", ") + std::string(rule.name);
  return names;
}

RowStep::RowStep(const RowRule* rule, const RowHyper& hyper, int64_t step)
    : rule(rule), hyper(hyper) {
  catches_up = hyper.l2_catch_up != 0.0f &&
               rule->kind != Kind::kFtrl;  // FTRL's weights follow from its sums
  log_l2_keep =
      std::log(std::max(1.0 - static_cast<double>(hyper.learning_rate) * hyper.l2, 1e-30));
  const int64_t last = std::max<int64_t>(step, 1);
  const bool replays = catches_up && rule->kind == Kind::kAdam;
  for (int64_t t = last; t >= std::max<int64_t>(1, replays ? last - kMostReplayed : last); --t) {
    const double left1 = 1.0 - std::pow(static_cast<double>(hyper.beta1), static_cast<double>(t));
    const double left2 = 1.0 - std::pow(static_cast<double>(hyper.beta2), static_cast<double>(t));
    adam_rates.push_back(static_cast<float>(hyper.learning_rate * std::sqrt(left2) / left1));
  }
}

std::string CheckRowHyper(const RowRule* rule, const RowHyper& h) {
  const Kind kind = rule->kind;
  const auto wrong = [](const char* name, float found, const char* wanted) {
    return std::string(name) + ": found " + std::to_string(found) + "; wanted " + wanted;
  };
  const auto non_negative = [](float x) { return x >= 0.0f && std::isfinite(x); };
  if (!non_negative(h.learning_rate))
    return wrong("learning_rate", h.learning_rate, "a finite number >= 0");
  if (!non_negative(h.initial_accumulator)) {
    return wrong("initial_accumulator", h.initial_accumulator, "a finite number >= 0");
  }
  if (kind == Kind::kAdagradRow && h.initial_accumulator == 0.0f) {
    return wrong("initial_accumulator", h.initial_accumulator, "a number > 0 for adagrad_row");
  }
  if (kind == Kind::kAdam && !(h.beta1 >= 0.0f && h.beta1 < 1.0f)) {
    return wrong("beta1", h.beta1, "a number in [0, 1)");
  }
  if ((kind == Kind::kAdam || kind == Kind::kRmsprop) && !(h.beta2 >= 0.0f && h.beta2 < 1.0f)) {
    return wrong("beta2", h.beta2, "a number in [0, 1)");
  }
  if (!non_negative(h.epsilon)) return wrong("epsilon", h.epsilon, "a finite number >= 0");
  if (!non_negative(h.l1)) return wrong("l1", h.l1, "a finite number >= 0");
  if (!non_negative(h.l2)) return wrong("l2", h.l2, "a finite number >= 0");
  if (!(h.clip > 0.0f)) return wrong("clip", h.clip, "a number > 0, infinity for none");
  return "";
}

int RowStateFloats(const RowRule* rule, int dim) {
  return rule->state_per_weight * dim + rule->state_per_row;
}

void InitRowState(const RowStep& step, int dim, const float* w, float* state) {
  const RowHyper& h = step.hyper;
  const bool accumulates = step.rule->kind == Kind::kAdagrad || step.rule->kind == Kind::kFtrl;
  std::fill_n(state, RowStateFloats(step.rule, dim), 0.0f);
  if (accumulates) std::fill_n(state, dim, h.initial_accumulator);
  if (step.rule->kind == Kind::kFtrl) SolveFtrl(h, dim, w, state, state + dim);
}

void AddToRow(const RowStep& step, int dim, const float* difference, float* w, float* state) {
  for (int i = 0; i < dim; ++i) w[i] += difference[i];
  if (step.rule->kind == Kind::kFtrl) SolveFtrl(step.hyper, dim, w, state, state + dim);
}

// Takes one step on a block of n <= kBlock elements. Their state begins at state[0], for Adam and
// FTRL also at state[dim]. gradient: null: only the penalty has one. For adagrad_row, returns the
// block's sum of squared gradients, which the caller adds up.
CTR_INLINE float StepBlock(const RowStep& step, float adam_rate, float row_rate, int n, int dim,
                           float scale, const float* __restrict gradient, float* __restrict w,
                           float* __restrict state) {
  const RowHyper& h = step.hyper;
  const float l2 = step.rule->kind == Kind::kFtrl ? 0.0f : h.l2;
  float g[kBlock];
  float squares = 0.0f;
  if (gradient == nullptr) {
    for (int i = 0; i < n; ++i) g[i] = l2 * w[i];
  } else {
    for (int i = 0; i < n; ++i)
      g[i] = std::min(std::max(scale * gradient[i], -h.clip), h.clip) + l2 * w[i];
  }
  switch (step.rule->kind) {
    case Kind::kSgd:
      Sgd(h, n, g, w);
      break;
    case Kind::kAdagrad:
      Adagrad(h, n, g, w, state);
      break;
    case Kind::kAdagradRow:
      for (int i = 0; i < n; ++i) w[i] -= row_rate * g[i];
      for (int i = 0; i < n; ++i) squares += g[i] * g[i];
      break;
    case Kind::kAdam:
      Adam(h, adam_rate, n, g, w, state, state + dim);
      break;
    case Kind::kFtrl:
      Ftrl(h, n, g, w, state, state + dim);
      break;
    case Kind::kRmsprop:
      Rmsprop(h, n, g, w, state);
      break;
  }
  if (h.l1 > 0.0f && step.rule->kind != Kind::kFtrl) {
    const float cut = h.learning_rate * h.l1;
    for (int i = 0; i < n; ++i) w[i] = std::copysign(std::max(std::abs(w[i]) - cut, 0.0f), w[i]);
  }
  return squares;
}

// Takes one step on a whole part of a row. gradient: null: only the penalty has one.
CTR_MULTIVERSION
void TakeStep(const RowStep& step, float adam_rate, int dim, float scale, const float* gradient,
              float* w, float* state) {
  const RowHyper& h = step.hyper;
  const bool by_row = step.rule->kind == Kind::kAdagradRow;
  const float row_rate =
      by_row
          ? h.learning_rate * std::sqrt(h.initial_accumulator / (h.initial_accumulator + state[0]))
          : 0.0f;
  float squares = 0.0f;
  if (dim == 1) {  // linear weights: a constant size makes plain scalar code
    squares = StepBlock(step, adam_rate, row_rate, 1, 1, scale, gradient, w, state);
  } else if (dim == 16) {
    squares = StepBlock(step, adam_rate, row_rate, 16, 16, scale, gradient, w, state);
  } else {
    for (int at = 0; at < dim; at += kBlock) {
      squares += StepBlock(step, adam_rate, row_rate, std::min(kBlock, dim - at), dim, scale,
                           gradient == nullptr ? nullptr : gradient + at, w + at,
                           by_row ? state : state + at);
    }
  }
  if (by_row) state[0] += squares / static_cast<float>(dim);
}

void TakeMissedSteps(const RowStep& step, int dim, int64_t missed, float* w, float* state) {
  if (!step.catches_up || missed <= 0) return;
  int64_t replayed = std::min(missed, kMostReplayed);
  if (step.rule->kind == Kind::kSgd && step.hyper.l1 == 0.0f) replayed = 0;
  if (missed > replayed) {
    const float keep =
        static_cast<float>(std::exp(step.log_l2_keep * static_cast<double>(missed - replayed)));
    for (int i = 0; i < dim; ++i) w[i] *= keep;
  }
  const int64_t rates = static_cast<int64_t>(step.adam_rates.size());
  for (int64_t before = replayed; before > 0; --before) {
    TakeStep(step, step.adam_rates[std::min(before, rates - 1)], dim, 0.0f, nullptr, w, state);
  }
}

void UpdateRow(const RowStep& step, int dim, int64_t missed, float scale, const float* gradient,
               float* w, float* state) {
  if (step.rule->kind == Kind::kFtrl && step.hyper.learning_rate == 0.0f)
    return;  // its step divides by the rate
  TakeMissedSteps(step, dim, missed, w, state);
  TakeStep(step, step.adam_rates[0], dim, scale, gradient, w, state);
}

}  // namespace ctr
