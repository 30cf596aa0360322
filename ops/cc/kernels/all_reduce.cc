// CtrAllReduce: sums tensors over ranks.
#include "ops/cc/kernels/connections_resource.h"
#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

template <typename T>
class AllReduceOp : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override {
    std::shared_ptr<ConnectionsResource> resource;
    OP_REQUIRES_OK_ASYNC(context, LookupConnections(context, &resource), done);
    Spans own, sums;
    for (int i = 1; i < context->num_inputs(); ++i) {
      tensorflow::Tensor* sum;
      OP_REQUIRES_OK_ASYNC(context,
                           context->allocate_output(i - 1, context->input(i).shape(), &sum), done);
      own.push_back(SpanOf(context->input(i)));
      sums.push_back(SpanOf(*sum));
    }
    resource->Run(
        [context, resource, done = std::move(done), own = std::move(own), sums = std::move(sums)] {
          context->SetStatus(ToTensorFlow(resource->connections()->AllReduce<T>(own, sums)));
          done();
        });
  }
};

#define REGISTER(T)        \
  REGISTER_KERNEL_BUILDER( \
      Name("CtrAllReduce").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), AllReduceOp<T>)
REGISTER(float);
REGISTER(double);
REGISTER(int64_t);
#undef REGISTER

}  // namespace
}  // namespace ctr
