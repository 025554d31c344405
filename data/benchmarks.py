"""The seven benchmarks of the paper: where each is found and how its questions are put (its Appendix E).

Knows nothing about tokens or models. docs/benchmarks.md says which choices are the paper's and which are ours.
"""

import sys
from dataclasses import dataclass

from ecospec.errors import InputError, brief, first_few


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `question` and `answer` are fields of the hub's rows; a list in them holds several turns.

    `row_id`: the field that names a row, where the hub's rows have one.
    `chat`: put the question as a chat message where the target has a template for it. `shots`: rows of the train split,
    from 0, that are shown with their answers before each question. `stand_in`: name of a file that serves where there
    is none of the benchmark's own name. `notice`: what the hub's rows and the stand-in lack.
    """

    hub: str
    split: str
    question: str
    answer: str
    row_id: str | None = None
    config: str | None = None
    template: str = "{prompt}"
    chat: bool = False
    shots: tuple[int, ...] = ()
    stand_in: str | None = None
    notice: str | None = None

    def ask(self, question: str) -> str:
        """The question in the benchmark's template."""
        return self.template.replace("{prompt}", question)

    def source(self, split: str) -> str:
        """The hub's rows of a split, in words."""
        config = f"config {self.config}, " if self.config else ""
        return f"{self.hub} ({config}split {split})"


COMPETITION = "Problem:\n{prompt}\n\nSolution:"
BENCHMARKS = {
    "humaneval": Benchmark("openai/openai_humaneval", "test", "prompt", "canonical_solution", "task_id"),
    "mmstar_text": Benchmark("Lin-Chen/MMStar", "val", "question", "answer", "index", chat=True),
    "mt_bench": Benchmark("HuggingFaceH4/mt_bench_prompts", "train", "prompt", "reference", "prompt_id", chat=True),
    "amc22_24": Benchmark(
        "AI-MO/aimo-validation-amc",
        "train",
        "problem",
        "answer",
        "id",
        template=COMPETITION,
        stand_in="amc22_23",
        notice="problems of 2022 and 2023 only; those of 2024 are absent",
    ),
    "gsm8k": Benchmark(
        "openai/gsm8k",
        "test",
        "question",
        "answer",
        config="main",
        template="Question: {prompt}\nAnswer:",
        shots=(0, 1, 2, 3, 4),
    ),
    "aime25": Benchmark(
        "math-ai/aime25",
        "test",
        "problem",
        "answer",
        "id",
        template="{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}.",
        chat=True,
    ),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", "problem", "solution", "unique_id", template=COMPETITION),
}


def hub_rows(benchmark: Benchmark, split: str) -> list[dict]:
    """Rows of the hub's `split` as our JSON Lines files have them: `id`, `prompt`, `reference`, `turns` and so on.

    Raises InputError, naming what was sought, when it cannot be read or lacks a field.
    """
    import datasets

    from ecospec.hub import hub_or_cache

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    fields = [benchmark.question, benchmark.answer]
    try:
        with hub_or_cache(benchmark.hub):
            rows = datasets.load_dataset(benchmark.hub, benchmark.config, split=split)
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(f"the hub's {benchmark.source(split)} cannot be read ({brief(error)})") from None
    if absent := set(fields) - set(rows.column_names):
        raise InputError(f"the hub's {benchmark.source(split)} has no field {first_few(sorted(absent))}")
    if benchmark.row_id in rows.column_names:
        fields.append(benchmark.row_id)
    return [
        {"id": row.get(benchmark.row_id)} | _as_file_row(row[benchmark.question], row[benchmark.answer])
        for row in rows.select_columns(fields)
    ]


def _as_file_row(question: str | list[str], answer: str | float | list[str] | None) -> dict:
    if isinstance(question, str):
        return {"prompt": question, "reference": _as_text(answer)}
    return {"prompt": question[0], "turns": question, "reference_turns": answer or None}


def _as_text(answer: str | float | None) -> str | None:
    """Whole numbers without a decimal point."""
    return answer if answer is None or isinstance(answer, str) else str(answer).removesuffix(".0")
