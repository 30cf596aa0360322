// CtrClock: reads the clock when the op runs.
#include <chrono>

#include "tensorflow/core/framework/op_kernel.h"

namespace {

class ClockOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tensorflow::OpKernelContext* c) override {
    tensorflow::Tensor* seconds;
    OP_REQUIRES_OK(c, c->allocate_output(0, tensorflow::TensorShape({}), &seconds));
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    seconds->scalar<double>()() = std::chrono::duration<double>(now).count();
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrClock").Device(tensorflow::DEVICE_CPU), ClockOp);

}  // namespace
