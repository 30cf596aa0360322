// clang-format off
#include "ops/cc/rows/multiversion.h"  // first
// clang-format on
#include "ops/cc/rows/row_optimizers.h"

#include <algorithm>
#include <cmath>

#include "ops/cc/rows/square_roots.h"

namespace ctr {
namespace {

constexpr int kBlock = 32;  // elements that are worked on at a time, on the stack

// The functors: one step on a block of n <= kBlock elements with gradients g.
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
  float after[kBlock];  // acc ^ -learning_rate_power
  for (int i = 0; i < n; ++i) after[i] = acc[i] = acc[i] + g[i] * g[i];
  if (h.learning_rate_power == -0.5f) {
    SquareRoots(n, after);
  } else {
    for (int i = 0; i < n; ++i) after[i] = std::pow(after[i], -h.learning_rate_power);
  }
  for (int i = 0; i < n; ++i) {
    const float denominator = (h.beta + after[i]) / h.learning_rate + h.l2;
    const float of_weight = -w[i] * denominator - std::copysign(h.l1, w[i]);
    z[i] = g[i] + (w[i] == 0.0f ? z[i] : of_weight);
    const float solved = (std::copysign(h.l1, z[i]) - z[i]) / denominator;
    w[i] = std::abs(z[i]) <= h.l1 ? 0.0f : solved;
  }
}

// Moves z to where w follows from it. A weight of 0 follows from all of [-l1, l1].
void SolveFtrl(const RowHyper& h, int n, const float* w, const float* acc, float* z) {
  if (h.learning_rate == 0.0f) return;  // no step reads it
  for (int i = 0; i < n; ++i) {
    const float denominator =
        (h.beta + std::pow(acc[i], -h.learning_rate_power)) / h.learning_rate + h.l2;
    z[i] = w[i] == 0.0f ? std::clamp(z[i], -h.l1, h.l1)
                        : -w[i] * denominator - std::copysign(h.l1, w[i]);
  }
}

}  // namespace

RowStep::RowStep(RowOptimizerKind kind, const RowHyper& hyper, int64_t step)
    : kind(kind), hyper(hyper) {
  catches_up = hyper.l2_catch_up != 0.0f &&
               kind != RowOptimizerKind::kFtrl;  // FTRL's weights follow from its sums
  log_l2_keep =
      std::log(std::max(1.0 - static_cast<double>(hyper.learning_rate) * hyper.l2, 1e-30));
  const int64_t last = std::max<int64_t>(step, 1);
  const bool replays = catches_up && kind == RowOptimizerKind::kAdam;
  for (int64_t t = last; t >= std::max<int64_t>(1, replays ? last - kMostReplayed : last); --t) {
    const double left1 = 1.0 - std::pow(static_cast<double>(hyper.beta1), static_cast<double>(t));
    const double left2 = 1.0 - std::pow(static_cast<double>(hyper.beta2), static_cast<double>(t));
    adam_rates.push_back(static_cast<float>(hyper.learning_rate * std::sqrt(left2) / left1));
  }
}

bool ParseRowOptimizer(const std::string& name, RowOptimizerKind* kind) {
  static const char* const kNames[] = {"sgd", "adagrad", "adagrad_row", "adam", "ftrl", "rmsprop"};
  for (int i = 0; i < 6; ++i) {
    if (name == kNames[i]) {
      *kind = static_cast<RowOptimizerKind>(i);
      return true;
    }
  }
  return false;
}

std::string CheckRowHyper(RowOptimizerKind kind, const RowHyper& h) {
  const auto wrong = [](const char* name, float found, const char* wanted) {
    return std::string(name) + ": found " + std::to_string(found) + "; wanted " + wanted;
  };
  const auto non_negative = [](float x) { return x >= 0.0f && std::isfinite(x); };
  if (!non_negative(h.learning_rate))
    return wrong("learning_rate", h.learning_rate, "a finite number >= 0");
  if (!non_negative(h.initial_accumulator)) {
    return wrong("initial_accumulator", h.initial_accumulator, "a finite number >= 0");
  }
  if (kind == RowOptimizerKind::kAdagradRow && h.initial_accumulator == 0.0f) {
    return wrong("initial_accumulator", h.initial_accumulator, "a number > 0 for adagrad_row");
  }
  if (kind == RowOptimizerKind::kAdam && !(h.beta1 >= 0.0f && h.beta1 < 1.0f)) {
    return wrong("beta1", h.beta1, "a number in [0, 1)");
  }
  if ((kind == RowOptimizerKind::kAdam || kind == RowOptimizerKind::kRmsprop) &&
      !(h.beta2 >= 0.0f && h.beta2 < 1.0f)) {
    return wrong("beta2", h.beta2, "a number in [0, 1)");
  }
  if (!non_negative(h.epsilon)) return wrong("epsilon", h.epsilon, "a finite number >= 0");
  if (!(h.learning_rate_power <= 0.0f && h.learning_rate_power >= -1.0f)) {
    return wrong("learning_rate_power", h.learning_rate_power, "a number in [-1, 0]");
  }
  if (!non_negative(h.beta)) return wrong("beta", h.beta, "a finite number >= 0");
  if (!non_negative(h.l1)) return wrong("l1", h.l1, "a finite number >= 0");
  if (!non_negative(h.l2)) return wrong("l2", h.l2, "a finite number >= 0");
  if (!(h.clip > 0.0f)) return wrong("clip", h.clip, "a number > 0, infinity for none");
  return "";
}

