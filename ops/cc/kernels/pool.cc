// Adds up the rows of distinct features to slot sums of a batch, and computes the gradient.
#include "ops/cc/rows/pool.h"

#include <string>
#include <vector>

#include "ops/cc/kernels/row_store_kernels.h"

namespace ctr {
namespace {

// The attributes and the inputs that both kernels share.
class PoolOpKernel : public tensorflow::OpKernel {
 public:
  explicit PoolOpKernel(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    std::vector<int> tables, widths;
    std::vector<bool> field, slots, totals;
    std::vector<std::string> poolings;
    OP_REQUIRES_OK(context, context->GetAttr("table_of_field", &layout_.table_of_field));
    OP_REQUIRES_OK(context, context->GetAttr("poolings", &poolings));
    for (const std::string& name : poolings) {
      OP_REQUIRES(context, name == "sum" || name == "mean" || name == "sqrtn",
                  absl::InvalidArgumentError(
                      absl::StrCat("poolings: found ", name, "; wanted sum, mean or sqrtn")));
      layout_.poolings.push_back(name == "sum"    ? Pooling::kSum
                                 : name == "mean" ? Pooling::kMean
                                                  : Pooling::kSqrtN);
    }
    OP_REQUIRES_OK(context, context->GetAttr("averaged", &layout_.averaged));
    OP_REQUIRES_OK(context, context->GetAttr("part_tables", &tables));
    OP_REQUIRES_OK(context, context->GetAttr("part_widths", &widths));
    OP_REQUIRES_OK(context, context->GetAttr("part_field", &field));
    OP_REQUIRES_OK(context, context->GetAttr("part_slots", &slots));
    OP_REQUIRES_OK(context, context->GetAttr("part_totals", &totals));
    int parts;
    OP_REQUIRES_OK(context, context->GetAttr("parts", &parts));
    const size_t n = parts;
    OP_REQUIRES(context,
                tables.size() == n && widths.size() == n && field.size() == n &&
                    slots.size() == n && totals.size() == n,
                absl::InvalidArgumentError(absl::StrCat(
                    "part_tables, part_widths, part_field, part_slots, part_totals: wanted ", n,
                    " of each, one a part")));
    for (size_t p = 0; p < n; ++p)
      layout_.parts.push_back({tables[p], widths[p], field[p], slots[p], totals[p], 0, 0});
    const std::string wrong = layout_.Complete();
    OP_REQUIRES(context, wrong.empty(), absl::InvalidArgumentError(wrong));
  }

 protected:
  int parts() const { return static_cast<int>(layout_.parts.size()); }
  int64_t fields_of(int part) const { return layout_.fields[layout_.parts[part].table]; }

  // Reads the inputs factors, offsets, values, segments and batch_size, from input `first` on, for
  // n occurrences. `averaged` holds the values if the layout averages fields.
  absl::Status ReadBatch(tensorflow::OpKernelContext* context, int first, int64_t n,
                         tensorflow::Tensor* averaged, PoolBatch* batch) const {
    const tensorflow::Tensor &factors = context->input(first), &offsets = context->input(first + 1),
                             &values = context->input(first + 2),
                             &segments = context->input(first + 3);
    TF_RETURN_IF_ERROR(CheckVector(factors, "factors"));
    TF_RETURN_IF_ERROR(CheckVector(offsets, "offsets"));
    if (offsets.dim_size(0) < 1)
      return absl::InvalidArgumentError("offsets: found shape [0]; wanted [u + 1]");
    batch->u = offsets.dim_size(0) - 1;
    batch->n = n;
    if (values.NumElements() > 0) TF_RETURN_IF_ERROR(CheckLength(values, "values", n));
    if (segments.NumElements() > 0) TF_RETURN_IF_ERROR(CheckLength(segments, "segments", n));
    TF_RETURN_IF_ERROR(CheckScalar(context->input(first + 4), "batch_size"));
    batch->batch = context->input(first + 4).scalar<int32_t>()();
    if (batch->batch < 0 ||
        batch->batch * layout_.num_fields() > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "batch_size: found ", batch->batch, "; wanted 0 to 2^31 / ", layout_.num_fields()));
    }
    batch->factors = factors.flat<float>().data();
    batch->offsets = offsets.flat<int32_t>().data();
    if (values.NumElements() > 0) batch->values = values.flat<float>().data();
    // A batch of multi-valued slots may hold no feature at all. Its segments are empty then, as
    // they are on the fast path.
    if (segments.NumElements() > 0 || n == 0) batch->segments = segments.flat<int32_t>().data();
    if (batch->segments == nullptr && n == 0) batch->segments = &kNoSegments;
    const std::string wrong = CheckPoolBatch(layout_, *batch, factors.dim_size(0));
    if (!wrong.empty()) return absl::InvalidArgumentError(wrong);
    if (layout_.averaged.empty() || batch->segments == nullptr) return absl::OkStatus();
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, {n}, averaged));
    Average(layout_, *batch, averaged->flat<float>().data());
    batch->values = averaged->flat<float>().data();
    return absl::OkStatus();
  }

  PoolLayout layout_;

 private:
  static constexpr int32_t kNoSegments = 0;
};

