"""Laws of the lab's recipe: its fast paths equal slow ones, and its measures mean what the card says."""

import copy
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from ecospec.data.lab.recipe import corpus, measure, polish, pretrain, repetition, target
from tests.tiny import tiny_tokenizer

TINY = {
    "vocab_size": 264,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}


def tiny(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**TINY)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


@pytest.mark.parametrize("seed", range(3))
def test_the_training_forward_is_the_models_own(seed):
    model = tiny(seed=seed)
    tokens = torch.randint(0, 264, (3, 17), generator=torch.Generator().manual_seed(seed))
    loss, balance = pretrain.Losses(model, compiled=False)(tokens)
    expected = model(input_ids=tokens[:, :-1]).logits
    hidden, _ = pretrain.Losses(model, compiled=False).hidden(tokens[:, :-1])
    torch.testing.assert_close(model.lm_head(hidden), expected)
    cross_entropy = torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, cross_entropy)
    assert balance > 1.9  # two layers, each at least about even


def test_an_even_router_has_balance_one():
    logits = torch.zeros(64, 8)
    ids = torch.arange(128).view(64, 2) % 8
    torch.testing.assert_close(pretrain.balance_loss(logits, ids), torch.tensor(1.0))
    assert pretrain.balance_loss(torch.tensor([[9.0] + [0.0] * 7]).repeat(64, 1), torch.zeros(64, 1).long()) > 7


def test_training_learns_saves_and_goes_on_from_its_weights(tmp_path):
    tokens = np.tile(np.arange(40, dtype=np.uint16), 200)
    schedule = pretrain.Schedule(
        tokens=16 * 256, batch_tokens=256, context=32, long_context=64, warmup_steps=2, learning_rate=1e-2
    )
    model = tiny(torch.bfloat16)
    losses = pretrain.Losses(model, compiled=False)
    batch = next(pretrain.batches(tokens, schedule, 0))
    before = losses(batch)[0].item()
    pretrain.train(model, tokens, schedule, tmp_path, compiled=False)
    after = losses(batch)[0].item()
    assert after < 0.8 * before
    again = tiny(torch.bfloat16, seed=5)
    pretrain.train(again, tokens, schedule, tmp_path, compiled=False)  # finds the finished state
    assert pretrain.Losses(again, compiled=False)(batch)[0].item() == after


def test_the_last_tenth_of_training_has_the_long_context():
    schedule = pretrain.Schedule()
    contexts = [schedule.context_at(step) for step in range(schedule.steps)]
    assert set(contexts) == {schedule.context, target.CONTEXT}
    assert abs(contexts.count(target.CONTEXT) / len(contexts) - 0.1) < 0.001
    assert contexts == sorted(contexts)


def test_a_stuttered_text_without_its_copies_is_the_text():
    random, text = np.random.default_rng(0), np.arange(100, 200)
    for _ in range(200):
        said, earlier = repetition.stutter(text, 8, longest=20, copies=5, width=257, random=random)
        copies = earlier >= 0
        assert copies.any() and (said[~copies] == text).all()
        assert (said[copies] == said[earlier[copies]]).all()
        assert np.unique(np.flatnonzero(copies) - earlier[copies]).size == 1  # every copy lies one span back
        assert copies.argmax() > 8 and (np.diff(np.flatnonzero(copies)) == 1).all()


def test_own_repeats_point_at_the_first_end_of_the_same_n_gram():
    ids = [1, 2, 3, 1, 2, 3, 1]
    assert repetition.own_repeats(ids, 3, 60).tolist() == [-1, -1, -1, -1, -1, 2, 3]
    assert repetition.own_repeats(ids, 3, 1).tolist() == [-1, -1, -1, -1, -1, 2, -1]
    assert repetition.own_repeats([1, 2], 3, 60).tolist() == [-1, -1]


