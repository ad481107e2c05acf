"""Folders of the family come in whole: every era, both layouts, all ranks, or nothing at all."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanochat import checkpoint
from nanochat.errors import UserError
from nanochat.interop.family import import_folder
from nanochat.interop.optimizer_files import read_moments
from nanochat.interop.torch_archive import read_torch
from nanochat.model.config import Constants, ModelConfig
from nanochat.model.gpt import GPT
from nanochat.optim.groups import Rates, parameter_groups
from nanochat.optim.optimizer import Optimizer
from nanochat.tokenizer.bpe import Tokenizer

GOLDEN = Path(__file__).parent / "golden"
RUN = GOLDEN / "run"
D2 = RUN / "base_checkpoints" / "d2"
ERAS = ["oct2025", "jan16", "mar02", "mar09"]

#: Relative to the largest logit, in fp32.
LOGIT_TOLERANCE = 1e-5

OCTOBER = Constants(
    rotary_base=10_000.0,
    qk_scale=1.0,
    value_embed_scale=0.0,
    vocab_multiple=1,
    residual_lambdas=False,
    smear=False,
    backout=False,
)
JANUARY = Constants(
    rotary_base=10_000.0,
    qk_scale=1.0,
    value_embed_scale=2.0,
    value_gate_channels=32,
    short_window=512,
    smear=False,
    backout=False,
)
CONSTANTS = {
    "oct2025": OCTOBER,
    "jan16": JANUARY,
    "mar02": JANUARY,  # but for its soft cap, which no file tells
    "mar09": Constants(qk_scale=1.15, short_window=384, smear=False, backout=False),
}


def parameters_of(path: Path) -> dict[str, Tensor]:
    return {name[6:]: tensor for name, tensor in load_file(path).items() if name.startswith("param.")}


def write_tokenizer(folder: Path, vocab_size: int, byte_lengths: list[int] | None = None) -> None:
    """tokenizer.pkl and token_bytes.pt of a tokenizer with all bytes, made-up merges and the nine special tokens."""
    with (RUN / "tokenizer" / "tokenizer.pkl").open("rb") as file:
        known = pickle.load(file)
    ranks = {token: rank for token, rank in known._mergeable_ranks.items() if rank < vocab_size - 9}
    specials = {name: vocab_size - 9 + i for i, name in enumerate(known._special_tokens)}
    folder.mkdir(parents=True, exist_ok=True)
    encoding = tiktoken.Encoding("rustbpe", pat_str=known._pat_str, mergeable_ranks=ranks, special_tokens=specials)
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    lengths = byte_lengths or [len(token) for token in ranks] + [0] * 9
    torch.save(torch.tensor(lengths, dtype=torch.int32), folder / "token_bytes.pt")


def write_model(folder: Path, parameters: dict[str, Tensor], model_config: dict[str, Any], step: int = 70) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(parameters, folder / f"model_{step:06d}.pt")
    meta = {"step": step, "val_bpb": 0.9, "model_config": model_config, "user_config": {"depth": 5}}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta))


def write_era(folder: Path, era: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict) -> None:
    """A flat folder, as on the hub."""
    config = json.loads((GOLDEN / "eras" / f"{era}.json").read_text())["model_config"]
    write_model(folder, change(parameters_of(GOLDEN / "eras" / f"{era}.safetensors")), config)
    write_tokenizer(folder, config["vocab_size"])


def model_of(saved: checkpoint.Checkpoint) -> GPT:
    with torch.device("meta"):
        model = GPT(saved.model_config)
    model.load_state_dict(dict(saved.parameters), strict=True, assign=True)
    return model.requires_grad_(False)


# ------------------------------------------------------------------------------------------------ the real folder


def test_the_familys_run_is_imported_whole(tmp_path: Path) -> None:
    lines: list[str] = []
    result = import_folder(RUN, tmp_path, report=lines.append)
    assert [(each.source, each.tag, each.step, each.written) for each in result.checkpoints] == [
        ("base", "d2", 60, True)
    ]
    assert result.tokenizer == tmp_path / "tokenizer"
    assert result.shards == 3
    assert len(lines) == 1
    assert "from 14 March 2026" in lines[0]
    assert json.loads(json.dumps(result.to_dict()))["checkpoints"][0]["step"] == 60
    assert "base d2 step 60: imported" in result.describe()
    for shard in (RUN / "base_data_climbmix").iterdir():
        assert (tmp_path / "base_data_climbmix" / shard.name).read_bytes() == shard.read_bytes()

    saved = checkpoint.load(checkpoint.find("base", base=tmp_path), optimizer=True)
    expected = torch.load(D2 / "model_000060.pt", weights_only=True)
    assert set(saved.parameters) == set(expected)
    assert all(torch.equal(saved.parameters[name], expected[name]) for name in expected)
    assert saved.model_config == ModelConfig(64, 521, 2, 2, 2, 64, "L", Constants())
    assert saved.family is not None
    meta = json.loads((D2 / "meta_000060.json").read_text())
    for name in ("user_config", "dataloader_state_dict", "loop_state", "step", "val_bpb"):
        assert saved.family[name] == meta[name]
    assert saved.tokenizer is not None
    assert saved.tokenizer.path == "tokenizer"
    assert saved.tokenizer.fingerprint == Tokenizer.load(tmp_path / "tokenizer").fingerprint


def test_the_imported_tokenizer_is_the_familys(tmp_path: Path) -> None:
    import_folder(RUN, tmp_path)
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")
    with (RUN / "tokenizer" / "tokenizer.pkl").open("rb") as file:
        family = pickle.load(file)
    text = "The 1234 quick brown föxes 🦊\n\n  don't\tjump."
    assert list(tokenizer.encode(text)) == family.encode_ordinary(text)
    expected = torch.load(RUN / "tokenizer" / "token_bytes.pt", weights_only=True)
    assert np.array_equal(tokenizer.token_bytes, expected.numpy())


def test_the_imported_moments_are_those_of_an_optimizer(tmp_path: Path) -> None:
    import_folder(RUN, tmp_path)
    saved = checkpoint.load(checkpoint.find("base", base=tmp_path), optimizer=True)
    assert saved.optimizer is not None
    assert saved.optimizer_step_count == 60
    parameters = dict(model_of(saved).named_parameters())
    optimizer = Optimizer(parameters, parameter_groups(parameters, Rates(), saved.model_config.model_dim))
    optimizer.load_state_tensors(saved.optimizer, saved.optimizer_step_count)
    state = torch.load(D2 / "optim_000060_rank0.pt", weights_only=True)["state"]
    ours = optimizer.state_tensors()
    assert torch.equal(ours["lm_head.weight.exp_avg_sq"], state[0]["exp_avg_sq"])
    assert torch.equal(ours["backout_lambda.exp_avg"], state[7]["exp_avg"])
    assert torch.equal(ours["transformer.h.1.attn.ve_gate.weight.momentum_buffer"], state[8]["momentum_buffer"][0])
    stack = state[9]["momentum_buffer"]
    assert torch.equal(ours["transformer.h.0.attn.c_q.weight.momentum_buffer"], stack[0])
    assert torch.equal(ours["transformer.h.1.attn.c_k.weight.momentum_buffer"], stack[5])
    assert torch.equal(
        ours["transformer.h.1.mlp.c_proj.weight.second_momentum_buffer"], state[17]["second_momentum_buffer"][1]
    )


def test_importing_twice_says_already_there(tmp_path: Path) -> None:
    import_folder(RUN, tmp_path)
    manifest = checkpoint.find("base", base=tmp_path) / "manifest.json"
    before = manifest.stat().st_mtime_ns
    result = import_folder(RUN, tmp_path)
    assert [each.written for each in result.checkpoints] == [False]
    assert "already there" in result.describe()
    assert manifest.stat().st_mtime_ns == before


def test_the_base_folder_itself_can_be_imported(tmp_path: Path) -> None:
    shutil.copytree(RUN, tmp_path, dirs_exist_ok=True)
    import_folder(tmp_path, tmp_path)
    assert checkpoint.steps(tmp_path / "base_checkpoints" / "d2") == [60]
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()


def test_one_folder_of_checkpoints_is_imported_with_the_tokenizer_around_it(tmp_path: Path) -> None:
    result = import_folder(D2, tmp_path)
    assert [(each.source, each.tag) for each in result.checkpoints] == [("base", "d2")]
    assert result.shards == 0


# -------------------------------------------------------------------------------------------------- eras and layouts


@pytest.mark.parametrize("era", ERAS)
def test_every_era_is_told_and_computes_what_was_trained(tmp_path: Path, era: str) -> None:
    write_era(tmp_path / "hub", era)
    lines: list[str] = []
    softcap = 20.0 if era == "mar02" else None
    result = import_folder(tmp_path / "hub", tmp_path / "base", logit_softcap=softcap, report=lines.append)
    saved = checkpoint.load(result.checkpoints[0].folder)
    if era != "mar02":
        assert saved.model_config.constants == CONSTANTS[era]
    golden = load_file(GOLDEN / "eras" / f"{era}.safetensors")
    logits = model_of(saved)(golden["tokens"].long())[:, -64:]
    scale = golden["logits"].abs().max().item()
    assert (logits - golden["logits"]).abs().max().item() <= LOGIT_TOLERANCE * scale
    assert any("--logit-softcap 20" in line for line in lines) == (era == "jan16")


def test_a_model_of_mid_january_has_lambdas_but_no_value_embeddings(tmp_path: Path) -> None:
    def without_value_embeddings(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in parameters.items() if "ve_gate" not in name and "value_" not in name}

    write_era(tmp_path / "hub", "jan16", without_value_embeddings)
    result = import_folder(tmp_path / "hub", tmp_path / "base")
    assert result.checkpoints[0].era == "11 – 15 January 2026"
    constants = checkpoint.load(result.checkpoints[0].folder).model_config.constants
    assert constants == Constants(10_000.0, 1.0, 0.0, short_window=512, smear=False, backout=False)


@pytest.mark.parametrize(
    ("stage", "tag", "folder"),
    [
        (None, None, "chatsft_checkpoints/d5"),
        ("base", "d34", "base_checkpoints/d34"),
        ("rl", None, "chatrl_checkpoints/d5"),
    ],
)
def test_a_flat_folder_goes_where_stage_and_tag_say(tmp_path: Path, stage: Any, tag: str | None, folder: str) -> None:
    write_era(tmp_path / "hub", "mar09")
    import_folder(tmp_path / "hub", tmp_path / "base", stage=stage, tag=tag)
    assert checkpoint.steps(tmp_path / "base" / folder) == [70]


def test_the_prefix_of_compiled_models_is_dropped_and_bf16_kept(tmp_path: Path) -> None:
    def compiled(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        parameters["transformer.wte.weight"] = parameters["transformer.wte.weight"].bfloat16()
        return {f"_orig_mod.{name}": tensor for name, tensor in parameters.items()}

    write_era(tmp_path / "hub", "mar09", compiled)
    result = import_folder(tmp_path / "hub", tmp_path / "base")
    parameters = checkpoint.load(result.checkpoints[0].folder).parameters
    assert parameters["transformer.wte.weight"].dtype == torch.bfloat16
    assert parameters["lm_head.weight"].dtype == torch.float32


def test_the_former_mid_stage_stands_among_the_chat_models(tmp_path: Path) -> None:
    for place in ("mid_checkpoints/d5", "chatsft_checkpoints/d5", "mid_checkpoints/d6"):
        write_era(tmp_path / "old" / place, "oct2025")
    shutil.move(tmp_path / "old" / "mid_checkpoints" / "d5" / "tokenizer.pkl", tmp_path / "old" / "tokenizer.pkl")
    result = import_folder(tmp_path / "old", tmp_path / "base")
    assert [(each.source, each.tag) for each in result.checkpoints] == [("sft", "d5-mid"), ("sft", "d6"), ("sft", "d5")]


def test_a_missing_val_bpb_and_meta_of_rl_are_fine(tmp_path: Path) -> None:
    write_era(tmp_path / "hub", "mar09")
    meta = tmp_path / "hub" / "meta_000070.json"
    meta.write_text(json.dumps({"model_config": json.loads(meta.read_text())["model_config"]}))
    result = import_folder(tmp_path / "hub", tmp_path / "base", stage="rl")
    assert checkpoint.load(result.checkpoints[0].folder).metrics == {"val_bpb": None}


# -------------------------------------------------------------------------------------------------------- tokenizers


def test_another_tokenizer_in_the_base_folder_is_left_alone(tmp_path: Path) -> None:
    import_folder(RUN, tmp_path / "base")
    before = (tmp_path / "base" / "tokenizer" / "tokenizer.json").read_bytes()
    write_era(tmp_path / "hub", "mar09")
    result = import_folder(tmp_path / "hub", tmp_path / "base")
    saved = checkpoint.load(result.checkpoints[0].folder)
    assert saved.tokenizer is not None
    assert saved.tokenizer.path == f"tokenizers/{saved.tokenizer.fingerprint[:8]}"
    assert (tmp_path / "base" / saved.tokenizer.path / "tokenizer.json").is_file()
    assert (tmp_path / "base" / "tokenizer" / "tokenizer.json").read_bytes() == before


def test_the_files_byte_lengths_are_kept_even_beside_the_same_tokenizer(tmp_path: Path) -> None:
    """Files of before July 2026 count 3 for pieces that are no valid UTF-8, and published figures used them."""
    write_era(tmp_path / "new", "mar09")
    write_era(tmp_path / "old", "mar09")
    write_tokenizer(tmp_path / "old", 331, [3] * 322 + [0] * 9)
    import_folder(tmp_path / "new", tmp_path / "base")
    result = import_folder(tmp_path / "old", tmp_path / "base", tag="old")
    assert result.tokenizer is not None
    assert result.tokenizer.parent.name == "tokenizers"
    assert Tokenizer.load(result.tokenizer).token_bytes.tolist() == [3] * 322 + [0] * 9


def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    write_era(tmp_path / "hub", "mar09")
    write_tokenizer(tmp_path / "hub", 400)
    assert_nothing_imported(tmp_path, "400 tokens but .* 331")


def test_a_tokenizer_with_gaps_or_without_all_bytes_is_refused(tmp_path: Path) -> None:
    all_bytes = {bytes([byte]): byte for byte in range(256)}
    without_newline = {b"ab" if token == b"\n" else token: rank for token, rank in all_bytes.items()}
    for ranks, specials in ((all_bytes, {"<|bos|>": 300}), (without_newline, {"<|bos|>": 256})):
        write_era(tmp_path / "hub", "mar09")
        encoding = tiktoken.Encoding("x", pat_str=".", mergeable_ranks=ranks, special_tokens=specials)
        (tmp_path / "hub" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
        assert_nothing_imported(tmp_path, "lacks the token")


def write_pickled_tokenizer(folder: Path, pattern: str, special: str = "<|bos|>") -> None:
    """The tokenizer.pkl there with another pattern, written without asking tiktoken whether it works."""
    with (folder / "tokenizer.pkl").open("rb") as file:
        known = pickle.load(file)
    specials = {special if name == "<|bos|>" else name: number for name, number in known._special_tokens.items()}
    state = {"name": "x", "pat_str": pattern, "mergeable_ranks": known._mergeable_ranks, "special_tokens": specials}
    body = pickle.dumps(state, protocol=4)[2:-1]
    (folder / "tokenizer.pkl").write_bytes(b"\x80\x04\x8c\rtiktoken.core\x8c\x08Encoding\x93)\x81" + body + b"b.")


@pytest.mark.parametrize("pattern", ["", "a*", "(", "zzz", ".", r".+?(?=x)"])
def test_a_split_pattern_that_tiktoken_cannot_use_is_refused(tmp_path: Path, pattern: str) -> None:
    write_era(tmp_path / "hub", "mar09")
    write_pickled_tokenizer(tmp_path / "hub", pattern)
    assert_nothing_imported(tmp_path, r"tokenizer\.pkl holds a tokenizer that cannot be used \(.*split pattern")


def test_a_tokenizer_without_bos_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    write_era(tmp_path / "hub", "mar09")
    write_pickled_tokenizer(tmp_path / "hub", ".|\\s", special="<|begin|>")
    assert_nothing_imported(tmp_path, r"tokenizer\.pkl holds .* no token <\|bos\|>")


def test_missing_byte_lengths_are_told_and_those_of_the_tokens_used(tmp_path: Path) -> None:
    write_era(tmp_path / "hub", "mar09")
    (tmp_path / "hub" / "token_bytes.pt").unlink()
    lines: list[str] = []
    result = import_folder(tmp_path / "hub", tmp_path / "base", report=lines.append)
    assert ["token_bytes.pt is missing" in line for line in lines].count(True) == 1
    assert result.tokenizer is not None
    assert Tokenizer.load(result.tokenizer).token_bytes[:256].tolist() == [1] * 256


@pytest.mark.parametrize("kind", ["broken link", "folder"])
def test_byte_lengths_that_cannot_be_read_are_refused(tmp_path: Path, kind: str) -> None:
    write_era(tmp_path / "hub", "mar09")
    path = tmp_path / "hub" / "token_bytes.pt"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "absent")
    assert_nothing_imported(tmp_path, r"token_bytes\.pt cannot be read")


# ------------------------------------------------------------------------------------------------------ optimizer files


def split_optimizer(folder: Path, ranks: int) -> None:
    """Rewrite the golden optimizer file as ``ranks`` processes would have written it."""
    whole = torch.load(folder / "optim_000060_rank0.pt", weights_only=True)
    for rank in range(ranks):
        state: dict[int, dict[str, Any]] = {}
        for number, entry in whole["state"].items():
            state[number] = {}
            for name, tensor in entry.items():
                if name == "step" or (name.startswith("exp") and tensor.numel() < 1024):
                    state[number][name] = tensor
                elif name.startswith("exp"):
                    state[number][name] = tensor.chunk(ranks)[rank].clone()
                else:
                    chunk = -(-len(tensor) // ranks)
                    padded = torch.cat([tensor, tensor.new_full((chunk * ranks - len(tensor), *tensor.shape[1:]), 7.0)])
                    state[number][name] = padded[rank * chunk : (rank + 1) * chunk].clone()
        torch.save({"state": state, "param_groups": whole["param_groups"]}, folder / f"optim_000060_rank{rank}.pt")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_moments_of_several_ranks_are_joined(tmp_path: Path, ranks: int) -> None:
    shutil.copytree(D2, tmp_path / "d2")
    split_optimizer(tmp_path / "d2", ranks)
    parameters = read_torch(D2 / "model_000060.pt")
    joined, whole = (read_moments(folder, 60, parameters, 64) for folder in (tmp_path / "d2", D2))
    assert joined is not None
    assert whole is not None
    assert set(joined.tensors) == set(whole.tensors)
    assert len(whole.tensors) == 2 * len(parameters)
    assert all(torch.equal(joined.tensors[name], whole.tensors[name]) for name in whole.tensors)


def _remove_first_rank(folder: Path) -> None:
    split_optimizer(folder, 2)
    (folder / "optim_000060_rank0.pt").unlink()


def _remove_last_rank(folder: Path) -> None:
    split_optimizer(folder, 2)
    (folder / "optim_000060_rank1.pt").unlink()


def _old_name(folder: Path) -> None:
    (folder / "optim_000060_rank0.pt").rename(folder / "optim_000060.pt")


def _two_optimizers(folder: Path) -> None:
    torch.save([{"state": {}, "param_groups": []}] * 2, folder / "optim_000060_rank0.pt")


def _of_another_model(folder: Path) -> None:
    whole = torch.load(folder / "optim_000060_rank0.pt", weights_only=True)
    whole["param_groups"].pop()
    torch.save(whole, folder / "optim_000060_rank0.pt")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_remove_first_rank, "lack rank 0"),
        (_remove_last_rank, "is a rank missing"),
        (_old_name, "before February 2026"),
        (_two_optimizers, "before February 2026"),
        (_of_another_model, "do not fit"),
    ],
)
def test_unusable_moments_are_told_in_one_line_and_left_out(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    damage(tmp_path / "run" / "base_checkpoints" / "d2")
    lines: list[str] = []
    result = import_folder(tmp_path / "run", tmp_path / "base", report=lines.append)
    assert [said in line for line in lines].count(True) == 1
    assert checkpoint.load(result.checkpoints[0].folder, optimizer=True).optimizer is None


# ------------------------------------------------------------------------------------------------------------- refusals


def assert_nothing_imported(tmp_path: Path, said: str, **options: Any) -> None:
    with pytest.raises(UserError, match=said):
        import_folder(tmp_path / "hub", tmp_path / "base", **options)
    assert not (tmp_path / "base").exists()


def test_a_different_step_is_replaced_only_when_asked(tmp_path: Path) -> None:
    def changed(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        parameters["lm_head.weight"][0, 0] += 1
        return parameters

    write_era(tmp_path / "a", "mar09")
    write_era(tmp_path / "b", "mar09", changed)
    import_folder(tmp_path / "a", tmp_path / "base")
    with pytest.raises(UserError, match="--overwrite"):
        import_folder(tmp_path / "b", tmp_path / "base")
    result = import_folder(tmp_path / "b", tmp_path / "base", overwrite=True)
    saved = checkpoint.load(result.checkpoints[0].folder)
    expected = torch.load(tmp_path / "b" / "model_000070.pt", weights_only=True)
    assert torch.equal(saved.parameters["lm_head.weight"], expected["lm_head.weight"])


def test_a_damaged_step_is_replaced(tmp_path: Path) -> None:
    write_era(tmp_path / "hub", "mar09")
    folder = import_folder(tmp_path / "hub", tmp_path / "base").checkpoints[0].folder
    (folder / "manifest.json").unlink()
    lines: list[str] = []
    import_folder(tmp_path / "hub", tmp_path / "base", report=lines.append)
    assert checkpoint.load(folder).step == 70
    assert any("damaged" in line for line in lines)


def _without_lm_head(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    del parameters["lm_head.weight"]
    return parameters


def _with_a_stranger(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**parameters, "transformer.h.0.attn.bias": torch.ones(3)}


def _of_wrong_shape(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**parameters, "transformer.h.0.attn.c_q.weight": torch.ones(3, 64)}


def _with_other_rows(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor[:340] if len(tensor) == 384 else tensor for name, tensor in parameters.items()}


def _of_integers(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.int() for name, tensor in parameters.items()}


def _one_layer_less(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in parameters.items() if ".h.4." not in name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_lm_head, "lm_head.weight is missing"),
        (_with_a_stranger, "attn.bias is .* instead of absent"),
        (_of_wrong_shape, "c_q.weight is"),
        (_with_other_rows, "weight is"),
        (_of_integers, "other things than the parameters"),
        (_one_layer_less, "5 layers"),
    ],
)
def test_models_that_do_not_fit_their_metadata_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], said: str
) -> None:
    write_era(tmp_path / "hub", "mar09", change)
    assert_nothing_imported(tmp_path, said)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n_layer": None}, "layers"),
        ({"n_layer": 10**9}, "layers"),
        ({"sequence_len": "long"}, "sequence_len"),
        ({"n_head": 3}, "heads"),
        ({"window_pattern": "XL"}, "window pattern"),
        ({"window_pattern": 5}, "window_pattern"),
        ({"window_pattern": 0}, "window_pattern"),
        ({"window_pattern": "S" * 2000}, "window_pattern"),
        ({"sequence_len": 10**18}, "sequence_len of more than 1048576"),
        ({"vocab_size": 10**18}, "vocab_size of more than 384, the rows"),
        ({"n_head": 10**18}, "num_heads of more than 64"),
        ({"n_kv_head": 10**18}, "num_kv_heads of more than 4"),
    ],
)
def test_nonsense_in_the_metadata_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    write_era(tmp_path / "hub", "mar09")
    path = tmp_path / "hub" / "meta_000070.json"
    meta = json.loads(path.read_text())
    meta["model_config"] |= settings
    path.write_text(json.dumps(meta))
    assert_nothing_imported(tmp_path, said)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_config": {"n_layer": 5}}'])
def test_damaged_metadata_is_refused(tmp_path: Path, text: str) -> None:
    write_era(tmp_path / "hub", "mar09")
    (tmp_path / "hub" / "meta_000070.json").write_text(text)
    assert_nothing_imported(tmp_path, "meta")


def test_missing_files_and_folders_are_told(tmp_path: Path) -> None:
    assert_nothing_imported(tmp_path, "there is no folder")
    (tmp_path / "hub").mkdir()
    assert_nothing_imported(tmp_path, "holds nothing of the family")
    write_era(tmp_path / "hub", "mar09")
    (tmp_path / "hub" / "meta_000070.json").unlink()
    assert_nothing_imported(tmp_path, r"meta_000070\.json is missing")
    write_era(tmp_path / "hub", "mar09")
    (tmp_path / "hub" / "tokenizer.pkl").unlink()
    assert_nothing_imported(tmp_path, r"no tokenizer\.pkl")


@pytest.mark.parametrize("place", ["", "base_checkpoints/d5"])
def test_metadata_without_their_model_are_refused(tmp_path: Path, place: str) -> None:
    write_era(tmp_path / "hub" / place, "mar09")
    (tmp_path / "hub" / place / "model_000070.pt").unlink()
    assert_nothing_imported(tmp_path, r"meta_000070\.json has no model_000070\.pt beside it")


def test_a_tokenizer_alone_is_imported_and_the_lack_of_a_model_told(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "hub", 331)
    lines: list[str] = []
    result = import_folder(tmp_path / "hub", tmp_path / "base", report=lines.append)
    assert result.checkpoints == ()
    assert result.tokenizer == tmp_path / "base" / "tokenizer"
    assert ["no model was found" in line for line in lines] == [True]


def test_parameters_with_and_without_the_prefix_of_compiled_models_are_ambiguous(tmp_path: Path) -> None:
    def doubled(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**parameters, "_orig_mod.lm_head.weight": parameters["lm_head.weight"] + 1}

    write_era(tmp_path / "hub", "mar09", doubled)
    assert_nothing_imported(tmp_path, r"both lm_head\.weight and _orig_mod\.lm_head\.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_told_and_imported(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    def broken(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        parameters["transformer.wte.weight"] = parameters["transformer.wte.weight"].to(dtype)
        parameters["transformer.wte.weight"][3, 5] = value
        return parameters

    write_era(tmp_path / "hub", "mar09", broken)
    lines: list[str] = []
    result = import_folder(tmp_path / "hub", tmp_path / "base", report=lines.append)
    told = [line for line in lines if "not finite" in line]
    assert len(told) == 1
    assert "in transformer.wte.weight:" in told[0]
    assert not checkpoint.load(result.checkpoints[0].folder).parameters["transformer.wte.weight"].isfinite().all()


@pytest.mark.parametrize("era", ERAS)
def test_a_soft_cap_is_ignored_aloud_where_the_era_leaves_no_doubt(tmp_path: Path, era: str) -> None:
    write_era(tmp_path / "hub", era)
    lines: list[str] = []
    result = import_folder(tmp_path / "hub", tmp_path / "base", logit_softcap=20.0, report=lines.append)
    used = checkpoint.load(result.checkpoints[0].folder).model_config.constants.logit_softcap
    ignored = any("--logit-softcap 20 is ignored" in line for line in lines)
    assert (used, ignored) == ((20.0, False) if era in ("jan16", "mar02") else (15.0, True))


def test_one_bad_model_among_good_ones_imports_nothing(tmp_path: Path) -> None:
    write_era(tmp_path / "hub", "mar09")
    (tmp_path / "hub" / "model_000080.pt").write_bytes((tmp_path / "hub" / "model_000070.pt").read_bytes()[:1000])
    shutil.copy(tmp_path / "hub" / "meta_000070.json", tmp_path / "hub" / "meta_000080.json")
    assert_nothing_imported(tmp_path, r"model_000080\.pt")


class _Evil:
    def __reduce__(self) -> Any:
        return (eval, ("1/0",))


@pytest.mark.parametrize("name", ["model_000070.pt", "tokenizer.pkl", "token_bytes.pt", "optim_000070_rank0.pt"])
def test_a_hostile_file_refuses_the_whole_import(tmp_path: Path, name: str) -> None:
    write_era(tmp_path / "hub", "mar09")
    if name.endswith(".pt"):
        torch.save({"a": _Evil()}, tmp_path / "hub" / name)
    else:
        (tmp_path / "hub" / name).write_bytes(pickle.dumps(_Evil()))
    assert_nothing_imported(tmp_path, "eval.*may not be built")


@pytest.mark.parametrize("tag", ["../elsewhere", "a/b", "..", ""])
def test_a_tag_that_leaves_its_folder_is_refused(tmp_path: Path, tag: str) -> None:
    write_era(tmp_path / "hub", "mar09")
    assert_nothing_imported(tmp_path, "plain folder name", tag=tag)


def test_stage_and_tag_belong_to_flat_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave --stage and --tag out"):
        import_folder(RUN, tmp_path / "base", stage="sft")


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("nan"), float("inf")])
def test_a_senseless_soft_cap_is_refused(tmp_path: Path, softcap: float) -> None:
    write_era(tmp_path / "hub", "jan16")
    assert_nothing_imported(tmp_path, "soft cap", logit_softcap=softcap)


def test_other_text_under_the_same_name_is_refused(tmp_path: Path) -> None:
    shutil.copytree(RUN, tmp_path / "hub")
    (tmp_path / "base" / "base_data_climbmix").mkdir(parents=True)
    (tmp_path / "base" / "base_data_climbmix" / "shard_00000.parquet").write_bytes(b"other")
    with pytest.raises(UserError, match="differs"):
        import_folder(tmp_path / "hub", tmp_path / "base")
    assert not (tmp_path / "base" / "base_checkpoints").exists()
