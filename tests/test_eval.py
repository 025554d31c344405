"""`ecospec-decode` from end to end on a tiny target: every method decodes the same text, and bad input is one line."""

import json
import resource
import shutil

import pyarrow.parquet as pq
import pytest
import torch

from ecospec.configs.schema import TargetConfig
from ecospec.errors import InputError
from ecospec.inference import EcoSpecDecoder
from ecospec.inference.cli import main
from ecospec.inference.evaluation import runfolder
from ecospec.seeds import sample_seed
from ecospec.tracing.cli import main as trace
from ecospec.tracing.target.loading import load_target
from tests.decode_lab import BASELINES, PROMPTS, methods, options, save_head, save_predictor, save_rung
from tests.tiny import tiny_target_folder


def test_every_method_and_temperature_decodes_plain_decodings_text(lab, tmp_path, capsys):
    chosen = methods("confidence", "marginal", "global", "random")
    command = options(lab, methods=chosen, temperature="0,1", output=tmp_path / "run")
    assert main(["eval", *command]) == 0
    assert "marginal" in capsys.readouterr().out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(results["runs"]) == 2 * 6
    for run in results["runs"]:
        assert run["lossless"] == ("reference" if run["label"] == "plain" else "exact"), run["label"]
        assert run["dtype"] == "float32"
    plain = next(run for run in results["runs"] if run["label"] == "plain")
    assert plain["acceptance_length"] == 1.0
    assert plain["active_experts"] == 2.0
    assert plain["speedup_vs_ar"] == 1.0
    marginal = next(run for run in results["runs"] if run["label"] == "marginal")
    assert marginal["verified_tokens_per_step"] == 4.0
    assert (marginal["predictor"], marginal["overlap"], marginal["footprints"]) == ("predictor", 0.5, "predictor")
    parts = sum(marginal[f"t_{part}"] for part in ("draft", "predict", "select", "verify", "accept", "other"))
    assert parts == pytest.approx(marginal["t_step"])


def test_the_steps_file_adds_up_to_the_results(lab, tmp_path):
    command = options(lab, methods=methods("confidence"), output=tmp_path / "run")
    assert main(["eval", *command]) == 0
    run = json.loads((tmp_path / "run" / "results.json").read_text())["runs"][-1]
    steps = [s for s in pq.read_table(tmp_path / "run" / "steps.parquet").to_pylist() if s["label"] == "confidence"]
    assert run["acceptance_length"] == pytest.approx(sum(s["emitted"] for s in steps) / len(steps))
    active = [sum(s["active_experts"]) / len(s["active_experts"]) for s in steps]
    assert run["active_experts"] == pytest.approx(sum(active) / len(active))
    assert {s["verified"] for s in steps} == {4}


def test_tables_from_traces_serve_as_footprints(lab, tmp_path):
    rows = ", ".join(
        f'{{"label": "{name}", "selection": {{"footprints": "{name}"}}}}' for name in ("token", "frequency")
    )
    command = options(lab, methods=f"[{BASELINES}, {rows}]", traces=lab.root / "traces", output=tmp_path / "run")
    assert main(["eval", *command]) == 0
    runs = json.loads((tmp_path / "run" / "results.json").read_text())["runs"]
    assert [run["footprints"] for run in runs] == [None, None, "token", "frequency"]
    assert all(run["lossless"] in ("exact", "reference") for run in runs)
    assert all(run["overlap"] is None for run in runs)  # the predictor's metrics say nothing of these tables


