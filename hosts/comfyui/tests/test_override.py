"""Calls of every published form through attnplug, beside ComfyUI's semantics and a softmax in float64."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnplug_comfyui
from attnplug.errors import NoBackendError, NotNegotiatedError, TensorError
from attnplug_comfyui import override
from attnplug_comfyui.arguments import _OTHER_NAMES, UNUSED, _read
from hosts.comfyui.tests.fake_comfyui import Container, FakeComfyUI, in_double, plain
from hosts.comfyui.tests.signatures import CALLS, VERSIONS

NEWEST = "0.38.1"
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def tensors(batch=2, tokens=9, heads=4, size=16, keys=None, kv_heads=None, with_heads=False, dtype=torch.float32):
    """Return q, k and v, with an axis of heads or without one."""
    keys, kv_heads = tokens if keys is None else keys, kv_heads or heads
    made = [torch.randn(batch, *shape, size) for shape in ((heads, tokens), (kv_heads, keys), (kv_heads, keys))]
    made = [one.to(dtype) for one in made]
    return made if with_heads else [one.transpose(1, 2).flatten(2) for one in made]


def calls_of(model):
    """Return (backend, reason) -> calls."""
    return {(one.backend, one.reason): one.calls for one in attnplug_comfyui.report(model)}


@pytest.fixture
def model(comfyui):
    """Return a model with the attention of attnplug."""
    return attnplug_comfyui.patch(comfyui.model())


@pytest.mark.parametrize(("by_position", "names"), CALLS, ids=str)
def test_calls_as_models_write_them_are_served(by_position, names, every_comfyui) -> None:
    model = attnplug_comfyui.patch(every_comfyui.model())
    q, k, v = tensors(with_heads="skip_reshape" in names)
    mask = torch.rand(9, 9) > 0.3
    known = {"heads": 4, "mask": mask, "skip_reshape": True, "skip_output_reshape": True, "attn_precision": None}
    named = {name: known[name] for name in names}
    positional = (q, k, v, 4, mask)[:by_position]

    found = model.attend(*positional, **named)

    assert calls_of(model) == {("torch/sdpa", ""): 1}
    assert every_comfyui.calls == []
    if by_position == 5:
        named["mask"] = mask
    expected = in_double(q, k, v, **{"heads": 4, **named})
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_options_are_those_of_each_call(comfyui, monkeypatch) -> None:
    options, passed = {"flashinfer": {"workspace_mib": 512}}, []
    attend = override.attend_like_sdpa
    monkeypatch.setattr(
        override,
        "attend_like_sdpa",
        lambda *call, **named: (passed.append(named["options"]), attend(*call, **named))[1],
    )

    attnplug_comfyui.patch(comfyui.model(), options=options).attend(*tensors(), 4)

    assert passed == [options]


def test_each_function_of_a_version_is_replaced(every_comfyui) -> None:
    model = attnplug_comfyui.patch(every_comfyui.model())
    for name in every_comfyui.functions:
        q, k, v = tensors()
        found = model.attend(q, k, v, 4, function=getattr(every_comfyui, name))
        torch.testing.assert_close(found, plain(q, k, v, 4, None, None, False, False), rtol=1e-5, atol=1e-5)

    assert every_comfyui.wrapped == list(every_comfyui.functions)
    assert every_comfyui.calls == []
    assert {one.replaced for one in attnplug_comfyui.report(model)} == set(every_comfyui.functions)


def test_arguments_by_the_names_of_each_function_are_served(every_comfyui) -> None:
    model = attnplug_comfyui.patch(every_comfyui.model())
    q, k, v = tensors()
    for name, parameters in every_comfyui.functions.items():
        given_names = dict(zip([one for one, _ in parameters[:3]], (q, k, v), strict=True))
        found = model.attend(function=getattr(every_comfyui, name), heads=4, **given_names)
        torch.testing.assert_close(found.double(), in_double(q, k, v, 4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_published_parameter_is_read(version) -> None:
    ours = inspect.signature(_read).parameters
    by_position = [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    for parameters in VERSIONS[version].functions.values():
        assert [_OTHER_NAMES.get(name, name) for name, _ in parameters] == by_position
        published = {name: default for name, default in parameters if default is not ...}
        assert {name: ours[name].default for name in published} == published
    assert VERSIONS[version].keywords <= ours.keys() | UNUSED


MASKS = {
    "boolean, two axes": lambda: torch.rand(7, 5) > 0.3,
    "boolean, three axes": lambda: torch.rand(2, 7, 5) > 0.3,
    "boolean, three axes of one sequence": lambda: torch.rand(1, 7, 5) > 0.3,
    "boolean, four axes": lambda: torch.rand(2, 1, 7, 5) > 0.3,
    "boolean, each head": lambda: torch.rand(2, 4, 7, 5) > 0.3,
    "boolean, by key": lambda: torch.rand(2, 1, 1, 5) > 0.2,
    "additive, two axes": lambda: torch.randn(7, 5),
    "additive, three axes": lambda: torch.randn(2, 7, 5),
    "additive, each head": lambda: torch.randn(2, 4, 7, 5),
    "additive, by key": lambda: torch.randn(2, 1, 1, 5),
    "additive, half": lambda: torch.randn(7, 5).half(),
}


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("skip", [False, True])
def test_masks_mean_what_they_mean_to_comfyui(make, skip, model) -> None:
    q, k, v = tensors(tokens=7, keys=5, with_heads=skip)
    mask = make()

    found = model.attend(q, k, v, 4, mask=mask, skip_reshape=skip)

    assert calls_of(model) == {("torch/sdpa", ""): 1}
    same = mask.to(q.dtype) if mask.is_floating_point() else mask
    expected = in_double(q, k, v, 4, mask=mask, skip_reshape=skip)
    torch.testing.assert_close(found, plain(q, k, v, 4, same, None, skip, False), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_query_of_no_key_has_output_0(dtype, model) -> None:
    q, k, v = tensors(tokens=6, keys=5)
    visible = torch.rand(2, 6, 5) > 0.3
    visible[0, 2] = visible[1, 5] = False
    mask = visible if dtype == torch.bool else torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)

    found = model.attend(q, k, v, 4, mask=mask)

    assert not found[0, 2].any()
    torch.testing.assert_close(found.double(), in_double(q, k, v, 4, mask=mask), rtol=1e-5, atol=1e-5)


@given(data=st.data())
def test_every_call_has_the_result_of_the_oracle(data) -> None:
    draw = data.draw
    batch, kv_heads, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens, keys, size = draw(st.integers(1, 20)), draw(st.integers(1, 20)), draw(st.sampled_from((1, 8, 20, 64)))
    skip, skip_output = draw(st.booleans()), draw(st.booleans())
    scale, kind = draw(st.sampled_from((None, 0.1, 1.0))), draw(st.sampled_from((None, "boolean", "additive")))
    axes = draw(st.sampled_from(((tokens, keys), (batch, tokens, keys), (1, tokens, keys), (batch, 1, tokens, keys),
                                 (batch, kv_heads * ratio, tokens, keys), (batch, 1, 1, keys))))  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw(st.integers(0, 99)))
        q, k, v = tensors(batch, tokens, kv_heads * ratio, size, keys, kv_heads, with_heads=skip)
        bias = torch.randn(axes)
    mask = None if kind is None else bias > 0 if kind == "boolean" else bias
    arguments = {"mask": mask, "skip_reshape": skip, "skip_output_reshape": skip_output, "scale": scale}
    model = attnplug_comfyui.patch(FakeComfyUI(NEWEST).model())

    found = model.attend(q, k, v, kv_heads * ratio, enable_gqa=ratio > 1, **arguments)

    assert calls_of(model) == {("torch/sdpa", ""): 1}
    expected = in_double(q, k, v, kv_heads * ratio, **arguments)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_outputs_have_the_dtype_of_the_call(dtype, model) -> None:
    q, k, v = tensors(dtype=dtype)

    found = model.attend(q, k, v, 4)

    (route,) = attnplug_comfyui.report(model)
    assert found.dtype == dtype
    assert route.dtype == str(dtype).removeprefix("torch.")
    torch.testing.assert_close(found.double(), in_double(q, k, v, 4), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_position", [False, True])
def test_attn_precision_is_that_of_the_computation(dtype, by_position, model) -> None:
    q, k, v = tensors(dtype=dtype, size=64)
    precision = {} if by_position else {"attn_precision": torch.float32}

    found = model.attend(q, k, v, 4, *((None, torch.float32) if by_position else ()), **precision)

    (route,) = attnplug_comfyui.report(model)
    assert (route.dtype, found.dtype) == ("float32", dtype)
    assert torch.equal(found, plain(q, k, v, 4, None, torch.float32, False, False))


@pytest.mark.parametrize("precision", [None, torch.float32])
def test_autocast_casts_what_has_no_precision_of_its_own(precision, model) -> None:
    q, k, v = tensors()

    first = q if precision is None else q.bfloat16()  # a norm in float32 leaves such a mixture

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model.attend(first, k.bfloat16(), v.bfloat16(), 4, attn_precision=precision)

    (route,) = attnplug_comfyui.report(model)
    assert (route.dtype, found.dtype) == ("bfloat16" if precision is None else "float32", torch.bfloat16)
    torch.testing.assert_close(found.double(), in_double(q, k, v, 4), rtol=2e-2, atol=2e-2)


def test_scores_that_overflow_float16_do_not_with_precision(model) -> None:
    q, k, v = tensors(dtype=torch.float16, size=64)
    q *= 300

    found = model.attend(q, k, v, 4, attn_precision=torch.float32, skip_reshape=False)

    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), in_double(q, k, v, 4), rtol=2e-3, atol=2e-3)


def test_the_command_line_of_comfyui_decides_the_precision(comfyui, model) -> None:
    q, k, v = tensors(dtype=torch.float16)
    comfyui.forced = {torch.float16: torch.float32}  # --force-upcast-attention
    model.attend(q, k, v, 4)
    forced = attnplug_comfyui.report(model)
    comfyui.forced = {torch.float16: None}  # --dont-upcast-attention
    for _ in range(2):
        model.attend(q, k, v, 4, attn_precision=torch.float32)

    assert [(one.dtype, one.calls) for one in forced] == [("float32", 1)]
    assert [(one.dtype, one.calls) for one in attnplug_comfyui.report(model)] == [("float16", 2), ("float32", 1)]


def test_a_precision_of_fewer_digits_than_the_tensors_permits_more(model) -> None:
    q, k, v = tensors()

    found = model.attend(q, k, v, 4, attn_precision=torch.float16)

    torch.testing.assert_close(found.double(), in_double(q, k, v, 4), rtol=1e-5, atol=1e-5)


def test_more_sequences_than_a_grid_has_run_in_parts(model, monkeypatch) -> None:
    monkeypatch.setattr(override, "MOST_SEQUENCES", 3)
    q, k, v = tensors(batch=8)
    for mask in (None, torch.rand(8, 9, 9) > 0.3, torch.rand(9, 9) > 0.3, torch.randn(8, 4, 9, 9)):
        found = model.attend(q, k, v, 4, mask=mask)
        torch.testing.assert_close(found.double(), in_double(q, k, v, 4, mask=mask), rtol=1e-5, atol=1e-5)

    assert sum(calls_of(model).values()) == 4


@pytest.mark.parametrize(("batch", "tokens"), [(0, 9), (2, 0)])
def test_calls_without_queries_have_an_empty_output(batch, tokens, model) -> None:
    q, k, v = tensors(batch=batch, tokens=tokens, keys=9)

    assert model.attend(q, k, v, 4).shape == (batch, tokens, 64)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_are_served(mode, model) -> None:
    with mode():
        q, k, v = tensors()
        mask = torch.randn(9, 9)
        found = model.attend(q, k, v, 4, mask=mask)

    torch.testing.assert_close(found.double(), in_double(q, k, v, 4, mask=mask), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_oracle(model) -> None:
    inputs = [one.requires_grad_() for one in tensors()]
    copies = [one.detach().double().requires_grad_() for one in inputs]

    found = torch.autograd.grad(model.attend(*inputs, 4).square().sum(), inputs)
    expected = torch.autograd.grad(in_double(*copies, 4).square().sum(), copies)

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_calls_with_gradients_are_decided_apart(comfyui) -> None:
    model = attnplug_comfyui.patch(comfyui.model(), "blocksparse", fallback=True)
    inputs = tensors()
    model.attend(*inputs, 4)
    model.attend(*[one.requires_grad_() for one in inputs], 4)
    with torch.no_grad():
        model.attend(*inputs, 4)

    needs_lse = {"return_lse=True" in one.reason: one.calls for one in attnplug_comfyui.report(model)}
    assert needs_lse == {False: 2, True: 1}


@pytest.mark.slow
def test_a_compiled_model_is_served() -> None:
    model = attnplug_comfyui.patch(FakeComfyUI(NEWEST).model())
    override_ = attnplug_comfyui.override_of(model)
    inputs = tensors()

    @torch.compile(backend="eager")
    def layer(q, k, v):
        return override_(plain, q * 2, k, v, 4) + 1

    found = layer(*inputs)

    assert calls_of(model) == {("torch/sdpa", ""): 1}
    q, k, v = inputs
    torch.testing.assert_close(found.double(), in_double(q * 2, k, v, 4) + 1, rtol=1e-5, atol=1e-5)


def test_containers_are_emptied_before_the_override(monkeypatch) -> None:
    fake = FakeComfyUI(NEWEST)
    fake.install(monkeypatch)
    model = attnplug_comfyui.patch(fake.model())
    q, k, v = tensors()

    found = model.attend(Container(q), Container(k), Container(v), 4, preferred_attention=object())

    torch.testing.assert_close(found.double(), in_double(q, k, v, 4), rtol=1e-5, atol=1e-5)


def test_keywords_of_newer_versions_are_used(monkeypatch) -> None:
    fake = FakeComfyUI(NEWEST)
    fake.install(monkeypatch)
    model = attnplug_comfyui.patch(fake.model())
    q, k, v = tensors(heads=4, kv_heads=2)

    found = model.attend(q, k, v, 4, enable_gqa=True, scale=0.3, low_precision_attention=False)

    torch.testing.assert_close(found.double(), in_double(q, k, v, 4, scale=0.3), rtol=1e-5, atol=1e-5)


MISTAKES = {
    "axes of heads without the flag": (lambda: tensors(with_heads=True), {}, "skip_reshape=True"),
    "the flag without axes of heads": (tensors, {"skip_reshape": True}, r"\(batch, 4, tokens, size\)"),
    "another count of heads": (lambda: tensors(heads=2, with_heads=True), {"skip_reshape": True}, "heads=4"),
    "a width that is no multiple": (lambda: [torch.randn(1, 3, 10)] * 3, {}, "with 4 heads"),
    "fewer key heads": (lambda: tensors(kv_heads=2), {}, "the keys have 4 heads of size 16"),
    "fewer key heads with axes": (
        lambda: tensors(kv_heads=2, with_heads=True),
        {"skip_reshape": True},
        "enable_gqa",
    ),
    "a mask of another shape": (tensors, {"mask": torch.ones(3, 9, dtype=torch.bool)}, "attn_mask"),
}


@pytest.mark.parametrize(("make", "arguments", "message"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("fallback", [False, True])
def test_tensors_that_do_not_fit_are_an_error(make, arguments, message, fallback, comfyui) -> None:
    model = attnplug_comfyui.patch(comfyui.model(), fallback=fallback)

    with pytest.raises(TensorError, match=message):
        model.attend(*make(), 4, **arguments)

    assert comfyui.calls == []


REFUSED = {
    "an unknown keyword": (tensors, {"softcap": 30.0}, NotNegotiatedError, "the argument 'softcap'"),
    "a mask of more digits": (
        lambda: tensors(dtype=torch.bfloat16),
        {"mask": torch.randn(9, 9)},
        NotNegotiatedError,
        "an additive mask of float32 is given for a call in bfloat16",
    ),
    "float64 scores": (tensors, {"attn_precision": torch.float64}, NotNegotiatedError, "attn_precision=float64"),
    "a dtype of no backend": (
        lambda: [one.double() for one in tensors()],
        {"backend": "flash_attn"},
        NoBackendError,
        "no backend serves",
    ),
    "a named backend": (tensors, {"backend": "blocksparse"}, NoBackendError, "no backend serves"),
}


@pytest.mark.parametrize(("make", "arguments", "error", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_nothing_serves_is_an_error_with_reasons(make, arguments, error, reason, monkeypatch) -> None:
    fake = FakeComfyUI(NEWEST)
    fake.version = fake.version._replace(keywords=fake.version.keywords | {"softcap"})
    fake.install(monkeypatch)
    arguments = dict(arguments)
    model = attnplug_comfyui.patch(fake.model(), arguments.pop("backend", None))

    for _ in range(2):  # the second time from what is kept
        with pytest.raises(error) as caught:
            model.attend(*make(), 4, **arguments)
        assert caught.value.problem
        assert caught.value.fix

    assert fake.calls == []
    (route,) = attnplug_comfyui.report(model)
    assert (route.refused, route.calls, route.backend) == (True, 2, None)
    assert reason in route.reason


@pytest.mark.parametrize("name", ["a mask of more digits", "float64 scores", "a named backend"])
def test_comfyui_runs_it_where_the_node_permits_that(name, comfyui, caplog) -> None:
    make, arguments, _, reason = REFUSED[name]
    arguments = dict(arguments)
    model = attnplug_comfyui.patch(comfyui.model(), arguments.pop("backend", None), fallback=True)
    q, k, v = make()

    with caplog.at_level("INFO", "attnplug"):
        found = [model.attend(q, k, v, 4, **arguments) for _ in range(3)]

    assert comfyui.calls == ["attention_pytorch"] * 3
    assert torch.equal(found[0], plain(q, k, v, 4, arguments.get("mask"), None, False, False))
    (route,) = attnplug_comfyui.report(model)
    assert (route.backend, route.refused, route.calls) == (None, False, 3)
    assert reason in route.reason
    assert [one.levelname for one in caplog.records if one.name == "attnplug.comfyui"] == ["WARNING"]
    assert "ComfyUI's attention_pytorch" in caplog.text


def test_a_decision_is_logged_once(model, caplog) -> None:
    with caplog.at_level("INFO", "attnplug"):
        for tokens in (9, 9, 5):
            model.attend(*tensors(tokens=tokens), 4)
        model.attend(*tensors(dtype=torch.bfloat16), 4)

    assert [one.getMessage() for one in caplog.records if one.name == "attnplug.comfyui"] == [
        "attnplug: attention by torch/sdpa in float32, in place of ComfyUI's attention_pytorch",
        "attnplug: attention by torch/sdpa in bfloat16, in place of ComfyUI's attention_pytorch",
    ]
