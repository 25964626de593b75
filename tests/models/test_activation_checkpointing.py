"""DeepSpeed's activation_checkpointing section takes effect and changes no bit of a gradient."""

from __future__ import annotations

import copy
import gc
import json

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from dsclr.config import ConfigError, LoraConfig, ModelConfig
from dsclr.models import (
    build_model,
    disable_activation_checkpointing,
    enable_activation_checkpointing,
    merge_adapters,
    save_model,
)

ON: dict[str, dict] = {"activation_checkpointing": {}}


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    """DeepSpeed configures checkpointing only inside a process group."""
    import deepspeed

    if dist.is_initialized():
        yield
        return
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    yield
    dist.destroy_process_group()
    deepspeed.comm.comm.cdb = None


def device():
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().device_name())


def count_forwards(model):
    """How often each transformer block ran, by its name."""
    counts: dict[str, int] = {}

    def count(name):
        def hook(module, args):
            counts[name] = counts.get(name, 0) + 1

        return hook

    for name, module in model.named_modules():
        parts = name.split(".")
        if len(parts) > 1 and parts[-2] in ("resblocks", "blocks", "layer") and parts[-1].isdigit():
            # On a norm inside, because the recomputation does not pass through the block's hooks.
            first = next(m for m in module.modules() if "Norm" in type(m).__name__)
            first.register_forward_pre_hook(count(name))
    return counts


def add_dropout(model):
    for module in model.modules():
        if type(module).__name__ == "ResidualAttentionBlock":
            module.mlp.add_module("dropout", torch.nn.Dropout(0.2))


def gradients(model, chunks, autocast=None):
    """Gradients after the forwards of all chunks and then their backwards, so that several graphs live at once."""
    model.zero_grad()
    torch.manual_seed(5)
    with torch.autocast(device().type, autocast, enabled=autocast is not None):
        outputs = [model(*(x.to(device()) for x in chunk)) for chunk in chunks]
    for za, zb in reversed(outputs):
        ((za * zb.roll(1, 0)).sum() + (za[:, :3] ** 3).sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, dropout=0.3), LoraConfig(rank=2, layers=[-1])])