class PoolOp : public PoolOpKernel {
 public:
  using PoolOpKernel::PoolOpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    // linear, inverse, factors, offsets, values, segments, batch_size, starts
    OP_REQUIRES_OK(context, CheckVector(context->input(1), "inverse"));
    tensorflow::Tensor averaged;
    PoolBatch batch;
    OP_REQUIRES_OK(context,
                   ReadBatch(context, 2, context->input(1).dim_size(0), &averaged, &batch));
    OP_REQUIRES_OK(context, CheckLength(context->input(0), "linear", batch.u));
    PoolOutputs out;
    tensorflow::Tensor* output;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, {batch.batch, layout_.num_fields()}, &output));
    out.linear = output->flat<float>().data();
    const bool norm = !layout_.poolings.empty();
    OP_REQUIRES_OK(context, context->allocate_output(
                                1, {norm ? batch.batch : 0, layout_.num_fields()}, &output));
    if (norm) out.norm = output->flat<float>().data();
    const auto allocate = [&](int index, bool wanted, const tensorflow::TensorShape& shape,
                              std::vector<float*>* to) {
      TF_RETURN_IF_ERROR(context->allocate_output(index, shape, &output));
      to->push_back(wanted ? output->flat<float>().data() : nullptr);
      return absl::OkStatus();
    };
    for (int p = 0; p < parts(); ++p) {
      const PoolPart& part = layout_.parts[p];
      OP_REQUIRES_OK(context, allocate(2 + p, part.slots,
                                       {part.slots ? batch.batch : 0, fields_of(p), part.columns},
                                       &out.slots));
      OP_REQUIRES_OK(context, allocate(2 + parts() + p, part.totals,
                                       {part.totals ? batch.batch : 0, part.columns}, &out.totals));
      OP_REQUIRES_OK(context, allocate(2 + 2 * parts() + p, part.squares(),
                                       {part.squares() ? batch.batch : 0}, &out.squares));
    }
    OP_REQUIRES(context,
                Pool(layout_, batch, context->input(0).flat<float>().data(),
                     context->input(1).flat<int32_t>().data(), ParallelForOf(context), out),
                absl::InvalidArgumentError(absl::StrCat(
                    "inverse, offsets: wanted indices in [0, ", batch.u,
                    ") of features that have no factors or those of their field's table")));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrPool").Device(tensorflow::DEVICE_CPU), PoolOp);

class PoolGradOp : public PoolOpKernel {
 public:
  using PoolOpKernel::PoolOpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    // factors, offsets, values, segments, batch_size, inverse, starts, linear_grad, slots_grads…,
    // totals_grads…, squares_grads…
    const tensorflow::Tensor &inverse = context->input(5), &starts = context->input(6),
                             &linear = context->input(7);
    OP_REQUIRES_OK(context, CheckVector(inverse, "inverse"));
    tensorflow::Tensor averaged;
    PoolBatch batch;
    OP_REQUIRES_OK(context, ReadBatch(context, 0, inverse.dim_size(0), &averaged, &batch));
    OP_REQUIRES_OK(context, CheckOffsets(starts, "starts", batch.u, batch.n));
    PoolGradients gradients;
    if (linear.NumElements() > 0) {
      OP_REQUIRES(context,
                  linear.shape() == tensorflow::TensorShape({batch.batch, layout_.num_fields()}),
                  absl::InvalidArgumentError(
                      absl::StrCat("linear_grad: found shape ", linear.shape().DebugString(),
                                   "; wanted [", batch.batch, ", ", layout_.num_fields(), "]")));
      gradients.linear = linear.flat<float>().data();
    }
    const auto read = [&](const char* name, int p, int index, bool has,
                          const tensorflow::TensorShape& wanted, std::vector<const float*>* to) {
      const tensorflow::Tensor& grad = context->input(index);
      const bool given = has && grad.NumElements() > 0;
      if (given && grad.shape() != wanted) {
        return absl::InvalidArgumentError(absl::StrCat(name, "[", p, "]: found shape ",
                                                       grad.shape().DebugString(), "; wanted ",
                                                       wanted.DebugString()));
      }
      to->push_back(given ? grad.flat<float>().data() : nullptr);
      return absl::OkStatus();
    };
    for (int p = 0; p < parts(); ++p) {
      const PoolPart& part = layout_.parts[p];
      OP_REQUIRES_OK(context, read("slots_grads", p, 8 + p, part.slots,
                                   {batch.batch, fields_of(p), part.columns}, &gradients.slots));
      OP_REQUIRES_OK(context, read("totals_grads", p, 8 + parts() + p, part.totals,
                                   {batch.batch, part.columns}, &gradients.totals));
      OP_REQUIRES_OK(context, read("squares_grads", p, 8 + 2 * parts() + p, part.squares(),
                                   {batch.batch}, &gradients.squares));
    }
    tensorflow::Tensor *linear_out, *factors_out;
    OP_REQUIRES_OK(context, context->allocate_output(0, {batch.u}, &linear_out));
    OP_REQUIRES_OK(context, context->allocate_output(1, context->input(0).shape(), &factors_out));
    OP_REQUIRES(context,
                PoolGradient(layout_, batch, gradients, inverse.flat<int32_t>().data(),
                             starts.flat<int32_t>().data(), ParallelForOf(context),
                             linear_out->flat<float>().data(), factors_out->flat<float>().data()),
                absl::InvalidArgumentError(absl::StrCat(
                    "inverse, offsets: wanted indices in [0, ", batch.u,
                    ") of features that have no factors or those of their field's table")));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrPoolGrad").Device(tensorflow::DEVICE_CPU), PoolGradOp);

}  // namespace
}  // namespace ctr
