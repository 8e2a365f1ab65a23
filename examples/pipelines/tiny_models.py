"""Makes the tiny models of the example pipelines, each with its own tokenizer; without downloads, and reproducible.

    python examples/pipelines/tiny_models.py KIND FOLDER

The language models have random weights. Their answers are random words that depend on the whole prompt. Greedy answers
are printable and end only at `max_tokens`.
"""
# transformers is only partly annotated.
# mypy: disallow-untyped-calls=False

import argparse
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

CODES = 128
"""Codec tokens of the talker; their ids follow those of its text tokens."""
FIRST_CODE = 257
UNSAFE = "0123456789"
"""Letters that the guard rates as unsafe, so that its result is easy to check."""
_END = "<|end|>"
_BYTES_ONLY = 257
"""Size of a vocabulary of all bytes and the end token; further tokens are learnt from a corpus, or added."""
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_THOUGHTS = (
    "The first stage thinks, and what it thinks goes on to the next one, which knows other words.",
    "user: How many stages has this pipeline? assistant: Count them: 0 1 2 3 4 5 6 7 8 9, and then 10 again.",
    "A question comes in, an answer goes out, and between the two a graph without any cycle decides who works.",
    "When nobody asks for sound, nobody speaks; when somebody does, the voice begins before the thought ends.",
)
_DRAFTS = (
    "Improve this draft: shorten it, keep the meaning, remove repetition, and write in a plain or formal style.",
    "A second reader sees what a first writer cannot, since every writer reads what was meant instead of what is.",
)


def make_models(kind: str, folder: Path) -> None:
    """Make the missing models of an example of `KINDS`, each in a folder with the name from the example's file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, save in KINDS[kind].items():
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as scratch:
                # Renamed when complete, so that an interrupted run leaves no partial model.
                made = Path(scratch, "made")
                save(made)
                made.rename(folder / name)


def _save_writer(folder: Path, *, corpus: tuple[str, ...], vocabulary: int, seed: int) -> None:
    tokenizer = _tokenizer(corpus, vocabulary)
    texts = [str(tokenizer.decode([token])) for token in range(vocabulary)]
    silent = [token for token, text in enumerate(texts) if text == _END or not (text.isascii() and text.isprintable())]
    _save_random_llama(folder, tokenizer, seed, silent)


def _save_talker(folder: Path) -> None:
    tokenizer = _tokenizer((), _BYTES_ONLY)
    tokenizer.add_tokens([f"<|code_{code}|>" for code in range(CODES)], special_tokens=True)
    _save_random_llama(folder, tokenizer, seed=2, silent=list(range(FIRST_CODE)))


def _save_guard(folder: Path) -> None:
    """Save a classifier with hand-made weights: is any of `UNSAFE` in the text?

    The first number of each embedding is 1, and the second is 1 for unsafe tokens. Attention, uniform over all tokens,
    writes the mean of the second into the third, which the head compares with a small part of the first.
    """
    import torch
    from transformers import LlamaForSequenceClassification

    tokenizer = _tokenizer((), _BYTES_ONLY)
    config = _config(tokenizer, hidden_size=64, layers=1, num_labels=2, id2label={0: "safe", 1: "unsafe"})
    model = LlamaForSequenceClassification(config)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for weights in (weight for name, weight in model.named_parameters() if "norm" not in name):
            weights.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.embed_tokens.weight[[tokenizer.convert_tokens_to_ids(sign) for sign in UNSAFE], 1] = 1.0
        attention.v_proj.weight[0, 1] = 1.0
        attention.o_proj.weight[2, 0] = 1.0
        model.score.weight[1, 2] = 1e4
        model.score.weight[1, 0] = -20.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _save_random_llama(folder: Path, tokenizer: "PreTrainedTokenizerFast", seed: int, silent: list[int]) -> None:
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_config(tokenizer, hidden_size=128, layers=2))
        # A logit of 0 is never the highest of hundreds of random ones.
        model.lm_head.weight[silent] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(tokenizer: "PreTrainedTokenizerFast", *, hidden_size: int, layers: int, **more: Any) -> "LlamaConfig":
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=8192,
        # With the default standard deviation of 0.02 answers would depend almost only on the last token.
        initializer_range=0.2,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        **more,
    )


def _tokenizer(corpus: tuple[str, ...], vocabulary: int) -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} tokens instead of {vocabulary}; lengthen it")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, pad_token=_END, chat_template=_CHAT_TEMPLATE
    )


_save_thinker = partial(_save_writer, corpus=_THOUGHTS, vocabulary=384, seed=0)
_save_refiner = partial(_save_writer, corpus=_DRAFTS, vocabulary=320, seed=1)
KINDS: Mapping[str, Mapping[str, Callable[[Path], None]]] = {
    "prefill_decode": {"model": _save_thinker},
    "refiner": {"thinker": _save_thinker, "refiner": _save_refiner},
    "guarded": {"generator": _save_thinker, "guard": _save_guard},
    "speech": {"thinker": _save_thinker, "talker": _save_talker},
}
"""Functions that make the models, by names of example and model."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make_models(arguments.kind, arguments.folder)