def test_every_footprint_source_decodes_plain_decodings_text(lab, rungs, tmp_path, capsys):
    command = options(
        lab, predictor=None, methods=rungs, traces=lab.root / "traces", temperature="1", output=tmp_path / "run"
    )
    checked = options(lab, predictor=None, methods=rungs, traces=lab.root / "traces", threads=None)
    assert main(["check", *checked]) == 0
    assert f"{tmp_path / 'mlp'}, 0.00 M weights" in (out := capsys.readouterr().out)
    assert "fed the drafter's hidden 32" in out
    assert main(["eval", *command]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    runs = {run["footprints"]: run for run in results["runs"][2:]}
    assert list(runs) == ["predictor", "linear", "draft_mlp", "last_step", "token", "frequency"]
    assert {run["lossless"] for run in runs.values()} == {"exact"}
    assert [run["predictor"] for run in runs.values()] == ["predictor", "probe", "mlp", None, None, None]
    assert [run["overlap"] for run in runs.values()] == [0.5, 0.25, 0.25, None, None, None]
    assert {name: row["overlap"] for name, row in results["ladder"].items()} == {
        "token": 0.4,
        "predictor": 0.5,
        "linear": 0.25,
        "draft_mlp": 0.25,
    }


def test_several_sources_are_recorded_at_once_and_replayed_beside_oracle(lab, rungs, tmp_path, capsys):
    command = options(
        lab,
        predictor=None,
        methods=rungs,
        traces=lab.root / "traces",
        **{"max-new-tokens": 6},
        output=tmp_path / "trees",
    )
    assert main(["record", *command]) == 0
    schema = pq.read_schema(tmp_path / "trees" / "trees.parquet")
    assert {"experts_true", "experts_pred", "experts_linear", "experts_draft_mlp"} <= set(schema.names)
    command = ["--trees", str(tmp_path / "trees"), "--traces", str(lab.root / "traces")]
    assert main(["replay", *command, "--output", str(tmp_path / "replayed")]) == 0
    runs = json.loads((tmp_path / "replayed" / "replay.json").read_text())["runs"]
    sources = {"oracle", "predictor", "linear", "draft_mlp", "last_step", "token", "frequency"}
    assert {run["footprints"] for run in runs} == {None, *sources}
    assert all((run["source_share"] is None) == (run["footprints"] == "oracle") for run in runs)
    assert {run["predictor"] for run in runs if run["footprints"] == "linear"} == {"probe"}
    header, _, *rows = capsys.readouterr().out.strip().split("\n")[-2 - len(runs) :]
    assert "saving kept" in header
    assert {row.count("|") for row in rows} == {header.count("|")}


def test_what_one_tree_file_cannot_hold_is_refused(lab, tmp_path, capsys):
    other = shutil.copytree(lab.root / "predictor", tmp_path / "other")
    two = f'[{{"label": "a"}}, {{"label": "b", "predictor": "{other}"}}]'
    one_line(capsys, main(["record", *options(lab, methods=two, output=tmp_path / "out")]), "one predictor", "other")
    drafts = '[{"label": "a"}, {"label": "b", "drafter": {"steps": 2}}]'
    one_line(capsys, main(["record", *options(lab, methods=drafts, output=tmp_path / "out")]), "one drafter")
    one_line(capsys, main(["record", *options(lab, methods=f"[{BASELINES}]", output=tmp_path / "out")]), "methods")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"footprints": "linear"}, ["holds a draft_mlp", "need a linear"]),
        ({"drafter.kind": "prompt_lookup", "drafter": None}, ["draft with eagle3 or mtp"]),
        ({"draft_size": 48}, ["reads 48 hidden values", "32"]),
        ({"num_layers": 5}, ["5 MoE layers"]),
        ({"target_config_sha256": "0"}, ["another target"]),
    ],
    ids=["another kind", "nothing to feed", "another head", "another shape", "another target"],
)
def test_a_draft_mlp_that_does_not_fit_is_refused_by_name(lab, tmp_path, capsys, changes, words):
    own = {key: value for key, value in changes.items() if key in ("draft_size", "num_layers", "target_config_sha256")}
    values = {"footprints": "draft_mlp", "predictor": save_rung(tmp_path / "mlp", lab, "ecospec_draft_mlp", **own)}
    rest = {key: value for key, value in changes.items() if key not in own}
    one_line(capsys, main(["check", *options(lab, threads=None, **values | rest)]), *words)


