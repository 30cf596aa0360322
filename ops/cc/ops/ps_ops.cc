// Registrations of the ops that only parameter servers and their workers need.
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace ctr {
namespace {

REGISTER_OP("CtrRowStoreErase")
    .Input("table: resource")
    .Input("keys: int64")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle keys;
      return c->WithRank(c->input(1), 1, &keys);
    })
    .Doc(R"doc(
Deletes features and their rows; it skips absent features.

keys: [n].
)doc");

}  // namespace
}  // namespace ctr
