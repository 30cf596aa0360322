// Low-rank cross network, fused; ops/cc/ops/cross_ops.cc says what it computes. In TensorFlow's own ops the same step
// is bound by some forty passes over [B, W]; here a tile of samples stays in the cache from its first layer to its
// last.
//
// With x_l = x0 * z_l the recurrence is z_0 = 1, z_{l+1} = z_l + c_l u_l + b_l, where c_l = x_l v_l has only R columns.
// Nothing is kept between calls. Samples are cut into at most kRuns runs, whatever the number of threads; each sums
// the parameters' gradients for itself and the runs' sums are added in order, so that results repeat bit for bit.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/cc/rows/multiversion.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

constexpr int64_t kTile = 32;  // samples handled at once; a multiple of 16
constexpr int64_t kRuns = 16;  // runs of samples
constexpr int64_t kChunk =
    64;  // columns handled at once: of all it touches, a tile's chunk stays in the first-level cache
constexpr int64_t kWide = 32;   // W is padded to a multiple of this
constexpr int64_t kNarrow = 8;  // and R to one of this

int64_t Padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// out[m, n] += sum over k of a[m, k] b[k, n]. Element (m, k) of a lies at m * a_row + k * a_column; m is a multiple of
// 16, n of kVectors vectors: a block of sums of that size stays in registers. Defined for each CPU: a compiler takes
// vectors apart for the CPU of the function they are written in, before it clones or inlines it, so that
// CTR_MULTIVERSION would leave the narrowest ones.
#define CTR_ADD_PRODUCT(Name, kBytes, kRows, kVectors, ...)                                                        \
  __VA_ARGS__ void Name(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row, int64_t m, \
                        int64_t depth, int64_t n, float* out, int64_t out_row) {                                   \
    typedef float Vec __attribute__((vector_size(kBytes), aligned(4), may_alias));                                 \
    for (int64_t j = 0; j < n; j += kVectors * (kBytes / 4)) {                                                     \
      for (int64_t i = 0; i < m; i += kRows) {                                                                     \
        Vec sums[kRows][kVectors];                                                                                 \
        for (int64_t r = 0; r < kRows; ++r) {                                                                      \
          const Vec* row = reinterpret_cast<const Vec*>(out + (i + r) * out_row + j);                              \
          for (int64_t v = 0; v < kVectors; ++v) sums[r][v] = row[v];                                              \
        }                                                                                                          \
        const float* left = a + i * a_row;                                                                         \
        const float* right = b + j;                                                                                \
        for (int64_t k = 0; k < depth; ++k, left += a_column, right += b_row) {                                    \
          Vec row[kVectors];                                                                                       \
          for (int64_t v = 0; v < kVectors; ++v) row[v] = reinterpret_cast<const Vec*>(right)[v];                  \
          for (int64_t r = 0; r < kRows; ++r) {                                                                    \
            for (int64_t v = 0; v < kVectors; ++v) sums[r][v] += left[r * a_row] * row[v];                         \
          }                                                                                                        \
        }                                                                                                          \
        for (int64_t r = 0; r < kRows; ++r) {                                                                      \
          Vec* row = reinterpret_cast<Vec*>(out + (i + r) * out_row + j);                                          \
          for (int64_t v = 0; v < kVectors; ++v) row[v] = sums[r][v];                                              \
        }                                                                                                          \
      }                                                                                                            \
    }                                                                                                              \
  }

#if defined(__GNUC__) && !defined(__clang__)
#define CTR_FUSED_MULTIPLY_ADD \
  optimize("fp-contract=fast"),  // twice the speed; nothing here need round as a product and a sum do
#else
#define CTR_FUSED_MULTIPLY_ADD
#endif
CTR_ADD_PRODUCT(ProductBaseline, 16, 8, 1)
#if defined(__x86_64__) && defined(__GNUC__)
CTR_ADD_PRODUCT(ProductAvx2, 32, 8, 1, __attribute__((CTR_FUSED_MULTIPLY_ADD target("arch=haswell"))))
CTR_ADD_PRODUCT(NarrowProductAvx512, 64, 16, 1, __attribute__((CTR_FUSED_MULTIPLY_ADD target("arch=skylake-avx512"))))
CTR_ADD_PRODUCT(WideProductAvx512, 64, 8, 2, __attribute__((CTR_FUSED_MULTIPLY_ADD target("arch=skylake-avx512"))))
#endif