@pytest.mark.parametrize("kind", ["clip", "custom", "siglip", "coca"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_bitwise_equal(build, batch, lora, kind, dtype):
    model = build(kind, lora=lora).to(device(), dtype).train()
    add_dropout(model)
    size = 160 if kind == "siglip" else 32
    chunks = [tuple(x.flip(0) if flip else x for x in batch(3, size)) for flip in (False, True, False)]
    expected = gradients(model, chunks)
    assert len(expected) > 4
    assert enable_activation_checkpointing(model, ON)
    found = gradients(model, chunks)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gradients_are_bitwise_equal_under_autocast(build, batch):
    model = build().to(device()).train()
    chunks = [batch(3), batch(4)]
    expected = gradients(model, chunks, torch.bfloat16)
    enable_activation_checkpointing(model, ON)
    found = gradients(model, chunks, torch.bfloat16)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_simclr(build, batch):
    model = build(objective="simclr").to(device()).train()
    chunk = (batch()[0], batch()[0].flip(3))
    expected = gradients(model, [chunk])
    enable_activation_checkpointing(model, ON)
    counts = count_forwards(model)
    found = gradients(model, [chunk])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert set(counts) == {f"clip.visual.transformer.resblocks.{i}" for i in range(2)}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_blocks_run_twice_and_keep_nothing(build, batch, kind):
    model = build(kind).to(device()).train()
    size = 160 if kind == "siglip" else 32
    chunks = [batch(2, size), batch(3, size)]
    kept = kept_activations(model, chunks[0])
    counts = count_forwards(model)
    assert enable_activation_checkpointing(model, {}) is False
    gradients(model, chunks)
    assert len(counts) == (5 if kind == "clip" else 9)
    assert set(counts.values()) == {2}
    enable_activation_checkpointing(model, ON)
    assert kept == (5 if kind == "clip" else 9)
    assert kept_activations(model, chunks[0]) == 0
    counts.clear()
    gradients(model, chunks)
    assert set(counts.values()) == {4}


def kept_activations(model, chunk):
    """MLP activations alive after a forward with a graph."""
    alive = []
    hooks = [
        module.register_forward_hook(lambda m, args, y: alive.append(StorageWeakRef(args[0].untyped_storage())))
        for name, module in model.named_modules()
        if name.endswith(("mlp.c_proj", "mlp.fc2"))
    ]
    outputs = model(*(x.to(device()) for x in chunk))
    gc.collect()
    for hook in hooks:
        hook.remove()
    assert len(alive) == len(hooks) > 0
    kept = sum(not reference.expired() for reference in alive)
    del outputs
    return kept


def test_no_cost_without_a_graph(build, batch, recwarn):
    model = build(lock_image=True).to(device()).train()
    enable_activation_checkpointing(model, ON)
    counts = count_forwards(model)
    gradients(model, [batch()])
    assert {name: n for name, n in counts.items() if ".visual." in name} == {
        f"clip.visual.transformer.resblocks.{i}": 1 for i in range(2)
    }
    counts.clear()
    with torch.no_grad():
        model(*(x.to(device()) for x in batch()))
    assert set(counts.values()) == {1}
    assert not [w for w in recwarn if "checkpoint" in str(w.message)]


def test_frozen_blocks_below_the_adapters_run_once(build, batch):
    model = build(lora=LoraConfig(towers=["text"], layers=[-1])).to(device()).train()
    enable_activation_checkpointing(model, ON)
    counts = count_forwards(model)
    gradients(model, [batch()])
    text = {name.rsplit(".", 1)[1]: n for name, n in counts.items() if ".visual." not in name}
    assert text == {"0": 1, "1": 1, "2": 2}


def test_a_copy_computes_with_its_own_weights(build, batch):
    model = build().to(device()).train()
    enable_activation_checkpointing(model, ON)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.clip.visual.transformer.resblocks.parameters():
            parameter.zero_()
    inputs = [x.to(device()) for x in batch()]
    assert not torch.equal(twin(*inputs)[0], model(*inputs)[0])


def test_exports_are_stock(build, tmp_path):
    model = build(lora=LoraConfig())
    stock = [type(m) for m in build().clip.modules()]
    enable_activation_checkpointing(model, ON)
    enable_activation_checkpointing(model, ON)
    assert [type(m) for m in merge_adapters(model).modules()] == stock
    save_model(model, tmp_path)
    disable_activation_checkpointing(model.clip)
    assert not any(type(m).__name__.startswith("Checkpointed") for m in model.modules())


def test_synchronize_takes_effect(build, batch, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    calls = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *args: calls.append(1))
    model = build().to(device()).train()
    enable_activation_checkpointing(model, ON)
    gradients(model, [batch()])
    assert not calls
    enable_activation_checkpointing(model, {"activation_checkpointing": {"synchronize_checkpoint_boundary": True}})
    gradients(model, [batch()])
    # Before and after the forward and before the recomputation of five blocks.
    assert len(calls) >= 15


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cpu_checkpointing_moves_activations_to_the_host(build, batch):
    model = build().to(device()).train()
    chunks = [batch(3), batch(4)]
    expected = gradients(model, chunks)
    enable_activation_checkpointing(model, {"activation_checkpointing": {"cpu_checkpointing": True}})
    found = gradients(model, chunks)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    from deepspeed.runtime.activation_checkpointing import checkpointing as ds

    assert ds._cpu_offload_engine.stats.offloaded_tensors > 0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"partition_activations": True}, r"partition_activations = True: .*model-parallel.*leave it out"),
        ({"contiguous_memory_optimization": True}, "needs partition_activations"),
        ({"number_checkpoints": 4}, "contiguous_memory_optimization"),
        ({"profile": True}, "wall_clock_breakdown"),
        ({"partition_activation": True}, "did you mean 'partition_activations'"),
        ({"every": 2}, "unknown key activation_checkpointing.every Accepted"),
        ({"synchronize_checkpoint_boundary": 1}, "true or false"),
        ({"number_checkpoints": 0}, "contiguous_memory_optimization"),
        ({"number_checkpoints": "4"}, "an integer or null"),
        (True, "an object is expected"),
        (None, "an object is expected"),
    ],
)
def test_what_has_no_effect_is_refused(build, section, message):
    with pytest.raises(ConfigError, match=message):
        enable_activation_checkpointing(build(), {"activation_checkpointing": section})


@pytest.mark.skipif(torch.cuda.is_available(), reason="it works there")
def test_cpu_checkpointing_is_refused_on_a_cpu(build):
    with pytest.raises(ConfigError, match="they already are"):
        enable_activation_checkpointing(build(), {"activation_checkpointing": {"cpu_checkpointing": True}})


def test_keys_at_their_defaults_are_accepted(build):
    section = {"partition_activations": False, "number_checkpoints": None, "profile": False, "cpu_checkpointing": False}
    assert enable_activation_checkpointing(build(), {"activation_checkpointing": section})


def test_a_tower_without_blocks(build, batch):
    with pytest.raises(ConfigError, match=r"image tower \(ModifiedResNet\).*lock_image"):
        enable_activation_checkpointing(build("resnet"), ON)
    model = build("resnet", lock_image=True).to(device())
    assert enable_activation_checkpointing(model, ON)
    gradients(model, [batch()])


@pytest.mark.parametrize("family", ["roberta", "mt5"])
def test_hugging_face_text_towers(tmp_path, batch, family):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "roberta": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
        "mt5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    }[family]
    kind = {"roberta": transformers.RobertaConfig, "mt5": transformers.MT5Config}[family]
    kind(vocab_size=50, max_position_embeddings=20, pad_token_id=0, **sizes).save_pretrained(tmp_path / "hf")
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 8, "patch_size": 8},
        "text_cfg": {"hf_model_name": str(tmp_path / "hf"), "hf_proj_type": "mlp", "hf_pooler_type": "mean_pooler"},
    }
    path = tmp_path / f"tiny-{family}.json"
    path.write_text(json.dumps(config))
    for lora in (None, LoraConfig(rank=2)):
        model = build_model(ModelConfig(name=str(path), lora=lora), "clip").to(device()).train()
        expected = gradients(model, [batch(3), batch(4)])
        enable_activation_checkpointing(model, ON)
        found = gradients(model, [batch(3), batch(4)])
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        if lora is not None:
            adapters = [name for name in found if "lora_A" in name and "text" in name]
            assert len(adapters) == 2 * (6 if family == "roberta" else 7)
