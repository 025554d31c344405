"""What an EAGLE-3 head must compute, written out number by number from its tensors and its `Meaning`.

One position at a time, one attention head at a time, no cache, no module: a text's pairs, then a chain of drafts.
`expected` is that and `computed` what the head does, for the same text and target.

Letters: n pairs of a text, F feature width, D draft vocabulary, V target vocabulary, H hidden width, W inputs' width.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ecospec.inference.drafters.eagle3.checkpoint import load_head
from ecospec.inference.drafters.eagle3.head import Eagle3Head
from tests.eagle3_heads import HEAD_DIM, HEADS, KV_HEADS, H, TinyHead, V, numbers, target_config

EPS = 1e-5
N = 5  # pairs of a text


class Reference:
    """A text that grows: `read` a position with its hidden input, then take `logits` and `feedback` of the output."""

    def __init__(self, head: TinyHead, embedding_VH: Tensor, output_VH: Tensor) -> None:
        self.w, self.meaning = head.tensors, head.meaning
        self.embedding = self.w["embed_tokens.weight"] if self.meaning.own_embedding else embedding_VH
        self.output = self.w["lm_head.weight"] if self.meaning.own_output else output_VH
        self.seen: dict[str, list[tuple[Tensor, Tensor]]] = {prefix: [] for prefix in self.meaning.prefixes}

    def enter(self, features_F: Tensor) -> Tensor:
        """The hidden input that the target's features of one token make."""
        if self.meaning.input_norm:
            features_F = norm(features_F, self.w["input_norm.weight"])
        if self.meaning.part_norms:
            parts = [features_F[i * H : (i + 1) * H] for i in range(3)]
            features_F = torch.cat(
                [norm(part, self.w[name]) for part, name in zip(parts, self.meaning.part_norms, strict=True)]
            )
        if self.meaning.layers == (-1,):
            return features_F
        return self.w["fc.weight"] @ features_F + self.w.get("fc.bias", 0)

    def read(self, position: int, token: int, hidden_H: Tensor) -> Tensor:
        """The output at the next position."""
        for prefix in self.meaning.prefixes:
            hidden_H = self.layer(prefix, position, token, hidden_H)
        return hidden_H

    def layer(self, prefix: str, position: int, token: int, hidden_H: Tensor) -> Tensor:
        def weight(name: str) -> Tensor:
            return self.w[f"{prefix}{name}.weight"]

        residual = hidden_H
        if prefix == self.meaning.prefixes[0]:
            entry = norm(hidden_H, weight("hidden_norm")) if self.meaning.entry_norm else hidden_H
            inputs = torch.cat([norm(self.embedding[token], weight("input_layernorm")), entry])
            residual = entry if self.meaning.residual_normed else hidden_H
        else:
            inputs = norm(hidden_H, weight(self.meaning.later_norm))
        out = residual + self.attention(prefix, position, inputs)
        inner = norm(out, weight("post_attention_layernorm"))
        gate = weight("mlp.gate_proj") @ inner
        return out + weight("mlp.down_proj") @ (gate * gate.sigmoid() * (weight("mlp.up_proj") @ inner))

    def attention(self, prefix: str, position: int, inputs_W: Tensor) -> Tensor:
        def project(name: str, values: Tensor) -> Tensor:
            bias = self.w.get(f"{prefix}self_attn.{name}_proj.bias", 0)
            return self.w[f"{prefix}self_attn.{name}_proj.weight"] @ values + bias

        query, key, value = (project(name, inputs_W).reshape(-1, HEAD_DIM) for name in "qkv")
        if self.meaning.head_norms:
            query = norm(query, self.w[f"{prefix}self_attn.q_norm.weight"])
            key = norm(key, self.w[f"{prefix}self_attn.k_norm.weight"])
        query, key = (turned(rows, position, self.meaning.base) for rows in (query, key))
        self.seen[prefix].append((key, value))
        outputs = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            keys, values = (torch.stack([pair[part][group] for pair in self.seen[prefix]]) for part in (0, 1))
            outputs.append(torch.softmax(keys @ query[head] / HEAD_DIM**0.5, dim=0) @ values)
        return project("o", torch.cat(outputs))

    def feedback(self, out_H: Tensor) -> Tensor:
        return norm(out_H, self.w["norm.weight"]) if self.meaning.feeds_normed else out_H

    def logits(self, out_H: Tensor) -> Tensor:
        return self.output @ norm(out_H, self.w["norm.weight"]) * self.meaning.logit_scale


