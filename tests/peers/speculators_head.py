"""Draft heads there and back between EcoSpec and the `speculators` package, whose versions need an older Transformers.

    python -m venv /tmp/peers && /tmp/peers/bin/pip install speculators torch==2.13.0
    /tmp/peers/bin/python tests/peers/speculators_head.py write OUT
    .venv/bin/python tests/peers/speculators_head.py read OUT

`write`, in the environment of `speculators`, converts the lab's head (as `ecospec-train drafter` wrote it) with its
converter, makes random heads with its own model class, loads them all with it, and saves each beside the logits of a
first and a second draft step. `read`, in ours, loads what it wrote and the lab's own folder, and compares logits.

Letters: T tokens, F width of the features, H width of the head, V target vocabulary, D draft vocabulary.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
TARGET, DRAFTER = ROOT / "data" / "lab" / "target", ROOT / "data" / "lab" / "drafter"
LAYERS, T, V, D, H = [2, 4, 5], 24, 4096, 2048, 128
PROBE = "probe.safetensors"
RANDOM = {
    "llama": {"norm_before_residual": True},
    "qwen3": {"norm_before_residual": True, "norm_before_fc": True},
    "fc_norm": {"fc_norm": True, "norm_output": True},
}


def write(out: Path) -> None:
    """Convert and make heads, and save what `speculators` computes with them."""
    from speculators.convert.eagle.eagle3_converter import Eagle3Converter

    converter = Eagle3Converter()
    options = {"base_model": str(TARGET), "eagle_aux_hidden_state_layer_ids": LAYERS}
    converter.convert(DRAFTER, out / "converted", **options)
    for name, flags in RANDOM.items():
        _random_head(name, flags).save_pretrained(out / name)
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        save_file(_their_steps(folder), out / f"{folder.name}.{PROBE}")
        print(f"{folder.name}: read and run by speculators")


def _random_head(name: str, flags: dict) -> torch.nn.Module:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    kind = Qwen3Config if name == "qwen3" else LlamaConfig
    sizes = {"vocab_size": V, "hidden_size": H, "intermediate_size": 2 * H, "num_hidden_layers": 1, "head_dim": 64}
    layer = kind(**sizes, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6)
    layer._attn_implementation = "eager"  # flex attention compiles
    proposal = GreedyTokenProposalConfig(proposal_type="greedy", speculative_tokens=3)
    verifier = VerifierConfig.from_pretrained(str(TARGET))
    speculators = SpeculatorsConfig(
        algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=speculators,
        draft_vocab_size=D,
        eagle_aux_hidden_state_layer_ids=LAYERS,
        **flags,
    )
    torch.manual_seed(0)
    head = Eagle3DraftModel(config)
    t2d_V = torch.zeros(V, dtype=torch.bool).index_fill(0, torch.randperm(V)[:D], True)
    head.load_vocab_mappings(t2d_V, t2d_V.nonzero().squeeze(1) - torch.arange(D))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.05))
    return head


def _their_steps(folder: Path) -> dict[str, torch.Tensor]:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    head = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32)
    if "embed_tokens.weight" not in load_file(folder / "model.safetensors"):
        head._load_verifier_weights(overwrite_embed_tokens=True)  # without this it stays as allocated
    head = head.float().eval()
    torch.manual_seed(1)
    ids_1T, features_1TF = torch.randint(V, (1, T)), torch.randn(1, T, len(LAYERS) * H)
    logits: list[torch.Tensor] = []
    head.lm_head.register_forward_hook(lambda _module, _inputs, out: logits.append(out[0].detach().float().clone()))
    with torch.no_grad():
        head(features_1TF, ids_1T, torch.zeros_like(ids_1T), ttt_steps=2)
    return {"ids_T": ids_1T[0], "features_TF": features_1TF[0], "first_TD": logits[0], "second_TD": logits[1]}


def read(out: Path) -> None:
    """Load the heads with EcoSpec and say by how much its logits differ."""
    gaps = []
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        probe = load_file(out / f"{folder.name}.{PROBE}")
        sources = {folder.name: folder} | ({"lab, as trained": DRAFTER} if folder.name == "converted" else {})
        for name, source in sources.items():
            first_TD, second_TD = _our_steps(source, probe["ids_T"], probe["features_TF"])
            for step, ours, theirs in (
                ("first", first_TD, probe["first_TD"]),
                ("second", second_TD, probe["second_TD"]),
            ):
                gap = (ours - theirs[: len(ours)]).abs().max()
                print(f"{name}, {step} step: logits up to {theirs.abs().max():.3f}, largest difference {gap:.1e}")
                gaps.append(gap)
    raise SystemExit(int(max(gaps) > 1e-4))


@torch.no_grad()
def _our_steps(folder: Path, ids_T: torch.Tensor, features_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after each token of the text, and after one further token of it fed with the head's own output."""
    from transformers import AutoModelForCausalLM

    from ecospec.inference.drafters.eagle3.checkpoint import load_head

    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    head = load_head(folder, target.config).float().attach(target)
    positions_1T = torch.arange(T)[None]
    out_1TH = head(ids_T[None], head.enter(features_TF[None]), positions_1T, None, head.new_cache())
    second = []
    for last in range(T - 1):
        cache, seen = head.new_cache(), slice(0, last + 1)
        own_1TH = head(ids_T[None, seen], head.enter(features_TF[None, seen]), positions_1T[:, seen], None, cache)
        hidden_11H = head.feedback(own_1TH[:, -1:])
        sees_all = torch.ones(1, 1, last + 2, dtype=torch.bool)
        grown = head(ids_T[None, last + 1 : last + 2], hidden_11H, torch.tensor([[last + 1]]), sees_all, cache)
        second.append(head.logits(grown)[0, 0])
    return head.logits(out_1TH)[0], torch.stack(second)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
