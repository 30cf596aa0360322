// Deletes features by key: a worker's copies of rows that the servers have evicted.
#include "ops/cc/kernels/row_store_kernels.h"

namespace ctr {
namespace {

class RowStoreEraseOp : public RowStoreOpKernel {
 public:
  using RowStoreOpKernel::RowStoreOpKernel;

 private:
  void ComputeOnRows(tensorflow::OpKernelContext* context, FeatureTableResource* resource,
                     RowStore*) override {
    const tensorflow::Tensor& keys = context->input(1);
    OP_REQUIRES_OK(context, CheckVector(keys, "keys"));
    resource->table()->Erase(keys.flat<int64_t>().data(), keys.NumElements());
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrRowStoreErase").Device(tensorflow::DEVICE_CPU), RowStoreEraseOp);

}  // namespace
}  // namespace ctr
