"""Laws that other implementations of speculative decoding were reported to break, at the level of decoding.

The laws about draft heads and their checkpoints are in test_eagle3_checkpoint, test_eagle3_dialects and test_mtp, those
about left padding in test_batches, and the comparison of draft logits round by round in test_growth.
"""

import logging

import pytest
import torch
from transformers import LlamaConfig, StaticCache

from ecospec.errors import InputError
from ecospec.inference import generate
from ecospec.inference.decoding.generation import CustomGenerate
from ecospec.inference.decoding.method import Method
from ecospec.inference.drafters.eagle3.head import Eagle3Head
from ecospec.inference.drafters.growth import TreeDrafter
from ecospec.inference.drafters.mtp.head import load_mtp_head
from ecospec.inference.selection.config import selector
from ecospec.inference.tree import DraftTree, tree_from_levels
from tests.mtp_reference import YARN, random_layer, write_checkpoint
from tests.selecting import POLICIES, chosen_of
from tests.stand_ins import GREEDY, SAMPLED, EmptyDrafter
from tests.tiny import VOCABULARY, tiny_model

END = VOCABULARY - 1


class Chain:
    """Drafts the next `length` tokens of a known text, all of them right."""

    feature_layers = ()

    def __init__(self, truth, length):
        self.truth, self.length = truth, length

    def reset(self): ...

    def draft(self, ids_T, features_nF):
        ahead = [*self.truth[len(ids_T) :], *[3] * self.length][: self.length]
        tokens = torch.tensor([int(ids_T[-1]), *ahead])
        N = self.length + 1
        return DraftTree(tokens, torch.arange(N) - 1, torch.ones(N), torch.arange(N))


class Fan:
    """Every token of a small vocabulary, and every token again below each: whatever is drawn was drafted."""

    feature_layers = ()

    def __init__(self, tokens):
        self.tokens = torch.tensor(tokens)

    def reset(self): ...

    def draft(self, ids_T, features_nF):
        k = len(self.tokens)
        first = (self.tokens, torch.zeros(k, dtype=torch.long), torch.full((k,), 1 / k))
        second = (self.tokens.repeat(k), torch.arange(1, k + 1).repeat_interleave(k), torch.full((k * k,), 1 / k))
        return tree_from_levels(ids_T[-1], [first, second])


def small_model(seed=0, **overrides):
    """A target with five tokens."""
    return tiny_model("qwen3_moe", seed, vocab_size=5, bos_token_id=0, eos_token_id=None, pad_token_id=0, **overrides)


