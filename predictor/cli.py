"""`ecospec-train`: the command line around training. Heavy modules load only once a subcommand runs."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ecospec.configs import cli
from ecospec.predictor.config import EvaluateConfig, GeneraliseConfig, TrainDrafterConfig, TrainPredictorConfig
from ecospec.predictor.kinds import yardstick

if TYPE_CHECKING:
    from ecospec.predictor.evaluation.metrics import GeneralisationMetrics
    from ecospec.predictor.objective.metrics import PredictorNumbers

COLUMNS = {
    "overlap": "overlap",
    "overlap_all": "with prompts",
    "overlap_train": "training samples",
    "excess_loss": "excess loss",
    "seconds_per_step": "ms per step",
}


def train_predictor(config: TrainPredictorConfig) -> None:
    """Fit a model of routing and print how it compares with the kinds that need no training."""
    from ecospec.predictor.training.fit import train_predictor as train

    metrics = train(config)
    if metrics is None:  # another process than the first
        return
    print(table(metrics.by_kind))
    print(f"written to {config.output}")


def evaluate_predictor(config: EvaluateConfig) -> None:
    """Print what an exported predictor and the simple ones are worth on a trace folder."""
    from ecospec.predictor.evaluation.evaluate import evaluate_predictor as evaluate
    from ecospec.predictor.training.start import prepare_process

    prepare_process(config)
    print(table(evaluate(config).by_kind))
    if config.output is not None:
        print(f"written to {config.output}")


def generalise(config: GeneraliseConfig) -> None:
    """Print how a predictor does on each data set when that is left out, and by the number of tokens trained on."""
    from ecospec.predictor.evaluation.generalisation import generalise as measure

    print(generalisation_table(measure(config)))
    print(f"written to {config.output}")


def train_drafter(config: TrainDrafterConfig) -> None:
    """Fit an EAGLE-3 head and print how often the target agrees with it."""
    from ecospec.predictor.heads.training import train_drafter as train

    metrics = train(config)
    agreement = ", ".join(f"{share:.1%}" for share in metrics["agreement"])
    print(f"agreement with the target by draft step: {agreement}")
    print(f"acceptance length of a greedy chain draft: {metrics['acceptance_length']:.2f}")
    print(f"written to {config.output}")


def table(predictors: "Mapping[str, PredictorNumbers]") -> str:
    """One line for each predictor, by name."""
    lines = ["".join([f"{'':<10}", *(f"{title:>18}" for title in COLUMNS.values())])]
    for name, numbers in predictors.items():
        cells = [getattr(numbers, key) * (1000 if key == "seconds_per_step" else 1) for key in COLUMNS]
        lines.append("".join([f"{name:<10}", *(f"{cell:>18.3f}" for cell in cells)]))
    return "\n".join(lines)


def generalisation_table(metrics: "GeneralisationMetrics") -> str:
    """One line for each data set, then one for each point of the learning curve."""
    beside = yardstick().name
    keys = ("seen", "unseen", f"{beside}_seen", f"{beside}_unseen")
    lines = ["".join([f"{'left out':<20}", *(f"{key.replace('_', ' '):>14}" for key in keys)])]
    for name, row in metrics.by_dataset.items():
        lines.append("".join([f"{name:<20}", *(f"{row[key]:>14.3f}" for key in keys)]))
    lines.append(f"{'tokens trained on':<20}{'overlap':>14}{beside:>14}")
    for point in metrics.learning_curve:
        lines.append(f"{point['tokens']:<20,}{point['overlap']:>14.3f}{point[beside]:>14.3f}")
    return "\n".join(lines)


SUBCOMMANDS = (
    cli.Subcommand("predictor", "fit a model of routing on a trace folder", train_predictor, TrainPredictorConfig),
    cli.Subcommand("evaluate", "measure an exported one beside the simple ones", evaluate_predictor, EvaluateConfig),
    cli.Subcommand("generalise", "leave out data sets, and train on growing shares", generalise, GeneraliseConfig),
    cli.Subcommand("drafter", "fit an EAGLE-3 draft head on a target's own text", train_drafter, TrainDrafterConfig),
)


def main(argv: list[str] | None = None) -> int:
    return cli.main("ecospec-train", SUBCOMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
