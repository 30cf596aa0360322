#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

class LifecycleLookupOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    const tensorflow::Tensor& keys = context->input(1);
    OP_REQUIRES_OK(context, CheckVector(keys, "keys"));
    tensorflow::Tensor* outputs[8];
    for (int i = 0; i < 8; ++i)
      OP_REQUIRES_OK(context, context->allocate_output(i, keys.shape(), &outputs[i]));
    LookupResult result;
    result.show = outputs[0]->flat<double>().data();
    result.click = outputs[1]->flat<double>().data();
    result.delta_score = outputs[2]->flat<double>().data();
    result.unseen_days = outputs[3]->flat<int32_t>().data();
    result.age_days = outputs[4]->flat<int32_t>().data();
    result.slot = outputs[5]->flat<int32_t>().data();
    result.admitted = outputs[6]->flat<bool>().data();
    result.exists = outputs[7]->flat<bool>().data();
    OP_REQUIRES_OK(context, ToTensorFlow(resource->table()->Lookup(
                                keys.flat<int64_t>().data(), keys.NumElements(),
                                ParallelForOf(context), result)));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleLookup").Device(tensorflow::DEVICE_CPU),
                        LifecycleLookupOp);

}  // namespace
}  // namespace ctr
