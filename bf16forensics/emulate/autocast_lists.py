"""What CUDA autocast does with which operation: the lists of PyTorch, and the Python functions that stand for them.

The lists are those of the header that every PyTorch carries, aten/src/ATen/autocast_mode.h, read from PyTorch 2.13.0:
AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE and
AT_FORALL_PROMOTE. Operations in no list follow type promotion.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional

#: Operands are cast to BF16.
LOWER_PRECISION = tuple(
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu "
    "addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "_scaled_dot_product_flash_attention scaled_dot_product_attention".split()
)
#: Operands are cast to FP32.
FP32 = tuple(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d "
    "upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa".split()
)
#: The first operand is cast to FP32 unless the caller names a dtype.
FP32_UNLESS_DTYPE = tuple(
    "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm".split()
)
#: Operands are cast to the widest of their own formats.
PROMOTE = tuple("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split())
#: Composed of listed operations, so that these cast what is theirs: the result is that of FP32 operands.
COMPOSED_FP32 = tuple("square __pow__ __rpow__ __rdiv__ __rtruediv__ cross_entropy".split())
COMPOSED_FP32_UNLESS_DTYPE = tuple("softmin linalg_norm".split())
#: Refused by autocast itself.
BANNED = ("binary_cross_entropy",)

#: Names below the Python functions: products, which autocast runs in BF16 ...
PRODUCT_KERNELS = frozenset(
    "addmm addmv addr addbmm baddbmm bmm convolution dot einsum linear matmul mm mv vdot _addmm_activation _grouped_mm "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math _prelu_kernel _trilinear "
    "mkldnn_rnn_layer _thnn_fused_lstm_cell _thnn_fused_gru_cell".split()
)
#: ... and what it runs in FP32, or leaves alone though a CPU would compute it otherwise (in-place products).
KERNELS_REFUSED_IF_NARROW = frozenset((*FP32, *FP32_UNLESS_DTYPE)) | frozenset(
    "_softmax _log_softmax native_group_norm _fused_rms_norm nll_loss_forward nll_loss2d_forward _cdist_forward "
    "multilabel_margin_loss_forward _euclidean_dist _pdist_forward addmm_ addmv_ addr_ addbmm_ baddbmm_".split()
)

_NAMESPACES = (torch, torch.Tensor, functional, torch._C._nn, torch.special)


def functions_named(name: str) -> Iterator[Callable[..., Any]]:
    """The Python functions and methods that run an operation of a list, as a function mode sees them."""
    owners: Iterable[tuple[Any, str]] = [(owner, name) for owner in _NAMESPACES]
    if name.startswith("linalg_"):
        owners = [*owners, (torch.linalg, name.removeprefix("linalg_"))]
    for owner, own_name in owners:
        found = getattr(owner, own_name, None)
        if callable(found):
            yield found
