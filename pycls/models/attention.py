"""Kernels of scaled dot-product attention (arXiv 1706.03762): softmax(q k^T / sqrt(channels)) v.

Each takes queries, keys and values (batch, heads, tokens, channels), of any strides, and returns the same shape.
"""

import math
from typing import Callable, Dict

import torch
from torch.nn import functional as F


def formula(q, k, v):
    """The formula, step by step: the reference that the fast kernels are held to."""
    # Scaled before the product, which fp16 could not hold otherwise.
    logits = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    return logits.softmax(dim=-1) @ v


def unfused(q, k, v):
    """Batched matrix products with the weights kept for the backward pass, as exact as fused kernels in 16 bit.

    Logits and softmax are in at least fp32; what they are made of and multiplied with stays in the dtype of `q`.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _Unfused.apply(q, k, v)


class _Unfused(torch.autograd.Function):
    # By hand, because autograd would run the backward pass of the fp32 part in fp32, at half the speed.

    @staticmethod
    def forward(ctx, q, k, v):
        shape, scale = q.shape, q.shape[-1] ** -0.5
        q, k, v = (t.reshape(-1, *shape[-2:]) for t in (q, k, v))
        exact = torch.promote_types(q.dtype, torch.float32)
        logits = _product(q.to(exact), k.to(exact).transpose(1, 2), scale)
        weights = logits.softmax(dim=-1).to(q.dtype)
        ctx.save_for_backward(q, k, v, weights)
        return torch.bmm(weights, v).view(shape)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        shape, scale = grad.shape, q.shape[-1] ** -0.5
        grad = grad.reshape(q.shape)
        grad_v = torch.bmm(weights.transpose(1, 2), grad)
        grad_weights = torch.bmm(grad, v.transpose(1, 2))
        grad_logits = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_q = _product(grad_logits, k, scale)
        grad_k = _product(grad_logits.transpose(1, 2), q, scale)
        return grad_q.view(shape), grad_k.view(shape), grad_v.view(shape)


def _product(a, b, scale: float):
    """scale * a @ b of batches of matrices, in one kernel."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)


def automatic(q, k, v):
    """The faster kernel of the device: on the CPU, torch's fused one takes twice the time of products in bf16."""
    if q.device.type == "cpu" and q.dtype is torch.bfloat16:
        return unfused(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


# VIT.ATTENTION
KERNELS: Dict[str, Callable] = {
    "auto": automatic,
    "sdpa": F.scaled_dot_product_attention,
    "unfused": unfused,
    "math": formula,
}
