#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("CtrCross")
    .Attr("N: int >= 1")
    .Input("parts: N * float")
    .Input("v: float")
    .Input("u: float")
    .Input("b: float")
    .Input("head: float")
    .Output("logits: float")
    .Output("inner: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle part, v;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &part));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 4), 3, &v));
      c->set_output(0, c->Vector(c->Dim(part, 0)));
      c->set_output(1, c->MakeShape({c->Dim(part, 0), c->Dim(v, 0), c->Dim(v, 2)}));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Low-rank cross network and its head: x_{l+1} = x0 * (x_l v_l u_l + b_l) + x_l for l < L, logit = <x_L, head>.

parts: [B, W_i], whose columns side by side are x0, [B, W].
v: [L, W, R].
u: [L, R, W].
b: [L, W].
head: [W].
logits: [B].
inner: [B, L, R], x_l v_l, which the gradient reads.
)doc");

REGISTER_OP("CtrCrossGrad")
    .Attr("N: int >= 1")
    .Input("parts: N * float")
    .Input("v: float")
    .Input("u: float")
    .Input("b: float")
    .Input("head: float")
    .Input("inner: float")
    .Input("grad: float")
    .Output("parts_grad: N * float")
    .Output("v_grad: float")
    .Output("u_grad: float")
    .Output("b_grad: float")
    .Output("head_grad: float")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gradient of CtrCross; summed over samples in an order that does not depend on the number of threads.

inner: what CtrCross gave.
grad: [B], gradient of the logits.
)doc");