def test_report_gathers_run_folders(lab, tmp_path):
    for name in ("a", "b"):
        assert main(["eval", *options(lab, methods=methods("confidence"), output=tmp_path / name)]) == 0
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "report.md", "report.csv"}
    inside = (tmp_path / "a" / "report.html").read_text()
    assert "partial" not in inside


def test_generate_streams_the_text_and_ends_with_a_summary(lab, capsys):
    assert main(["generate", *options(lab, samples=1)]) == 0
    captured = capsys.readouterr()
    assert PROMPTS[0] in captured.out
    assert "α" in captured.err
    assert "tokens/s" in captured.err


def test_check_says_what_fits_without_loading_weights(lab, capsys, tmp_path):
    assert main(["check", *options(lab, threads=None)]) == 0
    out = capsys.readouterr().out
    assert "6 of 8 experts, top-2" in out
    assert out.endswith("everything fits\n")
    weights = lab.target / "model.safetensors"
    blind = shutil.copytree(lab.target, tmp_path / "target")
    (blind / "model.safetensors").write_bytes(weights.read_bytes()[:100])  # never read
    assert main(["check", *options(lab, threads=None, target=blind)]) == 0
    assert main(["check", *options(lab, threads=None, **{"expert-mib": 0.05})]) == 0
    assert "GiB" in capsys.readouterr().out


def test_the_python_decoder_returns_what_generate_returns(lab):
    decoder = EcoSpecDecoder.from_pretrained(
        str(lab.target), drafter=str(lab.root / "head"), predictor=str(lab.root / "predictor"), dtype="float32"
    )
    ids = decoder.target.tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        torch.manual_seed(4)
        expected = decoder.target.model.generate(ids, max_new_tokens=30, **sampling)
        torch.manual_seed(4)
        assert torch.equal(decoder.generate(ids, max_new_tokens=30, **sampling), expected)
    assert decoder.last_run.new_tokens == expected.shape[1] - ids.shape[1]
    for wrong in (ids[0], ids[:, :0]):
        with pytest.raises(InputError, match="input_ids of shape"):
            decoder.generate(wrong, max_new_tokens=2)


def test_the_python_decoder_takes_footprints_by_name(lab, rungs, tmp_path):
    parts = {"drafter": str(lab.root / "head"), "predictor": str(tmp_path / "mlp"), "dtype": "float32"}
    decoder = EcoSpecDecoder.from_pretrained(str(lab.target), footprints="draft_mlp", **parts)
    ids = decoder.target.tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    expected = decoder.target.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(decoder.generate(ids, max_new_tokens=12, do_sample=False), expected)
    with pytest.raises(InputError, match="oracle: is none of predictor, linear"):
        EcoSpecDecoder.from_pretrained(str(lab.target), footprints="oracle", **parts)


def test_seeds_differ_by_prompt_and_repeat():
    assert sample_seed(0, "a/0/0") == sample_seed(0, "a/0/0")
    assert len({sample_seed(seed, name) for seed in (0, 1) for name in ("a/0/0", "a/1/0")}) == 4


@pytest.mark.parametrize("command", ["eval", "generate", "check"])
def test_gamma_zero_is_refused(lab, capsys, command, tmp_path):
    read = {"eval": {"output": tmp_path / "run"}, "generate": {}, "check": {"threads": None}}
    one_line(capsys, main([command, *options(lab, gamma=0, **read[command])]), "gamma 0")


def one_line(capsys, code, *words):
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert code == 2
    assert all(word in error for word in words), error
    assert "Traceback" not in error


