// Gathers the factors of histories, and computes the gradient.
#include "ops/cc/rows/history.h"

#include <algorithm>

#include "ops/cc/kernels/row_store_kernels.h"

namespace ctr {
namespace {

class HistoryOp : public tensorflow::OpKernel {
 public:
  explicit HistoryOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("fields", &fields_));
    OP_REQUIRES_OK(context, context->GetAttr("field", &field_));
    OP_REQUIRES_OK(context, context->GetAttr("width", &width_));
    OP_REQUIRES(context, field_ < fields_,
                absl::InvalidArgumentError(
                    absl::StrCat("field: found ", field_, "; wanted less than ", fields_)));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    // factors, offsets, inverse, segments, batch_size, starts, order
    const tensorflow::Tensor &factors = context->input(0), &offsets = context->input(1),
                             &inverse = context->input(2), &segments = context->input(3);
    OP_REQUIRES_OK(context, CheckVector(factors, "factors"));
    OP_REQUIRES_OK(context, CheckVector(offsets, "offsets"));
    OP_REQUIRES_OK(context, CheckVector(inverse, "inverse"));
    OP_REQUIRES_OK(context, CheckScalar(context->input(4), "batch_size"));
    HistoryBatch batch;
    batch.batch = context->input(4).scalar<int32_t>()();
    batch.n = inverse.dim_size(0);
    batch.u = offsets.dim_size(0) - 1;
    batch.width = width_;
    OP_REQUIRES_OK(context, CheckOffsets(offsets, "offsets", batch.u, factors.dim_size(0)));
    batch.offsets = offsets.flat<int32_t>().data();
    OP_REQUIRES(context,
                batch.batch >= 0 && batch.batch * fields_ <= std::numeric_limits<int32_t>::max(),
                absl::InvalidArgumentError(absl::StrCat("batch_size: found ", batch.batch,
                                                        "; wanted 0 to 2^31 / ", fields_)));
    if (segments.NumElements() > 0 || batch.n == 0) {
      OP_REQUIRES_OK(context, CheckLength(segments, "segments", batch.n));
      // An empty tensor may have no data; null would mean one feature in each field.
      batch.segments = batch.n > 0 ? segments.flat<int32_t>().data() : &kNoSegments;
      OP_REQUIRES(context, std::is_sorted(batch.segments, batch.segments + batch.n),
                  absl::InvalidArgumentError("segments: wanted them ascending"));
    } else {
      OP_REQUIRES(context, batch.n == batch.batch * fields_,
                  absl::InvalidArgumentError(absl::StrCat("inverse: found ", batch.n, "; wanted ",
                                                          batch.batch * fields_)));
    }
    tensorflow::Tensor ranges;
    OP_REQUIRES_OK(context,
                   context->allocate_temp(tensorflow::DT_INT64, {2, batch.batch}, &ranges));
    int64_t* const begins = ranges.flat<int64_t>().data();
    int64_t* const ends = begins + batch.batch;
    const int64_t longest = FindHistories(batch, fields_, field_, begins, ends);
    OP_REQUIRES(context, batch.batch * longest <= std::numeric_limits<int32_t>::max(),
                absl::InvalidArgumentError(absl::StrCat(batch.batch, " histories of ", longest,
                                                        " features are too many")));
    tensorflow::Tensor *vectors, *mask, *places;
    OP_REQUIRES_OK(context, context->allocate_output(0, {batch.batch, longest, width_}, &vectors));
    OP_REQUIRES_OK(context, context->allocate_output(1, {batch.batch, longest}, &mask));
    OP_REQUIRES_OK(context, context->allocate_output(2, {batch.n}, &places));
    OP_REQUIRES(context,
                GatherHistories(batch, longest, begins, ends, inverse.flat<int32_t>().data(),
                                factors.flat<float>().data(), ParallelForOf(context),
                                vectors->flat<float>().data(), mask->flat<bool>().data(),
                                places->flat<int32_t>().data()),
                absl::InvalidArgumentError(absl::StrCat("inverse, offsets: wanted indices in [0, ",
                                                        batch.u, ") of features with ", width_,
                                                        " factors or more, or none")));
  }

 private:
  static constexpr int32_t kNoSegments = 0;

  int fields_, field_, width_;
};
REGISTER_KERNEL_BUILDER(Name("CtrHistory").Device(tensorflow::DEVICE_CPU), HistoryOp);

class HistoryGradOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    // factors, offsets, places, starts, order, vectors_grad
    const tensorflow::Tensor &factors = context->input(0), &offsets = context->input(1),
                             &places = context->input(2), &starts = context->input(3),
                             &order = context->input(4), &gradients = context->input(5);
    OP_REQUIRES_OK(context, CheckVector(factors, "factors"));
    OP_REQUIRES_OK(context, CheckVector(offsets, "offsets"));
    OP_REQUIRES_OK(context, CheckVector(places, "places"));
    OP_REQUIRES(
        context, gradients.dims() == 3,
        absl::InvalidArgumentError(absl::StrCat(
            "vectors_grad: found shape ", gradients.shape().DebugString(), "; wanted [B, L, D]")));
    HistoryBatch batch;
    batch.n = places.dim_size(0);
    batch.u = offsets.dim_size(0) - 1;
    batch.width = static_cast<int>(gradients.dim_size(2));
    OP_REQUIRES_OK(context, CheckOffsets(offsets, "offsets", batch.u, factors.dim_size(0)));
    OP_REQUIRES_OK(context, CheckOffsets(starts, "starts", batch.u, batch.n));
    OP_REQUIRES_OK(context, CheckLength(order, "order", batch.n));
    batch.offsets = offsets.flat<int32_t>().data();
    tensorflow::Tensor* sums;
    OP_REQUIRES_OK(context, context->allocate_output(0, factors.shape(), &sums));
    OP_REQUIRES(context,
                HistoriesGradient(batch, places.flat<int32_t>().data(),
                                  gradients.dim_size(0) * gradients.dim_size(1),
                                  starts.flat<int32_t>().data(), order.flat<int32_t>().data(),
                                  gradients.flat<float>().data(), ParallelForOf(context),
                                  sums->flat<float>().data()),
                absl::InvalidArgumentError(absl::StrCat("order, places: wanted positions in [0, ",
                                                        batch.n, ") and in vectors_grad")));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrHistoryGrad").Device(tensorflow::DEVICE_CPU), HistoryGradOp);

}  // namespace
}  // namespace ctr
