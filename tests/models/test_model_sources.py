"""Names, tags, files and folders: what is found, and what the errors say."""

from __future__ import annotations

import json
import logging
import shutil

import open_clip
import pytest
import torch
from open_clip import factory
from safetensors.torch import save_file

from dsclr.config import ConfigError, ModelConfig
from dsclr.models import build_model, check_model, get_tokenizer, image_settings, pretrained


def test_dsclr_tiny():
    cfg = ModelConfig(name="dsclr-tiny")
    check_model(cfg)
    model = build_model(cfg, "clip")
    assert sum(p.numel() for p in model.parameters()) < 8_000_000
    tokens = get_tokenizer(cfg)(["a red apple", "a blue car " * 40])
    assert tokens.shape == (2, 32)
    assert tokens.dtype == torch.int64
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    za, zb = model(images, tokens)
    assert za.shape == zb.shape == (2, 128)


def test_our_own_tag(monkeypatch, tmp_path):
    cfg = ModelConfig(name="dsclr-tiny", pretrained="demo")
    monkeypatch.setattr(pretrained, "WEIGHTS", tmp_path)
    with pytest.raises(ConfigError, match="Tags: none"):
        check_model(cfg)
    torch.manual_seed(1)
    state = build_model(cfg.model_copy(update={"pretrained": None}), "clip").clip.state_dict()
    half = {name: value.half().contiguous() for name, value in state.items()}
    half["logit_scale"] = half["logit_scale"].reshape(())
    save_file(half, tmp_path / "dsclr-tiny-demo.safetensors")
    check_model(cfg)
    model = build_model(cfg, "clip")
    for name, value in model.clip.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, half[name].float().reshape(value.shape))
    assert model.logit_scale.shape == (1,)
    with pytest.raises(ConfigError, match=r"did you mean 'demo'\? Tags: demo"):
        check_model(cfg.model_copy(update={"pretrained": "dem"}))


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_scalar_logit_scale_loads_from_a_file(tiny, tmp_path, suffix, kind):
    # As open_clip itself writes it: 0-dim logit_scale (and logit_bias).
    name = tiny(kind).name
    image_settings(tiny(kind))  # registers the JSON
    stock = open_clip.create_model(f"tiny-{kind}").state_dict()
    stock["logit_scale"].fill_(4.5)
    path = tmp_path / f"weights.{suffix}"
    if suffix == "pt":
        torch.save({"state_dict": {f"module.{key}": value for key, value in stock.items()}}, path)
    else:
        save_file({key: value.contiguous() for key, value in stock.items()}, path)
    model = build_model(ModelConfig(name=name, pretrained=str(path)), "clip")
    assert model.logit_scale.shape == (1,)
    for key, value in model.clip.state_dict().items():
        assert torch.equal(value, stock[key].reshape(value.shape))


def test_no_warning_when_random_weights_are_wanted(tiny, caplog):
    with caplog.at_level(logging.WARNING):
        build_model(tiny(), "clip")
    assert "pretrained weights" not in caplog.text


@pytest.mark.parametrize("kind", ["clip", "custom", "siglip", "coca", "resnet"])
def test_image_settings_are_the_built_models(tiny, kind):
    cfg = tiny(kind)
    assert image_settings(cfg) == build_model(cfg, "clip").settings


def test_image_settings_of_a_tag():
    siglip = image_settings(ModelConfig(name="ViT-B-16-SigLIP-256", pretrained="webli"))
    assert siglip.image_size == (256, 256)
    assert siglip.mean == siglip.std == (0.5, 0.5, 0.5)
    assert (siglip.interpolation, siglip.resize_mode) == ("bicubic", "squash")


def test_tokenizer_and_names():
    cfg = ModelConfig(name="ViT-B/32")
    check_model(cfg)
    tokens = get_tokenizer(cfg)(["a", "b", "c"])
    assert tokens.shape == (3, 77)
    assert torch.equal(tokens, open_clip.get_tokenizer("ViT-B-32")(["a", "b", "c"]))


def test_tokenizer_beyond_the_vocabulary(tiny):
    with pytest.raises(ConfigError, match=r"vocab_size = 50.*49407"):
        get_tokenizer(tiny())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "ViT-B-33"}, r"did you mean 'ViT-B-32'"),
        ({"name": "dsclr-tyni"}, r"did you mean 'dsclr-tiny'"),
        ({"name": "hf-hub:"}, "hf-hub:"),
        ({"name": "nowhere.json"}, r"cannot read nowhere\.json: No such file"),
        ({"name": "local-dir:nowhere"}, r"cannot read nowhere/open_clip_config\.json"),
        ({"pretrained": "laion2b_s34b_b79"}, r"did you mean 'laion2b_s34b_b79k'\? Tags: .*laion400m_e32"),
        ({"pretrained": "weights/nowhere.pt"}, r"there is no weights file weights/nowhere\.pt"),
        ({"pretrained": "openai"}, r"QuickGELU.*set dsclr\.model\.name to 'ViT-B-32-quickgelu'"),
        ({"name": "hf-hub:org/repo", "pretrained": "openai"}, "brings its own weights"),
    ],
)
def test_what_does_not_exist(fields, message):
    with pytest.raises(ConfigError, match=message):
        check_model(ModelConfig(**fields))


