"""FedAlign: FedAvg whose clients align the Lipschitz constant of their last block with that of a narrower one.

Mendieta et al., CVPR 2022, "Local Learning Matters: Rethinking Data Heterogeneity in Federated Learning".

    paper      here          meaning
    ω_S        width         the share of the block's inner channels that the slim block has
    F^{L-1}    stage_in      features that enter the last block, [C', H'·W'] by sample
    F^L        stage_out     features that leave it, [C, H·W]
    X          -             transmitting matrix F^{L-1} (F^L)ᵀ / HW: how the block carries its input on
    K_F, K_S   lipschitz     the largest singular value of X, of the full and of the slim block
    μ          mu

Departures
    D1  the slim block's running statistics are not kept. Where no normalisation ends a block, its slim output is scaled
        to the full width: else K_S < K_F by the width alone, and chasing it the weights would grow without end.
    D2  the power iteration's vector is held fixed when K_S is differentiated: where it has converged the gradient is
        the same, and it need not be unrolled.
    D3  as in the released code, K_F is a target without gradient, the distance is rescaled to the size of the
        cross-entropy at every step, and gradients are clipped: the nearer K_S is to K_F, the longer the rescaled one's.
    D4  the paper has residual networks; elsewhere the last block is the last two layers before the head. A network
        without two (mlr, dnn with one hidden layer) has no inner channels: there FedAlign is FedAvg, and says so.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm  # its gradient at 0 is 0
from torch.nn.functional import adaptive_avg_pool2d

from fedkd.algorithms.base import Nets, OneModel, Setting, SharedModel, only, register
from fedkd.algorithms.steps import supervised
from fedkd.core.losses import Batch, cross_entropy
from fedkd.core.tree import Params
from fedkd.federation.fed import Federation
from fedkd.federation.placed import Placed
from fedkd.models.net import Net

log = logging.getLogger("fedkd")


@register("fedalign")
@dataclass(frozen=True)
class FedAlign(OneModel):
    """Distillation of the last block into itself at a smaller width.

    Parameters
    ----------
    mu : μ ≥ 0, the weight of the alignment, as a share of the cross-entropy. `mu=0` is FedAvg.
    width : ω_S in (0, 1], of the slim block.
    power_iterations : to the largest singular value.
    clip : > 0, the length a step's gradient may have.
    """

    mu: float = 0.45
    width: float = 0.25
    power_iterations: int = 10
    clip: float = 10.0

    def problems(self, setting: Setting) -> list[str]:
        found = [] if self.mu >= 0 else [f"algorithm.mu={self.mu:g} must be at least 0; 0 is FedAvg."]
        if not 0 < self.width <= 1:
            found.append(f"algorithm.width={self.width:g} must lie in (0, 1]; the paper has 0.25.")
        if self.power_iterations < 1:
            found.append(f"algorithm.power_iterations={self.power_iterations} must be at least 1.")
        if not self.clip > 0:
            found.append(f"algorithm.clip={self.clip:g} must be positive; the released code has 10.")
        return found

    def init_server(self, nets: Nets, seed: int) -> SharedModel:
        if not (net := only(nets)).inner:
            log.warning("model=%s has a single layer before its head, so FedAlign has nothing to align: this is "
                        "FedAvg. Try model=cnn, or dnn with model.hidden=[128,128].", net.name)  # fmt: skip
        return super().init_server(nets, seed)

    def round(self, server: SharedModel, own: Placed[Any], fed: Federation) -> tuple[SharedModel, Placed[Any]]:
        w_t = fed.down(server.w, "model")
        aligns = self.mu and only(fed.nets).inner
        w = fed.fit(self.loss, w_t, clip=self.clip) if aligns else fed.fit(supervised, w_t)
        return SharedModel(fed.up(w, "model").mean(fed.sizes)), own

    def loss(self, net: Net, w: Params, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """L_CE + μ L_Lip, L_Lip the mean of (K_F − K_S)², rescaled."""
        out = net.forward(w, batch.x)
        value, stage_in = cross_entropy(out.logits, batch), out.stage_in.detach()
        slim = self.lipschitz(net.stage(net.narrow(w, self.width), stage_in), stage_in)
        full = self.lipschitz(out.stage_out.detach(), stage_in)
        apart = (batch.weight * (full - slim).square()).sum()
        scale = torch.where(apart > 0, value / apart, 0.0).detach()
        return value + self.mu * scale * apart, out.stats

    def lipschitz(self, stage_out: Tensor, stage_in: Tensor) -> Tensor:
        """By sample, the largest singular value of X: the top eigenvalue's root of X Xᵀ, by power iteration."""
        if stage_in.dim() == 4:
            height, width = stage_out.shape[2:] if stage_out.dim() == 4 else (1, 1)
            stage_in = adaptive_avg_pool2d(stage_in, (height, width))
        a, b = (maps.reshape(*maps.shape[:2], -1).float() for maps in (stage_in, stage_out))
        a = a / a.shape[-1]  # X = a bᵀ
        within, across = a.mT @ a, b.detach().mT @ b.detach()
        u = a.sum(1).unsqueeze(-1)  # aᵀ v, with v = (1, ..., 1) at first: it has HW numbers, v has C'
        for _ in range(self.power_iterations - 1):
            u = unit(within @ (across @ u))
        v = unit(a @ (across @ u))  # X Xᵀ v
        largest: Tensor = vector_norm(b @ (a.mT @ v), dim=(1, 2))  # ‖Xᵀ v‖
        return largest


def unit(v: Tensor) -> Tensor:
    """Columns of length 1; zeros stay zeros."""
    length: Tensor = vector_norm(v, dim=1, keepdim=True)
    return v / length.clamp(min=torch.finfo(v.dtype).tiny)
