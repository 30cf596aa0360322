// Registrations of the collectives between ranks.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace ctr {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("CtrConnectionsHandle")
    .Attr("fds: list(int)")
    .Attr("rank: int >= 0")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Output("connections: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Makes connections for collectives between ranks, from connected sockets.

fds: a file descriptor for each rank, -1 at this rank's place. Deleting the connections closes them.
rank: the rank of this process.
connections: run one collective after the other, in the same order on every rank.
)doc");

REGISTER_OP("CtrAllToAll")
    .Input("connections: resource")
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
Sends rows to every rank, and waits for theirs. Every rank runs it, even without rows.

values: tensors [n, …], each holding the rows for rank 0, then those for rank 1, and so on.
counts: [N] how many rows go to each rank; they sum to n.
received: tensors [m, …] of the rows that rank 0 sent to this rank, then rank 1, and so on.
received_counts: [N] how many rows each rank sent.
It fails with Aborted if a connection ended; DataLoss if a rank runs another operation. Both name the
rank.
)doc");

REGISTER_OP("CtrConnectionsCounters")
    .Input("connections: resource")
    .Output("counters: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(4));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Counts what the connections have done since they were made.

counters: [4] the numbers of connections to other ranks, bytes sent, bytes received, system calls.
)doc");

}  // namespace
}  // namespace ctr
