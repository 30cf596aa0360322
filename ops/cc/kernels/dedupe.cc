// CtrDedupe: finds the distinct keys of a batch and sums their shows and clicks.
#include "ops/cc/rows/dedupe.h"

#include "ops/cc/kernels/row_store_kernels.h"
#include "ops/cc/rows/scratch_pool.h"

namespace ctr {
namespace {

class DedupeOp : public tensorflow::OpKernel {
 public:
  explicit DedupeOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("fields", &fields_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& keys = context->input(0);
    OP_REQUIRES_OK(context, CheckVector(keys, "keys"));
    const int64_t n = keys.dim_size(0);
    for (int i = 1; i <= 2; ++i) {
      const tensorflow::Tensor& counts = context->input(i);
      OP_REQUIRES_OK(context, CheckVector(counts, i == 1 ? "shows" : "clicks"));
      if (i == 2 && fields_ > 0) continue;
      OP_REQUIRES(context, counts.dim_size(0) == 1 || counts.dim_size(0) == n,
                  absl::InvalidArgumentError(
                      absl::StrCat(i == 1 ? "shows" : "clicks", ": found shape ",
                                   counts.shape().DebugString(), "; wanted [1] or [", n, "]")));
    }
    const ParallelFor parallel_for = ParallelForOf(context);
    const ScratchPool<Dedupe>::Lease dedupe(&pool_);
    const tensorflow::Tensor &of_shows = context->input(1), &of_clicks = context->input(2),
                             &segments = context->input(3);
    OP_REQUIRES_OK(context, CheckVector(segments, "segments"));
    Dedupe::Batch batch{keys.flat<int64_t>().data(),
                        n,
                        of_shows.flat<float>().data(),
                        of_shows.dim_size(0),
                        of_clicks.flat<float>().data(),
                        of_clicks.dim_size(0),
                        fields_,
                        nullptr};
    if (segments.NumElements() > 0) {
      OP_REQUIRES_OK(context, CheckLength(segments, "segments", n));
      batch.segments = segments.flat<int32_t>().data();
    }
    tensorflow::Tensor *unique, *inverse, *shows, *clicks, *starts, *order;
    OP_REQUIRES_OK(context, context->allocate_output(5, {n}, &order));
    const int64_t u = dedupe->Find(batch, parallel_for,
                                   context->device()->tensorflow_cpu_worker_threads()->num_threads,
                                   order->flat<int32_t>().data());
    OP_REQUIRES(context, u >= 0,
                absl::InvalidArgumentError(absl::StrCat("segments: wanted them of the ",
                                                        batch.clicks_n, " samples of ", fields_,
                                                        " fields that clicks has")));
    OP_REQUIRES_OK(context, context->allocate_output(0, {u}, &unique));
    OP_REQUIRES_OK(context, context->allocate_output(1, {n}, &inverse));
    OP_REQUIRES_OK(context, context->allocate_output(2, {u}, &shows));
    OP_REQUIRES_OK(context, context->allocate_output(3, {u}, &clicks));
    OP_REQUIRES_OK(context, context->allocate_output(4, {u + 1}, &starts));
    dedupe->Write(unique->flat<int64_t>().data(), inverse->flat<int32_t>().data(),
                  shows->flat<float>().data(), clicks->flat<float>().data(),
                  starts->flat<int32_t>().data(), parallel_for);
  }

 private:
  int64_t fields_;
  ScratchPool<Dedupe> pool_;
};
REGISTER_KERNEL_BUILDER(Name("CtrDedupe").Device(tensorflow::DEVICE_CPU), DedupeOp);

}  // namespace
}  // namespace ctr
