// Takes an optimizer step on the rows of distinct keys, then adds their shows and clicks.
#include "ops/cc/kernels/row_store_kernels.h"

namespace ctr {
namespace {

class RowStorePushOp : public RowStoreOpKernel {
 public:
  explicit RowStorePushOp(tensorflow::OpKernelConstruction* context) : RowStoreOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("add", &add_));
  }

 private:
  void ComputeOnRows(tensorflow::OpKernelContext* context, FeatureTableResource*,
                     RowStore* store) override {
    const tensorflow::Tensor &keys = context->input(1), &factors_grad = context->input(7),
                             &scale = context->input(8), &hyper = context->input(9);
    OP_REQUIRES_OK(context, CheckVector(keys, "keys"));
    OP_REQUIRES_OK(context, CheckVector(factors_grad, "factors_grad"));
    const int64_t n = keys.dim_size(0);
    OP_REQUIRES_OK(context, CheckLength(context->input(2), "ids", n));
    OP_REQUIRES_OK(context,
                   CheckOffsets(context->input(3), "offsets", n, factors_grad.dim_size(0)));
    OP_REQUIRES_OK(context, CheckLength(context->input(4), "shows", n));
    OP_REQUIRES_OK(context, CheckLength(context->input(5), "clicks", n));
    OP_REQUIRES_OK(context, CheckLength(context->input(6), "linear_grad", n));
    OP_REQUIRES(
        context, scale.dims() == 1 && (scale.dim_size(0) == 1 || scale.dim_size(0) == n),
        absl::InvalidArgumentError(absl::StrCat("scale: found shape ", scale.shape().DebugString(),
                                                "; wanted [1] or [", n, "]")));
    const int64_t tables = store->layout().tables.size();
    OP_REQUIRES(context, hyper.shape() == tensorflow::TensorShape({tables, 2, kRowHyperFields}),
                absl::InvalidArgumentError(absl::StrCat("hyper: found shape ",
                                                        hyper.shape().DebugString(), "; wanted [",
                                                        tables, ", 2, ", kRowHyperFields, "]")));
    OP_REQUIRES_OK(context, CheckScalar(context->input(10), "step"));
    RowPush push;
    push.n = n;
    push.keys = keys.flat<int64_t>().data();
    push.ids = context->input(2).flat<int64_t>().data();
    push.offsets = context->input(3).flat<int32_t>().data();
    push.shows = context->input(4).flat<float>().data();
    push.clicks = context->input(5).flat<float>().data();
    push.linear_grad = context->input(6).flat<float>().data();
    push.factors_grad = factors_grad.flat<float>().data();
    push.scale = scale.flat<float>().data();
    push.scale_n = scale.dim_size(0);
    push.hyper = reinterpret_cast<const RowHyper*>(hyper.flat<float>().data());
    push.step = context->input(10).scalar<int64_t>()();
    push.add = add_;
    OP_REQUIRES_OK(context, ToTensorFlow(store->Push(push, ParallelForOf(context))));
  }

  bool add_;
};
REGISTER_KERNEL_BUILDER(Name("CtrRowStorePush").Device(tensorflow::DEVICE_CPU), RowStorePushOp);

}  // namespace
}  // namespace ctr
