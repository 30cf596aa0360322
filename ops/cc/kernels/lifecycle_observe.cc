#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

class LifecycleObserveOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    const tensorflow::Tensor &keys = context->input(1), &shows = context->input(2),
                             &clicks = context->input(3);
    OP_REQUIRES_OK(context, CheckVector(keys, "keys"));
    const int64_t n = keys.NumElements();
    OP_REQUIRES_OK(context, CheckVector(shows, "shows", n));
    OP_REQUIRES_OK(context, CheckVector(clicks, "clicks", n));
    const int64_t* slots = nullptr;
    if (context->num_inputs() > 4) {
      OP_REQUIRES_OK(context, CheckVector(context->input(4), "slots", n));
      slots = context->input(4).flat<int64_t>().data();
    }
    tensorflow::Tensor* admitted;
    OP_REQUIRES_OK(context, context->allocate_output(0, keys.shape(), &admitted));
    OP_REQUIRES_OK(context, ToTensorFlow(resource->table()->Observe(
                                keys.flat<int64_t>().data(), shows.flat<double>().data(),
                                clicks.flat<double>().data(), slots, n, ParallelForOf(context),
                                admitted->flat<bool>().data())));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleObserve").Device(tensorflow::DEVICE_CPU),
                        LifecycleObserveOp);

}  // namespace
}  // namespace ctr
