"""An override is that of one model: others, and what it was cloned from, stay as they are."""

from __future__ import annotations

import copy

import pytest
import torch

import attnplug
import attnplug_comfyui
from attnplug.errors import NoBackendError, RequestError, UnknownBackendError
from attnplug_comfyui.routes import Route, RouteCounts
from hosts.comfyui.tests.fake_comfyui import KEY, plain
from tests.threads import together


def inputs():
    return [torch.randn(1, 5, 32) for _ in range(3)]


def test_a_patch_is_of_one_model(comfyui) -> None:
    base, other = comfyui.model(sample=1), comfyui.model()

    patched = attnplug_comfyui.patch(base)
    for model in (base, patched, other, patched, base):
        model.attend(*inputs(), 2)

    assert comfyui.calls == ["attention_pytorch"] * 3
    assert base.model_options == {"transformer_options": {"sample": 1}}
    assert other.model_options == {"transformer_options": {}}
    assert patched.model_options["transformer_options"]["sample"] == 1
    assert [(one.backend, one.calls) for one in attnplug_comfyui.report(patched)] == [("torch/sdpa", 2)]


def test_models_with_several_backends_run_beside_each_other(comfyui) -> None:
    models = {
        name: attnplug_comfyui.patch(comfyui.model(), name, fallback=True)
        for name in ("torch/sdpa", "torch", None, "blocksparse", "flash_attn")
    }
    tensors = inputs()

    for _ in range(2):
        found = {name: model.attend(*tensors, 2) for name, model in models.items()}

    counted = {name: attnplug_comfyui.report(model) for name, model in models.items()}
    assert {name: [(one.backend, one.calls) for one in routes] for name, routes in counted.items()} == {
        "torch/sdpa": [("torch/sdpa", 2)],
        "torch": [("torch/sdpa", 2)],
        None: [("torch/sdpa", 2)],
        "blocksparse": [(None, 2)],
        "flash_attn": [(None, 2)],
    }
    assert comfyui.calls == ["attention_pytorch"] * 4
    for output in found.values():
        torch.testing.assert_close(output, plain(*tensors, 2, None, None, False, False), rtol=1e-5, atol=1e-5)


def test_clones_of_a_patched_model_count_together(comfyui) -> None:
    patched = attnplug_comfyui.patch(comfyui.model())
    clones = [patched.clone(), copy.deepcopy(patched.model_options)]

    patched.attend(*inputs(), 2)
    clones[0].attend(*inputs(), 2)

    override = attnplug_comfyui.override_of(patched)
    assert clones[1]["transformer_options"][KEY] is override
    assert [one.calls for one in override.report()] == [2]
    override.reset()
    assert attnplug_comfyui.report(clones[0]) == ()


def test_a_clone_with_shared_options_changes_nothing_of_the_first() -> None:
    class Shallow:
        model_options = {"transformer_options": {"sample": 1}}  # noqa: RUF012 - shared on purpose

        def clone(self):
            made = Shallow()
            made.model_options = self.model_options
            return made

    model = Shallow()
    patched = attnplug_comfyui.patch(model)

    assert model.model_options == {"transformer_options": {"sample": 1}}
    assert KEY in patched.model_options["transformer_options"]


def test_a_second_patch_replaces_the_first(comfyui) -> None:
    first = attnplug_comfyui.patch(comfyui.model(), "blocksparse")
    second = attnplug_comfyui.patch(first, "torch/sdpa", options={"torch": {}})

    second.attend(*inputs(), 2)

    assert [one.backend for one in attnplug_comfyui.report(second)] == ["torch/sdpa"]
    assert attnplug_comfyui.report(first) == ()
    assert repr(attnplug_comfyui.override_of(second)) == (
        "AttentionOverride(backend='torch/sdpa', options={'torch': {}}, fallback=False)"
    )


def test_the_override_of_another_node_is_kept_unless_told(comfyui) -> None:
    def regional(function, *args, **kwargs):
        return function(*args, **kwargs)

    model = comfyui.model(**{KEY: regional})

    with pytest.raises(RequestError, match="which another node has set") as caught:
        attnplug_comfyui.patch(model)
    assert "set replace" in caught.value.fix
    replaced = attnplug_comfyui.patch(model, replace=True)

    replaced.attend(*inputs(), 2)
    assert [one.calls for one in attnplug_comfyui.report(replaced)] == [1]
    assert model.model_options["transformer_options"][KEY] is regional


def test_a_model_without_an_override_of_attnplug_has_no_report(comfyui) -> None:
    with pytest.raises(RequestError, match="the model has no override"):
        attnplug_comfyui.report(comfyui.model())
    with pytest.raises(RequestError, match="of another node"):
        attnplug_comfyui.override_of(comfyui.model(**{KEY: print}))


def test_a_name_of_nothing_is_an_error_at_once(comfyui) -> None:
    with pytest.raises(UnknownBackendError, match="torhc"):
        attnplug_comfyui.patch(comfyui.model(), "torhc")


def test_the_scope_of_a_caller_decides_where_no_backend_is_named(comfyui) -> None:
    model = attnplug_comfyui.patch(comfyui.model())

    model.attend(*inputs(), 2)
    with attnplug.using(backend="blocksparse"), pytest.raises(NoBackendError):
        model.attend(*inputs(), 2)
    model.attend(*inputs(), 2)

    counted = {(one.backend, one.refused): one.calls for one in attnplug_comfyui.report(model)}
    assert counted == {("torch/sdpa", False): 2, (None, True): 1}


def test_options_reach_the_backend(comfyui) -> None:
    model = attnplug_comfyui.patch(comfyui.model(), options={"torch": {"no_such_option": 1}})

    with pytest.raises(attnplug.AttnplugError, match="no_such_option"):
        model.attend(*inputs(), 2)


def test_threads_count_every_call(comfyui) -> None:
    model = attnplug_comfyui.patch(comfyui.model())
    tensors = inputs()

    together(*[lambda: [model.attend(*tensors, 2) for _ in range(50)]] * 4)

    assert sum(one.calls for one in attnplug_comfyui.report(model)) == 200


def test_reasons_without_end_are_counted_together() -> None:
    counts = RouteCounts()

    for number in range(300):
        counts.count(Route("attention_pytorch", None, "float32", f"reason {number}"))

    routes = counts.routes()
    assert len(routes) == 257
    assert (routes[0].calls, routes[0].reason) == (44, "for other reasons, of which too many were counted")


@pytest.mark.parametrize(
    ("route", "text"),
    [
        (
            Route("attention_sage", "torch/sdpa", "float16", calls=3),
            "3 × by torch/sdpa in float16, in place of ComfyUI's attention_sage",  # noqa: RUF001 - as it is written
        ),
        (Route("attention_sage", None, "float16", "why", calls=1), "1 × by ComfyUI's attention_sage in float16 (why)"),  # noqa: RUF001 - as above
        (Route("attention_sage", None, "float16", "why", refused=True), "refused in float16 (why)"),
    ],
)
def test_a_route_reads_as_a_line(route, text) -> None:
    assert str(route) == text