def test_only_a_repeat_likelier_than_its_share_of_the_earlier_chance_costs():
    chances = torch.tensor([[0.8, 0.3, 0.08, 0.16]], requires_grad=True)
    fair = repetition.repetition_loss(chances, torch.tensor([[-1, -1, 1, 0]]), decay=0.3)
    assert fair.item() == 0.0
    loss = repetition.repetition_loss(chances, torch.tensor([[-1, -1, 0, 2]]), decay=0.1)
    assert loss.item() == pytest.approx(-np.log(1 - (0.16 - 0.008)) / 2, rel=1e-5)
    loss.backward()
    assert chances.grad[0, 3] > 0 and (chances.grad[0, :3] == 0).all()
    assert repetition.repetition_loss(chances, torch.full((1, 4), -1), decay=0.1).item() == 0.0


def test_joined_rows_are_cut_and_padded_to_one_width():
    rows = repetition.as_rows([(np.arange(5), np.full(5, -1)), (np.arange(2), np.array([-1, 0]))], [0, 1], 3)
    both = repetition.join([rows, rows[np.array([1])]])
    assert both.tokens_BT.tolist() == [[0, 1, 2], [0, 1, 0], [0, 1, 0]]
    assert both.earlier_BT.tolist() == [[-1, -1, -1], [-1, 0, -1], [-1, 0, -1]]
    assert both.lengths_B.tolist() == [3, 2, 2] and both.shortest_B.tolist() == [0, 1, 1]


def test_phases_follow_each_other_and_cool_down():
    settings = polish.Polish(phases=(polish.Phase(2, 1.0, 0.0, cools=False), polish.Phase(3, 0.5, 1.0)), steps=10)
    assert [settings.phase_of(number) for number in range(5)] == [(settings.phases[0], 2)] * 2 + [
        (settings.phases[1], 5)
    ] * 3
    rates = [settings.learning_rate_at(step, 100) for step in range(50)]
    assert rates[:30] == [settings.learning_rate] * 30 and rates[30:] == sorted(rates[30:], reverse=True)
    assert rates[-1] == pytest.approx(0.05 * settings.learning_rate)
    assert settings.learning_rate_at(20, 0) == pytest.approx(settings.learning_rate / 20)


def test_own_text_is_tied_to_the_model_as_it_was_except_for_early_ends():
    """Zero gradient at the old distribution; an early end is pushed down, and nothing at repeats or padding counts."""
    before, end = pretrain.Losses(tiny().eval(), compiled=False), 0
    tokens = np.array([5, 6, 7, end, 8])
    rows = repetition.as_rows([(tokens, np.array([-1, -1, -1, -1, 1]))], [0], 8)
    logits = before.model.lm_head(before.hidden(rows.tokens_BT[:, :-1])[0]).detach().requires_grad_(True)
    sum(polish.own_text_losses(before, rows, logits.log_softmax(-1), end)).backward()
    assert logits.grad.abs().max() < 1e-6
    early = repetition.as_rows([(tokens, np.array([-1, -1, -1, -1, 1]))], [4], 8)
    logits.grad = None
    sum(polish.own_text_losses(before, early, logits.log_softmax(-1), end)).backward()
    assert (logits.grad[0, :3, end] > 0).all() and logits.grad[0, 2, end] > 3 * logits.grad[0, 1, end]
    assert (logits.grad[0, 3:] == 0).all()


