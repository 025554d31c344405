"""Train a small causal language model (the lab target or its dense yardstick) on packed text, on CPU.

Weights are bf16 with fp32 master copies. Transformers' own modules hold the weights and do the arithmetic; only the
experts are dispatched by our own sort-and-batch product (a slow reference stands beside it in the tests), and each
layer is compiled. Knows nothing about where tokens come from.

Letters: B batch, T tokens, D hidden width, E experts, K experts per token, C slots per expert.
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecospec.files import replace_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Schedule:
    """How long, how fast and on how much text to train."""

    tokens: int = 18_000_000  # in all
    batch_tokens: int = 8192  # per optimizer step
    context: int = 256  # tokens per row in the first nine tenths
    long_context: int = 2048  # tokens per row in the last tenth
    learning_rate: float = 3e-3  # peak; cosine to a twentieth
    warmup_steps: int = 100
    weight_decay: float = 0.1
    balance: float = 0.002  # weight of the load-balancing loss
    seed: int = 0
    save_minutes: float = 4.0

    def at(self, learning_rate: float, tokens: int | None = None) -> "Schedule":
        """The same schedule at another peak learning rate, and shorter where `tokens` says so."""
        return replace(self, learning_rate=learning_rate, tokens=tokens or self.tokens)

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens

    def context_at(self, step: int) -> int:
        return self.long_context if step >= 0.9 * self.steps else self.context

    def learning_rate_at(self, step: int, since_restart: int) -> float:
        """Linear warm-up (again after a restart, whose optimizer starts empty), then cosine."""
        warmup = min(1.0, (since_restart + 1) / self.warmup_steps)
        return self.learning_rate * warmup * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / self.steps)))


def dispatch_experts(experts: nn.Module, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Output [T, D] of a Transformers `*Experts` module: pairs sorted by expert, one batched product for all."""
    T, K = ids_TK.shape
    E = experts.num_experts
    flat = ids_TK.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts_E = torch.bincount(flat, minlength=E)
    C = int(counts_E.max())
    sorted_ids = flat[order]
    rank = torch.arange(T * K) - (counts_E.cumsum(0) - counts_E)[sorted_ids]
    slot = sorted_ids * C + rank
    slot_of_pair = torch.empty_like(slot).scatter_(0, order, slot)
    token_of_slot = torch.full((E * C,), T).scatter_(0, slot, order // K)
    padded = torch.cat([hidden_TD, hidden_TD.new_zeros(1, hidden_TD.shape[1])])
    slots_ECD = padded.index_select(0, token_of_slot).view(E, C, -1)
    gate, up = torch.bmm(slots_ECD, experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    out_SD = torch.bmm(F.silu(gate) * up, experts.down_proj.transpose(1, 2)).view(E * C, -1)
    out_TKD = out_SD.index_select(0, slot_of_pair).view(T, K, -1)
    return (out_TKD * weights_TK[:, :, None].to(out_TKD.dtype)).sum(1)


def balance_loss(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Switch-Transformer load balancing: E · Σ_e share of choices · mean probability; 1 when perfectly even."""
    E = logits_TE.shape[1]
    share_E = torch.bincount(ids_TK.reshape(-1), minlength=E).float() / ids_TK.numel()
    return E * (share_E * logits_TE.float().softmax(-1).mean(0)).sum()


def layer_forward(layer: nn.Module, hidden_BTD: Tensor, positions: tuple, mask: Tensor) -> tuple[Tensor, Tensor]:
    """One decoder layer, sparse or dense: its output and its load-balancing loss (0 for a dense layer)."""
    attended, _ = layer.self_attn(layer.input_layernorm(hidden_BTD), positions, mask)
    hidden_BTD = hidden_BTD + attended
    normed = layer.post_attention_layernorm(hidden_BTD)
    if not hasattr(layer.mlp, "experts"):
        return hidden_BTD + layer.mlp(normed), torch.zeros(())
    normed_TD = normed.flatten(0, 1)
    logits_TE, weights_TK, ids_TK = layer.mlp.gate(normed_TD)
    out_TD = dispatch_experts(layer.mlp.experts, normed_TD, ids_TK, weights_TK)
    return hidden_BTD + out_TD.view_as(hidden_BTD), balance_loss(logits_TE, ids_TK)


def head_loss(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_BTD, weight_VD).flatten(0, 1).float(), targets_BT.flatten())


class Losses(nn.Module):
    """Language-model and balancing loss of a whole model, through compiled layers."""

    def __init__(self, model: nn.Module, compiled: bool = True) -> None:
        super().__init__()
        self.model = model
        self.layer_forward = torch.compile(layer_forward) if compiled else layer_forward
        self.head_loss = torch.compile(head_loss) if compiled else head_loss

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """`tokens_BT` [B, T+1] → (cross-entropy in nats per token, summed balancing loss)."""
        hidden, balance = self.hidden(tokens_BT[:, :-1])
        return self.head_loss(hidden, self.model.lm_head.weight, tokens_BT[:, 1:]), balance

    def hidden(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized hidden states [B, T, D], which the head reads, and the summed balancing loss."""
        decoder = self.model.model
        hidden = decoder.embed_tokens(tokens_BT)
        T = tokens_BT.shape[1]
        positions = decoder.rotary_emb(hidden, torch.arange(T)[None])
        mask = torch.full((T, T), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)[None, None]
        balance = torch.zeros(())
        for layer in decoder.layers:
            hidden, layer_balance = self.layer_forward(layer, hidden, positions, mask)
            balance = balance + layer_balance
        return decoder.norm(hidden), balance


class MasterAdamW:
    """AdamW on fp32 master copies of a model's bf16 parameters."""

    def __init__(self, model: nn.Module, weight_decay: float) -> None:
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float() for p in self.parameters]
        matrices = [m for m in self.masters if m.dim() > 1]
        vectors = [m for m in self.masters if m.dim() == 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    def step(self, learning_rate: float) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)


def batches(tokens: np.ndarray, schedule: Schedule, start: int) -> Iterator[Tensor]:
    """Token rows [B, context + 1] of every step from `start` on; the order depends on the schedule alone."""
    for step in range(start, schedule.steps):
        T = schedule.context_at(step)
        B = schedule.batch_tokens // T
        first = step * schedule.batch_tokens % (len(tokens) - schedule.batch_tokens - 1)
        rows = [tokens[first + i * T : first + (i + 1) * T + 1] for i in range(B)]
        yield torch.from_numpy(np.stack(rows).astype(np.int64))


def train(model: nn.Module, tokens: np.ndarray, schedule: Schedule, folder: Path, compiled: bool = True) -> None:
    """Train `model` in place on the packed stream `tokens`, saving weights and step number into `folder`.

    A run that finds a saved state there goes on from its weights.
    """
    start = restore_state(model, folder)
    losses, optimizer = Losses(model.train(), compiled), MasterAdamW(model, schedule.weight_decay)
    began = saved = time.monotonic()
    for step, batch_BT in enumerate(batches(tokens, schedule, start), start):
        loss, balance = losses(batch_BT)
        (loss + schedule.balance * balance).backward()
        optimizer.step(schedule.learning_rate_at(step, step - start))
        if step % 20 == 0:
            rate = (step + 1 - start) * schedule.batch_tokens / (time.monotonic() - began)
            log.info(
                "step %d/%d loss %.3f balance %.2f %.0f tokens/s",
                step,
                schedule.steps,
                loss.item(),
                balance.item(),
                rate,
            )
        if time.monotonic() - saved > schedule.save_minutes * 60 or step + 1 == schedule.steps:
            save_state(model, step + 1, folder)
            saved = time.monotonic()
    model.eval()


def save_state(model: nn.Module, step: int, folder: Path) -> None:
    """Write weights and step number to `folder/state.pt`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"step": step, "weights": model.state_dict()}
    replace_file(folder / "state.pt", lambda partial: torch.save(state, partial))


def restore_state(model: nn.Module, folder: Path) -> int:
    """Load the weights saved in `folder`, if any; returns the step they were saved at (0: none)."""
    path = folder / "state.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["weights"])
    log.info("going on from step %d of %s", state["step"], path)
    return state["step"]