// The functions for this CPU where n is a multiple of 8, of 16 and of kWide.
struct Products {
  decltype(&ProductBaseline) by_8 = ProductBaseline, by_16 = ProductBaseline, by_32 = ProductBaseline;
  Products() {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) by_8 = by_16 = by_32 = ProductAvx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
      by_16 = NarrowProductAvx512;
      by_32 = WideProductAvx512;
    }
#endif
  }
};

void AddProduct(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row, int64_t m,
                int64_t depth, int64_t n, float* out, int64_t out_row) {
  static const Products products;
  const auto product = n % 32 == 0 ? products.by_32 : n % 16 == 0 ? products.by_16 : products.by_8;
  product(a, a_row, a_column, b, b_row, m, depth, n, out, out_row);
}

// The parameters with their last dimension padded with zeros to whole vectors, and both matrices the other way round
// too.
struct Parameters {
  int64_t width, rank, layers;  // W, R, L
  int64_t wide, narrow;         // W and R, padded
  std::vector<float> v, v_t;    // [L, wide, narrow], [L, narrow, wide]
  std::vector<float> u, u_t;    // [L, narrow, wide], [L, wide, narrow]
  std::vector<float> b, head;   // [L, wide], [wide]

  Parameters(int64_t w, int64_t r, int64_t l, const float* v_in, const float* u_in, const float* b_in,
             const float* head_in)
      : width(w),
        rank(r),
        layers(l),
        wide(Padded(w, kWide)),
        narrow(Padded(r, kNarrow)),
        v(l * wide * narrow),
        v_t(v.size()),
        u(v.size()),
        u_t(v.size()),
        b(l * wide),
        head(wide) {
    for (int64_t i = 0; i < layers; ++i) {
      const int64_t at = i * wide * narrow;
      for (int64_t x = 0; x < width; ++x) {
        for (int64_t k = 0; k < rank; ++k) {
          v[at + x * narrow + k] = v_t[at + k * wide + x] = v_in[(i * width + x) * rank + k];
          u[at + k * wide + x] = u_t[at + x * narrow + k] = u_in[(i * rank + k) * width + x];
        }
      }
      std::copy_n(b_in + i * width, width, b.data() + i * wide);
    }
    std::copy_n(head_in, width, head.data());
  }
};

// Before a loop: its iterations touch different memory, which the compiler cannot see through that many pointers.
#if defined(__clang__)
#define CTR_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define CTR_INDEPENDENT _Pragma("GCC ivdep")
#endif

// Memory for one tile, and the x0 of up to kTile samples in it: [kTile, wide], zeros where there is no sample or
// column.
struct Scratch {
  std::vector<float> x0, dx0, dz;  // [kTile, wide]
  std::vector<float> z;            // z_1 to z_L, [L, kTile, wide]; Forward uses the first only, in place
  std::vector<float> x, dx;        // [kTile, kChunk]
  std::vector<float> c, dc;        // [L, kTile, narrow]
  explicit Scratch(const Parameters& p)
      : x0(kTile * p.wide),
        dx0(x0),
        dz(x0),
        z(p.layers * kTile * p.wide),
        x(kTile * kChunk),
        dx(x),
        c(p.layers * kTile * p.narrow),
        dc(c) {}
};

// A chunk of columns of a tile: `columns` of them from `first` on.
struct Chunk {
  int64_t first, columns;
};
CTR_INLINE Chunk ChunkAt(const Parameters& p, int64_t first) {
  return {first, p.wide - first < kChunk ? p.wide - first : kChunk};
}

