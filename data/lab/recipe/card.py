"""The model card of the lab: measure the shipped target, drafter and predictor, and say it in Markdown."""

from collections.abc import Sequence
from pathlib import Path
from string import Template

import numpy as np
import torch
from torch import nn

from ecospec.configs.schema import PromptConfig, TargetConfig
from ecospec.data.lab import LAB, shipped
from ecospec.data.lab.recipe import measure
from ecospec.data.lab.recipe.corpus import DOMAINS, Document
from ecospec.data.lab.recipe.polish import Polish, decode_greedily
from ecospec.data.prompts import Prompt, read_prompts
from ecospec.data.traces import read_traces
from ecospec.files import sha256_file
from ecospec.inference.assemble import PartsLoader
from ecospec.inference.config import DrafterConfig
from ecospec.inference.decoding.generation import generate_with
from ecospec.inference.decoding.method import Method
from ecospec.inference.decoding.statistics import Step
from ecospec.inference.selection.config import selector
from ecospec.predictor.kinds import trained_kind, trained_kinds
from ecospec.predictor.kinds.frequency.table import FrequencyTable
from ecospec.predictor.kinds.token.table import count_tokens
from ecospec.predictor.objective.metrics import shared_experts, top_experts
from ecospec.tracing.stats.counts import Tally, summarise
from ecospec.tracing.target.loading import Target, load_target
from ecospec.tracing.target.recorder import RoutingRecorder

ANSWER_TOKENS = 256
UNIONS = (1, 2, 3, 4, 6, 8)


def measure_lab(documents: Sequence[Document], yardsticks: dict[str, nn.Module], traces: Path) -> dict:
    """Every number of the card. `yardsticks`: float32 models to compare with; `traces`: what fed the predictor."""
    target = load_target(TargetConfig(name="lab", dtype="float32"))
    ids_T, num_bytes = measure.held_out_tokens(documents, target.tokenizer)
    models = {"lab": target.model, **yardsticks}
    bits = {name: measure.bits_per_byte(model, ids_T, num_bytes) for name, model in models.items()}
    return {
        "weights": shipped_weights(),
        "bits_per_byte": bits,
        "parameters": {name: _parameters(model) for name, model in models.items()},
        "routing": _routing(target, ids_T),
        "looping": _looping(target),
        "acceptance": acceptance(target),
        "overlap": fresh_overlap(target, traces),
    }


def shipped_weights() -> dict[str, str]:
    """sha256 of the weights that the numbers belong to."""
    parts = ("target", "drafter", *(kind.name for kind in trained_kinds()))
    return {part: sha256_file(shipped(LAB, part) / "model.safetensors") for part in parts}


