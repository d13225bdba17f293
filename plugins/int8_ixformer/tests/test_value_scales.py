"""Files of value scales: saving, loading, and the refusal of invalid files and scales."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

from attnplug.contract import Parallel
from attnplug.errors import LayerError
from attnplug_int8_ixformer.value_scales import ValueScales, load_layer

SCALES = {"layers.0": torch.rand(2, 32) + 0.1, "layers.1": torch.rand(2, 32) + 0.1}


@pytest.fixture
def path(tmp_path):
    ValueScales(SCALES).save(tmp_path / "scales.safetensors")
    return tmp_path / "scales.safetensors"


def test_saved_scales_are_loaded(path):
    found = ValueScales.load(path).layers

    assert found.keys() == SCALES.keys()
    assert all(torch.equal(found[name], SCALES[name]) for name in SCALES)
    assert torch.equal(load_layer(path, "layers.1", 2, 32, Parallel()), SCALES["layers.1"])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_saving_again_replaces_the_file(path):
    ValueScales({"layers.0": torch.full((1, 32), 0.5)}).save(str(path))

    assert ValueScales.load(path).layers.keys() == {"layers.0"}


@pytest.mark.parametrize(("scales", "folder"), [(SCALES, "nowhere"), ({}, ".")])
def test_saving_nothing_or_nowhere_is_refused(tmp_path, scales, folder):
    with pytest.raises(LayerError, match=rf"(?s)of {len(scales)} layers cannot be saved.*a folder that exists"):
        ValueScales(scales).save(tmp_path / folder / "scales")
    assert not list(tmp_path.iterdir())


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(LayerError, match=r"(?s)there is no file.*nowhere.*calibrate first"):
        load_layer(tmp_path / "nowhere", "layers.0", 2, 32, Parallel())


@pytest.mark.parametrize("content", [b"", b"not at all", b"\x10\x00\x00\x00\x00\x00\x00\x00{}"])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "scales").write_bytes(content)

    with pytest.raises(LayerError, match=r"(?s)is not a file of value scales.*ValueScales\.save"):
        ValueScales.load(tmp_path / "scales")


def test_other_safetensors_files_are_refused(tmp_path):
    save_file(SCALES, tmp_path / "weights.safetensors")

    with pytest.raises(LayerError, match=r"its format is None"):
        load_layer(tmp_path / "weights.safetensors", "layers.0", 2, 32, Parallel())


def test_a_missing_layer_is_refused(path):
    with pytest.raises(
        LayerError, match=r"(?s)'layers\.7'.*one of its 2 layers: layers\.0, layers\.1.*calibrate with this"
    ):
        load_layer(path, "layers.7", 2, 32, Parallel())


def test_another_shape_is_refused(path):
    with pytest.raises(LayerError, match=r"(?s)shape \(2, 32\).*\(num_kv_heads, head_size\) = \(4, 64\) float32"):
        load_layer(path, "layers.0", 4, 64, Parallel())


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_invalid_scales_are_not_saved(tmp_path, scale):
    invalid = torch.ones(2, 32)
    invalid[1, 5] = scale

    with pytest.raises(LayerError, match=r"(?s)for channel 5 of KV head 1.*positive and finite.*calibrate again"):
        ValueScales({"layers.0": invalid}).save(tmp_path / "scales")
    assert not list(tmp_path.iterdir())


def test_another_dtype_is_refused():
    with pytest.raises(LayerError, match=r"torch\.float64.*"):
        ValueScales({"layers.0": torch.ones(2, 32, dtype=torch.float64)})


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf])
def test_files_with_invalid_scales_are_refused(tmp_path, scale):
    metadata = {"format": "attnplug int8 value scales, 1"}
    save_file({"layers.0": torch.full((1, 32), scale)}, tmp_path / "scales", metadata=metadata)

    with pytest.raises(LayerError, match="positive and finite"):
        load_layer(tmp_path / "scales", "layers.0", 1, 32, Parallel())


@pytest.mark.parametrize(("heads", "ranks"), [(8, 1), (8, 2), (8, 8), (2, 8), (1, 4)])
def test_one_file_has_the_heads_of_all_ranks(tmp_path, heads, ranks):
    model = torch.rand(heads, 32) + 0.1
    ValueScales({"layers.0": model}).save(tmp_path / "scales")
    held = max(1, heads // ranks)

    for rank in range(ranks):
        found = load_layer(tmp_path / "scales", "layers.0", held, 32, Parallel(tp_rank=rank, tp_size=ranks))
        # Consecutive heads on each rank; with more ranks than heads, consecutive ranks have the same one.
        expected = [model[rank * heads // ranks + head] for head in range(held)]
        assert torch.equal(found, torch.stack(expected))


@pytest.mark.parametrize(("saved", "held", "ranks"), [(2, 2, 2), (4, 1, 2), (3, 1, 8), (8, 2, 2), (1, 2, 2), (0, 1, 2)])
def test_a_file_with_other_heads_is_refused_with_numbers(tmp_path, saved, held, ranks):
    save_file({"layers.0": torch.ones(saved, 32)}, tmp_path / "scales", {"format": "attnplug int8 value scales, 1"})

    found = rf"(?s)shape \({saved}, 32\).*= \({held * ranks}, 32\) float32, of {ranks} ranks together.*of_ranks"
    with pytest.raises(LayerError, match=found):
        load_layer(tmp_path / "scales", "layers.0", held, 32, Parallel(tp_size=ranks))


def test_what_ranks_observed_is_joined(tmp_path):
    model = {f"layers.{index}": torch.rand(4, 32) + 0.1 for index in range(3)}
    # Two ranks of tensor parallelism in each of two stages of a pipeline, in any order.
    stages = ["layers.0", "layers.1"], ["layers.2"]
    shares = [
        ValueScales({name: model[name][2 * rank : 2 * rank + 2] for name in names}, Parallel(tp_rank=rank, tp_size=2))
        for rank in (1, 0)
        for names in stages
    ]

    joined = ValueScales.of_ranks(shares)
    joined.save(tmp_path / "scales")

    found = ValueScales.load(tmp_path / "scales").layers
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], scales) for name, scales in model.items())
    for share in shares:
        with pytest.raises(
            LayerError, match=rf"(?s)rank {share.parallel.tp_rank} of 2 cannot be saved alone.*of_ranks"
        ):
            share.save(tmp_path / "share")


@pytest.mark.parametrize("ranks", [[0], [0, 0], [0, 1, 1], [1]])
def test_ranks_that_are_missing_or_twice_are_refused(ranks):
    shares = [ValueScales({"layers.0": torch.ones(2, 32)}, Parallel(tp_rank=rank, tp_size=2)) for rank in ranks]

    with pytest.raises(LayerError, match=rf"(?s)of the ranks {ranks[0]} of 2.*each of the 2 ranks"):
        ValueScales.of_ranks(shares)