// z_{l+1} = z_l + b_l + c_l u_l in a chunk; `before` is z_l, or null for z_0 = 1, and may be `z`.
CTR_INLINE void NextFactor(const Parameters& p, const Chunk& chunk, int64_t l, const float* before, const float* c,
                           float* z) {
  const float* b = p.b.data() + l * p.wide + chunk.first;
  for (int64_t t = 0; t < kTile; ++t) {
    const int64_t row = t * p.wide + chunk.first;
    CTR_INDEPENDENT
    for (int64_t x = 0; x < chunk.columns; ++x) z[row + x] = (before ? before[row + x] : 1.0f) + b[x];
  }
  AddProduct(c, p.narrow, 1, p.u.data() + l * p.wide * p.narrow + chunk.first, p.wide, kTile, p.rank, chunk.columns,
             z + chunk.first, p.wide);
}

// x_l = x0 * z_l of a chunk, into [kTile, kChunk].
CTR_INLINE void Activation(const Parameters& p, const Chunk& chunk, const float* x0, const float* z, float* out) {
  for (int64_t t = 0; t < kTile; ++t) {
    const int64_t row = t * p.wide + chunk.first;
    CTR_INDEPENDENT
    for (int64_t x = 0; x < chunk.columns; ++x) out[t * kChunk + x] = x0[row + x] * z[row + x];
  }
}

// Reads s->x0, fills s->c; logits hold kTile numbers.
CTR_MULTIVERSION void Forward(const Parameters& p, Scratch* s, float* logits) {
  const int64_t matrix = p.wide * p.narrow;
  const float* x0 = s->x0.data();
  float* z = s->z.data();
  std::fill(s->c.begin(), s->c.end(), 0.0f);
  std::fill_n(logits, kTile, 0.0f);
  for (int64_t l = 0; l <= p.layers; ++l) {
    float* c = s->c.data() + l * kTile * p.narrow;
    for (int64_t j = 0; j < p.wide; j += kChunk) {
      const Chunk chunk = ChunkAt(p, j);
      const float* x = x0 + chunk.first;
      if (l) {
        NextFactor(p, chunk, l - 1, l == 1 ? nullptr : z, c - kTile * p.narrow, z);
        Activation(p, chunk, x0, z, s->x.data());
        x = s->x.data();
      }
      if (l < p.layers) {
        AddProduct(x, l ? kChunk : p.wide, 1, p.v.data() + l * matrix + chunk.first * p.narrow, p.narrow, kTile,
                   chunk.columns, p.narrow, c, p.narrow);
        continue;
      }
      const float* head = p.head.data() + chunk.first;
      for (int64_t t = 0; t < kTile; ++t) {
        float sums[kWide] = {};
        for (int64_t i = 0; i < chunk.columns; i += kWide) {
          for (int64_t k = 0; k < kWide; ++k) sums[k] += x[t * kChunk + i + k] * head[i + k];
        }
        for (int64_t half = kWide / 2; half > 0; half /= 2) {
          for (int64_t k = 0; k < half; ++k) sums[k] += sums[k + half];
        }
        logits[t] += sums[0];
      }
    }
  }
}

// Sums of the parameters' gradients over a run of samples; the matrices both as [L, narrow, wide].
struct ParameterGradients {
  std::vector<float> v_t, u, b, head;
  explicit ParameterGradients(const Parameters& p)
      : v_t(p.layers * p.narrow * p.wide), u(v_t), b(p.layers * p.wide), head(p.wide) {}
};

// The part of layer l that only needs the gradient of z_{l+1} in a chunk, s->dz: those of b_l and u_l, and its share of
// that of c_l.
CTR_INLINE void BackFromFactor(const Parameters& p, const Chunk& chunk, int64_t l, Scratch* s, ParameterGradients* g) {
  const int64_t matrix = p.wide * p.narrow;
  const float* c = s->c.data() + l * kTile * p.narrow;
  const float* dz = s->dz.data() + chunk.first;
  float* db = g->b.data() + l * p.wide + chunk.first;
  for (int64_t t = 0; t < kTile; ++t) {
    CTR_INDEPENDENT
    for (int64_t x = 0; x < chunk.columns; ++x) db[x] += dz[t * p.wide + x];
  }
  AddProduct(dz, p.wide, 1, p.u_t.data() + l * matrix + chunk.first * p.narrow, p.narrow, kTile, chunk.columns,
             p.narrow, s->dc.data() + l * kTile * p.narrow, p.narrow);
  AddProduct(c, 1, p.narrow, dz, p.wide, p.narrow, kTile, chunk.columns, g->u.data() + l * matrix + chunk.first,
             p.wide);
}

