// Registrations of the collectives between ranks.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace ctr {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("CtrLaneHandle")
    .Attr("fds: list(int)")
    .Attr("rank: int >= 0")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Output("lane: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Takes over connected sockets for collectives.

fds: file descriptors, a rank each; -1 at this rank's own place. They are closed with the lane.
rank: this process's.
lane: collectives on one lane follow one another, in the same order on every rank.
)doc");

REGISTER_OP("CtrAllToAll")
    .Input("lane: resource")
    .Input("values: T")
    .Input("counts: int32")
    .Attr("T: list({int64, int32, uint8, float, half, bfloat16}) >= 1")
    .Output("received: T")
    .Output("received_counts: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle values, counts;
      const int n = c->num_inputs() - 2;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(n + 1), 1, &counts));
      for (int i = 0; i < n; ++i) {
        TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1 + i), 1, &values));
        TF_RETURN_IF_ERROR(c->ReplaceDim(values, 0, c->UnknownDim(), &values));
        c->set_output(i, values);
      }
      c->set_output(n, counts);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sends rows to every rank and receives theirs. Every rank runs it, with no rows too.

values: tensors [n, …], rank 0's rows, then rank 1's, …, of each.
counts: [N] how many are each rank's; they sum to n.
received: [m, …] what rank 0 had for this rank, then rank 1, …, of each tensor.
received_counts: [N] how many each sent.
Aborted naming a rank whose connection ended.
)doc");

REGISTER_OP("CtrAllReduce")
    .Input("lane: resource")
    .Input("values: n * float")
    .Attr("n: int >= 1")
    .Output("sums: n * float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 1; i < c->num_inputs(); ++i) c->set_output(i - 1, c->input(i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sums over ranks, in their order: the same bits on all. Every rank runs it, with the same shapes.

values: of any shapes.
sums: of the same shapes.
Aborted naming a rank whose connection ended; DataLoss where ranks differ in their number of values.
)doc");

}  // namespace
}  // namespace ctr
