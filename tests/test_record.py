"""What is recorded at each position of a text is the target's own, and the tree file keeps it."""

import json
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor

from ecospec.errors import DamageError, InputError
from ecospec.inference.replay.record import TreeRecorder, conditional
from ecospec.inference.replay.results import replay
from ecospec.inference.replay.stepping import Combination, Replay
from ecospec.inference.replay.treefile import Position, TreeSet, read_trees, write_trees
from tests.recording import (
    DEPTH,
    NEW_TOKENS,
    PROMPTS,
    SOURCES,
    HashedOracle,
    Shrinking,
    draws,
    ids_of,
    recorded,
    session,
    target,
)
from tests.tiny import brute_force_experts

OPTIONS = pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])


def parts_of(value: object) -> list:
    """A value of a position, or the arrays of a mapping in the order of its keys."""
    return [value[key] for key in sorted(value)] if isinstance(value, dict) else [value]


class Unknown(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@OPTIONS
def test_accepted_drafts_form_one_path_along_the_text(sampled):
    trees = recorded(sampled, True)
    for prompt_id, span in trees.spans.items():
        truth = session(sampled, True).truth[prompt_id]
        for position in trees.positions[span.start : span.stop]:
            assert position.root == truth[position.position]
            path = np.flatnonzero(position.accepted_M)
            assert position.depth_M[path].tolist() == list(range(1, len(path) + 1))
            assert position.parents_M[path].tolist() == [-1, *path[:-1]][: len(path)]
            assert position.tokens_M[path].tolist() == truth[position.position + 1 :][: len(path)]


@pytest.mark.parametrize("ends", [False, True], ids=["by length", "by end token"])
def test_a_text_has_a_position_for_every_step_that_may_begin(ends):
    trees = recorded(True, ends)
    for prompt_id, span in trees.spans.items():
        first, text = PROMPTS[prompt_id], session(True, ends).truth[prompt_id]
        last = first + NEW_TOKENS - 1
        if ends:
            last = text.index(session(True, True).eos[prompt_id], first)
        places = [position.position for position in trees.positions[span.start : span.stop]]
        assert places == list(range(first, last))


def test_a_text_that_ends_with_its_first_token_is_a_sample_without_steps():
    at = session(True, False)
    first = at.truth["code/0"][PROMPTS["code/0"]]
    trees = TreeRecorder(at.model, at.drafter(at.truth["code/0"]), DEPTH)
    parts = {"generator": draws("code/0"), "eos_token_id": first}
    assert trees.record("code/0", ids_of("code/0"), **parts, **at.options) == []
    whole = recorded(True, False)
    kept = [position for position in whole.positions if position.prompt_id != "code/0"]
    runs = {run.dataset: run for run in replay(TreeSet(whole.identity, kept), [Combination("confidence", 3)])}
    assert (runs["code"]["samples"], runs["code"]["steps"], runs["code"]["acceptance_length"]) == (1, 0, None)
    assert (runs["all"]["samples"], runs["all"]["steps"]) == (3, runs["maths"]["steps"])


def test_a_tree_deeper_than_was_said_is_refused():
    at = session(True, False)
    trees = TreeRecorder(at.model, at.drafter(at.truth["code/0"]), DEPTH - 1)
    with pytest.raises(InputError, match="3 levels deep"):
        trees.record("code/0", ids_of("code/0"), draws("code/0"), **at.options)


def test_what_might_keep_state_between_tokens_is_refused():
    at = session(True, False)
    trees = TreeRecorder(at.model, at.drafter(at.truth["code/0"]), DEPTH)
    with pytest.raises(InputError, match="logits_processor"):
        trees.record("code/0", ids_of("code/0"), logits_processor=[Unknown()], **at.options)


@OPTIONS
def test_target_probabilities_and_experts_are_those_of_a_pass_over_the_path(sampled):
    trees, model = recorded(sampled, False), target()
    position = trees.positions[5]
    text = session(sampled, False).truth[position.prompt_id][: position.position + 1]
    paths = [text]
    assert np.array_equal(position.experts_true_NLK[0], brute_force_experts(model, text)[-1])
    for draft, parent in enumerate(position.parents_M):
        with torch.no_grad():
            prob_V = model(torch.tensor([paths[parent + 1]])).logits[0, -1].softmax(-1)
        token = int(position.tokens_M[draft])
        assert position.target_prob_M[draft] == pytest.approx(float(prob_V[token]), abs=1e-5)
        paths.append([*paths[parent + 1], token])
        experts_LK = brute_force_experts(model, paths[-1])[-1]
        assert np.array_equal(position.experts_true_NLK[draft + 1], experts_LK)


@pytest.mark.parametrize("drafter", [HashedOracle, Shrinking])
def test_the_tree_file_round_trips(tmp_path, drafter):
    trees = recorded(True, True, "qwen3_moe", drafter)
    write_trees(tmp_path / "trees.parquet", trees.identity, trees.positions, lambda: trees.seconds)
    again = read_trees(tmp_path / "trees.parquet")
    assert (again.identity, again.seconds) == (trees.identity, trees.seconds)
    assert again.spans == trees.spans
    for before, after in zip(trees.positions, again.positions, strict=True):
        assert after.predicted.keys() == before.predicted.keys()
        for part in fields(Position):
            pair = getattr(before, part.name), getattr(after, part.name)
            for one, other in zip(*(map(parts_of, pair)), strict=True):
                assert np.array_equal(one, other), part.name
    for one in (Combination("confidence", 3), Combination("marginal", 4, "predictor")):
        assert replay(again, [one]) == replay(trees, [one])
    assert pq.read_schema(tmp_path / "trees.parquet").field("parents").type == pa.list_(pa.int16())


def test_trees_without_a_predictor_replay_all_but_its_footprints(tmp_path):
    trees = recorded(False, False)
    bare = [replace(position, predicted={}) for position in trees.positions]
    write_trees(tmp_path / "trees.parquet", replace(trees.identity, predictor=None), bare)
    engine = Replay(read_trees(tmp_path / "trees.parquet"))
    assert engine.steps(Combination("marginal", 3, "oracle"))
    with pytest.raises(InputError, match="recorded without it"):
        engine.steps(Combination("marginal", 3, "predictor"))
    with pytest.raises(InputError, match="footprints token: is counted from traces"):
        engine.steps(Combination("marginal", 3, "token"))


def test_a_file_from_before_there_were_several_sources_is_read(tmp_path):
    trees, path = recorded(True, True), tmp_path / "trees.parquet"
    write_trees(path, trees.identity, trees.positions)
    table = pq.read_table(path).drop_columns(["experts_linear", "experts_draft_mlp"])
    known = json.loads(table.schema.metadata[b"ecospec.trees"])
    del known["rungs"]
    pq.write_table(table.replace_schema_metadata({"ecospec.trees": json.dumps(known)}), path)
    old = read_trees(path)
    assert (old.identity, old.seconds) == (replace(trees.identity, rungs={}), {})
    for before, after in zip(trees.positions, old.positions, strict=True):
        assert list(after.predicted) == ["predictor"]
        assert np.array_equal(after.predicted["predictor"], before.predicted["predictor"])
    pq.write_table(table.drop_columns(["experts_pred"]), path)
    with pytest.raises(InputError, match="is no tree file"):
        read_trees(path)


def test_each_source_and_the_plain_target_are_timed():
    seconds = recorded(True, True).seconds
    assert set(seconds) == {"target", *SOURCES}
    assert all(value > 0 for value in seconds.values())


def test_what_is_no_tree_file_is_refused_by_name(tmp_path):
    path = tmp_path / "trees.parquet"
    with pytest.raises(InputError, match="no such file"):
        read_trees(path)
    path.write_text("parents")
    with pytest.raises(InputError, match="no Parquet file"):
        read_trees(path)
    pq.write_table(pa.table({"prompt_id": ["a"]}), path)
    with pytest.raises(InputError, match="is no tree file"):
        read_trees(path)


def test_broken_bytes_are_damage(tmp_path):
    trees, path = recorded(False, False), tmp_path / "trees.parquet"
    write_trees(path, trees.identity, trees.positions)
    content = bytearray(path.read_bytes())
    content[2000:2200] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(DamageError, match="damaged"):
        read_trees(path)


def test_a_gap_between_positions_is_damage():
    trees = recorded(False, False)
    with pytest.raises(DamageError, match="maths/0"):
        TreeSet(trees.identity, trees.positions[:3] + trees.positions[4:])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.floats(0, 1, width=32)), min_size=1, max_size=20))
def test_conditional_probabilities_give_products_back_to_the_last_bit(pairs):
    above, factor = np.array(pairs, np.float32).T
    product = above * factor
    assert np.array_equal(conditional(product, above) * above, product)