// Reads s->x0 and s->c, leaves the gradient of x0 in s->dx0 and adds to `g`. `grad` holds kTile numbers, 0 where there
// is no sample.
CTR_MULTIVERSION void Backward(const Parameters& p, const float* grad, Scratch* s, ParameterGradients* g) {
  const int64_t tile = kTile * p.wide;
  const int64_t matrix = p.wide * p.narrow;
  const float* x0 = s->x0.data();
  float* dx0 = s->dx0.data();
  float* dz = s->dz.data();
  std::fill(s->dc.begin(), s->dc.end(), 0.0f);
  for (int64_t j = 0; j < p.wide; j += kChunk) {
    const Chunk chunk = ChunkAt(p, j);
    for (int64_t l = 0; l < p.layers; ++l) {
      float* z = s->z.data() + l * tile;
      NextFactor(p, chunk, l, l ? z - tile : nullptr, s->c.data() + l * kTile * p.narrow, z);
    }
    const float* last = s->z.data() + (p.layers - 1) * tile;
    const float* head = p.head.data() + chunk.first;
    float* dhead = g->head.data() + chunk.first;
    for (int64_t t = 0; t < kTile; ++t) {
      const int64_t row = t * p.wide + chunk.first;
      CTR_INDEPENDENT
      for (int64_t x = 0; x < chunk.columns; ++x) {
        dhead[x] += grad[t] * x0[row + x] * last[row + x];
        dx0[row + x] = grad[t] * head[x] * last[row + x];
        dz[row + x] = grad[t] * head[x] * x0[row + x];
      }
    }
    BackFromFactor(p, chunk, p.layers - 1, s, g);
  }
  for (int64_t l = p.layers - 1; l >= 0; --l) {
    const float* z = l ? s->z.data() + (l - 1) * tile : nullptr;
    const float* dc = s->dc.data() + l * kTile * p.narrow;
    for (int64_t j = 0; j < p.wide; j += kChunk) {
      const Chunk chunk = ChunkAt(p, j);
      const float* x = x0 + chunk.first;
      if (l) {
        Activation(p, chunk, x0, z, s->x.data());
        x = s->x.data();
      }
      AddProduct(dc, 1, p.narrow, x, l ? kChunk : p.wide, p.narrow, kTile, chunk.columns,
                 g->v_t.data() + l * matrix + chunk.first, p.wide);
      // The gradient of x_l; of x_0 it is part of x0's own.
      float* dx = l ? s->dx.data() : dx0 + chunk.first;
      if (l) std::fill(s->dx.begin(), s->dx.end(), 0.0f);
      AddProduct(dc, p.narrow, 1, p.v_t.data() + l * matrix + chunk.first, p.wide, kTile, p.rank, chunk.columns, dx,
                 l ? kChunk : p.wide);
      if (l == 0) continue;
      for (int64_t t = 0; t < kTile; ++t) {
        const int64_t row = t * p.wide + chunk.first;
        CTR_INDEPENDENT
        for (int64_t i = 0; i < chunk.columns; ++i) {
          dx0[row + i] += dx[t * kChunk + i] * z[row + i];
          dz[row + i] += dx[t * kChunk + i] * x0[row + i];
        }
      }
      BackFromFactor(p, chunk, l - 1, s, g);
    }
  }
}

absl::Status Wanted(const char* name, const Tensor& found, const TensorShape& shape) {
  if (found.shape() == shape) return absl::OkStatus();
  return absl::InvalidArgumentError(std::string(name) + ": wanted shape " + shape.DebugString() + ", found " +
                                    found.shape().DebugString());
}

