// Brings every row up to date with the steps that it missed.
#include "ops/cc/kernels/row_store_kernels.h"

namespace ctr {
namespace {

class RowStoreCatchUpOp : public RowStoreOpKernel {
 public:
  using RowStoreOpKernel::RowStoreOpKernel;

 private:
  void ComputeOnRows(tensorflow::OpKernelContext* context, FeatureTableResource*,
                     RowStore* store) override {
    const tensorflow::Tensor& hyper = context->input(1);
    const int64_t tables = store->layout().tables.size();
    OP_REQUIRES(context, hyper.shape() == tensorflow::TensorShape({tables, 2, kRowHyperFields}),
                absl::InvalidArgumentError(absl::StrCat("hyper: found shape ",
                                                        hyper.shape().DebugString(), "; wanted [",
                                                        tables, ", 2, ", kRowHyperFields, "]")));
    OP_REQUIRES_OK(context, CheckScalar(context->input(2), "step"));
    OP_REQUIRES_OK(context, ToTensorFlow(store->CatchUp(
                                reinterpret_cast<const RowHyper*>(hyper.flat<float>().data()),
                                context->input(2).scalar<int64_t>()(), ParallelForOf(context))));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrRowStoreCatchUp").Device(tensorflow::DEVICE_CPU),
                        RowStoreCatchUpOp);

}  // namespace
}  // namespace ctr
