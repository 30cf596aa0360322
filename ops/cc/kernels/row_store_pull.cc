// Reads the rows of distinct keys.
#include "ops/cc/kernels/row_store_kernels.h"

namespace ctr {
namespace {

class RowStorePullOp : public RowStoreOpKernel {
 public:
  explicit RowStorePullOp(tensorflow::OpKernelConstruction* context) : RowStoreOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("train", &train_));
  }

 private:
  void ComputeOnRows(tensorflow::OpKernelContext* context, FeatureTableResource*,
                     RowStore* store) override {
    const tensorflow::Tensor& keys = context->input(1);
    OP_REQUIRES_OK(context, CheckVector(keys, "keys"));
    const int64_t n = keys.dim_size(0);
    tensorflow::Tensor *ids, *offsets, *linear, *factors;
    OP_REQUIRES_OK(context, context->allocate_output(0, {n}, &ids));
    OP_REQUIRES_OK(context, context->allocate_output(1, {n + 1}, &offsets));
    OP_REQUIRES_OK(context, context->allocate_output(2, {n}, &linear));
    OP_REQUIRES_OK(context, ToTensorFlow(store->Pull(
                                keys.flat<int64_t>().data(), n, train_, ParallelForOf(context),
                                ids->flat<int64_t>().data(), offsets->flat<int32_t>().data(),
                                linear->flat<float>().data(), [&](int64_t total) -> float* {
                                  const absl::Status status =
                                      context->allocate_output(3, {total}, &factors);
                                  if (status.ok()) return factors->flat<float>().data();
                                  context->SetStatus(status);
                                  return nullptr;
                                })));
  }

  bool train_;
};
REGISTER_KERNEL_BUILDER(Name("CtrRowStorePull").Device(tensorflow::DEVICE_CPU), RowStorePullOp);

}  // namespace
}  // namespace ctr