int RowStateFloats(RowOptimizerKind kind, int dim) {
  switch (kind) {
    case RowOptimizerKind::kSgd:
      return 0;
    case RowOptimizerKind::kAdagradRow:
      return 1;
    case RowOptimizerKind::kAdagrad:
    case RowOptimizerKind::kRmsprop:
      return dim;
    case RowOptimizerKind::kAdam:
    case RowOptimizerKind::kFtrl:
      return 2 * dim;
  }
  return 0;
}

void InitRowState(const RowStep& step, int dim, const float* w, float* state) {
  const RowHyper& h = step.hyper;
  const bool accumulates =
      step.kind == RowOptimizerKind::kAdagrad || step.kind == RowOptimizerKind::kFtrl;
  std::fill_n(state, RowStateFloats(step.kind, dim), 0.0f);
  if (accumulates) std::fill_n(state, dim, h.initial_accumulator);
  if (step.kind == RowOptimizerKind::kFtrl) SolveFtrl(h, dim, w, state, state + dim);
}

void AddToRow(const RowStep& step, int dim, const float* difference, float* w, float* state) {
  for (int i = 0; i < dim; ++i) w[i] += difference[i];
  if (step.kind == RowOptimizerKind::kFtrl) SolveFtrl(step.hyper, dim, w, state, state + dim);
}

// One step on a block of n <= kBlock elements, whose state begins at state[0] and, of Adam and
// FTRL, state[dim] too. gradient: null for none but the penalty's. Returns the sum of squared
// gradients to adagrad_row, which adds it up.
CTR_INLINE float StepBlock(const RowStep& step, float adam_rate, float row_rate, int n, int dim,
                           float scale, const float* __restrict gradient, float* __restrict w,
                           float* __restrict state) {
  const RowHyper& h = step.hyper;
  const float l2 = step.kind == RowOptimizerKind::kFtrl ? 0.0f : h.l2;
  float g[kBlock];
  float squares = 0.0f;
  if (gradient == nullptr) {
    for (int i = 0; i < n; ++i) g[i] = l2 * w[i];
  } else {
    for (int i = 0; i < n; ++i)
      g[i] = std::min(std::max(scale * gradient[i], -h.clip), h.clip) + l2 * w[i];
  }
  switch (step.kind) {
    case RowOptimizerKind::kSgd:
      Sgd(h, n, g, w);
      break;
    case RowOptimizerKind::kAdagrad:
      Adagrad(h, n, g, w, state);
      break;
    case RowOptimizerKind::kAdagradRow:
      for (int i = 0; i < n; ++i) w[i] -= row_rate * g[i];
      for (int i = 0; i < n; ++i) squares += g[i] * g[i];
      break;
    case RowOptimizerKind::kAdam:
      Adam(h, adam_rate, n, g, w, state, state + dim);
      break;
    case RowOptimizerKind::kFtrl:
      Ftrl(h, n, g, w, state, state + dim);
      break;
    case RowOptimizerKind::kRmsprop:
      Rmsprop(h, n, g, w, state);
      break;
  }
  if (h.l1 > 0.0f && step.kind != RowOptimizerKind::kFtrl) {
    const float cut = h.learning_rate * h.l1;
    for (int i = 0; i < n; ++i) w[i] = std::copysign(std::max(std::abs(w[i]) - cut, 0.0f), w[i]);
  }
  return squares;
}

// gradient: null for none but the penalty's.
CTR_MULTIVERSION
void TakeStep(const RowStep& step, float adam_rate, int dim, float scale, const float* gradient,
              float* w, float* state) {
  const RowHyper& h = step.hyper;
  const bool by_row = step.kind == RowOptimizerKind::kAdagradRow;
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
  if (step.kind == RowOptimizerKind::kSgd && step.hyper.l1 == 0.0f) replayed = 0;
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
  if (step.kind == RowOptimizerKind::kFtrl && step.hyper.learning_rate == 0.0f)
    return;  // its step divides by the rate
  TakeMissedSteps(step, dim, missed, w, state);
  TakeStep(step, step.adam_rates[0], dim, scale, gradient, w, state);
}

}  // namespace ctr
