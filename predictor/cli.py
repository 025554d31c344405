"""`ecospec-train`: the command line around training. Heavy modules load only once a subcommand runs."""

import sys

from ecospec.configs import cli
from ecospec.predictor.config import TrainConfig

COLUMNS = {
    "overlap": "overlap",
    "overlap_all": "with prompts",
    "overlap_train": "training samples",
    "excess_loss": "excess loss",
    "seconds_per_step": "ms per step",
}


def train_predictor(config: TrainConfig) -> None:
    """Fit the expert predictor and print how it compares with the simple ones."""
    from ecospec.predictor.training.fit import train_predictor as train

    metrics = train(config)
    if metrics is None:  # another process than the first
        return
    print(table({metrics["kind"]: metrics, **metrics["ladder"]}))
    print(f"written to {config.output}")


def evaluate_predictor(config: TrainConfig) -> None:
    """Print what an exported predictor and the simple ones are worth on a trace folder."""
    from ecospec.predictor.evaluation.evaluate import evaluate_predictor as evaluate
    from ecospec.predictor.training.fit import prepare_process

    prepare_process(config)
    metrics = evaluate(config)
    print(table({metrics["kind"]: metrics, **metrics["ladder"]}))
    if config.output is not None:
        print(f"written to {config.output}")


def generalise(config: TrainConfig) -> None:
    """Print how a predictor does on each data set when that is left out, and by the number of tokens trained on."""
    from ecospec.predictor.evaluation.generalisation import generalise as measure

    metrics = measure(config)
    print(generalisation_table(metrics))
    print(f"written to {config.output}")


def train_drafter(config: TrainConfig) -> None:
    """Fit an EAGLE-3 head and print how often the target agrees with it."""
    from ecospec.predictor.heads.training import train_drafter as train

    metrics = train(config)
    agreement = ", ".join(f"{share:.1%}" for share in metrics["agreement"])
    print(f"agreement with the target by draft step: {agreement}")
    print(f"acceptance length of a greedy chain draft: {metrics['acceptance_length']:.2f}")
    print(f"written to {config.output}")


def table(rungs: dict[str, dict]) -> str:
    """One line for each predictor: name → its numbers as in `metrics.json`."""
    lines = ["".join([f"{'':<10}", *(f"{title:>18}" for title in COLUMNS.values())])]
    for name, numbers in rungs.items():
        cells = [numbers[key] * (1000 if key == "seconds_per_step" else 1) for key in COLUMNS]
        lines.append("".join([f"{name:<10}", *(f"{cell:>18.3f}" for cell in cells)]))
    return "\n".join(lines)


def generalisation_table(metrics: dict) -> str:
    """One line for each data set, then one for each point of the learning curve."""
    keys = ("seen", "unseen", "token_seen", "token_unseen")
    lines = ["".join([f"{'left out':<20}", *(f"{key.replace('_', ' '):>14}" for key in keys)])]
    for name, row in metrics["generalisation"].items():
        lines.append("".join([f"{name:<20}", *(f"{row[key]:>14.3f}" for key in keys)]))
    lines.append(f"{'tokens trained on':<20}{'overlap':>14}{'token':>14}")
    for point in metrics["learning_curve"]:
        lines.append(f"{point['tokens']:<20,}{point['overlap']:>14.3f}{point['token']:>14.3f}")
    return "\n".join(lines)


SUBCOMMANDS = (
    cli.Subcommand(
        "predictor", "fit the expert predictor on a trace folder and export it", train_predictor, TrainConfig
    ),
    cli.Subcommand(
        "evaluate", "measure an exported predictor, and the simple ones, on traces", evaluate_predictor, TrainConfig
    ),
    cli.Subcommand(
        "generalise", "train on all data sets but one, and on growing parts of the samples", generalise, TrainConfig
    ),
    cli.Subcommand(
        "drafter", "fit an EAGLE-3 draft head on a target's own text and export it", train_drafter, TrainConfig
    ),
)


def main(argv: list[str] | None = None) -> int:
    return cli.main("ecospec-train", SUBCOMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