// The inputs that both ops share, checked.
struct Inputs {
  std::vector<const float*> parts;
  std::vector<int64_t> widths;
  const Tensor *v, *u, *b, *head;
  int64_t samples = 0, width = 0, rank = 0, layers = 0;

  absl::Status Read(OpKernelContext* c) {
    tensorflow::OpInputList list;
    TF_RETURN_IF_ERROR(c->input_list("parts", &list));
    TF_RETURN_IF_ERROR(c->input("v", &v));
    TF_RETURN_IF_ERROR(c->input("u", &u));
    TF_RETURN_IF_ERROR(c->input("b", &b));
    TF_RETURN_IF_ERROR(c->input("head", &head));
    for (const Tensor& part : list) {
      if (part.dims() != 2 || part.dim_size(0) != list[0].dim_size(0)) {
        return absl::InvalidArgumentError("parts: wanted shapes [B, W_i], found " + part.shape().DebugString());
      }
      parts.push_back(part.flat<float>().data());
      widths.push_back(part.dim_size(1));
      width += widths.back();
    }
    samples = list[0].dim_size(0);
    if (v->dims() != 3 || v->dim_size(0) < 1 || v->dim_size(2) < 1) {
      return absl::InvalidArgumentError("v: wanted shape [L, W, R] with L and R >= 1, found " +
                                        v->shape().DebugString());
    }
    layers = v->dim_size(0);
    rank = v->dim_size(2);
    TF_RETURN_IF_ERROR(Wanted("v", *v, TensorShape({layers, width, rank})));
    TF_RETURN_IF_ERROR(Wanted("u", *u, TensorShape({layers, rank, width})));
    TF_RETURN_IF_ERROR(Wanted("b", *b, TensorShape({layers, width})));
    return Wanted("head", *head, TensorShape({width}));
  }

  Parameters Padded() const {
    return Parameters(width, rank, layers, v->flat<float>().data(), u->flat<float>().data(), b->flat<float>().data(),
                      head->flat<float>().data());
  }

  // Joins samples [begin, begin + count) of the parts to a tile of rows of `wide`.
  void Join(int64_t begin, int64_t count, int64_t wide, std::vector<float>* tile) const {
    std::fill(tile->begin() + count * wide, tile->end(), 0.0f);  // columns past W are 0 from the start
    for (int64_t t = 0; t < count; ++t) {
      float* to = tile->data() + t * wide;
      for (size_t i = 0; i < parts.size(); ++i) {
        to = std::copy_n(parts[i] + (begin + t) * widths[i], widths[i], to);
      }
    }
  }

  // Calls run(part, first sample, last sample) for each of Runs() runs of samples.
  int64_t Runs() const { return std::min(kRuns, (samples + kTile - 1) / kTile); }
  template <typename Run>
  void OverRuns(OpKernelContext* c, const Run& run) const {
    const int64_t tiles = (samples + kTile - 1) / kTile, runs = Runs();
    c->device()->tensorflow_cpu_worker_threads()->workers->ParallelFor(
        runs, int64_t{1} << 24, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            run(i, tiles * i / runs * kTile, std::min(samples, tiles * (i + 1) / runs * kTile));
          }
        });
  }
};

class CrossOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* c) override {
    Inputs in;
    OP_REQUIRES_OK(c, in.Read(c));
    Tensor *logits, *inner;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({in.samples}), &logits));
    OP_REQUIRES_OK(c, c->allocate_output(1, TensorShape({in.samples, in.layers, in.rank}), &inner));
    const Parameters p = in.Padded();
    float* logit = logits->flat<float>().data();
    float* kept = inner->flat<float>().data();
    in.OverRuns(c, [&](int64_t, int64_t first, int64_t last) {
      Scratch s(p);
      float tile_logits[kTile];
      for (int64_t b = first; b < last; b += kTile) {
        const int64_t count = std::min(kTile, last - b);
        in.Join(b, count, p.wide, &s.x0);
        Forward(p, &s, tile_logits);
        std::copy_n(tile_logits, count, logit + b);
        for (int64_t t = 0; t < count; ++t) {
          for (int64_t l = 0; l < p.layers; ++l) {
            std::copy_n(s.c.data() + (l * kTile + t) * p.narrow, p.rank, kept + ((b + t) * p.layers + l) * p.rank);
          }
        }
      }
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrCross").Device(tensorflow::DEVICE_CPU), CrossOp);

class CrossGradOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* c) override {
    Inputs in;
    OP_REQUIRES_OK(c, in.Read(c));
    const Tensor *inner, *grad;
    OP_REQUIRES_OK(c, c->input("inner", &inner));
    OP_REQUIRES_OK(c, c->input("grad", &grad));
    OP_REQUIRES_OK(c, Wanted("inner", *inner, TensorShape({in.samples, in.layers, in.rank})));
    OP_REQUIRES_OK(c, Wanted("grad", *grad, TensorShape({in.samples})));
    std::vector<Tensor*> outputs(c->num_outputs());
    for (int i = 0; i < c->num_outputs(); ++i) {
      OP_REQUIRES_OK(c, c->allocate_output(i, c->input(i).shape(), &outputs[i]));
    }
    const Parameters p = in.Padded();
    const float* kept = inner->flat<float>().data();
    const float* grads = grad->flat<float>().data();
    const size_t parts = in.parts.size();
    std::vector<float*> parts_grad;
    for (size_t i = 0; i < parts; ++i) parts_grad.push_back(outputs[i]->flat<float>().data());
    std::vector<ParameterGradients> sums(std::max<int64_t>(1, in.Runs()), ParameterGradients(p));
    in.OverRuns(c, [&](int64_t run, int64_t first, int64_t last) {
      Scratch s(p);
      float tile_grads[kTile];
      for (int64_t b = first; b < last; b += kTile) {
        const int64_t count = std::min(kTile, last - b);
        in.Join(b, count, p.wide, &s.x0);
        std::fill_n(std::copy_n(grads + b, count, tile_grads), kTile - count, 0.0f);
        std::fill(s.c.begin(), s.c.end(), 0.0f);
        for (int64_t t = 0; t < count; ++t) {
          for (int64_t l = 0; l < p.layers; ++l) {
            std::copy_n(kept + ((b + t) * p.layers + l) * p.rank, p.rank, s.c.data() + (l * kTile + t) * p.narrow);
          }
        }
        Backward(p, tile_grads, &s, &sums[run]);
        for (int64_t t = 0; t < count; ++t) {
          const float* from = s.dx0.data() + t * p.wide;
          for (size_t i = 0; i < parts; from += in.widths[i], ++i) {
            std::copy_n(from, in.widths[i], parts_grad[i] + (b + t) * in.widths[i]);
          }
        }
      }
    });
    for (size_t run = 1; run < sums.size(); ++run) {
      for (auto member :
           {&ParameterGradients::v_t, &ParameterGradients::u, &ParameterGradients::b, &ParameterGradients::head}) {
        for (size_t i = 0; i < (sums[0].*member).size(); ++i) (sums[0].*member)[i] += (sums[run].*member)[i];
      }
    }
    float* v = outputs[parts]->flat<float>().data();
    float* u = outputs[parts + 1]->flat<float>().data();
    float* b = outputs[parts + 2]->flat<float>().data();
    for (int64_t l = 0; l < p.layers; ++l) {
      for (int64_t k = 0; k < p.rank; ++k) {
        const int64_t row = (l * p.narrow + k) * p.wide;
        std::copy_n(sums[0].u.data() + row, p.width, u + (l * p.rank + k) * p.width);
        for (int64_t x = 0; x < p.width; ++x) v[(l * p.width + x) * p.rank + k] = sums[0].v_t[row + x];
      }
      std::copy_n(sums[0].b.data() + l * p.wide, p.width, b + l * p.width);
    }
    std::copy_n(sums[0].head.data(), p.width, outputs[parts + 3]->flat<float>().data());
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrCrossGrad").Device(tensorflow::DEVICE_CPU), CrossGradOp);

}  // namespace
