"""Rebuild the lab from text: `python -m ecospec.data.lab.build --text-dir DIR [--work-dir DIR] [--stage NAME]`.

Stages, in order: `target` (tokenizer, target, and the dense yardstick it is measured against), `traces` (the target's
own text on training prompts), `drafter`, `predictor` (of every kind), `trees` (draft pools along the train prompts),
`card`. Each saves its state in the work folder every few minutes and goes on from there when run again; what is shipped
is written to `data/lab/`.
"""

import argparse
import itertools
import json
import logging
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ecospec.data.lab.recipe import card, corpus, measure, pretrain, target
from ecospec.data.lab.recipe.polish import Polish, polish
from ecospec.files import read_json, replace_folder, write_json, write_text
from ecospec.inference import cli as decode_cli
from ecospec.predictor import cli as train_cli
from ecospec.tracing import cli as trace_cli

LAB = Path(__file__).resolve().parent.parent
DENSE_LEARNING_RATES = (2e-3, 4e-3, 8e-3)
TUNING_TOKENS = 1_500_000
TRACED_PROMPTS = 1500  # per domain
SIZES = ["--backbone.hidden_size", "152", "--backbone.intermediate_size", "352"]
LADDER = {  # what is trained of each kind, and for how long
    "predictor": [*SIZES, "--max-minutes", "28", "--validate-every", "2000"],
    "draft_mlp": ["--max-minutes", "28", "--validate-every", "4000"],
    "linear": ["--max-minutes", "4", "--validate-every", "2000"],
}
SHIPPED_TRACES = SHIPPED_TREES = 40  # prompts per domain
log = logging.getLogger(__name__)