def broken(lab, tmp_path, case):
    """Options with one thing wrong, and words of the message that must name it."""
    if case == "no weights":
        folder = shutil.copytree(lab.target, tmp_path / "target")
        (folder / "model.safetensors").unlink()
        return {"target": folder}, ["no weights"]
    if case == "dense":
        folder = tmp_path / "target"
        shutil.copytree(lab.target, folder)
        dense = {"model_type": "llama", "vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2}
        (folder / "config.json").write_text(json.dumps(dense | {"architectures": ["LlamaForCausalLM"]}))
        return {"target": folder}, ["no routed experts"]
    if case == "head of another vocabulary":
        save_head(tmp_path / "head", vocab_size=300)
        return {"drafter": tmp_path / "head"}, ["300", "264"]
    if case == "a drafter for a predictor":
        return {"predictor": lab.root / "head"}, ["is no expert predictor", "ecospec-train predictor"]
    if case == "a broken head":
        folder = shutil.copytree(lab.root / "head", tmp_path / "head")
        (folder / "model.safetensors").write_bytes(b"nothing")
        return {"drafter": folder}, ["model.safetensors"]
    if case == "a text beyond the context":
        return {"max-new-tokens": 300}, ["context", "256"]
    if case == "a method's own epsilon":
        return {"methods": '[{"label": "a", "selection": {"epsilon": -1}}]'}, ["methods[0].selection", "epsilon"]
    if case == "two plain methods":
        return {"methods": f'[{BASELINES}, {{"label": "b", "drafter": "none"}}]'}, ["only one can be plain"]
    if case == "no temperature":
        return {"temperature": "[]"}, ["temperature"]
    if case == "predictor of another target":
        other = tiny_target_folder(tmp_path / "other", seed=9, num_hidden_layers=6)
        save_predictor(tmp_path / "predictor", other)
        return {"predictor": tmp_path / "predictor"}, ["predictor", "embedding table holds other values"]
    if case == "predictor of another shape":
        other = tiny_target_folder(tmp_path / "other", seed=9, num_hidden_layers=5)
        save_predictor(tmp_path / "predictor", other)
        return {"predictor": tmp_path / "predictor"}, ["5 MoE layers", "6"]
    if case == "no prompts":
        return {"prompts": tmp_path / "none.jsonl"}, ["none.jsonl", "no such prompt file"]
    if case == "a broken line":
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
        return {"prompts": tmp_path / "prompts.jsonl"}, ["line 2", "not JSON"]
    if case == "no traces":
        return {"footprints": "token"}, ["--traces"]
    if case == "an output in use":
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "results.json").touch()
        return {}, ["not empty", "--overwrite"]
    raise AssertionError(case)


CASES = [
    "no weights",
    "dense",
    "head of another vocabulary",
    "a drafter for a predictor",
    "a broken head",
    "a text beyond the context",
    "a method's own epsilon",
    "two plain methods",
    "no temperature",
    "predictor of another target",
    "predictor of another shape",
    "no prompts",
    "a broken line",
    "no traces",
    "an output in use",
]


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_that_names_it(lab, tmp_path, capsys, case):
    changes, words = broken(lab, tmp_path, case)
    values = {"output": tmp_path / "run", "methods": methods("marginal")} | changes
    one_line(capsys, main(["eval", *options(lab, **values)]), *words)


OUT_OF_RANGE = [
    ({"temperature": "1e-40"}, "--temperature"),
    ({"threads": 1000000}, "--threads"),
    ({"drafter.steps": 1000}, "--drafter.steps"),
    ({"drafter.rope_theta": -1}, "--drafter.rope_theta"),
    ({"drafter.feature_layers": "[]"}, "--drafter.feature_layers"),
    ({"epsilon": ".nan"}, "--selection.epsilon"),
    ({"target.expert_mib": ".nan"}, "--target.expert_mib"),
    ({"epsilon": "much"}, "--selection.epsilon: Expected a float"),
    ({"target.expert_mib": "1e9"}, "--target.expert_mib"),
]


@pytest.mark.parametrize(("changes", "option"), OUT_OF_RANGE, ids=[str(changes) for changes, _ in OUT_OF_RANGE])
def test_a_value_out_of_range_is_refused_before_any_work(lab, tmp_path, capsys, changes, option):
    values = {"output": tmp_path / "run", "methods": methods("marginal")} | changes
    one_line(capsys, main(["eval", *options(lab, **values)]), option)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_device_that_is_not_there_is_refused(lab, capsys):
    one_line(
        capsys,
        main(["check", *options(lab, threads=None, **{"target.device_map": "cuda"})]),
        "--target.device_map",
        "no such",
    )


