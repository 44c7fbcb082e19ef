"""Generate text samples during training with the current parameters, on the training devices.

The prompts and the random seed do not depend on the step or the layout, so samples differ only if
the model differs. Prompts come from the config, or from validation conversations whose response is
known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxpipe.config.sections.eval import EvalConfig
from maxpipe.data.chat_spec import add_end_of_turn_ids
from maxpipe.data.documents import EncodedDocument
from maxpipe.data.loader import Datasets
from maxpipe.data.prompts import read_conversations, read_prompts, user_chat
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.errors import Code, ConfigError
from maxpipe.generation.completions import (
    Completion,
    GenerationLimits,
    Prompt,
    complete,
    encode_chats,
    encode_prompts,
)
from maxpipe.generation.decoding import Sampling
from maxpipe.generation.pipeline_decoding import (
    build_decode_engine,
    decode_param_converter,
    decode_param_layout,
)
from maxpipe.step.state import ParamLayout


class ValidationPrompt(NamedTuple):
    """The last message that is trained on in a conversation, and everything before that message."""

    ids: list[int]
    """Token ids of the prompt, identical to the ids used in training."""
    text: str
    """Text of the prompt, without control tokens."""
    answer: str
    """Text of the last message that is trained on, which serves as the reference response."""


def last_turn(document: EncodedDocument, tokenizer: Tokenizer) -> ValidationPrompt | None:
    """Return the last message that is trained on, as reference response, and the preceding prompt.

    Returns None if the document has no such message, or has no prompt before the message.
    """
    if document.trained is None:
        return None
    edges = np.flatnonzero(np.diff(document.trained.astype(np.int8), append=0))
    begins = edges[~document.trained[edges]] + 1
    if document.trained[0]:
        begins = np.append(0, begins)
    if not len(begins) or not (begin := int(begins[-1])):
        return None
    ids = document.ids.astype(int)
    end = begin + int(np.argmin(np.append(document.trained[begin:], False)))
    prompt, answer = ids[:begin].tolist(), ids[begin:end].tolist()
    return ValidationPrompt(prompt, tokenizer.decode(prompt), tokenizer.decode(answer))


def load_validation_prompts(
    datasets: Datasets, fraction: float, count: int, sequence_length: int
) -> list[ValidationPrompt]:
    """Return prompts from the first validation conversations that leave room for a response.

    Held-out documents come first, followed by the documents of the validation sets.
    """
    prompts = []
    for document in _documents(datasets, fraction):
        if len(prompts) == count:
            break
        prompt = last_turn(document, datasets.tokenizer)
        if prompt is not None and len(prompt.ids) < sequence_length:
            prompts.append(prompt)
    return prompts


def _documents(datasets: Datasets, fraction: float) -> Iterator[EncodedDocument]:
    if datasets.corpora is None:
        return
    train, sets = datasets.corpora
    for corpus in (train, *sets.values()):
        split, share = ("validation", fraction) if corpus is train else ("all", 0.0)
        for indexed in corpus.indexed:
            for numbers in indexed.numbers(split, share):
                yield from (indexed.documents[number] for number in numbers.tolist())


class SampleGenerator:
    """Completes the prompts in `eval.sample_prompts` or `eval.sample_prompts_file`, or held-out
    chats.

    Raises:
        ConfigError: the file has no prompts, a prompt leaves no room for a generated token, or a
            required chat template is missing.
    """

    def __init__(
        self,
        eval_config: EvalConfig,
        partition: ParamLayout,
        tokenizer: Tokenizer,
        held_out: Sequence[ValidationPrompt] = (),
        chat: ChatTemplate | None = None,
        *,
        sequence_length: int,
        seed: int,
    ):
        tokenizer = add_end_of_turn_ids(tokenizer) if eval_config.sample_chat else tokenizer
        prompts = _prompts(eval_config, tokenizer, sequence_length, chat)
        self._num_config_prompts = len(prompts)
        self._answers = [prompt.answer for prompt in held_out]
        for number, prompt in enumerate(held_out, self._num_config_prompts):
            prompts.append(Prompt(number, prompt.text, prompt.ids))
        if not prompts:
            raise ConfigError.one(
                Code.DATA_VALIDATION,
                "eval.sample_conversations",
                eval_config.sample_conversations,
                "requires a conversation that is held out for validation, has content to train on "
                f"after its first message, and fits in train.sequence_length ({sequence_length}).",
                "Increase data.validation_fraction or train.sequence_length, or set "
                "eval.sample_prompts.",
            )
        self._tokenizer, self._prompts = tokenizer, prompts
        tokens = min(eval_config.sample_max_tokens, sequence_length)
        self._limits = GenerationLimits(tokens, sequence_length, batch_size=len(prompts))
        parts = decode_param_layout(partition)
        sampling = Sampling(temperature=eval_config.sample_temperature)
        self._decoding = build_decode_engine(parts, sampling, seed)
        self._convert = decode_param_converter(partition, parts)

    def generate(self, params: Any) -> list[Mapping[str, object]]:
        """Return `prompt`, `text`, `tokens` and `finish_reason` for each prompt.

        For conversations, `answer` is the reference response. `params` are in stacked form. All
        processes of a run must call this method together.

        Raises:
            DivergenceError: the model's logits are not finite.
        """
        completions: list[Completion] = []
        complete(
            self._decoding,
            self._convert(params),
            self._tokenizer,
            self._prompts,
            self._limits,
            write=completions.append,
        )
        samples: list[Mapping[str, object]] = []
        for completion in completions:
            sample: dict[str, object] = {
                "prompt": completion.prompt.text,
                "text": completion.text,
                "tokens": completion.tokens,
                "finish_reason": completion.finish_reason,
            }
            if (index := completion.prompt.number - self._num_config_prompts) >= 0:
                sample["answer"] = self._answers[index]
            samples.append(sample)
        return samples


def _prompts(
    config: EvalConfig, tokenizer: Tokenizer, sequence_length: int, chat: ChatTemplate | None
) -> list[Prompt]:
    """Return the prompts from the config or from its prompt file."""
    path, texts = config.sample_prompts_file, list(config.sample_prompts)
    where = f"eval.sample_prompts_file: {path}"
    if config.sample_chat:
        chats = read_conversations(path, where) if path else [user_chat(text) for text in texts]
        return encode_chats(chats, tokenizer, sequence_length, where="eval.sample_chat", chat=chat)
    return encode_prompts(read_prompts(path, where) if path else texts, tokenizer, sequence_length)
