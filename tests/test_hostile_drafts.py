"""Whatever the shape of a tree and however wrong its drafts, the text is plain decoding's."""

import pytest
import torch

from ecospec.errors import InputError
from ecospec.inference import generate
from ecospec.inference.tree import DraftTree, depths_of
from tests.selecting import POLICIES
from tests.stand_ins import GREEDY, SAMPLED, HashedFootprints
from tests.tiny import VOCABULARY, tiny_model

NEW_TOKENS = 60
SHAPES = {
    "chain": [-1, 0, 1, 2, 3, 4, 5, 6],
    "star": [-1, 0, 0, 0, 0, 0, 0, 0],
    "comb": [-1, 0, 0, 1, 1, 3, 3, 5, 5],
    "late": [-1, 0, 0, 0, 3, 3, 3, 6, 6],  # the main line goes through the last siblings
    "root": [-1],
}
PROCESSED = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 8}


class Shaped:
    """A tree of one shape whose tokens are right wherever they can be, never, or at random; children may be equal."""

    feature_layers = ()

    def __init__(self, shape, kind, truth, seed):
        self.parents, self.kind, self.truth, self.seed = torch.tensor(SHAPES[shape]), kind, truth, seed

    def reset(self): ...

    def draft(self, ids_T, features_nF):
        generator = torch.Generator().manual_seed(1000 * self.seed + len(ids_T))
        depth, N = depths_of(self.parents), len(self.parents)
        tokens = torch.randint(VOCABULARY, (N,), generator=generator)
        prob = torch.ones(N)
        for node in range(1, N):
            prob[node] = prob[self.parents[node]] * torch.rand((), generator=generator)
            at = len(ids_T) - 1 + int(depth[node])
            true = self.truth[at] if at < len(self.truth) else 0
            if self.kind == "hostile" and tokens[node] == true:
                tokens[node] = (true + 1) % VOCABULARY
            if self.kind == "perfect" or (self.kind == "mixed" and torch.rand((), generator=generator) < 0.5):
                tokens[node] = true
        tokens[0] = ids_T[-1]
        return DraftTree(tokens, self.parents, prob, depth)


def check(model, shape, kind, seed, policy, gamma, options):
    ids = torch.randint(3, VOCABULARY, (1, 5 + seed), generator=torch.Generator().manual_seed(seed))
    settings = {"max_new_tokens": NEW_TOKENS, **options}
    torch.manual_seed(seed)
    expected = model.generate(ids, **settings)
    drafter = Shaped(shape, kind, expected[0].tolist(), seed)
    torch.manual_seed(seed)
    method = {"drafter": drafter, "predictor": HashedFootprints(), "policy": policy, "gamma": gamma}
    assert torch.equal(generate(model, ids, **method, **settings), expected), (shape, kind, seed, policy, gamma)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["perfect", "hostile", "random", "mixed"])
def test_no_shape_and_no_skill_changes_the_text(shape, kind):
    for seed in range(3):
        model = tiny_model("qwen3_moe", seed)
        model.generation_config.eos_token_id = None
        policy = sorted(POLICIES)[(seed + len(shape) + len(kind)) % len(POLICIES)]
        gamma = 1 + (3 * seed + len(kind)) % len(SHAPES[shape])
        options = [GREEDY, {**SAMPLED, **PROCESSED}, {**SAMPLED, "temperature": 0.6, "top_p": 0.8}][seed]
        check(model, shape, kind, seed, policy, gamma, options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_shape_policy_or_budget_changes_the_text(family, shape):
    for seed, policy in enumerate(POLICIES):
        model = tiny_model(family, seed)
        model.generation_config.eos_token_id = None
        for gamma in {1, 2, 4, len(SHAPES[shape])}:
            for options in (GREEDY, {**SAMPLED, **PROCESSED}):
                check(model, shape, "mixed", seed, policy, gamma, options)


class Misshapen:
    """One draft whose depth or root is wrong."""

    feature_layers = ()

    def __init__(self, truth, root=0, depth=1):
        self.truth, self.root, self.depth = truth, root, depth

    def reset(self): ...

    def draft(self, ids_T, features_nF):
        next_token = torch.tensor(self.truth[min(len(ids_T), len(self.truth) - 1)])
        tokens = torch.stack([(ids_T[-1] + self.root) % VOCABULARY, next_token])
        return DraftTree(tokens, torch.tensor([-1, 0]), torch.tensor([1.0, 0.5]), torch.tensor([0, self.depth]))


def test_a_wrong_depth_does_no_harm_and_a_wrong_root_is_refused():
    model = tiny_model("qwen3_moe", 0)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([[5, 9, 2]])
    expected = model.generate(ids, max_new_tokens=12, **GREEDY)
    truth = expected[0].tolist()
    options = {"policy": "confidence", "gamma": 2, "max_new_tokens": 12, **GREEDY}
    assert torch.equal(generate(model, ids, drafter=Misshapen(truth, depth=7), **options), expected)
    with pytest.raises(InputError, match="begin with its root"):
        generate(model, ids, drafter=Misshapen(truth, root=1), **options)
