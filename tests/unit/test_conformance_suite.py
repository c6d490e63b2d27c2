"""The adapters that the conformance suite is asked for, and what its bf16 check finds."""

from __future__ import annotations

import numpy
import pytest

from distributed.errors import ConfigError
from distributed.testing import Adapter
from distributed.testing.__main__ import main
from distributed.testing.conformance import check_bf16_gradient, checks_for
from distributed.testing.running import refused_cases


@pytest.mark.parametrize(
    ("text", "sizes", "settings"),
    [
        ("fsdp", (2, 3), {}),
        ("fsdp:2", (2,), {}),
        ("deepspeed[zero_stage=3]:1,2", (1, 2), {"deepspeed.zero_stage": 3}),
        ("ray[engine=fsdp,max_restarts=0]:2", (2,), {"ray.engine": "fsdp", "max_restarts": 0}),
        ("ray[fsdp.cpu_offload=true]", (2, 3), {"fsdp.cpu_offload": True}),
    ],
)
def test_a_text_says_backend_settings_and_sizes(text, sizes, settings):
    adapter = Adapter.parse(text)
    assert (adapter.backend, adapter.world_sizes, adapter.settings) == (
        text.partition("[")[0].partition(":")[0],
        sizes,
        settings,
    )


@pytest.mark.parametrize("text", ["pytorch-ddp", "deepspeed[zero_stage=3]", "ray[engine=fsdp,cpus_per_worker=0.5]"])
def test_an_adapter_is_called_as_it_was_written(text):
    assert str(Adapter.parse(f"{text}:2")) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("deepspeed[zero_stage=3]2", "write deepspeed[SETTING=VALUE]:1,2,3"),
        ("deepspeed[]:2", "write deepspeed[SETTING=VALUE]:1,2,3"),
        ("deepspeed[zero_stage]:2", "write deepspeed[SETTING=VALUE]:1,2,3"),
        ("deepspeed[zero_stagee=3]:2", "zero_stagee is not a setting"),
        ("deepspeed[zero_stage=9]:2", "deepspeed.zero_stage=9"),
        ("ray[engine={]:2", "is not YAML"),
        ("fsdp:", "write fsdp:1,2,3"),
        ("fdsp[cpu_offload=true]:2", "did you mean 'fsdp'?"),
    ],
)
def test_a_text_that_says_nothing_sensible_is_refused(text, said):
    with pytest.raises(ConfigError) as caught:
        Adapter.parse(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_kind_of_model_is_the_backends_own():
    assert [Adapter(name).model for name in ("single", "ray", "tensorflow")] == ["torch", "torch", "keras"]
    assert [str(Adapter(name).reference) for name in ("fsdp", "tensorflow")] == ["single", "tensorflow"]


@pytest.mark.parametrize("text", ["single:2", "single:1,2"])
def test_several_processes_of_a_backend_of_one_are_refused_in_one_line(text, capsys):
    assert Adapter.parse("single").world_sizes == (1,)
    assert main([text]) == 2
    said = "error: backend='single' does not work with 2 processes, it runs one: write single:1\n"
    assert capsys.readouterr() == ("", said)


def test_training_that_fails_is_told_without_a_traceback_of_the_suite(monkeypatch, capsys):
    def train_cases(adapter, *arguments):
        raise AssertionError(f"{adapter} x 1: exit 1")

    monkeypatch.setattr("distributed.testing.__main__.train_cases", train_cases)
    assert main(["single:1"]) == 1
    assert capsys.readouterr() == ("FAILED single x 1: exit 1\n", "")


def test_cases_that_need_what_an_adapter_refuses_are_not_its_own():
    everything, keras = checks_for(Adapter("fsdp")), checks_for(Adapter("tensorflow"))
    left_out = ("recomputed", "epoch-schedule", "several", "averaged", "frozen", "sampled")
    assert everything.keys() - keras.keys() == {f"same numbers: {case}" for case in left_out}


# ------------------------------------------------------------------ bf16


def rounded(tensor, digits):
    """To so many binary digits."""
    fraction, exponent = numpy.frexp(tensor)
    return numpy.ldexp(numpy.round(fraction * 2**digits), exponent - digits)


@pytest.fixture
def gradient():
    """Of two layers, in float32."""
    draw = numpy.random.default_rng(0)
    activations, errors = draw.normal(size=(22, 16)), draw.normal(size=(22, 5)) / 22
    return {"weight": errors.T @ activations, "bias": errors.sum(0)}, activations, errors


def through(digits, gradient):
    """The same with inputs of the products and their results rounded."""
    _, activations, errors = gradient
    activations, errors = rounded(activations, digits), rounded(errors, digits)
    return {"weight": rounded(errors.T @ activations, digits), "bias": rounded(errors.sum(0), digits)}


def test_a_gradient_that_went_through_bfloat16_passes(gradient):
    check_bf16_gradient(through(8, gradient), gradient[0], "it")


@pytest.mark.parametrize("digits", [11, 24])  # fp16, float32
def test_another_precision_is_found_out(gradient, digits):
    with pytest.raises(AssertionError, match="it was not used"):
        check_bf16_gradient(through(digits, gradient), gradient[0], "it")


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_tensor_that_is_off_is_found_out(gradient, name):
    half = through(8, gradient)
    half[name] = half[name] * 1.02
    with pytest.raises(AssertionError, match=f"the gradient of {name} by"):
        check_bf16_gradient(half, gradient[0], "it")


def test_options_decide_which_models_an_adapter_trains_and_what_it_refuses():
    torch, tensorflow = Adapter.parse("horovod:2"), Adapter.parse("horovod[keras_backend=tensorflow]:2")
    assert (torch.model, torch.reference.backend) == ("torch", "single")
    assert (tensorflow.model, tensorflow.reference.backend) == ("keras", "tensorflow")
    if not tensorflow.capabilities.missing:
        assert (refused_cases(torch), refused_cases(tensorflow)) == (
            ["several"],
            ["recomputed", "epoch-schedule", "several", "averaged", "frozen", "sampled"],
        )
