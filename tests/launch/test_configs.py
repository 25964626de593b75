"""ds_configs/ and launch/README.md: every configuration and command can start what it is for."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from deepspeed.launcher.runner import parse_args as deepspeed_arguments
from torch.distributed.run import parse_args as torchrun_arguments

from dsclr.config import load_config
from tests.scripts import ROOT, load_script

# How many ranks each is for.
RANKS = {"a100": 1, "a100_8x": 8, "a100_4x8": 32, "rtx_24gb": 1, "quickstart": 1, "tiny_base": 1}


def test_every_configuration_is_known_here():
    assert {path.stem for path in (ROOT / "ds_configs").iterdir()} == RANKS.keys()


@pytest.mark.parametrize("name", RANKS)
def test_dry_run_on_the_machine_it_is_for(name, tmp_path, monkeypatch, capsys):
    announced = {"RANK": "0", "WORLD_SIZE": str(RANKS[name]), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for variable, value in {**announced, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(variable, value)
    words = ["--deepspeed_config", str(ROOT / f"ds_configs/{name}.json"), "--dry-run"]
    assert load_script("launch/train.py").main([*words, "--set", f"dsclr.run.dir={tmp_path}"]) == 0
    plan = json.loads(capsys.readouterr().out)
    config = plan["config"]
    per_rank = config["train_micro_batch_size_per_gpu"] * plan["micro_batches_per_step"]
    assert per_rank * RANKS[name] == config["train_batch_size"]
    assert config["dsclr"]["run"]["name"] == name
    # With ranks that do not see each other's rows, the contrastive batch would not be train_batch_size.
    assert config["dsclr"]["negatives"]["across_ranks"] == ("off" if RANKS[name] == 1 else "gather")


def commands():
    """Those of launch/README.md, as words, without the variables before them."""
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "launch/README.md").read_text(encoding="utf-8"), re.DOTALL)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        while "=" in words[0]:
            del words[0]
        yield words


def of_the_script(words):
    """What a launcher, which has to accept its own part, hands on: a script and its arguments."""
    launcher, *rest = words
    if launcher == "deepspeed":
        options = deepspeed_arguments(rest)
        return [options.user_script, *options.user_args]
    if launcher == "torchrun":
        options = torchrun_arguments(rest)
        return [options.training_script, *options.training_script_args]
    while rest[0].startswith("--") or rest[0] == "python":
        del rest[0]
    if launcher == "sbatch":
        script, config, *arguments = rest
        assert script == "launch/slurm.sh"
        return ["launch/train.py", "--deepspeed_config", config, *arguments]
    assert launcher in ("python", "srun")
    return rest


def test_every_command_of_the_readme_is_accepted():
    seen = set()
    for words in commands():
        if words[0] == "export":
            continue
        script, *arguments = of_the_script(words)
        options = load_script(script).parse_arguments(arguments)
        load_config(ROOT / options.deepspeed_config, options.set)
        seen |= {words[0], script, options.deepspeed_config}
    assert {"deepspeed", "torchrun", "sbatch", "srun", "python", "launch/train.py", "tools/plan.py"} <= seen
    assert {f"ds_configs/{name}.json" for name in ("a100", "a100_8x", "a100_4x8", "rtx_24gb")} <= seen


def test_readme_names_files_that_exist():
    text = (ROOT / "launch/README.md").read_text(encoding="utf-8")
    named = re.findall(r"\b(?:ds_configs|launch|tools)/\w+\.\w+", text)
    assert named
    assert all((ROOT / path).is_file() for path in named)