def norm(values: Tensor, weight: Tensor) -> Tensor:
    return values / (values.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(rows: Tensor, position: int, base: float) -> Tensor:
    """Rotary embedding: number i and number i + HEAD_DIM / 2 of each row turn by position / base^(2i / HEAD_DIM)."""
    half = HEAD_DIM // 2
    angles = torch.tensor([position * base ** (-2 * i / HEAD_DIM) for i in range(half)])
    left, right = rows[:, :half], rows[:, half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=1)


class Steps(dict):
    """`out1` [n, H] and `logits1` [n, D] of a text's pairs, `out2` [H] and `logits2` [D] of a draft below the last."""


def tiny_target(seed: int = 0) -> SimpleNamespace:
    """What a head takes of its target: an embedding and an output matrix."""
    draw = numbers(seed + 900)
    embedding, output = nn.Embedding(V, H), nn.Linear(H, V, bias=False)
    embedding.weight.data, output.weight.data = draw(V, H), draw(V, H)
    return SimpleNamespace(get_input_embeddings=lambda: embedding, get_output_embeddings=lambda: output)


def text(seed: int, layers: int, n: int = N) -> tuple[Tensor, Tensor]:
    """The tokens of n pairs and of a draft after them, [n + 1], and the pairs' features [n, F]."""
    generator = torch.Generator().manual_seed(seed + 50)
    ids = torch.randint(0, V, (n + 1,), generator=generator)
    return ids, torch.randn(n, layers * H, generator=generator)


@torch.inference_mode()
def computed(head: Eagle3Head, seed: int = 0) -> Steps:
    ids, features = text(seed, len(head.feature_layers))
    cache = head.new_cache()
    out1 = head.forward(ids[None, :N], head.enter(features[None]), torch.arange(N)[None], None, cache)
    hidden = head.feedback(out1[:, -1:])
    seen = torch.ones(1, 1, N + 1, dtype=torch.bool)
    out2 = head.forward(ids[None, N:], hidden, torch.tensor([[N]]), seen, cache)
    return Steps(out1=out1[0], logits1=head.logits(out1)[0], out2=out2[0, 0], logits2=head.logits(out2)[0, 0])


def expected(head: TinyHead, seed: int = 0) -> Steps:
    ids, features = text(seed, len(head.meaning.layers))
    target = tiny_target(seed)
    reference = Reference(head, target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    outs = [reference.read(i, int(ids[i]), reference.enter(features[i])) for i in range(N)]
    out2 = reference.read(N, int(ids[N]), reference.feedback(outs[-1]))
    logits1 = torch.stack([reference.logits(out) for out in outs])
    return Steps(out1=torch.stack(outs), logits1=logits1, out2=out2, logits2=reference.logits(out2))


def loaded(head: TinyHead, folder: Path, seed: int = 0, **options: object) -> Eagle3Head:
    return load_head(head.write(folder), target_config(), **options).attach(tiny_target(seed))


def assert_equal(found: Steps, wanted: Steps, message: str = "") -> None:
    for name, values in wanted.items():
        torch.testing.assert_close(
            found[name], values, atol=2e-5, rtol=2e-5, msg=lambda m, n=name: f"{message}{n}: {m}"
        )


def differs(one: Steps, other: Steps, name: str) -> bool:
    return not torch.allclose(one[name], other[name], atol=1e-3)
