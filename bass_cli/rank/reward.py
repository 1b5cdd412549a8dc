"""Score samples by a reward model: a sequence classifier of transformers.

The model reads prompt and sample: through its tokenizer's chat template if it has one, else as a
pair of texts. A model with one output gives that number, one with two the log-odds of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from bass_cli.errors import MachineError, UserError
from bass_cli.rank.ranking import REWARD, Group, Scores, needed_prompt
from bass_cli.reading import is_unicode

if TYPE_CHECKING:
    import torch

BATCH = 8  # texts at once, by default; the n samples of a prompt are often a multiple of it


class RewardRanker:
    """The ranker "reward:MODEL".

    Args:
        name: "reward:" and a folder or a hub id.
        device, dtype: As of a job: auto, cuda or cpu; auto, bf16, fp16 or fp32.
        batch: Texts that the model reads at once.
        on_phase: Called with the name of each phase.

    Raises:
        UserError: The number format is not one of transformers' floats.
    """

    def __init__(
        self,
        name: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        batch: int = BATCH,
        on_phase: Callable[[str], None] = lambda name: None,
    ):
        if dtype not in ("auto", "bf16", "fp16", "fp32"):
            raise UserError(f"`dtype` {dtype}: a reward model runs in auto, bf16, fp16 or fp32")
        self.name, self._batch, self._on_phase = name, batch, on_phase
        self._device, self._dtype = device, dtype

    @property
    def identity(self) -> Any:
        """What the scores depend on, besides the group."""
        return {"model": self.name, "dtype": self._dtype}

    def scores(self, groups: Iterable[Group]) -> Iterator[Scores]:
        """Yield the scores of each group.

        None for a text that is longer than the model can read, or that is no valid Unicode.

        Raises:
            UserError: A prompt is unknown, or the model is no classifier with one or two outputs.
        """
        model = _Classifier(
            self.name.removeprefix(REWARD), self._device, self._dtype, self._on_phase
        )
        for group in groups:
            prompt = needed_prompt(group, self.name)
            texts = list(dict.fromkeys(one.text for one in group.candidates))
            found = dict(zip(texts, model.rate(prompt, texts, self._batch), strict=True))
            yield [found[one.text] for one in group.candidates]


class _Classifier:
    """A loaded classifier and its tokenizer."""

    def __init__(self, source: str, device: str, dtype: str, on_phase: Callable[[str], None]):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from bass_cli.run.plan import device_of, dtype_of

        self._device = device_of(device)
        on_phase("loading the reward model")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
            self._model: Any = AutoModelForSequenceClassification.from_pretrained(
                source, dtype=dtype_of(dtype, self._device)
            )
        except (OSError, ValueError, ImportError) as error:
            reason = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            kind = MachineError if isinstance(error, ImportError) else UserError
            raise kind(f"reward:{source}: the model cannot be loaded: {reason}") from None
        labels = self._model.config.num_labels
        if labels not in (1, 2):
            raise UserError(
                f"reward:{source}: the model has {labels} outputs; a reward model has one, or two "
                "of which the second is the better"
            )
        self._model = self._model.to(self._device).eval()
        lengths = (
            getattr(self._model.config, "max_position_embeddings", None),
            self._tokenizer.model_max_length,
        )
        self._longest = min(one for one in (*lengths, 2**30) if one)
        on_phase("scoring with the reward model")

    def rate(self, prompt: str, texts: Sequence[str], batch: int) -> list[float | None]:
        """Return a score for each text; None for one that is too long or no valid Unicode."""
        found: list[float | None] = [None] * len(texts)
        valid = [at for at, text in enumerate(texts) if is_unicode(prompt + text)]
        inputs = {at: self._inputs(prompt, texts[at]) for at in valid}
        short = [at for at in valid if len(inputs[at]["input_ids"]) <= self._longest]

        def size(at: int) -> int:
            return len(inputs[at]["input_ids"])

        # Texts of one length share a pass, so that no padding can change a score.
        for _, same in groupby(sorted(short, key=size), key=size):
            places = list(same)
            for start in range(0, len(places), batch):
                part = places[start : start + batch]
                for at, score in zip(part, self._run([inputs[at] for at in part]), strict=True):
                    found[at] = score
        return found

    def _inputs(self, prompt: str, text: str) -> dict[str, list[int]]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            return dict(tokenizer(prompt, text, padding=False, truncation=False))
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # of the template's own language
            raise UserError(f"reward: the model's chat template fails: {error}") from None
        # the template has written the special tokens
        return dict(tokenizer(rendered, add_special_tokens=False, truncation=False))

    def _run(self, inputs: Sequence[dict[str, list[int]]]) -> list[float]:
        import torch

        tensors: dict[str, torch.Tensor] = {
            key: torch.tensor([one[key] for one in inputs], device=self._device)
            for key in inputs[0]
        }
        # Without padding the last token of each text decides. transformers looks for padding by
        # this id, which no text has.
        self._model.config.pad_token_id = -1
        with torch.inference_mode():
            logits = self._model(**tensors).logits.float()
        scores: list[float] = (
            logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0)
        ).tolist()
        return scores
