// Registrations of the feature lifecycle's ops; the kernels are in ops/cc/kernels/lifecycle_*.cc.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace ctr {
namespace {

using absl::Status;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Checks that inputs first … last are vectors of one length, and sets `length` to their shape.
Status EqualVectors(InferenceContext* c, int first, int last, ShapeHandle* length) {
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first), 1, length));
  for (int i = first + 1; i <= last; ++i) {
    ShapeHandle vector;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &vector));
    TF_RETURN_IF_ERROR(c->Merge(*length, vector, length));
  }
  return absl::OkStatus();
}

// Gives every output the shape of input 1, the keys [n].
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

policy: what `ops.policy.Policy.serialize` writes; all handles of one name must have the same.
shared_name: if empty, no other node shares the table.
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
Adds shows and clicks to features, creates absent features, and admits features by the policy. If a
key repeats, its shows and clicks are summed first.

keys: [n], >= 0, in any order.
shows: [n], finite, >= 0.
clicks: [n], finite, >= 0, at most shows unless shows is 0.
slots: the slots of features that are created: [n] in [0, 2047]. If not given, bits 52 to 62 of the
  key.
has_slots: 1 if slots is given, else 0.
admitted: [n], whether the feature is admitted afterwards.
)doc");

REGISTER_OP("CtrLifecycleAdmitted")
    .Input("table: resource")
    .Input("keys: int64")
    .Output("admitted: bool")
    .SetIsStateful()
    .SetShapeFn(LikeKeys)
    .Doc(R"doc(
Returns whether each key's feature is admitted. Creates nothing.

keys: [n], >= 0.
admitted: [n], false if the feature is absent.
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
Returns what the table holds of each key's feature; 0 for an absent feature. Creates nothing.

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
Deletes the features that the policy's tests choose; then, if the policy has a capacity, all but the
best features up to it.

capacity: false: by the tests only. CtrLifecycleEvictBelow can then delete the rest, at a cut that
  several processes share.
keys: [m], the keys that were deleted.
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
Counts the features whose rank starts with `prefix`, for each next digit of the rank. A rank has nine
digits of 16 bits.

prefix: [d], d < 9, digits in [0, 65535].
counts: [65536]; counts of several tables may be added.
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
Deletes the features whose rank begins with digits below the cut.

cut: [d], d <= 9, digits in [0, 65535]; empty: nothing is deleted.
keys: [m], the keys that were deleted.
)doc");

REGISTER_OP("CtrLifecycleClear")
    .Input("table: resource")
    .SetIsStateful()
    .SetShapeFn(NoOutput)
    .Doc("Deletes all features, and their rows if the table is a row store.");

REGISTER_OP("CtrLifecycleSelect")
    .Input("table: resource")
    .Input("among: has_among * int64")
    .Attr("has_among: int >= 0 = 0")
    .Attr("kind: {'delta', 'base', 'all'}")
    .Output("keys: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      if (c->num_inputs() > 1) TF_RETURN_IF_ERROR(VectorInput(c));
      return UnknownVector(c);
    })
    .Doc(R"doc(
Returns the keys of the features that belong in an export of this kind. The table remembers a
selection for a delta or base, with the delta_score that each feature has now, until it is committed
or the same kind is selected again.

among: the keys of the only features to look at, [n]. If not given, all.
has_among: 1 if among is given, else 0.
keys: [m], ordered by shard of the table, then by key.
)doc");

REGISTER_OP("CtrLifecycleCommit")
    .Input("table: resource")
    .Input("keys: int64")
    .Attr("kind: {'delta', 'base', 'all'}")
    .SetIsStateful()
    .SetShapeFn(VectorInput)
    .Doc(R"doc(
Marks selected features as written, once their export is complete: subtracts from each delta_score
what it was at the selection, so that what was gained since remains. For kind all it changes nothing.

keys: [n], keys of the last selection of this kind; features that were deleted since are skipped.
)doc");

REGISTER_OP("CtrLifecycleSize")
    .Input("table: resource")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(Scalar)
    .Doc("Returns the number of features.");

REGISTER_OP("CtrLifecycleAdmittedSize")
    .Input("table: resource")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(Scalar)
    .Doc("Returns the number of admitted features.");

REGISTER_OP("CtrLifecycleBytes")
    .Input("table: resource")
    .Output("bytes: int64")
    .SetIsStateful()
    .SetShapeFn(Scalar)
    .Doc("Returns how many bytes the table, and the rows beside it, have allocated.");

REGISTER_OP("CtrLifecycleCountChanges")
    .Input("table: resource")
    .Output("count: int64")
    .SetIsStateful()
    .SetShapeFn(Scalar)
    .Doc(R"doc(
Returns how many features, or rows of theirs, have changed since the last CtrLifecycleKeepChanges;
-1 if that is not known: there was none, a feature was deleted, a day has ended, or about half of
the features changed.
)doc");

REGISTER_OP("CtrLifecycleKeepChanges")
    .Input("table: resource")
    .SetIsStateful()
    .SetShapeFn(NoOutput)
    .Doc("Begins to note anew which features change, because a checkpoint has them as they are.");

REGISTER_OP("CtrLifecycleTakeChanges")
    .Input("table: resource")
    .Output("known: bool")
    .Output("keys: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Lists the features that have changed since the last CtrLifecycleTakeChanges, for deltas, and begins
to note anew which features change.

known: whether `keys` are all; false where CtrLifecycleCountChanges would return -1.
keys: [n], in no particular order.
)doc");

REGISTER_OP("CtrLifecycleExport")
    .Input("table: resource")
    .Input("span: int64")
    .Attr("changed: bool = false")
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
Returns features of consecutive shards of the table, in the order of the shards.

span: [4]: the shard and the place in it to begin at, the shard to stop before, and the most features
  to return, >= 1. Begin at place 0, and then at the `next` of the last call.
next: [2]: the shard and the place to begin the next call at. At the end it is the shard to stop
  before.
changed: whether to return only the features that CtrLifecycleCountChanges counts.
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
        "Adds features of any shards; each column is [n]. If one is not valid or exists already, "
        "it "
        "fails as DataLoss and adds nothing.");

}  // namespace
}  // namespace ctr
