"""The draft MLP: a token, and the hidden input of a draft head beside it, through gated blocks.

Letters: B batch, T tokens, N chosen positions or tree nodes, A depths in a draft (0: the root), L MoE layers,
E experts per layer, H hidden width, F width of a draft head.
"""

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecospec.errors import InputError
from ecospec.inference.drafters.eagle3.head import Eagle3Head
from ecospec.predictor.kinds.draft_mlp.head_inputs import HEAD_INPUTS
from ecospec.predictor.kinds.draft_mlp.kind import KIND
from ecospec.predictor.kinds.routing import RoutingConfig, RoutingModel

if TYPE_CHECKING:
    from ecospec.data.module import Batch

FINGERPRINT_VALUES = 4096  # of each weight


class DraftMLPConfig(RoutingConfig):
    """`draft_size` is F; the MLP was made for the draft head of `drafter_fingerprint`, for drafts `steps` deep."""

    model_type = KIND.model_type

    def __init__(
        self,
        draft_size: int = 1,
        hidden_size: int = 8,
        intermediate_size: int = 8,
        num_blocks: int = 1,
        drafter_fingerprint: str = "",
        steps: int = 3,
        **kwargs: Any,
    ) -> None:
        self.draft_size = draft_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_blocks = num_blocks
        self.drafter_fingerprint = drafter_fingerprint
        self.steps = steps
        super().__init__(**kwargs)


class DraftMLP(RoutingModel):
    """`forward(input_ids [B, N], head_inputs [B, N, F]) → logits [B, N, L, E]`: no attention, no cache.

    `head_inputs` is the hidden input of the draft head at each node: what the head made of the target's features for
    the root, the output of the node's parent for a draft. Both exist before the node is drafted, so they cost nothing.
    """

    config: DraftMLPConfig

    def __init__(self, config: DraftMLPConfig) -> None:
        super().__init__(config)
        self.token_norm = nn.RMSNorm(config.embedding_size)
        self.fed_norm = nn.RMSNorm(config.draft_size)  # exported weights have this name
        self.entry = nn.Linear(config.embedding_size + config.draft_size, config.hidden_size, bias=False)
        self.blocks = nn.ModuleList(
            GatedBlock(config.hidden_size, config.intermediate_size) for _ in range(config.num_blocks)
        )
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.num_layers * config.num_experts)
        self.post_init()

    def forward(self, input_ids: Tensor, head_inputs: Tensor) -> Tensor:
        """Routing logits [..., L, E] in float32 of tokens [...] and the head's hidden input at each, [..., F]."""
        return self.logits(self.hidden(input_ids, head_inputs))

    def hidden(self, input_ids: Tensor, head_inputs: Tensor) -> Tensor:
        """The last block's output [..., H], normed."""
        rows = self._embed(input_ids)
        hidden = self.entry(torch.cat([self.token_norm(rows), self.fed_norm(head_inputs.to(rows))], dim=-1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)

    def read(self, batch: "Batch", chosen_BT: Tensor) -> tuple[Tensor, Tensor]:
        """See `RoutingModel`: each chosen position once at every depth, N = A · positions; in training at one of them.

        Which one is drawn: the depths of a position teach nearly the same, and cost as much as other positions would.
        """
        inputs_ANF = batch.columns[HEAD_INPUTS][chosen_BT].transpose(0, 1)
        if self.training:
            depths_1NF = torch.randint(len(inputs_ANF), (1, inputs_ANF.shape[1], 1), device=inputs_ANF.device)
            inputs_ANF = inputs_ANF.gather(0, depths_1NF.expand(-1, -1, inputs_ANF.shape[2]))
        ids_AN = batch.input_ids[chosen_BT].expand(len(inputs_ANF), -1)
        return self.hidden(ids_AN, inputs_ANF).flatten(0, 1), batch.experts[chosen_BT].repeat(len(inputs_ANF), 1, 1)

    def require_head(self, head: nn.Module, steps: int) -> None:
        """Raises InputError when `head` is not the draft head that the MLP was trained on, or is to go deeper."""
        if not isinstance(head, Eagle3Head) or fingerprint(head) != self.config.drafter_fingerprint:
            raise InputError(f"{self.origin()} and another draft head; give that head as --drafter.path")
        if steps > self.config.steps:
            raise InputError(
                f"--drafter.steps {steps}: {self.origin()} and drafts {self.config.steps} tokens deep; draft no deeper"
            )


class GatedBlock(nn.Module):
    """A normed, gated MLP with a residual, as in a decoder layer without attention."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size)
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


def fingerprint(head: Eagle3Head) -> str:
    """sha256 over a head's feature layers, its rotary base, and the first values of each weight cast to bfloat16."""
    digest = hashlib.sha256(repr((list(head.feature_layers), head.config.rope_parameters["rope_theta"])).encode())
    for name, weight in sorted(head.named_parameters()):
        values = weight.detach().flatten()[:FINGERPRINT_VALUES].to(device="cpu", dtype=torch.bfloat16)
        digest.update(name.encode() + values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
