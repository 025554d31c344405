"""Laws of the lab's recipe: its fast paths equal slow ones, and its measures mean what the card says."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from ecospec.data.lab import corpus, measure, polish, pretrain, target
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
    torch.testing.assert_close(pretrain.Losses(model, compiled=False).logits(tokens[:, :-1]), expected)
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


def test_marked_tokens_close_an_n_gram_seen_before():
    assert polish.repeated([1, 2, 3, 1, 2, 3, 1], 3) == [False] * 5 + [True, True]
    assert polish.repeated([1, 2], 3) == [False, False]


def test_the_distilled_model_is_the_teacher_without_the_marked_tokens():
    """The loss is least, with zero gradient, at the teacher's distribution, renormalised where a token is forbidden."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(1, 3, 5, generator=generator)
    targets, marked = torch.tensor([[1, 2, 3]]), torch.tensor([[True, False, False]])
    real = torch.tensor([[True, True, False]])
    best = teacher.clone()
    best[0, 0, 1] = -30.0
    best[0, 2] = 0.0  # not a real position: it must not matter
    best.requires_grad_(True)
    loss = polish.distillation(teacher, best, targets, marked, real)
    loss.backward()
    assert best.grad.abs().max() < 1e-6
    by_hand = teacher[0, 0, [0, 2, 3, 4]].softmax(-1), teacher[0, 1].softmax(-1)
    entropy = sum(-(p * p.log()).sum() for p in by_hand) / 2
    torch.testing.assert_close(loss.detach(), entropy)


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


def test_routing_measures_match_their_definitions():
    experts = np.random.default_rng(0).permuted(np.tile(np.arange(8), (2, 10, 3, 1)), axis=-1)[..., :2]
    by_hand = np.mean(
        [len(set(experts[r, t : t + 4, layer].ravel())) for r in range(2) for t in range(7) for layer in range(3)]
    )
    assert measure.mean_union(experts, 8, 4) == pytest.approx(by_hand)
    assert measure.mean_union(experts, 8, 1) == 2.0
    reuse = np.mean(
        [
            len(set(experts[r, t, layer]) & set(experts[r, t - 1, layer])) / 2
            for r in range(2)
            for t in range(1, 10)
            for layer in range(3)
        ]
    )
    assert measure.temporal_reuse(experts) == pytest.approx(reuse)
    assert measure.expert_load(experts, 8).sum(1) == pytest.approx([1.0, 1.0, 1.0])


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
