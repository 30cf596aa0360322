// Sums over ranks.
#include "ops/cc/kernels/feature_table_resource.h"
#include "ops/cc/kernels/lane_resource.h"

namespace ctr {
namespace {

class AllReduceOp : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override {
    std::shared_ptr<LaneResource> resource;
    OP_REQUIRES_OK_ASYNC(context, LookupLane(context, &resource), done);
    Spans own, sums;
    for (int i = 1; i < context->num_inputs(); ++i) {
      tensorflow::Tensor* sum;
      OP_REQUIRES_OK_ASYNC(context, context->allocate_output(i - 1, context->input(i).shape(), &sum), done);
      own.push_back(SpanOf(context->input(i)));
      sums.push_back(SpanOf(*sum));
    }
    resource->Run([context, resource, done = std::move(done), own = std::move(own), sums = std::move(sums)] {
      context->SetStatus(ToTensorFlow(resource->lane()->AllReduce(own, sums)));
      done();
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrAllReduce").Device(tensorflow::DEVICE_CPU), AllReduceOp);

}  // namespace
}  // namespace ctr