def acceptance(target: Target, gamma: int = 4) -> dict:
    """EAGLE-3's α at T = 0 on the test prompts, per domain and pooled, over steps before the first repeated 8-gram."""
    drafter = PartsLoader(target).drafter(DrafterConfig(path="lab"))
    method = Method(drafter, selector("confidence", gamma))
    steps: dict[str, list[Step]] = {}
    for prompt in test_prompts():
        ids = target.tokenizer(prompt.text, return_tensors="pt").input_ids
        out, run = generate_with(target.model, method, ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        answer = out[0, ids.shape[1] :].tolist()
        steps.setdefault(prompt.dataset, []).extend(steps_before(run.steps, measure.first_repeat(answer)))
    pooled = [step for part in steps.values() for step in part]
    return {name: _acceptance(part) for name, part in [*steps.items(), ("pooled", pooled)]}


@torch.inference_mode()
def fresh_overlap(target: Target, traces: Path) -> dict[str, float]:
    """Overlap on greedy answers to the test prompts, before the first repeated 8-gram: predictor and simple tables."""
    recorded = read_traces(traces)
    token = count_tokens(recorded, target.shape.vocab_size)
    predictor = PartsLoader(target).loaded(trained_kind("predictor"), "lab")
    predictors = {
        "frequency": FrequencyTable(token.shares).logits,
        "token": token.logits,
        "predictor": lambda ids_T: predictor(torch.from_numpy(ids_T)[None])[0],
    }
    hits, total = dict.fromkeys(predictors, 0), 0
    K, E = target.shape.top_k, target.shape.num_experts
    for prompt_ids, answer in _answers(target):
        ids = prompt_ids + answer[: measure.first_repeat(answer)]
        with RoutingRecorder(target.model) as recorder:
            target.model(torch.tensor([ids]))
            experts_TLK = recorder.take(len(ids))[len(prompt_ids) :]
        total += experts_TLK.numel()
        for name, logits_of in predictors.items():
            predicted_TLK = top_experts(logits_of(np.array(ids)), K)[len(prompt_ids) :]
            hits[name] += int(shared_experts(predicted_TLK, experts_TLK, E).sum())
    return {name: count / total for name, count in hits.items()}


def steps_before(steps: Sequence[Step], tokens: int) -> list[Step]:
    """The steps whose tokens all lie among the first `tokens` of the answer (prefill gave the first)."""
    kept, end = [], 1
    for step in steps:
        end += step.emitted[0]
        if end > tokens:
            break
        kept.append(step)
    return kept


def test_prompts() -> list[Prompt]:
    return read_prompts(PromptConfig(datasets=_datasets()))


def render(numbers: dict) -> str:
    """The card's text from its numbers."""
    template = Template(Path(__file__).with_name("card_template.md").read_text(encoding="utf-8"))
    routing, looping = numbers["routing"], numbers["looping"]
    unions = "\n".join(
        f"| {tokens} | {routing['union'][str(tokens)]:.2f} | {routing['chance'][str(tokens)]:.2f} | "
        f"{100 * (1 - routing['union'][str(tokens)] / routing['chance'][str(tokens)]):.1f} % |"
        for tokens in UNIONS
    )
    loops = "\n".join(f"| {d} | {n['share']:.3f} | {n['tokens']:.0f} |" for d, n in looping.items())
    alphas = "\n".join(f"| {d} | {n['alpha']:.2f} | {n['steps']} |" for d, n in numbers["acceptance"].items())
    return template.substitute(
        polish_tokens=f"{Polish().tokens / 1e6:.1f}",
        moe_bits=f"{numbers['bits_per_byte']['lab']:.3f}",
        unpolished_bits=f"{numbers['bits_per_byte']['unpolished']:.3f}",
        dense_bits=f"{numbers['bits_per_byte']['dense']:.3f}",
        moe_parameters=f"{numbers['parameters']['lab'] / 1e6:.2f}",
        dense_parameters=f"{numbers['parameters']['dense'] / 1e6:.2f}",
        least=f"{routing['least_load']:.3f}",
        most=f"{routing['most_load']:.2f}",
        reuse=f"{routing['temporal_reuse']:.3f}",
        reuse_chance=f"{routing['temporal_reuse_chance']:.3f}",
        unions=unions,
        loops=loops,
        alphas=alphas,
        predictor=f"{numbers['overlap']['predictor']:.3f}",
        token=f"{numbers['overlap']['token']:.3f}",
        frequency=f"{numbers['overlap']['frequency']:.3f}",
    )


def _datasets() -> list[str]:
    return [f"lab/{domain}" for domain in DOMAINS]


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _routing(target: Target, ids_T: torch.Tensor) -> dict:
    tally = Tally.empty(*target.shape.counts)
    for experts_TLK in measure.route(target.model, ids_T):
        tally.add(experts_TLK)
    found, load = summarise(tally), tally.counts_LE / tally.counts_LE.mean(-1, keepdims=True)  # 1.0 is an even share
    unions, reuse = {row["tokens"]: row for row in found["union"]}, found["reuse"][0]
    return {
        "union": {str(n): unions[n]["mean"] for n in UNIONS},
        "chance": {str(n): unions[n]["chance"] for n in UNIONS},
        "least_load": float(load.min()),
        "most_load": float(load.max()),
        "unused_experts": int(np.sum(load == 0)),
        "temporal_reuse": reuse["mean"],
        "temporal_reuse_chance": reuse["chance"],
    }


def _looping(target: Target) -> dict:
    prompts, answers = test_prompts(), [answer for _, answer in _answers(target)]
    named = {name: [a for p, a in zip(prompts, answers, strict=True) if p.dataset == name] for name in _datasets()}
    return {name: _loops(part) for name, part in [*named.items(), ("pooled", answers)]}


def _answers(target: Target) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, greedy answer ids) of every test prompt."""
    texts = [prompt.text for prompt in test_prompts()]
    return decode_greedily(target.model, target.tokenizer, texts, ANSWER_TOKENS)


def _loops(answers: list[list[int]]) -> dict:
    return {"share": measure.looping(answers), "tokens": sum(map(len, answers)) / len(answers)}


def _acceptance(steps: list[Step]) -> dict:
    return {"alpha": sum(step.emitted[0] for step in steps) / max(len(steps), 1), "steps": len(steps)}
