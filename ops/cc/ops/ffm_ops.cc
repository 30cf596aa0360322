#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("CtrFfm")
    .Input("factors: float")
    .Output("pairs: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle factors;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 3, &factors));
      c->set_output(0, c->Vector(c->Dim(factors, 0)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sums the pairs of a field-aware factorization machine: for each sample, 1/2 sum over f and g of
<A[f, g], A[g, f]>.

factors: [B, F, F*D]; A[f, g] lies at columns [g*D, (g+1)*D) of row f.
pairs: [B].
)doc");

REGISTER_OP("CtrFfmGrad")
    .Input("factors: float")
    .Input("grad: float")
    .Output("factors_grad: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle factors, grad;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 3, &factors));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &grad));
      c->set_output(0, factors);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gradient of CtrFfm: grad[b] * A[g, f] at A[f, g].

factors: [B, F, F*D], the input of CtrFfm.
grad: [B].
factors_grad: [B, F, F*D].
)doc");