def test_a_tag_is_checked_without_a_download(monkeypatch):
    monkeypatch.setattr(pretrained, "download_pretrained", lambda *a, **k: pytest.fail("downloads"))
    check_model(ModelConfig(name="ViT-B-32", pretrained="laion2b_s34b_b79k"))
    check_model(ModelConfig(name="hf-hub:org/repo"))


def test_a_failed_download_says_what_to_do(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("Name or service not known.\nmore")

    monkeypatch.setattr(pretrained, "download_pretrained", fail)
    monkeypatch.setattr(pretrained, "download_pretrained_from_hf", fail)
    with pytest.raises(ConfigError, match=r"service not known\. Without network.*pretrained=/path.*=null.*HF_HOME"):
        build_model(ModelConfig(name="ViT-B-32", pretrained="laion2b_s34b_b79k"), "clip")
    with pytest.raises(ConfigError, match=r"service not known\. Without network.*HF_HOME"):
        build_model(ModelConfig(name="hf-hub:org/repo"), "clip")


def test_a_hub_model(monkeypatch, build, tmp_path):
    from dsclr.models import save_model

    save_model(build(), tmp_path / "repo")
    names = {None: "open_clip_model.safetensors", "open_clip_config.json": "open_clip_config.json"}

    def download(repository, filename=None, cache_dir=None, **kwargs):
        assert repository == "org/repo"
        return str(tmp_path / "repo" / names[filename])

    monkeypatch.setattr(pretrained, "download_pretrained_from_hf", download)
    monkeypatch.setattr(factory, "download_pretrained_from_hf", download)
    cfg = ModelConfig(name="hf-hub:org/repo")
    model = build_model(cfg, "clip")
    assert image_settings(cfg) == model.settings
    for key, value in build().clip.state_dict().items():
        assert torch.equal(model.clip.state_dict()[key], value)


def test_files_that_are_not_what_they_seem(tiny, tmp_path):
    cfg = tiny()
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "wrapped.json").write_text('{"model_cfg": {}}')
    for name, message in (
        ("bad", "not valid JSON"),
        ("list", "a JSON object is expected"),
        ("other", "lacks embed_dim, vision_cfg, text_cfg"),
        ("wrapped", "local-dir:FOLDER"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_model(ModelConfig(name=str(tmp_path / f"{name}.json")))
    (tmp_path / "broken.safetensors").write_bytes(b"broken")
    save_file({"logit_scale": torch.ones(1)}, tmp_path / "other.safetensors")
    for name in ("broken", "other"):
        with pytest.raises(ConfigError, match="do not fit"):
            build_model(cfg.model_copy(update={"pretrained": str(tmp_path / f"{name}.safetensors")}), "clip")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "open_clip_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no model_cfg"):
        check_model(ModelConfig(name=f"local-dir:{folder}"))
    (folder / "open_clip_config.json").write_text('{"model_cfg": {}}')
    with pytest.raises(ConfigError, match="no weights file"):
        check_model(ModelConfig(name=f"local-dir:{folder}"))


def test_a_json_file_does_not_shadow_another_model(tiny, tmp_path):
    shutil.copy(tiny().name, tmp_path / "ViT-B-32.json")
    with pytest.raises(ConfigError, match="rename the file"):
        check_model(ModelConfig(name=str(tmp_path / "ViT-B-32.json")))
    config = json.loads((tmp_path / "tiny-clip.json").read_text())
    (tmp_path / "tiny-clip.json").write_text(json.dumps({**config, "embed_dim": 24}))
    model = build_model(ModelConfig(name=str(tmp_path / "tiny-clip.json")), "clip")
    assert model.clip.text_projection.shape == (32, 24)


def test_what_open_clip_cannot_build(tiny):
    with pytest.raises(ConfigError, match=r"patch_dropout = 0\.5.*ModifiedResNet"):
        build_model(tiny("resnet", patch_dropout=0.5), "clip")
    path = tiny().name
    with open(path) as file:
        config = json.load(file)
    config["vision_cfg"]["colour"] = "red"
    with open(path, "w") as file:
        json.dump(config, file)
    with pytest.raises(ConfigError, match="cannot build"):
        build_model(ModelConfig(name=path), "clip")
