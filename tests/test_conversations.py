"""What a target is asked: its chat template, once each special token, and later turns after the answers before them."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

from ecospec.configs.schema import TargetConfig
from ecospec.data.prompts import Prompt, after, answered
from ecospec.errors import InputError
from ecospec.inference.cli import main
from ecospec.inference.config import DecodingConfig, EvalConfig
from ecospec.inference.evaluation import evaluate, runfolder
from ecospec.inference.evaluation.evaluate import batches
from ecospec.inference.evaluation.turns import Turns
from ecospec.inference.replay.treefile import read_trees
from ecospec.tracing.target.loading import load_target
from ecospec.tracing.target.requests import answer_text, encode, in_chat_template, prompt_ids, tokenizer_sha256
from tests.test_eval import BASELINES, save_head
from tests.tiny import END, END_ID, tiny_target_folder, tiny_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FIRST = Prompt("mt/0/0", "mt", 0, 0, "one", "reply", chat=True)
SECOND = Prompt("mt/0/1", "mt", 0, 1, "two", "more", chat=True, follows="mt/0/0")


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    """A byte tokenizer that begins each plain text with its end token, as many begin theirs with a BOS."""
    tokenizer = tiny_tokenizer()
    begin = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, END_ID)])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.chat_template = template
    return tokenizer


def shown(prompt: Prompt, template: str | None = TEMPLATE, chat_template: bool | None = None) -> str:
    tokenizer = tokenizer_with(template)
    return tokenizer.decode(prompt_ids(prompt, tokenizer, chat_template))


def test_a_chat_prompt_is_put_in_the_template_where_there_is_one() -> None:
    plain = replace(FIRST, chat=False)
    assert shown(FIRST) == shown(plain, chat_template=True) == f"{END}[user]one[assistant]"
    assert shown(plain) == shown(FIRST, template=None) == shown(FIRST, chat_template=False) == f"{END}one"


@pytest.mark.parametrize(
    "prompt", [FIRST, after(SECOND, {"mt/0/0": answered(FIRST, "reply")})], ids=["first", "second"]
)
@pytest.mark.parametrize("chat_template", [True, False])
def test_a_prompt_begins_with_one_token_that_begins_texts(prompt: Prompt, chat_template: bool) -> None:
    ids = prompt_ids(prompt, tokenizer_with(TEMPLATE), chat_template)
    assert ids[0] == END_ID and ids.count(END_ID) == 1


def test_a_template_that_writes_the_date_writes_the_same_every_day() -> None:
    dated = "{%- set day = strftime_now('%d %B %Y') -%}\n{{ strftime_now('%Y-%m-%d') }} {{ day }}" + TEMPLATE
    assert shown(FIRST, dated) == f"2025-01-01 01 January 2025{END}[user]one[assistant]"


@pytest.mark.parametrize("template", ["{{ raise_exception('no system') }}", "{% for %}"])
def test_a_template_that_refuses_a_prompt_is_named_with_the_sample(template: str) -> None:
    with pytest.raises(InputError, match=r"mt/0/0.*chat template cannot take it.*chat_template false"):
        shown(FIRST, template)


def test_another_chat_template_is_another_tokenizer() -> None:
    hashes = {tokenizer_sha256(tokenizer_with(template)) for template in (None, TEMPLATE, TEMPLATE + " ")}
    assert len(hashes) == 3


def test_a_template_asked_for_must_be_there() -> None:
    with pytest.raises(InputError, match="no chat template"):
        prompt_ids(FIRST, tokenizer_with(None), True)
    assert in_chat_template(FIRST, tokenizer_with(None), None) is False


@pytest.mark.parametrize("answer", ["reply", "", "antwort\r\n\u2028🙂"])
def test_a_second_turn_shows_the_conversation_so_far(answer: str) -> None:
    second = after(SECOND, {"mt/0/0": answered(FIRST, answer)})
    assert shown(second) == f"{END}[user]one[assistant]{answer}[user]two[assistant]"
    assert shown(second, template=None) == f"{END}one\n\n{answer}\n\ntwo"


def test_a_second_turn_without_the_first_answer_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"mt/0/1.*mt/0/0"):
        encode([FIRST, SECOND], tokenizer_with(TEMPLATE), teacher_force=False)


def test_forced_turns_follow_the_answers_forced_before_them() -> None:
    tokenizer = tokenizer_with(TEMPLATE)
    first, second = encode([FIRST, SECOND], tokenizer, teacher_force=True)
    assert tokenizer.decode(first.ids) == f"{END}[user]one[assistant]reply"
    assert tokenizer.decode(second.ids) == f"{END}[user]one[assistant]reply[user]two[assistant]more"
    with pytest.raises(InputError, match="mt/0/0 has no `answer`"):
        encode([replace(FIRST, answer=None), SECOND], tokenizer, teacher_force=True)


def test_an_empty_answer_is_an_answer_to_force() -> None:
    (request,) = encode([replace(FIRST, answer="")], tokenizer_with(TEMPLATE), teacher_force=True)
    assert request.answer_ids == [] and request.ids == request.prompt_ids


def test_an_answer_is_quoted_without_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer("quoted")["input_ids"], END_ID]
    assert answer_text(ids, tokenizer) == "quoted"
    assert answer_text([END_ID], tokenizer) == ""


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_batches_keep_turns_apart_and_in_order(size: int) -> None:
    prompts = [
        Prompt(f"{name}/{row}/{turn}", name, row, turn, "x", follows=f"{name}/{row}/0" if turn else None)
        for name in ("a", "b")
        for row in range(4)
        for turn in range(1 + row % 2)
    ]
    planned = batches(prompts, size)
    assert sorted(p.sample_id for batch in planned for p in batch) == sorted(p.sample_id for p in prompts)
    assert all(len({(p.dataset, p.turn) for p in batch}) == 1 and len(batch) <= size for batch in planned)
    place = {p.sample_id: number for number, batch in enumerate(planned) for p in batch}
    assert all(place[p.follows] < place[p.sample_id] for p in prompts if p.follows)


NEW_TOKENS = 6
ROWS = [
    {"prompt": "Name a colour.", "turns": ["Name a colour.", "Another?"]},
    {"prompt": "Say why.", "turns": ["Say why.", "Say how.", "Enough."]},
    {"prompt": "One turn."},
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat target, a head for it, and `mt_bench.jsonl` of one, two and three turns."""
    root = tmp_path_factory.mktemp("lab")
    tiny_target_folder(root / "target", num_hidden_layers=6, max_position_embeddings=512)
    tokenizer_with(TEMPLATE).save_pretrained(root / "target")
    save_head(root / "head")
    (root / "mt_bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return root


@cache
def by_hand(lab: Path) -> dict[str, tuple[int, list[int]]]:
    """By sample id the prompt's length and the greedy answer: Transformers alone, the template written out."""
    target, found = load_target(TargetConfig(name=str(lab / "target"))), {}
    for number, row in enumerate(ROWS):
        text = END
        for turn, question in enumerate(row.get("turns", [row["prompt"]])):
            text += f"[user]{question}[assistant]"
            ids = target.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            out = target.model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
            text += target.tokenizer.decode(out, skip_special_tokens=True)
            found[f"mt_bench/{number}/{turn}"] = (ids.shape[1], out)
    return found


def options(lab: Path, **changes: object) -> list[str]:
    values = {
        "target": lab / "target",
        "drafter": lab / "head",
        "datasets": "mt_bench",
        "data-dir": lab,
        "selection": "confidence",
        "max-new-tokens": NEW_TOKENS,
        "threads": 1,
    } | changes
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


METHODS = f'[{{"label": "EAGLE-3"}}, {BASELINES}]'


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> dict[tuple, tuple]:
    """Filled by `eval`: (label, temperature, sample id) → prompt as it was decoded, and its new ids."""
    found, summarise = {}, runfolder.summarise

    def watched(config: EvalConfig, target: object, plans: list, outcomes: list, *others: object) -> list[dict]:
        for outcome in outcomes:
            for prompt, ids in zip(outcome.prompts, outcome.new_ids, strict=True):
                found[outcome.plan.label, outcome.temperature, prompt.sample_id] = (prompt, ids)
        return summarise(config, target, plans, outcomes, *others)

    monkeypatch.setattr(runfolder, "summarise", watched)
    return found


def require_plain_history(lab: Path, decoded: dict[tuple, tuple]) -> int:
    """The number of later turns, each checked to follow plain decoding's answer at its temperature."""
    tokenizer = AutoTokenizer.from_pretrained(lab / "target")
    later = [(key[1], prompt) for key, (prompt, _) in decoded.items() if prompt.turn]
    for temperature, prompt in later:
        earlier, ids = decoded["plain", temperature, prompt.follows]
        assert prompt.history == (*earlier.history, earlier.text, answer_text(ids, tokenizer))
    return len(later)


@pytest.mark.parametrize("size", [1, 2])
def test_every_method_decodes_later_turns_after_plain_decodings_answers(
    lab: Path, tmp_path: Path, decoded: dict, size: int
) -> None:
    methods = METHODS if size == 1 else METHODS.replace(', {"label": "stock", "drafter": "hf_greedy"}', "")
    command = options(lab, output=tmp_path / "run", methods=methods, temperature="0,1", **{"batch-size": size})
    assert main(["eval", *command]) == 0
    for sample_id, (_, answer) in by_hand(lab).items():
        assert decoded["plain", 0.0, sample_id][1] == answer
    assert require_plain_history(lab, decoded) == 2 * 3 * (3 if size == 1 else 2)
    runs = json.loads((tmp_path / "run" / "results.json").read_text())["runs"]
    assert all(run["chat_template"] is True and run["samples"] == 6 for run in runs)
    assert all(run["lossless"] in ("exact", "reference") for run in runs)


def test_a_method_that_strays_does_not_lead_the_conversation(
    lab: Path, tmp_path: Path, decoded: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = evaluate._stock_generate

    def stray(*args: object) -> tuple:
        ids_1T, run = stock(*args)
        ids_1T[0, -1] = (ids_1T[0, -1] + 1) % END_ID
        return ids_1T, run

    monkeypatch.setattr(evaluate, "_stock_generate", stray)
    plain, other = json.loads(f"[{BASELINES}]")
    for number, order in enumerate([[plain, other], [other, plain]]):
        decoded.clear()
        assert main(["eval", *options(lab, output=tmp_path / str(number), methods=json.dumps(order))]) == 0
        assert all(decoded["plain", 0.0, name][1] != decoded["stock", 0.0, name][1] for name in by_hand(lab))
        assert require_plain_history(lab, decoded) == 2 * 3


def test_whether_the_template_was_used_is_in_the_results(lab: Path, tmp_path: Path) -> None:
    chosen = {"methods": f"[{BASELINES.split(', {')[0]}]", "samples": 1, "chat-template": "false"}
    assert main(["eval", *options(lab, output=tmp_path / "run", **chosen)]) == 0
    (run,) = json.loads((tmp_path / "run" / "results.json").read_text())["runs"]
    assert run["chat_template"] is False and run["samples"] == 2


def test_recorded_turns_are_those_of_plain_decoding(lab: Path, tmp_path: Path) -> None:
    assert main(["record", *options(lab, output=tmp_path / "trees")]) == 0
    trees, expected = read_trees(tmp_path / "trees" / "trees.parquet"), by_hand(lab)
    assert set(trees.spans) == set(expected)
    for sample_id, (length, answer) in expected.items():
        positions = [trees.positions[number] for number in trees.spans[sample_id]]
        assert [position.position for position in positions] == [length + n for n in range(len(answer) - 1)]
        assert [position.root for position in positions] == answer[:-1]


def test_generate_writes_every_turn_after_the_one_before(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *options(lab, samples=1)]) == 0
    shown, tokenizer = capsys.readouterr().out, AutoTokenizer.from_pretrained(lab / "target")
    first, second = (answer_text(by_hand(lab)[f"mt_bench/0/{turn}"][1], tokenizer) for turn in (0, 1))
    begin = f"[user]Name a colour.[assistant]{first}"
    assert shown == f"{begin}\n{begin}[user]Another?[assistant]{second}\n"


def test_a_turn_that_has_outgrown_the_context_is_refused_by_name() -> None:
    tokenizer = tokenizer_with(TEMPLATE)
    answer = tokenizer("reply", add_special_tokens=False)["input_ids"]
    complete = after(SECOND, {"mt/0/0": answered(FIRST, "reply")})
    context = len(prompt_ids(complete, tokenizer)) + 10 - 1  # the last of ten new tokens never goes through the model
    for limit in (context, context - 1):
        model = SimpleNamespace(config=Qwen3Config(max_position_embeddings=limit))
        turns = Turns(DecodingConfig(max_new_tokens=10), SimpleNamespace(tokenizer=tokenizer, model=model))
        turns.note([FIRST], [answer])
        if limit == context:
            assert turns.complete(SECOND) == complete
            continue
        with pytest.raises(InputError, match="mt/0/1 needs"):
            turns.complete(SECOND)


def test_a_conversation_that_may_outgrow_the_context_is_refused_before_decoding(
    lab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = options(lab, output=tmp_path / "run", methods=METHODS, **{"max-new-tokens": 160})
    assert main(["eval", *command]) == 2
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert "mt_bench/1/2" in error and "512" in error