def random_prompt(length, seed=0, vocabulary=VOCABULARY):
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", range(1, 13))
def test_an_accepted_block_is_cut_at_the_end_token_and_at_the_length(count):
    """Row 6: text past the end token, too many tokens."""
    model, ids = tiny_model("qwen3_moe", 0, eos_token_id=None), random_prompt(6)
    text = model.generate(ids, max_new_tokens=12, **GREEDY)
    method = {"drafter": Chain(text[0].tolist(), 7), "policy": "confidence", "gamma": 8}
    out = generate(model, ids, max_new_tokens=count, **method, **GREEDY)
    assert torch.equal(out, text[:, : ids.shape[1] + count])
    end = int(text[0, ids.shape[1] + count - 1])
    first = text[0, ids.shape[1] :].tolist().index(end) + 1
    out = generate(model, ids, max_new_tokens=40, eos_token_id=[end, END], **method, **GREEDY)
    assert torch.equal(out, text[:, : ids.shape[1] + first])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_blocks_longer_than_a_sliding_window_do_not_push_out_what_is_still_seen(seed, options):
    """Row 7: garbage with sliding windows. Window 8, blocks of up to 14 nodes, 40 tokens."""
    model, ids = tiny_model("gpt_oss", seed, eos_token_id=None), random_prompt(3 + 4 * seed, seed)
    torch.manual_seed(seed)
    expected = model.generate(ids, max_new_tokens=40, **options)
    drafts = expected[0].tolist()
    for wrong in ((), range(9, 60, 5), range(0, 60, 2)):
        spoilt = [(token + 1) % VOCABULARY if place in wrong else token for place, token in enumerate(drafts)]
        torch.manual_seed(seed)
        method = {"drafter": Chain(spoilt, 13), "policy": "confidence", "gamma": 14}
        assert torch.equal(generate(model, ids, max_new_tokens=40, **method, **options), expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_in_double_precision_too_the_text_is_plain_decodings(family):
    """Row 8: in bfloat16 batched arithmetic may turn near ties; in float32 and float64 nothing does."""
    model, ids = tiny_model(family, 4, eos_token_id=None).double(), random_prompt(7, 4)
    model.set_experts_implementation("eager")  # grouped kernels take no float64
    expected = model.generate(ids, max_new_tokens=40, **GREEDY)
    method = {"drafter": Chain(expected[0].tolist(), 5), "policy": "confidence", "gamma": 6}
    assert torch.equal(generate(model, ids, max_new_tokens=40, **method, **GREEDY), expected)


def processed(logits_V, temperature, top_k, top_p):
    """The law of one token after temperature, top-k and top-p, by its definition."""
    p = (logits_V.double() / temperature).softmax(-1)
    order = p.argsort(descending=True).tolist()[:top_k]
    p = torch.zeros_like(p).index_fill(0, torch.tensor(order), 1.0) * p
    p = p / p.sum()
    kept, mass = [], 0.0
    for token in order:
        if mass < top_p:
            kept.append(token)
            mass += float(p[token])
    p = torch.zeros_like(p).index_fill(0, torch.tensor(kept), 1.0) * p
    return p / p.sum()


@torch.no_grad()
def exact_law(model, ids_1T, tokens, law):
    """Probability of every continuation of `tokens` tokens, [5, 5, …]."""
    if tokens == 0:
        return torch.tensor(1.0, dtype=torch.double)
    p_V = law(model(ids_1T).logits[0, -1])
    below = [exact_law(model, torch.cat([ids_1T, torch.tensor([[v]])], 1), tokens - 1, law) for v in range(5)]
    return torch.stack([p * rest for p, rest in zip(p_V, below, strict=True)])


@pytest.mark.parametrize("drafted", [[1, 3], [0, 2, 4], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("seed", range(2))
def test_sampled_texts_follow_the_target_s_law(drafted, seed):
    """Row 9: the law of three tokens, the last two drafted, by a chi-squared test with temperature, top-k and top-p."""
    model, ids = small_model(seed), random_prompt(4, seed, 5)
    model.lm_head.weight.data *= 0.45
    options = {"do_sample": True, "temperature": 1.3, "top_k": 4, "top_p": 0.9}
    law_555 = exact_law(model, ids, 3, lambda logits_V: processed(logits_V, 1.3, 4, 0.9))
    rows, hook = 2000, CustomGenerate(Method(Fan(drafted), selector("random", 5)))
    torch.manual_seed(seed)
    ids = ids.repeat(rows, 1)
    options["attention_mask"] = torch.ones_like(ids)
    out = model.generate(ids, custom_generate=hook, max_new_tokens=3, **options)
    cells = (out[:, 4] * 25 + out[:, 5] * 5 + out[:, 6]).bincount(minlength=125).double()
    expected = law_555.flatten() * rows
    assert cells[expected == 0].sum() == 0, "a token outside the law"
    rare = expected < 5
    cells, expected = (torch.cat([part[~rare], part[rare].sum()[None]]) for part in (cells, expected))
    cells, expected = cells[expected > 0], expected[expected > 0]
    free = len(expected) - 1
    assert free >= 8
    chi2 = float(((cells - expected) ** 2 / expected).sum())
    assert chi2 < free + 4 * (2 * free) ** 0.5 + 4
    assert hook.last_run.acceptance_length > 1.1, "drafts must be accepted"


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-4}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1.0}], ids=str
)
@pytest.mark.parametrize("scale", [1.0, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_certain_choices_and_drafts_of_the_whole_vocabulary_give_no_nan(options, scale, dtype):
    """Row 10: softmax overflow, empty residual: siblings cover the vocabulary, and one token may have all the mass."""
    model, ids = small_model(1), random_prompt(4, 1, 5)
    model.lm_head.weight.data *= scale / 10 if dtype == torch.float16 else scale
    model, settings = model.to(dtype), {**SAMPLED, **options, "max_new_tokens": 12}
    torch.manual_seed(0)
    out = generate(model, ids, drafter=Fan([0, 1, 2, 3, 4]), policy="confidence", gamma=31, **settings)
    assert out.shape == (1, 16) and ((out >= 0) & (out < 5)).all()
    if dtype == torch.float32:
        torch.manual_seed(0)
        assert torch.equal(out, model.generate(ids, **settings))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("joint", [False, True])
def test_every_chosen_node_s_parent_is_chosen_when_all_scores_are_equal(policy, joint):
    """Row 11: a node chosen without its parent. All draft probabilities are 1.0, in half precision, all costs equal."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        parents = torch.stack([random_parents(12, generator), random_parents(12, generator)])
        prob, footprints = torch.ones(2, 12, dtype=torch.bfloat16), torch.zeros(2, 12, 2, 4, dtype=torch.bool)
        footprints[..., seed % 4] = seed % 2 == 0
        real = torch.ones_like(parents, dtype=torch.bool)
        for gamma in (2, 5, 11, 12):
            chosen = chosen_of(parents, prob, real, footprints, policy, gamma, joint, seed)
            assert int(chosen.sum()) == 2 * gamma
            assert all(chosen[b, parents[b, n]] for b, n in chosen.nonzero().tolist() if n)


def random_parents(nodes, generator):
    return torch.tensor([-1, *(int(torch.randint(node, (), generator=generator)) for node in range(1, nodes))])


def eagle_head(model, positions=256):
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=VOCABULARY, draft_vocab_size=VOCABULARY, max_position_embeddings=positions)
    head = Eagle3Head(config, feature_layers=(1, 2, 3)).eval().requires_grad_(False)
    return head.attach_embedding(model.get_input_embeddings())


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_text_longer_than_the_drafter_was_made_for_stays_right_and_is_noticed(options, caplog):
    """Row 13: crash or silence past the draft's positions."""
    model, ids = tiny_model("qwen3_moe", 2, eos_token_id=None), random_prompt(7, 2)
    torch.manual_seed(0)
    expected = model.generate(ids, max_new_tokens=60, **options)
    for positions, notices in ((16, 1), (256, 0)):
        caplog.clear()
        drafter = TreeDrafter(eagle_head(model, positions), 3, 2)
        torch.manual_seed(0)
        with caplog.at_level(logging.WARNING):
            out = generate(model, ids, drafter=drafter, policy="confidence", max_new_tokens=60, **options)
        assert torch.equal(out, expected)
        assert sum("longer than the" in record.message for record in caplog.records) == notices


class Spy:
    """A head that notes what the drafter feeds it at each call."""

    def __init__(self, head):
        self.head, self.features, self.pairs, self.outs, self.inputs = head, None, [], [], []
        self.feature_layers, self.first_token = head.feature_layers, head.first_token

    def __getattr__(self, name):
        return getattr(self.head, name)

    def enter(self, features_BTF):
        self.features = features_BTF[0]
        return self.head.enter(features_BTF)

    def forward(self, ids_BT, hidden_BTH, positions_BT, seen_BTS, cache):
        out = self.head.forward(ids_BT, hidden_BTH, positions_BT, seen_BTS, cache)
        if self.features is not None:
            self.pairs.append((self.features, ids_BT[0], positions_BT[0]))
        self.inputs.append((self.features is not None, hidden_BTH))
        self.outs.append(out)
        self.features = None
        return out


@torch.no_grad()
def states_of(model, ids_1T):
    """Outputs of the decoder layers, the last one's before the final norm, and the state after it, each [T, H]."""
    seen, layers = [], model.model.layers
    handles = [layer.register_forward_hook(lambda _, __, out: seen.append(out[0])) for layer in layers]
    last = model.model(ids_1T, use_cache=False).last_hidden_state[0]
    for handle in handles:
        handle.remove()
    return {**dict(enumerate(seen, 1)), -1: last}


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
@pytest.mark.parametrize("seed", range(3))
def test_a_head_is_fed_each_token_with_the_state_of_the_token_before_it(kind, seed, tmp_path):
    """Row 15: pairs not shifted, or the wrong state given to the second step."""
    model, ids = tiny_model("deepseek_v3", seed, eos_token_id=None, rope_parameters=YARN), random_prompt(6, seed)
    head = eagle_head(model)
    if kind == "mtp":
        head = load_mtp_head(write_checkpoint(tmp_path, model, random_layer(seed)), model)
    spy = Spy(head)
    out = generate(model, ids, drafter=TreeDrafter(spy, 2, 2), policy="confidence", max_new_tokens=30, **GREEDY)
    states = states_of(model, out)
    features = torch.cat([pair[0] for pair in spy.pairs])
    fed = len(features)  # the last steps' tokens are never drafted from
    assert out.shape[1] - 5 <= fed < out.shape[1]
    wanted = torch.cat([states[layer] for layer in head.feature_layers], dim=-1)[:fed]
    torch.testing.assert_close(features, wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(torch.cat([pair[1] for pair in spy.pairs]), out[0, 1 : fed + 1])
    assert torch.equal(torch.cat([pair[2] for pair in spy.pairs]), torch.arange(fed))
    for (entered, hidden), out_before in zip(spy.inputs[1:], spy.outs, strict=False):
        if not entered:
            assert torch.equal(hidden, head.feedback(out_before[:, -1:]).expand_as(hidden))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_static_cache_is_refused_and_never_silently_wrong(family):
    """Row 17: static caches cannot drop what was rejected."""
    model, ids = tiny_model(family, 0), random_prompt(5)
    hook = CustomGenerate(Method(EmptyDrafter(), selector("confidence")))
    for how in ({"cache_implementation": "static"}, {"cache": StaticCache(config=model.config, max_cache_len=64)}):
        with pytest.raises(InputError, match="cache"):
            generate(model, ids, drafter=EmptyDrafter(), policy="confidence", max_new_tokens=8, **how)
        with pytest.raises(InputError, match="cache"):
            model.generate(ids, custom_generate=hook, max_new_tokens=8, **how)