@pytest.mark.parametrize(("option", "value"), [("temperature", "0,1"), ("batch-size", "2")])
@pytest.mark.parametrize("command", ["generate", "record"])
def test_what_a_command_would_ignore_is_refused(lab, tmp_path, capsys, command, option, value):
    values = {option: value, "output": tmp_path / "out" if command == "record" else None}
    one_line(capsys, main([command, *options(lab, **values)]), f"--{option.replace('-', '_')}", command)


def test_check_reads_the_prompts_too(lab, tmp_path, capsys):
    assert main(["check", *options(lab, threads=None)]) == 0
    assert "fit the target's context" in capsys.readouterr().out
    one_line(capsys, main(["check", *options(lab, threads=None, prompts=tmp_path / "none.jsonl")]), "none.jsonl")


def test_a_tokenizer_without_a_vocabulary_is_refused(lab, tmp_path, capsys):
    folder = shutil.copytree(lab.target, tmp_path / "target")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    one_line(capsys, main(["check", *options(lab, threads=None, target=folder)]), "tokenizer")


def test_tables_of_another_target_are_refused(lab, tmp_path, capsys):
    other = tiny_target_folder(tmp_path / "other", seed=9, num_hidden_layers=6, rope_theta=77.0)
    command = ["run", "--target", str(other), "--prompts", str(lab.prompts), "--max-new-tokens", "2"]
    assert trace([*command, "--output", str(tmp_path / "traces")]) == 0
    values = {"footprints": "token", "traces": tmp_path / "traces"}
    one_line(capsys, main(["check", *options(lab, threads=None, **values)]), "--traces", "another target")


def test_a_failed_write_is_one_line_and_leaves_nothing(lab, tmp_path, monkeypatch, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    write = runfolder.write_steps

    def too_large(path, outcomes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            write(path, outcomes)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(runfolder, "write_steps", too_large)
    code = main(["eval", *options(lab, methods=methods("confidence"), output=tmp_path / "run")])
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert code == 1
    assert "large" in error
    assert not list(tmp_path.iterdir())


def test_a_comparison_needs_plain_decoding(lab, tmp_path, capsys):
    only = '[{"label": "a", "selection": "confidence"}]'
    one_line(capsys, main(["eval", *options(lab, methods=only, output=tmp_path / "run")]), "plain")


def test_widening_keeps_the_function(lab):
    ids = torch.arange(20)[None]
    plain = load_target(TargetConfig(name=str(lab.target), dtype="float32")).model(ids).logits
    wide = load_target(TargetConfig(name=str(lab.target), dtype="float32", expert_mib=0.05)).model
    assert wide.model.layers[0].mlp.experts.down_proj.shape[2] > 100
    torch.testing.assert_close(wide(ids).logits, plain, atol=1e-4, rtol=1e-4)


def test_recorded_trees_are_replayed_without_the_target(lab, tmp_path, capsys):
    shared = [
        "--target",
        str(lab.target),
        "--drafter",
        str(lab.root / "head"),
        "--predictor",
        str(lab.root / "predictor"),
    ]
    prompts = ["--prompts", str(lab.prompts), "--samples", "2", "--max-new-tokens", "8"]
    assert main(["record", *shared, *prompts, "--output", str(tmp_path / "trees")]) == 0
    assert main(["replay", "--trees", str(tmp_path / "trees"), "--output", str(tmp_path / "replayed")]) == 0
    runs = json.loads((tmp_path / "replayed" / "replay.json").read_text())["runs"]
    assert {run["selection"] for run in runs} == {"confidence", "marginal", "global"}
    assert {run["footprints"] for run in runs} == {None, "oracle", "predictor", "last_step"}
    assert "| 4 | marginal/predictor |" in capsys.readouterr().out
    assert main(["replay", "--output", str(tmp_path / "other")]) == 2
    assert "--trees: not given" in capsys.readouterr().err
