"""Log texts and images that the model generates during training."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.callbacks.base import SAMPLES, Callback
from distributed.callbacks.media import Image, Text
from distributed.data import sample_seed
from distributed.errors import ConfigError

if TYPE_CHECKING:
    from distributed.state import StepResult, TrainState


class Samples(Callback, abc.ABC):
    """Let the model generate something from time to time, and log it.

    The model is in evaluation mode, without gradients. Random numbers are drawn from the seed of the run and the step, so a resumed
    run and any number of processes draw the same ones. Training goes on as if nothing had been generated.
    """

    needs: ClassVar[tuple[str, ...]] = (SAMPLES,)

    def __init__(self, every_n_steps: int | None, name: str) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(f"every_n_steps={every_n_steps!r} must be 1 or more")
        self.every_n_steps, self.name = every_n_steps, name

    @abc.abstractmethod
    def _generate(self, model: Any, move: Callable[[Any], Any]) -> Any:
        """Return what is to be logged. `move` moves tensors to the device of the model. Called on every rank."""

    @abc.abstractmethod
    def _log(self, generated: Any) -> None:
        """Log the result of `_generate`. Called on every rank; the main process keeps what is logged."""

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        if self.every_n_steps is not None and state.step % self.every_n_steps == 0:
            self._sample(state)

    def on_epoch_end(self, state: TrainState, metrics: Any) -> None:
        if self.every_n_steps is None:
            self._sample(state)

    def _sample(self, state: TrainState) -> None:
        with self.context.observer.sampling(sample_seed(self.context.config.seed, state.step, 0)) as move:
            generated = self._generate(self.context.model, move)
        self._log(generated)


class SampleText(Samples):
    """Log texts that the model generates from `prompts`, as one text.

    Args:
        prompts: the texts that the model continues.
        tokenizer: a Hugging Face tokenizer, for a model with a method `generate`. The prompts are passed to the model one by one.
        generate: a function `(model, prompts) -> list[str]`, instead of `tokenizer`. It is called on every rank, and all ranks must
            call the model equally often.
        every_n_steps: the number of updates between two samples. None means once at the end of each epoch.
        name: the name under which the text is logged.
        options: with `tokenizer`, arguments of the model's `generate`, such as `max_new_tokens=50`.

    Raises:
        ConfigError: an argument is missing or wrong. During `fit`: the model has no `generate`, or the function does not return one
            text for each prompt.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        *,
        tokenizer: Any = None,
        generate: Callable[[Any, list[str]], list[str]] | None = None,
        every_n_steps: int | None = None,
        name: str = "samples",
        **options: Any,
    ) -> None:
        super().__init__(every_n_steps, name)
        if isinstance(prompts, str) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            raise ConfigError(
                f"SampleText(prompts={prompts!r}) needs a list of texts: SampleText(['Once upon a time'])"
            )
        if (tokenizer is None) == (generate is None):
            raise ConfigError(
                "SampleText needs a tokenizer, for a model with generate(), or generate=function(model, prompts): pass one of them"
            )
        if generate is not None and options:
            raise ConfigError(
                f"{', '.join(options)}: arguments of the model's generate() need tokenizer=..., not a function: drop them"
            )
        if (number := options.get("num_return_sequences", 1)) != 1:
            raise ConfigError(
                f"num_return_sequences={number} of SampleText generates {number} texts per prompt, but only one is logged: drop it, or pass"
                " generate=function(model, prompts), which joins them"
            )
        self.prompts = list(prompts)
        self._tokenizer, self._function, self._options = tokenizer, generate, options

    def on_train_start(self, state: TrainState) -> None:
        model = self.context.model
        if self._function is None and not callable(getattr(model, "generate", None)):
            raise ConfigError(
                f"SampleText: a {type(model).__name__} has no generate(): pass generate=function(model, prompts)"
            )

    def _generate(self, model: Any, move: Callable[[Any], Any]) -> list[str]:
        if self._function is None:
            return [self._continued(model, move, prompt) for prompt in self.prompts]
        texts = self._function(model, list(self.prompts))
        is_list = isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts)
        if not is_list or len(texts) != len(self.prompts):
            raise ConfigError(
                f"SampleText: generate() returned {texts!r:.80} for {len(self.prompts)} prompts: return a list with one str for each"
            )
        return list(texts)

    def _continued(self, model: Any, move: Callable[[Any], Any], prompt: str) -> str:
        """Return what a Hugging Face model generates after `prompt`."""
        inputs = move(dict(self._tokenizer(prompt, return_tensors="pt")))
        # The ranks generate the same tokens, unless a kernel rounds differently on one of them. With sharded weights, all ranks
        # must still run the same number of forward passes.
        is_cut = self.context.observer.cuts_weights and self.context.worker.world_size > 1
        tokens, *_ = model.generate(**inputs, **{"synced_gpus": is_cut, **self._options})
        is_prompt_repeated = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        start = inputs["input_ids"].shape[1] if is_prompt_repeated else 0
        return str(self._tokenizer.decode(tokens[start:], skip_special_tokens=True))

    def _log(self, generated: list[str]) -> None:
        pairs = zip(self.prompts, generated, strict=True)
        self.context.log(self.name, Text("\n\n".join(f"> {prompt}\n{text}" for prompt, text in pairs)))


class SampleImages(Samples):
    """Log images that the model generates.

    Args:
        generate: a function `(model) -> images`, called on every rank. All ranks must call the model equally often. The images are an
            array or a tensor of shape [n, channels, height, width] with 1, 3 or 4 channels: uint8, or floats (clipped to [0, 1]).
        inputs: the argument with which the model is called, instead of `generate`, such as a tensor of some validation inputs. The
            outputs of the model are the images.
        every_n_steps: the number of updates between two samples. None means once at the end of each epoch.
        name: the images are logged as `NAME/0`, `NAME/1` and so on.

    Raises:
        ConfigError: both or neither of `generate` and `inputs` are given. During `fit`: the result has another shape.
    """

    def __init__(
        self,
        generate: Callable[[Any], Any] | None = None,
        *,
        inputs: Any = None,
        every_n_steps: int | None = None,
        name: str = "samples",
    ) -> None:
        super().__init__(every_n_steps, name)
        if (generate is None) == (inputs is None):
            raise ConfigError(
                "SampleImages needs a function (model) -> images, or inputs=..., with which the model is called: pass one of them"
            )
        self._function, self._inputs = generate, inputs

    def _generate(self, model: Any, move: Callable[[Any], Any]) -> Any:
        images = model(move(self._inputs)) if self._function is None else self._function(model)
        shape = list(getattr(images, "shape", ()))
        if len(shape) != 4 or shape[1] not in (1, 3, 4):
            found = f"shape {shape}" if shape else f"a {type(images).__name__}"
            raise ConfigError(
                f"SampleImages got {found}: return images of shape [n, channels, height, width] with 1, 3 or 4 channels"
            )
        return images

    def _log(self, generated: Any) -> None:
        for number, image in enumerate(generated):
            self.context.log(f"{self.name}/{number}", Image(image, channels="first"))
