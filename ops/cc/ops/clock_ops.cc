#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

// Not stateful: a function runs its stateful ops one after another in the order of the program, but
// this op must time exchanges that overlap.
REGISTER_OP("CtrClock")
    .Input("after: T")
    .Output("seconds: double")
    .Attr("T: type")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns the time at which `after` was computed, by a clock that never goes back.

after: any tensor but a constant.
seconds: [], since some moment in the past.
)doc");