def test_polishing_lowers_the_chance_of_what_the_model_repeats(tmp_path):
    """A tiny model repeats itself less after two rounds; a second call goes on from the saved weights."""
    model, tokenizer = tiny(torch.bfloat16), tiny_tokenizer()
    unpolished = copy.deepcopy(model.state_dict())
    stream = np.random.default_rng(0).integers(1, model.config.vocab_size, 20_000)
    phases = (polish.Phase(1, 0.8, 1.0), polish.Phase(1, 0.8, 0.0))
    sizes = {"steps": 15, "averaged": 2, "prompts": 4, "answer_tokens": 40, "rows": 2, "width": 65, "gram": 3}
    settings = polish.Polish(phases, **sizes, learning_rate=3e-3)
    prompts = ["one", "a much longer prompt", "x", "yes and no"]
    pairs = [(prompt, " ") for prompt in prompts]
    before = measure.looping([a for _, a in polish.decode_greedily(model, tokenizer, prompts, 40)], gram=3)
    polish.polish(model, tokenizer, pairs, stream, settings, tmp_path, compiled=False)
    after = measure.looping([a for _, a in polish.decode_greedily(model, tokenizer, prompts, 40)], gram=3)
    assert before > 0.2 and after < before
    rounds = [torch.load(tmp_path / f"after-{n}" / "state.pt")["weights"] for n in (1, 2)]
    for name, weight in model.state_dict().items():
        mean = (rounds[0][name].float() + rounds[1][name].float()) / 2
        by_hand = 0.8 * mean + 0.2 * unpolished[name].float()
        torch.testing.assert_close(weight.float(), by_hand, rtol=2e-2, atol=1e-3)
    again = tiny(torch.bfloat16)
    polish.polish(again, tokenizer, pairs, stream, settings, tmp_path, compiled=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_greedy_batches_decode_as_each_prompt_alone():
    model, tokenizer = tiny().eval(), tiny_tokenizer()
    prompts = ["one", "a much longer prompt", "x"]
    together = polish.decode_greedily(model, tokenizer, prompts, 12)
    for prompt, pair in zip(prompts, together, strict=True):
        assert polish.decode_greedily(model, tokenizer, [prompt], 12)[0] == pair


def test_looping_counts_tokens_whose_closing_gram_came_before():
    assert measure.looping([[1, 2, 3, 4]], gram=2) == 0.0
    assert measure.looping([[1, 2, 1, 2, 1]], gram=2) == pytest.approx(2 / 5)
    assert measure.first_repeat([1, 2, 1, 2, 1], gram=2) == 3
    assert measure.first_repeat([1, 2, 3], gram=2) == 3


def test_bits_per_byte_of_a_uniform_model_is_that_of_its_vocabulary():
    model = tiny()
    torch.nn.init.zeros_(model.model.norm.weight)
    ids = torch.randint(0, 264, (1024,), generator=torch.Generator().manual_seed(0))
    assert measure.bits_per_byte(model, ids, 1024) == pytest.approx(np.log2(264), rel=1e-5)


def test_documents_keep_prompt_and_answer_apart_and_hold_out_whole_rows(tmp_path):
    source = 'def double(x):\n    """Return twice the number given."""\n    return 2 * x\n'
    rows = {
        "gsm8k_train.jsonl": {"prompt": "How many?", "reference": "It is <<1+1=2>>2.\n#### 2"},
        "train_synthetic_maths.jsonl": {"prompt": "1 + 1", "response": "2"},
        "train_mbpp.jsonl": {"prompt": "Write it.", "response": "x = 1\r\ny = 2"},
        "train_python_algorithms.jsonl": {"text": source},
        "train_python_stdlib.jsonl": {"text": source},
        "train_jargon.jsonl": {"text": "   :foo: n.\n\n   " + "A sample name for absolutely anything. " * 2},
        "train_python_docs.jsonl": {"text": "Heading\n=======\n\n" + "Text about :func:`open` in a page. " * 4},
    }
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    documents = corpus.read_documents(tmp_path)
    by_source = {d.source.split("/")[0]: d for d in documents if d.prompt}
    assert by_source["gsm8k_train.jsonl"].text == "Question: How many?\nAnswer: It is 2.\nThe answer is 2"
    assert by_source["train_mbpp.jsonl"].answer == "x = 1\ny = 2"
    assert by_source["train_python_algorithms.jsonl"].answer == "def double(x):\n    return 2 * x"
    assert by_source["train_jargon.jsonl"].prompt == "Term: foo\nDefinition:"
    assert "`open`" in by_source["train_python_docs.jsonl"].answer
    assert {d.domain for d in documents} == set(corpus.DOMAINS)
    for source in {d.source for d in documents}:
        assert len({d.held_out for d in documents if d.source == source}) == 1


def test_a_missing_text_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="gsm8k_train"):
        corpus.read_documents(tmp_path)
