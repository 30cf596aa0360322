"""Low-rank cross network and its head, fused: a tile of samples stays in the cache through all layers."""
import tensorflow as tf

from ops import library


def logits(parts, v, u, b, head):
  """x_{l+1} = x_0 ⊙ (x_l V_l U_l + b_l) + x_l for l < L, then ⟨x_L, head⟩.

  Args:
    parts: list of float32 [B, W_i], whose columns side by side are x_0 [B, W].
    v, u, b: float32 [L, W, r], [L, r, W] and [L, W].
    head: float32 [W].
  Returns: float32 [B], differentiable in all of them.
  """
  return library.load().ctr_cross(parts=parts, v=v, u=u, b=b, head=head).logits


@tf.RegisterGradient('CtrCross')
def _gradient(op, grad, _):
  *parts, v, u, b, head = op.inputs
  grads = library.load().ctr_cross_grad(parts=parts, v=v, u=u, b=b, head=head, inner=op.outputs[1], grad=grad)
  return [*grads.parts_grad, *grads[1:]]
