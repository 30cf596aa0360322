// Forgets all features and their rows.
#include "ops/cc/kernels/row_store_kernels.h"

namespace ctr {
namespace {

class RowStoreClearOp : public RowStoreOpKernel {
 public:
  using RowStoreOpKernel::RowStoreOpKernel;

 private:
  void ComputeOnRows(tensorflow::OpKernelContext* context, FeatureTableResource* resource, RowStore*) override {
    resource->table()->Clear(ParallelForOf(context));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrRowStoreClear").Device(tensorflow::DEVICE_CPU), RowStoreClearOp);

}  // namespace
}  // namespace ctr
