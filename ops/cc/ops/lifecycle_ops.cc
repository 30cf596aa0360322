// Registrations of the feature lifecycle's ops; a kernel file each in
// ops/cc/kernels/lifecycle_*.cc.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace ctr {
namespace {

using absl::Status;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Inputs first … last are vectors of one length; `length` gets it.
Status EqualVectors(InferenceContext* c, int first, int last, ShapeHandle* length) {
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first), 1, length));
  for (int i = first + 1; i <= last; ++i) {
    ShapeHandle vector;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &vector));
    TF_RETURN_IF_ERROR(c->Merge(*length, vector, length));
  }
  return absl::OkStatus();
}

// Input 1, the keys [n], gives every output its shape.
Status LikeKeys(InferenceContext* c) {
  ShapeHandle keys;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, keys);
  return absl::OkStatus();
}

Status ObserveShape(InferenceContext* c) {
  ShapeHandle keys;
  TF_RETURN_IF_ERROR(EqualVectors(c, 1, c->num_inputs() - 1, &keys));
  c->set_output(0, keys);
  return absl::OkStatus();
}

Status NoOutput(InferenceContext*) { return absl::OkStatus(); }

Status UnknownVector(InferenceContext* c) {
  c->set_output(0, c->UnknownShapeOfRank(1));
  return absl::OkStatus();
}

Status Scalar(InferenceContext* c) {
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

Status VectorInput(InferenceContext* c) {
  ShapeHandle vector;
  return c->WithRank(c->input(1), 1, &vector);
}

REGISTER_OP("CtrLifecycleHandle")
    .Attr("policy: string")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Output("table: resource")
    .SetIsStateful()
    .SetShapeFn(Scalar)
    .Doc(R"doc(
Creates a feature table, or finds the one of the same container and shared_name.

policy: what `ops.policy.Policy.serialize` writes; a second handle of one name must have the same.
shared_name: empty: the table is this node's own.
)doc");

REGISTER_OP("CtrLifecycleObserve")
    .Input("table: resource")
    .Input("keys: int64")
    .Input("shows: double")
    .Input("clicks: double")
    .Input("slots: has_slots * int64")
    .Attr("has_slots: int >= 0 = 0")
    .Output("admitted: bool")
    .SetIsStateful()
    .SetShapeFn(ObserveShape)
    .Doc(R"doc(
Sums the occurrences of each key, adds them to its feature, which is created where absent, and admits by the policy.

keys: [n], >= 0, in any order, repeats allowed.
shows: [n], finite, >= 0.
clicks: [n], finite, >= 0, at most shows unless that is 0.
slots: none, then a key's slot are its bits 52 to 62; or [n] in [0, 2047]. Counts for features that are created.
has_slots: 0 or 1.
admitted: [n], after the push.
)doc");

REGISTER_OP("CtrLifecycleAdmitted")
    .Input("table: resource")
    .Input("keys: int64")
    .Output("admitted: bool")
    .SetIsStateful()
    .SetShapeFn(LikeKeys)
    .Doc(R"doc(
Whether each key's feature is admitted. Creates nothing.

keys: [n], >= 0.
admitted: [n], false where the feature is absent.
)doc");

REGISTER_OP("CtrLifecycleLookup")
    .Input("table: resource")
    .Input("keys: int64")
    .Output("show: double")
    .Output("click: double")
    .Output("delta_score: double")
    .Output("unseen_days: int32")
    .Output("age_days: int32")
    .Output("slot: int32")
    .Output("admitted: bool")
    .Output("exists: bool")
    .SetIsStateful()
    .SetShapeFn(LikeKeys)
    .Doc(R"doc(
What the table holds of each key; zeros where the feature is absent. Creates nothing.

keys: [n], >= 0. The outputs are [n].
)doc");

REGISTER_OP("CtrLifecycleDecay")
    .Input("table: resource")
    .SetIsStateful()
    .SetShapeFn(NoOutput)
    .Doc("Multiplies show and click of every feature by its decay.");

REGISTER_OP("CtrLifecycleAge")
    .Input("table: resource")
    .SetIsStateful()
    .SetShapeFn(NoOutput)
    .Doc("Adds one to unseen_days and age_days of every feature.");

REGISTER_OP("CtrLifecycleEvict")
    .Input("table: resource")
    .Attr("capacity: bool = true")
    .Output("keys: int64")
    .SetIsStateful()
    .SetShapeFn(UnknownVector)
    .Doc(R"doc(
Deletes features by the policy's tests, then, where the policy has a capacity, all but the best that many.

capacity: false: by the tests only; CtrLifecycleEvictBelow does the rest, at a cut that several processes share.
keys: [m], those deleted.
)doc");

REGISTER_OP("CtrLifecycleRankHistogram")
    .Input("table: resource")
    .Input("prefix: int32")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle prefix;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &prefix));
      c->set_output(0, c->Vector(1 << 16));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Counts the features whose rank, nine digits of 16 bits, starts with `prefix`, by their next digit.