class Recipe:
    """The stages, with the text and the work folder they share."""

    def __init__(self, text_dir: Path, work: Path) -> None:
        self.work = work
        self.documents = corpus.read_documents(text_dir)
        self.training = [document for document in self.documents if not document.held_out]
        self.schedule = pretrain.Schedule()

    def target(self) -> None:
        """Train the target, teach it not to loop, and ship it; then train the dense yardstick on the same tokens."""
        tokenizer = self._tokenizer()
        stream = target.pack(self.training, tokenizer, self.schedule.tokens, self.schedule.seed)
        model = self._fresh(target.moe_config())
        pretrain.train(model, stream, self.schedule, self.work / "target")
        prompts = list(itertools.chain(*self._prompts().values()))
        polish(model, tokenizer, prompts, stream, Polish(), self.work / "polish")
        replace_folder(LAB / "target", lambda folder: _ship(model, tokenizer, folder))
        self._dense(stream)

    def traces(self) -> None:
        """The target's own text: answers to prompts cut from the training text, and the small trace folder we ship."""
        folder = self.work / "prompts"
        for domain, pairs in self._prompts().items():
            rows = [json.dumps({"prompt": prompt}) for prompt, _ in pairs]
            write_text(folder / f"{domain}.jsonl", "\n".join(rows) + "\n")
        own = ["--data-dir", folder, "--datasets", ",".join(corpus.DOMAINS)]
        own += ["--temperature", "0.6", "--max-new-tokens", "96", "--batch-size", "128"]
        own += ["--target.experts_implementation", "grouped_mm"]
        _command(trace_cli.main, "run", "--config", "lab/trace", *own, "--output", self.work / "traces")
        small = ["run", "--config", "lab/trace", "--samples", SHIPPED_TRACES, "--output"]
        replace_folder(LAB / "traces", lambda folder: _command(trace_cli.main, *small, folder))

    def drafter(self) -> None:
        """Fit the EAGLE-3 head with the product's own command."""
        options = ["--config", "lab/drafter", "--traces", self.work / "traces", "--overwrite"]
        _command(train_cli.main, "drafter", *options, "--output", LAB / "drafter")

    def predictor(self) -> None:
        """Fit the predictor and the cheaper kinds on the same traces, longer than the demo does; measure all."""
        own = ["--config", "lab/predictor", "--traces", self.work / "traces", "--threads", "1", "--early-stopping", "4"]
        for kind, options in LADDER.items():
            trained = self.work / kind
            if not trained.exists():
                _command(train_cli.main, "predictor", *own, *options, "--kind", kind, "--output", trained)
            replace_folder(LAB / kind, partial(shutil.copytree, trained, dirs_exist_ok=True))
        measured = ["--traces", self.work / "traces", "--rungs", "lab/linear,lab/draft_mlp", "--overwrite"]
        _command(train_cli.main, "evaluate", *measured, "--output", self.work / "ladder")
        write_json(LAB / "predictor" / "metrics.json", read_json(self.work / "ladder" / "metrics.json"))

    def trees(self) -> None:
        """Record the pools of the shipped drafter and predictor along the train prompts."""
        datasets = ",".join(f"lab/train/{domain}" for domain in corpus.DOMAINS)
        options = ["--config", "lab/ladder", "--datasets", datasets, "--samples", SHIPPED_TREES]
        options += ["--max-new-tokens", "48", "--overwrite"]
        _command(decode_cli.main, "record", *options, "--output", LAB / "trees")

    def card(self) -> None:
        """Measure everything the model card says."""
        yardsticks = {"unpolished": self._trained("target", target.moe_config())}
        yardsticks["dense"] = self._trained("dense", target.dense_config())
        numbers = card.measure_lab(self.documents, yardsticks, self.work / "traces")
        write_json(LAB / "card.json", numbers)
        write_text(LAB / "MODEL_CARD.md", card.render(numbers))

    def _trained(self, name: str, config: object) -> torch.nn.Module:
        """A model as its training on text left it, in float32. Exits when that is not finished."""
        model = self._fresh(config)
        if pretrain.restore_state(model, self.work / name) < self.schedule.steps:
            sys.exit(f"{self.work / name}: not trained to its end; run --stage target first")
        return model.float().eval()

    def _dense(self, stream: np.ndarray) -> None:
        """The dense model of equal active size at the best of a few learning rates, tuned on the first tokens."""
        bits = {rate: self._tuning_bits(stream, rate) for rate in DENSE_LEARNING_RATES}
        best = min(bits, key=bits.get)
        log.info("dense: held-out bits per byte by learning rate %s; going on with %g", bits, best)
        write_json(self.work / "dense_tuning.json", {"bits_by_learning_rate": bits, "best": best})
        pretrain.train(self._fresh(target.dense_config()), stream, self.schedule.at(best), self.work / "dense")

    def _tuning_bits(self, stream: np.ndarray, rate: float) -> float:
        model = self._fresh(target.dense_config())
        pretrain.train(model, stream, self.schedule.at(rate, TUNING_TOKENS), self.work / f"dense-{rate:g}")
        return measure.bits_per_byte(model, *measure.held_out_tokens(self.documents, self._tokenizer()))

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        folder = self.work / "tokenizer"
        if not folder.exists():
            tokenizer = target.train_tokenizer(document.text for document in self.training)
            replace_folder(folder, tokenizer.save_pretrained)
        return AutoTokenizer.from_pretrained(folder)

    def _fresh(self, config: object) -> torch.nn.Module:
        torch.manual_seed(self.schedule.seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")

    def _prompts(self) -> dict[str, list[tuple[str, str]]]:
        """Prompts and answers of training documents, `TRACED_PROMPTS` of each domain; prose is cut early."""
        generator = np.random.default_rng(0)
        chosen = {}
        for domain in corpus.DOMAINS:
            documents = [d for d in self.training if d.domain == domain and d.prompt]
            picked = generator.permutation(len(documents))[:TRACED_PROMPTS]
            chosen[domain] = [_prompt_of(documents[index], generator) for index in picked]
        return chosen


def _prompt_of(document: corpus.Document, generator: np.random.Generator) -> tuple[str, str]:
    if document.domain != "prose":
        return document.prompt, document.answer
    words = document.answer.lstrip("\n").split(" ")
    cut = generator.integers(6, 20)
    return document.prompt + "\n\n" + " ".join(words[:cut]), " " + " ".join(words[cut:])


def _ship(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _command(main: Callable, *words: object) -> None:
    """Run one of the product's commands in this process. Raises SystemExit with its exit code when it fails."""
    code = main([str(word) for word in words])
    if code:
        sys.exit(code)


def main(argv: list[str] | None = None) -> None:
    stages = ("target", "traces", "drafter", "predictor", "trees", "card")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text-dir", type=Path, required=True, help="folder of the training JSON Lines files")
    parser.add_argument("--work-dir", type=Path, default=Path("lab-work"), help="folder for states; ignored by git")
    parser.add_argument("--stage", choices=stages, help="one stage only; all by default")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    recipe = Recipe(arguments.text_dir, arguments.work_dir)
    for stage in stages:
        if arguments.stage in (None, stage):
            getattr(recipe, stage)()
