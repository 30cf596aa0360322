#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

// Not stateful: a function runs its stateful ops in the order of the program, and exchanges that
// overlap are to be timed.
REGISTER_OP("CtrClock")
    .Input("after: T")
    .Output("seconds: double")
    .Attr("T: type")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The time when `after` was there, by a clock that never goes back.

after: any tensor that is no constant.
seconds: [], since some moment of the past.
)doc");