prefix: [d], d < 9, digits in [0, 65535].
counts: [65536]; those of several tables add up.
)doc");

REGISTER_OP("CtrLifecycleEvictBelow")
    .Input("table: resource")
    .Input("cut: int32")
    .Output("keys: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(VectorInput(c));
      return UnknownVector(c);
    })
    .Doc(R"doc(
Deletes the features whose rank starts with digits below the cut.

cut: [d], d <= 9, digits in [0, 65535]; empty: nothing is deleted.
keys: [m], those deleted.
)doc");

REGISTER_OP("CtrLifecycleClear")
    .Input("table: resource")
    .SetIsStateful()
    .SetShapeFn(NoOutput)
    .Doc("Forgets all features, and their rows where a row store stands beside them.");

REGISTER_OP("CtrLifecycleSelect")
    .Input("table: resource")
    .Attr("kind: {'delta', 'base', 'all'}")
    .Output("keys: int64")
    .SetIsStateful()
    .SetShapeFn(UnknownVector)
    .Doc(R"doc(
The keys that a save of this kind writes. Delta and base are remembered, with their delta_score of now, until committed.

keys: [m], by shard of the table, then key.
)doc");

REGISTER_OP("CtrLifecycleCommit")
    .Input("table: resource")
    .Input("keys: int64")
    .Attr("kind: {'delta', 'base', 'all'}")
    .SetIsStateful()
    .SetShapeFn(VectorInput)
    .Doc(R"doc(
After the save: subtracts the delta_score that was selected, so that a gain since then survives. Kind all resets nothing.

keys: [n], of the kind's last selection; features erased since are passed over.
)doc");

REGISTER_OP("CtrLifecycleSize")
    .Input("table: resource")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(Scalar)
    .Doc("The number of features.");

REGISTER_OP("CtrLifecycleAdmittedSize")
    .Input("table: resource")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(Scalar)
    .Doc("The number of admitted features.");

REGISTER_OP("CtrLifecycleBytes")
    .Input("table: resource")
    .Output("bytes: int64")
    .SetIsStateful()
    .SetShapeFn(Scalar)
    .Doc("The bytes that the table, and what is attached to it, allocated.");

REGISTER_OP("CtrLifecycleExport")
    .Input("table: resource")
    .Input("span: int64")
    .Output("key: int64")
    .Output("show: double")
    .Output("click: double")
    .Output("delta_score: double")
    .Output("unseen_days: uint16")
    .Output("age_days: uint16")
    .Output("slot: uint16")
    .Output("admitted: bool")
    .Output("next: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle span;
      TF_RETURN_IF_ERROR(c->Merge(c->input(1), c->Vector(4), &span));
      const ShapeHandle vector = c->Vector(c->UnknownDim());
      for (int i = 0; i < 8; ++i) c->set_output(i, vector);
      c->set_output(8, c->Vector(2));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Some features of consecutive shards of the table, in their order.

span: [4]: the shard to begin with and the place in it (0, or both as the last call gave them as next), the shard to stop before, and how many features at most, >= 1.
next: [2]: shard and place to go on from; the shard to stop before at the end.
)doc");

REGISTER_OP("CtrLifecycleImport")
    .Input("table: resource")
    .Input("key: int64")
    .Input("show: double")
    .Input("click: double")
    .Input("delta_score: double")
    .Input("unseen_days: uint16")
    .Input("age_days: uint16")
    .Input("slot: uint16")
    .Input("admitted: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle length;
      return EqualVectors(c, 1, 8, &length);
    })
    .Doc(
        "Adds features, [n] a column, of any shards. DataLoss, and nothing is added, where one is "
        "not valid or "
        "exists.");

REGISTER_OP("CtrLifecycleAbsorb")
    .Input("table: resource")
    .Input("other: resource")
    .Attr("replace: bool")
    .SetIsStateful()
    .SetShapeFn(NoOutput)
    .Doc(R"doc(
Takes the features of another table, which is not to be used any more.

replace: in place of the table's own; else DataLoss where a key is in both.
)doc");

}  // namespace
}  // namespace ctr
